"""Shapes, dtypes and memory of q, k, v, of captured tensors and of the results of a forward call.

Sizes may be symbols, which `is_known` compares only where they must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from flashgen.calls.runtime.arguments.pages import CACHE_AXES, check_caches
from flashgen.calls.runtime.arguments.refusals import check_is_tensor, is_known, refuse, shape_of
from flashgen.shared.call import Operands, OutputGradients, Tangents
from flashgen.shared.dtypes import (
    CACHE_DTYPES,
    COUNT_LIMIT,
    FLOAT_DTYPES,
    HEAD_DIM_MAX,
    HEAD_DIM_STEP,
    INT32_MAX,
    OPERAND_DTYPES,
    POSITION_LIMIT,
    dtype_name,
)
from flashgen.shared.signature import (
    BOUNDARIES,
    PAGE_NAMES,
    SCALE_NAMES,
    CallSignature,
    TensorArgument,
)

Tensor = torch.Tensor

# ---- q, k and v ----------------------------------------------------------------------------------


def check_operands(
    signature: CallSignature, q: Any, k: Any, v: Any, *, traced: bool = False
) -> None:
    """Checks q, k and v.

    Args:
        traced: whether a graph is traced: memory and limits are checked when the graph runs.

    Raises:
        InputError: for the first mistake; the error names the argument.
    """
    operands = {"q": q, "k": k, "v": v}
    for name, value in operands.items():
        _check_operand(signature, name, value, q, traced)
        if not traced:
            _check_memory(name, value)
    _check_together(signature, q, k, v)
    for name, value in () if traced else operands.items():
        _check_limits(name, value)


def values_of(signature: CallSignature, kv: Any, v: Any) -> Any:
    """The values of a call with one tensor of keys and values: its first columns.

    A view, so that autograd adds the gradients of both uses.

    Raises:
        InputError: the call has a second tensor.
    """
    if v is not None:
        columns = signature.head_dim_v
        refuse(
            "keys and values are one tensor, but the call has two",
            "argument v",
            f"spec {signature.name} has shared_kv=True: its values are the first {columns} columns "
            "of the keys",
            f"op(q, kv), where kv has {signature.head_dim} columns; or spec.replace("
            "shared_kv=False) for two tensors",
        )
    return kv[..., : signature.head_dim_v] if isinstance(kv, Tensor) and kv.dim() else kv


def _check_operand(
    signature: CallSignature, name: str, value: Any, q: Tensor, traced: bool
) -> None:
    if value is None:
        refuse(
            f"{name} is missing",
            f"argument {name}",
            "an operator takes q and kv" if signature.shared_kv else "an operator takes q, k and v",
            "op(q, kv), where the first columns of kv are the values"
            if signature.shared_kv
            else "op(q, k, v); op(q, q, q) for self-attention without projections",
        )
    check_is_tensor(name, value, "torch.as_tensor(...)", local=not traced)
    if value.dim() != 4:
        axes = "[batch, heads, seq, head_dim]"
        way_out = f"{name}.unsqueeze(0) for a missing batch; {name}.unflatten(2, (heads, -1))"
        way_out += ".transpose(1, 2) for [batch, seq, heads * head_dim]"
        if signature.paged and name != "q":
            axes = CACHE_AXES
            way_out = f"{name}.unsqueeze(1) for one head, [pages, page_size, head_dim]"
        refuse(
            f"{name} has {value.dim()} dimensions, not 4",
            f"argument {name}",
            f"shape {shape_of(value)}; expected {axes}",
            way_out,
        )
    if name != "q" and signature.kv_dtype is not None:
        if dtype_name(value.dtype) != signature.kv_dtype:
            refuse(
                f"{name} does not hold codes of the spec's kv_dtype",
                f"argument {name}",
                f"{name} is {value.dtype}; spec {signature.name} has kv_dtype "
                f"{signature.kv_dtype!r}",
                f"spec.replace(kv_dtype={dtype_name(value.dtype)!r})"
                if dtype_name(value.dtype) in CACHE_DTYPES
                else f"a cache of torch.{signature.kv_dtype}, which fg.append_kv writes; or a spec "
                "without kv_dtype",
            )
        if value.requires_grad:
            refuse(
                f"{name} holds codes of 8 bits, which have no gradients",
                f"argument {name}",
                f"requires_grad=True, {value.dtype}: rounding to codes has the derivative 0",
                f"{name}.detach(); to train, a spec without kv_dtype on the keys and values",
            )
        return
    if name != "q":
        if value.dtype != q.dtype:
            refuse(
                f"{name} does not have the dtype of q",
                f"argument {name}",
                f"{name} is {value.dtype}; q is {q.dtype}",
                f"{name}.to({q.dtype})",
            )
        return
    accepted = OPERAND_DTYPES if signature.dtype is None else (signature.dtype,)
    dtype = dtype_name(value.dtype)
    if dtype not in accepted:
        way_out = f"q.to(torch.{accepted[0]})"
        if dtype in OPERAND_DTYPES:
            way_out += f", or a spec with dtype={dtype!r}"
        refuse(
            "q does not have the dtype of the spec",
            "argument q",
            f"q is {value.dtype}; spec {signature.name} is for {', '.join(accepted)}",
            way_out,
        )


def has_values(tensor: Tensor) -> bool:
    """Whether there is anything to read; a call on other tensors computes shapes alone."""
    return not (tensor.is_meta or is_fake(tensor))


def _check_memory(name: str, value: Tensor) -> None:
    if value.is_meta:
        refuse(
            f"{name} has no data: it is a meta tensor",
            f"argument {name}",
            f"shape {shape_of(value)}, device {value.device}",
            "tensors on the CPU or on a CUDA device",
        )
    if value.device.type not in ("cpu", "cuda"):
        refuse(
            f"{name} is on a device that has no kernels",
            f"argument {name}",
            f"device {value.device}",
            f"{name}.cuda(), or {name}.cpu() for the CPU path and the emulator",
        )
    if value.numel() and value.stride(3) != 1:
        refuse(
            f"the last dimension of {name} is not contiguous",
            f"argument {name}",
            f"shape {shape_of(value)}, strides {value.stride()}; expected a last stride of 1",
            f"{name}.contiguous()",
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {shape_of(q)}, k {shape_of(k)}, v {shape_of(v)}"


def _check_together(signature: CallSignature, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Compares the operands. Sizes may be symbols; an undecidable comparison passes."""
    if not q.device == k.device == v.device:
        refuse(
            "q, k and v are on different devices",
            "arguments q, k and v",
            f"q on {q.device}, k on {k.device}, v on {v.device}",
            f"k.to({str(q.device)!r}) and v.to({str(q.device)!r})",
        )
    wanted = {"q": signature.head_dim, "k": signature.head_dim, "v": signature.head_dim_v}
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if is_known(tensor.shape[3] != wanted[name]):
            option = "head_dim_v" if name == "v" else "head_dim"
            alike = name == "v" or is_known(q.shape[3] == k.shape[3])
            refuse(
                f"the last dimension of {name} is not the spec's {option}",
                f"argument {name}",
                f"{_shapes(q, k, v)}; spec {signature.name} has {option} {wanted[name]}",
                _way_out_of_head_dim(name, option, shape_of(tensor)[3], wanted[name])
                + ("" if alike else ", and as many columns in both of q and k"),
            )
    if signature.paged:
        check_caches(k, v)
    else:
        _check_contiguous(q, k, v)
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if is_known(heads_q != 0) and is_known(heads_kv == 0):
        refuse(
            "k and v have no heads, and q has some",
            "arguments k and v",
            _shapes(q, k, v),
            f"k and v with {shape_of(q)[1]} heads, or with a number that divides it",
        )
    if is_known(heads_q != 0) and is_known(heads_q % heads_kv != 0):
        refuse(
            "the heads of q cannot be divided among the heads of k and v",
            "argument q",
            f"{shape_of(q)[1]} heads in q, {shape_of(k)[1]} in k and v; {_shapes(q, k, v)}",
            "a number of query heads that is a multiple of the number of key heads",
        )


