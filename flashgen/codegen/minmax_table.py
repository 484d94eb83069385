"""The kernel that makes the min/max table of a captured tensor along one axis."""

from __future__ import annotations

from flashgen.codegen.kernel import rendered
from flashgen.codegen.readers import param_of_table, params_of_tensor
from flashgen.codegen.source import Source
from flashgen.dtypes import ELEMENTS
from flashgen.language import Tensor
from flashgen.language.spec import AttentionSpec
from flashgen.launch_facts import SPAN
from flashgen.planner import Plan


def minmax_table(spec: AttentionSpec, tensor: Tensor, axis: int, plan: Plan) -> Source:
    """The source of the min/max table kernel of ``tensor`` along ``axis``.

    It runs before the kernels of ``spec`` that skip tiles by the table.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    element = ELEMENTS[tensor.dtype]
    stored, value = element.stored, element.value
    return rendered(
        "common/minmax_table.cu.j2",
        spec,
        plan,
        f"{spec.name}_minmax_{tensor.name}_{axis}",
        (*params_of_tensor(tensor), param_of_table(tensor, axis, written=True)),
        tensor=tensor,
        axis=axis,
        span=SPAN,
        stored=stored,
        value=value,
    )
