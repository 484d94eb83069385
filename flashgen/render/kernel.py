"""What the templates of all kernels are given."""

from __future__ import annotations

from functools import partial

from flashgen.analysis import SPAN
from flashgen.expr import Tensor
from flashgen.plan import Plan
from flashgen.render.banner import banner
from flashgen.render.environment import render_template
from flashgen.render.functions import SpecFunction, SpecFunctions
from flashgen.render.maps import Maps
from flashgen.render.packed import Packed, first_row, of_tma
from flashgen.render.params import params_of
from flashgen.render.readers import SUMS, place_of_sum, reader
from flashgen.render.rows import rows_of
from flashgen.render.sink import logit_of
from flashgen.render.source import ELEMENTS, Source, kernel_name, tidy
from flashgen.render.walk import ScoreCode, Walk, owned_by_block
from flashgen.spec import AttentionSpec

# Up to this head dim the products of a step of P V in float32 have a sum of their own. Beyond, O
# leaves no registers for it, and the sums of Q K^T are long enough for both PyTorch and us.
OWN_SUMS_UP_TO = 128


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
    sink: Tensor | None = None,
    **fields: object,
) -> Source:
    """One emitted file.

    Args:
        functions: of the spec; None for a kernel that uses none, as are walk and score.
        helpers: device functions of math.cuh.j2 that the template itself calls.
        more: functions of the spec besides those of walk and score.
        partials: the function that gives the derivatives by captured tensors, in their kernel.
        sink: the spec's, for a kernel that reads it whatever the functions read.
        fields: what this template alone is given.

    Raises:
        RenderError: when the template asks for a field that it is not given.
    """
    name = kernel_name(spec, plan.kernel, plan.heads_per_tile)
    read = functions.tensors if functions else ()
    readers = functions.readers if functions else ()
    tables = functions.tables if functions else ()
    if sink is not None and sink.name not in {each.tensor.name for each in readers}:
        read, readers = (*read, sink), (*readers, reader(sink))
    if plan.of_captured:
        sums = SUMS[plan.kernel]
        readers += tuple(place_of_sum(tensor, sums) for tensor in read if tensor.grad)
    uneven = walk is not None and walk.uneven
    params = params_of(spec, plan.kernel, plan.path, read, tables, uneven=uneven)
    packed = Packed.of(params, owns_keys=plan.owns_keys) if spec.packed and functions else None
    spec_functions = (score.functions if score else ()) + (walk.functions if walk else ()) + more
    printed = functions.printer.helpers if functions else set()
    parameter = "packed" if packed else "p"
    if walk is not None:
        fields |= owned_by_block(walk, parameter, jobs=plan.takes_jobs)
    maps = [param.name for param in params if param.ctype == "tensormap"]
    rows = rows_of(plan)
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
        rows=rows,
        forward=plan.kernel == "forward",
        own_sums=plan.kernel == "forward" and plan.head_dim_v <= OWN_SUMS_UP_TO,
        dropout=spec.dropout,
        packed=packed,
        parameter=parameter,
        first_row=partial(first_row, packed is not None),
        **of_tma(packed is not None),
        maps=Maps.of(maps),
        sink=logit_of(sink, rows.head),
        **fields,
    )
    return Source(name, f"{name}_{plan.arch}.cu", tidy(text), params, plan)
