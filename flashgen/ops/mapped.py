"""torch.vmap of the operator: one call over a larger batch where that is the same, else a loop.

Every sample of a mapped call counts its own batch entries from 0, and dropout depends on them too.
So samples can lie side by side in the batch only when nothing looks at it; nor when they have
captured tensors or layouts of their own, or gradients of one that all share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.expr import BATCH, B
from flashgen.spec import AttentionSpec

Tensor = torch.Tensor
Call = Callable[..., tuple[Tensor, ...]]


def forward(
    spec: AttentionSpec,
    call: Call,
    size: int,
    dims: Sequence[int | None],
    given: Sequence[Any],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """A mapped call of the operator.

    Args:
        call: the operator one level of mapping further down, of tensors like ``given``.
        size: of the mapped dimension.
        dims: where each of ``given`` is mapped, None where it is the same for all samples.
        given: q, k, v, rng, dropout_p, then the captured tensors.

    Returns:
        out and lse with the mapped dimension first, and where it is.
    """
    return _map(spec, call, size, dims, given, operands=3)


def backward(
    spec: AttentionSpec,
    call: Call,
    size: int,
    dims: Sequence[int | None],
    given: Sequence[Any],
    learns: bool = False,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The same for the gradients.

    Args:
        given: q, k, v, out, lse, dout, dlse, rng, dropout_p, then the captured tensors.
        learns: whether gradients of captured tensors are needed.
    """
    return _map(spec, call, size, dims, given, operands=7, learns=learns)


def _map(
    spec: AttentionSpec,
    call: Call,
    size: int,
    dims: Sequence[int | None],
    given: Sequence[Any],
    operands: int,
    learns: bool = False,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    first = [
        value.movedim(dim, 0) if dim is not None else value
        for value, dim in zip(given, dims, strict=True)
    ]
    is_mapped = [dim is not None for dim in dims]
    dropout_p, captured = given[operands + 1], given[operands + 2 :]
    drops = isinstance(dropout_p, Tensor) or bool(dropout_p)
    looks = {B, BATCH} & (spec.mask.free_symbols | spec.score.free_symbols)
    own = any(is_mapped[operands + 2 :]) or any("batch" in t.dims for t in spec.tensors)
    own |= spec.packed or (spec.block_sparse is not None and spec.block_sparse.by_head)
    pairs = tuple(zip(first, is_mapped, strict=True))
    if size == 0:
        # What a sample would give, and none of it.
        sample = (value.new_zeros(value.shape[1:]) if mapped else value for value, mapped in pairs)
        results = tuple(part[None][:0] for part in call(*sample))
        return results, (0,) * len(results)
    if drops or looks or own or learns:
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
    batch = int(first[0].shape[1 if is_mapped[0] else 0])  # of one sample
    parts = call(*folded, None, None, *captured)
    results = tuple(
        part.reshape(size, batch, *part.shape[1:]) if place < 3 else part.expand(size, *part.shape)
        for place, part in enumerate(parts)
    )
    return results, (0,) * len(results)
