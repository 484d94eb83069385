"""The backward kernels: FlashAttention's Algorithm 4, with O, LSE and the random state kept."""

from __future__ import annotations

from flashgen.kernels.codegen.captured import captured
from flashgen.kernels.codegen.functions import (
    GATHERED_KEYS,
    GATHERED_QUERIES,
    KEYS,
    QUERIES,
    SpecFunctions,
)
from flashgen.kernels.codegen.kernel import KernelCode, kernel
from flashgen.kernels.codegen.source import Source
from flashgen.kernels.codegen.streaming import convert, delta
from flashgen.kernels.codegen.walk import ScoreCode, walk_of
from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.models.spec_terms import folded_score
from flashgen.shared.launch_facts import CONVERT_KERNELS
from flashgen.spec.analysis import Analysis
from flashgen.spec.analysis.intervals import WalkedAxis
from flashgen.spec.language.spec import AttentionSpec


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
        return delta(spec, plan)
    if plan.kernel in CONVERT_KERNELS:
        return convert(spec, plan)
    if plan.of_captured:
        return captured(spec, analysis, plan)
    whole, boxes = (QUERIES, GATHERED_QUERIES) if plan.owns_keys else (KEYS, GATHERED_KEYS)
    direction = boxes if plan.gathers else whole
    functions = SpecFunctions(spec, analysis, direction, wide=plan.integer_bits == 64)
    # A kernel that walks the queries of several heads names its current head and tile so.
    renamed = {"h": "next_h", "tile": "next_tile"} if plan.owns_keys else {}
    element = "prob[n][e]" if plan.in_passes else f"{plan.code_path.fragment}[e]"
    # In passes, the multiplication by the scale is what copies scores to other registers.
    folded = None if plan.in_passes else folded_score(spec, plan.kernel)
    score = ScoreCode.of(functions, folded, slope=True, element=element, scaled=plan.in_passes)
    walk = walk_of(functions, plan, **renamed)
    exchanges = "dS" if plan.kernel == "fused" else None
    if plan.score_warps > 1 and not plan.streamed:
        exchanges = "P and dS"
    return kernel(
        f"{plan.code_path.templates}/backward_{'dkdv' if plan.owns_keys else 'dq'}.cu.j2",
        spec,
        plan,
        KernelCode(functions, walk, score),
        exchanges=exchanges,
    )
