"""The plan of the tangent pass (forward mode): one kernel, of which O and LSE are inputs.

Which products the kernel has depends on the tangents that a call gives: five per score with those
of q, k and v, and fewer without some of them. The names of the tangents are part of its plan.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from flashgen.kernels.planner.backward_schemes import plan_schemes
from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.models.spec_terms import moving_terms
from flashgen.kernels.planner.plan_errors import check_size, given_tile, no_tile_fits
from flashgen.kernels.planner.plan_of_tile import plan_of_tile
from flashgen.kernels.planner.requests import BackwardPlanRequest, TangentPlanRequest
from flashgen.kernels.planner.search import cheapest
from flashgen.kernels.planner.tile_problem import problem_of
from flashgen.shared.arch import facts
from flashgen.shared.errors import PlanError
from flashgen.spec.language.signature import refuse_backward
from flashgen.spec.language.spec import AttentionSpec


@functools.lru_cache(maxsize=1024)
def plan_tangent(request: TangentPlanRequest) -> Plan:
    """The plan of the kernel that computes the tangents of O and LSE.

    Raises:
        PlanError: the architecture is unknown, or no tile, or not the given tile, fits; or the
            tangents need no kernel.
        SpecError: the spec has no derivative, because it is a partial result.
    """
    spec, arch = request.spec, facts(request.arch)
    check_size(spec)
    refuse_backward(spec)
    if not moves(spec, request.tangents):
        raise PlanError(
            "tangents by which neither scores nor V move need no kernel",
            where="tangents=...",
            numbers=f"given {', '.join(request.tangents)}",
            way_out="the call itself, which computes them row by row",
        )
    problem = problem_of(
        spec,
        arch,
        request.sram,
        16,
        request.spare_registers,
        "tangent",
        tangents=request.tangents,
    )
    if request.tile is not None:
        return plan_of_tile(problem, given_tile(problem, request.tile), "given")
    chosen = cheapest(problem)
    if chosen is None:
        raise no_tile_fits(problem, given_sram=request.sram is not None)
    quantities = chosen.quantities
    score_products = 1 + int(quantities["q_moves"] + quantities["k_moves"])
    value_products = int(quantities["scores_move"] + quantities["v_moves"])
    note = (
        f"tangents of {', '.join(request.tangents)}: {score_products + value_products} products "
        f"per score, {score_products} of rows of q and k and {value_products} with v, "
        f"{chosen.cost:.4f} clk"
    )
    try:
        backward = plan_schemes(BackwardPlanRequest(spec, request.arch, request.sram))
    except PlanError:
        comparison = ""
    else:
        products = 5 if backward.scheme == "fused" else 7
        comparison = f"; the backward pass has {products}, {backward.cost:.4f} clk"
    return plan_of_tile(problem, chosen, "derived", (note + comparison,))


def moves(spec: AttentionSpec, tangents: Collection[str]) -> bool:
    """Whether scores or V have a tangent, so that there are products with V to compute.

    Args:
        tangents: the names of the tensors that have a tangent.
    """
    moving = moving_terms(spec, tangents)
    return bool(moving["scores_move"] or moving["v_moves"])
