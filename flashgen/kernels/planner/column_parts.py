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
from flashgen.kernels.planner.backward_plan import BackwardPlan
from flashgen.kernels.planner.backward_schemes import plan_schemes
from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.layout_share import share_of_scores
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
    pass_name: str,
    *,
    tangents: tuple[str, ...] = (),
    sram: int | None = None,
) -> LaunchColumns:
    """All columns of V, or one of two to four parts of them.

    A forward pass has the columns of least predicted cost. The other passes have the most columns
    that a tile holds. So has a forward pass of served calls: with few rows it takes the time to
    read the keys, and each launch reads them.

    Args:
        pass_name: "forward", "backward", "deterministic", "queries", "keys" or "tangent".
        tangents: for "tangent", the names of the tensors that have a tangent.
    """
    dim = spec.head_dim_v
    assert dim is not None, "calls have a head dim"
    best, least = LaunchColumns(0, math.inf), math.inf
    for columns in (dim, *columns_of_parts(dim)):
        part = spec if columns == dim else with_columns(spec, columns)
        try:
            plan = _planned(part, arch, pass_name, tangents, sram)
        except PlanError:
            continue
        launches = math.ceil(dim / columns)
        launch_columns = LaunchColumns(columns, plan.cost * launches)
        if isinstance(plan, BackwardPlan) or pass_name == "tangent" or spec.is_served:
            return launch_columns
        gathered = spec.block_sparse if plan.gathers else None
        share = share_of_scores(gathered, plan.queries_per_tile) if gathered else 1.0
        if launch_columns.cost * share < least:
            best, least = launch_columns, launch_columns.cost * share
        # The products of one launch more, which computes all scores again.
        quantities = plan.quantities
        macs = quantities["factors"] * ((launches + 1) * spec.head_dim + dim)
        if not gathered and macs / quantities["tensor_rate"] >= least:
            break
    return best


def _planned(
    spec: AttentionSpec, arch: str, pass_name: str, tangents: tuple[str, ...], sram: int | None
) -> Plan | BackwardPlan:
    """The plan of a pass; arguments as for `columns_of_launch`."""
    if pass_name == "forward":
        return plan_forward(PlanRequest(spec, arch, sram, access_bytes=16))
    if pass_name == "tangent":
        return plan_tangent(TangentPlanRequest(spec, arch, tangents, sram))
    if pass_name in ("queries", "keys"):
        return plan_schemes(BackwardPlanRequest(spec, arch, sram, alone=pass_name))
    return plan_backward(spec, arch, sram=sram, deterministic=pass_name == "deterministic")
