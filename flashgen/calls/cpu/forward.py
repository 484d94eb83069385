"""The forward pass over tiles, with the algorithm of the kernels.

FlashAttention's Algorithm 1 (tiles, online softmax, nothing of size N x N; Dao et al., 2022) in the
loop order of FlashAttention-2 (Dao, 2023): a tile of query rows walks the key tiles. Dropout acts
on P as in Algorithm 2, and not on the normaliser.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from flashgen.calls.cpu import sinks
from flashgen.calls.cpu.chunks import Workspace
from flashgen.calls.cpu.parts import ChunkScores, SequenceParts, parts_of
from flashgen.calls.cpu.problem import LOG2_E, SequenceProblem, TileArguments, exp_, real_of
from flashgen.calls.cpu.threads import alone, share, threads_of
from flashgen.calls.sinks import logits_of
from flashgen.spec.language.signature import signature_of
from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor


@torch.no_grad()
def forward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: TileArguments,
    parts: Iterable[SequenceParts] = (),
) -> tuple[Tensor, ...]:
    """Computes attention of CPU tensors tile by tile, in memory linear in N.

    Args:
        q: [batch, heads_q, seq_q, head_dim], float16, bfloat16, float32 or float64; any strides.
        k: [batch, heads_kv, seq_k, head_dim], of the same dtype.
        v: [batch, heads_kv, seq_k, head_dim_v], of the same dtype.
        arguments: the other arguments of the call.
        parts: the result of `parts_of`, where an earlier call with equal shapes and arguments kept
            it.

    Returns:
        out [batch, heads_q, seq_q, head_dim_v] in the dtype of q (of the accumulators where the
        spec is partial), with its axes ordered in memory as q's are; lse [batch, heads_q, seq_q],
        natural log, undropped, float32 (float64 for float64 operands). A row without a kept key has
        out 0 and lse -inf, or the spec's sink. With other weights than those of the softmax, lse is
        the sum of a row's weights, or 0 where nothing is divided by it. Where the spec returns
        maxima, the largest score of each row is a third result, of the kind of lse.

    Scores, statistics and accumulators are float32, P is rounded to a 16-bit operand dtype before
    P V; for float64 operands everything is float64. Products of q and k are as
    `SequenceProblem.products` says, and small calls are float64 throughout.
    """
    out, rows = empty_results(spec, q, v)
    parts = parts or parts_of(spec, q, k, arguments)
    waiting = dict(enumerate(chunks_with_keys(parts, (q, k, v), out, rows)))
    threads = threads_of(math.prod(q.shape[:3]) * k.shape[2])
    works = [Workspace(rows.dtype) for _ in range(threads)]
    # Threads share the chunks; the tiles of each chunk where there are fewer chunks than threads.
    chunk_threads, tile_threads = (threads, 1) if len(waiting) >= threads else (1, threads)

    def compute(thread: int, item: int) -> None:
        chunk, *tensors = waiting.pop(item)
        if chunk.fits_at_once:
            _at_once(chunk, *tensors)
        else:
            _chunk(chunk, works[thread:], tile_threads, *tensors)

    share(chunk_threads, len(waiting), compute)
    return out, *(column.contiguous() for column in rows.unbind(-1))


def empty_results(spec: AttentionSpec, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """O, and the numbers of each row beside it: LSE, and the largest score where it is returned."""
    dtype = real_of(q)
    out = empty_like_q(q, v.shape[3], dtype if spec.partial else q.dtype)
    rows = torch.empty(*q.shape[:3], 1 + spec.returns_maxima, dtype=dtype)
    if spec.packed:  # rows outside all sequences
        out.zero_()
        rows.fill_(signature_of(spec).lse_of_nothing)
    return out, rows


def chunks_with_keys(
    parts: Iterable[SequenceParts], operands: tuple[Tensor, Tensor, Tensor], *results: Tensor
) -> Iterator[tuple[ChunkScores, Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Each chunk with q, k, v, O and the numbers of rows of its sequence; writes the results of
    sequences without keys."""
    q, k, v = operands
    for sequence, problem, chunks in parts:
        q_rows, out_rows, statistics_rows = sequence.query_rows(q, *results)
        k_rows, v_rows = sequence.key_rows(k, v)
        if problem.is_empty:
            statistics_rows.fill_(-math.inf)
            _without_keys(problem, out_rows, statistics_rows[..., 0])
        for chunk in chunks:
            yield chunk, q_rows, k_rows, v_rows, out_rows, statistics_rows


def _without_keys(problem: SequenceProblem, out: Tensor, lse: Tensor) -> None:
    out.zero_()
    sink = problem.spec.sink
    if problem.sink is None or sink is None:
        lse.fill_(signature_of(problem.spec).lse_of_nothing)
    else:
        rows = sinks.rows_without_keys(problem)
        lse.copy_(logits_of(problem.sink, sink.dims, rows, lse.dtype))


