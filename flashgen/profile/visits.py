"""Which tiles the blocks of a launch visit, found as the emitted code finds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashgen.analysis import MaskAnalysis, evaluate
from flashgen.expr import BATCH, HEADS, K_HI, K_LO, Q_HI, Q_LO, SEQ_K, SEQ_Q, B, H
from flashgen.ops import Problem
from flashgen.plan import Plan
from flashgen.plan.duration import Sizes
from flashgen.sparse import LAYOUT
from flashgen.spec import AttentionSpec
from flashgen.tiled.walk import EMPTY, Axis, Layout, Walk

Array = np.ndarray[Any, np.dtype[Any]]

HeadWalk = tuple[Sizes, list[list[int]] | None]
"""Sizes, and for each tile that a block of them owns those that it visits; None for all."""


def walks_of(
    spec: AttentionSpec,
    mask: MaskAnalysis,
    plan: Plan,
    problem: Problem,
    captured: Mapping[str, Array],
) -> list[HeadWalk] | None:
    """Sizes, and the tiles that a block of them visits: for all heads, or head by head.

    None where the tiles differ between the query heads of a group that a block serves.

    Args:
        captured: the spec's tensors by name, and a run-time layout.
    """
    p = problem
    lengths = p.seq_q, p.seq_k
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
