"""What torch is told of an operator: name, schema, kernels, fakes, gradients, vmap.

The operator's arguments are tensors first, the spec's captured ones behind q, k and v, and numbers
by name, the spec's scalars among them.
backend, arch and deterministic are arguments too: a compiled graph has them as constants. The
probability of dropout comes as a CPU tensor of one float64, because torch.compile makes one graph
per value of a Python number, and only one for all values of a tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from flashgen.expr.digest import digest_of
from flashgen.ops import mapped
from flashgen.ops.captures import check_learned
from flashgen.ops.checks import check_traced
from flashgen.ops.functions import attend, differentiate
from flashgen.ops.layout import empty_rows
from flashgen.ops.numbers import check_rng, refuse_dropout, refuse_no_rng
from flashgen.spec import AttentionSpec

if TYPE_CHECKING:
    from flashgen.ops.operator import Operator

Tensor = torch.Tensor

_SCHEMA = (
    "float? scale=None, SymInt q_offset=0, SymInt k_offset=0, "
    "str? backend=None, str? arch=None, bool? deterministic=None"
)
_SCALAR_TYPES = {"int32": "SymInt", "float32": "float", "bool": "bool"}

NEEDED = "_needed"
"""The backward operator's argument that says which gradients of captured tensors are needed, None
for all; of the others it gives tensors without elements. No capture can have this name."""

_library: Any = None  # torch's Library has no types
_names: set[str] = set()


def free_name(spec: AttentionSpec) -> str:
    """The spec's name; when it is another spec's, with a hash of what this one computes behind it.

    The hash is the same in every process, so that exported programs find their operator.
    """
    assert spec.name is not None, "every spec has a name once it is made"
    name = spec.name
    if _taken(name):
        digest = digest_of(spec.identity)
        hashed = (f"{spec.name}_{digest[:length]}" for length in range(8, len(digest) + 1))
        name = next(name for name in hashed if not _taken(name))
    _names.update((name, f"{name}_backward"))
    return name


def _taken(name: str) -> bool:
    """Names that a namespace of torch.ops has for itself are nobody's."""
    own = hasattr(torch.ops.flashgen, name) and name not in _names
    return own or not _names.isdisjoint((name, f"{name}_backward"))


