"""What the templates of all kernels are given."""

from __future__ import annotations

from flashgen.plan import Plan
from flashgen.render.banner import banner
from flashgen.render.environment import render_template
from flashgen.render.functions import SpecFunctions
from flashgen.render.params import params_of
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
    **fields: object,
) -> Source:
    """One emitted file.

    Args:
        functions: of the spec; None for a kernel that uses none, as are walk and score.
        helpers: device functions of math.cuh.j2 that the template itself calls.
        fields: what this template alone is given.

    Raises:
        RenderError: when the template asks for a field that it is not given.
    """
    name = kernel_name(spec, plan.kernel)
    params = params_of(spec, plan.kernel)
    spec_functions = (score.functions if score else ()) + (walk.functions if walk else ())
    printed = functions.printer.helpers if functions else set()
    text = render_template(
        template,
        name=name,
        banner=banner(spec, plan, template),
        plan=plan,
        element=ELEMENTS[plan.dtype],
        params=params,
        spec_functions=spec_functions,
        uses_ranges=any(f.returns == "Range" for f in spec_functions),
        uses_scored=any(f.returns == "Scored" for f in spec_functions),
        math_helpers=frozenset(printed | helpers),
        walk=walk,
        score=score,
        forward=plan.kernel == "forward",
        dropout=spec.dropout,
        **fields,
    )
    return Source(name, f"{name}_{plan.arch}.cu", tidy(text), params, plan)
