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
from collections.abc import Iterable, Iterator

from flashgen.shared.errors import SpecError
from flashgen.spec.language.block_layout import BlockSparse

# Chosen: long enough for the share of a window or of a diagonal to be small.
POSITIONS = 8192
# Chosen: the most rows and columns of blocks. The layout's function is called for each block.
BLOCKS = 512
# Assumed: the share of live blocks where each call gives the layout.
LIVE_SHARE = 1 / 8
# Chosen: the most blocks that share their keys box by box, and the factor of the share of scores
# that this must save.
MOST_BLOCKS = 32
STRIDE_GAIN = 0.9


def positions_of(sparse: BlockSparse) -> int:
    """The number of queries, and of keys, for which layouts are compared: `POSITIONS`, or fewer for
    small blocks."""
    return min(POSITIONS, BLOCKS * min(sparse.block_q, sparse.block_k))


def grid_of(sparse: BlockSparse) -> tuple[int, int]:
    """Rows and columns of blocks of these positions."""
    positions = positions_of(sparse)
    return sparse.blocks(positions, positions)


@functools.lru_cache(maxsize=256)
def share_of_scores(sparse: BlockSparse, queries: int) -> float:
    """The share of all scores that tiles of so many queries compute."""
    rows, columns = grid_of(sparse)
    table = live_blocks(sparse)
    lines = [table[i * columns : (i + 1) * columns] for i in range(rows)]
    return _share(lines, sparse.block_q, _tiles(positions_of(sparse), queries, queries, 1))


@functools.lru_cache(maxsize=1024)
def share_of_queries(sparse: BlockSparse, keys: int, box: int, stride: int) -> float:
    """The share of all scores that tiles of so many keys compute, where each tile has every
    stride-th box of keys."""
    _, columns = grid_of(sparse)
    table = live_blocks(sparse)
    lines = [table[j::columns] for j in range(columns)]
    return _share(lines, sparse.block_k, _tiles(positions_of(sparse), keys, box, stride))


def best_stride(sparse: BlockSparse, keys: int, box: int) -> int:
    """The stride of least share, where the share is considerably less than with neighbouring boxes.

    Columns of blocks that are alike, such as columns that all queries keep, may stand at equal
    distances. Blocks that a call gives are not known.
    """
    if not sparse.is_static or box == keys:
        return 1
    shares = {n: share_of_queries(sparse, keys, box, n) for n in range(1, MOST_BLOCKS + 1)}
    if min(shares.values()) > STRIDE_GAIN * shares[1]:
        return 1
    return next(n for n, share in shares.items() if share < min(shares.values()) / STRIDE_GAIN)


def _tiles(positions: int, owned: int, box: int, stride: int) -> Iterator[list[tuple[int, int]]]:
    """The first and last positions of the boxes of each tile, as the kernel chooses them."""
    for tile in range(-(-positions // owned)):
        group, interleaved = tile - tile % stride, stride
        if (group + stride) * owned > positions:
            group, interleaved = tile, 1
        first = group * owned + tile % interleaved * box
        starts = range(first, first + interleaved * owned, interleaved * box)
        yield [(start, start + box - 1) for start in starts]


def _share(lines: list[bytes], block: int, tiles: Iterable[list[tuple[int, int]]]) -> float:
    """The mean share of blocks that are live in one of the lines that a tile touches."""
    words, last_line = [int.from_bytes(line, "big") for line in lines], len(lines) - 1
    shares = []
    for boxes in tiles:
        live = 0
        for first, last in boxes:
            for word in words[min(first // block, last_line) : min(last // block, last_line) + 1]:
                live |= word
        shares.append(live.bit_count() / len(lines[0]))
    return sum(shares) / len(shares)


@functools.lru_cache(maxsize=64)
def live_blocks(sparse: BlockSparse) -> bytes:
    """A byte for each block of these positions, row by row, for the first head.

    A function that reads a table may be defined for the blocks of its calls alone. Where it fails
    for others, the blocks are assumed as for a layout that calls give.
    """
    rows, columns = grid_of(sparse)
    if sparse.is_static:
        with contextlib.suppress(SpecError):
            return sparse.table(1, 1, rows, columns)
    draw = random.Random(0)
    return bytes(draw.random() < LIVE_SHARE for _ in range(rows * columns))
