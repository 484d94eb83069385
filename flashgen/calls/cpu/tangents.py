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
        tangents: the tangents of the operands; ``captured`` for the learned tensors, in the order
            of spec.tensors.

    Returns:
        The tangents of out and of lse, float32, or float64 for float64 operands. A row without a
        kept key has 0, and the tangent of the sink. With other weights than those of the softmax,
        the second one is the tangent of the sum of a row's weights, or 0 where nothing is divided
        by this sum.
    """
    out_tangent = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=real_of(q))
    lse_tangent = q.new_zeros(q.shape[:3], dtype=out_tangent.dtype)
    moving_tensors = MovingTensors.from_tangents(spec, tangents)
    for sequence, problem, chunks in moving_tensors.parts(q, k, arguments, backward=False):
        out_tangent_rows, lse_tangent_rows = sequence.query_rows(out_tangent, lse_tangent)
        q_rows, out_rows, lse_rows = sequence.query_rows(q, *results)
        k_rows, v_rows = sequence.key_rows(k, v)
        (q_tangent,) = sequence.query_rows(tangents.q) if tangents.q is not None else (None,)
        k_tangent, v_tangent = (
            None if x is None else sequence.key_rows(x)[0] for x in (tangents.k, tangents.v)
        )
        if problem.is_empty:
            sink = moving_tensors.sink_tangent(problem)
            if sink is not None and spec.sink is not None:
                sink_rows = sinks.rows_without_keys(problem)
                lse_tangent_rows.copy_(
                    logits_of(sink, spec.sink.dims, sink_rows, lse_tangent_rows.dtype)
                )
            continue
        for part in chunks:
            operands = TangentOperands.from_chunk(
                part, (q_rows, k_rows, v_rows), (q_tangent, k_tangent, v_tangent)
            )
            chunk, real = part.chunk, problem.real
            row_results = (
                chunk.query_matrices(out_rows).to(real),
                chunk.query_matrices(lse_rows[..., None]).to(real),
            )
            o, mu = _chunk(part, moving_tensors, operands, *row_results)
            chunk.to_queries(out_tangent_rows, o)
            chunk.to_queries(lse_tangent_rows[..., None], mu)
    return out_tangent, lse_tangent


@dataclass(frozen=True, eq=False)
class MovingTensors:
    """The tangents of learned tensors in a call, with the programs that read them.

    Attributes:
        score: whether q or k has a tangent.
        tensors: the tangents of learned tensors, by the name of the tensor.
    """

    spec: AttentionSpec
    score: bool
    tensors: Mapping[str, Tensor]

    @staticmethod
    def from_tangents(spec: AttentionSpec, tangents: Tangents) -> MovingTensors:
        learned = [tensor.name for tensor in spec.tensors if tensor.grad]
        captured = tangents.captured or (None,) * len(learned)
        pairs = zip(learned, captured, strict=True)
        captured_tangents = {name: x.detach() for name, x in pairs if x is not None}
        return MovingTensors(
            spec, tangents.q is not None or tangents.k is not None, captured_tangents
        )

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

    def sink_tangent(self, problem: SequenceProblem) -> Tensor | None:
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
    analysis = analysis_of(spec, score, names)
    identity = analysis.score == SCORE and spec.is_softmax and not names
    return None if identity else compiled((analysis.score, analysis.tangent), real)


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
    def from_chunk(
        part: ChunkScores,
        operands: tuple[Tensor, Tensor, Tensor],
        tangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> TangentOperands:
        chunk, real = part.chunk, part.problem.real
        q, k = chunk.query_matrices(operands[0]), chunk.key_matrices(operands[1])
        dtype = part.problem.products(q, k).dtype
        exact = q.to(dtype), k.to(dtype)
        dq, dk, dv = tangents
        return TangentOperands(
            q.to(real),
            k.to(real),
            chunk.key_matrices(operands[2]).to(real),
            exact,
            wide_query_matrices(chunk, dq, real),
            None if dk is None else chunk.key_matrices(dk).to(real),
            None if dv is None else chunk.key_matrices(dv).to(real),
        )

    def scores(self, rows: slice, keys: slice, scale: float) -> tuple[Tensor, Tensor | None]:
        """s and s' of a tile, [pairs, rows * group, keys]."""
        q, k = self.exact
        s = (q[:, rows] @ k[:, keys].mT).mul_(scale).to(self.q.dtype)
        s_tangent = None
        if self.dq is not None:
            s_tangent = self.dq[:, rows] @ self.k[:, keys].mT
        if self.dk is not None:
            k_part = self.q[:, rows] @ self.dk[:, keys].mT
            s_tangent = k_part if s_tangent is None else s_tangent.add_(k_part)
        return s, None if s_tangent is None else s_tangent.mul_(scale)


def wide_query_matrices(chunk: Chunk, tensor: Tensor | None, real: torch.dtype) -> Tensor | None:
    return None if tensor is None else chunk.query_matrices(tensor).to(real)


def finite_bits(part: ChunkScores, scores: Tensor, bits: Tensor | None) -> Tensor | None:
    """``bits``, with 0 also where the score function returns -inf, [pairs, rows, group, keys]."""
    if part.problem.programs.score is None or not part.problem.spec.is_softmax:
        return bits
    finite = (part.grouped(scores) != -math.inf).to(part.problem.bits).neg_()
    return finite if bits is None else finite.bitwise_and_(bits)


