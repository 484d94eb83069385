"""The lists of live blocks of a block-sparse layout, as a kernel searches them."""

from __future__ import annotations

import functools

import numpy as np

from flashgen.spec.analysis.tile_walk import Array, TileAxis


class ListedBlocks:
    """The live blocks of one head, listed for each line of blocks of the side that blocks own.

    Args:
        live: bool [lines, walked blocks]: the layout's rows and columns where thread blocks own
            queries, its columns and rows where they own keys.
        owned_block, walked_block: positions of a layout block along the two sides.
    """

    def __init__(self, live: Array, owned_block: int, walked_block: int) -> None:
        self.live = live
        self.owned_block = owned_block
        self.walked_block = walked_block
        # The number of live blocks before each block, and in the whole line.
        self._before = np.cumsum(np.pad(live, ((0, 0), (1, 0))), axis=1)

    def lines(self, owned: TileAxis, start: int, stop: int) -> Array:
        """The lines of the owned positions [start, stop), the nearest ones for those outside."""
        return _blocks(owned, start, stop, self.owned_block, self.live.shape[0])

    def lines_of_tile(self, owned: TileAxis, start: int, stop: int) -> Array:
        """The lines of an owned tile; where it consists of boxes, the lines of their ends."""
        pieces = owned.pieces(start, stop)
        if len(pieces) == 1:
            return self.lines(owned, start, stop)
        ends = [position for piece in pieces for position in piece]
        return np.concatenate([self.lines(owned, end, end + 1) for end in ends])

    def walked_blocks(self, walked: TileAxis, start: int, stop: int) -> Array:
        """The blocks of the walked positions [start, stop), the nearest ones for those outside."""
        return _blocks(walked, start, stop, self.walked_block, self.live.shape[1])

    def tiles(self, owned: TileAxis, start: int, stop: int, walked: TileAxis) -> Array:
        """Whether each walked tile has a live block in one of the lines: bool [tiles].

        Positions of the last tile past the end of the sequence count too: the lists have them.
        """
        before = self._before[self.lines_of_tile(owned, start, stop)]
        starts = walked.offset + np.arange(0, walked.length, walked.block)
        firsts, ends = self._block_of(starts), self._block_of(starts + walked.block - 1) + 1
        counts = before[:, np.minimum(ends, self.live.shape[1])] - before[:, firsts]
        live: Array = counts.any(axis=0)
        return live

    def _block_of(self, positions: Array) -> Array:
        """The block of each position; the number of blocks for positions past the last block."""
        blocks: Array = np.clip(positions // self.walked_block, 0, self.live.shape[1])
        return blocks

    def reads(
        self, owned: TileAxis, start: int, stop: int, walked: TileAxis, tile: int
    ) -> tuple[int, int]:
        """The counts and the list entries that a warp reads to find the next tile from ``tile``."""
        before = self._before[self.lines_of_tile(owned, start, stop)]
        block = int(self._block_of(np.array(walked.offset + tile * walked.block)))
        entries = 0
        for low, count in zip(before[:, block].tolist(), before[:, -1].tolist(), strict=True):
            entries += probes(count, low) + (low < count)
        return len(before), entries


def _blocks(axis: TileAxis, start: int, stop: int, block: int, count: int) -> Array:
    first, last = (max(end // block, 0) for end in (start + axis.offset, stop - 1 + axis.offset))
    return np.minimum(np.arange(first, last + 1), count - 1)


@functools.lru_cache(maxsize=1 << 16)
def probes(count: int, smaller: int) -> int:
    """Entries that a binary search reads in a list of ``count``, ``smaller`` of them smaller."""
    low, high, probed = 0, count, 0
    while low < high:
        middle = (low + high) // 2
        probed += 1
        if middle < smaller:
            low = middle + 1
        else:
            high = middle
    return probed
