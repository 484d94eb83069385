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
    Moved,
    TangentOperands,
    analysis_of,
    finite_bits,
    shares_of,
    wide_of_queries,
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
        tangents: those of the operands, as in `tangent`.
        moving: the tangents of ``outputs``; those of out and lse as `tangent` returns them.

    Returns:
        The tangents of dq, dk, dv and of the gradient of each learned tensor, in the order of
        spec.tensors; float32, or float64 for float64 operands. Masked positions add exactly 0.
    """
    real, moved = real_of(q), Moved.of(spec, tangents)
    dq, dk, dv = (torch.zeros(x.shape, dtype=real, device=x.device) for x in (q, k, v))
    learned = [arguments.tensors[x.name].detach() for x in spec.tensors if x.grad]
    sums = [torch.zeros(x.numel(), dtype=real, device=q.device) for x in learned]
    of_rows = (q, tangents.q, *outputs, *moving)
    of_keys = (k, tangents.k, v, tangents.v)
    for sequence, problem, chunks in moved.parts(q, k, arguments, backward=True):
        rows: list[Any] = [None if x is None else sequence.of_queries(x)[0] for x in of_rows]
        keys: list[Any] = [None if x is None else sequence.of_keys(x)[0] for x in of_keys]
        (to_q,), (to_k, to_v) = sequence.of_queries(dq), sequence.of_keys(dk, dv)
        if problem.is_empty:
            place, dlse = problem.learned_sink, rows[9]
            if place is not None and dlse is not None:
                sinks.add_gradient_without_keys(sums[place], problem, dlse)
            continue
        for part in chunks:
            chunk = part.chunk
            operands = TangentOperands.of(
                part,
                (rows[0], keys[0], keys[2]),
                (rows[1], keys[1], keys[3]),
            )
            given = OutputGradients(*rows[2:6])
            of = _Rows.of(part, given, ResultTangents(*rows[6:]))
            results = _chunk(part, moved, operands, of, sums)
            chunk.to_queries(to_q, results[0])
            chunk.to_keys(to_k, results[1])
            chunk.to_keys(to_v, results[2])
            _add_sink(part, moved, of, sums)
    whole = zip(sums, learned, strict=True)
    return dq, dk, dv, *(total.view(x.shape) for total, x in whole)


@dataclass(frozen=True)
class _Rows:
    """What a chunk has for each row, in `real`.

    Attributes:
        do, way: dO and its tangent, [pairs, seq_q * group, head_dim_v]; None for a tangent of 0.
        top: LSE, infinite for rows without keys; of weights the factor that makes shares of them.
        mu: the tangent of LSE; of weights that of their sum, over the sum.
        delta, of_delta: D and its tangent.
    """

    do: Tensor
    way: Tensor | None
    top: Tensor
    mu: Tensor
    delta: Tensor
    of_delta: Tensor

    @staticmethod
    def of(part: ChunkScores, given: OutputGradients, moving: ResultTangents) -> _Rows:
        problem, chunk = part.problem, part.chunk
        spec, real = problem.spec, problem.real

        def rows(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return wide_of_queries(chunk, tensor if tensor.dim() == 4 else tensor[..., None], real)

        out, lse, do, dlse = map(rows, given)
        of_out, mu, way, of_dlse = map(rows, moving)
        assert out is not None and lse is not None and do is not None  # noqa: PT018
        mu = torch.zeros_like(lse) if mu is None else mu
        if not spec.is_softmax and not spec.sums_weights:
            none = torch.zeros_like(lse)
            return _Rows(do, way, torch.ones_like(lse), none, none, none)
        delta = (do * out).sum(-1, keepdim=True)
        of_delta = torch.zeros_like(delta)
        if of_out is not None:
            of_delta = of_delta + (do * of_out).sum(-1, keepdim=True)
        if way is not None:
            of_delta = of_delta + (way * out).sum(-1, keepdim=True)
        if not spec.is_softmax:
            top, none = shares_of(lse), lse == 0
            mu = mu * top
        else:
            none = lse == -math.inf
            top = lse.masked_fill(none, math.inf)
            delta = delta if dlse is None else delta - dlse
            of_delta = of_delta if of_dlse is None else of_delta - of_dlse
        mu, delta, of_delta = (x.masked_fill(none, 0) for x in (mu, delta, of_delta))
        return _Rows(do, way, top, mu, delta, of_delta)


class _Use(NamedTuple):
    """An element of a learned tensor that a score depends on.

    Attributes:
        tensor: the index of the learned tensor.
        by, way: f_th and its tangent, of shapes that broadcast to that of the scores.
        places: the flat indices of the elements, likewise.
    """

    tensor: int
    by: Tensor
    way: Tensor
    places: Tensor


class _Scores(NamedTuple):
    """The scores of a tile, [pairs, rows * group, keys], with derivatives of shapes that broadcast
    to [pairs, rows, group, keys]; None for a slope of 1 and for tangents of 0."""

    value: Tensor
    tangent: Tensor | None
    slope: Tensor | None = None
    of_slope: Tensor | None = None
    uses: tuple[_Use, ...] = ()


@lru_cache(maxsize=256)
def _program(
    spec: AttentionSpec, score: bool, names: frozenset[str], real: torch.dtype
) -> tuple[Program, tuple[int, ...]] | None:
    """The program of t, t', f_s, f_s', each f_th with its tangent, and the places of elements; and
    the index of the learned tensor of each element. None where t is the score."""
    of = analysis_of(spec, score, names)
    if of.score == SCORE and spec.is_softmax and not of.learned:
        return None
    symbols = [tensor.symbol for tensor in spec.tensors if tensor.grad]
    used = [each for each in of.learned if each[1] != 0]
    derivatives = [x for _, *both in used for x in both]
    results = (of.score, of.tangent, of.slope, of.slope_tangent, *derivatives)
    program = compiled(results, real, tuple(element for element, *_ in used))
    return program, tuple(symbols.index(element.tensor) for element, *_ in used)


def _scores(
    part: ChunkScores, moved: Moved, of: TangentOperands, rows: slice, keys: slice
) -> _Scores:
    problem = part.problem
    group = problem.sizes.group
    s, way = of.scores(slice(rows.start * group, rows.stop * group), keys, problem.scale)
    made = _program(problem.spec, moved.score, moved.names, problem.real)
    if made is None:
        return _Scores(s, way)
    program, numbers = made
    t, tangent, (slope, of_slope, *found) = part.pushed(program, rows, keys, s, way)
    pairs, places = found[: 2 * len(numbers)], found[2 * len(numbers) :]
    uses = map(_Use, numbers, pairs[::2], pairs[1::2], places)
    return _Scores(t, tangent, slope, of_slope, tuple(uses))


def _chunk(
    part: ChunkScores, moved: Moved, of: TangentOperands, rows: _Rows, sums: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The tangents of dQ, dK and dV of one chunk; adds those of learned tensors to ``sums``."""
    problem = part.problem
    group, scale = problem.sizes.group, problem.scale
    dq, dk, dv = (torch.zeros_like(x) for x in (of.q, of.k, of.v))
    for start, stop in problem.keys.tiles():
        keys = slice(start, stop)
        k = of.k[:, keys]
        for run in part.runs(start, stop):
            here = slice(run.start * group, run.stop * group)
            bits = None if run.full else part.mask_bits(slice(run.start, run.stop), keys)
            tile = _tile(part, moved, of, rows, slice(run.start, run.stop), keys, bits, sums)
            q, do = of.q[:, here], rows.do[:, here]
            dq[:, here] += scale * (tile.of_ds @ k)
            dk[:, keys] += scale * (tile.of_ds.mT @ q)
            if tile.of_p is not None:
                dv[:, keys] += tile.of_p.mT @ do
            if of.dk is not None:
                dq[:, here] += scale * (tile.ds @ of.dk[:, keys])
            if of.dq is not None:
                dk[:, keys] += scale * (tile.ds.mT @ of.dq[:, here])
            if rows.way is not None:
                dv[:, keys] += tile.p.mT @ rows.way[:, here]
    return dq, dk, dv


