"""The lists of a block-sparse layout, as a kernel finds the next tile in them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from flashgen.tiled.walk import Axis

Array = np.ndarray[Any, np.dtype[Any]]


class Lists:
    """The live blocks of one head, listed for each line of blocks of the side that blocks own.

    Args:
        live: bool [lines, places]: rows and columns of blocks where blocks own queries, columns and
            rows where they own keys.
        owned_block, walked_block: positions of a block along the two sides.
    """

    def __init__(self, live: Array, owned_block: int, walked_block: int) -> None:
        self.live = live
        self.owned_block = owned_block
        self.walked_block = walked_block
        # How many places before each are live, and of all of them.
        self._before = np.cumsum(np.pad(live, ((0, 0), (1, 0))), axis=1)

    def lines(self, owned: Axis, start: int, stop: int) -> Array:
        """Those that the owned positions touch, the nearest ones for positions outside."""
        return _blocks(owned, start, stop, self.owned_block, self.live.shape[0])

    def places(self, walked: Axis, start: int, stop: int) -> Array:
        """The same along the other side."""
        return _blocks(walked, start, stop, self.walked_block, self.live.shape[1])

    def listed(self, owned: Axis, start: int, stop: int, walked: Axis) -> Array:
        """Of each tile along the other side, whether some line has a live block in it: bool.

        Positions of the last tile that are past the end of the sequence count too: a list has them.
        """
        before = self._before[self.lines(owned, start, stop)]
        starts = walked.offset + np.arange(0, walked.length, walked.block)
        firsts, ends = self._place(starts), self._place(starts + walked.block - 1) + 1
        counts = before[:, np.minimum(ends, self.live.shape[1])] - before[:, firsts]
        found: Array = counts.any(axis=0)
        return found

    def _place(self, positions: Array) -> Array:
        """The blocks that hold the positions; the number of all for those past the last."""
        found: Array = np.clip(positions // self.walked_block, 0, self.live.shape[1])
        return found

    def read(self, owned: Axis, start: int, stop: int, walked: Axis, tile: int) -> tuple[int, int]:
        """How many counts, and how many entries of lists, a warp reads to find the next tile."""
        before = self._before[self.lines(owned, start, stop)]
        place = int(self._place(np.array(walked.offset + tile * walked.block)))
        entries = 0
        for low, count in zip(before[:, place].tolist(), before[:, -1].tolist(), strict=True):
            entries += probes(count, low) + (low < count)
        return len(before), entries


def _blocks(axis: Axis, start: int, stop: int, block: int, count: int) -> Array:
    first, last = (max(end // block, 0) for end in (start + axis.offset, stop - 1 + axis.offset))
    return np.minimum(np.arange(first, last + 1), count - 1)


@functools.lru_cache(maxsize=1 << 16)
def probes(count: int, found: int) -> int:
    """Entries that a search in halves looks at until it knows the first so many to be less."""
    low, high, looked = 0, count, 0
    while low < high:
        middle = (low + high) // 2
        looked += 1
        if middle < found:
            low = middle + 1
        else:
            high = middle
    return looked
