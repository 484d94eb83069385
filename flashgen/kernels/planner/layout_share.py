"""The share of scores that tiles gathered from live blocks of a layout compute.

A tile has rows of several blocks, and computes the keys that any of them keeps: the fewer rows, the
fewer scores. A tile of keys computes the queries that keep any of them. The share is that of
`positions_of` queries and keys, for the layout's function or, where calls give the layout, for
random blocks.
"""

from __future__ import annotations

import contextlib
import functools
import random

from flashgen.shared.errors import SpecError
from flashgen.spec.language.block_layout import BlockSparse

# Chosen: long enough for the share of a window or of a diagonal to be small.
POSITIONS = 8192
# Chosen: the most rows and columns of blocks. The layout's function is called for each block.
BLOCKS = 512
# Assumed: the share of live blocks where each call gives the layout.
LIVE_SHARE = 1 / 8


def positions_of(sparse: BlockSparse) -> int:
    """Queries, and keys, for which layouts are compared: `POSITIONS`, of small blocks fewer."""
    return min(POSITIONS, BLOCKS * min(sparse.block_q, sparse.block_k))


def grid_of(sparse: BlockSparse) -> tuple[int, int]:
    """Rows and columns of blocks of these positions."""
    positions = positions_of(sparse)
    return sparse.blocks(positions, positions)


@functools.lru_cache(maxsize=256)
def share_of_scores(sparse: BlockSparse, owned: int, *, by_keys: bool = False) -> float:
    """The share of all scores that tiles of so many queries compute, or ``by_keys`` of keys."""
    positions = positions_of(sparse)
    rows, columns = grid_of(sparse)
    table, block = live_blocks(sparse), sparse.block_q
    if by_keys:
        table, block = b"".join(table[j::columns] for j in range(columns)), sparse.block_k
        rows, columns = columns, rows
    lines = [int.from_bytes(table[i * columns : (i + 1) * columns], "big") for i in range(rows)]
    tiles, found = range(0, positions, owned), 0
    for first in tiles:
        last = min((first + owned - 1) // block, rows - 1)
        live = 0
        for line in lines[first // block : last + 1]:
            live |= line
        found += live.bit_count()
    return found / (len(tiles) * columns)


@functools.lru_cache(maxsize=64)
def live_blocks(sparse: BlockSparse) -> bytes:
    """A byte for each block of these positions, row by row; of the first head.

    A function may be of the blocks of its calls alone, such as one that reads a table. Where it
    fails for others, the blocks are those of a layout that calls give.
    """
    rows, columns = grid_of(sparse)
    if sparse.is_static:
        with contextlib.suppress(SpecError):
            return sparse.table(1, 1, rows, columns)
    draw = random.Random(0)
    return bytes(draw.random() < LIVE_SHARE for _ in range(rows * columns))
