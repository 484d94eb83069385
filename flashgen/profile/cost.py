"""A plan's cost with what was counted in place of what was predicted."""

from __future__ import annotations

from flashgen.arch import SCHEDULERS, WARP
from flashgen.plan.formulas import Number
from flashgen.plan.search import model_of
from flashgen.profile.value import Profile

BARRIER_CLOCKS = 300  # that a block stands still at a barrier: `flashgen.plan.model`


def counted_cost(profile: Profile) -> float:
    """Clocks of one SM for a launch, by the rule of the plan's own "cost".

    The clocks of each resource and the barriers are those that were counted. How the resources add
    up is the plan's: the busiest one's clocks, and what other warps do not hide. Instructions of
    PTX are counted, which the assembler makes others of: the products' share of them is the
    plan's.
    """
    plan, model = (
        profile.plan,
        model_of(profile.plan.path, profile.plan.kernel, profile.plan.itemsize),
    )
    counted = {each.name: each.counted for each in profile.work if each.unit == "clk"}
    at: dict[str, Number] = {line.name: line.value for line in plan.derivation}
    share = at["rest"] / (at["products"] + at["rest"])
    at |= counted
    at["rest"] = share * counted["issue"] * SCHEDULERS * WARP
    at["barriers"] = profile.totals.barriers / plan.warps * BARRIER_CLOCKS / plan.blocks_per_sm
    for formula in model.cost_steps:
        if formula.name in ("busiest", "alone", "cost"):
            at[formula.name] = formula(at)
    return float(at["cost"])
