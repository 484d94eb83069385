"""The tiles that the thread blocks of a launch visit, found as the emitted code finds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.models.fitted_common import DEAD_BOX_INSTRUCTIONS
from flashgen.kernels.planner.models.spec_terms import mask_instructions
from flashgen.kernels.planner.traffic import LaunchSizes, StepKind, Steps, Walk
from flashgen.kernels.visits.listed_blocks import ListedBlocks
from flashgen.shared.call import CheckedCall
from flashgen.shared.signature import LAYOUT
from flashgen.spec.analysis.mask import MaskAnalysis
from flashgen.spec.analysis.tile_walk import (
    EMPTY,
    FULL,
    Array,
    BlockLayoutTiles,
    StridedAxis,
    TileAxis,
    TileWalk,
    numbers_of,
)
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import B, H


class KnownCall(NamedTuple):
    """A call with the values on which its mask depends.

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
        steps: the kinds of the steps of each of these blocks.
    """

    batch: int
    heads_q: int
    heads_kv: int
    walk: TileWalk | None = None
    listed: ListedBlocks | None = None
    visits: list[Visit] | None = None
    steps: list[Steps] | None = None


def walks_of(
    call: KnownCall, mask: MaskAnalysis, plan: Plan, *, ragged_last: bool = False
) -> list[Walk]:
    """Sizes and visited tiles of a launch, for all heads together or head by head.

    Args:
        ragged_last: as for `heads_of`.
    """
    return joined_walks(heads_of(call, mask, plan, ragged_last=ragged_last), plan, call.problem)


def joined_walks(heads: list[AlikeHeads], plan: Plan, problem: CheckedCall) -> list[Walk]:
    """The walks of these heads; the heads of a group that one block serves are joined."""
    lengths = problem.seq_q, problem.seq_k
    walks: list[Walk] = []
    group_size = problem.group if plan.owns_keys and len(heads) > 1 and heads[0].heads_q == 1 else 1
    for index in range(0, len(heads), group_size):
        first = heads[index]
        visited = steps = None
        if first.visits is not None:
            group = heads[index : index + group_size]
            visited = [visit.tiles for head in group for visit in head.visits or ()]
            steps = [steps_of_block for head in group for steps_of_block in head.steps or ()]
        sizes = LaunchSizes(first.batch, first.heads_q * group_size, first.heads_kv, *lengths)
        before = first.walk.owned.before if first.walk else 0
        walks.append(Walk(sizes, visited, steps, before))
    return walks


def heads_of(
    call: KnownCall, mask: MaskAnalysis, plan: Plan, *, ragged_last: bool = False
) -> list[AlikeHeads]:
    """The heads of a launch: all together, by batch entry, or one by one; [] without heads.

    Args:
        ragged_last: whether it is always the last tile of queries that lacks some, as in earlier
            kernels, of which there are records.
    """
    spec, p, captured = call
    if not p.batch * p.heads_q:
        return []
    live = live_blocks(call)
    if (mask.always and live is None) or plan.streams:
        return [AlikeHeads(p.batch, p.heads_q, p.heads_kv)]
    parts = (mask.expr, mask.may, mask.must, mask.reach.lo, mask.reach.hi)
    used = {symbol for part in parts if part is not None for symbol in part.free_symbols}
    sizes = p.batch, p.heads_q, p.seq_q, p.seq_k
    values: dict[Any, Any] = {**numbers_of(spec, sizes, dict(p.scalars))}
    values |= {t.symbol: captured[t.name] for t in spec.tensors if t.name in captured}
    values = {symbol: value for symbol, value in values.items() if symbol in used}
    if live is not None:
        used |= {symbol for symbol, lines in zip((B, H), live.shape, strict=False) if lines > 1}

    ops = mask_instructions(spec, plan.kernel, in_parts=plan.gathers)

    def alike(batch: int, heads_q: int, heads_kv: int, b: int, h: int) -> AlikeHeads:
        listed = listed_blocks(spec, live, b, h + p.first_head, by_column=plan.owns_keys)
        indices = {B: np.array([[b]]), H: np.array([[h]])} if {B, H} & used else {}
        rows = rows_by_bounds(plan.skipping_rows(bounded=True), mask, spec)
        moved_rows = 0 if ragged_last else rows
        queries = query_axis(mask, p.seq_q, plan.walked_queries, p.q_offset, moved_rows)
        keys = key_axis(plan, p)
        walk = TileWalk(mask, (values | indices).items(), queries, keys, plan.owns_keys)
        visits = visits_of(walk, listed)
        if plan.cluster > 1 and plan.paired_heads(p.heads_q, p.heads_kv) == 1:
            visits = in_pairs(visits)
        steps = [steps_of(plan, walk, listed, visit, ops, rows) for visit in visits]
        return AlikeHeads(batch, heads_q, heads_kv, walk, listed, visits, steps)

    if not {B, H} & used:
        return [alike(p.batch, p.heads_q, p.heads_kv, 0, 0)]
    heads, kv = (1, 1) if H in used else (p.heads_q, p.heads_kv)
    return [alike(1, heads, kv, b, h) for b in range(p.batch) for h in range(p.heads_q // heads)]


def rows_by_bounds(rows: int, mask: MaskAnalysis, spec: AttentionSpec) -> int:
    """The rows of a warpgroup, where each warpgroup skips the tiles that its own rows do not reach.

    Args:
        rows: these rows if bounds alone decide which tiles are visited, from `Plan.skipping_rows`.
    """
    return rows if mask.bounded and spec.block_sparse is None else 0


def key_axis(plan: Plan, problem: CheckedCall) -> TileAxis:
    """The tiles of keys of a kernel, or the boxes that it gathers."""
    sizes = problem.seq_k, plan.walked_keys, problem.k_offset
    if plan.key_stride == 1:
        return TileAxis(*sizes)
    return StridedAxis(*sizes, box=plan.key_box, stride=plan.key_stride)


def query_axis(mask: MaskAnalysis, length: int, block: int, offset: int, rows: int) -> TileAxis:
    """The tiles of queries of a kernel, as `queries_before` of the emitted code places them.

    Args:
        rows: the rows of a warpgroup, from `rows_by_bounds`.
    """
    ragged = rows and mask.reaches_further
    before = -(-length // block) * block - -(-length // rows) * rows if ragged else 0
    return TileAxis(length, block, offset, before)


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
    blocks = live[min(b, len(live) - 1), min(h, live.shape[1] - 1)]
    if by_column:
        return ListedBlocks(blocks.T, sparse.block_k, sparse.block_q)
    return ListedBlocks(blocks, sparse.block_q, sparse.block_k)


def in_pairs(visits: list[Visit]) -> list[Visit]:
    """The visits where neighbouring blocks form a cluster: both visit what either reaches."""
    paired = []
    for index, visit in enumerate(visits):
        pair = visits[index // 2 * 2 :][:2]
        reaching = [one for one in pair if one.first < one.end]
        first = min((one.first for one in reaching), default=visit.first)
        end = max((one.end for one in reaching), default=visit.end)
        paired.append(replace(visit, first=first, end=end, tiles=list(range(first, end))))
    return paired


def visits_of(walk: TileWalk, listed: ListedBlocks | None) -> list[Visit]:
    """For each tile that a block owns, the tiles that its main loop visits.

    They are the tiles within the reach, a range. Where the reach is not exact, tiles that can have
    no kept score are left out; with a block-sparse layout, tiles without a live block.
    """
    mask, walked = walk.mask, walk.walked
    visits = []
    for start, stop in walk.owned.tiles():
        first, end = reached_tiles(walk, start, stop)
        tiles = list(range(first, end))
        if not mask.reach_exact:
            may = walk.classes(start, stop) != EMPTY
            tiles = [tile for tile in tiles if may[tile]]
        if listed is not None:
            live = listed.tiles(walk.owned, start, stop, walked)
            tiles = [tile for tile in tiles if live[tile]]
        visits.append(Visit(start, stop, first, end, tiles))
    return visits


def reached_tiles(walk: TileWalk, start: int, stop: int) -> tuple[int, int]:
    """The first tile within the reach of the owned positions, and the end of these tiles."""
    lo, hi = walk.ends(walk.mask.reach, start, stop)
    walked = walk.walked
    first = max(lo or 0, 0)
    last = walked.length if hi is None else min(hi, walked.length)
    return first // walked.block, -(-last // walked.block) if first < last else 0


def steps_of(
    plan: Plan,
    walk: TileWalk,
    listed: ListedBlocks | None,
    visit: Visit,
    mask_ops: float,
    rows: int,
) -> Steps:
    """The kinds of the steps of one block: which rows compute, and where the mask is evaluated.

    Args:
        mask_ops: instructions of the mask for each score at which it is evaluated.
        rows: the rows of a warpgroup, from `rows_by_bounds`.
    """
    if plan.records:
        return _steps_of_boxes(plan, walk, listed, visit, mask_ops)
    rows_at_once = rows or plan.block_q
    tiles = np.array(visit.tiles, dtype=np.int64)
    computed = np.zeros_like(tiles)
    masked = np.zeros_like(tiles)
    for start in range(visit.start, visit.stop, rows or walk.owned.block):
        stop = min(start + rows, visit.stop) if rows else visit.stop
        reached = np.ones(len(tiles), dtype=bool)
        if rows:
            first, end = reached_tiles(walk, start, stop)
            reached = (first <= tiles) & (tiles < end)
        computed += rows_at_once * reached
        masked += rows_at_once * (reached & ~unmasked_tiles(walk, start, stop, listed)[tiles])
    steps: Counter[StepKind] = Counter()
    for computed_rows, masked_rows in zip(computed.tolist(), masked.tolist(), strict=True):
        ops = mask_ops * masked_rows / computed_rows if computed_rows else 0
        steps[StepKind(computed_rows, ops)] += 1
    return steps


def _steps_of_boxes(
    plan: Plan, walk: TileWalk, listed: ListedBlocks | None, visit: Visit, mask_ops: float
) -> Steps:
    """The kinds of the steps of one block whose tiles consist of boxes."""
    boxes = np.array(visit.tiles, dtype=np.int64)
    owned_tile = walk, visit.start, visit.stop
    masked = ~unmasked_tiles(*owned_tile, None if plan.gathers else listed)[boxes]
    all_live = unmasked_tiles(*owned_tile, listed, ignores_mask=True)[boxes]
    boxes_per_tile = plan.boxes_per_tile
    steps: Counter[StepKind] = Counter()
    for first in range(0, plan.steps_of(len(boxes)) * boxes_per_tile, boxes_per_tile):
        tile = slice(first, first + boxes_per_tile)
        ops = mask_ops * np.count_nonzero(masked[tile]) / boxes_per_tile
        if plan.gathers and np.count_nonzero(all_live[tile]) < boxes_per_tile:
            ops += DEAD_BOX_INSTRUCTIONS
        steps[StepKind(plan.block_q, ops)] += 1
    return steps


def unmasked_tiles(
    walk: TileWalk,
    start: int,
    stop: int,
    listed: ListedBlocks | None = None,
    *,
    ignores_mask: bool = False,
) -> Array:
    """Where the kernel does not evaluate the mask, for the walked tiles of one owned tile.

    These are the whole tiles in the full range where that is exact, and else the tiles in which the
    mask keeps all scores. The mask is evaluated in a tile that the end of the sequence cuts off.

    Args:
        listed: a block-sparse layout; all of its blocks in such a tile are live.
        ignores_mask: whether the layout and the lengths alone count.
    """
    mask, owned, walked = walk.mask, walk.owned, walk.walked
    starts = np.arange(0, walked.length, walked.block)
    unmasked: Array = starts + walked.block <= walked.length
    if walk.owns_keys:
        unmasked &= start + owned.block <= owned.length
    if listed is not None:
        lines = listed.live[listed.lines_of_tile(owned, start, stop)]
        layout = BlockLayoutTiles(lines[None], 1, listed.walked_block)
        corners = np.int64(0), np.int64(len(lines) - 1)
        unmasked &= layout.liveness(corners, walked.corners())[1][0]
    if ignores_mask:
        return unmasked
    if mask.full is None or not mask.full_exact:
        return unmasked if mask.always else unmasked & (walk.classes(start, stop) == FULL)
    lo, hi = walk.ends(mask.full, start, stop)
    unmasked &= starts >= (0 if lo is None else lo)
    return unmasked & (starts + walked.block <= (walked.length if hi is None else hi))
