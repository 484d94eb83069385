"""torch.vmap of the operator: one call over a larger batch where that is the same, else a loop.

Every sample of a mapped call counts its own batch entries from 0, and dropout depends on them too.
So samples can lie side by side in the batch only when nothing looks at it.
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
        given: q, k, v, rng, dropout_p.

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
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The same for the gradients; ``given`` is q, k, v, out, lse, dout, dlse, rng, dropout_p."""
    return _map(spec, call, size, dims, given, operands=7)


def _map(
    spec: AttentionSpec,
    call: Call,
    size: int,
    dims: Sequence[int | None],
    given: Sequence[Any],
    operands: int,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    first = [
        value.movedim(dim, 0) if dim is not None else value
        for value, dim in zip(given, dims, strict=True)
    ]
    is_mapped = [dim is not None for dim in dims]
    *_, dropout_p = given
    drops = isinstance(dropout_p, Tensor) or bool(dropout_p)
    looks = {B, BATCH} & (spec.mask.free_symbols | spec.score.free_symbols)
    if size and (drops or looks):
        samples = [
            call(
                *(
                    value[i] if mapped else value
                    for value, mapped in zip(first, is_mapped, strict=True)
                )
            )
            for i in range(size)
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
    # Nothing is dropped here: no sample (an empty mapping) or no dropout.
    results = tuple(
        part.reshape(size, batch, *part.shape[1:]) for part in call(*folded, None, None)
    )
    return results, (0,) * len(results)
