"""The tangent of the forward pass over tiles: derivatives of O and LSE along given directions.

With x' the tangent of x, t = f(s) a score that the mask keeps and Z the factor of dropout,

    s' = scale (q' k + q k')      t' = f_s s' + sum of f_th th'      (`spec.analysis.tangents`)

    softmax   P = exp(t - LSE)    LSE' = sum P t' + P_sink sink'
              O' = sum Z P (t' - LSE') v + Z P v'
    weights   O' = sum Z w' v + Z w v'                               divided by nothing
              W' = sum w',  O' = (sum Z w' v + Z w v' - W' O) / W    divided by their sum W

A tile of queries walks the key tiles once, with O and LSE of the forward pass. The sums of the
softmax are made of t' - r, with r a mean of t' over the first keys of the row: where all scores of
a row move alike, sums of t' itself would cancel.

Unlike the other passes of this folder, all operations are out of place and on any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from flashgen.calls.cpu import sinks
from flashgen.calls.cpu.chunks import Chunk
from flashgen.calls.cpu.mods import compiled
from flashgen.calls.cpu.parts import ChunkScores, SequenceParts, parts_of
from flashgen.calls.cpu.problem import SequenceProblem, TileArguments, exp_, real_of
from flashgen.calls.cpu.program import Program
from flashgen.calls.sinks import logits_of
from flashgen.shared.call import Tangents
from flashgen.spec.analysis.tangents import (
    TangentAnalysis,
    analyse_tangents,
    directions_of,
    tangent_tensors,
)
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import SCORE

Tensor = torch.Tensor


@torch.no_grad()
def tangent(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor, Tensor],
    tangents: Tangents,
    arguments: TileArguments,
) -> tuple[Tensor, Tensor]:
    """Computes the tangents of the results of a forward call tile by tile, in memory linear in N.

    Args:
        q, k, v, arguments: as in `forward`, on any device.
        results: out and lse of `forward`, or of kernels.
        tangents: those of the operands; ``captured`` for spec's learned tensors, in their order.

    Returns:
        The tangents of out and of lse, float32, or float64 for float64 operands. A row without a
        kept key has 0, and the tangent of the sink. With other weights than those of the softmax,
        the second one is that of the sum of a row's weights, or 0 where nothing is divided by it.
    """
    of_out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=real_of(q))
    of_lse = q.new_zeros(q.shape[:3], dtype=of_out.dtype)
    moved = Moved.of(spec, tangents)
    for sequence, problem, chunks in moved.parts(q, k, arguments, backward=False):
        rows_out, rows_lse = sequence.of_queries(of_out, of_lse)
        own_q, out, lse = sequence.of_queries(q, *results)
        own_k, own_v = sequence.of_keys(k, v)
        (of_q,) = sequence.of_queries(tangents.q) if tangents.q is not None else (None,)
        of_k, of_v = (
            None if x is None else sequence.of_keys(x)[0] for x in (tangents.k, tangents.v)
        )
        if problem.is_empty:
            sink = moved.of_sink(problem)
            if sink is not None and spec.sink is not None:
                places = sinks.rows_without_keys(problem)
                rows_lse.copy_(logits_of(sink, spec.sink.dims, places, rows_lse.dtype))
            continue
        for part in chunks:
            operands = TangentOperands.of(part, (own_q, own_k, own_v), (of_q, of_k, of_v))
            chunk, real = part.chunk, problem.real
            own = chunk.of_queries(out).to(real), chunk.of_queries(lse[..., None]).to(real)
            o, mu = _chunk(part, moved, operands, *own)
            chunk.to_queries(rows_out, o)
            chunk.to_queries(rows_lse[..., None], mu)
    return of_out, of_lse


@dataclass(frozen=True, eq=False)
class Moved:
    """What moves in a call: the spec, with the programs of its tangents.

    Attributes:
        score: whether q or k has a tangent.
        tensors: the tangents of learned tensors that there are, by the name of the tensor.
    """

    spec: AttentionSpec
    score: bool
    tensors: Mapping[str, Tensor]

    @staticmethod
    def of(spec: AttentionSpec, tangents: Tangents) -> Moved:
        learned = [tensor.name for tensor in spec.tensors if tensor.grad]
        captured = tangents.captured or (None,) * len(learned)
        pairs = zip(learned, captured, strict=True)
        found = {name: x.detach() for name, x in pairs if x is not None}
        return Moved(spec, tangents.q is not None or tangents.k is not None, found)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def parts(
        self, q: Tensor, k: Tensor, arguments: TileArguments, *, backward: bool
    ) -> Iterator[SequenceParts]:
        """The parts of a call, which can read the tangents of tensors."""
        symbols = {name: x.symbol for name, x in tangent_tensors(self.spec).items()}
        for part in parts_of(self.spec, q, k, arguments, backward=backward):
            part.problem.tensors |= {symbols[name]: x for name, x in self.tensors.items()}
            yield part

    def of_sink(self, problem: SequenceProblem) -> Tensor | None:
        """The tangent of the sink; None without one."""
        sink = problem.spec.sink
        return None if sink is None else self.tensors.get(sink.name)


@lru_cache(maxsize=256)
def analysis_of(spec: AttentionSpec, score: bool, names: frozenset[str]) -> TangentAnalysis:
    return analyse_tangents(spec, directions_of(spec, score, names))


@lru_cache(maxsize=256)
def _program(
    spec: AttentionSpec, score: bool, names: frozenset[str], real: torch.dtype
) -> Program | None:
    """The program of t and t'; None where t is the score."""
    of = analysis_of(spec, score, names)
    identity = of.score == SCORE and spec.is_softmax and not names
    return None if identity else compiled((of.score, of.tangent), real)


