"""Renders a kernel: the fields that all templates have, and the file made of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from flashgen.analysis import SPAN
from flashgen.codegen.banner import banner
from flashgen.codegen.environment import render_template
from flashgen.codegen.functions import SpecFunction, SpecFunctions
from flashgen.codegen.maps import Maps
from flashgen.codegen.packed import Packed, first_row, of_tma
from flashgen.codegen.params import params_of
from flashgen.codegen.readers import SUMS, place_of_sum, reader
from flashgen.codegen.rows import rows_of
from flashgen.codegen.sink import logit_of
from flashgen.codegen.source import ELEMENTS, Source, kernel_name
from flashgen.codegen.tidy import simplified, tidy
from flashgen.codegen.unused import used
from flashgen.codegen.walk import ScoreCode, WalkCode, owned_by_block
from flashgen.language import Tensor
from flashgen.language.spec import AttentionSpec
from flashgen.planner import Plan

# Up to this head dim each step of P V in float32 accumulates in separate registers before it is
# added to O. Beyond it O leaves no registers for that, and the rounding of Q K^T, whose sums are
# as long in PyTorch, dominates the error.
OWN_SUMS_UP_TO = 128


@dataclass(frozen=True)
class KernelCode:
    """The C++ of one kernel that is made from its spec.

    Attributes:
        functions: makes the functions from the mask and the score.
        walk: the walk over tiles.
        score: the score of an element, and its derivative in backward kernels.
        more: functions besides those of walk and score.
        partials: the derivatives by learned tensors, in the kernel that sums their gradients.
    """

    functions: SpecFunctions
    walk: WalkCode
    score: ScoreCode
    more: tuple[SpecFunction, ...] = ()
    partials: object = None

    @property
    def printed(self) -> tuple[SpecFunction, ...]:
        """All functions in the order in which the file has them."""
        return (*self.score.functions, *self.walk.functions, *self.more)


def kernel(
    template: str,
    spec: AttentionSpec,
    plan: Plan,
    code: KernelCode | None,
    *,
    sink: Tensor | None = None,
    **fields: object,
) -> Source:
    """One emitted file.

    Args:
        code: None for a kernel that evaluates neither mask nor score.
        sink: the sink of the spec, for a kernel that reads it outside the spec's functions.
        fields: the fields that only this template has.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    name = kernel_name(spec, plan.kernel, plan.heads_per_tile)
    read = code.functions.tensors if code else ()
    readers = code.functions.readers if code else ()
    tables = code.functions.tables if code else ()
    if sink is not None and sink.name not in {each.tensor.name for each in readers}:
        read, readers = (*read, sink), (*readers, reader(sink))
    if plan.of_captured:
        sums = SUMS[plan.kernel]
        readers += tuple(place_of_sum(tensor, sums) for tensor in read if tensor.grad)
    uneven = code is not None and code.walk.uneven
    params = params_of(spec, plan.kernel, plan.path, read, tables, uneven=uneven)
    packed = Packed.of(params, owns_keys=plan.owns_keys) if spec.packed and code else None
    printed = code.printed if code else ()
    spec_section = (*(each.text for each in readers), *(each.text for each in printed))
    parameter = "packed" if packed else "p"
    if code is not None:
        fields |= owned_by_block(code.walk, parameter, persistent=plan.is_persistent)
    maps = [param.name for param in params if param.ctype == "tensormap"]
    rows = rows_of(plan)
    text = render_template(
        template,
        name=name,
        banner="\n".join(banner(spec, plan, template)),
        plan=plan,
        element=ELEMENTS[plan.dtype],
        params=params,
        span=SPAN if tables else None,
        sparse=spec.block_sparse if code else None,
        spec_section=spec_section,
        walk=code.walk if code else None,
        score=code.score if code else None,
        partials=code.partials if code else None,
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
    text, params = used(simplified(text), params)
    return Source(name, f"{name}_{plan.arch}.cu", tidy(text), params, plan, spec_section)
