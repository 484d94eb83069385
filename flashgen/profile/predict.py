"""What the plan says of a launch: bytes per tensor, tiles, multiply-adds and clocks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flashgen.ops import Problem
from flashgen.pipeline import Build
from flashgen.plan import BackwardTraffic, Plan, Traffic
from flashgen.plan.duration import Duration, duration_of
from flashgen.profile.layouts import bytes_of_layout
from flashgen.profile.visits import Array, HeadWalk, heads_of, joined
from flashgen.spec import AttentionSpec

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
        found = _forward(plan, _sum(Traffic, plan.traffic, walks))
    else:
        ask = functools.partial(plan.backward_traffic, dlse=dlse)
        found = _backward(plan, _sum(BackwardTraffic, ask, walks), dlse)
    if spec.block_sparse is not None:
        lists = bytes_of_layout(mask, plan, heads)
        # Which bytes of the lists are different ones nobody says.
        found = replace(found, bytes={**found.bytes, **lists}, distinct=None)
    drops = any(param.name == "rng" for param in build.source.params)
    if drops and plan.kernel in ("forward", "dq"):
        # Every thread reads both before its loop; where it reads them in each step, how much of
        # the offset is read is up to the compiler.
        p = problem
        x, y, z = plan.grid(p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_k)
        rng = {"rng": RNG_BYTES * plan.threads * x * y * z}
        distinct = None if found.distinct is None else found.distinct + RNG_BYTES
        found = replace(found, bytes={**found.bytes, **rng}, distinct=distinct)
    return found if plan.of_captured else replace(found, duration=duration_of(plan, walks))


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
