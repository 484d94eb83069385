"""The backward pass over tiles, with the algorithm of the kernels.

Algorithm 4 of FlashAttention (Dao et al., 2022): a tile of keys walks the query tiles that reach
it, recomputes P from LSE, and accumulates dK and dV; dQ is accumulated in memory. Only O, LSE and
the seed and offset of dropout are kept from the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.calls.cpu import sinks
from flashgen.calls.cpu.chunks import Workspace
from flashgen.calls.cpu.elements import add_at
from flashgen.calls.cpu.parts import ChunkScores, Modified, SequenceParts, parts_of
from flashgen.calls.cpu.problem import LOG2_E, SequenceProblem, TileArguments, exp_, real_of
from flashgen.calls.cpu.threads import alone, share, threads_of
from flashgen.shared.call import OutputGradients
from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor
_Three = tuple[Tensor, Tensor, Tensor]

MOST_SUMS = 1 << 24
"""Elements of the sums of learned tensors of all threads together: 64 MiB in float32."""


@torch.no_grad()
def backward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    outputs: OutputGradients,
    arguments: TileArguments,
    parts: Iterable[SequenceParts] = (),
) -> tuple[Tensor, ...]:
    """Computes the gradients tile by tile, in memory linear in N.

    Args:
        q, k, v, arguments, parts: as in `forward`; the default blocks are those of the backward
            plan.
        outputs: out and lse of `forward`, and their gradients, with any strides.

    Returns:
        dq, dk, dv in the shapes and dtypes of q, k and v. A fully masked row has dq exactly 0 and
        adds exactly 0 to dk and dv. Then the gradient of each learned tensor, in the order of
        spec.tensors and in the tensor's shape and dtype, to which masked positions add exactly 0.

    Accumulators are float32, P and dS are rounded to a 16-bit operand dtype before their products;
    for float64 operands everything is float64. The order of summation is fixed, so that equal
    arguments give equal bits.
    """
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if spec.packed:
        _zero(*gradients)
    dtype = real_of(q)
    tensors, (out, lse, dout, dlse) = arguments.tensors, outputs
    learned = [tensors[tensor.name].detach() for tensor in spec.tensors if tensor.grad]
    elements = sum(x.numel() for x in learned)
    threads = threads_of(math.prod(q.shape[:3]) * k.shape[2])
    threads = min(threads, max(1, MOST_SUMS // max(1, elements)))
    works = [Workspace(dtype) for _ in range(threads)]
    # Each thread has sums of its own, which are added up in order.
    sums = [[torch.zeros(x.numel(), dtype=dtype) for x in learned] for _ in works]
    waiting: dict[int, tuple[ChunkScores, tuple[Any, ...], _Three, int | None]] = {}
    for sequence, problem, chunks in parts or parts_of(spec, q, k, arguments, backward=True):
        q_rows, out_rows, lse_rows, dout_rows, dq = sequence.query_rows(
            q, out, lse, dout, gradients[0]
        )
        k_rows, v_rows, dk, dv = sequence.key_rows(k, v, *gradients[1:])
        dlse_rows = None if dlse is None else sequence.query_rows(dlse)[0]
        sink_index = problem.learned_sink
        if problem.is_empty:
            _zero(dq, dk, dv)
            if sink_index is not None and dlse_rows is not None:
                sinks.add_gradient_without_keys(sums[0][sink_index], problem, dlse_rows)
            continue
        output_rows = OutputGradients(out_rows, lse_rows, dout_rows, dlse_rows)
        for chunk in chunks:
            sequence_operands = q_rows, k_rows, v_rows, output_rows
            waiting[len(waiting)] = chunk, sequence_operands, (dq, dk, dv), sink_index
    chunk_threads, tile_threads = (threads, 1) if len(waiting) >= threads else (1, threads)

    def compute(thread: int, item: int) -> None:
        chunk, sequence_operands, results, sink_index = waiting.pop(item)
        operands = alone(tile_threads, lambda: _operands(chunk, *sequence_operands))
        _chunk(chunk, works[thread:], tile_threads, operands, results, sums[thread:])
        if sink_index is not None:
            sinks.add_gradient(sums[thread][sink_index], chunk, operands.lse, operands.delta)

    share(chunk_threads, len(waiting), compute, fixed=bool(learned))
    captured = [sum(thread_sums[1:], thread_sums[0]) for thread_sums in zip(*sums, strict=True)]
    whole = zip(captured, learned, strict=True)
    return *gradients, *(total.view(x.shape).to(x.dtype) for total, x in whole)


def _zero(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.zero_()


@dataclass(frozen=True)
class _ChunkOperands:
    """The operands of one chunk, in the dtype of accumulators.

    Attributes:
        q, k, v, dout: [pairs, rows, columns].
        q_exact, k_exact: q and k in the dtype of `SequenceProblem.products`.
        lse: [pairs, seq_q * group, 1].
        top: the same in the unit of scores; of weights that are no exponentials, the factor that
            makes shares of them, which is 0 where they sum to 0.
        power_of_2: the unit of scores, as in `Products`.
        delta: D - dLSE, of the shape of lse; 0 where LSE is -inf.
        some_masked: whether some row is fully masked. With a sink it is always true, because LSE
            does not show it.
        some_undefined: whether delta may have a NaN or an infinity, by which P * (dP - D) is NaN
            also where P is 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_exact: Tensor
    k_exact: Tensor
    dout: Tensor
    lse: Tensor
    top: Tensor
    power_of_2: bool
    delta: Tensor
    some_masked: bool
    some_undefined: bool