def empty_like_q(q: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor [batch, heads_q, seq_q, dim] with the axis order of q in memory."""
    batch, heads, seq, _ = q.shape
    if q.stride(1) < q.stride(2) and q.stride(1) != 0:
        strides = seq * heads * dim, dim, heads * dim, 1
        return torch.empty_strided((batch, heads, seq, dim), strides, dtype=dtype)
    return torch.empty(batch, heads, seq, dim, dtype=dtype)


def _at_once(part: ChunkScores, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: Tensor) -> None:
    """Writes the results of a chunk of few scores, in float64 and without tiles.

    The time of such a chunk is that of its operations in torch, and these are fewer.
    """
    chunk = part.chunk
    q, k, v = (
        chunk.query_matrices(q).double(),
        chunk.key_matrices(k).double(),
        chunk.key_matrices(v).double(),
    )
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(part.problem.scale)
    if part.removed is not None:
        scores.masked_fill_(part.removed, -math.inf)
    sums = scores.logsumexp(-1, keepdim=True)
    rows[..., 0].copy_(sums.view(rows.shape[:3]))
    if part.problem.spec.returns_maxima:
        rows[..., 1].copy_(scores.amax(-1).view(rows.shape[:3]))
    # A row without keys has LSE -inf, which cannot be subtracted, and weights 0.
    p = scores.sub_(sums.clamp_min_(_LOWEST)).exp_()
    out.copy_(torch.bmm(p, v).view(out.shape))


_LOWEST = torch.finfo(torch.float64).min


def _chunk(
    scores: ChunkScores,
    works: Sequence[Workspace],
    threads: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rows: Tensor,
) -> None:
    """Writes the results of one chunk; ``threads`` share its tiles, with a workspace each."""
    problem, chunk = scores.problem, scores.chunk
    q, k, v, power_of_2 = alone(threads, lambda: _operands(scores, q, k, v))
    o = chunk.result_for(out, q.shape[1], problem.real)
    statistics = chunk.result_for(rows, q.shape[1], problem.real)
    group = problem.sizes.group
    tiles = [*problem.queries.tiles()][::-1]  # the last tiles of causal masks take longest

    def compute(thread: int, item: int) -> None:
        start, stop = tiles[item]
        grouped = slice(start * group, stop * group)
        operands, results = (q[:, grouped], k, v), (o[:, grouped], statistics[:, grouped])
        tile = _query_tile if problem.spec.is_softmax else _weighted_tile
        tile(scores, works[thread], slice(start, stop), operands, power_of_2, results)

    share(threads, len(tiles), compute)
    alone(threads, lambda: chunk.to_queries(out, o))
    chunk.to_queries(rows, statistics)


def _operands(
    scores: ChunkScores, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """q, k and v of one chunk in the dtypes of its products, and `Products.power_of_2`."""
    problem, chunk = scores.problem, scores.chunk
    q, k, v = chunk.query_matrices(q), chunk.key_matrices(k), chunk.key_matrices(v).to(problem.real)
    dtype, power_of_2 = problem.products(q, k)
    return q.to(dtype), k.to(dtype), v, power_of_2


def _query_tile(
    part: ChunkScores,
    work: Workspace,
    rows: slice,
    operands: tuple[Tensor, Tensor, Tensor],
    power_of_2: bool,
    results: tuple[Tensor, Tensor],
) -> None:
    """Writes O, LSE and the largest scores of the query positions ``rows``.

    Args:
        operands: q of these positions, [pairs, rows * group, head_dim]; k and v, [pairs, seq_k, x].
        power_of_2: as in `Products`.
        results: rows of O, and of LSE with the largest scores beside it.
    """
    problem, (q, k, v), (out, statistics) = part.problem, operands, results
    lse, largest = statistics[..., :1], statistics[..., 1:]
    lowest = torch.finfo(problem.real).min
    o = work.matrix("o", *out.shape)
    row_max = row_sum = None
    for keys, p, scores, bits in _tiles(part, work, rows, (q, k), power_of_2):
        tile_max = scores.amax(-1, keepdim=True)
        new_max = tile_max if row_max is None else torch.maximum(row_max, tile_max)
        # Before the first key of a row its maximum is -inf, which cannot be subtracted.
        shift = new_max.clamp_min(lowest)
        exp_(torch.sub(scores, shift, out=p), power_of_2)
        if not power_of_2:  # exponentials of -inf were replaced
            part.select(p, bits)
        tile_sum = p.sum(-1, keepdim=True)

        part.select(p, part.dropout_bits(rows, keys))
        if problem.narrow is not None:
            p.copy_(p.to(problem.narrow))
        if row_max is None or row_sum is None:
            row_sum = tile_sum
            torch.baddbmm(o, p, v[:, keys], beta=0, out=o)
        else:
            rescale = exp_(row_max.sub_(shift), power_of_2)
            row_sum.mul_(rescale).add_(tile_sum)
            o.mul_(rescale).baddbmm_(p, v[:, keys])
        row_max = new_max

    alone = sinks.logits(part, rows)  # LSE of a row without keys
    if row_max is None or row_sum is None:
        out.zero_()
        lse.copy_(alone)
        largest.fill_(-math.inf)
        return
    if problem.spec.returns_maxima:
        torch.div(row_max, LOG2_E if power_of_2 else 1.0, out=largest)
    empty = row_max == -math.inf
    row_max.clamp_min_(lowest)
    if problem.sink is not None:
        row_max = sinks.join(alone, row_max, row_sum.masked_fill_(empty, 0), o)
    if power_of_2:
        torch.add(row_max, row_sum.log2(), out=lse).div_(LOG2_E)
    else:
        torch.add(row_max, row_sum.log(), out=lse)
    torch.where(empty, alone, lse, out=lse)
    if problem.dropout_scale is not None:
        row_sum.div_(problem.dropout_scale)
    torch.div(o, row_sum.masked_fill_(empty, math.inf), out=out)


def _weighted_tile(
    part: ChunkScores,
    work: Workspace,
    rows: slice,
    operands: tuple[Tensor, Tensor, Tensor],
    power_of_2: bool,
    results: tuple[Tensor, Tensor],
) -> None:
    """`_query_tile` with weights that are no exponentials: plain sums, in one unit.

    Args:
        results: rows of O, and of the sums of the weights, or of their maxima.
    """
    problem, (q, k, v), (out, sums) = part.problem, operands, results
    o = work.matrix("o", *out.shape).zero_()
    sums.fill_(-math.inf if problem.spec.takes_maxima else 0.0)
    for keys, p, weights, _ in _tiles(part, work, rows, (q, k), power_of_2):
        if weights is not p:
            p.copy_(weights)
        if problem.spec.rounds_sums and problem.narrow is not None:
            p.copy_(p.to(problem.narrow))
        if problem.spec.takes_maxima:
            torch.maximum(sums, p.amax(-1, keepdim=True), out=sums)
        elif problem.spec.sums_weights:
            sums.add_(p.sum(-1, keepdim=True))
        part.select(p, part.dropout_bits(rows, keys))
        if problem.narrow is not None:
            p.copy_(p.to(problem.narrow))
        o.baddbmm_(p, v[:, keys])
    if problem.dropout_scale is not None:
        o.mul_(problem.dropout_scale)
    if problem.spec.normalizer == "sum" and not problem.spec.partial:
        o.div_(sums.masked_fill(sums == 0, math.inf))
    out.copy_(o)


def _tiles(
    part: ChunkScores,
    work: Workspace,
    rows: slice,
    operands: tuple[Tensor, Tensor],
    power_of_2: bool,
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
    """For each tile of keys that the rows reach: its keys, a matrix for P, s' or the weights, which
    may lie in that matrix, and the bits of the mask; None where it keeps all scores.

    Where a bit is 0, s' is -inf, and a weight is 0, or -inf where maxima are taken.
    """
    q, k = operands
    for run in part.runs(rows.start, rows.stop):
        keys = slice(run.start, run.stop)
        p = work.matrix("p", q.shape[0], q.shape[1], run.stop - run.start)
        bits = None if run.full else part.mask_bits(rows, keys)
        yield keys, p, _scores(part, work, p, rows, keys, (q, k[:, keys], power_of_2), bits), bits


def _scores(
    part: ChunkScores,
    work: Workspace,
    p: Tensor,
    rows: slice,
    keys: slice,
    operands: tuple[Tensor, Tensor, bool],
    bits: Tensor | None,
) -> Tensor:
    """s' of a tile, or its weights; ``p`` itself, or the score function's result."""
    problem = part.problem
    scores = p
    if not problem.programs.ignores_score:
        problem.multiply(work, p, *operands)
    if problem.programs.score is not None:
        scores = part.score(part.grouped(p), rows, keys)
    if bits is None:
        return scores if scores is p else scores.reshape(p.shape)
    modified = part.grouped(p) if scores is p else scores
    selected = part.grouped(p).view(problem.bits)
    torch.bitwise_and(modified.view(problem.bits), bits, out=selected)
    if problem.spec.is_softmax or problem.spec.takes_maxima:
        selected.bitwise_or_(part.minus_infinity_where_not(bits))
    return p
