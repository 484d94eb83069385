"""The backward kernels for Hopper: the fields of their templates."""

from __future__ import annotations

from typing import Any

from flashgen.analysis import Analysis
from flashgen.codegen.functions import KEYS, QUERIES, SpecFunctions
from flashgen.codegen.kernel import KernelCode, kernel
from flashgen.codegen.source import Source
from flashgen.codegen.walk import ScoreCode, WalkCode, walk_of
from flashgen.codegen.wgmma import products_of
from flashgen.language.spec import AttentionSpec
from flashgen.planner import Plan
from flashgen.planner.models.panels_sm90 import panels_of_kernel, queries_of_sums

_ELEMENT = "s[n][e]"  # an element of Q K^T, in these templates


def backward_sm90(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """The source of the Hopper kernel that ``plan`` is for: "dkdv", "fused" or "dq".

    Raises:
        RenderError: the template uses a field that is missing.
    """
    by_keys = plan.owns_keys
    functions = SpecFunctions(spec, analysis, QUERIES if by_keys else KEYS)
    score = ScoreCode.of(functions, slope=True, element=_ELEMENT)
    walk = walk_of(functions, **({"h": "next_h", "tile": "next_tile"} if by_keys else {}))
    panels = panels_of_plan(plan)
    fields: dict[str, Any] = panels | {
        "transposed": by_keys,
        # With a score function or dropout, P and dS are computed together, after dP has arrived.
        "one_pass": bool(score.call or spec.dropout),
        "fused": plan.kernel == "fused",
    }
    if by_keys:
        halves = (
            panels["panel"] * panels["panels"] // 2,
            panels["panel_v"] * panels["panels_v"] // 2,
        )
        fields |= _of_keys(spec, plan, functions, walk, score, halves)
    else:
        shapes = {("multiply_rows", plan.block_k), ("multiply_columns", plan.head_dim)}
        fields |= {"products": products_of(plan, shapes), "exchanges": None}
    template = "sm90/backward_dkdv.cu.j2" if by_keys else "sm90/backward_dq.cu.j2"
    return kernel(template, spec, plan, KernelCode(functions, walk, score), **fields)


def panels_of_plan(plan: Plan) -> dict[str, int]:
    """Template fields: the width of the shared-memory panels of each of the kernel's tiles."""
    sizes = (plan.head_dim, plan.head_dim_v, plan.column_warps)
    (panel, panels), (panel_v, panels_v) = panels_of_kernel(plan.kernel, *sizes)
    return {"panel": panel, "panels": panels, "panel_v": panel_v, "panels_v": panels_v}


def _of_keys(
    spec: AttentionSpec,
    plan: Plan,
    functions: SpecFunctions,
    walk: WalkCode,
    score: ScoreCode,
    halves: tuple[int, int],
) -> dict[str, Any]:
    """The template fields of a kernel whose blocks own tiles of keys.

    Args:
        halves: the number of parts of the columns of dK and dV, where warpgroups share them.
    """
    shares, fused = plan.column_warps > 1, plan.kernel == "fused"
    together = queries_of_sums(plan.block_q, plan.head_dim)
    columns = halves if shares else (plan.head_dim, plan.head_dim_v)
    queries = plan.block_q // plan.score_warps
    shapes = {("multiply_rows", queries), *(("multiply_columns", each) for each in columns)}
    if fused:
        shapes.add(("multiply_queries", together))
    # Past the last query P and dP - delta are 0 without a mask, unless the score function changes
    # them; past the last key they are not.
    row = functions.mask.row
    has_hi = not walk.row_has_lo or bool(score.call) or (row is not None and row.hi is not None)
    keeps = spec.dropout
    return {
        "products": products_of(plan, shapes),
        "shares_scores": shares,
        "dq_shares_queries": together < plan.block_q,
        "uses_h": fused or keeps or score.uses_h or walk.uses_h,
        "exchanges": "P and dS" if shares else "dS" if fused else None,
        "row_has_hi": has_hi,
    }
