"""The keys of a split in calls with a paged cache: as many as keep the SMs busy.

Few queries over many keys make few work tiles, which are divided into splits of the keys. Long
splits write few partial results; short ones divide the work evenly. The choice depends on the spec,
the architecture, its SMs and the number of key heads alone. It cannot depend on the batch or on
lengths, because the bits of a row, and a CUDA graph, depend on it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from flashgen.arch import facts
from flashgen.language.signature import split
from flashgen.language.spec import AttentionSpec
from flashgen.planner.api import plan_forward
from flashgen.planner.requests import PlanRequest

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


def plan_splits(
    spec: AttentionSpec, arch: str, heads_kv: int, *, sms: int | None = None
) -> SplitPlan:
    """The split_size of calls of a spec with a paged cache that give none.

    Args:
        spec: a spec with ``paged=True``.
        arch: the architecture, as in `flashgen.plan`.
        heads_kv: the key heads of the caches, 1 or more.
        sms: SMs of the GPU; None for those of the product that the architecture's facts name.

    Raises:
        PlanError: the architecture is unknown, or no tile fits.
    """
    return _plan_splits(spec, arch, max(heads_kv, 1), sms or facts(arch).sms)


@functools.lru_cache(maxsize=1024)
def _plan_splits(spec: AttentionSpec, arch: str, heads_kv: int, sms: int) -> SplitPlan:
    plan = plan_forward(PlanRequest(split(spec), arch))
    slots = sms * plan.blocks_per_sm
    all_sizes = [SplitPlan(size, plan.block_k, heads_kv, slots) for size in _SIZES]
    least_busy = {each: min(map(each.busy, LENGTHS)) for each in all_sizes}
    busy = [each for each in all_sizes if least_busy[each] >= LEAST_BUSY]
    if not busy:  # so many SMs that no split suffices
        return max(all_sizes, key=lambda each: least_busy[each])
    long = [each for each in busy if each.size >= SHORTER * busy[-1].size]
    return min(long, key=lambda each: (each.waste, -each.size))
