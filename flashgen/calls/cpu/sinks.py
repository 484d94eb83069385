"""The sink in the tiled algorithms: a logit that joins each row's sum, and its gradient.

A sink is like a key whose V is 0: in dS = P * (dP - D + dLSE) its dP is 0.
"""

from __future__ import annotations

import math

import torch

from flashgen.calls.cpu.parts import ChunkScores
from flashgen.calls.cpu.problem import SequenceProblem, exp_
from flashgen.calls.sinks import Rows, gradient_of_rows, gradient_without_keys, logits_of

Tensor = torch.Tensor


def logits(part: ChunkScores, rows: slice, sink: Tensor | None = None) -> Tensor:
    """The sink of query rows, [pairs, rows * group, 1]; one -inf without a sink.

    Args:
        sink: another tensor of its shape, such as its tangent.
    """
    problem = part.problem
    sink = problem.sink if sink is None else sink
    if sink is None or problem.spec.sink is None:
        return torch.tensor(-math.inf, dtype=problem.real)
    shape = part.chunk.pairs, rows.stop - rows.start, problem.sizes.group
    row_logits = logits_of(sink, problem.spec.sink.dims, _rows(part, rows), problem.real)
    return row_logits.expand(shape).reshape(shape[0], -1, 1)


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
    problem, rows = part.problem, slice(0, part.problem.sizes.seq_q)
    sink = problem.spec.sink
    assert problem.sink is not None, "called for specs with a sink only"
    assert sink is not None, "called for specs with a sink only"
    weight = weights(part, rows, lse)
    assert weight is not None, "there is a sink"
    row_gradients = (weight * delta).view(part.chunk.pairs, -1, problem.sizes.group)
    total -= gradient_of_rows(problem.sink, sink.dims, _rows(part, rows), row_gradients).flatten()


def weights(part: ChunkScores, rows: slice, lse: Tensor) -> Tensor | None:
    """The sink's share of rows with this LSE, [pairs, rows * group, 1]; None without a sink."""
    if part.problem.sink is None:
        return None
    logit = logits(part, rows)
    # A sink of -inf has weight 0; LSE of its rows can be -inf too.
    return torch.exp(logit - lse).masked_fill_(logit == -math.inf, 0)


def _rows(part: ChunkScores, rows: slice) -> Rows:
    """Query rows of a chunk, [pairs, rows, group]."""
    problem = part.problem
    b, h = part.chunk.batch_and_head
    q = torch.arange(rows.start, rows.stop).view(1, -1, 1) + problem.queries.offset
    return Rows(b[:, None], h[:, None] + problem.first_head, q, axis=1)


def rows_without_keys(problem: SequenceProblem) -> Rows:
    """The rows of a sequence, [batch, heads, seq_q]."""
    sizes = problem.sizes
    b = torch.arange(sizes.first, sizes.first + sizes.batch).view(-1, 1, 1)
    h = torch.arange(sizes.heads_q).view(1, -1, 1) + problem.first_head
    q = torch.arange(sizes.seq_q).view(1, 1, -1) + problem.queries.offset
    return Rows(b, h, q)


def add_gradient_without_keys(total: Tensor, problem: SequenceProblem, dlse: Tensor) -> None:
    """Adds the gradient of a sink from rows without keys, whose LSE is the sink.

    Args:
        total: the gradient, flattened.
        dlse: the gradient of these rows' LSE.
    """
    assert problem.sink is not None, "called for specs with a sink only"
    assert problem.spec.sink is not None, "called for specs with a sink only"
    rows, dims = rows_without_keys(problem), problem.spec.sink.dims
    total += gradient_without_keys(problem.sink, dims, rows, dlse.to(total.dtype)).flatten()
