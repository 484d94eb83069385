"""The schemes of the backward pass: the plan of each kernel, and the choice of a scheme.

There are two schemes (FlashAttention-2, Dao 2023, section 3; Algorithm 4 of FlashAttention). One
kernel computes all gradients with five products per score and adds its share of dQ atomically to
float32 sums, which a further kernel converts; or two kernels recompute the scores, with seven
products, and every sum has a fixed order. Where the score function reads learned tensors, another
kernel computes their gradients: with atomic additions of floats, or, where every run must have the
same bits, with sums of integers, which do not depend on the order.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from flashgen.kernels.planner.backward_plan import BackwardPlan
from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.plan_errors import check_size, given_tile, no_tile_fits
from flashgen.kernels.planner.plan_of_tile import plan_of_tile
from flashgen.kernels.planner.requests import BackwardPlanRequest
from flashgen.kernels.planner.search import cheapest
from flashgen.kernels.planner.streaming_kernels import plan_convert, plan_delta
from flashgen.kernels.planner.tile_problem import problem_of
from flashgen.shared.arch import facts
from flashgen.shared.errors import PlanError
from flashgen.spec.language.signature import refuse_backward
from flashgen.spec.language.spec import AttentionSpec

SCHEMES = {"fused": ("fused",), "split": ("dkdv", "dq")}

# A 64-bit sum holds 2^n contributions of up to 2^(62 - n) units each. The unit is rounded to a
# power of 4, and only the exponent of the greatest contribution is stored; each of the two may cost
# a factor of 2.
EXACT_NOTE = (
    "Launched twice: first to find the greatest contribution, then to add integer multiples of a "
    "unit. Where up to 2^n contributions are added to one element, the unit is at most 2^(n - 60) "
    "of the greatest: for n = 36 this is 2^-24 of it, the rounding error of float32."
)


def kernels_of(spec: AttentionSpec, *, deterministic: bool) -> dict[str, tuple[str, ...]]:
    """The schemes that ``spec`` allows, each with its kernels that have tiles, in launch order."""
    learned_kernels = kernel_for_learned(spec, deterministic=deterministic)
    return {
        name: (*parts, *learned_kernels)
        for name, parts in SCHEMES.items()
        if name == "split" or not deterministic
    }


def kernel_for_learned(spec: AttentionSpec, *, deterministic: bool) -> tuple[str, ...]:
    """The kernel for the gradients of the score's learned tensors; () without learned tensors."""
    learned = (t for t in spec.tensors if t.grad and t.symbol in spec.score.free_symbols)
    if next(learned, None) is None:
        return ()
    return ("captured_exact" if deterministic else "captured",)


def streaming_kernels_of(spec: AttentionSpec, key_plan: Plan) -> tuple[Plan, ...]:
    """The kernels before and after the kernels that compute scores: "delta", and a kernel for each
    gradient whose sums are converted.

    Args:
        key_plan: the plan of the kernel that computes dK and dV.
    """
    arch, path, sums_tile = key_plan.arch, key_plan.path, key_plan.sums_tile
    delta = plan_delta(spec, arch, path, sums_tile)
    sums = {} if sums_tile is None else {"dq": (path, sums_tile)}
    if key_plan.in_parts:  # in the order of the sums of mma.sync: rows are rows
        rows, d_qk, d_v = key_plan.block_k, key_plan.head_dim, key_plan.head_dim_v
        sums |= {"dk": ("sm_80", (rows, d_qk)), "dv": ("sm_80", (rows, d_v))}
    converted = (plan_convert(spec, arch, name, *path_tile) for name, path_tile in sums.items())
    return delta, *(
        plan if plan.kernel == "convert_dq" else replace(plan, fused_plan=key_plan)
        for plan in converted
    )