def _chunk(
    part: ChunkScores,
    moving_tensors: MovingTensors,
    operands: TangentOperands,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """The tangents of O and of LSE of one chunk, [pairs, seq_q * group, x].

    Args:
        out, lse: the results of the chunk, of the same shape; with weights that are not those of a
            softmax, lse is their sum.
    """
    problem = part.problem
    group, spec = problem.sizes.group, problem.spec
    program = _program(spec, moving_tensors.score, moving_tensors.names, problem.real)
    out_tangent, lse_tangent = torch.empty_like(out), torch.empty_like(lse)
    tile = _query_tile if spec.is_softmax else _weighted_tile
    for start, stop in problem.queries.tiles():
        grouped = slice(start * group, stop * group)
        row_results = out[:, grouped], lse[:, grouped]
        out_tangent[:, grouped], lse_tangent[:, grouped] = tile(
            part, moving_tensors, program, operands, slice(start, stop), row_results
        )
    return out_tangent, lse_tangent


def _tangents_of_tile(
    part: ChunkScores,
    program: Program | None,
    operands: TangentOperands,
    rows: slice,
    keys: slice,
) -> tuple[Tensor, Tensor | None]:
    """t and t' of a tile, [pairs, rows * group, keys]; None for a t' of 0."""
    group = part.problem.sizes.group
    grouped = slice(rows.start * group, rows.stop * group)
    s, s_tangent = operands.scores(grouped, keys, part.problem.scale)
    return (s, s_tangent) if program is None else part.pushed(program, rows, keys, s, s_tangent)[:2]


def _query_tile(
    part: ChunkScores,
    moving_tensors: MovingTensors,
    program: Program | None,
    operands: TangentOperands,
    rows: slice,
    row_results: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """The tangents of O and of LSE of the query positions ``rows``.

    Args:
        row_results: rows of O and of LSE.
    """
    problem, (out, lse) = part.problem, row_results
    top = lse.masked_fill(lse == -math.inf, math.inf)
    x, n, r = torch.zeros_like(out), torch.zeros_like(lse), torch.zeros_like(lse)
    has_reference = torch.zeros_like(lse, dtype=torch.bool)  # rows that have a reference
    for run in part.runs(rows.start, rows.stop):
        keys = slice(run.start, run.stop)
        bits = None if run.full else part.mask_bits(rows, keys)
        t, t_tangent = _tangents_of_tile(part, program, operands, rows, keys)
        bits = finite_bits(part, t, bits)
        p = exp_(t - top)
        part.select(p, bits)
        keep_bits = part.dropout_bits(rows, keys)
        if t_tangent is not None:
            part.select(t_tangent, bits)
            total = p.sum(-1, keepdim=True)
            mean = (p * t_tangent).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1)
            r = torch.where(has_reference, r, mean)
            has_reference = has_reference | (total > 0)
            y = p * (t_tangent - r)
            n = n + y.sum(-1, keepdim=True)
            part.select(y, keep_bits)
            x = x + y @ operands.v[:, keys]
        if operands.dv is not None:
            part.select(p, keep_bits)
            x = x + p @ operands.dv[:, keys]
    if problem.dropout_scale is not None:
        x = x * problem.dropout_scale
    sink = sinks.weights(part, rows, top)
    if sink is not None:
        sink_tangent = moving_tensors.sink_tangent(problem)
        logit_tangents = 0.0 if sink_tangent is None else sinks.logits(part, rows, sink_tangent)
        n = n + sink * torch.where(sink == 0, torch.zeros_like(r), logit_tangents - r)
    return x - n * out, n + r


def _weighted_tile(
    part: ChunkScores,
    moving_tensors: MovingTensors,
    program: Program | None,
    operands: TangentOperands,
    rows: slice,
    row_results: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """`_query_tile` with weights that are no exponentials."""
    problem, divided = part.problem, part.problem.spec.sums_weights
    x, u, sums, sum_tangents = (torch.zeros_like(row_results[i]) for i in (0, 0, 1, 1))
    for run in part.runs(rows.start, rows.stop):
        keys = slice(run.start, run.stop)
        bits = None if run.full else part.mask_bits(rows, keys)
        w, w_tangent = _tangents_of_tile(part, program, operands, rows, keys)
        keep_bits = part.dropout_bits(rows, keys)
        if w_tangent is not None:
            part.select(w_tangent, bits)
            sum_tangents = sum_tangents + w_tangent.sum(-1, keepdim=True)
            part.select(w_tangent, keep_bits)
            x = x + w_tangent @ operands.v[:, keys]
        if operands.dv is not None or divided:
            part.select(w, bits)
            sums = sums + w.sum(-1, keepdim=True)
            part.select(w, keep_bits)
        if operands.dv is not None:
            x = x + w @ operands.dv[:, keys]
        if divided:  # W' O may cancel most of the sum, beyond the digits of a rounded O or W
            u = u + w @ operands.v[:, keys]
    if problem.dropout_scale is not None:
        x, u = x * problem.dropout_scale, u * problem.dropout_scale
    if not divided:
        return x, sum_tangents.zero_()
    share = shares_of(sums)
    return share * (x - sum_tangents * (share * u)), sum_tangents


def shares_of(sums: Tensor) -> Tensor:
    """The factors that make shares of weights with these sums; 0 where they sum to 0."""
    return (1 / sums).masked_fill(sums == 0, 0)
