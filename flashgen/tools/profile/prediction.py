"""A plan's predictions for a launch: bytes per tensor, multiply-adds, clocks and duration."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flashgen.calls.runtime.bind_arguments import blocks_of_call
from flashgen.kernels.codegen import walk_of_kernel
from flashgen.kernels.codegen.sparse import blocks_are_bits
from flashgen.kernels.pipeline import Build, analysed
from flashgen.kernels.planner import Plan, backward_traffic, forward_traffic
from flashgen.kernels.planner.duration import Duration, duration_of
from flashgen.kernels.planner.quantities import Number
from flashgen.kernels.planner.traffic import Traffic, computed_scores
from flashgen.kernels.visits.visited_tiles import KnownCall, heads_of, joined_walks, walks_of
from flashgen.shared.arch import WARP
from flashgen.shared.call import CheckedCall
from flashgen.shared.dtypes import OPERANDS
from flashgen.shared.launch_facts import CONVERT_KERNELS
from flashgen.shared.signature import field_stem, is_by_row
from flashgen.spec.analysis.mask import MaskAnalysis
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.profile.block_layout_traffic import bytes_of_layout
from flashgen.tools.profile.split_calls import SplitPrediction

COUNTER_BYTES = 4
RNG_BYTES = 16
"""Dropout's seed and offset, 8 bytes each."""

TERMS = ("tensor", "shared", "l2", "atomics", "special", "issue")
"""The terms of a plan's cost, quantities in clocks of one SM per score element."""


@dataclass(frozen=True)
class LaunchPrediction:
    """The predictions for one launch.

    Attributes:
        bytes: bytes of the lanes' loads and stores, by the names of the kernel's pointers.
        distinct: bytes, each counted once; None without a prediction.
        multiply_adds: multiply-adds of the tensor cores; None without a prediction.
        clocks: clocks of one SM, by the names of `TERMS`.
        duration: the duration of the launch; None without a prediction.
    """

    bytes: Mapping[str, int] = field(default_factory=dict)
    distinct: int | None = None
    multiply_adds: float | None = None
    clocks: Mapping[str, float] = field(default_factory=dict)
    duration: Duration | None = None


def predict(call: KnownCall, build: Build, dlse: bool) -> LaunchPrediction:
    """The predictions for a launch.

    There are none for the kernels of min/max tables, nor for packed sequences, whose tiles depend
    on the positions at which the sequences start.
    """
    (spec, problem, _), plan = call, build.plan
    if plan.kernel == "minmax_table" or spec.packed:
        return LaunchPrediction()
    mask = build.analysis.mask
    heads = heads_of(call, mask, plan)
    walks = joined_walks(heads, plan, problem)
    if plan.kernel == "forward":
        traffic = _sum(forward_traffic(plan, *x.sizes, x.visited, x.before) for x in walks)
        bytes_ = {name: getattr(traffic, name) for name in ("q", "k", "v", "o", "lse")}
        distinct = traffic.compulsory
    else:
        traffic = _sum(backward_traffic(plan, *x.sizes, x.visited, dlse=dlse) for x in walks)
        bytes_ = _backward_bytes(plan, traffic, dlse)
        distinct = None
    bytes_ |= (
        _sink_bytes(spec, mask, traffic)
        | _dropout_bytes(build, problem)
        | _counter_bytes(plan, problem)
    )
    if spec.block_sparse is not None and not plan.streams:
        by_rows = blocks_are_bits(spec, mask.expr, plan)
        bytes_ |= bytes_of_layout(plan, heads, by_rows=by_rows)
    if distinct is not None and "rng" in bytes_:
        distinct += RNG_BYTES
    shared = spec.sink is not None or problem.heads_q != problem.heads_kv
    if spec.block_sparse is not None or (len(walks) > 1 and shared):
        distinct = None
    scores = sum(computed_scores(plan, walk) for walk in walks)
    return LaunchPrediction(
        bytes=bytes_,
        distinct=distinct,
        multiply_adds=multiply_adds_of(plan, scores),
        clocks=_clocks(plan, traffic.scores, scores),
        duration=None if plan.is_for_learned else duration_of(plan, walks, uneven=mask.growth != 0),
    )


