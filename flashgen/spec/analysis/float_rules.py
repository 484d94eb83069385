"""How each operation of floats makes the range of its result from those of its operands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.spec.language.comparisons import FloatGreater, FloatGreaterEqual, FloatLess
from flashgen.spec.language.float_functions import FUNCTIONS, Abs, Bounded, Monotone
from flashgen.spec.language.float_operations import (
    AsFloat,
    FloatPower,
    FloatProduct,
    FloatQuotient,
    FloatSum,
    negative,
)
from flashgen.spec.language.sympy_functions import (
    Floor,
    FloorDiv,
    FloorMod,
    Maximum,
    Minimum,
    Round,
)

SLACK = sympy.Rational(1, 2**18)
"""Relative error of an approximated function, and its error below 2^-18: many times what kernels,
torch and numpy differ by."""

_ZERO = sympy.S.Zero


@dataclass(frozen=True)
class FloatRange:
    """If ``defined`` holds, no value is NaN and all lie in [lo, hi]; None where nothing is known.

    Attributes:
        least, most: numbers between which all values but NaN lie, in every tile of every call.
    """

    lo: sympy.Expr | None
    hi: sympy.Expr | None
    defined: sympy.Basic = sympy.true
    least: float = -math.inf
    most: float = math.inf

    @property
    def is_one_value(self) -> bool:
        return self.lo == self.hi

    @property
    def may_be_infinite(self) -> bool:
        return math.isinf(self.least) or math.isinf(self.most)

    @property
    def may_be_zero(self) -> bool:
        return self.least <= 0 <= self.most


UNKNOWN = FloatRange(None, None, sympy.false)


# Conditions under which no value is NaN.


def _is_finite(x: FloatRange) -> sympy.Basic:
    if not x.may_be_infinite:
        return sympy.true
    ends = dict.fromkeys((x.lo, x.hi))
    return sympy.And(*(FloatLess(Abs(AsFloat(end)), sympy.oo) for end in ends))


def _one_is_finite(x: FloatRange, y: FloatRange) -> sympy.Basic:
    if not (x.may_be_infinite and y.may_be_infinite):
        return sympy.true
    return _is_finite(x if x.is_one_value else y)


def _is_nonzero(x: FloatRange) -> sympy.Basic:
    if not x.may_be_zero:
        return sympy.true
    return sympy.Or(FloatGreater(x.lo, _ZERO), FloatLess(x.hi, _ZERO))


def _at_least(x: FloatRange, bound: int) -> sympy.Basic:
    return sympy.true if x.least >= bound else FloatGreaterEqual(x.lo, sympy.Integer(bound))


# Operations that are rounded correctly.


def _applied(function: Callable[[sympy.Expr], sympy.Expr], x: FloatRange) -> FloatRange:
    """The range of an exact, increasing function that differs from its argument by at most 1."""
    return FloatRange(function(x.lo), function(x.hi), x.defined, x.least - 1, x.most + 1)


def _sum(expr: sympy.Expr, x: FloatRange, y: FloatRange) -> FloatRange:
    opposite = (math.isinf(x.least) and math.isinf(y.most)) or (
        math.isinf(x.most) and math.isinf(y.least)
    )
    defined = sympy.And(x.defined, y.defined, _one_is_finite(x, y) if opposite else sympy.true)
    least = -math.inf if -math.inf in (x.least, y.least) else x.least + y.least
    most = math.inf if math.inf in (x.most, y.most) else x.most + y.most
    return FloatRange(FloatSum(x.lo, y.lo), FloatSum(x.hi, y.hi), defined, least, most)


def _negation(expr: sympy.Expr, sign: FloatRange, x: FloatRange) -> FloatRange:
    if expr.args[0] is not sympy.S.NegativeOne or len(expr.args) != 2:
        return UNKNOWN  # no product of floats
    return FloatRange(_minus(x.hi), _minus(x.lo), x.defined, -x.most, -x.least)


def _minus(end: sympy.Expr) -> sympy.Expr:
    return negative(AsFloat(end))


def _product(expr: sympy.Expr, x: FloatRange, y: FloatRange) -> FloatRange:
    defined = sympy.And(
        x.defined,
        y.defined,
        _is_finite(y) if x.may_be_zero else sympy.true,
        _is_finite(x) if y.may_be_zero else sympy.true,
    )
    numbers = [_static_product(a, b) for a in (x.least, x.most) for b in (y.least, y.most)]
    lows, highs = _corners(x, y)
    return _hull(FloatProduct, lows, highs, defined, numbers)


def _corners(x: FloatRange, y: FloatRange) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """Which ends (0: lo, 1: hi) of two factors give the least and the greatest product."""
    pairs = list(itertools.product((0, 1), (0, 1)))
    lows = highs = pairs
    for index, other in ((1, x), (0, y)):  # the factor beside one of known sign is monotone
        if other.least >= 0 or other.most <= 0:
            falls = other.least < 0
            lows = [pair for pair in lows if pair[index] == falls]
            highs = [pair for pair in highs if pair[index] != falls]
    return (
        [((x.lo, x.hi)[a], (y.lo, y.hi)[b]) for a, b in lows],
        [((x.lo, x.hi)[a], (y.lo, y.hi)[b]) for a, b in highs],
    )


def _static_product(a: float, b: float) -> float:
    return 0.0 if 0 in (a, b) else a * b


def _hull(
    operation: Callable[..., sympy.Expr],
    lows: list[tuple[sympy.Expr, sympy.Expr]],
    highs: list[tuple[sympy.Expr, sympy.Expr]],
    defined: sympy.Basic,
    numbers: list[float],
) -> FloatRange:
    lo, hi = (
        join(*dict.fromkeys(operation(a, b) for a, b in pairs))
        for join, pairs in ((Minimum, lows), (Maximum, highs))
    )
    return FloatRange(lo, hi, defined, min(numbers), max(numbers))


def _quotient(expr: sympy.Expr, x: FloatRange, y: FloatRange) -> FloatRange:
    defined = sympy.And(x.defined, y.defined, _is_nonzero(y), _one_is_finite(x, y))
    pairs = list(itertools.product((x.lo, x.hi), (y.lo, y.hi)))
    numbers = [-math.inf, math.inf]
    if not y.may_be_zero and not y.may_be_infinite:
        numbers = [a / b for a in (x.least, x.most) for b in (y.least, y.most)]
    elif x.least >= 0 and y.least >= 0:
        numbers[0] = 0.0
    return _hull(FloatQuotient, pairs, pairs, defined, numbers)


def _power(expr: sympy.Expr, x: FloatRange, n: FloatRange) -> FloatRange:
    base, exponent = expr.args
    if base.is_Number and base.is_positive and x.least > 0:
        ends = [FloatPower(base, end) for end in (n.lo, n.hi)]
        lo, hi = ends if x.least >= 1 else reversed(ends)
        most = max(_static_power(float(base), end) for end in (n.least, n.most))
        return _widened(FloatRange(lo, hi, n.defined, 0.0, most))
    if not exponent.is_Rational:
        return UNKNOWN
    if exponent < 0:
        one = FloatRange(sympy.S.One, sympy.S.One, sympy.true, 1, 1)
        return _widened(_quotient(expr, one, _positive_power(x, -exponent)))
    return _positive_power(x, exponent)


def _positive_power(x: FloatRange, n: sympy.Rational) -> FloatRange:
    if not n.is_Integer:
        defined = sympy.And(x.defined, _at_least(x, 0))
        least = 0.0 if x.least < 1 else 0.5
        return _widened(FloatRange(FloatPower(x.lo, n), FloatPower(x.hi, n), defined, least))
    if n % 2 == 0:
        x = _absolute(x)
    static = [_static_power(end, int(n)) for end in (x.least, x.most)]
    powers = (FloatPower(x.lo, n), FloatPower(x.hi, n))
    return _widened(FloatRange(*powers, x.defined, *static))


def _static_power(x: float, n: float) -> float:
    try:
        return float(x**n)
    except OverflowError:
        return math.copysign(math.inf, x) if n % 2 else math.inf


def _absolute(x: FloatRange) -> FloatRange:
    if x.least >= 0:
        return x
    most = max(abs(x.least), abs(x.most))
    if x.is_one_value:
        end = Abs(AsFloat(x.lo))
        return FloatRange(end, end, x.defined, 0.0, most)
    lo, hi = AsFloat(x.lo), AsFloat(x.hi)
    near = Maximum(AsFloat(_ZERO), lo, negative(hi))
    return FloatRange(near, Maximum(hi, negative(lo)), x.defined, 0.0, most)


def _extremum(expr: sympy.Expr, *parts: FloatRange) -> FloatRange:
    pick, static = (Minimum, min) if isinstance(expr, Minimum) else (Maximum, max)
    return FloatRange(
        pick(*(AsFloat(part.lo) for part in parts)),
        pick(*(AsFloat(part.hi) for part in parts)),
        sympy.And(*(part.defined for part in parts)),
        static(part.least for part in parts),
        static(part.most for part in parts),
    )


# Divisions that are rounded to whole numbers.


def _floor_quotient(expr: sympy.Expr, x: FloatRange, y: FloatRange) -> FloatRange:
    ratio = _widened(_quotient(expr, x, y))
    defined = sympy.And(ratio.defined, _is_finite(x), _is_finite(y))
    floors = FloatRange(Floor(ratio.lo), Floor(ratio.hi), defined)
    return _widened(floors)


def _remainder(expr: sympy.Expr, x: FloatRange, y: FloatRange) -> FloatRange:
    defined = sympy.And(x.defined, y.defined, _is_nonzero(y), _is_finite(x), _is_finite(y))
    lo = _ZERO if y.least >= 0 else Minimum(AsFloat(y.lo), AsFloat(_ZERO))
    hi = _ZERO if y.most <= 0 else Maximum(AsFloat(y.hi), AsFloat(_ZERO))
    return FloatRange(lo, hi, defined, min(y.least, 0.0), max(y.most, 0.0))


# Functions that are approximated.


def _widened(x: FloatRange) -> FloatRange:
    """The range with room for the errors of a function at both ends."""

    def widened_end(end: sympy.Expr, sign: int) -> sympy.Expr:
        margin = FloatProduct(SLACK, FloatSum(SLACK, Abs(AsFloat(end))))
        return FloatSum(end, margin if sign > 0 else negative(margin))

    def widened_number(end: float, sign: int) -> float:
        return end + sign * float(SLACK) * (float(SLACK) + abs(end))

    lo, least = widened_end(x.lo, -1), widened_number(x.least, -1)
    if x.least >= 0:  # so are the values of a function
        lo, least = Maximum(lo, AsFloat(_ZERO)), max(0.0, least)
    return FloatRange(lo, widened_end(x.hi, 1), x.defined, least, widened_number(x.most, 1))


def _monotone(record: Monotone) -> Callable[..., FloatRange]:
    def rule(expr: sympy.Expr, x: FloatRange) -> FloatRange:
        domain = sympy.true if record.from_on is None else _at_least(x, record.from_on)
        ends = (x.hi, x.lo) if record.falls else (x.lo, x.hi)
        lo, hi = (expr.func(AsFloat(end)) for end in ends)
        return _widened(FloatRange(lo, hi, sympy.And(x.defined, domain), record.least, record.most))

    return rule


def _bounded(record: Bounded) -> Callable[..., FloatRange]:
    def rule(expr: sympy.Expr, *parts: FloatRange) -> FloatRange:
        defined = sympy.And(*(part.defined for part in parts))
        if record.finite_only:
            defined = sympy.And(defined, *map(_is_finite, parts))
        end, number = record.bound + SLACK, record.bound + 0.125
        return FloatRange(-end, end, defined, -number, number)

    return rule


RULES: dict[type[sympy.Basic], Callable[..., FloatRange]] = {
    AsFloat: lambda expr, x: _applied(AsFloat, x),
    FloatSum: _sum,
    FloatProduct: _product,
    FloatQuotient: _quotient,
    FloatPower: _power,
    sympy.Mul: _negation,
    Abs: lambda expr, x: _absolute(x),
    Minimum: _extremum,
    Maximum: _extremum,
    Floor: lambda expr, x: _applied(Floor, x),
    Round: lambda expr, x: _applied(Round, x),
    FloorDiv: _floor_quotient,
    FloorMod: _remainder,
}
for _record in FUNCTIONS.values():
    if isinstance(_record.interval, Monotone):
        RULES[_record] = _monotone(_record.interval)
    elif isinstance(_record.interval, Bounded):
        RULES[_record] = _bounded(_record.interval)
