"""The backward kernels: FlashAttention's Algorithm 4, with O, LSE and the random state kept."""

from __future__ import annotations

from typing import Any

from flashgen.analysis import Analysis, Walk
from flashgen.plan import Plan
from flashgen.render.backward_sm90 import backward_sm90
from flashgen.render.captured import captured
from flashgen.render.exponential import Exponential
from flashgen.render.functions import KEYS, QUERIES, SpecFunctions
from flashgen.render.kernel import kernel
from flashgen.render.sink import empty_row
from flashgen.render.source import Source
from flashgen.render.walk import ScoreCode, walk_of
from flashgen.spec import AttentionSpec


def walk_of_kernel(role: str) -> Walk:
    """The axis along which the kernel of this role walks tiles: what its analysis is made for."""
    return (QUERIES if role in ("dkdv", "fused") else KEYS).walk


def backward(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """One backward kernel of ``spec``, the one that ``plan`` is for.

    Args:
        analysis: made for `walk_of_kernel` of the plan's kernel.

    Raises:
        RenderError: when the template asks for a field that it is not given.
    """
    if plan.kernel == "delta":
        return _delta(spec, plan)
    if plan.of_captured:
        return captured(spec, analysis, plan)
    if plan.path == "sm_90a":
        return backward_sm90(spec, analysis, plan)
    by_queries = plan.owns_keys
    functions = SpecFunctions(spec, analysis, QUERIES if by_queries else KEYS)
    # The kernel that walks the queries of several heads keeps its place in these variables.
    renamed = {"h": "next_h", "tile": "next_tile"} if by_queries else {}
    score = ScoreCode.of(functions, slope=True)
    common: dict[str, Any] = {
        "exponential": Exponential.of(plan, score, "e % 2" if by_queries else "g][e / 2"),
        "slope_note": ", times the score function's slope" if score.call else "",
        "qk_tail": plan.itemsize == 2 and 8 in (plan.head_dim % 16, plan.head_dim_v % 16),
        "pv_tail": 8 in (plan.head_dim % 16, plan.head_dim_v % 16),
        "transposed": by_queries,
    }
    walk = walk_of(functions, **renamed)
    if not by_queries:
        shares = plan.column_warps > 1
        return kernel(
            "backward_dq_sm80.cu.j2",
            spec,
            plan,
            functions,
            walk,
            score,
            **common | {"pv_tail": plan.head_dim % 16 == 8},
            shares=", COLUMN_WARPS" if shares else "",
            share=", column_warp * (COLUMNS / 2)" if shares else "",
            stage_column="column" if shares else "n",
            uneven=plan.head_dim % (16 * plan.column_warps) != 0,
            factor="factor" if spec.dropout else "p.scale",
        )
    fused = plan.kernel == "fused"
    shares_columns, shares_scores = plan.column_warps > 1, plan.score_warps > 1
    return kernel(
        "backward_dkdv_sm80.cu.j2",
        spec,
        plan,
        functions,
        walk,
        score,
        **common,
        fused=fused,
        uses_h=fused or spec.dropout or score.uses_h or walk.uses_h,
        exchanges="P and dS" if shares_scores else "dS" if fused else None,
        shift="first_query + " if shares_scores else "",
        shares=", COLUMN_WARPS" if shares_columns else "",
        share=", column_warp * (COLUMNS / 2)" if shares_columns else "",
        share_v=", column_warp * (COLUMNS_V / 2)" if shares_columns else "",
        stage_column="column" if shares_columns else "n",
        dq_uneven=plan.head_dim % (16 * plan.warps // plan.dq_row_warps) != 0,
        dv_scale=" * p.dropout_scale" if spec.dropout else "",
    )


def _delta(spec: AttentionSpec, plan: Plan) -> Source:
    granules = plan.head_dim_v * plan.itemsize // 16
    lanes = delta_lanes(granules)
    empty, why = empty_row(spec)
    return kernel(
        "backward_delta.cu.j2",
        spec,
        plan,
        None,
        None,
        None,
        lanes=lanes,
        uneven=granules % lanes != 0,
        unit=" * LOG2E" if plan.itemsize == 2 else "",
        sink=spec.sink if plan.sink_bytes else None,
        empty=empty,
        empty_why=why,
    )


def delta_lanes(granules: int) -> int:
    """How many lanes read one row side by side, given its length in granules of 16 bytes.

    With four lanes or more every access is a run of 64 bytes, and with at most four granules per
    lane the loads of a row are under way at once. Of such numbers, the one that leaves the fewest
    lanes without a granule; of equal ones the largest.
    """
    choices = [n for n in (2, 4, 8, 16, 32) if min(granules, 4) <= n and granules <= 4 * n]
    return min(choices, key=lambda lanes: (-(-granules // lanes) * lanes, -lanes))
