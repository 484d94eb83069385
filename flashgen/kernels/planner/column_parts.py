"""The columns of V that one launch computes: all of them, or a part where no tile holds all.

A column of the output depends on that column of V alone, and the gradients of q and k are sums over
the columns: dP = dO V^T is one, and so is what delta subtracts from it. A call can therefore
compute its columns in launches of their own, each of which computes all scores again.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from flashgen.kernels.planner.api import plan_backward, plan_forward
from flashgen.kernels.planner.backward_schemes import plan_schemes
from flashgen.kernels.planner.kernel_plan import BackwardPlan, Plan
from flashgen.kernels.planner.plan_errors import columns_of_parts
from flashgen.kernels.planner.requests import (
    BackwardPlanRequest,
    PlanRequest,
    TangentPlanRequest,
)
from flashgen.kernels.planner.tangent_pass import plan_tangent
from flashgen.shared.errors import PlanError
from flashgen.spec.language.signature import with_columns
from flashgen.spec.language.spec import AttentionSpec


class LaunchColumns(NamedTuple):
    """The columns of V that the kernels of a pass compute at once.

    Attributes:
        columns: 0 where no tile holds a part of them.
        cost: the predicted clocks of an SM for a score element, of all launches together.
    """

    columns: int
    cost: float


@functools.lru_cache(maxsize=1024)
def columns_of_launch(
    spec: AttentionSpec,
    arch: str,
    which: str,
    *,
    tangents: tuple[str, ...] = (),
    sram: int | None = None,
) -> LaunchColumns:
    """All columns of V, or where no tile holds these, the largest part that tiles hold, of two to
    four.

    Args:
        which: "forward", "backward", "deterministic", "queries" or "tangent".
        tangents: for "tangent", the names of the tensors that have a tangent.
    """
    dim = spec.head_dim_v
    assert dim is not None, "that of a call"
    plan: Plan | BackwardPlan
    for columns in (dim, *columns_of_parts(dim)):
        part = spec if columns == dim else with_columns(spec, columns)
        try:
            if which == "forward":
                plan = plan_forward(PlanRequest(part, arch, sram, access_bytes=16))
            elif which == "tangent":
                plan = plan_tangent(TangentPlanRequest(part, arch, tangents, sram))
            elif which == "queries":
                plan = plan_schemes(BackwardPlanRequest(part, arch, sram, queries_alone=True))
            else:
                fixed = which == "deterministic"
                plan = plan_backward(part, arch, sram=sram, deterministic=fixed)
        except PlanError:
            continue
        return LaunchColumns(columns, plan.cost * math.ceil(dim / columns))
    return LaunchColumns(0, math.inf)
