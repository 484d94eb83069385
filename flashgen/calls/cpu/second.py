"""The tangent of the backward pass over tiles, which second derivatives are made of.

With the notation of `flashgen.calls.cpu.tangents`, E = A - D, A = Z <dO, v> and D = <dO, O> - dLSE,

    A'   = Z (<dO', v> + <dO, v'>)         D'   = <dO', O> + <dO, O'> - dLSE'
    T    = P E                             T'   = P ((t' - LSE') E + A' - D')
    dS   = f_s T                           dS'  = f_s T' + f_s' T
    dQ'  = scale sum dS' k + dS k'         dK'  = scale sum dS' q + dS q'
    dV'  = sum Z P (t' - LSE') dO + Z P dO'
    dth' = sum f_th T' + f_th' T
    dsink' = -sum P_sink ((sink' - LSE') D + D')

Of weights w with the sum W, c = 1 / W stands for P in T, and (A' - D' - mu E) with mu = W' / W for
the bracket of T'; V has c w and c (w' - mu w). Without a divisor c is 1, and D, D' and mu are 0.

A tile of keys walks the query tiles once. The tangents of O and LSE enter through D' and LSE'
alone: what they depend on is inside the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashgen.calls.cpu import sinks
from flashgen.calls.cpu.elements import add_at
from flashgen.calls.cpu.mods import compiled
from flashgen.calls.cpu.parts import ChunkScores
from flashgen.calls.cpu.problem import SequenceProblem, TileArguments, exp_, real_of
from flashgen.calls.cpu.program import Program
from flashgen.calls.cpu.tangents import (
    MovingTensors,
    TangentOperands,
    analysis_of,
    finite_bits,
    shares_of,
    wide_query_matrices,
)
from flashgen.shared.call import OutputGradients, ResultTangents, Tangents
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import SCORE

Tensor = torch.Tensor


@torch.no_grad()
def backward_tangent(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    outputs: OutputGradients,
    tangents: Tangents,
    moving: ResultTangents,
    arguments: TileArguments,
) -> tuple[Tensor, ...]:
    """Computes the tangents of all gradients tile by tile, in memory linear in N.

    Args:
        q, k, v, outputs, arguments: as in `backward`, on any device.
        tangents: the tangents of the operands, as in `tangent`.
        moving: the tangents of ``outputs``; `tangent` returns the tangents of out and lse.

    Returns:
        The tangents of dq, dk, dv and of the gradient of each learned tensor, in the order of
        spec.tensors; float32, or float64 for float64 operands. Masked positions add exactly 0.
    """
    real, moving_tensors = real_of(q), MovingTensors.from_tangents(spec, tangents)
    dq, dk, dv = (torch.zeros(x.shape, dtype=real, device=x.device) for x in (q, k, v))
    learned = [arguments.tensors[x.name].detach() for x in spec.tensors if x.grad]
    sums = [torch.zeros(x.numel(), dtype=real, device=q.device) for x in learned]
    query_tensors = (q, tangents.q, *outputs, *moving)
    key_tensors = (k, tangents.k, v, tangents.v)
    for sequence, problem, chunks in moving_tensors.parts(q, k, arguments, backward=True):
        rows: list[Any] = [None if x is None else sequence.query_rows(x)[0] for x in query_tensors]
        keys: list[Any] = [None if x is None else sequence.key_rows(x)[0] for x in key_tensors]
        (to_q,), (to_k, to_v) = sequence.query_rows(dq), sequence.key_rows(dk, dv)
        if problem.is_empty:
            sink_index, dlse = problem.learned_sink, rows[9]
            if sink_index is not None and dlse is not None:
                sinks.add_gradient_without_keys(sums[sink_index], problem, dlse)
            continue
        for part in chunks:
            chunk = part.chunk
            operands = TangentOperands.from_chunk(
                part,
                (rows[0], keys[0], keys[2]),
                (rows[1], keys[1], keys[3]),
            )
            output_rows = OutputGradients(*rows[2:6])
            chunk_rows = _Rows.from_chunk(part, output_rows, ResultTangents(*rows[6:]))
            results = _chunk(part, moving_tensors, operands, chunk_rows, sums)
            chunk.to_queries(to_q, results[0])
            chunk.to_keys(to_k, results[1])
            chunk.to_keys(to_v, results[2])
            _add_sink(part, moving_tensors, chunk_rows, sums)
    whole = zip(sums, learned, strict=True)
    return dq, dk, dv, *(total.view(x.shape) for total, x in whole)


@dataclass(frozen=True)
class _Rows:
    """The values of a chunk for each row, in `real`.

    Attributes:
        dout, dout_tangent: dO and its tangent, [pairs, seq_q * group, head_dim_v]; None for a
            tangent of 0.
        top: LSE, infinite for rows without keys; or the factor that makes shares of weights.
        mu: the tangent of LSE; or the tangent of the sum of weights, over the sum.
        delta, delta_tangent: D and its tangent.
    """

    dout: Tensor
    dout_tangent: Tensor | None
    top: Tensor
    mu: Tensor
    delta: Tensor
    delta_tangent: Tensor

    @staticmethod
    def from_chunk(part: ChunkScores, outputs: OutputGradients, moving: ResultTangents) -> _Rows:
        problem, chunk = part.problem, part.chunk
        spec, real = problem.spec, problem.real

        def rows(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return wide_query_matrices(
                chunk, tensor if tensor.dim() == 4 else tensor[..., None], real
            )

        out, lse, dout, dlse = map(rows, outputs)
        out_tangent, mu, dout_tangent, dlse_tangent = map(rows, moving)
        assert out is not None and lse is not None and dout is not None  # noqa: PT018
        mu = torch.zeros_like(lse) if mu is None else mu
        if not spec.is_softmax and not spec.sums_weights:
            none = torch.zeros_like(lse)
            return _Rows(dout, dout_tangent, torch.ones_like(lse), none, none, none)
        delta = (dout * out).sum(-1, keepdim=True)
        delta_tangent = torch.zeros_like(delta)
        if out_tangent is not None:
            delta_tangent = delta_tangent + (dout * out_tangent).sum(-1, keepdim=True)
        if dout_tangent is not None:
            delta_tangent = delta_tangent + (dout_tangent * out).sum(-1, keepdim=True)
        if not spec.is_softmax:
            top, none = shares_of(lse), lse == 0
            mu = mu * top
        else:
            none = lse == -math.inf
            top = lse.masked_fill(none, math.inf)
            delta = delta if dlse is None else delta - dlse
            delta_tangent = delta_tangent if dlse_tangent is None else delta_tangent - dlse_tangent
        mu, delta, delta_tangent = (x.masked_fill(none, 0) for x in (mu, delta, delta_tangent))
        return _Rows(dout, dout_tangent, top, mu, delta, delta_tangent)


class _Use(NamedTuple):
    """An element of a learned tensor that a score depends on.

    Attributes:
        tensor: the index of the learned tensor.
        factor, tangent: f_th and its tangent, of shapes that broadcast to the shape of the scores.
        elements: the flat indices of the elements, of such a shape too.
    """

    tensor: int
    factor: Tensor
    tangent: Tensor
    elements: Tensor


class _Scores(NamedTuple):
    """The scores of a tile, [pairs, rows * group, keys], with derivatives of shapes that broadcast
    to [pairs, rows, group, keys]; None for a slope of 1 and for tangents of 0."""

    value: Tensor
    tangent: Tensor | None
    slope: Tensor | None = None
    slope_tangent: Tensor | None = None
    uses: tuple[_Use, ...] = ()


@lru_cache(maxsize=256)
def _program(
    spec: AttentionSpec, score: bool, names: frozenset[str], real: torch.dtype
) -> tuple[Program, tuple[int, ...]] | None:
    """The program of t, t', f_s, f_s', each f_th with its tangent, and the flat indices of
    elements; and the index of the learned tensor of each element. None where t is the score."""
    analysis = analysis_of(spec, score, names)
    if analysis.score == SCORE and spec.is_softmax and not analysis.learned:
        return None
    symbols = [tensor.symbol for tensor in spec.tensors if tensor.grad]
    used = [learned_read for learned_read in analysis.learned if learned_read[1] != 0]
    derivatives = [x for _, *both in used for x in both]
    results = (
        analysis.score,
        analysis.tangent,
        analysis.slope,
        analysis.slope_tangent,
        *derivatives,
    )
    program = compiled(results, real, tuple(element for element, *_ in used))
    return program, tuple(symbols.index(element.tensor) for element, *_ in used)


def _scores(
    part: ChunkScores,
    moving_tensors: MovingTensors,
    operands: TangentOperands,
    rows: slice,
    keys: slice,
) -> _Scores:
    problem = part.problem
    group = problem.sizes.group
    grouped = slice(rows.start * group, rows.stop * group)
    s, s_tangent = operands.scores(grouped, keys, problem.scale)
    compiled_program = _program(
        problem.spec, moving_tensors.score, moving_tensors.names, problem.real
    )
    if compiled_program is None:
        return _Scores(s, s_tangent)
    program, numbers = compiled_program
    t, tangent, (slope, slope_tangent, *values) = part.pushed(program, rows, keys, s, s_tangent)
    pairs, indices = values[: 2 * len(numbers)], values[2 * len(numbers) :]
    uses = map(_Use, numbers, pairs[::2], pairs[1::2], indices)
    return _Scores(t, tangent, slope, slope_tangent, tuple(uses))


def _chunk(
    part: ChunkScores,
    moving_tensors: MovingTensors,
    operands: TangentOperands,
    rows: _Rows,
    sums: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The tangents of dQ, dK and dV of one chunk; adds the tangents of learned tensors to
    ``sums``."""
    problem = part.problem
    group, scale = problem.sizes.group, problem.scale
    dq, dk, dv = (torch.zeros_like(x) for x in (operands.q, operands.k, operands.v))
    for start, stop in problem.keys.tiles():
        keys = slice(start, stop)
        k = operands.k[:, keys]
        for run in part.runs(start, stop):
            grouped = slice(run.start * group, run.stop * group)
            bits = None if run.full else part.mask_bits(slice(run.start, run.stop), keys)
            tile = _tile(
                part, moving_tensors, operands, rows, slice(run.start, run.stop), keys, bits, sums
            )
            q, dout = operands.q[:, grouped], rows.dout[:, grouped]
            dq[:, grouped] += scale * (tile.ds_tangent @ k)
            dk[:, keys] += scale * (tile.ds_tangent.mT @ q)
            if tile.p_tangent is not None:
                dv[:, keys] += tile.p_tangent.mT @ dout
            if operands.dk is not None:
                dq[:, grouped] += scale * (tile.ds @ operands.dk[:, keys])
            if operands.dq is not None:
                dk[:, keys] += scale * (tile.ds.mT @ operands.dq[:, grouped])
            if rows.dout_tangent is not None:
                dv[:, keys] += tile.p.mT @ rows.dout_tangent[:, grouped]
    return dq, dk, dv


