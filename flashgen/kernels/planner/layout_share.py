"""The share of scores that tiles gathered from live blocks of a layout compute.

A tile has rows of several blocks, and computes the keys that any of them keeps: the fewer rows, the
fewer scores. The share is that of `POSITIONS` queries and keys, for the layout's function or, where
calls give the layout, for random blocks.
"""

from __future__ import annotations

import functools
import random

from flashgen.spec.language.block_layout import BlockSparse

# Chosen: long enough for the share of a window or of a diagonal to be small.
POSITIONS = 8192
# Assumed: the share of live blocks where each call gives the layout.
LIVE_SHARE = 1 / 8


@functools.lru_cache(maxsize=256)
def share_of_scores(sparse: BlockSparse, queries: int) -> float:
    """The share of all scores that tiles of so many queries compute."""
    rows, columns = sparse.blocks(POSITIONS, POSITIONS)
    table = live_blocks(sparse)
    lines = [int.from_bytes(table[i * columns : (i + 1) * columns], "big") for i in range(rows)]
    tiles, found = range(0, POSITIONS, queries), 0
    for first in tiles:
        last = min((first + queries - 1) // sparse.block_q, rows - 1)
        live = 0
        for line in lines[first // sparse.block_q : last + 1]:
            live |= line
        found += live.bit_count()
    return found / (len(tiles) * columns)


@functools.lru_cache(maxsize=64)
def live_blocks(sparse: BlockSparse) -> bytes:
    """A byte for each block of these positions, row by row; of the first head."""
    rows, columns = sparse.blocks(POSITIONS, POSITIONS)
    if sparse.is_static:
        return sparse.table(1, 1, rows, columns)
    draw = random.Random(0)
    return bytes(draw.random() < LIVE_SHARE for _ in range(rows * columns))
