"""All tiles that a kernel can have, as plans, the cheapest first."""

from __future__ import annotations

from flashgen.arch import facts
from flashgen.plan.derive import made
from flashgen.plan.problem import problem_of
from flashgen.plan.search import tiles
from flashgen.plan.value import Plan
from flashgen.spec import AttentionSpec


def feasible(
    spec: AttentionSpec, arch: str = "sm_80", *, kernel: str = "forward", sram: int | None = None
) -> tuple[Plan, ...]:
    """A plan for every feasible tile of a kernel, by predicted cost; none where nothing fits.

    Args:
        arch, sram: as for `flashgen.plan.plan`.
        kernel: "forward", or of backward "dkdv", "dq", "fused", "captured" or "captured_exact".

    Raises:
        PlanError: the architecture is unknown.
    """
    problem = problem_of(spec, facts(arch), sram, 16, 0, kernel)
    plans = (made(problem, tile, "given", ()) for tile in tiles(problem))
    return tuple(sorted(plans, key=lambda plan: (plan.cost, plan.tile)))
