"""The forward pass over tiles, as the kernels do it.

FlashAttention's Algorithm 1 (tiles, online softmax, nothing of size N x N; Dao et al., 2022) in the
loop order of FlashAttention-2 (Dao, 2023): a tile of query rows walks the key tiles. Dropout as in
Algorithm 2, on P, with the normaliser undropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from flashgen.expr import LOWEST_SCORE
from flashgen.spec import AttentionSpec

from . import sinks
from .chunks import Workspace
from .problem import Number, Part, Problem, exp_
from .sequences import sequences

Tensor = torch.Tensor


@torch.no_grad()
def forward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    q_offset: int,
    k_offset: int,
    scalars: Mapping[str, Number],
    tensors: Mapping[str, Tensor] | None = None,
    dropout_p: float = 0.0,
    rng: Tensor | Sequence[int] | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of CPU tensors, tile by tile, in memory that grows with N and not with N x N.

    Args:
        q: [batch, heads_q, seq_q, head_dim], float16, bfloat16, float32 or float64; any strides.
        k: [batch, heads_kv, seq_k, head_dim], of the same dtype.
        v: [batch, heads_kv, seq_k, head_dim_v], of the same dtype.
        scale: factor on q.k.
        q_offset, k_offset: global positions of the first query and key.
        scalars: a number for each of spec.scalars.
        tensors: one for each of spec.tensors, of any strides; float64 ones may stand for float32.
        dropout_p: probability of dropping an element of P.
        rng: seed and offset, where there is dropout; int64 [2] or two integers.
        block_q, block_k: the plan's when None.

    Returns:
        out [batch, heads_q, seq_q, head_dim_v] in the dtype of q, with its axes ordered in memory
        as q's are; lse [batch, heads_q, seq_q], natural log, undropped, float32 (float64 for
        float64 operands). A row without a kept key has out 0 and lse -inf, or the spec's sink.

    Scores, statistics and accumulators are float32, P is rounded to a 16-bit operand dtype before
    P V; for float64 operands everything is float64.
    """
    out = _empty_like_q(q, v.shape[3])
    work = Workspace(torch.float64 if q.dtype == torch.float64 else torch.float32)
    lse = torch.empty(q.shape[:3], dtype=work.dtype)
    if spec.packed:
        _without_keys(out, lse, None)
    for sequence in sequences(spec, q, k, tensors or {}):
        of_q, of_out, of_lse = sequence.of_queries(q, out, lse)
        of_k, of_v = sequence.of_keys(k, v)
        problem = Problem(
            spec,
            of_q,
            of_k,
            scale=scale,
            q_offset=q_offset,
            k_offset=k_offset,
            scalars=scalars,
            tensors=tensors or {},
            dropout_p=dropout_p,
            rng=rng,
            block_q=block_q,
            block_k=block_k,
            sequence=sequence.place,
        )
        if problem.is_empty:
            _without_keys(of_out, of_lse, problem.sink)
            continue
        for part in problem.parts():
            _chunk(part, work, of_q, of_k, of_v, of_out, of_lse)
    return out, lse


def _without_keys(out: Tensor, lse: Tensor, sink: Tensor | None) -> None:
    out.zero_()
    if sink is None:
        lse.fill_(-math.inf)
    else:
        lse.copy_(sinks.lse_without_keys(sink, tuple(lse.shape), lse.dtype))


def _empty_like_q(q: Tensor, dim: int) -> Tensor:
    """Uninitialised [batch, heads_q, seq_q, dim], its axes ordered in memory as q's are."""
    batch, heads, seq, _ = q.shape
    if q.stride(1) < q.stride(2) and q.stride(1) != 0:
        return torch.empty(batch, seq, heads, dim, dtype=q.dtype).transpose(1, 2)
    return torch.empty(batch, heads, seq, dim, dtype=q.dtype)


