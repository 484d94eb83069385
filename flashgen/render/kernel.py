"""What the templates of all kernels are given."""

from __future__ import annotations

from flashgen.analysis import SPAN
from flashgen.plan import Plan
from flashgen.render.banner import banner
from flashgen.render.environment import render_template
from flashgen.render.functions import SpecFunction, SpecFunctions
from flashgen.render.params import params_of
from flashgen.render.readers import place_of_sum
from flashgen.render.source import ELEMENTS, Source, kernel_name, tidy
from flashgen.render.walk import ScoreCode, Walk
from flashgen.spec import AttentionSpec


def kernel(
    template: str,
    spec: AttentionSpec,
    plan: Plan,
    functions: SpecFunctions | None,
    walk: Walk | None,
    score: ScoreCode | None,
    *,
    helpers: frozenset[str] = frozenset(),
    more: tuple[SpecFunction, ...] = (),
    partials: object = None,
    **fields: object,
) -> Source:
    """One emitted file.

    Args:
        functions: of the spec; None for a kernel that uses none, as are walk and score.
        helpers: device functions of math.cuh.j2 that the template itself calls.
        more: functions of the spec besides those of walk and score.
        partials: the function that gives several derivatives, where there is one.
        fields: what this template alone is given.

    Raises:
        RenderError: when the template asks for a field that it is not given.
    """
    name = kernel_name(spec, plan.kernel)
    read = functions.tensors if functions else ()
    readers = functions.readers if functions else ()
    tables = functions.tables if functions else ()
    if plan.kernel == "captured":
        readers += tuple(place_of_sum(tensor) for tensor in read if tensor.grad)
    params = params_of(spec, plan.kernel, read, tables)
    spec_functions = (score.functions if score else ()) + (walk.functions if walk else ()) + more
    printed = functions.printer.helpers if functions else set()
    text = render_template(
        template,
        name=name,
        banner=banner(spec, plan, template),
        plan=plan,
        element=ELEMENTS[plan.dtype],
        params=params,
        readers=readers,
        uses_index=any(each.tensor.dims for each in readers),
        span=SPAN if tables else None,
        sparse=spec.block_sparse if walk else None,
        spec_functions=spec_functions,
        uses_ranges=any(f.returns == "Range" for f in spec_functions),
        uses_scored=any(f.returns == "Scored" for f in spec_functions),
        math_helpers=frozenset(printed | helpers).union(*(each.helpers for each in readers)),
        walk=walk,
        score=score,
        partials=partials,
        forward=plan.kernel == "forward",
        dropout=spec.dropout,
        **fields,
    )
    return Source(name, f"{name}_{plan.arch}.cu", tidy(text), params, plan)
