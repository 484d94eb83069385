"""Statistics beside the output, from the whole matrix of scores: by float64 or by the dtype."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from flashgen.reference.interpret import evaluate
from flashgen.reference.oracle import kept_sums
from flashgen.reference.problem import OracleArguments, OracleProblem, ScoreBlock, problem_of
from flashgen.shared.aux_results import AuxRequest
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import SCORE, WEIGHT

if TYPE_CHECKING:
    from typing import Unpack

Tensor = torch.Tensor


def statistics(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    request: AuxRequest,
    *,
    exact: bool = True,
    from_rounded: bool = False,
    **call: Unpack[OracleArguments],
) -> dict[str, Tensor]:
    """The statistics of a call by their names in `AuxRequest`, and those that the spec names.

    Args:
        spec: without a paged cache.
        q, k: as for `flashgen.reference.attention`.
        request: the statistics to compute; the log-sum-exp is not computed.
        exact: whether everything is computed in float64, or in the operands' dtype.
        from_rounded: whether the weights start from the row's normaliser as a call returns it,
            rounded to float32; everything else is exact.
        call: the other arguments of the call. Dropout does not change statistics.
    """
    problem = problem_of(spec, q, k, k, exact=exact, **call)
    batch, heads, seq_q, _ = q.shape
    seq_k = k.shape[2]
    spec_statistics = dict(spec.statistics)
    takes = {name: (statistic.over, statistic.takes) for name, statistic in spec_statistics.items()}
    takes |= {"max_scores": ("keys", "max"), "entropy": ("keys", "sum")}
    takes["key_mass"] = ("queries", "sum")
    names = [
        *spec_statistics,
        *(name for name in ("max_scores", "entropy", "key_mass") if getattr(request, name)),
    ]
    totals = {
        name: torch.full(
            (batch * heads, seq_q if takes[name][0] == "keys" else seq_k),
            -math.inf if takes[name][1] == "max" else 0.0,
            dtype=problem.real,
        )
        for name in names
    }
    block = request.block_mass
    if block:
        shape = batch * heads, seq_q, -(-seq_k // block)
        totals["block_mass"] = torch.zeros(shape, dtype=problem.real)
    for part in problem.blocks():
        scores, weights, live = _scores_and_weights(problem, part, from_rounded)
        values = {
            "max_scores": scores,
            "entropy": torch.special.entr(weights),
            "key_mass": weights,
        }
        symbol_values = {
            **part.values,
            SCORE: scores.to(problem.real),
            WEIGHT: weights.to(problem.real),
        }
        for name in names:
            over, kind = takes[name]
            if name in spec_statistics:
                value = evaluate(spec_statistics[name].expr, symbol_values, problem.real).to(
                    scores.dtype
                )
            else:
                value = values[name]
            value = value.expand_as(live)
            if not value.shape[2]:
                continue
            if kind == "max":
                largest = value.masked_fill(~live, -math.inf).amax(-1)
                totals[name][part.pairs, part.rows] = largest.to(problem.real)
                continue
            value = value.masked_fill(~live, 0)
            if over == "keys":
                totals[name][part.pairs, part.rows] = value.sum(-1).to(problem.real)
            else:
                totals[name][part.pairs, part.keys] += value.sum(-2).to(problem.real)
        if block:
            padding = -weights.shape[2] % block
            padded = torch.nn.functional.pad(weights, (0, padding))
            mass = padded.view(*padded.shape[:2], -1, block).sum(-1)
            totals["block_mass"][part.pairs, part.rows, : mass.shape[2]] = mass.to(problem.real)
    return {name: total.view(batch, heads, *total.shape[1:]) for name, total in totals.items()}


def _scores_and_weights(
    problem: OracleProblem, part: ScoreBlock, from_rounded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The modified scores, the weights before dropout, and which of them are kept.

    Args:
        from_rounded: whether the normaliser of each row is rounded to float32, and is that of
            `kept_sums`.
    """
    spec = problem.spec
    products = (part.q @ part.k.transpose(1, 2)) * problem.factor
    symbol_values = {**part.values, SCORE: products.to(problem.real)}
    scores = evaluate(spec.modified, symbol_values, problem.real, problem.decides)
    scores = scores.to(products.dtype).expand_as(products)
    live = scores != -math.inf
    if part.mask is not None:
        live = live & part.mask
    if spec.is_softmax:
        masked = scores.masked_fill(~live, -math.inf)
        if part.sink is not None:
            sink = part.sink.expand(*scores.shape[:2], 1)
            masked = torch.cat([masked, sink.to(masked.dtype)], -1)
        empty = (masked == -math.inf).all(-1, keepdim=True)
        masked = masked.masked_fill(empty, 0)
        if from_rounded:
            lse = torch.logsumexp(masked, -1, keepdim=True).float()
            weights = (masked - lse).exp()[..., : scores.shape[2]]
        else:
            weights = torch.softmax(masked, -1)[..., : scores.shape[2]]
        return scores, weights.masked_fill(~live, 0), live
    weights = problem.masked(problem.score(products, part), part)
    if spec.normalizer == "sum":
        total = kept_sums(problem, weights) if from_rounded else weights.sum(-1, keepdim=True)
        weights = (weights / total.masked_fill(total == 0, 1)).masked_fill(total == 0, 0)
    return scores, weights, live