@dataclass(frozen=True)
class TangentOperands:
    """q, k and v of one chunk with their tangents, [pairs, rows, columns] in `real`.

    Attributes:
        exact: q and k in the dtype of `SequenceProblem.products`.
        dq, dk, dv: the tangents; None where there is none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    exact: tuple[Tensor, Tensor]
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None

    @staticmethod
    def of(
        part: ChunkScores,
        operands: tuple[Tensor, Tensor, Tensor],
        tangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> TangentOperands:
        chunk, real = part.chunk, part.problem.real
        q, k = chunk.of_queries(operands[0]), chunk.of_keys(operands[1])
        dtype = part.problem.products(q, k).dtype
        exact = q.to(dtype), k.to(dtype)
        dq, dk, dv = tangents
        return TangentOperands(
            q.to(real),
            k.to(real),
            chunk.of_keys(operands[2]).to(real),
            exact,
            wide_of_queries(chunk, dq, real),
            None if dk is None else chunk.of_keys(dk).to(real),
            None if dv is None else chunk.of_keys(dv).to(real),
        )

    def scores(self, rows: slice, keys: slice, scale: float) -> tuple[Tensor, Tensor | None]:
        """s and s' of a tile, [pairs, rows * group, keys]."""
        q, k = self.exact
        s = (q[:, rows] @ k[:, keys].mT).mul_(scale).to(self.q.dtype)
        moved = None
        if self.dq is not None:
            moved = self.dq[:, rows] @ self.k[:, keys].mT
        if self.dk is not None:
            more = self.q[:, rows] @ self.dk[:, keys].mT
            moved = more if moved is None else moved.add_(more)
        return s, None if moved is None else moved.mul_(scale)


def wide_of_queries(chunk: Chunk, tensor: Tensor | None, real: torch.dtype) -> Tensor | None:
    return None if tensor is None else chunk.of_queries(tensor).to(real)


def finite_bits(part: ChunkScores, scores: Tensor, bits: Tensor | None) -> Tensor | None:
    """``bits``, with 0 also where the score function returns -inf, [pairs, rows, group, keys]."""
    if part.problem.programs.score is None or not part.problem.spec.is_softmax:
        return bits
    finite = (part.grouped(scores) != -math.inf).to(part.problem.bits).neg_()
    return finite if bits is None else finite.bitwise_and_(bits)


