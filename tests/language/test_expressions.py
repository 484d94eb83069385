"""Tracing turns mods into the expressions that their Python code denotes."""

from __future__ import annotations

import inspect
import math
import operator
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.shared.errors import SpecError
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.score import derivative
from flashgen.spec.language.comparisons import FloatLess, FloatRelation
from flashgen.spec.language.float_functions import FUNCTIONS
from flashgen.spec.language.float_operations import FloatProduct, FloatQuotient, FloatSum
from flashgen.spec.language.lets import parts_of
from flashgen.spec.language.symbols import HEADS, SCORE, H, K, Q
from flashgen.spec.language.sympy_functions import Floor, FloorDiv, FloorMod, Maximum, Minimum
from flashgen.spec.language.tracing import trace_mask, trace_score
from tests.support.expr_trees import (
    MASKS,
    NUMBERS,
    SCALARS,
    SIZES,
    VALUES,
    Undefined,
    direct,
    traced,
)

POSITION = st.integers(-40, 40)


def score(mod: Any) -> Any:
    return trace_score(mod).expr


def mask(mod: Any) -> Any:
    return trace_mask(mod).expr


@settings(max_examples=60, derandomize=True, deadline=None)
@given(tree=st.one_of(MASKS, NUMBERS), values=VALUES, q=POSITION, k=POSITION)
def test_an_expression_has_the_value_that_python_gives_it(
    tree: Any, values: dict[str, Any], q: int, k: int
) -> None:
    try:
        expected = direct(tree, {**values, "q": q, "k": k})
    except Undefined:
        assume(False)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        leaves = {**SCALARS, **SIZES, "b": b, "h": h, "q": q, "k": k}
        value = traced(tree, leaves)
        is_mask = isinstance(expected, bool)
        return fg.where(value, 1, 0) if is_mask else value

    env = {
        Q: q,
        K: k,
        H: values["h"],
        sympy.Symbol("b", integer=True, nonnegative=True): values["b"],
    }
    env |= {leaf.expr: values[name] for name, leaf in {**SCALARS, **SIZES}.items()}
    try:
        expr = score(mod)
    except SpecError as error:
        assume("too large for kernels" not in error.what)
        raise
    found = evaluate(expr, env, np.float64)
    assert found == pytest.approx(float(expected), rel=1e-12, abs=1e-12)


