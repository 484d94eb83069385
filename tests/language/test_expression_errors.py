"""Every mistake in a mod raises one error with its four lines and the user's line."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
import torch

import flashgen as fg
from flashgen.shared.errors import SpecError
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.symbols import K, Q
from flashgen.spec.language.tracing import trace_mask, trace_score
from tests.support.paths import ROOT, from_root

HERE = from_root(__file__)
NUMBERS = [1, 4, 5]
LINES = Path(__file__).read_text().splitlines()


def line_of(marker: str) -> str:
    """file:line of the line that ends with the comment ``marker``."""
    number = next(i for i, text in enumerate(LINES, 1) if text.endswith(f"# {marker}"))
    return f"{HERE}:{number}"


def refusal(mod: Any, kind: str = "mask") -> SpecError:
    with pytest.raises(SpecError) as caught:
        (trace_mask if kind == "mask" else trace_score)(mod)
    error = caught.value
    assert all((error.what, error.where, error.numbers, error.way_out))
    assert str(ROOT) not in str(error), "no path of this machine"
    return error


def chained(b: Any, h: Any, q: Any, k: Any) -> Any:
    return 0 <= q - k < 128  # chained


def conjunction(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k and q - k < 128  # conjunction


def disjunction(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < 4 or q >= k  # disjunction


def negated(b: Any, h: Any, q: Any, k: Any) -> Any:
    return not q < k  # negated


def conditional(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k if h < 2 else k < 8  # conditional


def statement(b: Any, h: Any, q: Any, k: Any) -> Any:
    if h < 2:  # statement
        return q >= k
    return k < 8


def largest(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k < max(q, 16)  # largest


@pytest.mark.parametrize(
    ("mod", "marker", "way_out"),
    [
        (chained, "chained", "(0 <= q - k) & (q - k < 128)"),
        (conjunction, "conjunction", "(q >= k) & (q - k < 128)"),
        (disjunction, "disjunction", "(k < 4) | (q >= k)"),
        (negated, "negated", "~(q < k)"),
        (conditional, "conditional", "fg.where(h < 2, q >= k, k < 8)"),
        (statement, "statement", "fg.where(h < 2, a, b)"),
        (largest, "largest", "fg.maximum(q, 16)"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_truth_value_is_refused_at_its_line_with_the_line_rewritten(
    mod: Any, marker: str, way_out: str
) -> None:
    error = refusal(mod)
    assert error.where == line_of(marker)
    assert way_out in error.way_out
    assert "neither true nor false" in error.what


@pytest.mark.parametrize(
    ("mod", "way_out"),
    [
        (lambda b, h, q, k: int(q) > k, "fg.floor"),
        (lambda b, h, q, k: k < float(q), "fg.where, minimum"),
        (lambda b, h, q, k: math.tanh(q) < k, "fg.tanh(q) instead of math.tanh(q)"),
        (lambda b, h, q, k: np.tanh(q) < k, "fg.tanh(q) instead of np.tanh(q)"),
        (lambda b, h, q, k: q[0] < k, "one number"),
        (lambda b, h, q, k: [1, 2][q] < k, "fg.where"),
        (lambda b, h, q, k: list(q) == k, "one number"),
        (lambda b, h, q, k: len(q) < k, "fg.seq_q"),
        (lambda b, h, q, k: round(q / 3, 1) < k, "round(x * 100) / 100"),
        (lambda b, h, q, k: pow(q, 2, 3) < k, "x**y % modulus"),
        (lambda b, h, q, k: math.ceil(q / 2) < k, "-fg.floor(-x)"),
        (lambda b, h, q, k: math.trunc(q / 2) < k, "fg.where(x < 0"),
        (lambda b, h, q, k: q.tanh() < k, "fg.tanh(q) instead of q.tanh()"),
        (lambda b, h, q, k: q.clamp(0, 4) < k, "fg.clamp(q, 0, 4) instead of q.clamp(0, 4)"),
        (lambda b, h, q, k: q.clamp(max=4) < k, "fg.clamp(x, low, high)"),
        (lambda b, h, q, k: (q - k).item() < 4, "q - k instead of (q - k).item()"),
        (lambda b, h, q, k: {1: 3}.get(q, 2) < k, "fg.where(condition, a, b)"),
        (lambda b, h, q, k: captured[...] < k, "captured[h]"),
        (lambda b, h, q, k: captured[:q] < k, "captured[h]"),
        (lambda b, h, q, k: captured.shape[0] < k, "fg.heads"),
        (lambda b, h, q, k: len(captured) < k, "fg.heads"),
        (lambda b, h, q, k: q >= k & q - k < 8, "(q >= k) & (q - k < 8) instead"),
        (lambda b, h, q, k: (q @ k) < 2, "*"),
        (lambda b, h, q, k: q in (1, 2), "(q == 1) | (q == 2) instead"),
        (lambda b, h, q, k: [2 * i for i in range(q)] == k, "fg.where"),
        (lambda b, h, q, k: q(2) < k, "x * (...)"),
        (lambda b, h, q, k: complex(q) == k, "real"),
    ],
)
def test_what_needs_a_value_is_refused_with_the_function_to_use(mod: Any, way_out: str) -> None:
    error = refusal(mod)
    assert error.where.startswith(f"{HERE}:")
    assert way_out in error.way_out


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, k: max(q, k, 7) < 9,
        lambda b, h, q, k: min([q - 1, k, 7]) < 3,
        lambda b, h, q, k: k in (1, 3),
        lambda b, h, q, k: q - k not in [1, 3],
        lambda b, h, q, k: k in range(5),
        lambda b, h, q, k: k in range(2, 9, 3),
        lambda b, h, q, k: k in NUMBERS,
        lambda b, h, q, k: q - k in {1, 3},
        lambda b, h, q, k: any(k == i for i in NUMBERS),
        lambda b, h, q, k: all([k > q, q > 2]),
        lambda b, h, q, k: 2 < k <= q,
        lambda b, h, q, k: q > 2 and k != 7,
    ],
)
def test_the_line_that_an_error_rewrites_means_what_was_meant(mod: Any) -> None:
    line = LINES[mod.__code__.co_firstlineno - 1].strip().removesuffix(",")
    instead, written = refusal(mod).way_out.split(" instead of ")
    assert written in line
    names = {**globals(), "functools": functools, "operator": operator}
    expr = trace_mask(eval(line.replace(written, f"({instead})"), names)).expr
    for q, k in itertools.product(range(10), repeat=2):
        assert bool(evaluate(expr, {Q: q, K: k})) == mod(0, 0, q, k)


def test_a_helper_that_remembers_results_computes_those_of_traced_values() -> None:
    """As such helpers do with all arguments that have no hash."""
    known: dict[Any, Any] = {}

    def twice(x: Any) -> Any:
        try:
            return known.setdefault(x, 2 * x)
        except TypeError:
            return 2 * x

    assert trace_mask(lambda b, h, q, k: twice(q) < k).expr == (2 * Q < K)


def test_a_remembered_result_of_a_traced_value_is_refused_with_what_to_write() -> None:
    twice = functools.cache(lambda x: 2 * x)
    assert "without functools.cache" in refusal(lambda b, h, q, k: twice(q) < k).way_out
    assert trace_mask(lambda b, h, q, k: twice.__wrapped__(q) < k).expr == (2 * Q < K)


def test_a_number_of_numpy_may_be_returned() -> None:
    assert trace_mask(lambda b, h, q, k: np.bool_(True)).expr == sympy.true
    assert trace_score(lambda s, b, h, q, k: np.float32(0.5)).expr == sympy.Rational(1, 2)


@pytest.mark.parametrize(
    ("mod", "what", "way_out"),
    [
        (lambda b, h, q, k: (q < k) + 1 > 0, "+ is for numbers", "fg.where(condition, 1, 0)"),
        (lambda b, h, q, k: (q < k) & k, "& is for two conditions", "brackets"),
        (lambda b, h, q, k: q / 2 & k, "& is for two conditions", "brackets"),
        (lambda b, h, q, k: ~(q / 2), "~ is for conditions and integers", "-x"),
        (lambda b, h, q, k: (q / 2) << 2 < k, "<< is for integers", "2**n"),
        (lambda b, h, q, k: q >> 64 < k, ">> by a number that is not from 0 to 63", "quotient"),
        (lambda b, h, q, k: fg.popcount(q / 2) < k, "fg.popcount is for integers", "q ^ k"),
        (lambda b, h, q, k: (q < k) == 1, "== is for numbers", "fg.where"),
        (lambda b, h, q, k: fg.where(q, True, False), "first argument", "comparison"),
        (lambda b, h, q, k: fg.where(q < k, 1, True), "two numbers or two conditions", "where"),
        (lambda b, h, q, k: fg.exp(q < k) < 1, "fg.exp is for numbers", "fg.where"),
        (lambda b, h, q, k: -(q < k) < 1, "- is for numbers", "fg.where"),
        (lambda b, h, q, k: q < 1e39, "float32 cannot hold", "mask_mod"),
        (lambda b, h, q, k: q / 0 < k, "/ by 0", "not 0"),
        (lambda b, h, q, k: q // 0 < k, "// by 0", "not 0"),
        (lambda b, h, q, k: q % (k - k) < k, "% by 0", "not 0"),
        (lambda b, h, q, k: q < fg.sqrt(-2), "not a finite real", "root of a negative"),
        (lambda b, h, q, k: q < fg.log(0), "not a finite real", "log"),
        (lambda b, h, q, k: q * q * k < 4, "< of integers that can be too large", "1.0 as"),
        (lambda b, h, q, k: (q**3) // 7 < k, "// of integers that can be too large", "factors"),
        (lambda b, h, q, k: fg.clamp(q * q * k, 0, 4) < k, "can be too large", "1.0 as"),
        (lambda b, h, q, k: q < fg.sqrt(fg.cos(3)), "not a finite real", "root of a negative"),
        (lambda b, h, q, k: q < "4", "a str cannot be used", "fg.Scalar"),
        (lambda b, h, q, k: q < None, "a NoneType cannot be used", "an int"),
        (lambda b, h, q, k: q < 2j, "a complex cannot be used", "real"),
        (
            lambda b, h, q, k: q < np.zeros(3),
            "a ndarray cannot be used",
            "capture it: t = fg.Tensor",
        ),
    ],
)
def test_operands_of_the_wrong_kind_are_refused(mod: Any, what: str, way_out: str) -> None:
    error = refusal(mod)
    assert what in error.what
    assert way_out in error.way_out
    assert error.where.startswith(f"{HERE}:")


TABLE = torch.ones(4)
LIST = [1.0, 2.0]
NAMED = {0: 1, 1: 2}
captured = fg.Tensor("captured", ("heads",), "int32")


@pytest.mark.parametrize(
    ("mod", "way_out"),
    [
        (lambda b, h, q, k: TABLE[h] < k, "TABLE = fg.Tensor('TABLE', ('heads',), dtype)"),
        (lambda b, h, q, k: torch.ones(4)[h] < k, "table = fg.Tensor('table', ('heads',), dtype)"),
        (lambda b, h, q, k: torch.ones(4, 9)[h, q - k] < k, "('heads', 'n'), dtype), table[h, q"),
        (lambda b, h, q, k: np.ones(4)[b] < k, "fg.Tensor('table', ('batch',), dtype)"),
        (lambda b, h, q, k: LIST[h] < k, "op(q, k, v, LIST=...)"),
        (lambda b, h, q, k: NAMED[h] < k, "op(q, k, v, NAMED=...)"),
        (lambda b, h, q, k: captured[h] + LIST[h] < k, "LIST = fg.Tensor"),
        (lambda b, h, q, k: q - k < TABLE, "capture it: t = fg.Tensor"),
        (lambda b, h, q, k: q - k < torch.tensor(3), ".item() for a constant"),
    ],
)
def test_a_table_of_another_library_is_to_be_captured(mod: Any, way_out: str) -> None:
    assert way_out in refusal(mod).way_out


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, k: fg.tanh(q, 2) < k,
        lambda b, h, q, k: fg.where(q < k) < k,
        lambda b, h, q, k: fg.minimum(q, k, 3) < k,
    ],
)
def test_a_way_out_is_never_the_user_s_own_line(mod: Any) -> None:
    error = refusal(mod)
    assert "instead of" not in error.way_out
    assert error.way_out in ("fg.tanh(x)", "fg.where(condition, a, b)", "fg.minimum(a, b)")


def test_the_message_of_another_package_is_one_line() -> None:
    error = refusal(lambda b, h, q, k: torch.where(q < k, 1, 0) < k)
    assert len(str(error).splitlines()) == 4


def test_the_number_of_an_error_is_the_number_that_was_written() -> None:
    """Also where no float holds it, or where a part of the expression is too large."""
    assert "1.7976931348623157e+308 or more" in refusal(lambda b, h, q, k: q < 10**400).numbers
    assert refusal(lambda b, h, q, k: q < 1e300).numbers.startswith("1e+300;")
    reached = refusal(lambda b, h, q, k: fg.clamp(q * q * k, 0, 4) < k).numbers
    assert reached.startswith("k*q**2 can reach 2^84, ")
    assert reached.endswith("the limit is below 2^62")


def test_a_number_below_float32_removes_scores() -> None:
    for number in (-math.inf, float("-inf"), np.float32("-inf"), -1e300):
        traced = trace_score(lambda s, b, h, q, k, number=number: fg.where(s > 0, s, number))
        assert python_text(traced.expr) == "where(score > 0, score, -inf)"
    assert trace_score(lambda s, b, h, q, k: fg.where(s > -math.inf, s, 0)).expr.has(sympy.Gt)


@pytest.mark.parametrize(
    "written",
    [
        "s / (t * u)",
        "s * t / u",
        "s / t / u",
        "s / (t / u)",
        "s * (t / u)",
        "s - (t - u)",
        "s - 2 * (t - u)",
        "-(s + t) / u",
        "s + (k - q)",
        "s + q // (i * j)",
        "s + i * q // j",
        "s + q % (i * j)",
        "s + (q + i) % j",
        "s + ((q + i) & (k | 3))",
    ],
)
def test_the_text_of_an_expression_is_the_expression(written: str) -> None:
    names: dict[str, Any] = {name: fg.Scalar(name, "float32") for name in "tu"}
    names |= {name: fg.Scalar(name, "int32", minimum=1) for name in "ij"}
    head = "lambda s, b, h, q, k: "
    expr = trace_score(eval(head + written, names)).expr
    text = python_text(expr).replace("score", "s")
    assert trace_score(eval(head + text, names)).expr == expr, text


def test_a_mask_that_is_a_number_is_refused() -> None:
    error = refusal(lambda b, h, q, k: q - k)
    assert "not a condition" in error.what
    assert "q - k" in error.numbers


def test_a_score_that_is_a_condition_is_refused() -> None:
    error = refusal(lambda s, b, h, q, k: q < k, "score")
    assert "not a number" in error.what
    assert "mask_mod" in error.way_out


def test_a_mask_that_uses_the_score_is_refused() -> None:
    stolen: list[Any] = []
    trace_score(lambda s, b, h, q, k: stolen.append(s) or s)
    error = refusal(lambda b, h, q, k: stolen[0] > 0)
    assert "uses the score" in error.what


def test_a_mod_that_returns_nothing_is_refused() -> None:
    def forgot(b: Any, h: Any, q: Any, k: Any) -> Any:
        q >= k  # noqa: B015

    error = refusal(forgot)
    assert "NoneType" in error.numbers
    assert "return" in error.way_out


def test_wrong_arity_shows_the_signature_to_write() -> None:
    error = refusal(lambda q, k: q >= k)
    assert "4 arguments" in error.what
    assert "(q, k)" in error.numbers
    assert error.way_out == "def mask_mod(b, h, q, k): ..."
    assert "score, b, h, q, k" in refusal(lambda b, h, q, k: q, "score").way_out


def test_an_unknown_name_is_reported_at_its_line() -> None:
    def misspelt(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < windw  # type: ignore[name-defined] # noqa: F821 # misspelt

    error = refusal(misspelt)
    assert "windw" in error.what
    assert error.where == line_of("misspelt")
    assert "fg.Scalar" in error.way_out


def test_an_exception_of_the_mod_is_reported_at_its_line() -> None:
    def broken(b: Any, h: Any, q: Any, k: Any) -> Any:
        return {}["missing"]  # broken

    error = refusal(broken)
    assert "KeyError" in error.what
    assert error.where == line_of("broken")
    assert isinstance(error.__cause__, KeyError)


def test_an_error_inside_a_library_is_reported_at_the_line_that_called_it() -> None:
    def broken(b: Any, h: Any, q: Any, k: Any) -> Any:
        return np.reshape(np.zeros(6), (4, 2)) < q  # reshaped

    assert refusal(broken).where == line_of("reshaped")


def test_something_that_is_no_function_is_refused() -> None:
    error = refusal(3)
    assert "not a function" in error.what
    assert "int" in error.numbers


# Scalars.


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("two words", "identifier"),
        ("2d", "identifier"),
        ("", "identifier"),
        ("größe", "identifier"),
        (3, "identifier"),
        ("lambda", "keyword of Python"),
        ("q", "already has a meaning"),
        ("score", "already has a meaning"),
        ("seq_k", "already has a meaning"),
        ("scale", "already has a meaning"),
        ("t0", "already has a meaning"),
    ],
)
def test_a_scalar_has_a_name_that_means_nothing_else(name: Any, what: str) -> None:
    with pytest.raises(SpecError, match=what) as caught:
        fg.Scalar(name)
    assert caught.value.where.startswith(f"{HERE}:")
    assert repr(name) in caught.value.numbers


def test_a_scalar_has_a_dtype_that_kernels_take() -> None:
    with pytest.raises(SpecError, match="dtype") as caught:
        fg.Scalar("window", "int64")
    assert "'int64'; available: int32, float32, bool" in caught.value.numbers


def test_statistics_of_another_kind_are_named_by_their_kind() -> None:
    with pytest.raises(SpecError) as caught:
        fg.AttentionSpec(statistics={"spread": lambda *_: 0})
    assert caught.value.numbers.startswith("given 'spread': function; ")


def test_a_way_out_for_the_minimum_of_a_bool_is_none() -> None:
    with pytest.raises(SpecError) as caught:
        fg.Scalar("on", "bool", minimum=0)
    assert caught.value.way_out == "no minimum: a bool is True or False"


@pytest.mark.parametrize(("dtype", "minimum"), [("bool", 0), ("int32", 2**31), ("int32", "1")])
def test_a_minimum_is_a_number_within_reach(dtype: str, minimum: Any) -> None:
    with pytest.raises(SpecError, match="minimum"):
        fg.Scalar("window", dtype, minimum=minimum)


def powers_of(x: Any, times: int) -> Any:
    for _ in range(times):
        x = x * x
    return x


HUGE: dict[str, Any] = {
    "repeated squares of a number": lambda s, q: s + powers_of(fg.maximum(3, 5), 40),
    "repeated squares of a position": lambda s, q: s + powers_of(q, 40),
    "a remainder of repeated squares": lambda s, q: s + powers_of(q + 7, 40) % 5,
    "a shift by a large number": lambda s, q: s + (fg.maximum(1, 0) << 10**9),
    "shifts of shifts": lambda s, q: s + (fg.maximum(1, 0) << 31 << 31 << 31),
    "a literal of 5,000 digits": lambda s, q: s + 10**5000,
    "a bound of 5,000 digits": lambda s, q: fg.where(q < 10**5000, s, 0),
}
SMALL: dict[str, Any] = {
    "exp2 of a large number": lambda s, q: s + fg.exp2(3e10),
    "a float to a large power": lambda s, q: s * fg.exp2(1.0) ** 4e10,
    "an integer to a large power": lambda s, q: s + fg.floor(3) ** 10**8,
    "exp of exp": lambda s, q: s * fg.exp(fg.exp(fg.exp(9))),
    "floor of a large float": lambda s, q: s + fg.floor(fg.exp(1e10)),
    "a fraction of 5,000 digits": lambda s, q: s + Fraction(1, 10**5000),
    "a subnormal double": lambda s, q: s * 1e-320,
    "a score to a large power": lambda s, q: s**10**9,
    "a position to a large power": lambda s, q: s + q**10**9,
    "the sine of a large number": lambda s, q: s + fg.sin(1e38),
    "repeated squares of a float": lambda s, q: s + powers_of(0.5 * q, 40),
}


@pytest.mark.parametrize("name", HUGE)
def test_integers_that_no_float_holds_are_refused_before_they_are_computed(name: str) -> None:
    start = time.process_time()
    error = refusal(lambda s, b, h, q, k: HUGE[name](s, q), "score")
    assert error.where.startswith(f"{HERE}:")
    assert len(str(error)) < 1000
    assert time.process_time() - start < 2


@pytest.mark.parametrize("name", SMALL)
def test_numbers_of_any_size_that_floats_stand_for_are_traced_at_once(name: str) -> None:
    start = time.process_time()
    trace = trace_score(lambda s, b, h, q, k: SMALL[name](s, q))
    assert len(str(trace.expr)) < 5000
    assert time.process_time() - start < 2


def test_a_mod_of_5_000_sines_is_refused_where_it_becomes_too_large() -> None:
    traced = 0

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        nonlocal traced
        for _ in range(5000):
            score = fg.sin(score)  # too large
            traced += 1
        return score

    error = refusal(score_mod, "score")
    assert error.where == line_of("too large")
    assert 350 < traced < 450
    assert "additions up to here, with a function as several; limit 1,500" in error.numbers
