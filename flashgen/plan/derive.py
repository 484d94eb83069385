"""From a chosen tile to a plan: every constraint with its numbers, and why nothing larger."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from flashgen.plan import model
from flashgen.plan.formulas import Formula, Number
from flashgen.plan.layout import layout
from flashgen.plan.search import (
    Excess,
    Problem,
    Tile,
    best_occupancy,
    cost,
    costs,
    excesses,
    larger,
    quantities,
)
from flashgen.plan.value import Line, Plan, Refusal

# The derivation line that a broken constraint belongs to.
_LINE_OF = {
    "shared memory": "smem",
    "shared memory per SM": "smem_sm",
    "registers per thread": "registers",
    "cost": "cost",
}
# Steps that the short form of a derivation leaves out.
_DETAILS = (
    *("columns", "dq_columns", "macs", "reads", "products", "rest", "special", "busiest"),
    *("overlap", "occupied"),
)


def made(problem: Problem, tile: Tile, policy: str, notes: tuple[str, ...]) -> Plan:
    """The plan of a feasible tile."""
    at = quantities(problem, tile)
    refused = refusals(problem, tile) if policy == "derived" else ()
    binding = {_LINE_OF[refusal.quantity] for refusal in refused if refusal.quantity in _LINE_OF}
    lines = [*_constraint_lines(problem, at), *_cost_lines(problem, tile)]
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
        **layout(problem.path, problem.kernel, at),
        smem_bytes=int(at["smem"]),
        sink_bytes=problem.sink_bytes,
        heads_per_tile=problem.heads_per_tile,
        registers=int(at["register_limit"]),
        registers_needed=math.ceil(at["registers"]),
        blocks_per_sm=tile.blocks,
        cost=cost(problem, tile),
        derivation=tuple(replace(line, binding=line.name in binding) for line in lines),
        refused=refused,
        notes=(
            _given(problem),
            *_path(problem),
            *_walked(problem),
            *_shared(problem, tile),
            *notes,
        ),
    )


def _given(problem: Problem) -> str:
    """The numbers behind the names that the derivation does not derive."""
    return (
        f"{problem.arch.name}: M {problem.smem_limit:,} B, M_sm {problem.smem_of_sm:,} B, "
        f"R {problem.arch.registers_per_sm:,}; rates of {problem.arch.product}; "
        f"clk: clocks of an SM per score element"
    )


def _path(problem: Problem) -> tuple[str, ...]:
    return (problem.path_note,) if problem.path_note else ()


def _walked(problem: Problem) -> tuple[str, ...]:
    if not problem.layout:
        return ()
    return (f"walks a block-sparse layout: {problem.layout}; clk are of tiles that it lists",)


def _shared(problem: Problem, tile: Tile) -> tuple[str, ...]:
    """What the rows of a tile are, where heads share it."""
    heads = problem.heads_per_tile
    if heads == 1:
        return ()
    return (
        f"heads_per_tile {heads}: query heads that share K and V, "
        f"{tile.owned // heads} queries of each = {tile.owned} rows",
    )


def _constraint_lines(problem: Problem, at: Mapping[str, Number]) -> list[Line]:
    of = problem.model
    return [
        *(printed(formula, at) for formula in of.sizes),
        printed(of.smem, at, "M"),
        printed(model.SMEM_OF_SM, at, "M_sm"),
        printed(of.register_limit, at),
        printed(of.registers, at, "register_limit"),
        printed(of.smem_bound, at, at_most=True),
        printed(of.register_bound, at, at_most=True),
    ]


def _cost_lines(problem: Problem, tile: Tile) -> list[Line]:
    at = costs(problem, tile)
    return [printed(formula, at) for formula in problem.model.cost_steps]


def printed(
    formula: Formula, at: Mapping[str, Number], limit_name: str = "", *, at_most: bool = False
) -> Line:
    return Line(
        name=formula.name,
        formula=formula.text,
        substituted=formula.substituted(at),
        value=formula(at),
        unit=formula.unit,
        relation="<=" if at_most else "=",
        limit=at[limit_name] if limit_name else None,
        limit_name=limit_name,
        detail=formula.name in _DETAILS,
    )


def refusals(problem: Problem, tile: Tile) -> tuple[Refusal, ...]:
    """Why each next larger tile is not the chosen one."""
    ours = cost(problem, tile)
    found = []
    for change, bigger in larger(problem, tile):
        broken = next(excesses(problem, bigger), None)
        if broken is None:
            best = best_occupancy(problem, bigger)
            assert best is not None, "it fits with one block per SM"
            change += f", blocks per SM {best.blocks}"
            broken = Excess("cost", cost(problem, best), ours, "clk")
        found.append(Refusal(change, broken.quantity, broken.needs, broken.limit, broken.unit))
    return tuple(found)
