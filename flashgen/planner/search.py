"""The search: the tiles of a kernel that fit, and the one of least predicted cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

from flashgen.launch_facts import head_places
from flashgen.planner.derivation import Excess
from flashgen.planner.formulas import tidy
from flashgen.planner.models.backward_sm80 import SYNCS, dq_row_warps
from flashgen.planner.models.kernel_model import MMA_ROWS, STEP
from flashgen.planner.models.panels_sm90 import GROUP_ROWS
from flashgen.planner.quantities import Number
from flashgen.planner.tile_problem import Tile, TileProblem
from flashgen.planner.windows import window_bytes


def quantities(problem: TileProblem, tile: Tile) -> dict[str, Number]:
    """The quantities of the kernel's constraints, evaluated for a tile."""
    at = {**_of_shape(problem, tile), "blocks": tile.blocks}
    return problem.model_of(tile).needs(at)


def _of_shape(problem: TileProblem, tile: Tile) -> dict[str, Number]:
    """The quantities that are given for a tile, whatever its number of resident blocks."""
    at: dict[str, Number] = {
        **problem.given,
        problem.model.owns: tile.owned,
        problem.model.walks: tile.step,
        "warps": tile.warps,
        "row_groups": tile.row_groups,
    }
    if problem.kernel != "forward":
        at |= {
            "column_warps": tile.column_warps,
            "score_warps": tile.score_warps,
            "repeats": tile.column_warps // tile.score_warps,
            "exchanged": tile.exchanged,
            "dq_row_warps": dq_row_warps(int(at["block_q"]), tile.warps, problem.d_qk),
            "syncs": SYNCS + (1 if tile.exchanged else 0),
        }
    if problem.learned:
        rows = MMA_ROWS * tile.row_groups
        at["windows"] = window_bytes(
            problem.kernel, problem.dtype, problem.learned, rows, tile.step
        )
    return at


def costs(problem: TileProblem, tile: Tile) -> dict[str, Number]:
    """`quantities` and those of the cost; "cost" is in clocks of one SM per score element."""
    return problem.model_of(tile).costs(quantities(problem, tile))


def cost(problem: TileProblem, tile: Tile) -> float:
    """Predicted clocks of one SM per score element."""
    return float(costs(problem, tile)["cost"])


def excesses(
    problem: TileProblem, tile: Tile, at: Mapping[str, Number] | None = None
) -> Iterator[Excess]:
    """The constraints that a tile violates, the most informative first; ``at``: `quantities`."""
    arch, at = problem.arch, quantities(problem, tile) if at is None else at
    of = problem.model_of(tile)
    if tile.step > of.max_step:
        rows = "keys" if of.walks == "block_k" else "queries"
        yield Excess(f"{rows} per step", tile.step, of.max_step, "")
    if tile.warps > max(of.warp_counts):
        yield Excess("warps", tile.warps, max(of.warp_counts), "")
    if at["smem"] > problem.smem_limit:
        yield Excess("shared memory", at["smem"], problem.smem_limit, "B")
    elif at["smem_sm"] > problem.smem_of_sm:
        yield Excess("shared memory per SM", at["smem_sm"], problem.smem_of_sm, "B")
    if at["registers"] > at["register_limit"]:
        yield Excess("registers per thread", tidy(at["registers"]), at["register_limit"], "")
    resident = tile.blocks * (tile.warps + of.other_warps)
    if resident > arch.warps_per_sm:
        yield Excess("resident warps", resident, arch.warps_per_sm, "")
    if tile.blocks > arch.blocks_per_sm:
        yield Excess("resident blocks", tile.blocks, arch.blocks_per_sm, "")
    if of.copies_rows and tile.warps < problem.copy_warps:
        yield Excess("warps to copy a row", problem.copy_warps, tile.warps, "")
    yield from obstacles_to_sharing(
        problem.path, tile.owned, problem.heads_per_tile, dropout=problem.dropout_ops > 0
    )


def obstacles_to_sharing(path: str, block_q: int, heads: int, *, dropout: bool) -> Iterator[Excess]:
    """Why a tile of ``block_q`` rows cannot be shared by this number of heads.

    The 16 rows of an mma, a row group, are those of one head or of several heads with 8, 4, 2 or 1
    queries each. With dropout they are those of one head, because a call of Philox serves 16 x 16
    elements of a head. On "sm_90a" one TMA box of Q has the rows of a warpgroup: all rows of
    several heads, or some rows of one.
    """
    if heads == 1:
        return
    places = head_places(block_q, heads)
    queries = Fraction(block_q, places)
    if queries < 1:
        yield Excess("heads per tile", places, block_q, "")
    elif queries % MMA_ROWS and (dropout or MMA_ROWS % queries):
        yield Excess("heads per row group", max(2, math.ceil(MMA_ROWS / queries)), 1, "")
    elif path == "sm_90a" and queries % GROUP_ROWS and GROUP_ROWS % queries:
        boxes = GROUP_ROWS // math.gcd(GROUP_ROWS, int(queries))
        yield Excess("boxes of Q per warpgroup", boxes, 1, "")


