"""The kernels of the backward pass: the plan of each, and which scheme is taken.

Two schemes (FlashAttention-2, Dao 2023, section 3; Algorithm 4 of FlashAttention): one kernel that
makes all gradients with five products per score and adds its share of dQ atomically, or two that
recompute the scores, with seven products and every sum in one order. Where the score function reads
learned tensors, another kernel makes their gradients: with atomic additions in float32, or, where
every run must give the same bits, with sums of whole numbers, which have no order.
"""

from __future__ import annotations

import functools

from flashgen.arch import Arch
from flashgen.errors import PlanError
from flashgen.plan.derive import made
from flashgen.plan.problem import problem_of
from flashgen.plan.refuse import does_not_fit, nothing_fits
from flashgen.plan.search import Problem, Tile, can_have, cheapest
from flashgen.plan.streams import delta
from flashgen.plan.value import BackwardPlan, Plan
from flashgen.spec import AttentionSpec

SCHEMES = {"fused": ("fused",), "split": ("dkdv", "dq")}
KERNELS = ("dkdv", "dq", "fused", "captured", "captured_exact")

# Sums of 64 bits hold 2^n contributions of up to 2^(62 - n) units. The unit is a power of 4, and
# the greatest contribution is known by its exponent: either may cost a factor of 2.
EXACT_NOTE = (
    "Launched twice: for the greatest contribution, then to add whole numbers of a unit. Where up "
    "to 2^n contributions meet in one element, a unit is at most 2^(n - 60) of the greatest: for n "
    "= 36, 2^-24 of it, what float32 rounds off."
)


def kernels_of(spec: AttentionSpec, *, deterministic: bool) -> dict[str, tuple[str, ...]]:
    """The schemes that ``spec`` can have, each with its kernels but delta, in their order."""
    # The sums of "fused" lie in whole tiles of rows, which packed sequences do not begin at.
    only_split = deterministic or spec.packed
    of_captured = of_learned(spec, deterministic=deterministic)
    return {
        name: (*parts, *of_captured)
        for name, parts in SCHEMES.items()
        if name == "split" or not only_split
    }


def of_learned(spec: AttentionSpec, *, deterministic: bool) -> tuple[str, ...]:
    """The kernel for the tensors that the score learns, where it learns any."""
    learned = (t for t in spec.tensors if t.grad and t.symbol in spec.score.free_symbols)
    if next(learned, None) is None:
        return ()
    return ("captured_exact" if deterministic else "captured",)


def plan_kernels(
    spec: AttentionSpec,
    arch: Arch,
    where: str,
    sram: int | None,
    deterministic: bool,
    spare: dict[str, int],
    tiles: dict[str, Tile],
) -> BackwardPlan:
    """See `flashgen.plan.plan_backward`; ``where`` names the spec in errors."""
    found: dict[str, Plan] = {}
    missing: dict[str, PlanError] = {}
    of_captured = of_learned(spec, deterministic=deterministic)
    for kernel in ("dkdv", "dq", "fused", *of_captured):
        problem = problem_of(spec, arch, sram, 16, spare.get(kernel, 0), kernel)
        tile = tiles.get(kernel)
        if tile is not None and not can_have(problem, tile):
            raise does_not_fit(problem, tile, where)
        chosen = _chosen(problem, tile)
        if chosen is None:
            missing[kernel] = nothing_fits(problem, where, given_sram=sram is not None)
        else:
            found[kernel] = chosen
    possible = [name for name, parts in SCHEMES.items() if all(part in found for part in parts)]
    able = kernels_of(spec, deterministic=deterministic)
    allowed = [name for name in possible if name in able]
    if not allowed:
        raise next(iter(missing.values()))
    costs = {name: sum(found[part].cost for part in SCHEMES[name]) for name in possible}
    given = [name for name in allowed if all(part in tiles for part in SCHEMES[name])]
    scheme = min(given or allowed, key=lambda name: (costs[name], name))
    kernels = (delta(spec, arch), *(found[part] for part in SCHEMES[scheme]))
    for kernel in of_captured:
        if kernel not in found:
            raise missing[kernel]
        kernels = (*kernels, found[kernel])
    notes = _why(found, costs, scheme, deterministic, spec.packed, is_given=scheme in given)
    return BackwardPlan(scheme, deterministic, kernels, notes)


@functools.lru_cache(maxsize=1024)
def _chosen(problem: Problem, given: Tile | None) -> Plan | None:
    """The plan of one kernel, with the given tile, or else the cheapest that fits."""
    tile = cheapest(problem) if given is None else given
    notes = (EXACT_NOTE,) if problem.kernel == "captured_exact" else ()
    policy = "derived" if given is None else "given"
    return None if tile is None else made(problem, tile, policy, notes)


def _why(
    found: dict[str, Plan],
    costs: dict[str, float],
    scheme: str,
    deterministic: bool,
    packed: bool,
    *,
    is_given: bool,
) -> tuple[str, ...]:
    """What each scheme costs, and what decided."""
    notes = []
    for name, parts in SCHEMES.items():
        if name in costs:
            each = " + ".join(f"{part} {found[part].cost:.4f}" for part in parts)
            products = "5 products per score" if name == "fused" else "7 products per score"
            total = f" = {costs[name]:.4f}" if len(parts) > 1 else ""
            notes.append(f"{name}: {products}, {each}{total} clk")
        else:
            lacking = " and ".join(part for part in parts if part not in found)
            notes.append(f"{name}: no tile of {lacking} fits")
    for plan in found.values():
        if plan.of_captured:
            products = f"{2 * plan.launches} products per score more"
            notes.append(f"{plan.kernel}: {products}, {plan.cost * plan.launches:.4f} clk")
    if deterministic:
        notes.append("split, because every sum must have one order: atomic additions have none")
    elif packed:
        notes.append("split, because the sums of fused lie in whole tiles: packed rows do not")
    elif is_given:
        notes.append(f"{scheme}, because its tiles are given")
    elif len(costs) > 1:
        notes.append(f"{scheme}, because its predicted cost is lower")
    else:
        notes.append(f"{scheme}, because nothing else fits")
    return tuple(notes)
