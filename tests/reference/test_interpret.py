"""Expressions as torch evaluates them, against Python's own arithmetic."""

from __future__ import annotations

import math

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashgen as fg
from flashgen.reference import evaluate
from flashgen.shared.errors import SpecError
from flashgen.spec.language.symbols import SCORE, B, H, K, Q
from flashgen.spec.language.tracing import trace_mask, trace_score

POSITIONS = torch.arange(-9, 10)


def of_mask(function) -> sympy.Basic:
    return trace_mask(function).expr


def of_score(function) -> sympy.Basic:
    return trace_score(function).expr


def grid(expr: sympy.Basic, **values: torch.Tensor) -> torch.Tensor:
    """``expr`` over all pairs of positions, negative ones too."""
    inputs = {Q: POSITIONS[:, None], K: POSITIONS[None, :]}
    inputs |= {B: torch.tensor(2), H: torch.tensor(3), SCORE: torch.tensor(0.5, dtype=torch.double)}
    return evaluate(expr, inputs).expand(len(POSITIONS), len(POSITIONS))


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: q // 4 == k // 4,
        lambda b, h, q, k: (q % 4 <= k % 3) & (q != k),
        lambda b, h, q, k: (q // -3 > k // 2) | ((q < k) ^ True),
        lambda b, h, q, k: q % -5 == k % -2,
        lambda b, h, q, k: (q - 2 * k) ** 2 <= 17,
        lambda b, h, q, k: q / 3 >= k / 2 + 1,
        lambda b, h, q, k: (b + h > 4) & (q >= k),
        lambda b, h, q, k: (q >= k) ^ (q * k > 6),
    ],
)
def test_integer_conditions_are_those_of_python(mask):
    found = grid(of_mask(mask))
    for row, q in enumerate(POSITIONS.tolist()):
        for column, k in enumerate(POSITIONS.tolist()):
            assert bool(found[row, column]) == bool(mask(2, 3, q, k)), (q, k)


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (lambda s, b, h, q, k: 30 * fg.tanh(s / 30), 30 * math.tanh(0.5 / 30)),
        (lambda s, b, h, q, k: s * fg.sigmoid(s), 0.5 / (1 + math.exp(-0.5))),
        (lambda s, b, h, q, k: fg.exp(s) + fg.log(s), math.exp(0.5) + math.log(0.5)),
        (lambda s, b, h, q, k: fg.log2(s) * 2 + fg.sqrt(s), -2 + math.sqrt(0.5)),
        (lambda s, b, h, q, k: fg.sin(s) - fg.cos(s), math.sin(0.5) - math.cos(0.5)),
        (lambda s, b, h, q, k: abs(-s) + fg.floor(s * 5), 0.5 + 2),
        (lambda s, b, h, q, k: s**3 - s**-2 + s**0.5, 0.125 - 4 + math.sqrt(0.5)),
        (lambda s, b, h, q, k: fg.minimum(s, 0.25) + fg.maximum(s, h), 0.25 + 3),
        (lambda s, b, h, q, k: s // 0.2 + s % 0.2, 2 + 0.5 % 0.2),
        (lambda s, b, h, q, k: 2 ** (-8 * (h + 1) / 4) * s, 0.5 / 256),
        (lambda s, b, h, q, k: fg.where(h == 3, s, -s), 0.5),
    ],
)
def test_functions_are_those_of_the_maths_library(score, expected):
    found = grid(of_score(score))
    assert found.dtype == torch.float64
    assert float(found[0, 0]) == pytest.approx(expected, rel=1e-14)


@given(st.integers(-(2**28), 2**28), st.integers(-(2**28), 2**28), st.integers(1, 2**20))
def test_integers_are_exact_far_beyond_what_float64_holds(q, k, divisor):
    def number(_, b, h, q, k):
        return (q * k + q) // divisor + (q * k) % divisor

    expr = trace_score(number).expr
    found = evaluate(expr, {Q: torch.tensor(q), K: torch.tensor(k)})
    assert found.dtype == torch.int64
    assert int(found) == (q * k + q) // divisor + (q * k) % divisor


def test_far_positions_do_not_cancel():
    expr = trace_score(lambda s, b, h, q, k: s + 0.1 * (k - q) + (k - q) / 3).expr
    far = 2**28
    values = {Q: torch.tensor(far), K: torch.tensor(far - 3), SCORE: torch.tensor(0.0)}
    found = evaluate(expr, values, torch.float32)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(-1.3, rel=1e-6)


def test_products_that_leave_int64_become_floats():
    far = torch.tensor(2**28)
    found = evaluate(of_score(lambda s, b, h, q, k: s + q**3), {Q: far, SCORE: far.double()})
    assert float(found) == pytest.approx(2.0**84)


@pytest.mark.parametrize("number", [-1e29, 2.0**63, 1e20, 1e-20])
def test_numbers_may_be_far_beyond_64_bits(number):
    expr = of_score(lambda s, b, h, q, k: s + number * (k - q) + number)
    inputs = {Q: torch.tensor(3), K: torch.tensor(5), SCORE: torch.tensor(0.0).double()}
    assert float(evaluate(expr, inputs)) == pytest.approx(3 * number, rel=1e-14)


def test_an_unused_branch_may_be_undefined():
    expr = of_score(lambda s, b, h, q, k: fg.where(q > 0, k % fg.maximum(q, 1), fg.log(s)))
    inputs = {Q: torch.tensor([0, 3]), K: torch.tensor(7), SCORE: torch.tensor(-1.0).double()}
    found = evaluate(expr, inputs)
    assert found[1] == 1
    assert found[0].isnan()


def test_a_result_has_only_the_dimensions_that_its_symbols_have():
    inputs = {Q: POSITIONS[:, None], K: POSITIONS[None, :]}
    assert evaluate(of_mask(lambda b, h, q, k: k < 3), inputs).shape == (1, 19)
    assert evaluate(sympy.true, inputs).shape == ()


def test_what_no_mod_can_make_is_refused_by_name():
    with pytest.raises(SpecError, match="cannot evaluate a part") as caught:
        evaluate(sympy.gamma(Q), {Q: POSITIONS})
    assert "gamma" in caught.value.numbers
    with pytest.raises(SpecError) as caught:
        evaluate(sympy.Symbol("window", integer=True) + Q, {Q: POSITIONS})
    assert "window" in caught.value.numbers
