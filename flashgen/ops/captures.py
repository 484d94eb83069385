"""Captured tensors among an operator's arguments: what is accepted, and what kernels are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flashgen import expr
from flashgen.ops.block_sparse import check_layout
from flashgen.ops.numbers import check_names, refuse
from flashgen.ops.packed import check_packed, entries_of
from flashgen.ops.symbols import known
from flashgen.spec import AttentionSpec

Tensor = torch.Tensor

_SIZE_LIMIT = 2**31 - 1


def captured_of(spec: AttentionSpec, given: Mapping[str, object]) -> tuple[object, ...]:
    """What is given for each of the spec's tensors, in their order.

    Raises:
        InputError: one is missing or superfluous.
    """
    check_names(spec, given, spec.tensors)
    return tuple(given[tensor.name] for tensor in spec.tensors)


def check_captured(
    spec: AttentionSpec, captured: Sequence[object], q: Tensor, k: Tensor, ends: tuple[int, int]
) -> None:
    """What a call needs of captured tensors before anything is launched.

    Args:
        captured: what is given for each of spec.tensors.
        q, k: checked before.
        ends: one beyond the global positions of the last query and the last key.

    Raises:
        InputError: for the first thing that is wrong; it names the argument.
    """
    wanted = _check_sizes(spec, captured, q, k)
    nothing_runs = 0 in (*q.shape[:3], k.shape[2])
    lengths = {"seq_q": (q.shape[2], ends[0]), "seq_k": (k.shape[2], ends[1])}
    if spec.packed:  # the lengths of sequences are the boundaries' to say
        lengths = {"seq_q": (1, 1), "seq_k": (1, 1)}
    for tensor, value in _pairs(spec, captured):
        for axis, dim in enumerate(tensor.dims):
            size = value.shape[axis]
            if size > _SIZE_LIMIT:
                _refuse_size(tensor, value, axis, f"at most {_SIZE_LIMIT:,}")
            if dim in lengths:
                length, end = lengths[dim]
                if length and size != 1 and size < max(end, 1):
                    at_least = f"{dim} ends at {end:,}, so at least that, or 1"
                    _refuse_size(tensor, value, axis, at_least)
            elif size == 0 and dim not in wanted and not nothing_runs:
                _refuse_size(tensor, value, axis, f"{dim} is 1 or more")
    if spec.packed:
        ends = (1, 1)
    check_layout(spec, captured, (q.shape[2], k.shape[2]), ends)  # type: ignore[arg-type]


def check_traced_captured(
    spec: AttentionSpec, captured: Sequence[object], q: Tensor, k: Tensor
) -> None:
    """The same for sizes that may be symbols: only those that must be equal are compared.

    Raises:
        InputError: for the first thing that is wrong; it names the argument.
    """
    _check_sizes(spec, captured, q, k)


def _check_sizes(
    spec: AttentionSpec, captured: Sequence[object], q: Tensor, k: Tensor
) -> dict[str, int]:
    """Checks what must be equal; the lengths of the dimensions that a call knows."""
    check_kinds(spec, captured, q.device)
    check_packed(spec, q, captured)
    entries = entries_of(spec, q, captured)
    wanted = {"batch": entries, "heads": q.shape[1], "heads_kv": k.shape[1]}
    _check_equal_lengths(spec, captured, wanted)
    return wanted


def check_kinds(spec: AttentionSpec, captured: Sequence[object], device: torch.device) -> None:
    """Raises InputError for what is no tensor of the declared rank and dtype on ``device``."""
    for tensor, value in zip(spec.tensors, captured, strict=True):
        _check_kind(tensor, value, device)


def check_learned(spec: AttentionSpec, captured: Sequence[object]) -> None:
    """Raises InputError when autograd asks for a gradient that the spec does not declare."""
    for tensor, value in zip(spec.tensors, captured, strict=True):
        if not tensor.grad and isinstance(value, Tensor) and value.requires_grad:
            refuse(
                f"{tensor.name} requires a gradient that the spec does not declare",
                f"argument {tensor.name}",
                f"requires_grad=True; spec {spec.name} has {tensor!r}",
                f"fg.Tensor({tensor.name!r}, {tensor.dims!r}, {tensor.dtype!r}, grad=True), or "
                f"{tensor.name}.detach()",
            )


def _pairs(
    spec: AttentionSpec, captured: Sequence[object]
) -> tuple[tuple[expr.Tensor, Tensor], ...]:
    return tuple(zip(spec.tensors, captured, strict=True))  # type: ignore[arg-type]


def _check_kind(tensor: expr.Tensor, value: object, device: torch.device) -> None:
    name, rank = tensor.name, len(tensor.dims)
    dims = _shown(tensor)
    if not isinstance(value, Tensor):
        made = "as_tensor(...," if rank else f"tensor({_example(value)},"
        refuse(
            f"{name} is not a torch tensor",
            f"argument {name}",
            f"given a {type(value).__name__}; expected dims {dims}, torch.{tensor.dtype}",
            f"torch.{made} dtype=torch.{tensor.dtype}, device={str(device)!r})",
        )
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        refuse(
            f"{name} is not an ordinary dense tensor",
            f"argument {name}",
            f"layout {value.layout}, dtype {value.dtype}",
            f"{name}.to_padded_tensor(0)" if value.is_nested else f"{name}.to_dense()",
        )
    if value.dim() != rank:
        refuse(
            f"{name} has {value.dim()} dimensions, not {rank}",
            f"argument {name}",
            f"shape {tuple(value.shape)}; expected dims {dims}",
            "a dimension of length 1 where all positions share an element: "
            f"{name}.unsqueeze(0), {name}[:, None]"
            if value.dim() < rank
            else f"{name}.squeeze(), or a fg.Tensor with {value.dim()} dims",
        )
    if str(value.dtype) != f"torch.{tensor.dtype}":
        refuse(
            f"{name} does not have the dtype that the spec declares",
            f"argument {name}",
            f"{name} is {value.dtype}; expected torch.{tensor.dtype}",
            f"{name}.to(torch.{tensor.dtype})",
        )
    if value.device != device:
        refuse(
            f"{name} is not on the device of q",
            f"argument {name}",
            f"{name} on {value.device}, q on {device}",
            f"{name}.to({str(device)!r})",
        )


def _check_equal_lengths(
    spec: AttentionSpec, captured: Sequence[object], wanted: Mapping[str, int]
) -> None:
    """Lengths that are a number, a size of the call, or another tensor's."""
    first: dict[str, tuple[str, int]] = {}
    for tensor, value in _pairs(spec, captured):
        for axis, dim in enumerate(tensor.dims):
            size = value.shape[axis]
            if isinstance(dim, int):
                if known(size != dim):
                    _refuse_size(tensor, value, axis, f"declared as {dim:,}")
            elif dim in wanted:
                if known(size != 1) and known(size != wanted[dim]):
                    _refuse_size(tensor, value, axis, f"{dim} is {wanted[dim]:,} here, or 1")
            elif dim not in ("seq_q", "seq_k") and known(size != 1):
                other, length = first.setdefault(dim, (tensor.name, size))
                if known(size != length):
                    _refuse_size(tensor, value, axis, f"{dim} is {length:,} in {other}, or 1")


