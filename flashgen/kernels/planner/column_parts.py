"""The columns of V that one launch computes: all of them, or a part where no tile holds all.

A column of the output depends on that column of V alone, and the gradients of q and k are sums over
the columns: dP = dO V^T is one, and so is what delta subtracts from it. A call can therefore
compute its columns in launches of their own, each of which computes all scores again.
"""

from __future__ import annotations

import functools

from flashgen.kernels.planner.api import plan_backward, plan_forward
from flashgen.kernels.planner.plan_errors import columns_of_parts
from flashgen.kernels.planner.requests import PlanRequest, TangentPlanRequest
from flashgen.kernels.planner.tangent_pass import plan_tangent
from flashgen.shared.errors import PlanError
from flashgen.spec.language.signature import with_columns
from flashgen.spec.language.spec import AttentionSpec


@functools.lru_cache(maxsize=1024)
def columns_of_launch(
    spec: AttentionSpec,
    arch: str,
    which: str,
    *,
    tangents: tuple[str, ...] = (),
    sram: int | None = None,
) -> int:
    """The columns of V that the kernels of a pass compute at once.

    Args:
        which: "forward", "backward", "deterministic" or "tangent".
        tangents: for "tangent", the names of the tensors that have a tangent.

    Returns:
        head_dim_v, or where no tile holds all columns, those of the largest part that tiles hold,
        of two to four; 0 where they hold none.
    """
    dim = spec.head_dim_v
    assert dim is not None, "that of a call"
    for columns in (dim, *columns_of_parts(dim)):
        part = with_columns(spec, columns)
        try:
            if which == "forward":
                plan_forward(PlanRequest(part, arch, sram, access_bytes=16))
            elif which == "tangent":
                plan_tangent(TangentPlanRequest(part, arch, tangents, sram))
            else:
                plan_backward(part, arch, sram=sram, deterministic=which == "deterministic")
        except PlanError:
            continue
        return columns
    return 0
