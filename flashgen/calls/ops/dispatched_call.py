"""A call of an operator through torch's dispatcher, as one node.

torch.compile and torch.export trace it. Calls inside of torch.func, under torch's modes and with
subclasses of tensors take the same way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._guards import TracingContext

from flashgen.calls.ops.dtensors import check_spread, keep_uncached, refuse_drawn
from flashgen.calls.ops.operator import NUMBERS, Operator, check_choices
from flashgen.calls.ops.registration import serve_dtensors
from flashgen.calls.runtime.arguments.call import check_traced
from flashgen.calls.runtime.arguments.options import (
    check_probability,
    check_rng,
    new_rng,
    refuse_dropout,
    scalar_value,
    scale_of,
)
from flashgen.calls.runtime.arguments.positions import offset_of
from flashgen.calls.runtime.arguments.refusals import is_constant, is_dtensor, runs_while_traced
from flashgen.calls.runtime.arguments.slices import split_number
from flashgen.shared import config
from flashgen.shared.call import CallOptions, Operands
from flashgen.shared.signature import OFFSETS

Tensor = torch.Tensor


@runs_while_traced
def mode_while_traced() -> bool:
    """`config.batch_invariant`, which Dynamo cannot trace; a call in the other mode is traced anew.

    Dynamo has no guard for the variables of a context, so that this adds a function.
    """
    mode = config.batch_invariant()
    if TracingContext.try_get() is None:
        return mode
    from torch._dynamo.guards import install_guard
    from torch._dynamo.source import GlobalStateSource

    def add(builder: Any, guard: Any) -> None:
        said = [f"flashgen.batch_invariant_mode({mode})"]
        builder.guard_manager.root.add_lambda_guard(
            lambda _: config.batch_invariant() == mode, said, guard.user_stack
        )

    install_guard(GlobalStateSource().make_guard(add))
    return mode


def dispatched_call(
    operator: Operator, operands: Operands, options: CallOptions
) -> tuple[Tensor, ...]:
    """A call whose numbers may be symbols, which are checked when it runs.

    Raises:
        InputError: an argument is of a wrong kind, which torch's own error would not explain, or is
            a number of a wrong value, which may never run, as in a call of meta tensors.
    """
    q, k, v, captured, rng = operands
    if any(map(is_dtensor, (q, k, v, *captured))):
        if not operator.serves_dtensors:
            serve_dtensors(operator)
        names = ("q", "k", "v", *(tensor.name for tensor in operator.signature.tensors))
        tensors = dict(zip(names, (q, k, v, *captured), strict=True))
        check_spread(operator.signature, tensors)
    check_traced(operator.signature, operands, options.scalars)
    p = _probability(operator, options.dropout_p)
    check_rng(rng, q.device)
    if p is not None and rng is None and operator.dropout:
        if is_dtensor(q):
            refuse_drawn()
        rng = new_rng(q.device)
    check_choices(options.backend, options.arch, options.deterministic)
    if not _is_open(options.split_size, int, torch.SymInt):
        split_number(options.split_size)
    numbers = dict(zip(NUMBERS, options[1:7], strict=True))
    numbers = {name: numbers[name] for name in operator.numbers}
    for name in OFFSETS:
        if name in numbers and not _is_open(numbers[name], int, torch.SymInt):
            numbers[name] = offset_of(name, numbers[name], 0)
    scale, floats, scalars = _numbers(operator, options)
    overload = operator.overload
    if is_dtensor(q):
        if torch.compiler.is_dynamo_compiling():
            keep_uncached(operator)
        overload = operator.local_overload
    result: tuple[Tensor, ...] = overload(
        q, k, v, *captured, *floats, rng, p, scale, **numbers, **scalars
    )
    return result


_KINDS: dict[str, tuple[type, type]] = {
    "float32": (float, torch.SymFloat),
    "int32": (int, torch.SymInt),
    "bool": (bool, torch.SymBool),
}


def _is_open(value: Any, kind: type, symbol: type) -> bool:
    """Whether a value is known when the call runs: a symbol or, in a trace, a number of a kind."""
    if isinstance(value, symbol) or not torch.compiler.is_compiling():
        return isinstance(value, symbol)
    # Python counts bools as ints.
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _numbers(
    operator: Operator, options: CallOptions
) -> tuple[Tensor | None, list[Tensor], dict[str, Any]]:
    """The scale, the scalars that are floats, and the others, as the operator takes them."""
    signature = operator.signature
    scale: Any = options.scale
    default = signature.scale or 1 / math.sqrt(signature.head_dim)
    if scale is not None:
        if not _is_open(scale, float, torch.SymFloat):
            scale = scale_of(signature, scale)
        scale = None if is_constant(scale == default) else _tensor(scale)
    floats, integers = [], {}
    scalars = zip(operator.arguments, signature.scalars, options.scalars, strict=True)
    for name, scalar, value in scalars:
        if not _is_open(value, *_KINDS[scalar.dtype]):
            value = scalar_value(scalar, value)
        if scalar.dtype == "float32":
            floats.append(_tensor(value))
        else:
            integers[name] = value
    return scale, floats, integers


def _probability(operator: Operator, dropout_p: Any) -> Tensor | None:
    """dropout_p as an argument of the registered operator, None for 0."""
    if isinstance(dropout_p, Tensor):
        return dropout_p
    if not operator.dropout:
        if dropout_p != 0.0:
            refuse_dropout(operator.signature, "dropout_p", dropout_p)
        return None
    if not torch.compiler.is_compiling() or not isinstance(dropout_p, int | float):
        dropout_p = check_probability(dropout_p)
    if not is_constant(dropout_p == 0.0):
        return _tensor(dropout_p)
    return None


def _tensor(value: float) -> Tensor:
    """A float in a tensor: a product, because torch.compile can keep its factor a variable."""
    return torch.ones((), dtype=torch.float64, device="cpu") * value
