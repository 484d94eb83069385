"""The sink in the tiled algorithms: a logit that joins the sums of rows, and its gradient.

It is like a key whose V is 0: in dS = P * (dP - D + dLSE) its dP is 0.
"""

from __future__ import annotations

import math

import torch

from .problem import Part, exp_

Tensor = torch.Tensor


def logits(part: Part, rows: int) -> Tensor:
    """The sink of so many query positions, [pairs, rows * group, 1]; one -inf without a sink."""
    sink = part.problem.sink
    if sink is None:
        return torch.tensor(-math.inf, dtype=part.problem.real)
    of_heads = sink.reshape(-1).to(part.problem.real)[_places(part, sink)]
    return of_heads.repeat(1, rows)[..., None]


def join(sink: Tensor, row_max: Tensor, row_sum: Tensor, o: Tensor) -> Tensor:
    """Makes the sink part of the sums, in place; gives the new maximum.

    Args:
        sink: of `logits`.
        row_max: finite; that of a row without keys is lower than any score.
        row_sum: 0 where there are no keys.
    """
    top = torch.maximum(row_max, sink)
    shrink = exp_(row_max - top)
    row_sum.mul_(shrink).add_(exp_(sink - top))
    o.mul_(shrink)
    return top


def add_gradient(total: Tensor, part: Part, lse: Tensor, delta: Tensor) -> None:
    """Adds a chunk's share to the gradient of the sink.

    Args:
        total: all elements of the gradient, counted through.
        lse, delta: [pairs, seq_q * group, 1]; D - dLSE.
    """
    group, sink = part.problem.sizes.group, part.problem.sink
    assert sink is not None, "asked for only where the spec has a sink"
    logit = logits(part, part.problem.sizes.seq_q)
    # A sink of -inf is none, and its rows may have an LSE of -inf too.
    weight = torch.exp(logit - lse).masked_fill_(logit == -math.inf, 0)
    of_rows = weight.mul_(delta).view(part.chunk.pairs, -1, group)
    places = _places(part, sink).flatten()
    total.index_add_(0, places, of_rows.sum(1).flatten(), alpha=-1)


def lse_without_keys(sink: Tensor, rows: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """LSE of a call without keys, [batch, heads, seq_q]: the sink in every row."""
    return sink.detach().to(dtype).reshape(1, -1, 1).expand(rows).contiguous()


def gradient_without_keys(sink: Tensor, dlse: Tensor) -> Tensor:
    """The sink's gradient in a call without keys, in the dtype of ``dlse``: LSE is the sink."""
    of_heads = dlse.sum((0, 2))
    total = of_heads if sink.numel() == len(of_heads) else of_heads.sum()
    return total.view(sink.shape).masked_fill(sink == -math.inf, 0)


def _places(part: Part, sink: Tensor) -> Tensor:
    """Which element belongs to each query head of a chunk, [pairs, group]."""
    heads = part.chunk.batch_and_head[1]
    return torch.zeros_like(heads) if sink.numel() == 1 else heads
