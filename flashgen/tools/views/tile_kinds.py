"""The kind of every tile: what the kernel does in it, and which scores of it the mask keeps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import sympy

from flashgen.kernels.visits.visited_tiles import listed_blocks, unmasked_tiles, visits_of
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.tile_walk import Array, TileAxis, TileWalk
from flashgen.spec.language.symbols import B, H, K, Q
from flashgen.tools.views.mask_call import HeadGroup, MaskCall

ELEMENTS = 1 << 25
"""Scores at which masks of mixed tiles are evaluated for one picture: some seconds of time."""

_AT_ONCE = 1 << 19

_SAMPLES = 8
"""Queries and keys of a tile at which masks are evaluated first where tiles are many."""


class TileKind(IntEnum):
    """What a kernel does in a tile, and the exact class where it differs."""

    SKIPPED = 0
    FULL = 1
    MIXED = 2
    FULL_BUT_MASKED = 3
    EMPTY_BUT_VISITED = 4
    NOT_DECIDED = 5


@dataclass(frozen=True)
class Classified:
    """The kinds of the tiles of a group of heads.

    Attributes:
        kinds: uint8 [query tiles, key tiles], of `TileKind`.
        kept_scores: the number of scores that the mask keeps; None where it was not counted.
        evaluated: the number of scores at which the mask was evaluated.
    """

    kinds: Array
    kept_scores: int | None
    evaluated: int


def classify(call: MaskCall, group: HeadGroup, budget: int) -> Classified:
    """The kinds of the tiles of a group of heads.

    Tiles that the kernel skips and those in which it does not evaluate the mask are decided by the
    analysis, as in the kernel. The exact class of the others is found by evaluating the mask at
    every score. If there are more than ``budget`` such scores, tiles with a kept and a masked score
    among a few samples are found first; those that remain beyond the budget are not decided, unless
    the analysis proves that its bounds are exact.
    """
    visited, full = _by_kernel(call, group)
    kinds = np.where(
        visited, np.where(full, TileKind.FULL, TileKind.MIXED), TileKind.SKIPPED
    ).astype(np.uint8)
    masked = np.nonzero(kinds == TileKind.MIXED)
    tile = (call.tile.block_q, call.tile.block_k)
    scores = len(masked[0]) * tile[0] * tile[1]
    if scores <= budget:
        any_kept, all_kept, kept_scores = _evaluated(call, group, masked, tile)
        kinds[masked] = _kinds_of(any_kept, all_kept)
        rows, columns = _lengths(group.queries), _lengths(group.keys)
        in_full = int((full & visited).astype(np.int64).dot(columns).dot(rows))
        return Classified(kinds, in_full + kept_scores, scores)
    if call.mask.reach_exact and call.mask.full_exact and call.spec.block_sparse is None:
        return Classified(kinds, _kept_by_rows(call, group), 0)
    few = min(tile[0], _SAMPLES), min(tile[1], _SAMPLES)
    samples = len(masked[0]) * few[0] * few[1]
    kinds[masked] = TileKind.NOT_DECIDED
    if samples > budget:
        return Classified(kinds, _kept_by_rows(call, group), 0)
    any_kept, all_kept, _ = _evaluated(call, group, masked, few)
    kinds[masked] = np.where(any_kept & ~all_kept, TileKind.MIXED, TileKind.NOT_DECIDED)
    left = tuple(indices[~any_kept | all_kept] for indices in masked)
    scores = len(left[0]) * tile[0] * tile[1]
    if samples + scores <= budget:
        any_kept, all_kept, _ = _evaluated(call, group, left, tile)
        kinds[left] = _kinds_of(any_kept, all_kept)
        samples += scores
    return Classified(kinds, _kept_by_rows(call, group), samples)


def _kinds_of(any_kept: Array, all_kept: Array) -> Array:
    """The kinds of tiles that a kernel masks, by whether some and all of their scores are kept."""
    partly = np.where(any_kept, TileKind.MIXED, TileKind.EMPTY_BUT_VISITED)
    return np.where(all_kept, TileKind.FULL_BUT_MASKED, partly).astype(np.uint8)


def elements_of(call: MaskCall, group: HeadGroup, queries: range, keys: range) -> Array:
    """Which scores the mask and the block layout keep: bool [queries, keys].

    Args:
        queries, keys: positions, counted from 0.
    """
    q = np.array(queries, dtype=np.int64)[:, None] + group.queries.offset
    k = np.array(keys, dtype=np.int64)[None] + group.keys.offset
    with np.errstate(all="ignore"):
        keeps = evaluate(call.spec.keep, {**call.with_layout(group), Q: q, K: k})
    return np.broadcast_to(np.asarray(keeps, dtype=bool), (len(queries), len(keys)))


def _lengths(axis: TileAxis) -> Array:
    return np.array([stop - start for start, stop in axis.tiles()], dtype=np.int64)


def _by_kernel(call: MaskCall, group: HeadGroup) -> tuple[Array, Array]:
    """Which tiles the kernel visits, and in which it evaluates no mask: bool [queries, keys]."""
    owns_keys = call.tile.owns_keys
    b, h = group.first
    live = call.live_blocks(group)
    env = {**call.values(group), B: np.array([[b]]), H: np.array([[h]])}
    walk = TileWalk(call.mask, env.items(), group.queries, group.keys, owns_keys)
    in_whole = h + call.problem.first_head
    listed = listed_blocks(call.spec, live, b, in_whole, by_column=owns_keys)
    visited, full = [], []
    for visit in visits_of(walk, listed):
        tiles = np.zeros(len(walk.walked.corners()[0]), dtype=bool)
        tiles[visit.tiles] = True
        visited.append(tiles)
        full.append(tiles & unmasked_tiles(walk, visit.start, visit.stop, listed))
    classes = np.array(visited), np.array(full)
    return (classes[0].T, classes[1].T) if owns_keys else classes


def _evaluated(
    call: MaskCall, group: HeadGroup, tiles: tuple[Array, ...], points: tuple[int, int]
) -> tuple[Array, Array, int]:
    """Whether some score and whether every score of these tiles is kept, and how many are.

    Args:
        tiles: the rows and the columns of the tiles.
        points: the queries and keys of a tile at which the mask is evaluated, evenly spaced.
    """
    sizes = call.tile.block_q, call.tile.block_k
    values = call.with_layout(group)
    any_kept, all_kept = np.zeros((2, len(tiles[0])), dtype=bool)
    kept_scores = 0
    lines, across = (
        np.linspace(0, size - 1, count).round().astype(np.int64)
        for size, count in zip(sizes, points, strict=True)
    )
    step = max(1, _AT_ONCE // (points[0] * points[1]))
    for start in range(0, len(tiles[0]), step):
        row, column = (indices[start : start + step, None, None] for indices in tiles)
        q = row * sizes[0] - group.queries.before + lines[:, None]
        k = column * sizes[1] + across
        inside = (q >= 0) & (q < group.queries.length) & (k < group.keys.length)
        positions = {Q: q + group.queries.offset, K: k + group.keys.offset}
        with np.errstate(all="ignore"):
            keeps = np.asarray(evaluate(call.spec.keep, {**values, **positions}), dtype=bool)
        within = keeps & inside
        any_kept[start : start + step] = within.any((1, 2))
        all_kept[start : start + step] = (keeps | ~inside).all((1, 2))
        kept_scores += int(within.sum())
    return any_kept, all_kept, kept_scores


def _kept_by_rows(call: MaskCall, group: HeadGroup) -> int | None:
    """The number of kept scores where each row (or column) keeps one known range."""
    row = call.mask.row
    if row is None or call.spec.block_sparse is not None:
        return None
    owned, walked = (group.queries, group.keys)[:: -1 if call.tile.owns_keys else 1]
    positions = {
        K if call.tile.owns_keys else Q: np.arange(owned.length, dtype=np.int64) + owned.offset
    }
    values = {**call.values(group), **positions}

    def end(expr: sympy.Expr | None, default: int) -> Array:
        position = default if expr is None else evaluate(expr, values) - walked.offset
        inside: Array = np.clip(np.broadcast_to(position, owned.length), 0, walked.length)
        return inside

    return int(np.maximum(end(row.hi, walked.length) - end(row.lo, 0), 0).sum())
