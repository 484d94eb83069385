"""What a kernel reads of a block-sparse layout, counted from how the emitted code looks into it.

A warp asks for the next listed tile before its loop and in each step (`next_listed_tile`): each of
its lanes reads the count of one line of blocks that the block's tile touches, and then searches
that line's list in halves. Of a tile that the mask leaves full the lanes share the blocks that it
touches, each until it finds one that is not live (`layout_full`); and of the elements of a mixed
tile the lane that holds one reads its block, where the mask is true (`in_layout`). All warps of a
block do the same, but for elements, which they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from flashgen.analysis import MaskAnalysis, evaluate
from flashgen.expr import K_HI, K_LO, Q_HI, Q_LO, K, Q
from flashgen.plan import Plan
from flashgen.plan.model_backward_sm90 import WALKING_WARPS
from flashgen.profile.lists import Lists
from flashgen.profile.visits import Alike, Visit
from flashgen.tiled.walk import EMPTY, FULL, Axis, Walk

Array = np.ndarray[Any, np.dtype[Any]]

INDEX_BYTES = 4  # int32, of the lists and of their counts
LIVE_BYTES = 1  # bool, of the layout itself
WARP = 32


def bytes_of_layout(mask: MaskAnalysis, plan: Plan, heads: Iterable[Alike]) -> dict[str, int]:
    """Bytes that a launch reads of the layout, by the names of the kernel's pointers."""
    counts = entries = blocks = 0
    asking, _ = _asking(plan)
    for each in heads:
        if each.walk is None or each.lists is None or each.visits is None:
            return {}
        pairs = each.batch * each.heads_q
        times = pairs // plan.heads_per_tile
        for visit in each.visits:
            asked = _asked(each.walk, plan, each.lists, visit)
            counts += times * asking * sum(lines for lines, _ in asked)
            entries += times * asking * sum(found for _, found in asked)
            by_warps, by_lanes = _of_tiles(mask, each.walk, plan, each.lists, visit)
            blocks += times * by_warps + pairs * by_lanes
    if plan.path == "sm_90a" and plan.kernel == "forward":
        # Of the warps that copy all ask for the first tile, but one of them for the next.
        return {"c_layout": LIVE_BYTES * blocks}
    side = "column" if plan.owns_keys else "row"
    return {
        "c_layout": LIVE_BYTES * blocks,
        f"c_layout_{side}_counts": INDEX_BYTES * counts,
        f"c_layout_{side}_blocks": INDEX_BYTES * entries,
    }


def _asking(plan: Plan) -> tuple[int, int]:
    """Warps of a block that ask for the next tile, and whether a tile is full."""
    if plan.path == "sm_90a" and plan.kernel != "forward":
        return WALKING_WARPS[plan.kernel]
    return plan.warps, plan.warps


def _sides(walk: Walk, plan: Plan) -> tuple[Axis, Axis]:
    """The axis of which blocks own tiles, and the other one."""
    return (walk.keys, walk.queries) if plan.owns_keys else (walk.queries, walk.keys)


def _asked(walk: Walk, plan: Plan, lists: Lists, visit: Visit) -> list[tuple[int, int]]:
    """What a warp reads of the lists each time that it asks for the next tile."""
    owned, walked = _sides(walk, plan)
    listed = lists.listed(owned, visit.start, visit.stop, walked)
    classes = walk.of_keys if plan.owns_keys else walk.of_queries
    may = None if walk.mask.reach_exact else classes(visit.start, visit.stop) != EMPTY
    return [
        lists.read(owned, visit.start, visit.stop, walked, tile)
        for tile in _questions(visit, listed, may)
    ]


def _questions(visit: Visit, listed: Array, may: Array | None) -> Iterator[int]:
    """The tiles from which the lists are asked, in order.

    Where the mask leaves tiles out of its reach, both are asked in turn until they agree.
    """

    def next_of(choice: Array, tile: int) -> int:
        return next((t for t in range(tile, visit.end) if choice[t]), visit.end)

    tile = visit.first
    while True:
        yield tile
        found = next_of(listed, tile)
        tile = found if may is None else next_of(may, found)
        if tile != found:
            continue
        if tile >= visit.end:
            return
        tile += 1


