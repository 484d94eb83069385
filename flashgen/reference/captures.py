"""Gradients of captured tensors, without a derivative by sympy.

An element that the score reads is a variable like the score itself: torch's forward mode gives
ds'/d(element) at every position, and where two branches have different slopes it chooses the one
whose value was chosen (see `Problem`). What is masked is then taken out, so that an infinite slope
there meets no 0; and only what is left goes backward, by autograd, through the reading of the
tensor, which is linear: each position adds to the element that it read.
"""

from __future__ import annotations

import torch

from flashgen.expr import SCORE, Element, TensorSymbol, elements_of

from .interpret import evaluate
from .problem import Part, Problem

Tensor = torch.Tensor


def learned_of(problem: Problem) -> dict[TensorSymbol, Tensor]:
    """The tensors whose gradients are wanted, by symbol, in the order of spec.tensors."""
    return {x.symbol: problem.values[x.symbol] for x in problem.spec.tensors if x.grad}


def flows_to_captures(
    problem: Problem, part: Part, scores: Tensor, ds: Tensor, dead: Tensor
) -> tuple[Tensor, ...]:
    """What each position gives to each element of a learnable tensor that the score reads.

    Args:
        scores: s, before the score function.
        ds: gradient of s', before the factor ds'/ds; both [n, rows, seq_k].
        dead: where s' is -inf, by the mask or by the score function itself.

    Returns:
        For each of `_elements`, [n, rows, seq_k] in `problem.real`.
    """
    slopes = (problem.slope_by(element, scores, part) for element in _elements(problem))
    return tuple((ds.to(problem.real) * slope).masked_fill(dead, 0) for slope in slopes)


def added_to_captures(
    problem: Problem, part: Part, scores: Tensor, flows: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """``flows`` of one part added up where they belong: whole tensors, in `problem.real`."""
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
    problem: Problem, part: Part, added: tuple[Tensor, ...], of_sink: Tensor
) -> tuple[Tensor, ...]:
    """``added`` of one part, to which each row gives its share to the gradient of the sink.

    Args:
        added: for each learnable tensor, the sink perhaps among them, in `problem.real`.
        of_sink: [n, rows, 1].
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


def _elements(problem: Problem) -> list[Element]:
    learned = learned_of(problem)
    return [e for e in elements_of(problem.spec.score) if e.tensor in learned]