def test_division_rounds_down_and_the_remainder_has_the_sign_of_the_divisor() -> None:
    for divisor in (-3, 2, 4):
        floor = score(lambda s, b, h, q, k, d=divisor: q // d)
        rest = score(lambda s, b, h, q, k, d=divisor: q % d)
        for q in range(-9, 10):
            assert evaluate(floor, {Q: q}) == q // divisor
            assert evaluate(rest, {Q: q}) == q % divisor


def test_comparisons_are_elementwise_in_both_orders() -> None:
    assert mask(lambda b, h, q, k: q == k) == sympy.Eq(Q, K)
    assert mask(lambda b, h, q, k: q != k) == sympy.Ne(Q, K)
    assert mask(lambda b, h, q, k: q > 3) == (Q > 3)
    assert mask(lambda b, h, q, k: operator.lt(np.int64(3), q)) == (Q > 3)


def test_a_scalar_on_the_right_does_not_turn_a_comparison_around() -> None:
    limit = fg.Scalar("limit")
    assert mask(lambda b, h, q, k: q - k < limit) == (Q - K < limit.expr)  # noqa: SIM300


def test_an_integer_is_compared_with_a_small_literal_exactly() -> None:
    assert mask(lambda b, h, q, k: k < 2.5) == (K <= 2)
    assert mask(lambda b, h, q, k: 2.5 < k) == (K >= 3)  # noqa: SIM300
    assert mask(lambda b, h, q, k: k - q >= 2.0) == (K - Q >= 2)
    assert mask(lambda b, h, q, k: k > 2.99999999999) == (K > 3)  # float32 rounds the literal
    assert isinstance(mask(lambda b, h, q, k: k < 1e9), FloatLess)


@pytest.mark.parametrize(
    "mod",
    [
        lambda x, q, k: x - x == 0,
        lambda x, q, k: x != x,
        lambda x, q, k: x / x == 1,
        lambda x, q, k: x * 0 == 0,
        lambda x, q, k: x < x + 1,
        lambda x, q, k: (k - q) * x > 1,
        lambda x, q, k: (q * 0.1) * 10 == q,
        lambda x, q, k: (x * 1e30) * 1e-30 == x,
        lambda x, q, k: fg.exp(fg.log(x)) == x,
        lambda x, q, k: fg.sqrt(x) ** 2 >= 0,
        lambda x, q, k: fg.minimum(x, x + 1) == x,
        lambda x, q, k: (x < 1) | (x >= 1),
        lambda x, q, k: ~(x < 1) == (x >= 1),
        lambda x, q, k: fg.where(q < k, math.inf, 1.0) > x,
        lambda x, q, k: q * 2.0 == k * 1.0,
    ],
)
def test_comparisons_of_floats_are_not_simplified(mod: Any) -> None:
    x = fg.Scalar("x", "float32")
    traced = mask(lambda b, h, q, k: mod(x, q, k))
    parts = sympy.preorder_traversal(traced)
    assert any(isinstance(part, FloatRelation) for part in parts)


def test_the_negation_of_a_comparison_of_floats_is_not_the_opposite_one() -> None:
    x = fg.Scalar("x", "float32")
    below, not_below = mask(lambda *_: x < 1), mask(lambda *_: ~(x < 1))
    assert not_below == sympy.Not(below, evaluate=False)
    for value in (0.5, 1.0, 2.0, math.nan):
        assert evaluate(not_below, {x.expr: value}) == (not value < 1)


def test_where_chooses_numbers_and_conditions() -> None:
    either = score(lambda s, b, h, q, k: fg.where(q < k, s, 0))
    assert either == sympy.Piecewise((SCORE, Q < K), (0, True), evaluate=False)
    both = mask(lambda b, h, q, k: fg.where(h < 2, q >= k, k < 8))
    for h, q, k in [(0, 3, 3), (0, 3, 4), (5, 3, 4), (5, 3, 9)]:
        assert evaluate(both, {H: h, Q: q, K: k}) == (q >= k if h < 2 else k < 8)


def test_where_may_compare_another_where() -> None:
    expr = score(lambda s, b, h, q, k: fg.where(fg.where(q < 3, k, q) < 5, s, -s))
    assert not expr.has(sympy.ITE)
    for q, k in [(0, 4), (0, 5), (4, 9), (5, 0)]:
        sign = 1 if (k if q < 3 else q) < 5 else -1
        assert evaluate(expr, {Q: q, K: k, SCORE: 2.0}) == 2.0 * sign


def test_conditions_compare_and_exclude() -> None:
    flag = fg.Scalar("flag", "bool")
    same = mask(lambda b, h, q, k: (q < k) == flag)
    other = mask(lambda b, h, q, k: (q < k) ^ flag)
    for q, k, value in [(0, 1, True), (0, 1, False), (1, 0, True), (1, 0, False)]:
        env = {Q: q, K: k, flag.expr: value}
        assert evaluate(same, env) == ((q < k) == value)
        assert evaluate(other, env) == ((q < k) != value)


def test_python_functions_that_can_be_traced_are() -> None:
    assert score(lambda s, b, h, q, k: abs(q - k)) == sympy.Abs(Q - K)
    assert score(lambda s, b, h, q, k: math.floor(q / 2)) == Floor(FloatQuotient(Q, 2))
    assert score(lambda s, b, h, q, k: sum(divmod(q, 4))) == FloorDiv(Q, 4) + FloorMod(Q, 4)
    assert score(lambda s, b, h, q, k: np.float32(0.5) * s + np.int64(3)) == FloatSum(
        FloatProduct(SCORE, sympy.Rational(1, 2)), 3
    )


def test_sizes_are_known_without_a_capture() -> None:
    trace = trace_mask(lambda b, h, q, k: q + (fg.seq_k - fg.seq_q) >= k)
    assert [scalar.name for scalar in trace.captures] == ["seq_k", "seq_q"]
    assert all(scalar.is_size for scalar in trace.captures)


def test_captures_come_in_order_of_first_use() -> None:
    late, early = fg.Scalar("late"), fg.Scalar("early")
    trace = trace_mask(lambda b, h, q, k: (q - early < k) & (k < late) & (q > early))
    assert [scalar.name for scalar in trace.captures] == ["early", "late"]


def test_functions_of_plain_numbers_are_constants() -> None:
    root = score(lambda s, b, h, q, k: fg.sqrt(2))
    assert root.is_number
    assert evaluate(root, {}, np.float64) == math.sqrt(2)
    assert score(lambda s, b, h, q, k: fg.maximum(3, 5) + s) == FloatSum(SCORE, 5)


def test_a_mask_may_be_constant_and_arguments_unused() -> None:
    assert mask(lambda b, h, q, k: True) == sympy.true
    assert mask(lambda b, h, q, k: q >= 0 * k) == (Q >= 0)


def test_a_score_may_ignore_its_input() -> None:
    expr = score(lambda s, b, h, q, k: 0.5 * h)
    assert SCORE not in expr.free_symbols
    assert derivative(expr) == 0


# Derivatives.

POINTS = [-2.9, -0.7, 0.4, 1.9]

SCORES = {
    "softcap": lambda s, b, h, q, k: 50 * fg.tanh(s / 50),
    "squared": lambda s, b, h, q, k: s * s,
    "decay": lambda s, b, h, q, k: s / (1 + 1e-4 * (q - k) ** 2),
    "sigmoid": lambda s, b, h, q, k: s * fg.sigmoid(s),
    "log2": lambda s, b, h, q, k: fg.log2(s * s + 1),
    "sqrt": lambda s, b, h, q, k: fg.sqrt(1 + s * s) - fg.log(2 + s * s),
    "waves": lambda s, b, h, q, k: fg.sin(3 * s) + fg.cos(s * s) + fg.exp(-s),
    "abs": lambda s, b, h, q, k: fg.abs(s - 1) * s,
    "extrema": lambda s, b, h, q, k: fg.minimum(s, 1.5) * fg.maximum(s, -1.5 * s),
    "where": lambda s, b, h, q, k: fg.where(s < 0, 3 * s, s * s),
    "floor": lambda s, b, h, q, k: fg.floor(2 * s) + s // 0.5 + s % 0.75 + s,
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("at", POINTS)
def test_the_derivative_is_the_slope(name: str, at: float) -> None:
    expr = score(SCORES[name])
    env = {Q: 7, K: 3}
    step = 1e-6
    low, high = (evaluate(expr, {**env, SCORE: at + sign * step}, np.float64) for sign in (-1, 1))
    rise = high - low
    assert evaluate(derivative(expr), {**env, SCORE: at}, np.float64) == pytest.approx(
        rise / (2 * step), rel=1e-5, abs=1e-6
    )


def test_powers_of_a_maximum_with_0_have_slopes_without_choices() -> None:
    cube = score(lambda s, b, h, q, k: fg.maximum(s, 0) ** 3)
    assert derivative(cube) == 3 * Maximum(0, SCORE) ** 2
    other = derivative(score(lambda s, b, h, q, k: fg.maximum(s, 1) ** 2))
    assert other.has(sympy.Piecewise)


def test_equal_arguments_of_an_extremum_share_its_derivative() -> None:
    slope = derivative(Maximum(SCORE, 2))
    assert evaluate(slope, {SCORE: 2}) == 0.5


# The functions of our own.


def test_floor_division_is_simplified_where_that_is_exact() -> None:
    assert FloorDiv(Q, 1) == Q
    assert FloorDiv(4 * Q + 8, 4) == Q + 2
    assert FloorDiv(Q + 9, 4) == FloorDiv(Q + 1, 4) + 2
    assert FloorDiv(2 * Q, 4) == FloorDiv(Q, 2)
    assert FloorDiv(FloorDiv(Q, 3), 5) == FloorDiv(Q, 15)
    assert FloorDiv(FloorDiv(Q, 2**31), 2**31).args[1] == 2**31  # 2^62 does not fit kernels
    assert FloorMod(Q + 9, 4) == FloorMod(Q + 1, 4)
    assert FloorMod(FloorMod(Q, 4), 4) == FloorMod(Q, 4)


def test_extrema_drop_what_cannot_win() -> None:
    assert Maximum(Q, Q + 1) == Q + 1
    assert Minimum(Q, Minimum(Q + 2, K)) == Minimum(Q, K)
    assert Maximum(HEADS, 0) == HEADS


@settings(max_examples=100, derandomize=True, deadline=None)
@given(a=st.integers(-30, 30), c=st.integers(-20, 20), m=st.integers(-7, 7), x=st.integers(-50, 50))
def test_simplified_floor_functions_keep_their_value(a: int, c: int, m: int, x: int) -> None:
    assume(m != 0)
    assert evaluate(FloorDiv(a * Q + c, m), {Q: x}) == (a * x + c) // m
    assert evaluate(FloorMod(a * Q + c, m), {Q: x}) == (a * x + c) % m


def test_a_record_is_all_that_a_function_of_floats_needs() -> None:
    public = set(fg.__all__)
    for name, record in FUNCTIONS.items():
        assert name in public
        function = getattr(fg, name)
        assert list(inspect.signature(function).parameters) == list(record.takes)
        assert record.nargs == {len(record.takes)}
        assert hasattr(torch, name)
        value = function(*(0.3 for _ in record.takes))
        exact = float(getattr(torch, name)(*(torch.tensor(0.3).double() for _ in record.takes)))
        assert abs(float(evaluate(value.expr, {}, np.float64)) - exact) < 1e-6


def test_a_function_called_with_other_arguments_says_what_it_takes() -> None:
    for call in (lambda s: fg.exp(s, s), lambda s: fg.atan2(s), lambda s: fg.exp(y=s)):
        with pytest.raises(fg.SpecError, match="other arguments") as caught:
            fg.AttentionSpec(score_mod=lambda s, b, h, q, k, call=call: call(s))
        assert "test_expressions.py" in caught.value.where


def test_large_expressions_that_read_alike_have_the_captures_of_their_own_spec() -> None:
    """One name stands for captures of several dtypes and minima in specs of one process."""

    def made(dtype: str, **minimum: int) -> fg.AttentionSpec:
        bias, width = fg.Tensor("bias", ("heads",), dtype), fg.Scalar("width", **minimum)

        def score(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            for _ in range(30):
                score, q = fg.tanh(score) + bias[h], q // width
            return score + q

        return fg.AttentionSpec(score_mod=score, name="large")

    specs = [made("float32"), made("float16"), made("float32", minimum=1)]  # all of them live
    for spec in specs:
        (bias,), (width,) = spec.tensors, spec.scalars
        symbols = {x for part in parts_of(spec.score) for x in part.atoms(sympy.Symbol)}
        assert {x for x in symbols if x.name in ("bias", "width")} == {bias.symbol, width.expr}
