"""The bytes that a kernel reads of a block-sparse layout, counted from the emitted code's search.

A warp searches for the next listed tile before its loop and in each step (`next_listed_tile`): each
of its lanes reads the count of one line of blocks that the thread block's tile touches, and then
searches that line's list by bisection. For a tile that the mask leaves full, the lanes divide the
layout blocks that it touches, and each stops at the first one that is not live (`layout_full`). In
a mixed tile, each lane reads the blocks of its rows (`layout_query_values`, `layout_key_values`),
or, where blocks are narrow or the mask is costly, the block of each element that the mask keeps
(`in_layout`). All warps of a thread block do the same, except for rows and elements, which they
divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.models.backward_sm90 import WALKING_WARPS
from flashgen.kernels.planner.models.kernel_model import MMA_ROWS
from flashgen.kernels.visits.listed_blocks import ListedBlocks
from flashgen.kernels.visits.visited_tiles import AlikeHeads, Visit, unmasked_tiles
from flashgen.shared.arch import WARP
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.tile_walk import EMPTY, Array, TileWalk
from flashgen.spec.language.symbols import K, Q

INDEX_BYTES = 4  # int32, of the lists and of their counts
LIVE_BYTES = 1  # bool, of the layout itself
LANES_OF_ROW = 4  # of a warp, which have the scores of a row


def bytes_of_layout(plan: Plan, heads: Iterable[AlikeHeads], *, by_rows: bool) -> dict[str, int]:
    """Bytes that a launch reads of the layout, by the names of the kernel's pointers.

    Args:
        by_rows: whether lanes read the blocks of their rows (`codegen.sparse.blocks_are_bits`).
    """
    counts = entries = blocks = 0
    searching, _ = _searching_warps(plan)
    for alike in heads:
        if alike.walk is None or alike.listed is None or alike.visits is None:
            return {}
        pairs = alike.batch * alike.heads_q * plan.walks
        times = pairs // plan.heads_per_tile
        for visit in alike.visits:
            reads = _reads_of_lists(alike.walk, plan, alike.listed, visit)
            counts += times * searching * sum(lines for lines, _ in reads)
            entries += times * searching * sum(entries_read for _, entries_read in reads)
            if plan.gathers:
                blocks += times * _reads_of_boxes(alike.walk, plan, alike.listed, visit)
                continue
            by_warps, by_lanes = _reads_of_tiles(alike.walk, plan, alike.listed, visit, by_rows)
            blocks += times * by_warps + pairs * by_lanes
    if plan.is_persistent:
        # The search that ends a tile of boxes is repeated for the next.
        return {"c_layout": LIVE_BYTES * blocks}
    side = "column" if plan.owns_keys else "row"
    return {
        "c_layout": LIVE_BYTES * blocks,
        f"c_layout_{side}_counts": INDEX_BYTES * counts,
        f"c_layout_{side}_blocks": INDEX_BYTES * entries,
    }


def _searching_warps(plan: Plan) -> tuple[int, int]:
    """Warps of a block that search for the next tile, and warps that test whether it is full."""
    if not plan.other_warps:
        return plan.warps, plan.warps
    walking, testing = WALKING_WARPS.get(plan.kernel, (1, 1))
    return walking + (plan.kernel == "fused" and not plan.in_passes), testing  # one adds dQ


def _reads_of_lists(
    walk: TileWalk, plan: Plan, listed: ListedBlocks, visit: Visit
) -> list[tuple[int, int]]:
    """The counts and entries that a warp reads in each search for the next tile."""
    block_range = walk.owned, visit.start, visit.stop, walk.walked
    exact = walk.mask.reach_exact
    may_keep = None if exact else walk.classes(visit.start, visit.stop) != EMPTY
    starts = list(_search_starts(visit, listed.tiles(*block_range), may_keep))
    together = plan.boxes_per_tile
    if plan.owns_keys and len(visit.tiles) % together:
        starts.append(starts[-1])  # the boxes end inside of a tile, and are searched again for one
    if plan.kernel == "dq" and plan.gathers:
        starts += visit.tiles[together::together]  # found behind a tile, and again for the next
    return [listed.reads(*block_range, tile) for tile in starts]


def _search_starts(visit: Visit, listed: Array, may_keep: Array | None) -> Iterator[int]:
    """The tiles from which the lists are searched, in order.

    Where the reach of the mask is not exact, the lists and the mask are evaluated alternately until
    they agree on a tile.
    """

    def next_of(choice: Array, tile: int) -> int:
        return next((t for t in range(tile, visit.end) if choice[t]), visit.end)

    tile = visit.first
    while True:
        yield tile
        listed_tile = next_of(listed, tile)
        tile = listed_tile if may_keep is None else next_of(may_keep, listed_tile)
        if tile != listed_tile:
            continue
        if tile >= visit.end:
            return
        tile += 1


def _reads_of_tiles(
    walk: TileWalk, plan: Plan, listed: ListedBlocks, visit: Visit, by_rows: bool
) -> tuple[int, int]:
    """Blocks read of the layout itself, for the tiles that a thread block visits.

    Returns:
        The number of blocks that its warps read for whole tiles, and the number of blocks that
        lanes read for the rows or the elements of a head.
    """
    lines = listed.lines(walk.owned, visit.start, visit.stop)
    unmasked = unmasked_tiles(walk, visit.start, visit.stop)
    block = walk.walked.block
    elements = 0
    shared = 0
    for tile in visit.tiles:
        if unmasked[tile]:
            start = tile * block
            stop = min(start + block, walk.walked.length)
            live = listed.live[np.ix_(lines, listed.walked_blocks(walk.walked, start, stop))]
            shared += _until_one_is_not_live(live.T if plan.owns_keys else live)
            if live.all():
                continue
        if by_rows:
            elements += _blocks_of_rows(walk, plan, listed)
        else:
            elements += _unmasked_elements(walk, plan, visit, tile)
    one_computes = plan.kernel == "forward" and plan.other_warps > 0
    repeats = 1 if one_computes else plan.column_warps // plan.score_warps
    return _searching_warps(plan)[1] * shared, repeats * elements


def _reads_of_boxes(walk: TileWalk, plan: Plan, listed: ListedBlocks, visit: Visit) -> int:
    """Blocks read of the layout itself, for the tiles that a thread block gathers.

    A lane of the producer reads the blocks that 16 rows, or keys, and a box touch. Where some of
    them are live and some not, the lanes of these rows read the block of each element of the tile.
    """
    together, block_count, size = plan.boxes_per_tile, 0, walk.walked.block
    tile_rows = plan.block_k if plan.owns_keys else plan.block_q
    rows = min(MMA_ROWS, walk.owned.block)
    for first in range(0, len(visit.tiles), together):
        boxes = visit.tiles[first : first + together]
        for group in range(tile_rows // MMA_ROWS):
            start = walk.owned.row(visit.start, MMA_ROWS * group % walk.owned.block)
            if start >= visit.stop:
                continue
            lines = listed.lines(walk.owned, start, min(start + rows, visit.stop))
            differ = False
            for box in boxes:
                end = min((box + 1) * size, walk.walked.length)
                box_blocks, mixed = _read_part(walk, listed, lines, box * size, end)
                block_count += box_blocks
                differ |= mixed
            block_count += MMA_ROWS * together * size * differ
    return block_count


def _read_part(
    walk: TileWalk, listed: ListedBlocks, lines: Array, start: int, stop: int
) -> tuple[int, bool]:
    """The blocks of these lines at walked positions, and whether some are live and some are not."""
    live = listed.live[np.ix_(lines, listed.walked_blocks(walk.walked, start, stop))]
    return live.size, bool(live.any() and not live.all())


def _until_one_is_not_live(live: Array) -> int:
    """The blocks that the lanes of a warp read, each until it finds one that is not live."""
    flat = live.ravel()
    turns = np.pad(flat, (0, -len(flat) % WARP)).reshape(-1, WARP)
    is_block = np.arange(turns.size).reshape(turns.shape) < len(flat)
    goes_on = np.vstack([np.ones((1, WARP), bool), np.logical_and.accumulate(turns)[:-1]])
    return int(np.count_nonzero(goes_on & is_block))


def _blocks_of_rows(walk: TileWalk, plan: Plan, listed: ListedBlocks) -> int:
    """The blocks that lanes read for the rows of a tile, rows past the end included."""
    rows, columns = walk.owned.block, walk.walked.block
    size = listed.walked_block
    if plan.in_passes:
        rows, columns, size = columns, rows, listed.owned_block
    times = -(-columns // plan.masked_columns)
    return LANES_OF_ROW * rows * times * ((plan.masked_columns - 1) // size + 2)


def _unmasked_elements(walk: TileWalk, plan: Plan, visit: Visit, tile: int) -> int:
    """The elements that the mask keeps, among the elements for which the kernel evaluates it.

    Keys past the end are excluded, except where the mask is evaluated in a loop over all elements.
    Queries past the end are included, except where the block owns keys.
    """
    owned, walked = walk.owned, walk.walked
    start = tile * walked.block
    end = start + walked.block
    if not plan.loops_over_masks:
        end = min(end, walked.length)
    walked_positions = np.arange(start, end) + walked.offset
    stop = visit.stop if plan.owns_keys else visit.start + owned.block
    owned_positions = np.arange(visit.start, stop) + owned.offset
    if walk.mask.always:
        return len(walked_positions) * len(owned_positions)
    positions = owned_positions, walked_positions
    q, k = positions[::-1] if plan.owns_keys else positions
    with np.errstate(all="ignore"):
        keeps = evaluate(walk.mask.expr, {**walk.env, Q: q[:, None], K: k[None, :]})
    return int(np.count_nonzero(np.broadcast_to(keeps, (len(q), len(k)))))
