"""Checks of packed sequences and of their boundaries, cu_seqlens_q and cu_seqlens_k."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashgen.runtime.check_basics import known, refuse, shape_of
from flashgen.signature import BOUNDARIES, CallSignature

Tensor = torch.Tensor


def entries_of(signature: CallSignature, q: Tensor, captured: Sequence[Any]) -> Any:
    """The number of batch entries that mods see: of sequences, where these are packed."""
    if not signature.packed:
        return q.shape[0]
    return given(signature, captured, signature.boundaries)[0].shape[0] - 1


def check_packed(signature: CallSignature, q: Tensor, captured: Sequence[Any]) -> None:
    """Checks the sizes of packed operands, which may be symbols.

    Raises:
        InputError: several batch entries, or boundaries of another number of sequences.
    """
    if not signature.packed:
        return
    if known(q.shape[0] != 1):
        refuse(
            "packed sequences are stored one after another in one batch entry",
            "argument q",
            f"q {shape_of(q)}; spec {signature.name} has packed=True, or cu_seqlens_q is given",
            "q.transpose(0, 1)[None] of q [total, heads, head_dim], and k and v likewise",
        )
    ends = given(signature, captured, signature.boundaries)
    count, other = (tensor.shape[0] for tensor in (ends[0], ends[-1]))
    if known(count != other):
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
        steps = [after - before for before, after in itertools.pairwise(ends)]
        if ends[0] != 0 or ends[-1] > total or min(steps, default=0) < 0:
            refuse(
                f"{boundary} does not ascend from 0 to the length of the operand",
                f"argument {boundary}",
                f"from {ends[0]:,} to {ends[-1]:,}, smallest step {min(steps, default=0):,}; "
                f"length {total:,}",
                "torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))",
            )
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


def given(signature: CallSignature, captured: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Captured tensors of a call by their names."""
    all_names = [tensor.name for tensor in signature.tensors]
    return [captured[all_names.index(name)] for name in names]
