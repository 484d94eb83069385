"""Standard attention with the whole matrix of scores: the oracle, and PyTorch's own computation.

Algorithm 0 of Dao et al., "FlashAttention", 2022: S = Q K^T, P = softmax(S), O = P V, here with
the spec's score and mask between the first two and dropout before the last. Both functions work on
slices of (batch, head) pairs and query rows, so that memory stays bounded however long the
sequences are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flashgen.spec import AttentionSpec

from .problem import Number, Part, Problem, State, problem_of

Tensor = torch.Tensor


def attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scalars: Mapping[str, Number] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: State | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in float64 from the operands as given: what every kernel is measured against.

    Args:
        spec: any spec; its mask and score are interpreted here, nothing of the compiler is used.
        q: [batch, heads_q, seq_q, head_dim], any floating dtype, any strides.
        k: [batch, heads_kv, seq_k, head_dim]; heads_q is a multiple of heads_kv.
        v: [batch, heads_kv, seq_k, head_dim_v].
        scalars: a number for each of spec.scalars; float32 ones are rounded to float32 first,
            because that is what a kernel receives.
        tensors: one for each of spec.tensors, of any strides; a dimension of length 1 is broadcast.
        q_offset, k_offset: global position of the first query and key.
        scale: factor on q.k; spec.scale, else 1 / sqrt(head_dim), when None.
        dropout_p: probability of dropping an element of P, in [0, 1); rounded to a multiple of
            2^-16. Which elements are dropped, `flashgen.dropout` says.
        rng: seed and offset, two integers or an int64 tensor [2]; needed when dropout_p > 0.

    Returns:
        out [batch, heads_q, seq_q, head_dim_v] and lse [batch, heads_q, seq_q], natural log and
        without dropout, both float64. A row without a kept key has out 0 and lse -inf, or the
        spec's sink, which is one of the summands of every row's lse.

    Raises:
        InputError: a scalar or tensor that is missing or superfluous, a tensor of another number of
            dimensions; a dropout_p that is no such
            probability, or above 0 for a spec without dropout or without an rng.
    """
    problem = problem_of(
        spec, q, k, v, scalars=scalars, tensors=tensors, q_offset=q_offset, k_offset=k_offset,
        scale=scale, dropout_p=dropout_p, rng=rng, exact=True,
    )  # fmt: skip
    return _attend(problem)


def same_dtype(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scalars: Mapping[str, Number] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: State | None = None,
) -> tuple[Tensor, Tensor]:
    """The ordinary PyTorch computation in the operands' dtype: the yardstick of the error rule.

    Matrix products, scores and probabilities are tensors of the dtype, as when a model in half
    precision spells attention out. The mods alone see float32 (float16 counts exactly to 2048
    only), and their result is rounded back. Dropout's factor is a float32 number and its product
    is rounded once, as in torch's CUDA kernel. Arguments, shapes, empty rows and errors as in
    `attention`.

    Returns:
        out in the dtype of q, lse in float32 (float64 for operands in float64).
    """
    problem = problem_of(
        spec, q, k, v, scalars=scalars, tensors=tensors, q_offset=q_offset, k_offset=k_offset,
        scale=scale, dropout_p=dropout_p, rng=rng, exact=False,
    )  # fmt: skip
    return _attend(problem)


def _attend(problem: Problem) -> tuple[Tensor, Tensor]:
    batch, heads, seq_q, _ = problem.q.shape
    device, dim_v = problem.q.device, problem.v.shape[3]
    out = torch.zeros(batch * heads, seq_q, dim_v, dtype=problem.work, device=device)
    lse = torch.full((batch * heads, seq_q), -math.inf, dtype=problem.real, device=device)
    for part in problem.parts():
        scores = problem.score((part.q @ part.k.transpose(1, 2)) * problem.factor, part)
        here = (part.pairs, part.rows)
        sink = None if part.sink is None else part.sink.expand(*scores.shape[:2], 1)
        scores = part.masked(scores)
        out[here], lse[here] = softmax_times_v(scores, part.v, part, problem.real, sink)
    return out.view(batch, heads, seq_q, dim_v), lse.view(batch, heads, seq_q)


def softmax_times_v(
    scores: Tensor, v: Tensor, part: Part, real: torch.dtype, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Dropout of softmax(scores), times v, and the log of softmax's normaliser.

    A row of -inf gives 0 and -inf. It is taken out before softmax, not only after, because
    autograd would multiply the NaN that softmax makes of it by 0.

    Args:
        sink: [n, rows, 1] in ``real``, a column of scores whose weights are left out of the
            product; None for no such column.
    """
    dtype, seq_k = scores.dtype, scores.shape[-1]
    if sink is not None:
        scores = torch.cat([scores, sink], dim=-1)  # in the wider dtype of the two
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    scores = scores.masked_fill(empty, 0)
    lse = torch.logsumexp(scores.to(real), dim=-1).masked_fill(empty[..., 0], -math.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(empty, 0)
    return part.dropped(weights[..., :seq_k].to(dtype)) @ v, lse
