"""The facts of a kernel's launches, made from its plan."""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.launch_facts import Box, LaunchFacts, ParamFacts
from flashgen.planner.kernel_plan import Plan
from flashgen.planner.models.panels_sm90 import GROUP_ROWS, panels_of_kernel
from flashgen.signature import GradientTerm


def facts_of(
    plan: Plan, name: str, params: Sequence[ParamFacts], terms: tuple[GradientTerm, ...] = ()
) -> LaunchFacts:
    """The facts of a kernel.

    Args:
        name: the name of the kernel.
        params: the fields of its parameter struct.
        terms: for exact sums of learned tensors, the elements to whose gradients it adds.
    """
    same = (
        *("arch", "kernel", "path", "dtype", "itemsize", "head_dim", "head_dim_v", "block_q"),
        *("block_k", "warps", "blocks_per_sm", "heads_per_tile", "integer_bits", "access_bytes"),
        *("threads", "smem_bytes", "sums_tile"),
    )
    return LaunchFacts(
        name=name,
        params=tuple(params),
        of_gpu=plan.machine,
        boxes=_boxes(plan),
        terms=terms,
        **{field: getattr(plan, field) for field in same},
    )


def _boxes(plan: Plan) -> tuple[tuple[str, Box], ...]:
    """The boxes that TMA copies of each operand: columns, rows and heads; none without TMA."""
    if plan.path != "sm_90a" or plan.streams:
        return ()
    sizes = (plan.head_dim, plan.head_dim_v, plan.column_warps)
    (panel, _), (panel_v, _) = panels_of_kernel(plan.kernel, *sizes)
    # A warpgroup's rows are queries of one head, or the tile's queries of several heads.
    queries = min(GROUP_ROWS, plan.queries_per_tile) if plan.kernel == "forward" else plan.block_q
    heads = GROUP_ROWS // queries if plan.heads_per_tile > 1 else 1
    found = (
        ("q", (panel, queries, heads)),
        ("k", (panel, plan.block_k, 1)),
        ("v", (panel_v, plan.block_k, 1)),
    )
    return found if plan.kernel == "forward" else (*found, ("do", (panel_v, queries, 1)))
