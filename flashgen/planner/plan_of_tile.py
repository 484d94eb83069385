"""From a chosen tile to a plan: each constraint with its numbers, and why no larger tile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from flashgen.planner.derivation import DerivationLine, Refusal, line_of
from flashgen.planner.kernel_plan import Plan
from flashgen.planner.models.kernel_model import SMEM_OF_SM
from flashgen.planner.quantities import Number, Quantities
from flashgen.planner.search import Excess, best_occupancy, cost, costs, excesses, larger
from flashgen.planner.shared_memory import tile_offsets
from flashgen.planner.tile import Tile
from flashgen.planner.tile_problem import TileProblem

# The derivation line of each constraint, by the name that `Excess` has for it.
_LINE_OF = {
    "shared memory": "smem",
    "shared memory per SM": "smem_sm",
    "registers per thread": "registers",
    "cost": "cost",
}


def plan_of_tile(
    problem: TileProblem, tile: Tile, policy: str, notes: tuple[str, ...] = ()
) -> Plan:
    """The plan of a feasible tile.

    Args:
        policy: as in `Plan.policy`.
        notes: lines to print after the plan's own.
    """
    at = costs(problem, tile)
    refused = refusals(problem, tile) if policy == "derived" else ()
    binding = {_LINE_OF[refusal.quantity] for refusal in refused if refusal.quantity in _LINE_OF}
    return Plan(
        kernel=problem.kernel,
        arch=problem.arch.name,
        path=problem.path,
        policy=policy,
        dtype=problem.dtype,
        itemsize=problem.itemsize,
        head_dim=problem.d_qk,
        head_dim_v=problem.d_v,
        block_q=int(at["block_q"]),
        block_k=int(at["block_k"]),
        warps=tile.warps,
        column_warps=tile.column_warps,
        score_warps=tile.score_warps,
        stages=int(at["stages"]),
        access_bytes=problem.access_bytes,
        **tile_offsets(problem.path, problem.kernel, at),
        smem_bytes=int(at["smem"]),
        sink_bytes=problem.sink_bytes,
        heads_per_tile=problem.heads_per_tile,
        registers=int(at["register_limit"]),
        registers_needed=math.ceil(at["registers"]),
        blocks_per_sm=tile.blocks,
        cost=float(at["cost"]),
        quantities=Quantities(at),
        derivation=tuple(
            replace(line, binding=line.name in binding) for line in _lines(problem, at)
        ),
        refused=refused,
        notes=(*_notes(problem, tile), *notes),
    )


def _notes(problem: TileProblem, tile: Tile) -> Iterator[str]:
    """Printed notes: the quantities that the derivation takes as given, and the code path."""
    yield (
        f"{problem.arch.name}: M {problem.smem_limit:,} B, M_sm {problem.smem_of_sm:,} B, "
        f"R {problem.arch.registers_per_sm:,}; rates of {problem.arch.product}; "
        f"clk: clocks of an SM per score element"
    )
    if problem.path_note:
        yield problem.path_note
    if problem.block_layout:
        yield (
            f"visits the tiles of a block-sparse layout: {problem.block_layout}; "
            "clk are per score element of these tiles"
        )
    heads = problem.heads_per_tile
    if heads > 1:
        yield (
            f"heads_per_tile {heads}: query heads that share K and V, "
            f"{tile.owned // heads} queries of each = {tile.owned} rows"
        )


def _lines(problem: TileProblem, at: Mapping[str, Number]) -> Iterator[DerivationLine]:
    """The constraints, the bounds that are solved from them, and the cost."""
    model = problem.model
    for formula in model.sizes:
        yield line_of(formula, at)
    yield line_of(model.smem, at, "M")
    yield line_of(SMEM_OF_SM, at, "M_sm")
    yield line_of(model.register_limit, at)
    yield line_of(model.registers, at, "register_limit")
    yield line_of(model.smem_bound, at, upper_bound=True)
    yield line_of(model.register_bound, at, upper_bound=True)
    for formula in model.cost_steps:
        yield line_of(formula, at)


def refusals(problem: TileProblem, tile: Tile) -> tuple[Refusal, ...]:
    """Why each next larger tile was not chosen."""
    found = []
    for change, bigger in larger(problem, tile):
        broken = next(excesses(problem, bigger), None)
        if broken is None:
            best = best_occupancy(problem, bigger)
            assert best is not None, "it fits with one block per SM"
            change += f", blocks per SM {best.blocks}"
            broken = Excess("cost", cost(problem, best), cost(problem, tile), "clk")
        found.append(Refusal(change, broken.quantity, broken.needs, broken.limit, broken.unit))
    return tuple(found)
