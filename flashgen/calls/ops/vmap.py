"""torch.vmap of the operator: one call over a larger batch where that is equivalent, else a loop.

Every sample of a mapped call counts its batch entries from 0. Samples are therefore joined along
the batch only where neither the mods nor dropout depend on the batch index, and where no captured
tensor or block layout is mapped or has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.shared.signature import CallSignature

Tensor = torch.Tensor
Call = Callable[..., tuple[Tensor, ...]]


def map_call(
    signature: CallSignature,
    call: Call,
    size: int,
    dims: Sequence[int | None],
    arguments: Sequence[Any],
    operands: int,
    learns: bool,
    mapped_results: int = 3,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Computes a mapped call of one of the operators of a spec.

    Args:
        call: the operator at the next lower level of mapping, with arguments like ``arguments``.
        size: length of the mapped dimension.
        dims: the mapped dimension of each of ``arguments``; None where all samples share it.
        arguments: the operands, rng, dropout_p, then other floats and the captured tensors.
        operands: 3 for q, k, v; 7 in the backward pass, with out, lse, dout and dlse; more in
            tangent passes.
        learns: whether gradients of captured tensors are needed.
        mapped_results: the number of results that have batch entries; the others belong to
            captured tensors.

    Returns:
        The results with the mapped dimension first, and its index, 0, for each.
    """
    first = [
        value.movedim(dim, 0) if dim is not None else value
        for value, dim in zip(arguments, dims, strict=True)
    ]
    is_mapped = [dim is not None for dim in dims]
    dropout_p, numbers_and_captured = arguments[operands + 1], arguments[operands + 2 :]
    drops = isinstance(dropout_p, Tensor) or bool(dropout_p)
    reads_samples = any(is_mapped[operands + 2 :]) or any(
        "batch" in t.dims for t in signature.tensors
    )
    sparse = signature.block_sparse
    reads_samples |= signature.packed or (sparse is not None and sparse.by_head)
    pairs = tuple(zip(first, is_mapped, strict=True))
    if size == 0:
        # The shapes of a sample's results, with a mapped dimension of length 0.
        sample = (value.new_zeros(value.shape[1:]) if mapped else value for value, mapped in pairs)
        results = tuple(part[None][:0] for part in call(*sample))
        return results, (0,) * len(results)
    if drops or signature.reads_batch or reads_samples or learns:
        samples = [
            call(*(value[i] if mapped else value for value, mapped in pairs)) for i in range(size)
        ]
        results = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
        return results, (0,) * len(results)
    folded = [
        None
        if value is None
        else (value if mapped else value.expand(size, *value.shape)).flatten(0, 1)
        for value, mapped in zip(first[:operands], is_mapped, strict=False)
    ]
    batch = int(first[0].shape[1 if is_mapped[0] else 0])  # batch entries of one sample
    parts = call(*folded, None, None, *numbers_and_captured)
    results = tuple(
        part.reshape(size, batch, *part.shape[1:])
        if index < mapped_results
        else part.expand(size, *part.shape)
        for index, part in enumerate(parts)
    )
    return results, (0,) * len(results)
