"""Registers operators with torch: name, schema, kernels, fake kernels, gradients and vmap.

The first arguments of an operator are tensors, with the captured tensors after q, k and v. Keyword
arguments follow, including the run-time scalars. backend, arch and deterministic are arguments
too: a compiled graph holds them as constants. The probability of dropout is a CPU tensor of one
float64, because torch.compile makes one graph per value of a Python number, but only one graph for
all values of a tensor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from flashgen.call import Operands, OutputGradients
from flashgen.dtypes import SCALAR_DTYPES
from flashgen.errors import SpecError
from flashgen.ops.autograd import attend, differentiate
from flashgen.ops.flops import register_flops
from flashgen.ops.operator import NEEDED, Operator
from flashgen.ops.vmap import map_call
from flashgen.runtime.captured_tensors import check_learned
from flashgen.runtime.checks import check_traced
from flashgen.runtime.memory_layout import empty_rows
from flashgen.runtime.number_arguments import check_rng, refuse_dropout, refuse_no_rng
from flashgen.runtime.programs import Program, program_of
from flashgen.signature import WHOLE, CallSignature

if TYPE_CHECKING:
    from flashgen.language.spec import AttentionSpec

Tensor = torch.Tensor

_SCHEMA = {
    "scale": "float? scale=None",
    "q_offset": "SymInt q_offset=0",
    "k_offset": "SymInt k_offset=0",
    "backend": "str? backend=None",
    "arch": "str? arch=None",
    "deterministic": "bool? deterministic=None",
}
_library: Any = None  # torch's Library has no types
_OTHERS = ("append_kv",)
"""The operators of torch.ops.flashgen that are made from no spec."""

_names: set[str] = {*_OTHERS}
_operators: dict[AttentionSpec | Program, Operator] = {}
_lock = threading.RLock()


def operator_of(spec: AttentionSpec | Program) -> Operator:
    """The operator of a spec, registered at the first call; equal specs share one."""
    with _lock:
        found = _operators.get(spec)
        if found is None:
            found = _operators[spec] = Operator(spec, free_name(spec))
            found.overload, found.overload_backward = register(found)
        return found


def register_hashed_name(spec: AttentionSpec | Program) -> None:
    """Registers the operator of a spec under its name with a hash too.

    A process in which another spec has the name calls it so, and its exported programs with it.
    """
    program = program_of(spec)
    with _lock:
        name = f"{program.signature.name}_{program.digest[:8]}"
        if operator_of(spec).name != name and not _is_used(name):
            _names.update((name, f"{name}_backward"))
            again = Operator(spec, name)
            again.overload, again.overload_backward = register(again)


def free_name(spec: AttentionSpec | Program) -> str:
    """The spec's name, followed by a hash of the spec where another spec has that name.

    The hash is the same in every process, so that exported programs find their operator.
    """
    program = program_of(spec)
    name = program.signature.name
    if _is_used(name):
        digest = program.digest
        hashed = (
            f"{program.signature.name}_{digest[:length]}" for length in range(8, len(digest) + 1)
        )
        name = next(name for name in hashed if not _is_used(name))
    _names.update((name, f"{name}_backward"))
    return name


def _is_used(name: str) -> bool:
    """Whether an operator has this name, or torch.ops.flashgen has an attribute of its own."""
    own = hasattr(torch.ops.flashgen, name) and name not in _names
    return own or not _names.isdisjoint((name, f"{name}_backward"))


def register(operator: Operator) -> tuple[Any, Any]:
    """Defines the forward and the backward operator in torch. Returns their overloads."""
    global _library
    if _library is None:
        _library = torch.library.Library("flashgen", "FRAGMENT")  # type: ignore[no-untyped-call]
    signature, name = operator.signature, operator.name
    qualified, qualified_backward = f"flashgen::{name}", f"flashgen::{name}_backward"
    _define(operator)

    def kernel(*tensors: Any, **by_name: Any) -> Any:
        operands, p = _forward_values(signature, tensors)
        return operator.compute(operands, operator.options(by_name, p))

    def kernel_backward(*tensors: Any, **by_name: Any) -> Any:
        operands, gradients, p = _backward_values(signature, tensors)
        options = operator.options(by_name, p)
        return operator.compute_backward(operands, gradients, options, _needed(operator, by_name))

    def autograd(*tensors: Any, **by_name: Any) -> Any:
        (q, k, v, captured, rng), p = _forward_values(signature, tensors)
        if captured and torch.is_grad_enabled():
            check_learned(signature, captured)
        with _one_level():
            return attend(operator, operator.options(by_name, p), q, k, v, rng, *captured)

    def autograd_backward(*tensors: Any, **by_name: Any) -> Any:
        (q, k, v, captured, rng), gradients, p = _backward_values(signature, tensors)
        options, needed = operator.options(by_name, p), _needed(operator, by_name)
        with _one_level():
            return differentiate(operator, options, needed, q, k, v, *gradients, rng, *captured)

    def fake(*tensors: Any, **by_name: Any) -> Any:
        operands, p = _forward_values(signature, tensors)
        q = operands.q
        _check_traced_dropout(signature, operands.rng, p, q.device)
        check_traced(signature, operands, by_name.get(WHOLE[1]))
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        return empty_rows(q, signature.head_dim_v, getattr(torch, signature.out_dtype)), lse

    def fake_backward(*tensors: Any, **by_name: Any) -> Any:
        operands, _, _ = _backward_values(signature, tensors)
        check_traced(signature, operands, by_name.get(WHOLE[1]))
        captured = operands.captured
        learned = zip(operator.learned, _needed(operator, by_name), strict=True)
        return (
            *(empty_rows(tensor, tensor.shape[3]) for tensor in operands[:3]),
            *(captured[i].new_empty(captured[i].shape if wanted else 0) for i, wanted in learned),
        )

    for device in ("CPU", "CUDA"):
        _library.impl(name, kernel, device)
        _library.impl(f"{name}_backward", kernel_backward, device)
    _library.impl(name, autograd, "Autograd")
    _library.impl(f"{name}_backward", autograd_backward, "Autograd")
    torch.library.register_fake(qualified, fake, lib=_library)
    torch.library.register_fake(qualified_backward, fake_backward, lib=_library)

    overload = getattr(torch.ops.flashgen, name).default
    overload_backward = getattr(torch.ops.flashgen, f"{name}_backward").default

    def rule(called: Any, others: int) -> Any:
        """The rule of torch.vmap; others: the arguments after the captured tensors."""

        def batched(info: Any, in_dims: Any, /, *tensors: Any, **by_name: Any) -> Any:
            def call(*given: Any) -> Any:
                last = 3 + others
                return called(*given[:3], *given[last:], *given[3:last], **by_name)

            *dims, dims_captured = _sorted(signature, in_dims, others)
            *given, captured = _sorted(signature, tensors, others)
            learns = called is overload_backward and any(_needed(operator, by_name))
            dims, given = [*dims, *dims_captured], [*given, *captured]
            return map_call(signature, call, info.batch_size, dims, given, others + 1, learns)

        return batched

    torch.library.register_vmap(qualified, rule(overload, 2), lib=_library)
    torch.library.register_vmap(qualified_backward, rule(overload_backward, 6), lib=_library)
    register_flops(signature, overload.overloadpacket, overload_backward.overloadpacket)
    return overload, overload_backward


MOST_ARGUMENTS = 64
"""Arguments of an operator of torch."""

_GRADIENT_ARGUMENTS = 6  # out, lse, dout, dlse, rng and dropout_p


def _define(operator: Operator) -> None:
    """Defines the schemas: captured tensors follow q, k and v, their gradients dq, dk and dv."""
    name, signature = operator.name, operator.signature
    operands = ", ".join(f"Tensor {each}" for each in ("q", "k", "v", *operator.tensors))
    learned = [tensor.name for tensor in signature.learned]
    gradients = ", ".join(f"Tensor d{each}" for each in ("q", "k", "v", *learned))
    numbers = ", ".join(_SCHEMA[number] for number in operator.numbers) + "".join(
        f", {SCALAR_DTYPES[scalar.dtype].schema} {scalar.name}" for scalar in signature.scalars
    )
    numbers_backward = numbers + (f", bool[]? {NEEDED}=None" if learned else "")
    count = sum(text.count(",") + 1 for text in (operands, numbers_backward)) + _GRADIENT_ARGUMENTS
    if count > MOST_ARGUMENTS:
        raise SpecError(
            "a spec captures more tensors and scalars than an operator of torch can take",
            where=name,
            numbers=f"{len(signature.tensors)} tensors and {len(signature.scalars)} scalars make "
            f"{count} arguments of the backward operator; limit {MOST_ARGUMENTS}",
            way_out="one tensor with a further dimension for several of the same shape, as in "
            "table[i, h, k]",
        )
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    dropout = "Tensor? rng=None, Tensor? dropout_p=None"
    _library.define(
        f"{name}({operands}, {dropout}, *, {numbers}) -> (Tensor out, Tensor lse)", tags=tags
    )
    _library.define(
        f"{name}_backward({operands}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse=None, "
        f"{dropout}, *, {numbers_backward}) -> ({gradients})",
        tags=tags,
    )


def _forward_values(
    signature: CallSignature, tensors: tuple[Any, ...]
) -> tuple[Operands, Tensor | None]:
    """The operands and dropout_p from the positional arguments of the forward operator."""
    q, k, v, rng, p, captured = _sorted(signature, tensors, 2)
    return Operands(q, k, v, captured, rng), p


def _backward_values(
    signature: CallSignature, tensors: tuple[Any, ...]
) -> tuple[Operands, OutputGradients, Tensor | None]:
    """The values from the positional arguments of the backward operator."""
    q, k, v, out, lse, dout, dlse, rng, p, captured = _sorted(signature, tensors, 6)
    return Operands(q, k, v, captured, rng), OutputGradients(out, lse, dout, dlse), p


def _sorted(signature: CallSignature, given: tuple[Any, ...], others: int) -> tuple[Any, ...]:
    """Positional arguments with the captured tensors in a tuple at the end.

    torch omits arguments that have their default value, which is None for tensors.

    Args:
        given: q, k, v, the captured tensors, then at most ``others`` further arguments.
    """
    last = 3 + len(signature.tensors)
    if len(given) < last + others:
        given += (None,) * (last + others - len(given))
    return (*given[:3], *given[last:], given[3:last])


def _needed(operator: Operator, by_name: Mapping[str, Any]) -> tuple[bool, ...]:
    given = by_name.get(NEEDED)
    return (True,) * len(operator.learned) if given is None else tuple(given)


def _one_level() -> AbstractContextManager[None]:
    """Allows the transforms of torch.func, which call an operator once for each level."""
    if not torch._C._are_functorch_transforms_active():
        return contextlib.nullcontext()
    from torch._functorch.utils import enable_single_level_autograd_function

    return enable_single_level_autograd_function()


def _check_traced_dropout(signature: CallSignature, rng: Any, p: Any, device: torch.device) -> None:
    if not signature.dropout and (p is not None or rng is not None):
        refuse_dropout(signature, "rng" if p is None else "dropout_p", p)
    if p is not None and rng is None:
        refuse_no_rng(p)
    check_rng(rng, device)
