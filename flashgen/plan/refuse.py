"""The error when no tile fits: what the smallest one needs, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashgen.arch import facts, known
from flashgen.errors import PlanError
from flashgen.plan.formulas import counted
from flashgen.plan.search import Problem, Tile, excesses, fits, quantities, shapes, smallest


def nothing_fits(problem: Problem, where: str, *, given_sram: bool) -> PlanError:
    """The error for a problem without a feasible tile.

    Args:
        where: the spec.
        given_sram: M is the caller's, not the architecture's.
    """
    tile = smallest(problem)
    at = quantities(problem, tile)
    needed = int(at["smem"])
    if at["registers"] > at["register_limit"]:
        what = "no tile fits in the registers of a thread"
        needs, limit = f"{at['registers']:,g}", f"{at['register_limit']} per thread"
    else:
        what = "no tile fits in shared memory"
        whose = "as sram says" if given_sram else f"on {problem.arch.name}"
        needs, limit = f"{needed:,} B", f"{problem.smem_limit:,} B per block {whose}"
    return PlanError(
        what,
        where=where if problem.kernel == "forward" else f"{where}, kernel {problem.kernel}",
        numbers=f"needs {needs} at the smallest tile (block_q {at['block_q']}, "
        f"block_k {at['block_k']}); limit {limit}",
        way_out="\n".join(_ways_out(problem, needed, given_sram)),
    )


def does_not_fit(problem: Problem, tile: Tile, where: str) -> PlanError:
    """The error for a tile that the caller asks for and that the kernel cannot have.

    Args:
        where: the spec.
    """
    if replace(tile, blocks=1) not in shapes(problem) or tile.blocks < 1:
        numbers = "no such combination of steps, warps and what they share is in the template"
    else:
        broken = next(excesses(problem, tile))
        needs, limit = counted(broken.needs), counted(broken.limit)
        numbers = f"{broken.quantity}: {needs} against {limit} {broken.unit}".rstrip()
    return PlanError(
        "the kernel cannot have the given tile",
        where=f"{where}, kernel {problem.kernel}, {tile}",
        numbers=numbers,
        way_out="one of flashgen.plan.feasible(spec, arch, kernel=...), or none, to derive it",
    )


def _least_smem(problem: Problem) -> int:
    return int(quantities(problem, smallest(problem))["smem"])


def _ways_out(problem: Problem, needed: int, given_sram: bool) -> Iterator[str]:
    """Changes with which the smallest tile fits, each found by asking the model."""
    if problem.itemsize > 2:
        half = replace(problem, dtype="float16", itemsize=2)
        if fits(half, smallest(half)):
            yield f'dtype="float16" ({_least_smem(half):,} B)'
    for dim in range(max(problem.d_qk, problem.d_v) - 8, 0, -8):
        lower = replace(problem, d_qk=min(problem.d_qk, dim), d_v=min(problem.d_v, dim))
        if fits(lower, smallest(lower)):
            yield f"head_dim={dim} ({_least_smem(lower):,} B)"
            break
    if needed <= problem.smem_limit:
        return  # shared memory is not what is missing
    if given_sram:
        own = problem.arch.smem_per_block
        yield f"sram={needed}" + (f", or none for {problem.arch.name}'s own {own:,} B")
    else:
        able = [name for name in known() if facts(name).smem_per_block >= needed]
        if able:
            yield f"arch={' or '.join(able)}"
