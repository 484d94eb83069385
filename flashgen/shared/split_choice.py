"""The number of keys of a split, chosen from a tile, the key heads and the SMs of a GPU, and the
predicted time of calls with split keys, for runs of splits in a block.

Long splits leave SMs idle where a call has few keys, or in the last round; short ones have larger
parts, more steps that nothing overlaps, and a longer merge. The size is chosen with which calls of
a few stated loads take the least predicted time over the HBM bound. It depends on no call, because
the bits of a row, and a CUDA graph, depend on it. Batch-invariant calls, which split the keys of
training and of every prefill, have the size with which both take the least time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashgen.shared.arch import facts
from flashgen.shared.call import CheckedCall
from flashgen.shared.launch_facts import DecodingTile, LaunchRules


class Load(NamedTuple):
    """Sequences of one length, with one query each, and the query heads of a key head."""

    batch: int
    keys: int
    group: int = 4


LOADS = tuple(
    Load(batch, keys + more)
    for batch, keys in (
        *((1, 1 << exponent) for exponent in range(13, 18)),
        (8, 8_192),
        (64, 4_096),
    )
    for more in (0, keys // 2)
)
"""The calls whose times decide. The choice cannot depend on the call; 4 is the group of many
models, and fewer heads have fewer bytes beside the keys."""

LONG_LOADS = tuple(load for load in LOADS if load.batch * load.keys >= 1 << 15)
"""The loads where a position of the cache has few bytes: one short sequence takes a few
microseconds, whatever its splits."""

LOADS_OF_ONE = tuple(load._replace(group=group) for group in (16, 64, 128) for load in LONG_LOADS)
"""The loads where values are columns of the keys: 16 to 128 heads share one key head in models with
latent attention."""

GROUP_OF_ONE = 64
"""The middle group of `LOADS_OF_ONE`, for which the tile of calls with few rows is planned."""

HEADS_KV = 8
"""Key heads for which batch-invariant calls have their splits: many models have so many. The number
in a call is less where ranks share the heads."""

HEADS_KV_OF_ONE = 1
"""`HEADS_KV` where values are columns of the keys: ranks share the query heads of one key head."""

_FLOAT = 4

STEP = 16
"""A split is a multiple of the keys of a matrix product and of the keys of a tile, so that no score
behind its border is computed. It has two tiles at least, so that one is loaded during another."""

MERGE_WARPS_OF_SM = 20
"""Warps of the kernel that merges parts, which an SM holds at the same time."""

SPLITS_OF_GROUP = 8
"""Neighbouring splits whose results are joined in pairs, and these in pairs, before the results of
groups are added up in order: with any aligned power of two of them in a thread block, the bits are
the same. A longer group would set more of its results aside at the same time."""

RUNS = tuple(1 << level for level in range(SPLITS_OF_GROUP.bit_length()))
"""Splits of its rows that a thread block may have where it writes a part: up to a group."""

ALL_SPLITS = 0
"""The run of a block that has all splits of its rows, and writes the result."""

AS_FAST = 1.02
"""Predicted times that are about the same, in ratio: fewer parts take less memory then."""

PARTS_IN_FLIGHT = 32
"""Parts whose elements a lane of the merging kernel loads at once; its blocks are warps."""

_MOST_KEYS = 1 << 13

Numbers = NDArray[Any]


class SplitCall(NamedTuple):
    """The sizes of a call with split keys on which its predicted time depends, or of several calls.

    Attributes:
        keys: keys of a sequence.
        key_heads: key heads of all sequences.
        rows: query rows of all heads.
        tiles: work tiles of one split.
        uneven: whether blocks have less and less work, so that the short ones fill the last round.
    """

    keys: int | Numbers
    key_heads: int | Numbers
    rows: int | Numbers
    tiles: int | Numbers
    uneven: bool = False


class PredictedCall(NamedTuple):
    """The predicted times of a call for splits of several sizes, in clocks.

    Attributes:
        work_tiles, rounds: of the forward kernel.
        forward, merge: the times of both launches.
        hbm: the time of the forward kernel, if global memory alone decided.
    """

    work_tiles: Numbers
    rounds: Numbers
    forward: Numbers
    merge: Numbers
    hbm: Numbers

    @property
    def time(self) -> Numbers:
        """The time of both launches."""
        return self.forward + self.merge


def times_of_runs(
    rules: LaunchRules,
    tile: DecodingTile,
    sms: int,
    sizes: tuple[int, int, int, int],
    splits: int,
    size: int,
    *,
    packed: bool,
    by_position: bool,
) -> Mapping[int, float]:
    """The predicted times of a call with runs of splits, in clocks, as if all its keys were kept.

    The last split counts as a whole one.

    Args:
        rules, tile: the kernel of the call, and its tile.
        sms: SMs of the GPU.
        sizes: batch, query heads, key heads and queries.
        splits, size: the splits of a sequence, and the keys of one.
        packed: as in `LaunchRules.grid`.
        by_position: whether the mask depends on the positions of queries and of keys.

    Returns:
        The times of `ALL_SPLITS` and of the runs that are shorter.
    """
    batch, heads_q, heads_kv, seq_q = sizes
    keys = splits * size
    call = SplitCall(
        keys=keys,
        key_heads=batch * heads_kv,
        rows=heads_q * seq_q * (1 if packed else batch),
        tiles=math.prod(rules.grid(*sizes, keys, packed=packed)),
        uneven=by_position and 2 * seq_q >= keys,
    )
    kernel = SplitKernel.from_rules(rules, tile, sms)
    runs = (ALL_SPLITS, *(run for run in RUNS if run == 1 or run < splits))
    times = {run: float(kernel.predicted(call, size, run).time) for run in runs}
    return MappingProxyType(times)


def fastest_run(times: Mapping[int, float]) -> int:
    """Of the runs that take about the least of these times, the one that writes the fewest parts.

    Args:
        times: by run, of `RUNS` and `ALL_SPLITS`; without any, a block has one split.
    """
    most = AS_FAST * min(times.values(), default=0)
    fast_runs = [run for run, time in times.items() if time <= most]
    return max(fast_runs, key=lambda run: run or math.inf, default=RUNS[0])


def early_parts(arch: str) -> int:
    """Parts that all blocks of a merge may load beside the LSE, which tell what they need.

    Parts without keys are loaded in vain. Up to this number of parts, global memory takes no longer
    than the wait for the LSE that is saved.
    """
    gpu = facts(arch)
    return int(gpu.memory_latency * gpu.hbm_bytes_per_s / gpu.clock_hz / (32 * _FLOAT))


def waits_of_merge(arch: str, blocks: int | Numbers, splits: int | Numbers) -> Numbers:
    """Loads of a merge that wait for each other: of LSE and, unless early, of O.

    Args:
        blocks: blocks of the launch.
        splits: the parts of a row.
    """
    return np.where(blocks * np.minimum(splits, PARTS_IN_FLIGHT) <= early_parts(arch), 1, 2)


@dataclass(frozen=True)
class SplitKernel:
    """The forward kernel of calls with split keys, and the time that its calls take.

    Attributes:
        arch: the architecture, whose product has the rates of each SM.
        sms: SMs of the GPU.
        tile: the tile of the calls.
        block_k: keys of a tile.
        row_bytes: bytes of a row of q and of a row of out.
        columns: columns of O.
    """

    arch: str
    sms: int
    tile: DecodingTile
    block_k: int
    row_bytes: tuple[int, int]
    columns: int

    @staticmethod
    def from_rules(kernel: LaunchRules, tile: DecodingTile, sms: int) -> SplitKernel:
        """The kernel of a plan, or of its facts, with the tile that calls have."""
        e = kernel.itemsize
        row_bytes = (e * kernel.head_dim, e * kernel.head_dim_v)
        return SplitKernel(kernel.arch, sms, tile, kernel.block_k, row_bytes, kernel.head_dim_v)

    @property
    def slots(self) -> int:
        """Blocks that the GPU runs at the same time."""
        return self.sms * len(self.tile.clocks)

    @property
    def _hbm_rate(self) -> float:
        gpu = facts(self.arch)
        return gpu.hbm_bytes_per_s / (gpu.sms * gpu.clock_hz) * self.sms

    def bound(self, call: SplitCall) -> float | Numbers:
        """The clocks in which K, V, q and out move once."""
        key_bytes = call.key_heads * call.keys * self.tile.key_bytes
        return (key_bytes + call.rows * sum(self.row_bytes)) / self._hbm_rate

    def predicted(self, call: SplitCall, size: int | Numbers, run: int | Numbers) -> PredictedCall:
        """The predicted time, by the formulas of `flashgen.kernels.planner.duration`.

        Splits have equal times here, whatever their keys. A block starts a split, for which nothing
        overlaps one step, and goes on with further ones after the `restarted` steps in which it
        sets the finished O aside and joins it.

        Args:
            call, size, run: one of each, or arrays, of the times of all their combinations.
            size: the keys of a split.
            run: the neighbouring splits of a block, of `RUNS` or `ALL_SPLITS`.
        """
        gpu, tile = facts(self.arch), self.tile
        q_bytes, out_bytes = self.row_bytes
        part_bytes = _FLOAT * (self.columns + 1)
        splits, writes_parts = np.ceil(call.keys / size), np.asarray(run) != ALL_SPLITS
        splits_of_block = np.where(writes_parts, run, splits)
        parts = np.ceil(splits / splits_of_block)
        results = np.where(writes_parts, parts * part_bytes, out_bytes)
        bytes_moved = call.key_heads * call.keys * tile.key_bytes + call.rows * (q_bytes + results)
        hbm: Numbers = bytes_moved / self._hbm_rate

        work_tiles = call.tiles * parts
        resident = np.minimum(len(tile.clocks), np.ceil(work_tiles / self.sms))
        slots = self.sms * resident
        clocks = np.take(tile.clocks, resident.astype(int) - 1)
        waves = work_tiles / slots
        rounds = np.ceil(waves)
        written = np.where(writes_parts, _FLOAT * self.columns, out_bytes)
        edge_bytes = call.rows / call.tiles * (q_bytes + written)
        longest = np.minimum(size * splits_of_block, call.keys)
        keys = longest + self.block_k * (1 + tile.restarted * (splits_of_block - 1))
        tile_clocks = clocks * keys + edge_bytes / gpu.l2_bytes_per_clock
        work_rounds = np.maximum(1, waves) if call.uneven else rounds
        work = work_rounds * tile_clocks * call.keys / (parts * longest)
        forward = np.maximum(np.maximum(work, hbm), hbm * (rounds - 1) / waves + tile_clocks)
        merge = np.where(writes_parts & (splits > 1), self._merge(call.rows, parts), 0)
        return PredictedCall(work_tiles, rounds, forward, merge, hbm)

    def _merge(self, rows: int | Numbers, parts: Numbers) -> Numbers:
        """The clocks in which the parts of so many rows are merged."""
        gpu = facts(self.arch)
        warps = math.ceil(self.columns / 32)
        blocks = rows * warps
        resident = np.minimum(MERGE_WARPS_OF_SM, np.ceil(blocks / self.sms))
        row_bytes = parts * _FLOAT * (self.columns + 1) + self.row_bytes[1] + _FLOAT
        warp_bytes, latency = row_bytes / warps, gpu.memory_latency
        from_l2 = latency + warp_bytes * resident / gpu.l2_bytes_per_clock
        in_turn = latency * warp_bytes / (32 * _FLOAT * PARTS_IN_FLIGHT)
        waits = waits_of_merge(self.arch, blocks, parts) - 1
        rounds = np.ceil(blocks / (self.sms * MERGE_WARPS_OF_SM))
        clocks = rounds * (waits * latency + np.maximum(from_l2, in_turn))
        merge: Numbers = np.maximum(clocks, rows * row_bytes / self._hbm_rate)
        return merge


@dataclass(frozen=True)
class SplitPlan:
    """The splits of calls that give no split_size.

    Attributes:
        size: the keys of a split, a multiple of `block_k` and of 16.
        few_rows: query rows of a key head that one work tile, or two, compute.
        heads_kv: key heads, whose splits are work tiles each.
        loads: the calls whose times decide.
        kernel: their kernel.
    """

    size: int
    few_rows: int
    heads_kv: int
    loads: tuple[Load, ...]
    kernel: SplitKernel

    def size_of(self, call: CheckedCall, *, paged: bool) -> int:
        """The split_size of a call that gives none; 0: its keys are not split.

        With contiguous keys, a call has few query rows if the rows of all heads that share a key
        head fit in one tile, and are not more than the keys of a split: one thread block would have
        all keys of a key head. Two tiles are few where values are columns of the keys: 128 heads
        share these, and a tile has 64 rows. Keys of one split are not divided. With pages the keys
        of every call are split, because a row has the same bits in all of them. The batch decides
        in neither case.
        """
        few = call.query_rows <= min(self.few_rows, self.size) and call.seq_k > self.size
        return self.size if paged or few else 0

    @property
    def mean(self) -> float:
        """The geometric mean of the times of `loads` over the HBM bound."""
        return float(mean_times(self, np.array(self.size)))

    @property
    def prefill_ratio(self) -> float:
        """The time of a prefill over that with the cheapest tile and without splits."""
        return float(_prefill_ratio(self.kernel, np.array(self.size)))

    def fastest(self, load: Load) -> tuple[int, PredictedCall]:
        """The `fastest_run` of a load, and its predicted time."""
        call = self.call_of(load)
        predictions = {
            run: self.kernel.predicted(call, self.size, run) for run in (ALL_SPLITS, *RUNS)
        }
        run = fastest_run({run: float(prediction.time) for run, prediction in predictions.items()})
        return run, predictions[run]

    def call_of(self, load: Load) -> SplitCall:
        """The sizes of a load."""
        heads = load.batch * self.heads_kv
        tiles = heads * math.ceil(load.group / self.kernel.tile.rows)
        return SplitCall(load.keys, heads, heads * load.group, tiles)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        tiles, slots = self.size // self.kernel.block_k, self.kernel.slots
        yield (
            f"split_size = {self.size:,} keys, {tiles} tiles of {self.kernel.block_k}: these calls "
            f"take the least time, in their geometric mean {self.mean:.3f}"
        )
        yield (
            f"  of {self.heads_kv} key heads, {slots} slots; time over the HBM bound = "
            "bytes + idle + merge; the splits in a block"
        )
        for load in self.loads:
            run, prediction = self.fastest(load)
            bound = self.kernel.bound(self.call_of(load))
            hbm, forward, merge = (
                float(clocks) / bound
                for clocks in (prediction.hbm, prediction.forward, prediction.merge)
            )
            yield (
                f"  {load.batch:>4} x {load.keys:>7,} keys for {load.group:>3} heads   "
                f"{int(prediction.work_tiles):>5,} tiles in {int(prediction.rounds):>2} rounds   "
                f"{forward + merge:.3f} = {hbm:.3f} + {forward - hbm:.3f} + {merge:.3f}   "
                f"{run or 'all':>3}"
            )
        yield f"  a prefill over one without splits, in its best tile: {self.prefill_ratio:.3f}"


def choose_split(
    kernel: LaunchRules, heads_kv: int, sms: int, *, invariant: bool = False
) -> SplitPlan:
    """The splits of a call that gives no split_size.

    Args:
        kernel: the plan or the facts of the forward kernel with split keys or pages, with one query
            head in a tile.
        heads_kv: key heads.
        sms: SMs of the GPU.
        invariant: whether a prefill, as in training, decides as much as `LOADS`, for the splits
            of batch-invariant calls.
    """
    assert kernel.decoding is not None, "a kernel of served calls"
    step = math.lcm(STEP, kernel.block_k)
    split_kernel = SplitKernel.from_rules(kernel, kernel.decoding, sms)
    # Where V is a tensor of its own.
    has_codes = split_kernel.tile.key_bytes < sum(split_kernel.row_bytes)
    plan = SplitPlan(
        size=2 * step,
        few_rows=kernel.block_q * (2 if kernel.one_tensor else 1),
        heads_kv=heads_kv,
        loads=LOADS_OF_ONE if kernel.one_tensor else LONG_LOADS if has_codes else LOADS,
        kernel=split_kernel,
    )
    sizes = np.arange(2 * step, max(_MOST_KEYS, 2 * step) + 1, step)
    times = mean_times(plan, sizes)
    if invariant:
        times = times * _prefill_ratio(split_kernel, sizes)
    return replace(plan, size=int(sizes[np.argmin(times)]))


def mean_times(plan: SplitPlan, sizes: Numbers) -> Numbers:
    """For splits of each size, the geometric mean of the times of the loads over the HBM bound.

    A load weighs as much as another one whose time changes by the same factor.
    """
    load_sizes = zip(*(plan.call_of(load)[:4] for load in plan.loads), strict=True)
    keys, key_heads, rows, tiles = (np.reshape(values, (-1, 1, 1)) for values in load_sizes)
    calls = SplitCall(keys, key_heads, rows, tiles)
    runs = np.reshape((ALL_SPLITS, *RUNS), (-1, 1))
    times = plan.kernel.predicted(calls, np.reshape(sizes, -1), runs).time
    logs = np.log(times.min(1, keepdims=True) / plan.kernel.bound(calls))
    # One load after another: numpy's own sum has an order that depends on the number of sizes.
    means: Numbers = np.exp(sum(logs) / len(plan.loads))
    return means.reshape(sizes.shape)


def _prefill_ratio(kernel: SplitKernel, sizes: Numbers) -> Numbers:
    """The time of a prefill over that with the cheapest tile and without splits.

    In each split of a block nothing overlaps one step, Q is read again, and the O of the splits
    before is written and read.
    """
    tile, (q_bytes, _) = kernel.tile, kernel.row_bytes
    l2_clocks = (q_bytes + 2 * _FLOAT * kernel.columns) / facts(kernel.arch).l2_bytes_per_clock
    return tile.cost / tile.least_cost * (1 + (kernel.block_k + l2_clocks / tile.cost) / sizes)


def usual_group(*, one_tensor: bool) -> int:
    """The query heads of a key head for which the tile of few rows is planned."""
    return GROUP_OF_ONE if one_tensor else LOADS[0].group


def usual_heads_kv(*, one_tensor: bool) -> int:
    """The key heads for which batch-invariant calls have their splits."""
    return HEADS_KV_OF_ONE if one_tensor else HEADS_KV
