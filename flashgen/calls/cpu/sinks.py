"""The sink in the tiled algorithms: a logit that joins each row's sum, and its gradient.

A sink is like a key whose V is 0: in dS = P * (dP - D + dLSE) its dP is 0.
"""

from __future__ import annotations

import math

import torch

from flashgen.calls.cpu.parts import ChunkScores
from flashgen.calls.cpu.problem import exp_

Tensor = torch.Tensor


def logits(part: ChunkScores, rows: int, sink: Tensor | None = None) -> Tensor:
    """The sink of ``rows`` query positions, [pairs, rows * group, 1]; one -inf without a sink.

    Args:
        sink: another tensor of its shape, such as its tangent.
    """
    sink = part.problem.sink if sink is None else sink
    if sink is None:
        return torch.tensor(-math.inf, dtype=part.problem.real)
    of_heads = sink.reshape(-1).to(part.problem.real)[_places(part, sink)]
    return of_heads.repeat(1, rows)[..., None]


def join(sink: Tensor, row_max: Tensor, row_sum: Tensor, o: Tensor) -> Tensor:
    """Adds the sink to the row sums, in place. Returns the new row maxima.

    Args:
        sink: the result of `logits`.
        row_max: the finite row maxima; for rows without keys a number below any score.
        row_sum: the row sums; 0 for rows without keys.
    """
    top = torch.maximum(row_max, sink)
    rescale = exp_(row_max - top)
    row_sum.mul_(rescale).add_(exp_(sink - top))
    o.mul_(rescale)
    return top


def add_gradient(total: Tensor, part: ChunkScores, lse: Tensor, delta: Tensor) -> None:
    """Adds a chunk's contribution to the gradient of the sink.

    Args:
        total: the gradient, flattened.
        lse: [pairs, seq_q * group, 1].
        delta: D - dLSE, of the shape of lse.
    """
    group, sink = part.problem.sizes.group, part.problem.sink
    assert sink is not None, "called for specs with a sink only"
    weight = weights(part, part.problem.sizes.seq_q, lse)
    assert weight is not None, "there is a sink"
    of_rows = (weight * delta).view(part.chunk.pairs, -1, group)
    places = _places(part, sink).flatten().to(total.device)
    total.index_add_(0, places, of_rows.sum(1).flatten(), alpha=-1)


def weights(part: ChunkScores, rows: int, lse: Tensor) -> Tensor | None:
    """The sink's share of rows with this LSE, [pairs, rows * group, 1]; None without a sink."""
    if part.problem.sink is None:
        return None
    logit = logits(part, rows)
    # A sink of -inf has weight 0; LSE of its rows can be -inf too.
    return torch.exp(logit - lse).masked_fill_(logit == -math.inf, 0)


def _places(part: ChunkScores, sink: Tensor) -> Tensor:
    """The index of the sink's element of each query head of a chunk, [pairs, group]."""
    heads = part.chunk.batch_and_head[1]
    return torch.zeros_like(heads) if sink.numel() == 1 else heads + part.problem.first_head