def _of_tiles(
    mask: MaskAnalysis, walk: Walk, plan: Plan, lists: Lists, visit: Visit
) -> tuple[int, int]:
    """Blocks read of the layout itself, for the tiles that a thread block visits.

    Returns:
        Those that its warps read for whole tiles; those that lanes read for a head's elements.
    """
    owned, walked = _sides(walk, plan)
    lines = lists.lines(owned, visit.start, visit.stop)
    unmasked = _unmasked(mask, walk, plan, visit)
    elements = 0
    shared = 0
    for tile in visit.tiles:
        if unmasked[tile]:
            start = tile * walked.block
            places = lists.places(walked, start, min(start + walked.block, walked.length))
            live = lists.live[np.ix_(lines, places)]
            shared += _until_one_is_not(live.T if plan.owns_keys else live)
            if live.all():
                continue
        elements += _kept(mask, walk, plan, visit, tile)
    return _asking(plan)[1] * shared, plan.column_warps // plan.score_warps * elements


def _until_one_is_not(live: Array) -> int:
    """How many of these the lanes of a warp read, each until it finds one that is not live."""
    flat = live.ravel()
    turns = np.pad(flat, (0, -len(flat) % WARP)).reshape(-1, WARP)
    there = np.arange(turns.size).reshape(turns.shape) < len(flat)
    goes_on = np.vstack([np.ones((1, WARP), bool), np.logical_and.accumulate(turns)[:-1]])
    return int(np.count_nonzero(goes_on & there))


def _unmasked(mask: MaskAnalysis, walk: Walk, plan: Plan, visit: Visit) -> Array:
    """Of each tile whether the kernel finds it full by the mask, and then asks the layout: bool."""
    owned, walked = _sides(walk, plan)
    starts = np.arange(0, walked.length, walked.block)
    whole = starts + walked.block <= walked.length
    if plan.owns_keys:
        whole &= visit.start + owned.block <= owned.length
    if mask.always:
        return whole
    if mask.full is not None and mask.full_exact:
        ends = (K_LO, K_HI) if plan.owns_keys else (Q_LO, Q_HI)
        corners = visit.start + owned.offset, visit.stop - 1 + owned.offset
        values = {**walk.env, **dict(zip(ends, corners, strict=True))}
        lo, hi = (
            None if end is None else int(np.max(evaluate(end, values))) - walked.offset
            for end in (mask.full.lo, mask.full.hi)
        )
        inside = starts + walked.block <= (walked.length if hi is None else hi)
        return whole & inside & (starts >= (0 if lo is None else lo))
    classes = walk.of_keys if plan.owns_keys else walk.of_queries
    found: Array = whole & (classes(visit.start, visit.stop) == FULL)
    return found


def _kept(mask: MaskAnalysis, walk: Walk, plan: Plan, visit: Visit, tile: int) -> int:
    """Elements of a tile that the mask keeps, of those that the kernel asks it about.

    Keys past the end are none of them, but where a loop asks about all; queries past the end are,
    unless the block owns keys.
    """
    owned, walked = _sides(walk, plan)
    start = tile * walked.block
    end = start + walked.block
    if not plan.loops_over_masks:
        end = min(end, walked.length)
    walked_here = np.arange(start, end) + walked.offset
    stop = visit.stop if plan.owns_keys else visit.start + owned.block
    owned_here = np.arange(visit.start, stop) + owned.offset
    if mask.always:
        return len(walked_here) * len(owned_here)
    q, k = (walked_here, owned_here) if plan.owns_keys else (owned_here, walked_here)
    with np.errstate(all="ignore"):
        kept = evaluate(mask.expr, {**walk.env, Q: q[:, None], K: k[None, :]})
    return int(np.count_nonzero(np.broadcast_to(kept, (len(q), len(k)))))
