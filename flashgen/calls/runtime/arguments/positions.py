"""Positions and packed lengths: offsets as numbers and as tensors, and boundaries of sequences.

A call with offsets in tensors is a call of a variant of its spec, which has them as captured
tensors (`spec.language.signature.at_offsets`). A numeric offset stays an option of the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashgen.calls.runtime.arguments.refusals import (
    check_ascending,
    is_known,
    refuse,
    shape_of,
    shown,
    whole_number,
)
from flashgen.shared.call import CheckedCall
from flashgen.shared.dropout import BLOCK
from flashgen.shared.dtypes import POSITION_LIMIT
from flashgen.shared.signature import BOUNDARIES, OFFSETS, PAGE_NAMES, CallSignature

Tensor = torch.Tensor

_DTYPES = {torch.int32: "int32", torch.int64: "int64"}

# ---- offsets -------------------------------------------------------------------------------------


def offset_of(name: str, value: object, length: int) -> int:
    """The global position of row 0 of ``length`` rows.

    Raises:
        InputError: the value is not an integer, or positions exceed `POSITION_LIMIT`.
    """
    offset = whole_number(value)
    if offset is None:
        refuse(
            f"{name} is not a whole number",
            f"argument {name}",
            f"given {shown(value)}",
            f"a Python int, the global position of the first row: {name}=0; or a tensor of int32 "
            "or int64 with one for each batch entry",
        )
    last = offset + max(length, 1) - 1
    if max(abs(offset), abs(last)) > POSITION_LIMIT:
        refuse(
            f"{name} makes positions larger than kernels support",
            f"argument {name}",
            f"positions {offset:,} to {last:,}; the limit is +-{POSITION_LIMIT:,}",
            "positions relative to a nearer origin, for mods that only use q - k",
        )
    return offset


def offset_tensors(q_offset: object, k_offset: object) -> dict[str, Tensor]:
    """`q_offset` and `k_offset` where the caller passed a tensor, reshaped to [batch] or [1].

    Raises:
        InputError: the tensor has another dtype or more than one dimension.
    """
    if type(q_offset) is int and type(k_offset) is int:
        return {}
    both = zip(OFFSETS, (q_offset, k_offset), strict=True)
    return {name: _checked(name, value) for name, value in both if isinstance(value, Tensor)}


def dtypes_of(offsets: Mapping[str, Tensor]) -> tuple[tuple[str, str], ...]:
    """The names and dtypes of `offset_tensors`, the second argument of `at_offsets`."""
    return tuple((name, _DTYPES[tensor.dtype]) for name, tensor in offsets.items())


def _checked(name: str, offset: Tensor) -> Tensor:
    if offset.dtype not in _DTYPES or offset.dim() > 1:
        refuse(
            f"{name} is not one whole number, or one for each batch entry",
            f"argument {name}",
            f"shape {shape_of(offset)}, {offset.dtype}; expected shape () or (batch,), "
            "torch.int32 or torch.int64",
            f"{name}.to(torch.int32)" if offset.dim() < 2 else f"{name}.flatten()",
        )
    return offset if offset.dim() else offset.reshape(1)


def check_offsets(
    signature: CallSignature, captured: Mapping[str, Tensor], call: CheckedCall
) -> tuple[int, int]:
    """Checks the values of offsets on the CPU, where that waits for nothing.

    Kernels clamp offsets instead, so that no position exceeds `POSITION_LIMIT`.

    Returns:
        The largest global positions of a query and of a key, plus 1.

    Raises:
        InputError: an offset makes positions larger than kernels support.
    """
    ends = []
    lengths = (call.seq_q, call.seq_k)
    numbers = (call.q_offset, call.k_offset)
    for name, length, number in zip(OFFSETS, lengths, numbers, strict=True):
        values = captured[name].tolist() if name in signature.offsets else [number]
        starts = [offset_of(name, value, length) for value in values]
        ends.append(max(starts, default=0) + length)
    return ends[0], ends[1]


def refuse_static_layout(signature: CallSignature) -> None:
    """Raises InputError where a block layout would be evaluated up to an unknown position."""
    by_device = (*signature.offsets, *(PAGE_NAMES[1:] if signature.paged else ()))
    if by_device and signature.static_layout is not None:
        refuse(
            "a block layout that is a function needs positions that the host knows",
            f"argument {by_device[0]}",
            f"a tensor; spec {signature.name} has block_sparse with a function",
            "offsets that are Python ints, or fg.BlockSparse() without a function and layout= with "
            "a block for every position",
        )


def check_dropout_positions(signature: CallSignature, call: CheckedCall) -> None:
    """Raises InputError where a call with dropout does not begin at a block of random bits."""
    for name in OFFSETS if call.dropout_p else ():
        offset = getattr(call, name)
        below = offset // BLOCK * BLOCK
        value, way_out = f"{offset:,}", f"{name}={below} or {below + BLOCK}"
        if name in signature.offsets:
            value, way_out = "a tensor, whose values the host does not know", f"{name} as an int"
        elif offset == below:
            continue
        refuse(
            f"dropout needs a {name} that is a multiple of {BLOCK}",
            f"argument {name}",
            f"given {value}; dropout_p {call.dropout_p}; random bits are made for blocks of "
            f"{BLOCK} x {BLOCK} positions",
            f"{way_out}, or dropout_p=0",
        )


# ---- packed sequences ----------------------------------------------------------------------------


def entries_of(signature: CallSignature, q: Tensor, captured: Sequence[Any]) -> Any:
    """The number of batch entries that mods see: of sequences, where these are packed."""
    if not signature.packed:
        return q.shape[0]
    return tensors_named(signature, captured, signature.boundaries)[0].shape[0] - 1


def check_packed(signature: CallSignature, q: Tensor, captured: Sequence[Any]) -> None:
    """Checks the sizes of packed operands, which may be symbols.

    Raises:
        InputError: several batch entries, or boundaries that are empty or of another number of
            sequences.
    """
    if not signature.packed:
        return
    if is_known(q.shape[0] != 1):
        refuse(
            "packed sequences are stored one after another in one batch entry",
            "argument q",
            f"q {shape_of(q)}; spec {signature.name} has packed=True, or cu_seqlens_q is given",
            "q.transpose(0, 1)[None] of q [total, heads, head_dim], and k and v likewise",
        )
    ends = tensors_named(signature, captured, signature.boundaries)
    count, count_k = (tensor.shape[0] for tensor in (ends[0], ends[-1]))
    if is_known(count == 0):
        refuse(
            f"{signature.boundaries[0]} has no elements",
            f"argument {signature.boundaries[0]}",
            f"shape {tuple(ends[0].shape)}",
            "[sequences + 1]; torch.zeros(1, dtype=torch.int32) for no sequence",
        )
    if is_known(count != count_k):
        refuse(
            "cu_seqlens_q and cu_seqlens_k have different numbers of sequences",
            "arguments cu_seqlens_q and cu_seqlens_k",
            f"shapes {tuple(ends[0].shape)} and {tuple(ends[1].shape)}",
            "[sequences + 1] each: the first row of every sequence, and one beyond the last row",
        )


def check_boundaries(
    signature: CallSignature, captured: Mapping[str, Tensor], seq_q: int, seq_k: int
) -> None:
    """Checks boundaries on the CPU.

    On a GPU the check would need a device synchronisation; kernels clamp boundaries instead.

    Raises:
        InputError: boundaries that do not ascend from 0 within the operands, or a captured
            tensor that is shorter than the longest sequence.
    """
    longest = {}
    for boundary, total in zip(signature.boundaries, (seq_q, seq_k), strict=False):
        ends = captured[boundary].tolist()
        total_text = "the length of the operand", f"length {total:,}"
        steps = check_ascending(boundary, ends, total, total_text, "lengths")
        longest["seq" + boundary[-2:]] = max(steps, default=0)
    for tensor in signature.tensors:
        for axis, dim in enumerate(tensor.dims):
            size = captured[tensor.name].shape[axis]
            if isinstance(dim, str) and 1 < size < longest.get(dim, 0):
                refuse(
                    f"{tensor.name} is shorter than the longest sequence",
                    f"argument {tensor.name}",
                    f"dimension {axis}, {dim}: {size:,}; longest sequence {longest[dim]:,}",
                    "a tensor of that length, or of length 1 where all positions share an element",
                )


def rows_outside(captured: Mapping[str, Tensor], seq_q: int) -> Tensor:
    """Bool [seq_q], true for rows before the first and after the last sequence."""
    ends = captured[BOUNDARIES[0]]
    row = torch.arange(seq_q, device=ends.device)
    return (row < ends[0]) | (row >= ends[-1])


def has_sequences(signature: CallSignature, captured: Mapping[str, Tensor]) -> bool:
    """False for a call with packed rows of no sequence alone."""
    return not signature.packed or len(captured[BOUNDARIES[0]]) > 1


def tensors_named(
    signature: CallSignature, captured: Sequence[Any], names: Sequence[str]
) -> list[Any]:
    """Captured tensors of a call by their names."""
    all_names = [tensor.name for tensor in signature.tensors]
    return [captured[all_names.index(name)] for name in names]
