"""What the plan says of a launch: bytes per tensor, tiles, multiply-adds and clocks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashgen.analysis import MaskAnalysis, evaluate
from flashgen.expr import BATCH, HEADS, K_HI, K_LO, Q_HI, Q_LO, SEQ_K, SEQ_Q, B, H
from flashgen.ops import Problem
from flashgen.pipeline import Build
from flashgen.plan import BackwardTraffic, Plan, Traffic
from flashgen.plan.duration import Duration, duration
from flashgen.sparse import LAYOUT
from flashgen.spec import AttentionSpec
from flashgen.tiled.walk import EMPTY, Axis, Layout, Walk

Array = np.ndarray[Any, np.dtype[Any]]

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
        duration: of the launch; None where the heads are not alike.
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

    It says nothing of the kernels of tables, of packed sequences, whose tiles depend on where they
    begin, and of masks that differ between the query heads of a group in a kernel of theirs.
    """
    plan = build.plan
    if plan.kernel == "summary" or spec.packed:
        return None
    walks = _walks(spec, build, problem, captured)
    if walks is None:
        return None
    if plan.kernel == "forward":
        found = _forward(plan, _sum(Traffic, plan.traffic, walks))
    else:
        ask = functools.partial(plan.backward_traffic, dlse=dlse)
        found = _backward(plan, _sum(BackwardTraffic, ask, walks), dlse)
    if len(walks) > 1 or plan.of_captured:
        return found
    (batch, heads_q, heads_kv, seq_q, seq_k), visited = walks[0]
    return replace(found, duration=duration(plan, batch, heads_q, heads_kv, seq_q, seq_k, visited))


def _sum(kind: Any, ask: Any, walks: list[tuple[tuple[int, ...], Any]]) -> Any:
    return functools.reduce(operator.add, (ask(*sizes, visited) for sizes, visited in walks))


def _walks(
    spec: AttentionSpec, build: Build, problem: Problem, captured: Mapping[str, Array]
) -> list[tuple[tuple[int, ...], list[list[int]] | None]] | None:
    """Sizes, and the tiles that a block of them visits: for all heads, or head by head."""
    p, plan = problem, build.plan
    lengths = p.seq_q, p.seq_k
    mask = build.analysis.mask
    live = _live_blocks(spec, p, captured)
    if (mask.always and live is None) or plan.kernel == "delta":
        return [((p.batch, p.heads_q, p.heads_kv, *lengths), None)]
    parts = (mask.may, mask.must, mask.reach.lo, mask.reach.hi)
    used = {symbol for part in parts if part is not None for symbol in part.free_symbols}
    known: dict[Any, Any] = dict(
        zip((BATCH, HEADS, SEQ_Q, SEQ_K), (p.batch, p.heads_q, *lengths), strict=True)
    )
    scalars = dict(p.scalars)
    for scalar in spec.scalars:
        value = scalars[scalar.name]
        known[scalar.expr] = float(np.float32(value)) if scalar.dtype == "float32" else value
    known |= {t.symbol: captured[t.name] for t in spec.tensors if t.name in captured}
    known = {symbol: value for symbol, value in known.items() if symbol in used}
    if live is not None:
        used |= {symbol for symbol, lines in zip((B, H), live.shape, strict=False) if lines > 1}
    if not {B, H} & used:
        walk = _visited(mask, known, plan, p, _layout(spec, live, 0, 0))
        return [((p.batch, p.heads_q, p.heads_kv, *lengths), walk)]
    if plan.owns_keys and p.heads_q != p.heads_kv and H in used:
        return None
    heads, kv = (1, 1) if H in used else (p.heads_q, p.heads_kv)
    return [
        (
            (1, heads, kv, *lengths),
            _visited(
                mask,
                known | {B: np.array([[b]]), H: np.array([[h]])},
                plan,
                p,
                _layout(spec, live, b, h),
            ),
        )
        for b in range(p.batch)
        for h in range(p.heads_q // heads)
    ]


def _live_blocks(spec: AttentionSpec, p: Problem, captured: Mapping[str, Array]) -> Array | None:
    """Bool [batch or 1, heads or 1, rows, columns] of a block-sparse layout; None without one."""
    sparse = spec.block_sparse
    if sparse is None:
        return None
    if LAYOUT in captured:
        return captured[LAYOUT].astype(bool)
    ends = p.q_offset + p.seq_q, p.k_offset + p.seq_k
    shape = sparse.shape(p.batch, p.heads_q, *ends)
    return np.frombuffer(sparse.table(*shape), dtype=bool).reshape(shape)


def _layout(spec: AttentionSpec, live: Array | None, b: int, h: int) -> Layout | None:
    """That of one batch entry and head."""
    sparse = spec.block_sparse
    if sparse is None or live is None:
        return None
    one = live[min(b, len(live) - 1), min(h, live.shape[1] - 1)]
    return Layout(one[None], sparse.block_q, sparse.block_k)


def _visited(
    mask: MaskAnalysis,
    known: Mapping[Any, Any],
    plan: Plan,
    p: Problem,
    layout: Layout | None,
) -> list[list[int]]:
    """For each tile that a block owns, those that its loop takes: as the emitted code finds them.

    They are those of the reach, a range; where it is not exact or there is a block-sparse layout,
    the ones among them that may have an element.
    """
    queries = Axis(p.seq_q, plan.block_q, p.q_offset)
    keys = Axis(p.seq_k, plan.block_k, p.k_offset)
    walk = Walk(mask, known.items(), queries, keys, layout)
    owned, other, classes, ends = queries, keys, walk.of_queries, (Q_LO, Q_HI)
    if plan.owns_keys:
        owned, other, classes, ends = keys, queries, walk.of_keys, (K_LO, K_HI)
    found = []
    for start, stop in owned.tiles():
        corners = dict(zip(ends, (start + owned.offset, stop - 1 + owned.offset), strict=True))
        lo, hi = (
            None if end is None else int(np.max(evaluate(end, {**walk.env, **corners})))
            for end in (mask.reach.lo, mask.reach.hi)
        )
        first = 0 if lo is None else max(lo - other.offset, 0)
        last = other.length if hi is None else min(hi - other.offset, other.length)
        reached = list(range(first // other.block, -(-last // other.block) if first < last else 0))
        if not mask.reach_exact or layout is not None:
            live = classes(start, stop) != EMPTY
            reached = [tile for tile in reached if live[tile]]
        found.append(reached)
    return found


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