class _Tile(NamedTuple):
    """Z P and dS of a tile with their tangents, [pairs, rows * group, keys]."""

    p: Tensor
    p_tangent: Tensor | None
    ds: Tensor
    ds_tangent: Tensor


def _tile(
    part: ChunkScores,
    moving_tensors: MovingTensors,
    operands: TangentOperands,
    rows: _Rows,
    queries: slice,
    keys: slice,
    bits: Tensor | None,
    sums: list[Tensor],
) -> _Tile:
    problem = part.problem
    group, softmax = problem.sizes.group, problem.spec.is_softmax
    grouped = slice(queries.start * group, queries.stop * group)
    t, t_tangent, slope, slope_tangent, uses = _scores(
        part, moving_tensors, operands, queries, keys
    )
    bits = finite_bits(part, t, bits)
    top, mu = rows.top[:, grouped], rows.mu[:, grouped]
    keep_bits = part.dropout_bits(queries, keys)

    e = (
        _dropped(part, rows.dout[:, grouped] @ operands.v[:, keys].mT, keep_bits)
        - rows.delta[:, grouped]
    )
    e_tangent = -rows.delta_tangent[:, grouped].expand(e.shape)
    if rows.dout_tangent is not None:
        e_tangent = e_tangent + _dropped(
            part, rows.dout_tangent[:, grouped] @ operands.v[:, keys].mT, keep_bits
        )
    if operands.dv is not None:
        e_tangent = e_tangent + _dropped(
            part, rows.dout[:, grouped] @ operands.dv[:, keys].mT, keep_bits
        )
    if softmax:
        p = exp_(t - top)
        part.select(p, bits)
        p_tangent = -p * mu if t_tangent is None else p * (t_tangent - mu)
        dt, dt_tangent = p * e, p_tangent * e + p * e_tangent
    else:
        p = t * top
        p_tangent = p * -mu if t_tangent is None else top * t_tangent - p * mu
        dt, dt_tangent = top * e, top * (e_tangent - mu * e)
    for tensor in (dt, dt_tangent, p, p_tangent):
        part.select(tensor, bits)

    for number, factor, factor_tangent, element in uses:
        summands = part.grouped(dt_tangent) * factor + part.grouped(dt) * factor_tangent
        summands = summands.reshape(p.shape)
        part.select(summands, bits)  # derivatives may be infinite there
        add_at(sums[number], element, part.grouped(summands), 1.0)
    ds, ds_tangent = dt, dt_tangent
    if slope is not None and slope_tangent is not None:
        ds = (part.grouped(dt) * slope).reshape(p.shape)
        ds_tangent = (part.grouped(dt_tangent) * slope + part.grouped(dt) * slope_tangent).reshape(
            p.shape
        )
        part.select(ds, bits)
        part.select(ds_tangent, bits)
    return _Tile(_dropped(part, p, keep_bits), _dropped(part, p_tangent, keep_bits), ds, ds_tangent)


def _dropped(part: ChunkScores, tile: Tensor, keep_bits: Tensor | None) -> Tensor:
    """Z times a tile, which is overwritten."""
    if keep_bits is None or part.problem.dropout_scale is None:
        return tile
    part.select(tile, keep_bits)
    return tile.mul_(part.problem.dropout_scale)


def _add_sink(
    part: ChunkScores, moving_tensors: MovingTensors, rows: _Rows, sums: list[Tensor]
) -> None:
    """Adds a chunk's contribution to the tangent of the sink's gradient."""
    problem: SequenceProblem = part.problem
    sink_index = problem.learned_sink
    if sink_index is None:
        return
    sink_tangent, all_rows = moving_tensors.sink_tangent(problem), slice(0, problem.sizes.seq_q)
    logit_tangents = 0.0 if sink_tangent is None else sinks.logits(part, all_rows, sink_tangent)
    dlogits = (logit_tangents - rows.mu) * rows.delta + rows.delta_tangent
    sinks.add_gradient(sums[sink_index], part, rows.top, dlogits)
