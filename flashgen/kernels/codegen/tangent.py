"""The kernel of tangents: those of O and LSE, along tangents of the operands."""

from __future__ import annotations

from flashgen.kernels.codegen.functions import SpecFunctions
from flashgen.kernels.codegen.kernel import KernelCode, kernel, logit_of_row
from flashgen.kernels.codegen.readers import reader
from flashgen.kernels.codegen.source import Source
from flashgen.kernels.codegen.text import DeviceFunction
from flashgen.kernels.codegen.walk import ScoreCode, walk_of
from flashgen.kernels.planner import Plan
from flashgen.spec.analysis import Analysis
from flashgen.spec.analysis.tangents import analyse_tangents, directions_of, tangent_tensors
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.tensor import Tensor


def tangent(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """The source of the kernel that computes the tangents of O and LSE.

    Args:
        plan: of this kernel; its `tangents` name the tensors that have one.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    of_tensors = tangent_tensors(spec)
    given = tuple(each for name, each in of_tensors.items() if name in plan.tangents)
    functions = SpecFunctions(spec, analysis, wide=plan.integer_bits == 64, more_tensors=given)
    names = frozenset(plan.tangents)
    moves_q, moves_k = "q" in plan.moving, "k" in plan.moving
    score = ScoreCode.of(functions, None, element=f"{plan.code_path.fragment}[e]")
    if plan.scores_move and score.call:
        found = analyse_tangents(spec, directions_of(spec, moves_q or moves_k, names))
        score = ScoreCode.moved(functions, found)
    walk = walk_of(functions, plan)
    sink = spec.sink
    of_sink = of_tensors.get(sink.name) if sink is not None and sink.name in names else None
    drifts = spec.sums_weights and (plan.scores_move or of_sink is not None)
    arrays = ["s"] * ("v" in plan.moving) + ["moved"] * plan.scores_move
    return kernel(
        f"{plan.code_path.templates}/tangent.cu.j2",
        spec,
        plan,
        KernelCode(functions, walk, score, tensors=_read(of_sink)),
        # The operands that a block keeps, and those of a step, by their names in the struct.
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
        sink_tangent=None if of_sink is None else logit_of_row(spec, plan, of_sink),
    )


def _read(tensor: Tensor | None) -> tuple[tuple[Tensor, DeviceFunction], ...]:
    """A tensor that the kernel itself reads, with the function that does."""
    return () if tensor is None else ((tensor, reader(tensor)),)