@functools.lru_cache(maxsize=1024)
def plan_schemes(request: BackwardPlanRequest) -> BackwardPlan:
    """See `flashgen.kernels.planner.plan_backward`."""
    spec, deterministic, tiles = request.spec, request.deterministic, dict(request.tiles)
    check_size(spec)
    refuse_backward(spec, alone=request.alone)
    if request.alone:
        return _plan_alone(request)
    plans: dict[str, Plan] = {}
    missing: dict[str, PlanError] = {}
    learned_kernels = kernel_for_learned(spec, deterministic=deterministic)
    for kernel in ("dkdv", "dq", "fused", *learned_kernels):
        planned = _planned(request, kernel)
        if isinstance(planned, PlanError):
            missing[kernel] = planned
        else:
            plans[kernel] = planned
    possible = [name for name, parts in SCHEMES.items() if all(part in plans for part in parts)]
    supported = kernels_of(spec, deterministic=deterministic)
    allowed = [name for name in possible if name in supported]
    if not allowed:
        raise next(iter(missing.values()))
    costs = {name: sum(plans[part].cost for part in SCHEMES[name]) for name in possible}
    fixed = [name for name in allowed if all(part in tiles for part in SCHEMES[name])]
    scheme = min(fixed or allowed, key=lambda name: (costs[name], name))
    for kernel in learned_kernels:
        if kernel not in plans:
            raise missing[kernel]
    parts = [plans[name] for name in SCHEMES[scheme]]
    if request.in_parts and parts[0].divides_groups:
        parts[0] = replace(parts[0], in_parts=True)
    delta, *convert = streaming_kernels_of(spec, parts[0])
    kernels = (delta, *parts, *convert, *(plans[name] for name in learned_kernels))
    if deterministic:
        why = "split, because every sum must have a fixed order: atomic additions have none"
    elif fixed:
        why = f"{scheme}, because its tiles are given"
    elif len(costs) > 1:
        why = f"{scheme}, because its predicted cost is lower"
    else:
        why = f"{scheme}, because nothing else fits"
    if parts[0].in_parts:
        bytes_of_key = 4 * (parts[0].head_dim + parts[0].head_dim_v)
        why += (
            f"; its blocks own parts of groups of query heads: {bytes_of_key:,} B per key, key "
            "head and part are written, and read by the kernels that add the parts in their order"
        )
    return BackwardPlan(scheme, deterministic, kernels, (*_costs_of_schemes(plans, costs), why))


def _planned(request: BackwardPlanRequest, kernel: str) -> Plan | PlanError:
    """The plan of a kernel with scores; where no tile fits, the error, as another kernel may do."""
    spare, tile = dict(request.spare_registers).get(kernel, 0), dict(request.tiles).get(kernel)
    problem = problem_of(request.spec, facts(request.arch), request.sram, 16, spare, kernel)
    chosen = cheapest(problem, request.few_rows) if tile is None else given_tile(problem, tile)
    if chosen is None:
        return no_tile_fits(problem, given_sram=request.sram is not None)
    notes = (EXACT_NOTE,) if kernel == "captured_exact" else ()
    return plan_of_tile(problem, chosen, "derived" if tile is None else "given", notes)


_ALONE = {
    "queries": ("dq", "the gradient of q alone, 3 products per score"),
    "keys": ("dkdv", "the gradients of k and v alone, 4 products per score"),
}


def _plan_alone(request: BackwardPlanRequest) -> BackwardPlan:
    """The kernels of the gradient of q alone, or of k and v alone, in sums of a fixed order.

    "delta" comes first whatever the weights are: the other kernel starts while the kernel before it
    runs, and that must be a kernel of the same call.
    """
    kernel, description = _ALONE[request.alone]
    planned = _planned(request, kernel)
    if isinstance(planned, PlanError):
        raise planned
    kernels = plan_delta(request.spec, planned.arch, planned.path), planned
    why = f"{request.alone}: {description}, {kernel} {planned.cost:.4f} clk"
    return BackwardPlan(request.alone, True, kernels, (why,))


def _costs_of_schemes(plans: dict[str, Plan], costs: dict[str, float]) -> list[str]:
    """Printed lines: the cost of each scheme, and the cost that learned tensors add."""
    notes = []
    for name, parts in SCHEMES.items():
        if name in costs:
            terms = " + ".join(f"{part} {plans[part].cost:.4f}" for part in parts)
            products = "5 products per score" if name == "fused" else "7 products per score"
            total = f" = {costs[name]:.4f}" if len(parts) > 1 else ""
            notes.append(f"{name}: {products}, {terms}{total} clk")
        else:
            lacking = " and ".join(part for part in parts if part not in plans)
            notes.append(f"{name}: no tile of {lacking} fits")
    for plan in plans.values():
        if plan.is_for_learned:
            products = f"{2 * plan.launches} products per score more"
            notes.append(f"{plan.kernel}: {products}, {plan.cost * plan.launches:.4f} clk")
    return notes