class _Tile(NamedTuple):
    """Z P and dS of a tile with their tangents, [pairs, rows * group, keys]."""

    p: Tensor
    of_p: Tensor | None
    ds: Tensor
    of_ds: Tensor


def _tile(
    part: ChunkScores,
    moved: Moved,
    of: TangentOperands,
    rows: _Rows,
    places: slice,
    keys: slice,
    bits: Tensor | None,
    sums: list[Tensor],
) -> _Tile:
    problem = part.problem
    group, softmax = problem.sizes.group, problem.spec.is_softmax
    here = slice(places.start * group, places.stop * group)
    t, way, slope, of_slope, uses = _scores(part, moved, of, places, keys)
    bits = finite_bits(part, t, bits)
    top, mu = rows.top[:, here], rows.mu[:, here]
    kept = part.dropout_bits(places, keys)

    e = _dropped(part, rows.do[:, here] @ of.v[:, keys].mT, kept) - rows.delta[:, here]
    of_e = -rows.of_delta[:, here].expand(e.shape)
    if rows.way is not None:
        of_e = of_e + _dropped(part, rows.way[:, here] @ of.v[:, keys].mT, kept)
    if of.dv is not None:
        of_e = of_e + _dropped(part, rows.do[:, here] @ of.dv[:, keys].mT, kept)
    if softmax:
        p = exp_(t - top)
        part.select(p, bits)
        of_p = -p * mu if way is None else p * (way - mu)
        one, of_one = p * e, of_p * e + p * of_e
    else:
        p = t * top
        of_p = p * -mu if way is None else top * way - p * mu
        one, of_one = top * e, top * (of_e - mu * e)
    for tensor in (one, of_one, p, of_p):
        part.select(tensor, bits)

    for number, by, of_by, element in uses:
        found = part.grouped(of_one) * by + part.grouped(one) * of_by
        found = found.reshape(p.shape)
        part.select(found, bits)  # derivatives may be infinite there
        add_at(sums[number], element, part.grouped(found), 1.0)
    ds, of_ds = one, of_one
    if slope is not None and of_slope is not None:
        ds = (part.grouped(one) * slope).reshape(p.shape)
        of_ds = (part.grouped(of_one) * slope + part.grouped(one) * of_slope).reshape(p.shape)
        part.select(ds, bits)
        part.select(of_ds, bits)
    return _Tile(_dropped(part, p, kept), _dropped(part, of_p, kept), ds, of_ds)


def _dropped(part: ChunkScores, tile: Tensor, kept: Tensor | None) -> Tensor:
    """Z times a tile, which is overwritten."""
    if kept is None or part.problem.dropout_scale is None:
        return tile
    part.select(tile, kept)
    return tile.mul_(part.problem.dropout_scale)


def _add_sink(part: ChunkScores, moved: Moved, rows: _Rows, sums: list[Tensor]) -> None:
    """Adds a chunk's contribution to the tangent of the sink's gradient."""
    problem: SequenceProblem = part.problem
    place = problem.learned_sink
    if place is None:
        return
    of_sink, every = moved.of_sink(problem), slice(0, problem.sizes.seq_q)
    way = 0.0 if of_sink is None else sinks.logits(part, every, of_sink)
    found = (way - rows.mu) * rows.delta + rows.of_delta
    sinks.add_gradient(sums[place], part, rows.top, found)
