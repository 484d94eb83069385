"""The number of keys of a split, chosen from a tile, the key heads and the slots of a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

LENGTHS = (32_768, 49_152, 65_536, 98_304, 131_072)
"""Numbers of keys of one sequence for which the SMs are kept busy."""

LEAST_BUSY = 0.9
"""The least share of the time in which an SM has work, for each of `LENGTHS`."""

STEP = 16
"""A split is a multiple of the keys of one matrix product."""

SHORTER = 0.9
"""How much shorter than the longest that keeps SMs busy a split may be to fill its tiles better."""

_SIZES = range(4 * STEP, 1 << 14, STEP)


@dataclass(frozen=True)
class SplitPlan:
    """The splits of a call with one sequence and one query.

    Attributes:
        size: the keys of a split, a multiple of 16.
        block_k: keys of a tile; the last tile of a split is cut at its border.
        heads_kv: key heads, whose splits are work tiles each.
        slots: blocks that run at the same time.
    """

    size: int
    block_k: int
    heads_kv: int
    slots: int

    @property
    def waste(self) -> float:
        """The keys of the tiles of a split over the keys of the split."""
        return math.ceil(self.size / self.block_k) * self.block_k / self.size

    def busy(self, keys: int) -> float:
        """The share of the time in which slots have work, where keys take equal times.

        The last split may have few keys.
        """
        rounds = math.ceil(self.heads_kv * math.ceil(keys / self.size) / self.slots)
        return self.heads_kv * keys / (rounds * self.slots * self.size)

    def __str__(self) -> str:
        tiles = math.ceil(self.size / self.block_k)
        wanted = f"{self.slots} slots busy for {LEAST_BUSY:.0%} of the time"
        if min(map(self.busy, LENGTHS)) >= LEAST_BUSY:
            why = f"about the most that keeps {wanted}"
        else:
            why = f"none keeps {wanted}, and this one comes nearest"
        lines = [f"split_size = {self.size:,} keys, {tiles} tiles of {self.block_k}: {why}"]
        for keys in LENGTHS:
            tiles = self.heads_kv * math.ceil(keys / self.size)
            lines.append(
                f"  {keys:>9,} keys   work_tiles = {self.heads_kv}*ceil({keys}/{self.size}) = "
                f"{tiles:,}   busy = {self.busy(keys):.1%}"
            )
        return "\n".join(lines)


def choose_split(block_k: int, heads_kv: int, slots: int) -> SplitPlan:
    """The splits of a call with a paged cache that gives no split_size.

    Args:
        block_k: keys of a tile.
        heads_kv: key heads.
        slots: thread blocks that run at the same time.
    """
    all_sizes = [SplitPlan(size, block_k, heads_kv, slots) for size in _SIZES]
    least_busy = {each: min(map(each.busy, LENGTHS)) for each in all_sizes}
    busy = [each for each in all_sizes if least_busy[each] >= LEAST_BUSY]
    if not busy:  # so many SMs that no split suffices
        return max(all_sizes, key=lambda each: least_busy[each])
    long = [each for each in busy if each.size >= SHORTER * busy[-1].size]
    return min(long, key=lambda each: (each.waste, -each.size))
