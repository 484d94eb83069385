"""The kernels of the forward, the backward and the tangent pass: what each gives its template."""

from __future__ import annotations

from flashgen.kernels.codegen.captured import captured
from flashgen.kernels.codegen.functions import (
    GATHERED_KEYS,
    GATHERED_QUERIES,
    KEYS,
    QUERIES,
    SpecFunctions,
)
from flashgen.kernels.codegen.kernel import KernelCode, head_of, kernel, logit_of_row
from flashgen.kernels.codegen.readers import reader
from flashgen.kernels.codegen.source import Source
from flashgen.kernels.codegen.streaming import convert, delta
from flashgen.kernels.codegen.text import DeviceFunction
from flashgen.kernels.codegen.walk import ScoreCode, walk_of
from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.models.spec_terms import folded_score
from flashgen.shared.launch_facts import CONVERT_KERNELS, KEY_KERNELS
from flashgen.spec.analysis import Analysis
from flashgen.spec.analysis.intervals import WalkedAxis
from flashgen.spec.analysis.tangents import analyse_tangents, directions_of, tangent_tensors
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.tensor import Tensor


def walk_of_kernel(role: str) -> WalkedAxis:
    """The axis along which the kernel of this role walks tiles; its analysis is made for it."""
    return (QUERIES if role in KEY_KERNELS else KEYS).walk


def emitted(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """The source of the kernel of a plan: of a forward, backward or tangent pass.

    Args:
        analysis: the analysis for the axis `walk_of_kernel(plan.kernel)`.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    make = {"forward": _forward, "tangent": _tangent}.get(plan.kernel, _backward)
    return make(spec, analysis, plan)


def _forward(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """FlashAttention's Algorithm 1, in FlashAttention-2's loop order."""
    direction = GATHERED_KEYS if plan.gathers else KEYS
    functions = SpecFunctions(spec, analysis, direction, wide=plan.integer_bits == 64)
    walk = walk_of(functions, plan)
    element = "s[g][box * (BOX_K / 8) + n][e]" if plan.box_k else "s[g][n][e]"
    folded = folded_score(spec, plan.kernel)
    score = ScoreCode.create(functions, folded, element=element, head=head_of(plan))
    return kernel(
        f"{plan.code_path.templates}/forward.cu.j2",
        spec,
        plan,
        KernelCode(functions, walk, score),
        range_bits=walk.row_has_q and plan.ranges_as_bits(1 + walk.row_has_lo),
        # Rows with blocks as bits are masked in a loop too, which takes fewer registers.
        mask_loop=(walk.mask_costly and plan.loops_over_masks) or walk.blocks_by_row,
    )


def _backward(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """A kernel of FlashAttention's Algorithm 4, with O, LSE and the random state kept."""
    if plan.kernel == "delta":
        return delta(spec, plan)
    if plan.kernel in CONVERT_KERNELS:
        return convert(spec, plan)
    if plan.is_for_learned:
        return captured(spec, analysis, plan)
    tiles, boxes = (QUERIES, GATHERED_QUERIES) if plan.owns_keys else (KEYS, GATHERED_KEYS)
    direction = boxes if plan.gathers else tiles
    functions = SpecFunctions(spec, analysis, direction, wide=plan.integer_bits == 64)
    # A kernel that walks the queries of several heads names its current head and tile so.
    renamed = {"h": "next_h", "tile": "next_tile"} if plan.owns_keys else {}
    element = "prob[n][e]" if plan.in_passes else f"{plan.code_path.fragment}[e]"
    # In passes, the multiplication by the scale is what copies scores to other registers.
    folded = None if plan.in_passes else folded_score(spec, plan.kernel)
    score = ScoreCode.create(functions, folded, slope=True, element=element, scaled=plan.in_passes)
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


def _tangent(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """The tangents of O and LSE, along the tangents of the tensors in `Plan.tangents`."""
    tangents_by_name = tangent_tensors(spec)
    tangents_read = tuple(
        tensor for name, tensor in tangents_by_name.items() if name in plan.tangents
    )
    functions = SpecFunctions(
        spec, analysis, wide=plan.integer_bits == 64, more_tensors=tangents_read
    )
    names = frozenset(plan.tangents)
    moves_q, moves_k = "q" in plan.moving, "k" in plan.moving
    score = ScoreCode.create(functions, None, element=f"{plan.code_path.fragment}[e]")
    if plan.scores_move and score.call:
        tangent_analysis = analyse_tangents(spec, directions_of(spec, moves_q or moves_k, names))
        score = ScoreCode.with_tangent(functions, tangent_analysis)
    walk = walk_of(functions, plan)
    sink = spec.sink
    sink_tangent = (
        tangents_by_name.get(sink.name) if sink is not None and sink.name in names else None
    )
    drifts = spec.sums_weights and (plan.scores_move or sink_tangent is not None)
    arrays = ["s"] * ("v" in plan.moving) + ["moved"] * plan.scores_move
    return kernel(
        f"{plan.code_path.templates}/tangent.cu.j2",
        spec,
        plan,
        KernelCode(functions, walk, score, tensors=_read(sink_tangent)),
        # The operands that a block keeps, and the operands of a step, by their names in the struct.
        own_rows=["q", *["q_tangent"] * moves_q],
        step_k=["k", *["k_tangent"] * moves_k],
        step_v=[*["v"] * plan.scores_move, *["v_tangent"] * ("v" in plan.moving)],
        moves_q=moves_q,
        moves_k=moves_k,
        moves_v="v" in plan.moving,
        moves=plan.scores_move,
        has_reference=plan.scores_move and spec.is_softmax,
        sums_drift=drifts,
        operands_of_products=arrays,
        sink_tangent=None if sink_tangent is None else logit_of_row(spec, plan, sink_tangent),
    )


def _read(tensor: Tensor | None) -> tuple[tuple[Tensor, DeviceFunction], ...]:
    """A tensor that the kernel itself reads, with the function that reads it."""
    return () if tensor is None else ((tensor, reader(tensor)),)
