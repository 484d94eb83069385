"""Printed CUDA expressions: their text, with few brackets and the narrowest safe types."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.kernels.codegen.expressions import CPrinter
from flashgen.kernels.codegen.expressions.cpp_text import float32_literal
from flashgen.shared.errors import RenderError
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.score import analyse_score
from flashgen.spec.analysis.sharing import share
from flashgen.spec.language.bit_functions import ShiftLeft, ShiftRight
from flashgen.spec.language.float_functions import Exp, Log2, Tanh
from flashgen.spec.language.symbols import HEADS, K_HI, K_LO, Q_HI, Q_LO, SCORE, H, K, Q
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod, Maximum, Minimum
from flashgen.spec.language.tracing import trace_mask, trace_score

X, Y = sympy.symbols("x y", real=True)
LIMIT = sympy.Symbol("limit", integer=True)
FLAG = sympy.Symbol("flag")


def printed(expr: Any, dtype: str = "float32") -> str:
    return CPrinter({}, dtype).expr(expr)


def both(expr: Any) -> tuple[str, str]:
    return printed(expr), printed(expr, "float16")


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (Q - K, "q - k"),
        (K - Q, "k - q"),
        (-Q - K, "-k - q"),
        (2 * (Q - K) + 1, "2 * q - 2 * k + 1"),
        (FloorDiv(Q, 64) * 64, "64 * (q >> 6)"),
        (FloorMod(Q, 8) + 1, "(q & 7) + 1"),
        (FloorDiv(Q, 100), "floor_div(q, 100)"),
        (FloorMod(Q - K, LIMIT), "floor_mod(q - k, limit)"),
        (FloorDiv(H, HEADS), "h / heads"),
        (FloorMod(H + 1, 3), "(h + 1) % 3"),
        (Minimum(Q, K + 1, 7), "min(min(7, q), k + 1)"),
        (Maximum(Q_HI + 1, LIMIT), "max(limit, q_hi + 1)"),
        (sympy.Abs(Q - K), "abs(k - q)"),
    ],
    ids=str,
)
def test_integers_print_as_a_person_writes_them(expr: Any, text: str) -> None:
    assert printed(expr) == text


@pytest.mark.parametrize(
    ("mod", "text"),
    [
        (lambda b, h, q, k: q >= k, "q >= k"),
        (lambda b, h, q, k: (q >= k) & (q - k < 8), "q >= k && q - k < 8"),
        (lambda b, h, q, k: (q >= k) & ((k < 4) | (q < 4)), "q >= k && (k < 4 || q < 4)"),
        (lambda b, h, q, k: ((q >= k) & (k < 4)) | (h == 0), "h == 0 || (q >= k && k < 4)"),
        (lambda b, h, q, k: ~(q == k), "q != k"),
        (lambda b, h, q, k: q % 4 == k % 4, "(q & 3) == (k & 3)"),
        (lambda b, h, q, k: ~fg.Scalar("flag", "bool") & (k < 4), "!flag && k < 4"),
        (lambda b, h, q, k: fg.Scalar("t", "float32") > 0.5, "t > 0.5f"),
        (lambda b, h, q, k: q < fg.Scalar("t", "float32") * k, "float(q) < float(k) * t"),
        (lambda b, h, q, k: k < q / 2, "float(k) < 0.5f * float(q)"),
        (lambda b, h, q, k: ~(fg.Scalar("t", "float32") < 0.5), "!(t < 0.5f)"),
        (lambda b, h, q, k: True, "true"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_conditions_print_as_a_person_writes_them(mod: Any, text: str) -> None:
    assert printed(trace_mask(mod).expr) == text


@pytest.mark.parametrize(
    ("mod", "exact", "fast"),
    [
        (
            lambda s, b, h, q, k: 50 * fg.tanh(s / 50),
            "50.0f * tanhf(0.02f * score)",
            "50.0f * fast_tanh(0.02f * score)",
        ),
        (
            lambda s, b, h, q, k: s / (1 + 1e-4 * (q - k) ** 2),
            "score / (0.0001f * square(float(q - k)) + 1.0f)",
            "score * rcp(0.0001f * square(float(q - k)) + 1.0f)",
        ),
        (
            lambda s, b, h, q, k: s + 2 ** (-8 * (h + 1) / fg.heads) * (k - q),
            "score + exp2f(float(-8 * h - 8) / float(heads)) * float(k - q)",
            "score + exp2f(float(-8 * h - 8) * rcp(float(heads))) * float(k - q)",
        ),
        (
            lambda s, b, h, q, k: s - q + k,
            "score - float(q) + float(k)",
            "score - float(q) + float(k)",
        ),
        (lambda s, b, h, q, k: s + (k - q), "score + float(k - q)", "score + float(k - q)"),
        (lambda s, b, h, q, k: s * s * s, "score * score * score", "score * score * score"),
        (lambda s, b, h, q, k: (s + 1) ** 5, "power<5>(score + 1.0f)", "power<5>(score + 1.0f)"),
        (lambda s, b, h, q, k: fg.sqrt(s), "sqrtf(score)", "fast_sqrt(score)"),
        (lambda s, b, h, q, k: s**-0.5, "rsqrtf(score)", "rsqrtf(score)"),
        (lambda s, b, h, q, k: s**1.5, "powf(score, 1.5f)", "fast_power(score, 1.5f)"),
        (lambda s, b, h, q, k: fg.sigmoid(s), "sigmoid(score)", "fast_sigmoid(score)"),
        (lambda s, b, h, q, k: fg.exp(s), "expf(score)", "fast_exp(score)"),
        (
            lambda s, b, h, q, k: s * fg.exp2((k - q) / 8),
            "exp2f(0.125f * float(k - q)) * score",
            "fast_exp2(0.125f * float(k - q)) * score",
        ),
        (
            lambda s, b, h, q, k: fg.where(q < k, s, -s),
            "selected(q < k, score, -score)",
            "selected(q < k, score, -score)",
        ),
        (lambda s, b, h, q, k: s // 3, "float_div(score, 3.0f)", "float_div(score, 3.0f)"),
        (lambda s, b, h, q, k: s / s, "score / score", "fast_quotient(score, score)"),
        (lambda s, b, h, q, k: s % 3, "float_mod(score, 3.0f)", "float_mod(score, 3.0f)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_scores_print_exactly_or_fast_by_their_dtype(mod: Any, exact: str, fast: str) -> None:
    assert both(trace_score(mod).expr) == (exact, fast)


def test_names_replace_symbols() -> None:
    printer = CPrinter({Q: "row", HEADS: "p.heads_q"}, "float32")
    assert printer.expr(FloorMod(Q, 5) + HEADS) == "p.heads_q + floor_mod(row, 5)"


# Integers that could leave int32.


@pytest.mark.parametrize(
    ("expr", "text", "kind"),
    [
        (Q + LIMIT, "limit + q", "int"),
        (Q * K, "int64(k) * q", "int64"),
        (Q * Q + K, "int64(k) + square(int64(q))", "int64"),
        (9 * Q, "9LL * q", "int64"),
        (LIMIT + LIMIT + Q, "2LL * limit + q", "int64"),
        (FloorDiv(Q * K, LIMIT), "floor_div(int64(k) * q, int64(limit))", "int64"),
        (Minimum(Q * K, 5), "min(5LL, int64(k) * q)", "int64"),
        (sympy.Abs(Q * K), "llabs(int64(k) * q)", "int64"),
        (sympy.Integer(2**40), "1099511627776LL", "int64"),
        (Q_LO - K_HI + LIMIT + K_LO, "k_lo + limit + q_lo - k_hi", "int"),
    ],
    ids=str,
)
def test_what_may_overflow_is_computed_in_64_bits(expr: Any, text: str, kind: str) -> None:
    printer = CPrinter({}, "float32")
    assert (printer.expr(expr), printer.ctype(expr)) == (text, kind)


def test_integer_products_in_a_float_are_formed_in_float() -> None:
    assert printed(SCORE + Q * K) == "score + float(k) * float(q)"
    assert printed(SCORE * LIMIT**2) == "square(float(limit)) * score"


def test_shifts_of_wide_integers_in_a_float_are_formed_in_integers() -> None:
    by = Maximum(0, Minimum(K, 31))
    assert (
        printed(SCORE + ShiftRight(Q * K, by))
        == "score + float((int64(k) * q) >> max(0, min(31, k)))"
    )
    assert (
        printed(SCORE + ShiftLeft(5 * (Q - K), by))
        == "score + float(shifted_left(int64(5 * q) - 5 * k, max(0, min(31, k))))"
    )


# Floats.


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (50, "50.0f"),
        (0.02, "0.02f"),
        (-8, "-8.0f"),
        (1e-4, "0.0001f"),
        (1e-6, "1e-6f"),
        (1e10, "1e10f"),
        (1 / 3, "0.33333334f"),
        (0, "0.0f"),
        (2**24 + 1, "16777216.0f"),
    ],
)
def test_float_literals_are_short_and_exact(value: float, text: str) -> None:
    assert float32_literal(value) == text


@settings(max_examples=500, derandomize=True)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_float_literal_reads_back_as_the_same_float32(value: float) -> None:
    text = float32_literal(value)
    assert text.endswith("f")
    assert set(text) & set(".e")
    assert struct.pack("f", float(text[:-1])) == struct.pack("f", value)


def test_constants_are_folded() -> None:
    assert printed(sympy.sqrt(2) * X) == "1.4142135f * x"
    assert printed(X * sympy.Rational(1, 3)) == "0.33333334f * x"
    assert printed(3**X) == "exp2f(1.5849625f * x)"


def test_a_constant_that_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(RenderError, match="float32 cannot hold") as caught:
        printed(sympy.Integer(10) ** 40 * X)
    assert "3.4028235e+38" in caught.value.numbers


def test_an_unknown_function_is_refused_by_name() -> None:
    with pytest.raises(RenderError, match="gamma has no CUDA equivalent"):
        printed(sympy.gamma(X))


# Shared subexpressions.


def block_text(score: Any, dtype: str = "float32") -> tuple[list[str], list[str]]:
    block = analyse_score(score).value_and_derivative.block
    printer = CPrinter({}, dtype)
    return printer.lets(block), [printer.float(result) for result in block.results]


def test_the_derivative_of_softcap_reuses_the_tanh() -> None:
    lets, results = block_text(50 * Tanh(SCORE / 50))
    assert lets == ["const float tanh_score_over_50 = tanhf(0.02f * score);"]
    name = "tanh_score_over_50"
    assert results == [f"50.0f * {name}", f"1.0f - {name} * {name}"]


def test_the_derivative_of_a_square_is_twice_the_score() -> None:
    assert block_text(SCORE**2) == ([], ["score * score", "2.0f * score"])


def test_the_derivative_of_a_bias_is_one() -> None:
    assert block_text(SCORE + Q - K)[1][1] == "1.0f"


def test_a_shared_integer_stays_an_integer() -> None:
    distance = (Q - K) * LIMIT
    block = share(Exp(distance) + distance, FloorMod(distance, 7))
    printer = CPrinter({}, "float32")
    assert printer.lets(block)[0].startswith("const int64 limit_times_q_minus_k = ")
    assert printer.expr(block.results[1]) == "floor_mod(limit_times_q_minus_k, 7LL)"


def test_a_shared_condition_is_a_bool() -> None:
    near = sympy.And(Q >= K, Q - K < 8)
    block = share(
        sympy.Piecewise((SCORE, near), (0, True), evaluate=False),
        sympy.Piecewise((1, near), (2, True), evaluate=False),
    )
    printer = CPrinter({}, "float32")
    assert printer.lets(block) == ["const bool t0 = q >= k && q - k < 8;"]
    assert printer.expr(block.results[0]) == "t0 ? score : 0.0f"


def test_nothing_is_shared_that_occurs_once() -> None:
    assert share(SCORE * Exp(-SCORE) + Log2(X)).lets == ()


def test_an_undefined_derivative_is_nan_in_its_own_branch_only() -> None:
    def score_mod(score, b, h, q, k):
        return fg.log(fg.where(k <= q, 1, 0) * (score * score + 1))

    spec = fg.AttentionSpec(score_mod=score_mod)
    slope = analyse_score(spec.score).derivative
    assert math.isnan(evaluate(slope, {Q: 0, K: 1, SCORE: 2.0}))
    assert evaluate(slope, {Q: 1, K: 1, SCORE: 2.0}) == pytest.approx(0.8)
