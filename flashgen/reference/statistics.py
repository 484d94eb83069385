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
    kept: bool = False,
    **call: Unpack[OracleArguments],
) -> dict[str, Tensor]:
    """The statistics of a call by their names in `AuxRequest`, and those that the spec names.

    Args:
        spec: without a paged cache.
        q, k: as for `flashgen.reference.attention`.
        request: what is computed; the log-sum-exp is not.
        exact: whether everything is computed in float64, or in the operands' dtype.
        kept: whether the weights start from a normaliser of the row that is rounded to float32, as
            that which a call has returned; everything else is exact.
        call: the other arguments of the call. Dropout does not change statistics.
    """
    problem = problem_of(spec, q, k, k, exact=exact, **call)
    batch, heads, seq_q, _ = q.shape
    seq_k = k.shape[2]
    own = dict(spec.statistics)
    takes = {name: (each.over, each.takes) for name, each in own.items()}
    takes |= {"max_scores": ("keys", "max"), "entropy": ("keys", "sum")}
    takes["key_mass"] = ("queries", "sum")
    names = [
        *own,
        *(name for name in ("max_scores", "entropy", "key_mass") if getattr(request, name)),
    ]
    found = {
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
        found["block_mass"] = torch.zeros(shape, dtype=problem.real)
    for part in problem.blocks():
        scores, weights, live = _scores_and_weights(problem, part, kept)
        values = {
            "max_scores": scores,
            "entropy": torch.special.entr(weights),
            "key_mass": weights,
        }
        at = {**part.values, SCORE: scores.to(problem.real), WEIGHT: weights.to(problem.real)}
        for name in names:
            over, kind = takes[name]
            if name in own:
                value = evaluate(own[name].expr, at, problem.real).to(scores.dtype)
            else:
                value = values[name]
            value = value.expand_as(live)
            if not value.shape[2]:
                continue
            if kind == "max":
                largest = value.masked_fill(~live, -math.inf).amax(-1)
                found[name][part.pairs, part.rows] = largest.to(problem.real)
                continue
            value = value.masked_fill(~live, 0)
            if over == "keys":
                found[name][part.pairs, part.rows] = value.sum(-1).to(problem.real)
            else:
                found[name][part.pairs, part.keys] += value.sum(-2).to(problem.real)
        if block:
            padding = -weights.shape[2] % block
            padded = torch.nn.functional.pad(weights, (0, padding))
            mass = padded.view(*padded.shape[:2], -1, block).sum(-1)
            found["block_mass"][part.pairs, part.rows, : mass.shape[2]] = mass.to(problem.real)
    return {name: each.view(batch, heads, *each.shape[1:]) for name, each in found.items()}


def _scores_and_weights(
    problem: OracleProblem, part: ScoreBlock, rounded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The modified scores, the weights before dropout, and which of them are kept.

    Args:
        rounded: whether the normaliser of each row is rounded to float32, and is that of
            `kept_sums`.
    """
    spec = problem.spec
    products = (part.q @ part.k.transpose(1, 2)) * problem.factor
    at = {**part.values, SCORE: products.to(problem.real)}
    scores = evaluate(spec.modified, at, problem.real, problem.decides)
    scores = scores.to(products.dtype).expand_as(products)
    kept = scores != -math.inf
    if part.mask is not None:
        kept = kept & part.mask
    if spec.is_softmax:
        masked = scores.masked_fill(~kept, -math.inf)
        if part.sink is not None:
            sink = part.sink.expand(*scores.shape[:2], 1)
            masked = torch.cat([masked, sink.to(masked.dtype)], -1)
        empty = (masked == -math.inf).all(-1, keepdim=True)
        masked = masked.masked_fill(empty, 0)
        if rounded:
            lse = torch.logsumexp(masked, -1, keepdim=True).float()
            weights = (masked - lse).exp()[..., : scores.shape[2]]
        else:
            weights = torch.softmax(masked, -1)[..., : scores.shape[2]]
        return scores, weights.masked_fill(~kept, 0), kept
    weights = problem.masked(problem.score(products, part), part)
    if spec.normalizer == "sum":
        total = kept_sums(problem, weights) if rounded else weights.sum(-1, keepdim=True)
        weights = (weights / total.masked_fill(total == 0, 1)).masked_fill(total == 0, 0)
    return scores, weights, kept
