"""Which tiles the blocks of a launch visit, found as the emitted code finds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.analysis import MaskAnalysis, evaluate
from flashgen.expr import BATCH, HEADS, K_HI, K_LO, Q_HI, Q_LO, SEQ_K, SEQ_Q, B, H
from flashgen.ops import Problem
from flashgen.plan import Plan
from flashgen.plan.duration import Sizes
from flashgen.profile.lists import Lists
from flashgen.sparse import LAYOUT
from flashgen.spec import AttentionSpec
from flashgen.tiled.walk import EMPTY, Axis, Walk

Array = np.ndarray[Any, np.dtype[Any]]

HeadWalk = tuple[Sizes, list[list[int]] | None]
"""Sizes, and for each tile that a block of them owns those that it visits; None for all."""


@dataclass(frozen=True)
class Visit:
    """A block's tiles.

    Attributes:
        start, stop: of the positions that the block owns, counted from 0.
        first, end: of the tiles that its mask reaches, among which it looks for those to visit.
        tiles: that it visits.
    """

    start: int
    stop: int
    first: int
    end: int
    tiles: list[int]


@dataclass(frozen=True)
class Alike:
    """Query heads that visit the same tiles.

    Attributes:
        batch, heads_q, heads_kv: how many.
        walk: their tiles by the mask; None where every tile is visited.
        lists: of their block-sparse layout; None without one.
        visits: of each block of one of them; None for all tiles.
    """

    batch: int
    heads_q: int
    heads_kv: int
    walk: Walk | None = None
    lists: Lists | None = None
    visits: list[Visit] | None = None


def walks_of(
    spec: AttentionSpec,
    mask: MaskAnalysis,
    plan: Plan,
    problem: Problem,
    captured: Mapping[str, Array],
) -> list[HeadWalk]:
    """Sizes, and the tiles that a block of them visits: for all heads, or head by head.

    Args:
        captured: the spec's tensors by name, and a run-time layout.
    """
    return joined(heads_of(spec, mask, plan, problem, captured), plan, problem)


def joined(heads: list[Alike], plan: Plan, problem: Problem) -> list[HeadWalk]:
    """The walks of these heads: those of a group that a block serves one behind the other."""
    lengths = problem.seq_q, problem.seq_k
    group = problem.heads_q // problem.heads_kv
    found: list[HeadWalk] = []
    together = group if plan.owns_keys and len(heads) > 1 and heads[0].heads_q == 1 else 1
    for place in range(0, len(heads), together):
        each = heads[place]
        visited = None
        if each.visits is not None:
            some = heads[place : place + together]
            visited = [visit.tiles for head in some for visit in head.visits or ()]
        found.append(((each.batch, each.heads_q * together, each.heads_kv, *lengths), visited))
    return found


def heads_of(
    spec: AttentionSpec,
    mask: MaskAnalysis,
    plan: Plan,
    problem: Problem,
    captured: Mapping[str, Array],
) -> list[Alike]:
    """The heads of a launch: all together, or by batch entry, or one by one."""
    p = problem
    live = _live_blocks(spec, p, captured)
    if (mask.always and live is None) or plan.kernel == "delta":
        return [Alike(p.batch, p.heads_q, p.heads_kv)]
    parts = (mask.expr, mask.may, mask.must, mask.reach.lo, mask.reach.hi)
    used = {symbol for part in parts if part is not None for symbol in part.free_symbols}
    known: dict[Any, Any] = dict(
        zip((BATCH, HEADS, SEQ_Q, SEQ_K), (p.batch, p.heads_q, p.seq_q, p.seq_k), strict=True)
    )
    scalars = dict(p.scalars)
    for scalar in spec.scalars:
        value = scalars[scalar.name]
        known[scalar.expr] = float(np.float32(value)) if scalar.dtype == "float32" else value
    known |= {t.symbol: captured[t.name] for t in spec.tensors if t.name in captured}
    known = {symbol: value for symbol, value in known.items() if symbol in used}
    if live is not None:
        used |= {symbol for symbol, lines in zip((B, H), live.shape, strict=False) if lines > 1}

    def alike(batch: int, heads_q: int, heads_kv: int, b: int, h: int) -> Alike:
        lists = _lists(spec, live, b, h, by_column=plan.owns_keys)
        places = {B: np.array([[b]]), H: np.array([[h]])} if {B, H} & used else {}
        queries, keys = plan.queries_per_tile, plan.block_k
        axes = Axis(p.seq_q, queries, p.q_offset), Axis(p.seq_k, keys, p.k_offset)
        walk = Walk(mask, (known | places).items(), *axes)
        return Alike(batch, heads_q, heads_kv, walk, lists, _visits(walk, plan, lists))

    if not {B, H} & used:
        return [alike(p.batch, p.heads_q, p.heads_kv, 0, 0)]
    heads, kv = (1, 1) if H in used else (p.heads_q, p.heads_kv)
    return [alike(1, heads, kv, b, h) for b in range(p.batch) for h in range(p.heads_q // heads)]


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


def _lists(
    spec: AttentionSpec, live: Array | None, b: int, h: int, *, by_column: bool
) -> Lists | None:
    """Those of one batch entry and head."""
    sparse = spec.block_sparse
    if sparse is None or live is None:
        return None
    one = live[min(b, len(live) - 1), min(h, live.shape[1] - 1)]
    if by_column:
        return Lists(one.T, sparse.block_k, sparse.block_q)
    return Lists(one, sparse.block_q, sparse.block_k)


def _visits(walk: Walk, plan: Plan, lists: Lists | None) -> list[Visit]:
    """For each tile that a block owns, those that its loop takes: as the emitted code finds them.

    They are those of the reach, a range; where it is not exact, the ones among them that may have
    an element; and with a block-sparse layout the ones that it lists.
    """
    mask = walk.mask
    owned, other, classes, ends = walk.queries, walk.keys, walk.of_queries, (Q_LO, Q_HI)
    if plan.owns_keys:
        owned, other, classes, ends = walk.keys, walk.queries, walk.of_keys, (K_LO, K_HI)
    found = []
    for start, stop in owned.tiles():
        corners = dict(zip(ends, (start + owned.offset, stop - 1 + owned.offset), strict=True))
        lo, hi = (
            None if end is None else int(np.max(evaluate(end, {**walk.env, **corners})))
            for end in (mask.reach.lo, mask.reach.hi)
        )
        first = 0 if lo is None else max(lo - other.offset, 0)
        last = other.length if hi is None else min(hi - other.offset, other.length)
        end = -(-last // other.block) if first < last else 0
        tiles = list(range(first // other.block, end))
        if not mask.reach_exact:
            may = classes(start, stop) != EMPTY
            tiles = [tile for tile in tiles if may[tile]]
        if lists is not None:
            listed = lists.listed(owned, start, stop, other)
            tiles = [tile for tile in tiles if listed[tile]]
        found.append(Visit(start, stop, first // other.block, end, tiles))
    return found
