"""Standard attention with the whole matrix of scores, in float64 and in the operands' dtype.

Algorithm 0 of Dao et al., "FlashAttention", 2022: S = Q K^T, P = softmax(S), O = P V, here with
the spec's score and mask between the first two steps and dropout before the last. Both functions
process slices of (batch, head) pairs and query rows, so that memory is bounded for all sequence
lengths.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from flashgen.reference.problem import (
    OracleArguments,
    OracleProblem,
    ScoreBlock,
    in_blocks,
    problem_of,
)
from flashgen.shared.paged import contiguous_call
from flashgen.shared.signature import OFFSETS
from flashgen.spec.language.signature import contiguous, packed_queries
from flashgen.spec.language.spec import AttentionSpec

if TYPE_CHECKING:
    from typing import Unpack

Tensor = torch.Tensor


def attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    exact: bool = True,
    **call: Unpack[OracleArguments],
) -> tuple[Tensor, Tensor]:
    """Computes attention in float64, without rounding the operands: the reference of all kernels.

    Without ``exact``, PyTorch computes it in the operands' dtype: the baseline of the error rule.
    Matrix products, scores and probabilities are tensors of the dtype, as in a model in half
    precision without a fused kernel. Only the mods are computed in float32 (float16 holds integers
    exactly up to 2048 only), and their results are rounded back. Dropout's factor is a float32
    number and its product is rounded once, as in torch's CUDA kernel.

    Args:
        spec: any spec; its mask and score are interpreted, without the compiler.
        q: [batch, heads_q, seq_q, head_dim], any floating dtype, any strides.
        k: [batch, heads_kv, seq_k, head_dim]; heads_q is a multiple of heads_kv. For a spec with
            paged=True, a cache [pages, heads_kv, page_size, head_dim].
        v: [batch, heads_kv, seq_k, head_dim_v], or a cache; None for the first columns of k, with
            shared_kv=True.
        call: the other arguments of the call.

    Returns:
        out [batch, heads_q, seq_q, head_dim_v] and lse [batch, heads_q, seq_q], natural log and
        without dropout, both float64. A row without a kept key has out 0 and lse -inf, or the
        spec's sink, which is one of the summands of every row's lse. Without ``exact``, out has the
        dtype of q and lse is float32, or float64 for operands in float64. With other weights than
        those of the softmax, lse is the sum of each row's weights, or 0 where nothing is divided by
        it; a row without a kept key has 0.

    Raises:
        InputError: a scalar or tensor is missing, superfluous or of another rank; dropout_p is not
            a probability, or is above 0 for a spec without dropout or without an rng.
    """
    v = k[..., : spec.head_dim_v] if v is None else v
    if not spec.paged:
        return _attend(problem_of(spec, q, k, v, exact=exact, **call))
    spec, call = in_blocks(spec, q, k, call)
    captured = dict(call.get("tensors") or {})
    if isinstance(call.get("q_offset"), Tensor):
        captured[OFFSETS[0]] = call["q_offset"]  # type: ignore[assignment]
    copied = contiguous_call(q, k, v, captured)
    contiguous_spec = contiguous(packed_queries(spec))
    call["q_offset"], call["tensors"] = copied.tensors[OFFSETS[0]], copied.tensors
    if all(tensor.name != OFFSETS[0] for tensor in contiguous_spec.tensors):
        del copied.tensors[OFFSETS[0]]
    out, lse = _attend(problem_of(contiguous_spec, *copied[:3], exact=exact, **call))
    return copied.like_queries(out, q), copied.like_queries(lse, q)


same_dtype = functools.partial(attention, exact=False)


def _attend(problem: OracleProblem) -> tuple[Tensor, Tensor]:
    batch, heads, seq_q, _ = problem.q.shape
    device, dim_v = problem.q.device, problem.v.shape[3]
    out = torch.zeros(batch * heads, seq_q, dim_v, dtype=problem.work, device=device)
    without_keys = -math.inf if problem.spec.is_softmax else 0.0
    lse = torch.full((batch * heads, seq_q), without_keys, dtype=problem.real, device=device)
    for part in problem.blocks():
        scores = problem.masked_scores(part)
        block_rows = (part.pairs, part.rows)
        sink = None if part.sink is None else part.sink.expand(*scores.shape[:2], 1)
        out[block_rows], lse[block_rows] = out_and_lse(problem, scores, part.v, part, sink)
    return out.view(batch, heads, seq_q, dim_v), lse.view(batch, heads, seq_q)


def out_and_lse(
    problem: OracleProblem, scores: Tensor, v: Tensor, part: ScoreBlock, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """O and LSE, or the sum of the weights, from masked scores, or from masked weights."""
    if problem.spec.is_softmax:
        return softmax_times_v(scores, v, part, problem.real, sink)
    sums = scores.to(problem.real).sum(dim=-1)
    if not problem.spec.sums_weights:
        return part.dropped(scores) @ v, torch.zeros_like(sums)
    none = (sums == 0)[..., None]
    shares = scores / sums[..., None].masked_fill(none, 1)
    return part.dropped(shares.masked_fill(none, 0).to(scores.dtype)) @ v, sums


def added_weights(problem: OracleProblem, weights: Tensor) -> Tensor:
    """The weights as a forward pass adds them up for the sum that later passes start from.

    Where the sum divides the output (`AttentionSpec.rounds_sums`), they are rounded to the dtype of
    q, unless they overflow there.
    """
    if not problem.spec.rounds_sums:
        return weights
    rounded = weights.to(problem.q.dtype).to(problem.work)
    return torch.where(rounded.isfinite(), rounded, weights)


def kept_sums(problem: OracleProblem, weights: Tensor) -> Tensor:
    """The sums of `added_weights`, [n, rows, 1], rounded to float32 as calls return them."""
    return added_weights(problem, weights).sum(dim=-1, keepdim=True).float().to(weights.dtype)


def softmax_times_v(
    scores: Tensor, v: Tensor, part: ScoreBlock, real: torch.dtype, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dropout(softmax(scores)) v, and the logarithm of the softmax's normaliser.

    A row of -inf has the results 0 and -inf. The row is replaced before and after the softmax,
    because autograd would multiply the NaN of its softmax by 0.

    Args:
        sink: [n, rows, 1] in ``real``, a column of scores without a row of v; None without a sink.
    """
    dtype, seq_k = scores.dtype, scores.shape[-1]
    if sink is not None:
        scores = torch.cat([scores, sink], dim=-1)  # in the wider dtype of the two
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    scores = scores.masked_fill(empty, 0)
    lse = torch.logsumexp(scores.to(real), dim=-1).masked_fill(empty[..., 0], -math.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(empty, 0)
    return part.dropped(weights[..., :seq_k].to(dtype)) @ v, lse
