"""The cost of a plan's model, computed from counted work instead of predicted work."""

from __future__ import annotations

from flashgen.arch import SCHEDULERS, WARP
from flashgen.planner.models.fitted_sm80 import BARRIER_CLOCKS
from flashgen.planner.quantities import Number
from flashgen.planner.tile_problem import PATHS
from flashgen.profile.kernel_profile import Profile


def counted_cost(profile: Profile) -> float:
    """Clocks of one SM for a launch, by the formula of the plan's own "cost".

    The clocks of each resource and the barriers are counted. The plan's formulas add them up: the
    clocks of the busiest resource, and those of the others that no other warp overlaps. PTX
    instructions are counted, which the assembler translates to other ones: the share of the matrix
    products among them is taken from the plan.
    """
    plan = profile.plan
    model = PATHS[plan.path][plan.kernel, plan.itemsize]
    counted = {each.name: each.counted for each in profile.work if each.unit == "clk"}
    at: dict[str, Number] = dict(plan.quantities)
    share = at["rest"] / (at["products"] + at["rest"])
    at |= counted
    at["rest"] = share * counted["issue"] * SCHEDULERS * WARP
    at["barriers"] = profile.totals.barriers / plan.warps * BARRIER_CLOCKS / plan.blocks_per_sm
    for formula in model.cost_steps:
        if formula.name in ("busiest", "alone", "cost"):
            at[formula.name] = formula(at)
    return float(at["cost"])