def predict_launch_of_splits(build: Build, prediction: SplitPrediction | None) -> LaunchPrediction:
    """The predictions for a launch of a call with split keys or a paged cache.

    Args:
        prediction: the predictions for the call; None without any.
    """
    plan = build.plan
    if prediction is None or plan.kernel == "minmax_table":
        return LaunchPrediction()
    if plan.kernel == "merge":
        return LaunchPrediction(
            prediction.traffic.merge_bytes_by_pointer(), duration=prediction.merge
        )
    bytes_ = prediction.traffic.forward_bytes_by_pointer()
    if prediction.blocks is not None and prediction.blocks.persistent:
        bytes_["tile_counter"] = COUNTER_BYTES * prediction.blocks.work_tiles
    return LaunchPrediction(
        bytes=bytes_,
        multiply_adds=multiply_adds_of(plan, prediction.scores),
        clocks=_clocks(plan, prediction.visited, prediction.scores),
        duration=prediction.forward,
    )


def expected_multiply_adds(call: KnownCall, plans: Sequence[Plan]) -> Number:
    """The multiply-adds of all launches of a call; 0 for packed sequences, as for `predict`."""
    total: Number = 0
    for plan in () if call.spec.packed else plans:
        mask = analysed(call.spec, walk_of_kernel(plan.kernel)).mask
        scores = sum(computed_scores(plan, walk) for walk in walks_of(call, mask, plan))
        total += multiply_adds_of(plan, scores) or 0
    return total


def multiply_adds_of(plan: Plan, scores: Number) -> Number | None:
    """Multiply-adds of the tensor cores for score elements; None without a prediction."""
    quantities = plan.quantities
    # Of Q K^T, an instruction may multiply more columns at once than the head dim divides into.
    forward = quantities.get("depth", plan.head_dim) + plan.head_dim_v
    macs = forward if plan.kernel == "forward" else quantities.get("macs")
    return None if macs is None else OPERANDS[plan.dtype].products * macs * scores


def _clocks(plan: Plan, visited: int, computed: int) -> dict[str, float]:
    """Clocks of one SM by `TERMS`. K and V of a tile are copied for all rows, whoever computes."""
    quantities = plan.quantities
    scores = dict.fromkeys(TERMS, computed) | {"l2": visited}
    return {term: float(quantities[term]) * scores[term] for term in TERMS if term in quantities}


def _sink_bytes(spec: AttentionSpec, mask: MaskAnalysis, traffic: Traffic) -> dict[str, int]:
    """Bytes of a sink's logits and of its gradient's sums.

    {} where the mods read the sink too, and for a sink of rows, where lanes share sectors.
    """
    sink = spec.sink
    if (
        sink is None
        or is_by_row(sink.dims)
        or sink.symbol in spec.score.free_symbols | mask.expr.free_symbols
    ):
        return {}
    return {f"c_{field_stem(sink.name)}": traffic.sink, "sink_sums": traffic.dsink}


def _dropout_bytes(build: Build, p: CheckedCall) -> dict[str, int]:
    """Bytes of seed and offset, which every computing thread reads once, before its main loop.

    Kernels that own keys read them in each step; the compiler decides which parts of them, so that
    nothing is predicted.
    """
    plan = build.plan
    drops = any(param.name == "rng" for param in build.source.params)
    if not drops or plan.owns_keys:
        return {}
    x, y, z = plan.grid(*p.sizes)
    return {"rng": RNG_BYTES * WARP * plan.warps * x * y * z}


def _counter_bytes(plan: Plan, p: CheckedCall) -> dict[str, int]:
    """Bytes of the work-tile counter, which is incremented once for each work tile."""
    if not plan.is_persistent:
        return {}
    blocks = blocks_of_call(plan, p)
    return {"tile_counter": COUNTER_BYTES * blocks.work_tiles} if blocks.persistent else {}


def _sum(parts: Iterable[Traffic]) -> Traffic:
    return functools.reduce(operator.add, parts)


def _backward_bytes(plan: Plan, traffic: Traffic, dlse: bool) -> dict[str, int]:
    names = ["q", "k", "v", "o", "do", "dq", "dk", "dv", "lse_tangent"]
    names += [f"{name}_tangent" for name in "qkvo"]
    lse = traffic.lse // 2 if dlse else traffic.lse
    read = f"{CONVERT_KERNELS.get(plan.kernel, 'dq')}_sum"
    sums = {"dq_sum": traffic.sums_zeroed + traffic.added}
    sums |= {"dk_sum": traffic.dk_sums, "dv_sum": traffic.dv_sums}
    sums[read] += traffic.sums_read
    return {name: getattr(traffic, name) for name in names} | {
        "lse": lse,
        "dlse": traffic.lse - lse,
        "rows": traffic.rows_read + traffic.rows_written,
        **sums,
    }
