"""Packed sequences: their boundaries among an operator's arguments."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashgen.ops.numbers import refuse
from flashgen.ops.symbols import known
from flashgen.spec import BOUNDARIES, AttentionSpec

Tensor = torch.Tensor


def entries_of(spec: AttentionSpec, q: Tensor, captured: Sequence[Any]) -> Any:
    """How many batch entries mods see: the sequences, where they are packed."""
    if not spec.packed:
        return q.shape[0]
    return _given(spec, captured)[0].shape[0] - 1


def check_packed(spec: AttentionSpec, q: Tensor, captured: Sequence[Any]) -> None:
    """What packed operands need beyond what all do; sizes may be symbols.

    Raises:
        InputError: several batch entries, or boundaries of another number of sequences.
    """
    if not spec.packed:
        return
    if known(q.shape[0] != 1):
        refuse(
            "packed sequences lie behind each other in one batch entry",
            "argument q",
            f"q {tuple(q.shape)}; spec {spec.name} has packed=True",
            "q.transpose(0, 1)[None] of q [total, heads, head_dim], and k and v likewise",
        )
    ends = _given(spec, captured)
    count, other = (tensor.shape[0] for tensor in ends)
    if known(count != other):
        refuse(
            "cu_seqlens_q and cu_seqlens_k are of different numbers of sequences",
            "arguments cu_seqlens_q and cu_seqlens_k",
            f"shapes {tuple(ends[0].shape)} and {tuple(ends[1].shape)}",
            "[sequences + 1] each: where every sequence begins, and where the last one ends",
        )


def check_boundaries(
    spec: AttentionSpec, captured: Mapping[str, Tensor], seq_q: int, seq_k: int
) -> None:
    """What can be seen on the CPU only, without waiting for a GPU; there, kernels stay inside.

    Raises:
        InputError: boundaries that do not ascend within the operands, or a captured tensor that is
            shorter than the longest sequence.
    """
    longest = {}
    for boundary, total in zip(BOUNDARIES, (seq_q, seq_k), strict=True):
        ends = captured[boundary.name].tolist()
        steps = [after - before for before, after in itertools.pairwise(ends)]
        if ends[0] < 0 or ends[-1] > total or min(steps, default=0) < 0:
            refuse(
                f"{boundary.name} does not ascend from 0 to the length of the operand",
                f"argument {boundary.name}",
                f"from {ends[0]:,} to {ends[-1]:,}, smallest step {min(steps, default=0):,}; "
                f"length {total:,}",
                "torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))",
            )
        longest["seq" + boundary.name[-2:]] = max(steps, default=0)
    for tensor in spec.tensors:
        for axis, dim in enumerate(tensor.dims):
            size = captured[tensor.name].shape[axis]
            if isinstance(dim, str) and 1 < size < longest.get(dim, 0):
                refuse(
                    f"{tensor.name} is shorter than the longest sequence",
                    f"argument {tensor.name}",
                    f"dimension {axis}, {dim}: {size:,}; longest sequence {longest[dim]:,}",
                    "a tensor of that length, or of length 1 where all positions share an element",
                )


def nobodys(captured: Mapping[str, Tensor], seq_q: int) -> Tensor:
    """Bool [seq_q], true for rows before the first boundary and behind the last."""
    ends = captured[BOUNDARIES[0].name]
    row = torch.arange(seq_q, device=ends.device)
    return (row < ends[0]) | (row >= ends[-1])


def _given(spec: AttentionSpec, captured: Sequence[Any]) -> tuple[Any, ...]:
    names = [tensor.name for tensor in spec.tensors]
    return tuple(captured[names.index(boundary.name)] for boundary in BOUNDARIES)