def _check_contiguous(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Compares the batch entries of operands without pages, and the heads and keys of k and v."""
    for name, tensor in (("k", k), ("v", v)):
        if is_known(tensor.shape[0] != q.shape[0]):
            q_batch, batch = shape_of(q)[0], shape_of(tensor)[0]
            narrow, entries = ("q", batch) if q_batch == 1 else (name, q_batch)
            refuse(
                f"{name} does not have the batch of q",
                f"argument {name}",
                _shapes(q, k, v),
                f"{narrow}.expand({entries}, -1, -1, -1) to share one entry; it copies nothing"
                if 1 in (q_batch, batch)
                else "q, k and v with the same number of batch entries",
            )
    for axis, size_name in ((1, "number of heads"), (2, "length")):
        if is_known(k.shape[axis] != v.shape[axis]):
            refuse(
                f"k and v differ in {size_name}",
                "argument v",
                _shapes(q, k, v),
                "k [batch, heads_kv, seq_k, head_dim] and v [batch, heads_kv, seq_k, head_dim_v]",
            )


def _way_out_of_head_dim(name: str, option: str, dim: int, wanted: int) -> str:
    """The way out where a tensor has other columns than the spec wants."""
    more = -dim % HEAD_DIM_STEP
    if not 0 < dim <= HEAD_DIM_MAX:
        return f"{name} with {wanted} columns; head dims are from {HEAD_DIM_STEP} to {HEAD_DIM_MAX}"
    if not more:
        return f"spec.replace({option}={dim})"
    scale = f", scale={dim}**-0.5" if option == "head_dim" else ""
    padded = f"torch.nn.functional.pad({name}, (0, {more}))"
    return f"{padded}, and spec.replace({option}={dim + more}{scale})"


def _check_limits(name: str, tensor: Tensor) -> None:
    """Kernels hold positions, heads of the batch and row strides in 32 bits, offsets in 64."""
    batch, heads, length = tensor.shape[:3]
    for size_name, size, limit in (
        ("batch", batch, COUNT_LIMIT),
        ("number of heads", heads, COUNT_LIMIT),
        ("batch times heads", batch * heads, INT32_MAX),
        ("length", length, POSITION_LIMIT),
    ):
        if size > limit:
            refuse(
                f"the {size_name} of {name} is larger than kernels support",
                f"argument {name}",
                f"shape {shape_of(tensor)}; at most {limit:,}",
                "several calls, each with a part of it",
            )
    row_bytes = tensor.stride(2) * tensor.element_size()
    if tensor.shape[2] > 1 and row_bytes > INT32_MAX:
        refuse(
            f"the rows of {name} are too far apart",
            f"argument {name}",
            f"row stride {tensor.stride(2):,} elements, {row_bytes:,} B; at most {INT32_MAX:,} B",
            f"{name}.contiguous()",
        )


def check_gradients(q: Tensor, v: Tensor, gradients: OutputGradients) -> None:
    """Checks the additional tensors of a backward call. q and v were checked before.

    Raises:
        InputError: a tensor has another shape, dtype or device; the error names the argument.
    """
    rows = tuple(q.shape[:3])
    shape = (*rows, v.shape[3])
    tensor: Any
    for name, tensor, wanted, dtype in (
        ("out", gradients.out, shape, q.dtype),
        ("lse", gradients.lse, rows, torch.float32),
        ("dout", gradients.dout, shape, q.dtype),
        ("dlse", gradients.dlse, rows, torch.float32),
    ):
        if tensor is None and name == "dlse":
            continue
        check_is_tensor(name, tensor, f"a tensor of shape {wanted}", dense=False)
        dense = tensor.layout == torch.strided and not tensor.is_nested
        own_shape = tuple(tensor.shape) if dense else None
        if own_shape != wanted or tensor.dtype != dtype or tensor.device != q.device:
            refuse(
                f"{name} does not belong to q, k and v",
                f"argument {name}",
                f"shape {own_shape or tensor.layout}, {tensor.dtype}, on {tensor.device}; "
                f"expected {wanted}, {dtype}, on {q.device}",
                "out and lse of the forward call, and gradients of the same shapes",
            )


# ---- captured tensors ----------------------------------------------------------------------------


def check_captured(
    signature: CallSignature,
    captured: Sequence[Any],
    device: torch.device,
    *,
    traced: bool = False,
) -> None:
    """Checks the dtypes, ranks and devices of captured tensors.

    Args:
        captured: a value for each of the signature's tensors.
        device: the device of q.
        traced: as for `check_operands`.
    """
    for tensor, value in zip(signature.tensors, captured, strict=True):
        _check_captured(tensor, value, device, traced)


def check_sizes(
    signature: CallSignature, captured: Sequence[Tensor], sizes: Mapping[str, int]
) -> None:
    """Checks sizes that are a number, a size of the call, or that of another tensor.

    Args:
        sizes: the sizes that q and k define, by dimension name.
    """
    first: dict[str, tuple[str, int]] = {}
    for tensor, value, axis, dim, size in _dimensions(signature, captured):
        if isinstance(dim, int):
            if is_known(size != dim):
                _refuse_size(tensor, value, axis, f"declared as {dim:,}")
        elif dim in sizes:
            if is_known(size != 1) and is_known(size != sizes[dim]):
                _refuse_size(tensor, value, axis, f"{dim} is {sizes[dim]:,} here, or 1")
        elif dim not in ("seq_q", "seq_k") and is_known(size != 1):
            first_name, length = first.setdefault(dim, (tensor.name, size))
            if is_known(size != length):
                _refuse_size(tensor, value, axis, f"{dim} is {length:,} in {first_name}, or 1")


def check_lengths(
    signature: CallSignature, captured: Sequence[Tensor], sizes: Mapping[str, int], empty: bool
) -> None:
    """Checks that kernels can count the elements, and that a tensor has some where any is read.

    Args:
        sizes: as for `check_sizes`.
        empty: whether the call has no scores.
    """
    for tensor, value, axis, dim, size in _dimensions(signature, captured):
        if size > INT32_MAX:
            _refuse_size(tensor, value, axis, f"at most {INT32_MAX:,}")
        if size == 0 and dim not in (*sizes, "seq_q", "seq_k") and not empty:
            _refuse_size(tensor, value, axis, f"{dim} is 1 or more")


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
    dim_limits: dict[str | int, tuple[int, int]]
    dim_limits = {"seq_q": (lengths[0], ends[0]), "seq_k": (lengths[1], ends[1])}
    for tensor, value, axis, dim, size in _dimensions(signature, captured):
        length, end = dim_limits.get(dim, (0, 0))
        if length and size != 1 and size < max(end, 1):
            _refuse_size(tensor, value, axis, f"{dim} ends at {end:,}, so at least that, or 1")


def check_learned(signature: CallSignature, captured: Sequence[Any]) -> None:
    """Raises InputError for a tensor that requires a gradient and is declared without grad=True."""
    for tensor, value in zip(signature.tensors, captured, strict=True):
        if not tensor.grad and isinstance(value, Tensor) and value.requires_grad:
            declared = f"fg.Tensor({tensor.name!r}, {tensor.dims!r}, {tensor.dtype!r}, grad=True)"
            learned = "" if tensor.name in SCALE_NAMES else f"{declared}, or "
            refuse(
                f"{tensor.name} requires a gradient that the spec does not declare",
                f"argument {tensor.name}",
                f"requires_grad=True; spec {signature.name} has {tensor}",
                f"{learned}{tensor.name}.detach()",
            )


def check_moving(signature: CallSignature, tangents: Sequence[Any]) -> None:
    """Raises InputError for a tangent of a tensor that is declared without grad=True."""
    for tensor, tangent in zip(signature.tensors, tangents, strict=True):
        if tangent is not None and not tensor.grad:
            refuse(
                f"{tensor.name} carries a tangent that the spec does not declare",
                f"argument {tensor.name}",
                f"a tangent of forward mode; spec {signature.name} has {tensor}",
                f"fg.Tensor({tensor.name!r}, {tensor.dims!r}, {tensor.dtype!r}, grad=True), or "
                f"{tensor.name}.detach()",
            )


def check_tangents(signature: CallSignature, operands: Operands, tangents: Tangents) -> None:
    """Checks that each tangent is like its tensor, which was checked before.

    Raises:
        InputError: a tangent has another shape, dtype or device; the error names the tensor.
    """
    pairs = zip(signature.tensors, operands.captured, strict=True)
    learned = [(argument.name, x) for argument, x in pairs if argument.grad]
    pairs_with_tangents = zip(
        (*zip(("q", "k", "v"), operands[:3], strict=True), *learned),
        (*tangents[:3], *(tangents.captured or (None,) * len(learned))),
        strict=True,
    )
    for (name, tensor), tangent in pairs_with_tangents:
        if tangent is None:
            continue
        has, needs = ((tuple(x.shape), x.dtype, x.device) for x in (tangent, tensor))
        if has != needs:
            refuse(
                f"the tangent of {name} does not belong to it",
                f"the tangent of {name}",
                f"shape {has[0]}, {has[1]}, on {has[2]}; expected {needs[0]}, {needs[1]}, on "
                f"{needs[2]}",
                f"a tensor like {name}",
            )


def as_declared(signature: CallSignature, captured: Sequence[Any]) -> tuple[Any, ...]:
    """The captured tensors, with floats in the dtypes that the spec declares.

    The conversion is differentiated like any other: gradients have the dtypes that were given.
    """
    declared = list(captured)
    for index, tensor in enumerate(signature.tensors):
        value = captured[index]
        if tensor.dtype in FLOAT_DTYPES and isinstance(value, Tensor):
            dtype = getattr(torch, tensor.dtype)
            if value.dtype != dtype and value.is_floating_point():
                declared[index] = value.to(dtype)
    return tuple(declared)


def _way_out_of_rank(tensor: TensorArgument, value: Tensor) -> str:
    """The way out of a wrong number of dimensions. No spec declares those of tables and lengths."""
    name, rank = tensor.name, len(tensor.dims)
    if name in (*PAGE_NAMES, *BOUNDARIES):
        if rank == 1:
            return f"{name}.flatten()"
        return f"{name}.reshape(1, -1)" if value.dim() < rank else f"{name}.flatten(0, -2)"
    if value.dim() < rank:
        return (
            "a dimension of length 1 where all positions share an element: "
            f"{name}.unsqueeze(0), {name}[:, None]"
        )
    return f"{name}.squeeze(), or a fg.Tensor with {value.dim()} dims"


def _check_captured(tensor: TensorArgument, value: Any, device: torch.device, traced: bool) -> None:
    name, rank = tensor.name, len(tensor.dims)
    dims = _shown(tensor)
    example = repr(value) if isinstance(value, int | float) else "0.5"
    constructor = "as_tensor(...," if rank else f"tensor({example},"
    check_is_tensor(
        name,
        value,
        f"torch.{constructor} dtype=torch.{tensor.dtype}, device={str(device)!r})",
        more=f"; expected dims {dims}, torch.{tensor.dtype}",
        local=not traced,
    )
    if value.dim() != rank:
        refuse(
            f"{name} has {value.dim()} dimensions, not {rank}",
            f"argument {name}",
            f"shape {shape_of(value)}; expected dims {dims}",
            _way_out_of_rank(tensor, value),
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


def _dimensions(
    signature: CallSignature, captured: Sequence[Tensor]
) -> list[tuple[TensorArgument, Tensor, int, str | int, int]]:
    """Each dimension of each captured tensor: its axis, its name or number, and its size."""
    return [
        (tensor, value, axis, dim, value.shape[axis])
        for tensor, value in zip(signature.tensors, captured, strict=True)
        for axis, dim in enumerate(tensor.dims)
    ]


def _refuse_size(tensor: TensorArgument, value: Tensor, axis: int, expected: str) -> None:
    refuse(
        f"{tensor.name} does not have the length of its dimension {tensor.dims[axis]}",
        f"argument {tensor.name}",
        f"shape {shape_of(value)}, dims {_shown(tensor)}; dimension {axis}: {expected}",
        "a tensor of that length, or of length 1 where the dimension has a name",
    )


def _shown(tensor: TensorArgument) -> str:
    return "[" + ", ".join(map(str, tensor.dims)) + "]"