def _operands(
    part: ChunkScores, q: Tensor, k: Tensor, v: Tensor, outputs: OutputGradients
) -> _ChunkOperands:
    chunk, real = part.chunk, part.problem.real
    out, lse, dout, dlse = outputs
    lse = chunk.query_matrices(lse[..., None]).to(real)
    dout = chunk.query_matrices(dout).to(real)
    delta = (dout * chunk.query_matrices(out).to(real)).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= chunk.query_matrices(dlse[..., None]).to(real)
    masked = lse == -math.inf
    if not part.problem.spec.is_softmax:
        lse, masked, delta = _weight_factors(part.problem.spec, lse, delta)
    q, k = chunk.query_matrices(q).to(real), chunk.key_matrices(k).to(real)
    products = part.problem.products(q, k)
    return _ChunkOperands(
        q=q,
        k=k,
        q_exact=q.to(products.dtype),
        k_exact=k.to(products.dtype),
        v=chunk.key_matrices(v).to(real),
        dout=dout,
        lse=lse,
        top=lse * LOG2_E if products.power_of_2 else lse,
        power_of_2=products.power_of_2,
        delta=delta.masked_fill_(masked, 0),
        some_masked=part.problem.sink is not None or bool(masked.any()),
        some_undefined=not math.isfinite(float(delta.sum())),
    )


