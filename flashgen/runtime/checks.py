"""Checks of a call: all arguments are checked before any launch.

The first mistake raises an InputError that names the argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from flashgen.call import CallOptions, CheckedCall, Operands, OutputGradients
from flashgen.dtypes import COUNT_LIMIT, INT32_MAX, OPERAND_DTYPES, POSITION_LIMIT
from flashgen.runtime.block_layouts import check_layout, check_lists
from flashgen.runtime.captured_tensors import check_captured, check_captured_sizes, check_positions
from flashgen.runtime.check_basics import check_dense, known, refuse, shape_of
from flashgen.runtime.number_arguments import (
    check_dropout_positions,
    dropout_of,
    offset_of,
    scalar_value,
    scale_of,
)
from flashgen.runtime.offset_tensors import check_offsets, refuse_static_layout
from flashgen.runtime.packed_sequences import check_boundaries, entries_of
from flashgen.runtime.paged_caches import capacity_of, check_caches, check_pages, longest_of
from flashgen.runtime.split_size import splits_of
from flashgen.runtime.zero_divisions import check_divisors
from flashgen.signature import OFFSETS, CallSignature

Tensor = torch.Tensor


def check(signature: CallSignature, operands: Operands, options: CallOptions) -> CheckedCall:
    """The sizes and numbers of a call."""
    q, k, v, captured, rng = operands
    by_name = {"q": q, "k": k, "v": v}
    for name, value in by_name.items():
        _check_kind(signature, name, value, q)
        _check_memory(name, value)
    _check_together(signature, q, k, v)
    for name, value in by_name.items():
        _check_limits(name, value)
    scalars = zip(signature.scalars, options.scalars, strict=True)
    seq_k = k.shape[2]
    if signature.paged:
        check_captured_sizes(signature, captured, q, k)
        seq_k = capacity_of(signature, k, captured)
    call = CheckedCall(
        batch=q.shape[0],
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seq_q=q.shape[2],
        seq_k=seq_k,
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        scale=scale_of(signature, options.scale),
        scalars={scalar.name: scalar_value(scalar, value) for scalar, value in scalars},
        dropout_p=dropout_of(signature, options.dropout_p, rng, q.device),
        q_offset=offset_of("q_offset", options.q_offset, q.shape[2]),
        k_offset=offset_of("k_offset", options.k_offset, seq_k),
    )
    check_dropout_positions(signature, call)
    check_divisors(signature, call)
    refuse_static_layout(signature)
    if captured:
        ends = call.q_offset + call.seq_q, call.k_offset + call.seq_k
        check_captured(signature, captured, q, k, ends, call.heads)
    if signature.split:
        call = replace(call, splits=splits_of(signature, call))
    return replace(call, batch=entries_of(signature, q, captured)) if signature.packed else call


def check_traced(signature: CallSignature, operands: Operands, heads: int | None = None) -> None:
    """Checks operands while a graph is traced: sizes are symbols, and numbers are unknown.

    Sizes are compared only where they must be equal, so that a traced graph serves other
    lengths too. Everything else is checked when the graph runs.

    Args:
        heads: the number of query heads of the whole; that of q if None.
    """
    q, k, v, captured, _ = operands
    for name, value in (("q", q), ("k", k), ("v", v)):
        _check_kind(signature, name, value, q)
    _check_together(signature, q, k, v)
    if captured:
        check_captured_sizes(signature, captured, q, k, heads)


def check_contents(
    signature: CallSignature,
    captured: Mapping[str, Tensor],
    call: CheckedCall,
    k: Tensor,
) -> None:
    """Checks the values of offsets, of boundaries and of lists of blocks, on the CPU only.

    On a GPU this would need a device synchronisation; kernels stay inside their tensors whatever
    the values are.

    Raises:
        InputError: offsets out of range, boundaries that do not ascend, or lists of other blocks
            than the live ones.
    """
    if k.device.type != "cpu":
        return
    if signature.paged:
        check_pages(captured, call, k)
    if signature.offsets or signature.paged:
        ends = check_offsets(signature, captured, call)
        given, lengths = tuple(captured.values()), (call.seq_q, call.seq_k)
        if signature.paged and OFFSETS[0] not in signature.offsets:
            ends = longest_of(captured), call.seq_k
        # `check_boundaries` compares with the longest sequence.
        if signature.paged or not signature.packed:
            check_positions(signature, given, lengths, ends)
            check_layout(signature, given, lengths, ends)
    if signature.packed:
        check_boundaries(signature, captured, call.seq_q, call.seq_k)
    if signature.call_layout is not None:
        check_lists(captured)


def check_gradients(q: Tensor, v: Tensor, gradients: OutputGradients) -> None:
    """Checks the additional tensors of a backward call. q and v were checked before.

    Raises:
        InputError: a tensor has another shape, dtype or device; the error names the argument.
    """
    rows = tuple(q.shape[:3])
    shape = (*rows, v.shape[3])
    for name, tensor, wanted, dtype in (
        ("out", gradients.out, shape, q.dtype),
        ("lse", gradients.lse, rows, torch.float32),
        ("dout", gradients.dout, shape, q.dtype),
        ("dlse", gradients.dlse, rows, torch.float32),
    ):
        if tensor is None and name == "dlse":
            continue
        if not isinstance(tensor, Tensor):
            refuse(
                f"{name} is not a torch tensor",
                f"argument {name}",
                f"given a {type(tensor).__name__}",
                f"a tensor of shape {wanted}",
            )
        dense = tensor.layout == torch.strided and not tensor.is_nested
        given = tuple(tensor.shape) if dense else None
        if given != wanted or tensor.dtype != dtype or tensor.device != q.device:
            refuse(
                f"{name} does not belong to q, k and v",
                f"argument {name}",
                f"shape {given or tensor.layout}, {tensor.dtype}, on {tensor.device}; "
                f"expected {wanted}, {dtype}, on {q.device}",
                "out and lse of the forward call, and gradients of the same shapes",
            )


def _check_kind(signature: CallSignature, name: str, value: object, q: Tensor) -> None:
    if value is None:
        refuse(
            f"{name} is missing",
            f"argument {name}",
            "an operator takes q, k and v",
            "op(q, k, v); op(q, q, q) for self-attention without projections",
        )
    if not isinstance(value, Tensor):
        refuse(
            f"{name} is not a torch tensor",
            f"argument {name}",
            f"given a {type(value).__name__}",
            "torch.as_tensor(...)",
        )
    check_dense(name, value)
    if value.dim() != 4:
        axes = "[batch, heads, seq, head_dim]"
        refuse(
            f"{name} has {value.dim()} dimensions, not 4",
            f"argument {name}",
            f"shape {shape_of(value)}; expected {axes}",
            f"{name}.unsqueeze(0) for a missing batch; q.unflatten(2, (heads, -1)).transpose(1, 2) "
            "for [batch, seq, heads * head_dim]",
        )
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
    if _short(value.dtype) not in accepted:
        way_out = f"q.to(torch.{accepted[0]})"
        if _short(value.dtype) in OPERAND_DTYPES:
            way_out += f", or a spec with dtype={_short(value.dtype)!r}"
        refuse(
            "q does not have the dtype of the spec",
            "argument q",
            f"q is {value.dtype}; spec {signature.name} is for {', '.join(accepted)}",
            way_out,
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def _check_together(signature: CallSignature, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Compares the operands. Sizes may be symbols; an undecidable comparison passes."""

    def shapes() -> str:
        return f"q {shape_of(q)}, k {shape_of(k)}, v {shape_of(v)}"

    if not q.device == k.device == v.device:
        refuse(
            "q, k and v are on different devices",
            "arguments q, k and v",
            f"q on {q.device}, k on {k.device}, v on {v.device}",
            f"k.to({str(q.device)!r}) and v.to({str(q.device)!r})",
        )
    wanted = {"q": signature.head_dim, "k": signature.head_dim, "v": signature.head_dim_v}
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if known(tensor.shape[3] != wanted[name]):
            option = "head_dim_v" if name == "v" else "head_dim"
            refuse(
                f"the last dimension of {name} is not the spec's {option}",
                f"argument {name}",
                f"{shapes()}; spec {signature.name} has {option} {wanted[name]}",
                f"spec.replace({option}={shape_of(tensor)[3]})",
            )
    if signature.paged:
        check_caches(k, v)
    for name, tensor in () if signature.paged else (("k", k), ("v", v)):
        if known(tensor.shape[0] != q.shape[0]):
            of_q, of_k = shape_of(q)[0], shape_of(tensor)[0]
            narrow, entries = ("q", of_k) if of_q == 1 else (name, of_q)
            refuse(
                f"{name} does not have the batch of q",
                f"argument {name}",
                shapes(),
                f"{narrow}.expand({entries}, -1, -1, -1) to share one entry; it copies nothing"
                if 1 in (of_q, of_k)
                else "q, k and v with the same number of batch entries",
            )
    for axis, what in ((1, "number of heads"), (2, "length")):
        if known(k.shape[axis] != v.shape[axis]):
            refuse(
                f"k and v differ in {what}",
                "argument v",
                shapes(),
                "k [batch, heads_kv, seq_k, head_dim] and v [batch, heads_kv, seq_k, head_dim_v]",
            )
    heads_q, heads_kv = q.shape[1], k.shape[1]
    no_keys = known(heads_kv == 0)
    if known(heads_q != 0) and (no_keys or known(heads_q % heads_kv != 0)):
        refuse(
            "the heads of q cannot be divided among the heads of k and v",
            "argument q",
            f"{shape_of(q)[1]} heads in q, {shape_of(k)[1]} in k and v; {shapes()}",
            "a number of query heads that is a multiple of the number of key heads",
        )


def _check_limits(name: str, tensor: Tensor) -> None:
    """Kernels hold positions, heads of the batch and row strides in 32 bits, offsets in 64."""
    batch, heads, length = tensor.shape[:3]
    for what, size, limit in (
        ("batch", batch, COUNT_LIMIT),
        ("number of heads", heads, COUNT_LIMIT),
        ("batch times heads", batch * heads, INT32_MAX),
        ("length", length, POSITION_LIMIT),
    ):
        if size > limit:
            refuse(
                f"the {what} of {name} is larger than kernels support",
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
