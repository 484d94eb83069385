"""The functions for mods: ``fg.where``, ``fg.exp`` and so on.

Each takes traced values and Python numbers. Given only Python numbers, it returns a traced
constant, so that ``fg.sqrt(2) * score`` works.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import sympy

from flashgen.shared.random_numbers import BITS, STREAMS
from flashgen.spec.language.bit_functions import Popcount, RandomBits
from flashgen.spec.language.comparisons import FloatLess
from flashgen.spec.language.float_functions import FUNCTIONS, Abs, FloatFunction
from flashgen.spec.language.float_operations import FloatPower
from flashgen.spec.language.lets import Let, replaced
from flashgen.spec.language.operators import as_condition
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.symbols import is_condition, is_int
from flashgen.spec.language.sympy_functions import Floor, Maximum, Minimum, Round
from flashgen.spec.language.tensor import random_state
from flashgen.spec.language.traced import (
    Operand,
    Traced,
    Value,
    apply_function,
    as_expr,
    captures_of,
    exprs_of,
    traced_value,
)
from flashgen.spec.language.user_source import in_specs, refuse


@in_specs
def where(condition: Operand, a: Operand, b: Operand) -> Traced:
    """``a`` where ``condition`` holds, else ``b``; both are numbers or both are conditions."""
    test, (if_true, if_false) = as_condition(as_expr(condition)), exprs_of(a, b)
    if not is_condition(test):
        refuse(
            "the first argument of fg.where is a condition, this is a number",
            numbers=f"operand {python_text(test)}",
            way_out="a comparison, as in fg.where(q < k, a, b)",
        )
    if is_condition(if_true) != is_condition(if_false):
        refuse(
            "fg.where chooses between two numbers or two conditions, not one of each",
            numbers=f"{python_text(if_true)} and {python_text(if_false)}",
            way_out="fg.where(condition, 1, 0) to make a number of a condition",
        )
    chosen = traced_value(choose(test, if_true, if_false), a, b)
    return Value(chosen.expr, captures_of(condition, a, b), chosen.narrow)


def choose(test: sympy.Basic, if_true: sympy.Basic, if_false: sympy.Basic) -> sympy.Basic:
    """The expression of ``where``."""
    if is_condition(if_true):
        return sympy.Or(sympy.And(test, if_true), sympy.And(sympy.Not(test), if_false))
    if test == sympy.true or if_true == if_false:
        return if_true
    if test == sympy.false:
        return if_false
    # Without evaluate=False sympy would rewrite the user's conditions.
    return sympy.Piecewise((if_true, _without_choices(test)), (if_false, True), evaluate=False)


def _without_choices(test: sympy.Basic) -> sympy.Basic:
    """The condition without a Piecewise inside, which sympy would turn into an ITE."""
    choices = test.atoms(sympy.Piecewise)
    if len(choices) > _MOST_CHOICES:  # each would multiply the cases of the others
        test = replaced(test, {choice: Let(choice) for choice in choices})
    if isinstance(test, sympy.And | sympy.Or | sympy.Not):
        return test.func(*map(_without_choices, test.args))
    inner = next(iter(sympy.ordered(test.atoms(sympy.Piecewise))), None)
    if inner is None:
        return test
    cases, before = [], sympy.true
    for value, condition in inner.args:
        case = replaced(test, {inner: value})
        cases.append(sympy.And(before, condition, _without_choices(case)))
        before = sympy.And(before, sympy.Not(condition))
    return sympy.Or(*cases)


_MOST_CHOICES = 2
"""Choices in a condition that become cases of the condition."""


_HALF = sympy.Rational(1, 2)


@in_specs
def minimum(a: Operand, b: Operand) -> Traced:
    """The lesser of two numbers; NaN where one is NaN."""
    return apply_function("minimum", Minimum, a, b)


@in_specs
def maximum(a: Operand, b: Operand) -> Traced:
    """The greater of two numbers; NaN where one is NaN."""
    return apply_function("maximum", Maximum, a, b)


@in_specs
def sqrt(x: Operand) -> Traced:
    """Square root."""
    return apply_function("sqrt", lambda x: FloatPower(x, _HALF), x)


@in_specs
def abs(x: Operand) -> Traced:
    """Absolute value."""
    return apply_function("abs", Abs, x)


@in_specs
def floor(x: Operand) -> Traced:
    """The greatest integer that is at most x."""
    return apply_function("floor", Floor, x)


@in_specs
def round(x: Operand) -> Traced:
    """The nearest integer; halves go to the even one."""
    return apply_function("round", Round, x)


@in_specs
def exp2(x: Operand) -> Traced:
    """2 to the power x."""
    return apply_function("exp2", lambda x: FloatPower(sympy.Integer(2), x), x)


@in_specs
def rsqrt(x: Operand) -> Traced:
    """1 / sqrt(x)."""
    return apply_function("rsqrt", lambda x: FloatPower(x, -_HALF), x)


@in_specs
def sign(x: Operand) -> Traced:
    """-1, 0 or 1."""
    value = apply_function("sign", lambda x: x, x)
    return where(value > 0, 1, where(value < 0, -1, 0))


@in_specs
def clamp(x: Operand, low: Operand | None = None, high: Operand | None = None) -> Traced:
    """``x`` between two bounds, each of which may be None; at a bound the gradient is that of x.

    It is NaN where the number or a bound is NaN.
    """
    value = apply_function("clamp", lambda x: x, x)
    if low is not None:
        value = where(_replaces(low, value < low), low, value)
    return value if high is None else where(_replaces(high, value > high), high, value)


def _replaces(bound: Operand, beyond: Traced) -> Traced:
    """The condition that a bound of `clamp` replaces the number: it is exceeded, or NaN."""
    expr = as_expr(bound)
    return beyond if is_int(expr) or expr.is_number else beyond | (bound != bound)


@in_specs
def isfinite(x: Operand) -> Traced:
    """True where x is neither infinite nor NaN in float32."""
    value = abs(x)
    finite = sympy.true if is_int(value.expr) else FloatLess(value.expr, sympy.oo)
    return Value(finite, value.captures)


@in_specs
def popcount(x: Operand) -> Traced:
    """The number of ones among the low 32 bits of an integer."""
    if not is_int(as_expr(x)):
        refuse(
            "fg.popcount is for integers",
            numbers=f"operand {python_text(as_expr(x))}",
            way_out="an integer expression, such as q ^ k",
        )
    return apply_function("popcount", Popcount, x)


@in_specs
def rand(b: Operand, h: Operand, q: Operand, k: Operand, stream: int = 0) -> Traced:
    """A random float in [0, 1), a multiple of 2^-24; its gradient is 0.

    It depends on the call's ``rng``, on the stream and on the four integers alone, of which the low
    16 bits of b, the low 10 of h and the low 32 of q and k count: on no tile, pass, backend or
    rank. The arguments are any integers, as in ``fg.rand(0, 0, 0, k)`` for a number of each key.
    Streams are independent of one another and of dropout (`flashgen.shared.random_numbers`).

    Args:
        stream: a number from 0 to 63 that is known when the mod is traced.
    """
    if not isinstance(stream, int) or isinstance(stream, bool) or not 0 <= stream < STREAMS:
        refuse(
            "the stream of fg.rand is not the number of one",
            numbers=f"stream {stream!r}; from 0 to {STREAMS - 1}",
            way_out="fg.rand(b, h, q, k, stream=1)",
        )
    for name, value in {"b": b, "h": h, "q": q, "k": k}.items():
        expr = as_expr(value)
        if is_condition(expr) or not is_int(expr):
            refuse(
                "fg.rand is for integers",
                numbers=f"{name} is {python_text(expr)}",
                way_out="positions and integer expressions of them, as in fg.rand(b, h, q, k)",
            )
    state = random_state()
    words = [state[index] for index in range(3)]
    bits = apply_function("rand", RandomBits, *words, stream, b, h, q, k)
    unit: Any = Fraction(1, 1 << BITS)
    number: Traced = bits * unit
    return number


def _function(record: type[FloatFunction]) -> Callable[..., Traced]:
    """The function for mods that a record describes."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in record.takes])

    def function(*values: Operand, **named: Operand) -> Traced:
        return apply_function(record.called, record, *signature.bind(*values, **named).args)

    function.__name__ = function.__qualname__ = record.called
    function.__doc__ = record.__doc__
    function.__signature__ = signature  # type: ignore[attr-defined]
    return in_specs(function)


globals().update({name: _function(record) for name, record in FUNCTIONS.items()})
if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Traced]: ...
