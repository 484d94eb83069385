"""A call of an operator as torch.compile and torch.export trace it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flashgen.call import CallOptions, Operands
from flashgen.ops.operator import Operator, check_choices
from flashgen.ops.variants import packs_queries
from flashgen.runtime.argument_names import check_names
from flashgen.runtime.block_layouts import with_layout
from flashgen.runtime.captured_tensors import as_declared, check_learned
from flashgen.runtime.check_basics import is_constant
from flashgen.runtime.checks import check_traced
from flashgen.runtime.number_arguments import (
    check_probability,
    check_rng,
    offset_of,
    refuse_dropout,
    scalar_value,
    scale_of,
)
from flashgen.runtime.offset_tensors import dtypes_of
from flashgen.signature import BOUNDARIES, LAYOUT_NAMES, WHOLE

if TYPE_CHECKING:
    from flashgen.ops.api import Attention

Tensor = torch.Tensor


def traced_call(
    op: Attention,
    operands: Operands,
    options: CallOptions,
    captures: dict[str, Any],
    offsets: dict[str, Tensor],
    part: dict[str, int],
) -> tuple[Tensor, Tensor]:
    """A call as torch.compile and torch.export trace it: one node, checked when it runs.

    Args:
        operands: q, k, v and rng.
        captures: the captures of the call by name.
        offsets, part: the results of `given_offsets` and of `scalars_of_part`.
    """
    q, k, v, _, rng = operands
    operator, signature = op._operator, op._operator.signature
    overload = operator.overload
    added = tuple(offsets.values())  # tensors that the spec itself does not have
    packs = signature.paged and packs_queries(captures)
    if packs:
        added = (captures.pop(BOUNDARIES[0]), *added)
    if operator.takes_layout:
        captures = {**with_layout(signature, captures)}
    if operator.tensors or len(captures) != len(operator.scalars):
        check_names(signature, captures)
    captured: list[Any] = []
    if operator.tensors:
        captured = [captures[name] for name in operator.tensors]
        captures = {name: captures[name] for name in operator.scalars}
        if torch.is_grad_enabled():
            check_learned(signature, captured)
        captured = list(as_declared(signature, captured))
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = cast(q, dtype), cast(k, dtype), cast(v, dtype)
    if signature.dtype is None:
        dtype = None
    if dtype is None and not packs:
        check_traced(signature, Operands(q, k, v, tuple(captured)), part.get(WHOLE[1]))
    if dtype is not None or added or part:
        name = op._name_of_variant(dtype, dtypes_of(offsets), tuple(part), packs)
        overload = getattr(torch.ops.flashgen, name).default
        # A block layout comes last.
        place = len(captured) - (len(LAYOUT_NAMES) if operator.takes_layout else 0)
        captured[place:place] = added
    p = _probability(operator, options.dropout_p)
    check_rng(rng, q.device)
    if p is not None and rng is None:
        rng = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    numbers = {"q_offset": options.q_offset, "k_offset": options.k_offset}
    numbers = {name: value for name, value in numbers.items() if name not in offsets}
    for name, offset in numbers.items():
        if not isinstance(offset, int):
            offset_of(name, offset, 0)
    check_choices(options.backend, options.arch, options.deterministic)
    scale, floats, captures = _numbers(operator, options.scale, captures)
    result: tuple[Tensor, Tensor] = overload(
        q,
        k,
        v,
        *captured,
        *floats,
        rng,
        p,
        scale,
        **numbers,
        backend=options.backend,
        arch=options.arch,
        deterministic=options.deterministic,
        **captures,
        **part,
    )
    return result


def _numbers(
    operator: Operator, scale: Any, scalars: Mapping[str, Any]
) -> tuple[Tensor | None, list[Tensor], dict[str, Any]]:
    """The scale, the scalars that are floats, and the others, as the operator takes them."""
    signature = operator.signature
    default = signature.scale or 1 / math.sqrt(signature.head_dim)
    if scale is not None:
        if not isinstance(scale, float):
            scale = scale_of(signature, scale)
        scale = None if is_constant(scale == default) else _tensor(scale)
    floats, others = [], {}
    for name, scalar in zip(operator.arguments, signature.scalars, strict=True):
        value = scalars[scalar.name]
        kind = {"float32": float, "int32": int, "bool": bool}[scalar.dtype]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            value = scalar_value(scalar, value)
        if kind is float:
            floats.append(_tensor(value))
        else:
            others[name] = value
    return scale, floats, others


def _probability(operator: Operator, dropout_p: Any) -> Tensor | None:
    """dropout_p as an argument of the registered operator, None for 0."""
    if isinstance(dropout_p, Tensor):
        return dropout_p
    if not operator.dropout:
        if dropout_p != 0.0:
            refuse_dropout(operator.signature, "dropout_p", dropout_p)
    elif not isinstance(dropout_p, int | float):
        check_probability(dropout_p)
    elif not is_constant(dropout_p == 0.0):
        return _tensor(dropout_p)
    return None


def _tensor(value: float) -> Tensor:
    """A float in a tensor: a product, because torch.compile can keep its factor a variable."""
    return torch.ones((), dtype=torch.float64, device="cpu") * value


def autocast_dtype(q: object) -> torch.dtype | None:
    """The dtype of torch.autocast on the device of q; None where it is off."""
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
        return None
    return torch.get_autocast_dtype(q.device.type)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor cast by autocast's rules: float64 and integers stay, and raise an error later."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)
