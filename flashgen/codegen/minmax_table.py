"""The kernel that makes the min/max table of a captured tensor along one axis."""

from __future__ import annotations

from flashgen.analysis import SPAN
from flashgen.codegen.banner import banner
from flashgen.codegen.environment import render_template
from flashgen.codegen.readers import param_of_table, params_of_tensor, stored_and_read
from flashgen.codegen.source import Source
from flashgen.codegen.tidy import tidy
from flashgen.codegen.unused import used
from flashgen.language import Tensor
from flashgen.language.spec import AttentionSpec
from flashgen.planner import Plan

TEMPLATE = "common/minmax_table.cu.j2"


def minmax_table(spec: AttentionSpec, tensor: Tensor, axis: int, plan: Plan) -> Source:
    """The source of the min/max table kernel of ``tensor`` along ``axis``.

    It runs before the kernels of ``spec`` that skip tiles by the table.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    name = f"{spec.name}_minmax_{tensor.name}_{axis}"
    params = (*params_of_tensor(tensor), param_of_table(tensor, axis, written=True))
    stored, value = stored_and_read(tensor)
    text = render_template(
        TEMPLATE,
        name=name,
        banner="\n".join(banner(spec, plan, TEMPLATE)),
        plan=plan,
        params=params,
        tensor=tensor,
        axis=axis,
        along=tensor.dims[axis],
        others=[
            (f"p.c_{tensor.name}_size_{other}", f"p.c_{tensor.name}_stride_{other}")
            for other in reversed(range(len(tensor.dims)))
            if other != axis
        ],
        span=SPAN,
        stored=stored,
        value=value,
    )
    text, params = used(text, params)
    return Source(name, f"{name}_{plan.arch}.cu", tidy(text), params, plan)