def _chunk(
    part: ChunkScores, moved: Moved, of: TangentOperands, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The tangents of O and of LSE of one chunk, [pairs, seq_q * group, x].

    Args:
        out, lse: the results of the chunk, likewise; of weights lse is their sum.
    """
    problem = part.problem
    group, spec = problem.sizes.group, problem.spec
    program = _program(spec, moved.score, moved.names, problem.real)
    of_out, of_lse = torch.empty_like(out), torch.empty_like(lse)
    tile = _query_tile if spec.is_softmax else _weighted_tile
    for start, stop in problem.queries.tiles():
        here = slice(start * group, stop * group)
        given = out[:, here], lse[:, here]
        of_out[:, here], of_lse[:, here] = tile(part, moved, program, of, slice(start, stop), given)
    return of_out, of_lse


def _tangents_of_tile(
    part: ChunkScores,
    program: Program | None,
    of: TangentOperands,
    rows: slice,
    keys: slice,
) -> tuple[Tensor, Tensor | None]:
    """t and t' of a tile, [pairs, rows * group, keys]; None for a t' of 0."""
    group = part.problem.sizes.group
    here = slice(rows.start * group, rows.stop * group)
    s, moved = of.scores(here, keys, part.problem.scale)
    return (s, moved) if program is None else part.pushed(program, rows, keys, s, moved)[:2]


def _query_tile(
    part: ChunkScores,
    moved: Moved,
    program: Program | None,
    of: TangentOperands,
    rows: slice,
    given: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """The tangents of O and of LSE of the query positions ``rows``.

    Args:
        given: rows of O and of LSE.
    """
    problem, (out, lse) = part.problem, given
    top = lse.masked_fill(lse == -math.inf, math.inf)
    x, n, r = torch.zeros_like(out), torch.zeros_like(lse), torch.zeros_like(lse)
    found = torch.zeros_like(lse, dtype=torch.bool)  # rows that have a reference
    for run in part.runs(rows.start, rows.stop):
        keys = slice(run.start, run.stop)
        bits = None if run.full else part.mask_bits(rows, keys)
        t, way = _tangents_of_tile(part, program, of, rows, keys)
        bits = finite_bits(part, t, bits)
        p = exp_(t - top)
        part.select(p, bits)
        kept = part.dropout_bits(rows, keys)
        if way is not None:
            part.select(way, bits)
            total = p.sum(-1, keepdim=True)
            mean = (p * way).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1)
            r = torch.where(found, r, mean)
            found = found | (total > 0)
            y = p * (way - r)
            n = n + y.sum(-1, keepdim=True)
            part.select(y, kept)
            x = x + y @ of.v[:, keys]
        if of.dv is not None:
            part.select(p, kept)
            x = x + p @ of.dv[:, keys]
    if problem.dropout_scale is not None:
        x = x * problem.dropout_scale
    sink = sinks.weights(part, rows, top)
    if sink is not None:
        of_sink = moved.of_sink(problem)
        share = 0.0 if of_sink is None else sinks.logits(part, rows, of_sink)
        n = n + sink * torch.where(sink == 0, torch.zeros_like(r), share - r)
    return x - n * out, n + r


def _weighted_tile(
    part: ChunkScores,
    moved: Moved,
    program: Program | None,
    of: TangentOperands,
    rows: slice,
    given: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """`_query_tile` with weights that are no exponentials."""
    problem, divided = part.problem, part.problem.spec.sums_weights
    x, u, sums, moved_sums = (torch.zeros_like(given[i]) for i in (0, 0, 1, 1))
    for run in part.runs(rows.start, rows.stop):
        keys = slice(run.start, run.stop)
        bits = None if run.full else part.mask_bits(rows, keys)
        w, way = _tangents_of_tile(part, program, of, rows, keys)
        kept = part.dropout_bits(rows, keys)
        if way is not None:
            part.select(way, bits)
            moved_sums = moved_sums + way.sum(-1, keepdim=True)
            part.select(way, kept)
            x = x + way @ of.v[:, keys]
        if of.dv is not None or divided:
            part.select(w, bits)
            sums = sums + w.sum(-1, keepdim=True)
            part.select(w, kept)
        if of.dv is not None:
            x = x + w @ of.dv[:, keys]
        if divided:  # W' O may cancel most of the sum, beyond the digits of a rounded O or W
            u = u + w @ of.v[:, keys]
    if problem.dropout_scale is not None:
        x, u = x * problem.dropout_scale, u * problem.dropout_scale
    if not divided:
        return x, moved_sums.zero_()
    share = shares_of(sums)
    return share * (x - moved_sums * (share * u)), moved_sums


def shares_of(sums: Tensor) -> Tensor:
    """The factors that make shares of weights with these sums; 0 where they sum to 0."""
    return (1 / sums).masked_fill(sums == 0, 0)
