"""The number of keys of a split, chosen from a tile, the key heads and the SMs of a GPU.

Long splits leave SMs idle where a call has few keys, or in the last round; short ones have larger
parts, more steps that nothing overlaps, and a longer merge. The size is chosen with which calls of
a few stated loads take the least predicted time over the HBM bound. It depends on no call, because
the bits of a row, and a CUDA graph, depend on it. Batch-invariant calls, which split the keys of
training and of every prefill, have the size with which both take the least time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashgen.shared.arch import facts
from flashgen.shared.call import CheckedCall
from flashgen.shared.launch_facts import DecodingTile, LaunchRules


class Load(NamedTuple):
    """Sequences of one length, with one query each."""

    batch: int
    keys: int


LOADS = (
    *(Load(1, keys) for keys in (8_192, 16_384, 32_768, 65_536, 131_072)),
    Load(8, 8_192),
    Load(64, 4_096),
)
"""The calls whose times decide."""

LOADS_OF_ONE = LOADS[2:]
"""The same where values are columns of the keys: one key head of a short sequence has the bytes of
a few microseconds, whatever its splits."""

GROUP = 4
"""Query heads for each key head in these calls. The choice cannot depend on the call, and 4 is the
group of many models; fewer have fewer bytes beside the keys."""

GROUP_OF_ONE = 64
"""The same where values are columns of the keys: 16 to 128 heads share one key head in models with
latent attention. Their parts have the bytes of hundreds of keys."""

HEADS_KV = 8
"""Key heads for which batch-invariant calls have their splits: those of many models. The number in
a call is less where ranks share the heads."""

HEADS_KV_OF_ONE = 1
"""The same where values are columns of the keys: ranks share the query heads of one key head."""

MOST_BYTES_OF_CODES = 1.06
"""The bytes of a call over those of its codes, at most. Where a GPU has many slots, as for tiles of
codes, the predicted time of few work tiles is too long, and would ask for very short splits."""

OF_PAGE = 12
"""Bytes of the number of a page of codes and of its scales."""

PAGE = 16
"""Keys of a page for which they are counted: those of many servers."""

_FLOAT = 4

STEP = 16
"""A split is a multiple of the keys of one matrix product, and of those of a tile, so that no score
behind its border is computed. It has two tiles at least, so that one is loaded during another."""

MERGE_WARPS_OF_SM = 20
"""Warps of the kernel that merges parts, which an SM holds at the same time."""

SPLITS_OF_GROUP = 8
"""Neighbouring splits whose results are joined in pairs, and these in pairs, before those of groups
are added up in order: a thread block may have any aligned power of two of them, the bits are the
same. A longer group would have more of its results set aside at the same time."""

RUNS = tuple(1 << level for level in range(SPLITS_OF_GROUP.bit_length()))
"""Splits that a thread block may have of its rows, of which it writes a part: up to a group."""

ALL_SPLITS = 0
"""The run of a block that has all splits of its rows, and writes the result."""

PARTS_IN_FLIGHT = 32
"""Parts of which each lane of that kernel, whose blocks are warps, has an element in flight."""

_MOST_KEYS = 1 << 13


class PredictedLoad(NamedTuple):
    """The predicted time of a load, each over the time in which K, V, q and out move once.

    Attributes:
        work_tiles, rounds: of the forward kernel.
        moved: the bytes of the forward kernel.
        idle: what its rounds take beyond that: the last one, and steps that nothing overlaps.
        merge: the kernel that merges the parts.
    """

    work_tiles: int
    rounds: int
    moved: float
    idle: float
    merge: float

    @property
    def over_bound(self) -> float:
        """The time of both launches."""
        return self.moved + self.idle + self.merge


def early_parts(arch: str) -> int:
    """Parts that all blocks of a merge may load beside the LSE, which tell what they need.

    Those without keys are loaded in vain. Up to this number they take global memory no longer than
    the wait for the LSE that is saved.
    """
    gpu = facts(arch)
    return int(gpu.memory_latency * gpu.hbm_bytes_per_s / gpu.clock_hz / (32 * _FLOAT))


def waits_of_merge(arch: str, blocks: int, splits: int) -> int:
    """Loads of a merge of which each needs the one before: of LSE and, unless early, of O.

    Args:
        blocks: those of the launch.
        splits: the parts of a row.
    """
    return 1 if blocks * min(splits, PARTS_IN_FLIGHT) <= early_parts(arch) else 2


@dataclass(frozen=True)
class SplitPlan:
    """The splits of a call with one sequence and one query.

    Attributes:
        size: the keys of a split, a multiple of `block_k` and of 16.
        few_rows: query rows of a key head that one work tile, or two, compute.
        block_k: keys of a tile.
        heads_kv: key heads, whose splits are work tiles each.
        sms: SMs of the GPU.
        arch: the architecture, whose product's rates are those of each SM.
        tile: the tile of calls with few rows.
        group: query heads of a key head for which times are compared.
        row_bytes: bytes of a row of q and of a row of out.
        columns: columns of O.
    """

    size: int
    few_rows: int
    block_k: int
    heads_kv: int
    sms: int
    arch: str
    tile: DecodingTile
    group: int
    row_bytes: tuple[int, int]
    columns: int

    def size_of(self, call: CheckedCall, *, paged: bool) -> int:
        """The split_size of a call that gives none; 0: its keys are not split.

        With contiguous keys, a call has few query rows if those of all heads that share a key head
        fit in one tile, and are not more than the keys of a split: one thread block would have all
        keys of a key head. Two tiles are few where values are columns of the keys: 128 heads share
        these, and a tile has 64 rows. Keys of one split are not divided. With pages the keys of
        every call are split, because a row has the same bits in all of them. The batch decides in
        neither case.
        """
        few = call.query_rows <= min(self.few_rows, self.size) and call.seq_k > self.size
        return self.size if paged or few else 0

    @property
    def loads(self) -> tuple[Load, ...]:
        """The calls whose times decide."""
        return LOADS if self.group == GROUP else LOADS_OF_ONE

    @property
    def mean(self) -> float:
        """The geometric mean of the times of `loads` over the HBM bound.

        A load weighs as much as another one whose time changes by the same factor.
        """
        times = [self.predicted(load).over_bound for load in self.loads]
        return math.prod(times) ** (1 / len(times))

    @property
    def bytes_of_codes(self) -> float:
        """The bytes of a call over those of its keys and values: queries are read in each split,
        parts are written and read, and so are the numbers and scales of pages."""
        of_q, _ = self.row_bytes
        of_split = self.group * (of_q + 2 * _FLOAT * (self.columns + 1))
        return 1 + (of_split / self.size + OF_PAGE / PAGE) / self.tile.key_bytes

    @property
    def of_prefill(self) -> float:
        """The time of a prefill over that with the cheapest tile and without splits.

        In each split of a block nothing overlaps one step, Q is read again, and the O of the splits
        before is written and read.
        """
        tile, (of_q, _) = self.tile, self.row_bytes
        moved = (of_q + 2 * _FLOAT * self.columns) / facts(self.arch).l2_bytes_per_clock
        return tile.cost / tile.least_cost * (1 + (self.block_k + moved / tile.cost) / self.size)

    def predicted(self, load: Load) -> PredictedLoad:
        """The predicted time of a load, by the formulas of `flashgen.kernels.planner.duration`.

        Splits have equal times here, whatever their keys.
        """
        gpu, tile = facts(self.arch), self.tile
        batch, keys = load
        hbm_rate = gpu.hbm_bytes_per_s / (gpu.sms * gpu.clock_hz) * self.sms
        of_q, of_out = self.row_bytes
        of_part, heads = _FLOAT * (self.columns + 1), batch * self.heads_kv
        rows, splits = heads * self.group, math.ceil(keys / self.size)
        moved = heads * keys * tile.key_bytes + rows * (of_q + splits * of_part)

        work_tiles = heads * splits * math.ceil(self.group / tile.rows)
        slots = self.sms * tile.blocks
        rounds = math.ceil(work_tiles / slots)
        of_edges = min(self.group, tile.rows) * (of_q + _FLOAT * self.columns)
        longest = min(self.size, keys)
        of_tile = tile.clocks * (longest + self.block_k) + of_edges / gpu.l2_bytes_per_clock
        hbm = moved / hbm_rate
        full_rounds = hbm * (rounds - 1) * slots / work_tiles
        forward = max(rounds * of_tile * keys / (splits * longest), hbm, full_rounds + of_tile)

        warps = math.ceil(self.columns / 32)
        blocks = rows * warps
        resident = min(MERGE_WARPS_OF_SM, math.ceil(blocks / self.sms))
        of_row = splits * of_part + of_out + _FLOAT
        of_block, latency = of_row / warps, gpu.memory_latency
        from_l2 = latency + of_block * resident / gpu.l2_bytes_per_clock
        in_turn = latency * of_block / (32 * _FLOAT * PARTS_IN_FLIGHT)
        waits = waits_of_merge(self.arch, blocks, splits) - 1
        of_block = waits * latency + max(from_l2, in_turn)
        rounds_of_merge = math.ceil(blocks / (self.sms * MERGE_WARPS_OF_SM))
        merge = max(rounds_of_merge * of_block, rows * of_row / hbm_rate)

        bound = (heads * keys * tile.key_bytes + rows * (of_q + of_out)) / hbm_rate
        return PredictedLoad(
            *(work_tiles, rounds, hbm / bound, (forward - hbm) / bound),
            merge=merge / bound if splits > 1 else 0.0,
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        tiles, slots = self.size // self.block_k, self.sms * self.tile.blocks
        yield (
            f"split_size = {self.size:,} keys, {tiles} tiles of {self.block_k}: these calls take "
            f"the least time, in their geometric mean {self.mean:.3f}"
        )
        yield (
            f"  of {self.group} heads for each of {self.heads_kv} key heads, {slots} slots; "
            "over the HBM bound = bytes + idle + merge"
        )
        for load in self.loads:
            found = self.predicted(load)
            yield (
                f"  {load.batch:>4} x {load.keys:>7,} keys   {found.work_tiles:>5,} tiles, "
                f"{found.work_tiles / slots:6.2f} of {found.rounds:>2} rounds   "
                f"{found.over_bound:.3f} = {found.moved:.3f} + {found.idle:.3f} + {found.merge:.3f}"
            )
        yield f"  a prefill over one without splits, in its best tile: {self.of_prefill:.3f}"


def choose_split(
    kernel: LaunchRules, heads_kv: int, sms: int, *, invariant: bool = False
) -> SplitPlan:
    """The splits of a call that gives no split_size.

    Args:
        kernel: the plan or the facts of the forward kernel with split keys or pages, with one query
            head in a tile.
        heads_kv: key heads.
        sms: SMs of the GPU.
        invariant: whether a prefill decides as much as `LOADS`: that of training, for the splits
            of batch-invariant calls.
    """
    assert kernel.decoding is not None, "a kernel of calls that are served"
    e, step = kernel.itemsize, math.lcm(STEP, kernel.block_k)
    plan = SplitPlan(
        size=2 * step,
        few_rows=kernel.block_q * (2 if kernel.one_tensor else 1),
        block_k=kernel.block_k,
        heads_kv=heads_kv,
        sms=sms,
        arch=kernel.arch,
        tile=kernel.decoding,
        group=usual_group(one_tensor=kernel.one_tensor),
        row_bytes=(e * kernel.head_dim, e * kernel.head_dim_v),
        columns=kernel.head_dim_v,
    )
    sizes = range(2 * step, max(_MOST_KEYS, 2 * step) + 1, step)
    plans = [replace(plan, size=size) for size in sizes]
    own_columns = kernel.head_dim + (0 if kernel.one_tensor else kernel.head_dim_v)
    if plan.tile.key_bytes < e * own_columns:  # codes
        plans = [each for each in plans if each.bytes_of_codes <= MOST_BYTES_OF_CODES] or plans
    return min(plans, key=lambda each: each.mean * (each.of_prefill if invariant else 1))


def usual_group(*, one_tensor: bool) -> int:
    """The query heads of a key head for which splits are chosen."""
    return GROUP_OF_ONE if one_tensor else GROUP


def usual_heads_kv(*, one_tensor: bool) -> int:
    """The key heads for which batch-invariant calls have their splits."""
    return HEADS_KV_OF_ONE if one_tensor else HEADS_KV