def _refuse_size(tensor: expr.Tensor, value: Tensor, axis: int, expected: str) -> None:
    refuse(
        f"{tensor.name} does not have the length of its dimension {tensor.dims[axis]}",
        f"argument {tensor.name}",
        f"shape {tuple(value.shape)}, dims {_shown(tensor)}; dimension {axis}: {expected}",
        "a tensor of that length; a length of 1 stands for any, where the dimension has a name",
    )


def _shown(tensor: expr.Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.dims)) + "]"


def _example(value: object) -> str:
    return repr(value) if isinstance(value, int | float) else "0.5"


def numbers_of_captured(captured: Mapping[str, Tensor]) -> dict[str, int]:
    """Strides and sizes of captured tensors, and strides of their gradients, by field name.

    A gradient is summed in a contiguous buffer of the tensor's shape.
    """
    numbers = {}
    for name, tensor in captured.items():
        step = 1
        for axis in reversed(range(tensor.dim())):
            size = tensor.shape[axis]
            numbers[f"c_{name}_size_{axis}"] = size
            numbers[f"c_{name}_stride_{axis}"] = tensor.stride(axis) if size > 1 else 0
            numbers[f"dc_{name}_stride_{axis}"] = step if size > 1 else 0
            step *= size
    return numbers


def named(spec: AttentionSpec, captured: Sequence[Tensor]) -> dict[str, Tensor]:
    """What is given for each of the spec's tensors, by name, as kernels can read it."""
    return {
        tensor.name: value.resolve_neg() if value.is_neg() else value
        for tensor, value in zip(spec.tensors, captured, strict=True)
    }


def pointers_of(captured: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Captured tensors by the names of kernels' pointers."""
    return {f"c_{name}": tensor for name, tensor in captured.items()}