def register(operator: Operator) -> tuple[Any, Any]:
    """Defines the two operators and what torch asks of them; gives their overloads."""
    global _library
    if _library is None:
        _library = torch.library.Library("flashgen", "FRAGMENT")  # type: ignore[no-untyped-call]
    spec, name = operator.spec, operator.name
    qualified, qualified_backward = f"flashgen::{name}", f"flashgen::{name}_backward"
    _define(spec, name)

    def kernel(*tensors: Any, **by_name: Any) -> Any:
        q, k, v, rng, p, captured = _sorted(spec, tensors, 2)
        return operator.compute(q, k, v, rng, p, operator.numbers(by_name), captured)

    def kernel_backward(*tensors: Any, **by_name: Any) -> Any:
        *given, captured = _sorted(spec, tensors, 6)
        given += [operator.numbers(by_name), _needed(operator, by_name), captured]
        return operator.compute_backward(*given)

    def autograd(*tensors: Any, **by_name: Any) -> Any:
        *given, captured = _sorted(spec, tensors, 2)
        if captured and torch.is_grad_enabled():
            check_learned(spec, captured)
        with _one_level():
            return attend(operator, *given, operator.numbers(by_name), *captured)

    def autograd_backward(*tensors: Any, **by_name: Any) -> Any:
        *given, captured = _sorted(spec, tensors, 6)
        numbers, needed = operator.numbers(by_name), _needed(operator, by_name)
        with _one_level():
            return differentiate(operator, *given, numbers, needed, *captured)

    def fake(*tensors: Any, **by_name: Any) -> Any:
        q, k, v, rng, p, captured = _sorted(spec, tensors, 2)
        _check_traced_dropout(spec, rng, p, q.device)
        check_traced(spec, q, k, v, captured)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        return empty_rows(q, spec.head_dim_v or spec.head_dim), lse

    def fake_backward(*tensors: Any, **by_name: Any) -> Any:
        q, k, v, *_, captured = _sorted(spec, tensors, 6)
        check_traced(spec, q, k, v, captured)
        learned = zip(operator.learned, _needed(operator, by_name), strict=True)
        return (
            *(empty_rows(tensor, tensor.shape[3]) for tensor in (q, k, v)),
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

    def batched(info: Any, in_dims: Any, /, *tensors: Any, **by_name: Any) -> Any:
        def call(*given: Any) -> Any:
            return overload(*given[:3], *given[5:], *given[3:5], **by_name)

        *dims, dims_captured = _sorted(spec, in_dims, 2)
        *given, captured = _sorted(spec, tensors, 2)
        return mapped.forward(
            spec, call, info.batch_size, (*dims, *dims_captured), (*given, *captured)
        )

    def batched_backward(info: Any, in_dims: Any, /, *tensors: Any, **by_name: Any) -> Any:
        def call(*given: Any) -> Any:
            return overload_backward(*given[:3], *given[9:], *given[3:9], **by_name)

        *dims, dims_captured = _sorted(spec, in_dims, 6)
        *given, captured = _sorted(spec, tensors, 6)
        return mapped.backward(
            spec,
            call,
            info.batch_size,
            (*dims, *dims_captured),
            (*given, *captured),
            any(_needed(operator, by_name)),
        )

    torch.library.register_vmap(qualified, batched, lib=_library)
    torch.library.register_vmap(qualified_backward, batched_backward, lib=_library)
    return overload, overload_backward


def _define(spec: AttentionSpec, name: str) -> None:
    """The schemas: captured tensors stand behind q, k and v, their gradients behind dq, dk, dv."""
    operands = ", ".join(f"Tensor {name}" for name in ("q", "k", "v", *_names_of(spec.tensors)))
    learned = _names_of(tensor for tensor in spec.tensors if tensor.grad)
    gradients = ", ".join(f"Tensor d{name}" for name in ("q", "k", "v", *learned))
    numbers = _SCHEMA + "".join(f", {_SCALAR_TYPES[s.dtype]} {s.name}" for s in spec.scalars)
    numbers_backward = numbers + (f", bool[]? {NEEDED}=None" if learned else "")
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


def _names_of(captures: Iterable[Any]) -> list[str]:
    return [capture.name for capture in captures]


def _sorted(spec: AttentionSpec, given: tuple[Any, ...], others: int) -> tuple[Any, ...]:
    """Arguments by position with the captured tensors in a tuple at the end.

    torch leaves arguments out that have their default, which is None for tensors.

    Args:
        given: q, k, v, the captured tensors, then at most so many ``others``.
    """
    last = 3 + len(spec.tensors)
    if len(given) < last + others:
        given += (None,) * (last + others - len(given))
    return (*given[:3], *given[last:], given[3:last])


def _needed(operator: Operator, by_name: Mapping[str, Any]) -> tuple[bool, ...]:
    given = by_name.get(NEEDED)
    return (True,) * len(operator.learned) if given is None else tuple(given)


def _one_level() -> AbstractContextManager[None]:
    """Lets torch.func's transforms, which call once for each of their levels, come through."""
    if not torch._C._are_functorch_transforms_active():
        return contextlib.nullcontext()
    from torch._functorch.utils import enable_single_level_autograd_function

    return enable_single_level_autograd_function()


def _check_traced_dropout(spec: AttentionSpec, rng: Any, p: Any, device: torch.device) -> None:
    if not spec.dropout and (p is not None or rng is not None):
        refuse_dropout(spec, "rng" if p is None else "dropout_p", p)
    if p is not None and rng is None:
        refuse_no_rng(p)
    check_rng(rng, device)
