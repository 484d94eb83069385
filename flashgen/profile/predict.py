"""What the plan says of a launch: bytes per tensor, tiles, multiply-adds and clocks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flashgen.analysis import MaskAnalysis
from flashgen.arch import WARP
from flashgen.ops import Problem
from flashgen.ops.bind import blocks_of_call
from flashgen.pipeline import Build
from flashgen.plan import BackwardTraffic, Plan, Traffic
from flashgen.plan.duration import Duration, duration_of
from flashgen.profile.layouts import bytes_of_layout
from flashgen.profile.visits import Array, HeadWalk, heads_of, joined
from flashgen.spec import AttentionSpec

COUNTER_BYTES = 4
RNG_BYTES = 16
"""Dropout's seed and offset, of 8 bytes each."""

TERMS = ("tensor", "shared", "l2", "atomics", "special", "issue")
"""Of a plan's cost, in clocks of one SM per score element."""


@dataclass(frozen=True)
class Prediction:
    """Of one launch.

    Attributes:
        bytes: of global memory by the names of the kernel's pointers, as lanes ask for them.
        added: of these, by atomics.
        distinct: different bytes; None where the plan says nothing of it.
        scores: elements of S that are computed.
        multiply_adds: on the tensor cores.
        clocks: of one SM, by `TERMS`.
        duration: of the launch; None where the plan has no bytes of it.
    """

    bytes: Mapping[str, int]
    added: int
    distinct: int | None
    scores: int
    multiply_adds: float | None
    clocks: Mapping[str, float]
    duration: Duration | None = None


def predict(
    spec: AttentionSpec, build: Build, problem: Problem, captured: Mapping[str, Array], dlse: bool
) -> Prediction | None:
    """What the plan says of a launch; None where it says nothing.

    It says nothing of the kernels of tables, and of packed sequences, whose tiles depend on where
    they begin.
    """
    plan = build.plan
    if plan.kernel == "summary" or spec.packed:
        return None
    mask = build.analysis.mask
    heads = heads_of(spec, mask, plan, problem, captured)
    walks = joined(heads, plan, problem)
    if plan.kernel == "forward":
        moved = _sum(Traffic, plan.traffic, walks)
        found = _forward(plan, moved)
    else:
        ask = functools.partial(plan.backward_traffic, dlse=dlse)
        moved = _sum(BackwardTraffic, ask, walks)
        found = _backward(plan, moved, dlse)
    more = _of_sink(spec, mask, moved) | _of_dropout(build, problem) | _of_counter(plan, problem)
    if spec.block_sparse is not None:
        more |= bytes_of_layout(mask, plan, heads)
    distinct = found.distinct
    if distinct is not None and "rng" in more:
        distinct += RNG_BYTES
    if spec.block_sparse is not None or (len(walks) > 1 and _shared(spec, problem)):
        distinct = None
    found = replace(found, bytes={**found.bytes, **more}, distinct=distinct)
    if plan.of_captured:
        return found
    return replace(found, duration=duration_of(plan, walks, uneven=mask.growth != 0))


def _of_sink(
    spec: AttentionSpec, mask: MaskAnalysis, moved: Traffic | BackwardTraffic
) -> dict[str, int]:
    """A sink's logits, and the sums of its gradient; nothing where other code reads it too."""
    sink = spec.sink
    if sink is None or sink.symbol in spec.score.free_symbols | mask.expr.free_symbols:
        return {}
    sums = moved.dsink if isinstance(moved, BackwardTraffic) else 0
    return {f"c_{sink.name}": moved.sink, "sink_sums": sums}


def _of_dropout(build: Build, p: Problem) -> dict[str, int]:
    """Seed and offset, where every thread that computes reads them once, before its loop.

    Kernels that own keys read them in each step: how much of the offset is up to the compiler.
    """
    plan = build.plan
    drops = any(param.name == "rng" for param in build.source.params)
    if not drops or plan.owns_keys:
        return {}
    x, y, z = plan.grid(p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_k)
    return {"rng": RNG_BYTES * WARP * plan.warps * x * y * z}


def _of_counter(plan: Plan, p: Problem) -> dict[str, int]:
    """The counter of jobs, which is added to once for each of them."""
    if not plan.takes_jobs:
        return {}
    blocks = blocks_of_call(plan, p)
    return {"taken": COUNTER_BYTES * blocks.jobs} if blocks.persistent else {}


def _shared(spec: AttentionSpec, problem: Problem) -> bool:
    """Whether heads that are told apart may touch the same bytes: then nobody says how many."""
    return spec.sink is not None or problem.heads_q != problem.heads_kv


def _sum(kind: Any, ask: Any, walks: list[HeadWalk]) -> Any:
    return functools.reduce(operator.add, (ask(*sizes, visited) for sizes, visited in walks))


def _forward(plan: Plan, moved: Traffic) -> Prediction:
    return Prediction(
        bytes={"q": moved.q, "k": moved.k, "v": moved.v, "o": moved.o, "lse": moved.lse},
        added=0,
        distinct=moved.compulsory,
        scores=moved.scores,
        multiply_adds=_factors(plan) * (plan.head_dim + plan.head_dim_v) * moved.scores,
        clocks=_clocks(plan, moved.scores),
    )


def _backward(plan: Plan, moved: BackwardTraffic, dlse: bool) -> Prediction:
    lse = moved.lse // 2 if dlse else moved.lse
    bytes_ = {
        "q": moved.q,
        "k": moved.k,
        "v": moved.v,
        "o": moved.o,
        "do": moved.do,
        "lse": lse,
        "dlse": moved.lse - lse,
        "rows": moved.rows_read + moved.rows_written,
        "dq": moved.dq,
        "dk": moved.dk,
        "dv": moved.dv,
        "dq_sum": moved.added,
    }
    macs = next((line.value for line in plan.derivation if line.name == "macs"), None)
    return Prediction(
        bytes=bytes_,
        added=moved.added,
        distinct=None,
        scores=moved.scores,
        multiply_adds=None if macs is None else _factors(plan) * macs * moved.scores,
        clocks=_clocks(plan, moved.scores),
    )


def _factors(plan: Plan) -> int:
    """Products on the tensor cores per multiplication: float32 is split in three parts of tf32."""
    return 6 if plan.dtype == "float32" else 1


def _clocks(plan: Plan, scores: int) -> dict[str, float]:
    found = {line.name: line.value for line in plan.derivation if line.unit == "clk"}
    return {term: float(found[term]) * scores for term in TERMS if term in found}
