"""Gradients of learned tensors, without symbolic derivatives.

An element that the score reads is a variable like the score itself: torch's forward mode gives
ds'/d(element) at every position, and where two branches have different slopes it selects the slope
of the selected value (see `OracleProblem`). Masked positions are then removed, so that an infinite
slope there is not multiplied by 0. autograd propagates the rest through the reading of the tensor,
which is linear: each position adds to the element that it read.
"""

from __future__ import annotations

import torch

from flashgen.language import SCORE, Element, TensorSymbol, elements_of
from flashgen.reference.interpret import evaluate
from flashgen.reference.problem import OracleProblem, ScoreBlock

Tensor = torch.Tensor


def learned_of(problem: OracleProblem) -> dict[TensorSymbol, Tensor]:
    """The learned tensors by symbol, in the order of spec.tensors."""
    return {x.symbol: problem.values[x.symbol] for x in problem.spec.tensors if x.grad}


def flows_to_captures(
    problem: OracleProblem, part: ScoreBlock, scores: Tensor, ds: Tensor, dead: Tensor
) -> tuple[Tensor, ...]:
    """The contribution of each position to each element of a learned tensor that the score reads.

    Args:
        scores: s, before the score function.
        ds: gradient of s', before the factor ds'/ds; both [n, rows, seq_k].
        dead: bool of the same shape, true where s' is -inf, by the mask or the score function.

    Returns:
        A tensor [n, rows, seq_k] in `problem.real` for each of `_elements`.
    """
    slopes = (problem.slope_by(element, scores, part) for element in _elements(problem))
    return tuple((ds.to(problem.real) * slope).masked_fill(dead, 0) for slope in slopes)


def added_to_captures(
    problem: OracleProblem, part: ScoreBlock, scores: Tensor, flows: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The sums of one block's ``flows`` by element: gradients in the tensors' shapes, in `real`."""
    real = problem.real
    leaves = {
        symbol: tensor.detach().to(real, copy=True).requires_grad_()
        for symbol, tensor in learned_of(problem).items()
    }
    if not flows:
        return tuple(torch.zeros_like(leaf) for leaf in leaves.values())
    values = {**part.values, SCORE: scores.to(real), **leaves}
    with torch.enable_grad():
        read = [evaluate(element, values, real) for element in _elements(problem)]
    given = [flow.sum_to_size(x.shape) for flow, x in zip(flows, read, strict=True)]
    found = torch.autograd.grad(read, list(leaves.values()), given, allow_unused=True)
    return tuple(
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves.values(), found, strict=True)
    )


def with_sink(
    problem: OracleProblem, part: ScoreBlock, added: tuple[Tensor, ...], of_sink: Tensor
) -> tuple[Tensor, ...]:
    """``added`` with the contributions of one block's rows to the gradient of the sink.

    Args:
        added: a gradient for each learned tensor, including a learned sink, in `problem.real`.
        of_sink: the rows' contributions to the gradient of the sink, [n, rows, 1].
    """
    sink = problem.spec.sink
    total = dict(zip(learned_of(problem), added, strict=True))
    if sink.symbol in total:
        whole = total[sink.symbol]
        places = torch.zeros_like(part.h) if whole.numel() == 1 else part.h
        shares = of_sink.sum((1, 2)).to(whole.dtype)
        given = whole.new_zeros(whole.numel()).index_add_(0, places, shares)
        total[sink.symbol] = whole + given.view(whole.shape)
    return tuple(total.values())


def _elements(problem: OracleProblem) -> list[Element]:
    learned = learned_of(problem)
    return [e for e in elements_of(problem.spec.score) if e.tensor in learned]