def _chunk(
    part: Part, work: Workspace, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Writes out and lse of one chunk."""
    problem, chunk = part.problem, part.chunk
    q = chunk.of_queries(q).to(problem.exact)
    k, v = chunk.of_keys(k).to(problem.exact), chunk.of_keys(v).to(problem.real)
    o = chunk.result_for(out, q.shape[1], problem.real)
    statistics = chunk.result_for(lse[..., None], q.shape[1], problem.real)
    group = problem.sizes.group
    for start, stop in problem.queries.tiles():
        rows = slice(start * group, stop * group)
        _query_tile(
            part, work, slice(start, stop), q[:, rows], k, v, o[:, rows], statistics[:, rows]
        )
    chunk.to_queries(out, o)
    chunk.to_queries(lse[..., None], statistics)


def _query_tile(
    part: Part,
    work: Workspace,
    rows: slice,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Writes O and LSE of the query positions ``rows``; q, out and lse are those rows'."""
    problem = part.problem
    lowest = torch.finfo(problem.real).min
    o = work.matrix("o", *out.shape)
    row_max = row_sum = None
    for run in part.key_runs(rows.start, rows.stop):
        keys = slice(run.start, run.stop)
        p = work.matrix("p", q.shape[0], q.shape[1], run.stop - run.start)
        bits = None if run.full else part.mask_bits(rows, keys)
        scores = _scores(part, work, p, rows, keys, q, k, bits)

        # Of a row with no key so far the maximum is -inf, from which nothing can be subtracted.
        tile_max = scores.amax(-1, keepdim=True).clamp_min_(lowest)
        new_max = tile_max if row_max is None else torch.maximum(row_max, tile_max)
        exp_(torch.sub(scores, new_max, out=p))
        if bits is not None:
            part.select(p, bits)
        tile_sum = p.sum(-1, keepdim=True)

        if problem.dropout_scale is not None:
            part.select(p, part.dropout_bits(rows, keys))
        if problem.narrow is not None:
            p.copy_(p.to(problem.narrow))
        if row_max is None or row_sum is None:
            row_sum = tile_sum
            torch.baddbmm(o, p, v[:, keys], beta=0, out=o)
        else:
            correction = exp_(row_max.sub_(new_max))
            row_sum.mul_(correction).add_(tile_sum)
            o.mul_(correction).baddbmm_(p, v[:, keys])
        row_max = new_max

    alone = sinks.logits(part, rows.stop - rows.start)  # LSE of a row without keys
    if row_max is None or row_sum is None:
        out.zero_()
        lse.copy_(alone)
        return
    empty = row_max == lowest
    if problem.sink is not None:
        row_max = sinks.join(alone, row_max, row_sum.masked_fill_(empty, 0), o)
    torch.add(row_max, row_sum.log(), out=lse)
    torch.where(empty, alone, lse, out=lse)
    if problem.dropout_scale is not None:
        row_sum.div_(problem.dropout_scale)
    torch.div(o, row_sum.masked_fill_(empty, math.inf), out=out)


def _scores(
    part: Part,
    work: Workspace,
    p: Tensor,
    rows: slice,
    keys: slice,
    q: Tensor,
    k: Tensor,
    bits: Tensor | None,
) -> Tensor:
    """s' of a tile, -inf where ``bits`` are 0; ``p`` itself, or a tensor of the score's making."""
    problem = part.problem
    scores = p
    if not problem.code.ignores_score:
        problem.multiply(work, p, q, k[:, keys])
    if problem.code.score is not None:
        scores = part.score(part.grouped(p), rows, keys)
        if bool(scores.amin() <= LOWEST_SCORE):
            scores = scores.masked_fill(scores <= LOWEST_SCORE, -math.inf)
    if bits is None:
        return scores if scores is p else scores.reshape(p.shape)
    found = part.grouped(p) if scores is p else scores
    selected = part.grouped(p).view(problem.bits)
    torch.bitwise_and(found.view(problem.bits), bits, out=selected)
    selected.bitwise_or_(part.minus_infinity_where_not(bits))
    return p
