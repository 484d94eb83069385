"""Checks of captured tensors, and the kernel parameters that are made from them.

The first mistake raises an InputError that names the argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashgen.dtypes import FLOAT_DTYPES, INT32_MAX
from flashgen.runtime.block_layouts import check_layout
from flashgen.runtime.check_basics import check_dense, known, refuse, shape_of
from flashgen.runtime.packed_sequences import check_packed, entries_of
from flashgen.runtime.paged_caches import check_table
from flashgen.signature import CallSignature, TensorArgument, field_stem

Tensor = torch.Tensor


def check_captured(
    signature: CallSignature,
    captured: Sequence[Any],
    q: Tensor,
    k: Tensor,
    ends: tuple[int, int],
    heads: int,
) -> None:
    """Checks the captured tensors of a call.

    Args:
        captured: a value for each of the signature's tensors.
        q, k: operands that were checked.
        ends: the global positions of the last query and the last key, plus 1.
        heads: the number of query heads of the whole.
    """
    wanted = check_captured_sizes(signature, captured, q, k, heads)
    lengths = q.shape[2], ends[1] if signature.paged else k.shape[2]
    nothing_runs = 0 in (*q.shape[:3], lengths[1])
    for tensor, value in zip(signature.tensors, captured, strict=True):
        for axis, dim in enumerate(tensor.dims):
            size = value.shape[axis]
            if size > INT32_MAX:
                _refuse_size(tensor, value, axis, f"at most {INT32_MAX:,}")
            along = (*wanted, "seq_q", "seq_k")
            if size == 0 and dim not in along and not nothing_runs:
                _refuse_size(tensor, value, axis, f"{dim} is 1 or more")
    if signature.packed or signature.offsets or signature.paged:
        # Positions are data: `flashgen.runtime.checks.check_contents` reads them on the CPU.
        check_positions(signature, captured, (1, 1), (1, 1))
        check_layout(signature, captured, lengths, (1, 1))
    else:
        check_positions(signature, captured, lengths, ends)
        check_layout(signature, captured, lengths, ends)


def check_positions(
    signature: CallSignature,
    captured: Sequence[Tensor],
    lengths: tuple[int, int],
    ends: tuple[int, int],
) -> None:
    """Checks that captured tensors have an element for each position, or one for all.

    Args:
        lengths, ends: for queries and keys: their number, and the last global position plus 1.

    Raises:
        InputError: a dimension is too short.
    """
    of_dims: dict[str | int, tuple[int, int]]
    of_dims = {"seq_q": (lengths[0], ends[0]), "seq_k": (lengths[1], ends[1])}
    for tensor, value in zip(signature.tensors, captured, strict=True):
        for axis, dim in enumerate(tensor.dims):
            size = value.shape[axis]
            length, end = of_dims.get(dim, (0, 0))
            if length and size != 1 and size < max(end, 1):
                at_least = f"{dim} ends at {end:,}, so at least that, or 1"
                _refuse_size(tensor, value, axis, at_least)


def check_captured_sizes(
    signature: CallSignature,
    captured: Sequence[Any],
    q: Tensor,
    k: Tensor,
    heads: int | None = None,
) -> dict[str, int]:
    """Checks captured tensors whose sizes may be symbols: compares only sizes that must be equal.

    Args:
        heads: the number of query heads of the whole; that of q if None.

    Returns:
        The sizes that q and k define, by dimension name.
    """
    for tensor, value in zip(signature.tensors, captured, strict=True):
        _check_kind(tensor, value, q.device)
    check_packed(signature, q, captured)
    if signature.paged:
        check_table(signature, q, captured)
    entries = entries_of(signature, q, captured)
    wanted = {"batch": entries, "heads": q.shape[1], "heads_kv": k.shape[1]}
    if heads is not None:
        wanted |= {"heads": heads, "heads_kv": k.shape[1] * heads // max(q.shape[1], 1)}
    _check_equal_lengths(signature, captured, wanted)
    return wanted


def check_learned(signature: CallSignature, captured: Sequence[Any]) -> None:
    """Raises InputError for a tensor that requires a gradient and is declared without grad=True."""
    for tensor, value in zip(signature.tensors, captured, strict=True):
        if not tensor.grad and isinstance(value, Tensor) and value.requires_grad:
            refuse(
                f"{tensor.name} requires a gradient that the spec does not declare",
                f"argument {tensor.name}",
                f"requires_grad=True; spec {signature.name} has {tensor}",
                f"fg.Tensor({tensor.name!r}, {tensor.dims!r}, {tensor.dtype!r}, grad=True), or "
                f"{tensor.name}.detach()",
            )


def as_declared(signature: CallSignature, captured: Sequence[Any]) -> tuple[Any, ...]:
    """The captured tensors, with floats in the dtypes that the spec declares.

    The conversion is differentiated like any other: gradients have the dtypes that were given.
    """
    return tuple(
        [
            value.to(getattr(torch, tensor.dtype))
            if tensor.dtype in FLOAT_DTYPES
            and isinstance(value, Tensor)
            and value.is_floating_point()
            else value
            for tensor, value in zip(signature.tensors, captured, strict=True)
        ]
    )


def _check_kind(tensor: TensorArgument, value: object, device: torch.device) -> None:
    name, rank = tensor.name, len(tensor.dims)
    dims = _shown(tensor)
    if not isinstance(value, Tensor):
        example = repr(value) if isinstance(value, int | float) else "0.5"
        made = "as_tensor(...," if rank else f"tensor({example},"
        refuse(
            f"{name} is not a torch tensor",
            f"argument {name}",
            f"given a {type(value).__name__}; expected dims {dims}, torch.{tensor.dtype}",
            f"torch.{made} dtype=torch.{tensor.dtype}, device={str(device)!r})",
        )
    check_dense(name, value)
    if value.dim() != rank:
        refuse(
            f"{name} has {value.dim()} dimensions, not {rank}",
            f"argument {name}",
            f"shape {shape_of(value)}; expected dims {dims}",
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
    signature: CallSignature, captured: Sequence[Any], wanted: Mapping[str, int]
) -> None:
    """Checks lengths that are a number, a size of the call, or that of another tensor."""
    first: dict[str, tuple[str, int]] = {}
    for tensor, value in zip(signature.tensors, captured, strict=True):
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


def _refuse_size(tensor: TensorArgument, value: Tensor, axis: int, expected: str) -> None:
    refuse(
        f"{tensor.name} does not have the length of its dimension {tensor.dims[axis]}",
        f"argument {tensor.name}",
        f"shape {shape_of(value)}, dims {_shown(tensor)}; dimension {axis}: {expected}",
        "a tensor of that length, or of length 1 where the dimension has a name",
    )


def _shown(tensor: TensorArgument) -> str:
    return "[" + ", ".join(map(str, tensor.dims)) + "]"


def numbers_of_captured(captured: Mapping[str, Tensor]) -> dict[str, int]:
    """Strides and sizes of captured tensors, and strides of their gradients, by field name.

    A gradient is accumulated in a contiguous buffer of the tensor's shape.
    """
    numbers = {}
    for name, tensor in captured.items():
        step, stem = 1, field_stem(name)
        for axis in reversed(range(tensor.dim())):
            size = tensor.shape[axis]
            numbers[f"c_{stem}_size_{axis}"] = size
            numbers[f"c_{stem}_stride_{axis}"] = tensor.stride(axis) if size > 1 else 0
            numbers[f"dc_{stem}_stride_{axis}"] = step if size > 1 else 0
            step *= size
    return numbers


def named(signature: CallSignature, captured: Sequence[Tensor]) -> dict[str, Tensor]:
    """The captured tensors by name, with negative bits resolved."""
    return {
        tensor.name: value.resolve_neg() if value.is_neg() else value
        for tensor, value in zip(signature.tensors, captured, strict=True)
    }


def pointers_of(captured: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Captured tensors by the names of the kernels' pointers."""
    return {f"c_{field_stem(name)}": tensor for name, tensor in captured.items()}
