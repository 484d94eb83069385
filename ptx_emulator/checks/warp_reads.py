"""When each warp of a block has last read bytes of global memory that several of them read."""

from __future__ import annotations

import numpy as np

from ptx_emulator.checks.block_order import BLOCK_SHIFT, LOW, block_of
from ptx_emulator.checks.clocks import CLOCK_SHIFT, WARP, room
from ptx_emulator.state.memory import Array, sparse_zeros

_MOST_BYTES = 128 << 20  # of clocks


class WarpReads:
    """When each warp of a block has last read a vector of device memory that several have read.

    A row of clocks is that of one vector; it belongs to the block that has last read it. Beyond
    `_MOST_BYTES` further vectors have none: their `row` is 0.
    """

    def __init__(self, count: int, warps: int) -> None:
        self.row = sparse_zeros(count, np.int32)
        self.rows = 1
        self.clocks, self.block = np.zeros((1, warps), np.int32), np.zeros(1, np.int64)

    def note(self, vectors: Array, stamps: Array) -> None:
        """Records reads of vectors (n,), with their stamps; one block reads each vector."""
        warps = self.clocks.shape[1]
        new = np.unique(vectors[self.row.take(vectors) == 0])
        new = new[: max(0, _MOST_BYTES // (4 * warps) - self.rows)]
        if len(new):
            self.row[new] = self.rows + np.arange(len(new))
            self.rows += len(new)
            self.clocks, self.block = room(self.rows, self.clocks, self.block)
        rows, blocks = self.row.take(vectors), block_of(stamps)
        self.clocks[rows[self.block[rows] != blocks]] = 0
        self.block[rows] = blocks
        warp = np.minimum(stamps & WARP, warps - 1)
        np.maximum.at(self.clocks, (rows, warp), (stamps & LOW) >> CLOCK_SHIFT)
        self.block[0] = -1

    def seen(self, vectors: Array, blocks: Array, seen: Array, warps: Array) -> Array:
        """Whether ``warps`` (n,) of ``blocks`` come after the reads of vectors (n,) by the blocks.

        ``seen``: the clocks (n, warps) that these warps come after.
        """
        rows = self.row.take(vectors)
        fine = self.clocks[rows] <= seen
        fine[np.arange(len(rows)), warps] = True
        return fine.all(axis=1) & (self.block[rows] == blocks + 1)  # type: ignore[no-any-return]

    def stamps(self, vector: int, block: int) -> list[int]:
        """The stamps of the reads of a vector by a block (its number plus one)."""
        row = self.row[vector]
        clocks = self.clocks[row].tolist() if self.block[row] == block else []
        reads = enumerate(clocks)
        return [block << BLOCK_SHIFT | c << CLOCK_SHIFT | warp for warp, c in reads if c]

    def refine(self, parts: int) -> None:
        """Splits each vector into this many."""
        some = np.flatnonzero(self.row)
        rows = self.row[some]
        fine = sparse_zeros(len(self.row) * parts, np.int32)
        fine[(some[:, None] * parts + np.arange(parts)).reshape(-1)] = 1 + np.arange(
            len(some) * parts
        )
        rows = np.concatenate([[0], np.repeat(rows, parts)])
        self.row, self.rows = fine, len(rows)
        self.clocks, self.block = self.clocks[rows], self.block[rows]
