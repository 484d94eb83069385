"""q_offset and k_offset as tensors: their checks, which read no value on a GPU.

A call with such tensors is a call of a variant of its spec, which has them as captured tensors
(`flashgen.language.signature.at_offsets`). A numeric offset stays an option of the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashgen.call import CheckedCall
from flashgen.runtime.check_basics import refuse, shape_of
from flashgen.runtime.number_arguments import offset_of
from flashgen.signature import OFFSETS, PAGE_NAMES, CallSignature

Tensor = torch.Tensor

_DTYPES = {torch.int32: "int32", torch.int64: "int64"}


def given_offsets(q_offset: object, k_offset: object) -> dict[str, Tensor]:
    """Those of the two offsets that are tensors, by name, as [batch or 1].

    Raises:
        InputError: the tensor has another dtype or more than one dimension.
    """
    given = zip(OFFSETS, (q_offset, k_offset), strict=True)
    return {name: _checked(name, value) for name, value in given if isinstance(value, Tensor)}


def dtypes_of(offsets: Mapping[str, Tensor]) -> tuple[tuple[str, str], ...]:
    """The names and dtypes of `given_offsets`, the second argument of `at_offsets`."""
    return tuple((name, _DTYPES[tensor.dtype]) for name, tensor in offsets.items())


def numbers_of(q_offset: Any, k_offset: Any) -> tuple[int, int]:
    """The offsets as options of a call: 0 in place of a tensor."""
    return (
        0 if isinstance(q_offset, Tensor) else q_offset,
        0 if isinstance(k_offset, Tensor) else k_offset,
    )


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
        ends.append(max(offset_of(name, value, length) for value in values) + length)
    return ends[0], ends[1]
