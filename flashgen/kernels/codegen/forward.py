"""The forward kernel: FlashAttention's Algorithm 1 in FlashAttention-2's loop order."""

from __future__ import annotations

from flashgen.kernels.codegen.functions import GATHERED_KEYS, KEYS, SpecFunctions
from flashgen.kernels.codegen.kernel import KernelCode, head_of, kernel
from flashgen.kernels.codegen.source import Source
from flashgen.kernels.codegen.walk import ScoreCode, walk_of
from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.models.spec_terms import folded_score
from flashgen.spec.analysis import Analysis
from flashgen.spec.language.spec import AttentionSpec


def forward(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """The source of the forward kernel (FlashAttention, Algorithm 1, FlashAttention-2's loops).

    Raises:
        RenderError: the template uses a field that is missing.
    """
    direction = GATHERED_KEYS if plan.gathers else KEYS
    functions = SpecFunctions(spec, analysis, direction, wide=plan.integer_bits == 64)
    walk = walk_of(functions, plan)
    element = "s[g][box * (BOX_K / 8) + n][e]" if plan.box_k else "s[g][n][e]"
    folded = folded_score(spec, plan.kernel)
    score = ScoreCode.of(functions, folded, element=element, head=head_of(plan))
    return kernel(
        f"{plan.code_path.templates}/forward.cu.j2",
        spec,
        plan,
        KernelCode(functions, walk, score),
        range_bits=walk.row_has_q and plan.ranges_as_bits(1 + walk.row_has_lo),
        # Rows with blocks as bits are masked in a loop too, which takes fewer registers.
        mask_loop=(walk.mask_costly and plan.loops_over_masks) or walk.blocks_by_row,
    )
