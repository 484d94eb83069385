"""The backward kernels: FlashAttention's Algorithm 4, with O, LSE and the random state kept."""

from __future__ import annotations

from typing import Any

from flashgen.analysis import Analysis, WalkedAxis
from flashgen.codegen.backward_sm90 import backward_sm90
from flashgen.codegen.captured import captured
from flashgen.codegen.functions import KEYS, QUERIES, SpecFunctions
from flashgen.codegen.kernel import KernelCode, kernel
from flashgen.codegen.sink import empty_row
from flashgen.codegen.source import Source
from flashgen.codegen.walk import ScoreCode, walk_of
from flashgen.language.spec import AttentionSpec
from flashgen.planner import Plan


def walk_of_kernel(role: str) -> WalkedAxis:
    """The axis along which the kernel of this role walks tiles; its analysis is made for it."""
    return (QUERIES if role in ("dkdv", "fused") else KEYS).walk


def backward(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """The source of one backward kernel of ``spec``: the kernel that ``plan`` is for.

    Args:
        analysis: the analysis for the axis `walk_of_kernel(plan.kernel)`.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    if plan.kernel == "delta":
        return _delta(spec, plan)
    if plan.of_captured:
        return captured(spec, analysis, plan)
    if plan.path == "sm_90a":
        return backward_sm90(spec, analysis, plan)
    by_queries = plan.owns_keys
    functions = SpecFunctions(spec, analysis, QUERIES if by_queries else KEYS)
    # A kernel that walks the queries of several heads names its current head and tile so.
    renamed = {"h": "next_h", "tile": "next_tile"} if by_queries else {}
    score = ScoreCode.of(functions, slope=True)
    common: dict[str, Any] = {
        "qk_tail": plan.itemsize == 2 and 8 in (plan.head_dim % 16, plan.head_dim_v % 16),
        "pv_tail": 8 in (plan.head_dim % 16, plan.head_dim_v % 16),
        "transposed": by_queries,
    }
    walk = walk_of(functions, **renamed)
    code = KernelCode(functions, walk, score)
    if not by_queries:
        return kernel(
            "sm80/backward_dq.cu.j2",
            spec,
            plan,
            code,
            **common | {"pv_tail": plan.head_dim % 16 == 8},
            uneven=plan.head_dim % (16 * plan.column_warps) != 0,
        )
    fused = plan.kernel == "fused"
    return kernel(
        "sm80/backward_dkdv.cu.j2",
        spec,
        plan,
        code,
        **common,
        fused=fused,
        uses_h=fused or spec.dropout or score.uses_h or walk.uses_h,
        exchanges="P and dS" if plan.score_warps > 1 else "dS" if fused else None,
        dq_uneven=plan.head_dim % (16 * plan.warps // plan.dq_row_warps) != 0,
    )


def _delta(spec: AttentionSpec, plan: Plan) -> Source:
    vectors = plan.head_dim_v * plan.itemsize // 16
    lanes = delta_lanes(vectors)
    empty, why = empty_row(spec)
    return kernel(
        "common/delta.cu.j2",
        spec,
        plan,
        None,
        lanes=lanes,
        uneven=vectors % lanes != 0,
        sink=spec.sink if plan.sink_bytes else None,
        empty=empty,
        empty_why=why,
    )


def delta_lanes(vectors: int) -> int:
    """The number of lanes that read one row together, given its length in 16-byte vectors.

    With four lanes or more every access is a run of 64 bytes, and with at most four vectors per
    lane all loads of a row are in flight together. Among the numbers of lanes that satisfy both,
    the function chooses the one that leaves the fewest lanes without a vector, and the largest of
    several equally good ones.
    """
    choices = [n for n in (2, 4, 8, 16, 32) if min(vectors, 4) <= n and vectors <= 4 * n]
    return min(choices, key=lambda lanes: (-(-vectors // lanes) * lanes, -lanes))
