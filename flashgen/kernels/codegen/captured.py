"""The backward kernel that makes the gradients of learned tensors."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.kernels.codegen.functions import SpecFunctions
from flashgen.kernels.codegen.kernel import KernelCode, kernel
from flashgen.kernels.codegen.readers import type_of_sums
from flashgen.kernels.codegen.shared_values import FunctionInParts
from flashgen.kernels.codegen.source import Source
from flashgen.kernels.codegen.spec_function import SpecFunction
from flashgen.kernels.codegen.walk import ScoreCode, walk_of
from flashgen.kernels.codegen.windows import WindowCode, codes_of_windows
from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.models.kernel_model import MMA_ROWS
from flashgen.shared.arch import WARP
from flashgen.spec.analysis import Analysis
from flashgen.spec.analysis.score import kind_of_sum
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.spec import AttentionSpec

MOST_UNROLLED = 256
"""Additions of a thread to gradients of learned elements in the code of one tile. With more, the
loop over a tile's scores is not unrolled: the compiler's time grows faster than their number."""


@dataclass(frozen=True)
class LearnedElement:
    """One element of a learned tensor that the score reads, and how its gradient is summed.

    Attributes:
        sum: the name of its sum, and of its field in ``Partials``.
        kind: the result of `analysis.kind_of_sum`. For "block" a lane has one sum; for "row" it has
            one sum per row; for "column" the warp's rows are summed in each step; for "element"
            every score is added separately.
        target: the device function that returns the address of the gradient.
        add: the device function that adds a number at an address.
        source_text: the element as the user wrote it.
        window: the sums in shared memory; None where each score is added in global memory.
    """

    sum: str
    kind: str
    target: SpecFunction
    add: str
    source_text: str
    window: WindowCode | None = None


@dataclass(frozen=True)
class ExactSumVariable:
    """The variable that a kernel of exact sums has for one learned tensor.

    Attributes:
        name: the name of the variable.
        tensor: the name of the tensor.
    """

    name: str
    tensor: str


@dataclass(frozen=True)
class Partials:
    """The function that returns all derivatives: its call, and the names of its results.

    Attributes:
        quad_sums: whether some sum is over the lanes of a row.
        parts: the function, with the values that its calls share.
    """

    call: str
    fields: str
    quad_sums: bool
    parts: FunctionInParts


def captured(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """The source of the kernel that sums the gradients of the learned tensors of the score.

    The template has two forms: "captured" adds floats atomically (doubles where operands
    are float32), and "captured_exact" adds integers atomically.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    functions = SpecFunctions(spec, analysis, wide=plan.integer_bits == 64)
    fragment = plan.code_path.fragment
    elements = [element for element, _ in analysis.score.learned]
    scores = MMA_ROWS * plan.row_groups * plan.block_k // WARP
    kept_prefix = "" if len(elements) * scores <= MOST_UNROLLED else "kept_"
    score = ScoreCode.create(functions, None, element=f"{fragment}[e]")
    walk = walk_of(functions, plan)
    derivatives = functions.score_partials()
    learned = dict.fromkeys(element.tensor.name for element in elements)
    exact = [ExactSumVariable(f"exact{n}", tensor) for n, tensor in enumerate(learned)]
    if plan.kernel == "captured":
        exact = []
    adds = {variable.tensor: f"{variable.name}.add" for variable in exact}
    sums = type_of_sums(plan)
    windows = codes_of_windows(spec, functions.printer, elements, plan)
    parts = [
        LearnedElement(
            sum=f"by{n}",
            kind=kind_of_sum(element),
            target=functions.address_of(f"by{n}", element, sums),
            add=adds.get(element.tensor.name, "atomicAdd"),
            source_text=python_text(element),
            window=windows.get(element),
        )
        for n, element in enumerate(elements)
    ]
    kinds = {part.kind for part in parts}
    return kernel(
        "common/backward_learned.cu.j2",
        spec,
        plan,
        KernelCode(
            functions,
            walk,
            score,
            extra_functions=(
                *derivatives.functions,
                *(part.target for part in parts),
                *(function for window in windows.values() for function in window.functions),
            ),
            partials=Partials(
                derivatives.function.call(score=f"{kept_prefix}{fragment}[2 * r + c] * p.scale"),
                ", ".join(part.sum for part in parts),
                quad_sums=not kinds.isdisjoint(("row", "block")),
                parts=derivatives,
            ),
        ),
        parts=parts,
        exact=exact,
        sum_type=sums,
        kept_prefix=kept_prefix,
        window_entries=sum(window.entries for window in windows.values()),
        # A column's sum needs all of its rows together.
        skewed=bool(windows) and "column" not in kinds,
        has_rows="row" in kinds,
        exchanges=None,
    )
