"""Standard attention with the whole matrix of scores: the oracle, and PyTorch's own computation.

Algorithm 0 of Dao et al., "FlashAttention", 2022: S = Q K^T, P = softmax(S), O = P V, here with
the spec's score and mask between the first two. Both functions work on slices of (batch, head)
pairs and query rows, so that memory stays bounded however long the sequences are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sympy
import torch

from flashgen.errors import InputError
from flashgen.expr import BATCH, HEADS, SCORE, SEQ_K, SEQ_Q, B, H, K, Q
from flashgen.spec import AttentionSpec

from .interpret import evaluate

Tensor = torch.Tensor
Number = int | float | bool

_SCORES_AT_ONCE = 1 << 22
"""Elements of S held at a time; 32 MiB in float64, a few times over while mods are computed."""


def attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scalars: Mapping[str, Number] | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in float64 from the operands as given: what every kernel is measured against.

    Args:
        spec: any spec; its mask and score are interpreted here, nothing of the compiler is used.
        q: [batch, heads_q, seq_q, head_dim], any floating dtype, any strides.
        k: [batch, heads_kv, seq_k, head_dim]; heads_q is a multiple of heads_kv.
        v: [batch, heads_kv, seq_k, head_dim_v].
        scalars: a number for each of spec.scalars; float32 ones are rounded to float32 first,
            because that is what a kernel receives.
        q_offset, k_offset: global position of the first query and key.
        scale: factor on q.k; spec.scale, else 1 / sqrt(head_dim), when None.

    Returns:
        out [batch, heads_q, seq_q, head_dim_v] and lse [batch, heads_q, seq_q], natural log, both
        float64. A row without a kept key has out 0 and lse -inf.

    Raises:
        InputError: for a scalar that is missing or superfluous.
    """
    return _attend(spec, q, k, v, scalars, q_offset, k_offset, scale, exact=True)


def same_dtype(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scalars: Mapping[str, Number] | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The ordinary PyTorch computation in the operands' dtype: the yardstick of the error rule.

    Matrix products, scores and probabilities are tensors of the dtype, as when a model in half
    precision spells attention out. The mods alone see float32 (float16 counts exactly to 2048
    only), and their result is rounded back. Arguments, shapes and empty rows as in `attention`.

    Returns:
        out in the dtype of q, lse in float32.
    """
    return _attend(spec, q, k, v, scalars, q_offset, k_offset, scale, exact=False)


@dataclass(frozen=True)
class _Slice:
    """Some (batch, head) pairs, counted through both, and some rows of queries."""

    pairs: slice
    rows: slice


def _slices(pairs: int, seq_q: int, seq_k: int) -> Iterator[_Slice]:
    rows = min(max(1, _SCORES_AT_ONCE // max(1, seq_k)), max(1, seq_q))
    together = max(1, _SCORES_AT_ONCE // max(1, rows * seq_k))
    for pair in range(0, pairs, together):
        for row in range(0, seq_q, rows):
            yield _Slice(
                slice(pair, min(pair + together, pairs)), slice(row, min(row + rows, seq_q))
            )


def _attend(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scalars: Mapping[str, Number] | None,
    q_offset: int,
    k_offset: int,
    scale: float | None,
    *,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    batch, heads, seq_q, head_dim = q.shape
    heads_kv, seq_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    work = torch.float64 if exact else q.dtype
    real = torch.float64 if exact else torch.float32
    factor = scale if scale is not None else spec.scale
    factor = factor if factor is not None else 1 / math.sqrt(head_dim)

    device = q.device
    sizes = {BATCH: batch, HEADS: heads, SEQ_Q: seq_q, SEQ_K: seq_k}
    values = {symbol: torch.tensor(size, device=device) for symbol, size in sizes.items()}
    values |= scalar_values(spec, scalars or {}, real, device)
    values[K] = torch.arange(k_offset, k_offset + seq_k, device=device)

    out = torch.zeros(batch * heads, seq_q, head_dim_v, dtype=work, device=device)
    lse = torch.full((batch * heads, seq_q), -math.inf, dtype=real, device=device)
    if seq_k == 0:
        return out.view(batch, heads, seq_q, -1), lse.view(batch, heads, seq_q)

    for part in _slices(batch * heads, seq_q, seq_k):
        pair = torch.arange(part.pairs.start, part.pairs.stop, device=device)
        b, h = pair // heads, pair % heads
        h_kv = h // (heads // heads_kv)
        values[B], values[H] = b[:, None, None], h[:, None, None]
        rows = torch.arange(part.rows.start, part.rows.stop, device=device)
        values[Q] = (rows + q_offset)[:, None]

        q_part = q[b, h, part.rows].to(work)
        k_part, v_part = k[b, h_kv].to(work), v[b, h_kv].to(work)
        scores = (q_part @ k_part.transpose(1, 2)) * factor
        scores = _modified(spec, scores, values, real)
        out[part.pairs, part.rows], lse[part.pairs, part.rows] = _softmax_times(
            scores, v_part, real
        )
    return out.view(batch, heads, seq_q, head_dim_v), lse.view(batch, heads, seq_q)


def _modified(
    spec: AttentionSpec, scores: Tensor, values: dict[sympy.Symbol, Tensor], real: torch.dtype
) -> Tensor:
    """score_mod, then -inf where the mask is false."""
    if spec.score != SCORE:
        inputs = {**values, SCORE: scores.to(real)}
        scores = evaluate(spec.score, inputs, real).to(scores.dtype).expand_as(scores)
    if spec.mask is not sympy.true:
        keep = evaluate(spec.mask, values, real)
        scores = scores.masked_fill(~keep, -math.inf)
    return scores


def _softmax_times(scores: Tensor, v: Tensor, real: torch.dtype) -> tuple[Tensor, Tensor]:
    """softmax(scores) v and the log of its normaliser; a row of -inf gives 0 and -inf."""
    lse = torch.logsumexp(scores.to(real), dim=-1)
    probabilities = torch.softmax(scores, dim=-1)
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    return probabilities.masked_fill(empty, 0) @ v, lse


def scalar_values(
    spec: AttentionSpec, scalars: Mapping[str, Number], real: torch.dtype, device: torch.device
) -> dict[sympy.Symbol, Tensor]:
    """A 0-dim tensor for the symbol of each scalar, of the kind that a kernel receives."""
    wanted = [scalar.name for scalar in spec.scalars]
    if sorted(wanted) != sorted(scalars):
        raise InputError(
            "the scalars given are not those of the spec",
            where=f"reference of {spec.name}",
            numbers=f"given: {', '.join(scalars) or 'none'}; wanted: {', '.join(wanted) or 'none'}",
            way_out="scalars={" + ", ".join(f'"{name}": ...' for name in wanted) + "}",
        )
    found = {}
    for scalar in spec.scalars:
        value = scalars[scalar.name]
        if scalar.dtype == "bool":
            tensor = torch.tensor(bool(value), device=device)
        elif scalar.dtype == "int32":
            tensor = torch.tensor(int(value), device=device)
        else:
            tensor = torch.tensor(value, dtype=torch.float32, device=device).to(real)
        found[scalar.expr] = tensor
    return found
