"""How far results are from the float64 oracle, beside PyTorch's results in the operands' dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from flashgen import reference
from flashgen.call import Inputs
from flashgen.language.spec import AttentionSpec
from flashgen.ops import BackwardRun, ForwardRun
from flashgen.reference.verdict import Judged, compare, judged_gradients
from flashgen.views.values import ErrorHistogram

Tensor = torch.Tensor

MOST_SCORES = 1 << 26
"""Scores of the largest call for which the oracle is computed: it makes all of them in float64."""

_DECADES = 8
"""Bins of a histogram, one for each power of ten."""


def forward_errors(
    spec: AttentionSpec, inputs: Inputs, run: ForwardRun
) -> tuple[ErrorHistogram, ...]:
    """The histograms of out and lse."""
    of: tuple[Any, ...] = (spec, *inputs.operands)
    exact = reference.attention(*of, **inputs.options)
    same = reference.same_dtype(*of, **inputs.options)
    return tuple(
        _histogram(name, found, Judged(compare(found, right, ordinary), right, ordinary))
        for name, found, right, ordinary in zip(
            ("out", "lse"), (run.out, run.lse), exact, same, strict=True
        )
    )


def backward_errors(
    spec: AttentionSpec, inputs: Inputs, run: BackwardRun
) -> tuple[ErrorHistogram, ...]:
    """The histograms of dq, dk, dv and the gradients of learned tensors."""
    found = (run.dq, run.dk, run.dv, *run.captured)
    judged = judged_gradients(found, spec, *inputs.operands, *inputs.gradients, **inputs.options)
    return tuple(
        _histogram(name, tensor, each)
        for (name, each), tensor in zip(judged.items(), found, strict=True)
    )


def _histogram(name: str, found: Tensor, judged: Judged) -> ErrorHistogram:
    exact = judged.exact.double()
    errors, ordinary = (_errors(tensor, exact) for tensor in (found, judged.same))
    largest = max(float(each.max()) if each.numel() else 0.0 for each in (errors, ordinary))
    top = math.floor(math.log10(largest)) if largest > 0 else -1
    exponents = tuple(range(top - _DECADES + 1, top + 1))
    return ErrorHistogram(
        name=name,
        verdict=judged.verdict,
        exponents=exponents,
        found=tuple(_counts(errors, exponents)),
        ordinary=tuple(_counts(ordinary, exponents)),
    )


def _errors(tensor: Tensor, exact: Tensor) -> Tensor:
    """The absolute errors of all elements that are finite in both."""
    difference = (tensor.detach().double() - exact).abs().flatten()
    return difference[difference.isfinite()]


def _counts(errors: Tensor, exponents: tuple[int, ...]) -> Iterator[int]:
    """Elements per power of ten; the first bin has all smaller errors too."""
    bins = torch.full(errors.shape, exponents[0], dtype=torch.int64)
    positive = errors > 0
    bins[positive] = errors[positive].log10().floor().to(torch.int64)
    bins = bins.clamp(exponents[0], exponents[-1])
    for exponent in exponents:
        yield int((bins == exponent).sum())
