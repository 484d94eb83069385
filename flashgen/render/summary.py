"""The kernel that makes the table of extremes of a captured tensor along one axis."""

from __future__ import annotations

from flashgen.analysis import SPAN
from flashgen.expr import Tensor
from flashgen.plan import Plan
from flashgen.render.banner import banner
from flashgen.render.environment import render_template
from flashgen.render.readers import param_of_table, params_of_tensor, stored_and_read
from flashgen.render.source import Source, tidy
from flashgen.spec import AttentionSpec

TEMPLATE = "summary.cu.j2"


def summary(spec: AttentionSpec, tensor: Tensor, axis: int, plan: Plan) -> Source:
    """The kernel that runs before those of ``spec`` that skip tiles by ``tensor``.

    Raises:
        RenderError: when the template asks for a field that it is not given.
    """
    name = f"{spec.name}_summary_{tensor.name}_{axis}"
    params = (*params_of_tensor(tensor), param_of_table(tensor, axis, written=True))
    stored, value = stored_and_read(tensor)
    text = render_template(
        TEMPLATE,
        name=name,
        banner=banner(spec, plan, TEMPLATE),
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
    return Source(name, f"{name}_{plan.arch}.cu", tidy(text), params, plan)
