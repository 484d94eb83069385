"""The tiles that the thread blocks of a launch visit, found as the emitted code finds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.traffic import LaunchSizes
from flashgen.shared.call import CheckedCall
from flashgen.shared.signature import LAYOUT
from flashgen.spec.analysis.mask import MaskAnalysis
from flashgen.spec.analysis.tile_walk import EMPTY, FULL, Array, TileAxis, TileWalk, numbers_of
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import B, H
from flashgen.tools.profile.listed_blocks import ListedBlocks

HeadWalk = tuple[LaunchSizes, list[list[int]] | None]
"""Sizes of some heads, and for each tile that a block owns the tiles that it visits; None: all."""


class KnownCall(NamedTuple):
    """A call with all that its mask depends on.

    Attributes:
        captured: the captured tensors by name as arrays; a run-time block layout; for a paged
            cache, the page table and the lengths.
    """

    spec: AttentionSpec
    problem: CheckedCall
    captured: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Visit:
    """The tiles that one thread block visits.

    Attributes:
        start, stop: the positions that the block owns, counted from 0.
        first, end: the tiles within the reach of its mask, among which it searches.
        tiles: the tiles that it visits.
    """

    start: int
    stop: int
    first: int
    end: int
    tiles: list[int]


@dataclass(frozen=True)
class AlikeHeads:
    """Query heads that visit the same tiles.

    Attributes:
        batch, heads_q, heads_kv: the numbers of batch entries, of query heads and of key heads.
        walk: the classes of their tiles by the mask; None where every tile is visited.
        listed: the live blocks of their block-sparse layout; None without one.
        visits: the tiles of each thread block of one of the heads; None for all tiles.
    """

    batch: int
    heads_q: int
    heads_kv: int
    walk: TileWalk | None = None
    listed: ListedBlocks | None = None
    visits: list[Visit] | None = None


def walks_of(call: KnownCall, mask: MaskAnalysis, plan: Plan) -> list[HeadWalk]:
    """Sizes and visited tiles of a launch: of all heads together, or head by head."""
    return joined(heads_of(call, mask, plan), plan, call.problem)


def joined(heads: list[AlikeHeads], plan: Plan, problem: CheckedCall) -> list[HeadWalk]:
    """The walks of these heads; the heads of a group that one block serves are joined."""
    lengths = problem.seq_q, problem.seq_k
    group = problem.heads_q // max(problem.heads_kv, 1)
    found: list[HeadWalk] = []
    together = group if plan.owns_keys and len(heads) > 1 and heads[0].heads_q == 1 else 1
    for place in range(0, len(heads), together):
        each = heads[place]
        visited = None
        if each.visits is not None:
            some = heads[place : place + together]
            visited = [visit.tiles for head in some for visit in head.visits or ()]
        sizes = LaunchSizes(each.batch, each.heads_q * together, each.heads_kv, *lengths)
        found.append((sizes, visited))
    return found


def heads_of(call: KnownCall, mask: MaskAnalysis, plan: Plan) -> list[AlikeHeads]:
    """The heads of a launch: all together, by batch entry, or one by one; [] without heads."""
    spec, p, captured = call
    if not p.batch * p.heads_q:
        return []
    live = live_blocks(call)
    if (mask.always and live is None) or plan.streams:
        return [AlikeHeads(p.batch, p.heads_q, p.heads_kv)]
    parts = (mask.expr, mask.may, mask.must, mask.reach.lo, mask.reach.hi)
    used = {symbol for part in parts if part is not None for symbol in part.free_symbols}
    sizes = p.batch, p.heads_q, p.seq_q, p.seq_k
    known: dict[Any, Any] = {**numbers_of(spec, sizes, dict(p.scalars))}
    known |= {t.symbol: captured[t.name] for t in spec.tensors if t.name in captured}
    known = {symbol: value for symbol, value in known.items() if symbol in used}
    if live is not None:
        used |= {symbol for symbol, lines in zip((B, H), live.shape, strict=False) if lines > 1}

    def alike(batch: int, heads_q: int, heads_kv: int, b: int, h: int) -> AlikeHeads:
        listed = listed_blocks(spec, live, b, h + p.first_head, by_column=plan.owns_keys)
        places = {B: np.array([[b]]), H: np.array([[h]])} if {B, H} & used else {}
        queries, keys = plan.queries_per_tile, plan.block_k
        axes = TileAxis(p.seq_q, queries, p.q_offset), TileAxis(p.seq_k, keys, p.k_offset)
        walk = TileWalk(mask, (known | places).items(), *axes, plan.owns_keys)
        return AlikeHeads(batch, heads_q, heads_kv, walk, listed, visits_of(walk, listed))

    if not {B, H} & used:
        return [alike(p.batch, p.heads_q, p.heads_kv, 0, 0)]
    heads, kv = (1, 1) if H in used else (p.heads_q, p.heads_kv)
    return [alike(1, heads, kv, b, h) for b in range(p.batch) for h in range(p.heads_q // heads)]


def live_blocks(call: KnownCall) -> Array | None:
    """Bool [batch or 1, heads or 1, rows, columns] of a block-sparse layout; None without one."""
    spec, p, captured = call
    sparse = spec.block_sparse
    if sparse is None:
        return None
    if LAYOUT in captured:
        return np.asarray(captured[LAYOUT], dtype=bool)
    ends = p.q_offset + p.seq_q, p.k_offset + p.seq_k
    shape = sparse.shape(p.batch, p.heads, *ends)
    return np.frombuffer(sparse.table(*shape), dtype=bool).reshape(shape)


def listed_blocks(
    spec: AttentionSpec, live: Array | None, b: int, h: int, *, by_column: bool
) -> ListedBlocks | None:
    """The live blocks of one batch entry and head."""
    sparse = spec.block_sparse
    if sparse is None or live is None:
        return None
    one = live[min(b, len(live) - 1), min(h, live.shape[1] - 1)]
    if by_column:
        return ListedBlocks(one.T, sparse.block_k, sparse.block_q)
    return ListedBlocks(one, sparse.block_q, sparse.block_k)


def visits_of(walk: TileWalk, listed: ListedBlocks | None) -> list[Visit]:
    """For each tile that a block owns, the tiles that its main loop visits.

    They are the tiles within the reach, a range; where the reach is not exact, those that may have
    an unmasked element; with a block-sparse layout, those that have a live block.
    """
    mask, walked = walk.mask, walk.walked
    found = []
    for start, stop in walk.owned.tiles():
        lo, hi = walk.ends(mask.reach, start, stop)
        first = max(lo or 0, 0)
        last = walked.length if hi is None else min(hi, walked.length)
        end = -(-last // walked.block) if first < last else 0
        tiles = list(range(first // walked.block, end))
        if not mask.reach_exact:
            may = walk.classes(start, stop) != EMPTY
            tiles = [tile for tile in tiles if may[tile]]
        if listed is not None:
            live = listed.tiles(walk.owned, start, stop, walked)
            tiles = [tile for tile in tiles if live[tile]]
        found.append(Visit(start, stop, first // walked.block, end, tiles))
    return found


def unmasked_tiles(walk: TileWalk, start: int, stop: int) -> Array:
    """Where the kernel does not evaluate the mask, for the walked tiles of one owned tile.

    These are the whole tiles in the full range where that is exact, and else those that the mask
    fills. A tile that the sequence cuts off has its mask evaluated.
    """
    mask, owned, walked = walk.mask, walk.owned, walk.walked
    starts = np.arange(0, walked.length, walked.block)
    found: Array = starts + walked.block <= walked.length
    if walk.owns_keys:
        found &= start + owned.block <= owned.length
    if mask.full is None or not mask.full_exact:
        return found if mask.always else found & (walk.classes(start, stop) == FULL)
    lo, hi = walk.ends(mask.full, start, stop)
    found &= starts >= (0 if lo is None else lo)
    return found & (starts + walked.block <= (walked.length if hi is None else hi))
