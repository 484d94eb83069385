"""Block sizes derived from the SRAM size M, registers and traffic, with the derivation.

``plan(spec, arch)`` enumerates the tiles that fit the architecture, chooses the one of least
predicted cost, and gives the reasons: ``print(plan(spec, "sm_80"))``.
"""

from flashgen.kernels.planner.api import feasible, plan, plan_backward, plan_forward
from flashgen.kernels.planner.backward_plan import BackwardPlan
from flashgen.kernels.planner.backward_schemes import plan_schemes
from flashgen.kernels.planner.column_parts import columns_of_launch
from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.parts_of_groups import parts_pay, times_of_parts
from flashgen.kernels.planner.requests import (
    NO_TILES,
    BackwardPlanRequest,
    PlanRequest,
    TangentPlanRequest,
    tangents_of,
)
from flashgen.kernels.planner.schedule import choose_heads, few_rows_of, is_unpaired
from flashgen.kernels.planner.split_keys import (
    invariant_splits,
    plan_splits,
    run_of_splits,
    split_of_call,
)
from flashgen.kernels.planner.streaming_kernels import (
    plan_merge,
    plan_rows,
)
from flashgen.kernels.planner.tangent_pass import moves, plan_tangent
from flashgen.kernels.planner.tile_problem import Tile
from flashgen.kernels.planner.traffic import (
    backward_traffic,
    forward_traffic,
)

__all__ = [
    "NO_TILES",
    "BackwardPlan",
    "BackwardPlanRequest",
    "Plan",
    "PlanRequest",
    "TangentPlanRequest",
    "Tile",
    "backward_traffic",
    "choose_heads",
    "columns_of_launch",
    "feasible",
    "few_rows_of",
    "forward_traffic",
    "invariant_splits",
    "is_unpaired",
    "moves",
    "parts_pay",
    "plan",
    "plan_backward",
    "plan_forward",
    "plan_merge",
    "plan_rows",
    "plan_schemes",
    "plan_splits",
    "plan_tangent",
    "run_of_splits",
    "split_of_call",
    "tangents_of",
    "times_of_parts",
]