def _weight_factors(
    spec: AttentionSpec, sums: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The factors that make shares of weights, where their sum is 0, and delta."""
    if not spec.sums_weights:
        return torch.ones_like(sums), torch.zeros_like(sums, dtype=torch.bool), delta.zero_()
    none = sums == 0
    return (1 / sums).masked_fill_(none, 0), none, delta


def _chunk(
    part: ChunkScores,
    works: Sequence[Workspace],
    threads: int,
    operands: _ChunkOperands,
    gradients: _Three,
    sums: Sequence[list[Tensor]],
) -> None:
    """Writes the gradients of one chunk, and adds to the gradients of learned tensors.

    Args:
        works, sums: a workspace, and the sums of learned tensors, for each of ``threads``, which
            share the chunk's tiles.
    """
    chunk, real = part.chunk, part.problem.real
    dq, dk, dv = (
        chunk.result_for(whole, tensor.shape[1], real)
        for whole, tensor in zip(gradients, (operands.q, operands.k, operands.v), strict=True)
    )
    alone(threads, dq.zero_)
    parts = [dq, *(alone(threads, lambda: torch.zeros_like(dq)) for _ in range(1, threads))]
    tiles = [slice(*tile) for tile in part.problem.keys.tiles()]

    def compute(thread: int, item: int) -> None:
        keys = tiles[item]
        results = parts[thread], dk[:, keys], dv[:, keys]
        _key_tile(part, works[thread], keys, operands, results, sums[thread])

    share(threads, len(tiles), compute, fixed=True)

    def finish() -> None:
        for addend in parts[1:]:
            dq.add_(addend)
        chunk.to_queries(gradients[0], dq)
        chunk.to_keys(gradients[1], dk)
        chunk.to_keys(gradients[2], dv)

    alone(threads, finish)


def _key_tile(
    part: ChunkScores,
    work: Workspace,
    keys: slice,
    operands: _ChunkOperands,
    gradients: tuple[Tensor, Tensor, Tensor],
    captured: list[Tensor],
) -> None:
    """Writes dK and dV of the keys ``keys``; adds their contributions to dQ and ``captured``.

    Args:
        gradients: dQ of all rows, dK and dV of the tile's keys.
    """
    problem = part.problem
    dq, dk, dv = gradients
    group, scale = problem.sizes.group, problem.scale
    k, v = operands.k[:, keys], operands.v[:, keys]
    # Batched products are fast only where the result is contiguous.
    dk_sum, dv_sum = work.matrix("dk", *k.shape), work.matrix("dv", *v.shape)
    # PyTorch adds up a product for each head; the rounding of 16 bits hides the difference.
    heads = group if problem.narrow is None else 1
    beta = 0  # the first product overwrites the workspace
    for run in part.runs(keys.start, keys.stop):
        rows = slice(run.start, run.stop)
        grouped = slice(run.start * group, run.stop * group)
        q, dout = operands.q[:, grouped], operands.dout[:, grouped]
        shape = q.shape[0], q.shape[1], k.shape[1]
        p, ds = work.matrix("p", *shape), work.matrix("ds", *shape)

        bits = None if run.full else part.mask_bits(rows, keys)
        exact = operands.q_exact[:, grouped], operands.k_exact[:, keys], operands.power_of_2
        scores, slope, uses = _scores(part, work, p, rows, keys, exact)
        exponential = problem.spec.is_softmax
        masked = operands.some_masked and problem.programs.score is not None
        low = slope is not None or uses or masked
        if exponential and low:
            bits = _and_finite(problem, scores, bits)
        top = part.grouped(operands.top[:, grouped])
        if exponential:
            exp_(torch.sub(scores, top, out=part.grouped(p)), operands.power_of_2)
        else:
            torch.mul(scores, top, out=part.grouped(p))
        part.select(p, bits)
        keep_bits = part.dropout_bits(rows, keys)

        # dS' = P * (dP - D + dLSE); the slope of a weight has the weight as a factor, or none.
        dropout_scale = problem.dropout_scale or 1.0
        torch.baddbmm(ds, dout, v.transpose(1, 2), beta=0, alpha=dropout_scale, out=ds)
        part.select(ds, keep_bits)
        ds.sub_(operands.delta[:, grouped]).mul_(p if exponential else operands.top[:, grouped])
        if operands.some_undefined or not exponential:
            part.select(ds, bits)
        for number, factor, indices in uses:
            if isinstance(factor, float):
                add_at(captured[number], indices, part.grouped(ds), factor)
                continue
            tile = work.matrix("captured", *ds.shape)
            torch.mul(part.grouped(ds), factor, out=part.grouped(tile))
            part.select(tile, bits)  # the derivative may be infinite there
            add_at(captured[number], indices, part.grouped(tile), 1.0)
        # Of a score function that ignores the score, 0 * NaN is NaN, as in the kernels.
        if slope is not None:
            part.grouped(ds).mul_(slope)
            part.select(ds, bits)  # the derivative may be infinite there
        _narrow(ds, problem)
        _add_product(work, dq[:, grouped], ds, k, scale)
        _add_over_rows(work, dk_sum, ds, q, beta, scale, heads)
        part.select(p, keep_bits)
        _narrow(p, problem)
        _add_over_rows(work, dv_sum, p, dout, beta, dropout_scale, heads)
        beta = 1
    if beta == 0:
        dv_sum.zero_()
        dk_sum.zero_()
    dk.copy_(dk_sum)
    dv.copy_(dv_sum)


def _add_over_rows(
    work: Workspace,
    total: Tensor,
    a: Tensor,
    b: Tensor,
    beta: int,
    factor: float,
    heads: int,
) -> None:
    """``total = beta * total + factor * a^T b``, with a product for each of some heads.

    The rows of the heads alternate. A product may add row by row to one accumulator, whose error
    grows with the number of rows.
    """
    if heads == 1:
        total.baddbmm_(a.transpose(1, 2), b, beta=beta, alpha=factor)
        return
    if not beta:
        total.zero_()
    for head in range(heads):
        _add_apart(work, total, a[:, head::heads].transpose(1, 2), b[:, head::heads], factor)


def _add_product(work: Workspace, total: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """``total += factor * a b``."""
    if total.is_contiguous():
        total.baddbmm_(a, b, alpha=factor)
        return
    _add_apart(work, total, a, b, factor)


def _add_apart(work: Workspace, total: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """``total += factor * a b``, of which only the finished product is added to ``total``."""
    product = work.matrix("product", *total.shape)
    total.add_(torch.baddbmm(product, a, b, beta=0, alpha=factor, out=product))


def _scores(
    part: ChunkScores,
    work: Workspace,
    p: Tensor,
    rows: slice,
    keys: slice,
    operands: tuple[Tensor, Tensor, bool],
) -> Modified:
    """s' of a tile with its derivatives; s' may be stored in ``p``."""
    problem = part.problem
    # A derivative can be the scores themselves, which P must not overwrite.
    s = p if problem.programs.derivatives is None else work.matrix("s", *p.shape)
    if not problem.programs.ignores_score:
        problem.multiply(work, s, *operands)
    scores = part.grouped(s)
    if problem.programs.derivatives is not None:
        return part.modified(scores, rows, keys)
    if problem.programs.score is not None:
        scores = part.score(scores, rows, keys)
    return Modified(scores)


def _and_finite(problem: SequenceProblem, scores: Tensor, bits: Tensor | None) -> Tensor | None:
    """``bits``, with 0 also where the score function returns -inf.

    P is 0 at such a score, and the derivative may be infinite. A row of such scores alone is fully
    masked.
    """
    low = scores == -math.inf
    if not bool(low.any()):
        return bits
    finite = low.logical_not_().to(problem.bits).neg_()
    return finite if bits is None else finite.bitwise_and_(bits)


def _narrow(tile: Tensor, problem: SequenceProblem) -> None:
    """Rounds a tile to the operands' dtype in place, where that dtype is narrower."""
    if problem.narrow is not None:
        tile.copy_(tile.to(problem.narrow))