def fits(problem: TileProblem, tile: Tile) -> bool:
    """Whether the tile violates no constraint."""
    return next(excesses(problem, tile), None) is None


def is_feasible(problem: TileProblem, tile: Tile) -> bool:
    """Whether the template supports this tile, and it fits."""
    shape = tile.at_occupancy(1) in shapes(problem)
    return shape and tile.blocks >= 1 and fits(problem, tile)


def with_blocks(problem: TileProblem, tile: Tile) -> list[Tile]:
    """The tile at every number of resident blocks with which it fits."""
    return [found for found, _ in _evaluated(problem, tile)]


def _evaluated(problem: TileProblem, tile: Tile) -> Iterator[tuple[Tile, dict[str, Number]]]:
    """The tiles of `with_blocks`, each with its `quantities`."""
    needs, of_shape = problem.model_of(tile).needs, _of_shape(problem, tile)
    for blocks in range(1, problem.arch.blocks_per_sm + 1):
        candidate = tile.at_occupancy(blocks)
        at = needs({**of_shape, "blocks": blocks})
        if next(excesses(problem, candidate, at), None) is not None:
            return  # more blocks leave fewer resources to each
        yield candidate, at


def shapes(problem: TileProblem) -> Iterator[Tile]:
    """Every tile that the template supports, whether it fits or not, with one block per SM."""
    for model in filter(None, (problem.model, problem.model.other_form)):
        for column_warps, score_warps in model.sharing:
            for warps in model.warp_counts:
                if warps % column_warps:
                    continue
                for row_groups in model.row_groups:
                    unit = Tile(STEP, warps, row_groups, 1, column_warps, score_warps).unit
                    for step in range(unit, model.max_step + 1, unit):
                        yield Tile(step, warps, row_groups, 1, column_warps, score_warps)


def tiles_of(problem: TileProblem) -> Iterator[Tile]:
    """Every feasible tile."""
    for shape in shapes(problem):
        yield from with_blocks(problem, shape)


@functools.lru_cache(maxsize=1024)
def cheapest(problem: TileProblem) -> Tile | None:
    """The feasible tile of least predicted cost; None when there is none."""
    return _least(problem, shapes(problem))


def best_occupancy(problem: TileProblem, tile: Tile) -> Tile | None:
    """The tile with its cheapest number of resident blocks; None when it never fits."""
    return _least(problem, [tile])


def _least(problem: TileProblem, shapes: Iterable[Tile]) -> Tile | None:
    """The cheapest of these tiles and of their numbers of resident blocks."""
    found = (
        (float(problem.model_of(tile).costs(at)["cost"]), tile)
        for shape in shapes
        for tile, at in _evaluated(problem, shape)
    )
    return min(found, default=(math.inf, None))[1]


def larger(problem: TileProblem, tile: Tile) -> Iterator[tuple[str, Tile]]:
    """The next larger tiles, each with a description of the change."""
    model = problem.model_of(tile)
    owns, walks = model.owns, model.walks
    rows = "rows" if owns == "block_q" else "keys"
    longer = replace(tile, step=tile.step + tile.unit, blocks=1)
    yield f"{walks} {longer.step}", longer
    if tile.row_groups < max(model.row_groups):
        taller = replace(tile, row_groups=tile.row_groups + 1, blocks=1)
        yield f"{owns} {taller.owned} by {MMA_ROWS * taller.row_groups} {rows} per warp", taller
    more = [warps for warps in model.warp_counts if warps > tile.warps]
    wider = replace(tile, warps=more[0] if more else 2 * tile.warps, blocks=1)
    yield f"{owns} {wider.owned} by {wider.warps} warps", wider


def smallest(problem: TileProblem) -> Tile:
    """The tile that needs the least shared memory, among tiles with enough warps to copy a row.

    Tiles whose registers do not fit count only where no tile's registers fit.
    """

    def size(tile: Tile) -> tuple[bool, Number, Tile]:
        at = quantities(problem, tile)
        return at["registers"] > at["register_limit"], at["smem"], tile

    least = problem.copy_warps if problem.model.copies_rows else 1
    return min((s for s in shapes(problem) if s.warps >= least), key=size)
