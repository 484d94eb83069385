"""sympy functions of flashgen, where sympy's own evaluate or differentiate differently from torch.

========== ============================================================================
FloorDiv   floor(a / b) of integers or reals, as ``//``; of integers 0 where b is 0
FloorMod   the remainder with the divisor's sign, as ``%``; of integers 0 where b is 0
Minimum    the least of its arguments; equal arguments share the derivative
Maximum    the greatest of its arguments
Floor      round down; derivative 0, as in torch
Round      to the nearest integer, halves to the even one; derivative 0, as in torch
Select     Select(condition, a, b); in results of the analysis only, ``where`` is a Piecewise
========== ============================================================================

All are real: outside its domain a function is NaN, never complex. A function of floats is never
simplified. Only Piecewise is sympy's own.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from math import floor, gcd
from typing import Any

import sympy
from sympy.core.sorting import default_sort_key

from flashgen.spec.language.comparisons import relation
from flashgen.spec.language.symbols import is_int


class RealFunction(sympy.Function):  # type: ignore[misc]
    """A function whose values are real for all arguments."""

    def _eval_is_real(self) -> bool:
        return True

    form: Callable[..., sympy.Expr] | None = None
    """The function as sympy has it, for the values of numbers."""

    slope: Callable[..., sympy.Expr]
    """The derivative at the arguments, of functions for which that by each has one form."""

    @property
    def has_poles(self) -> bool:
        """Whether finite arguments can give an infinity or NaN."""
        return False

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return self.slope(*self.args)

    def _eval_evalf(self, prec: int) -> sympy.Expr | None:
        if self.form is None:
            return None
        # Of decimals: the exact power of two integers has any number of digits.
        return self.form(*(sympy.N(arg, max(15, int(prec * 0.302))) for arg in self.args))

    def _eval_derivative(self, by: sympy.Symbol) -> sympy.Expr:
        return _derivative(self, by)


@lru_cache(maxsize=1 << 12)
def _derivative(function: RealFunction, by: sympy.Symbol) -> sympy.Expr:
    """The derivative by sympy's chain rule, computed once for a part that a function uses twice."""
    terms = []
    for index, arg in enumerate(function.args, 1):
        is_function = isinstance(arg, RealFunction)
        inner = arg._eval_derivative(by) if is_function else arg.diff(by)
        if inner != 0:
            terms.append(_chained(function.fdiff(index), inner))
    return sympy.Add(*terms)


def _chained(outer: sympy.Expr, inner: sympy.Expr) -> sympy.Expr:
    """The product of two slopes; 0 where choices ignore the argument, as torch selects gradients.

    There the other slope may be infinite or NaN, as that of the root of ``fg.maximum(x, 0)`` is.
    """
    ignored = _is_ignored(inner) if _may_be_infinite(outer) else sympy.false
    if ignored == sympy.false:
        return outer * inner
    return unless(ignored, outer * inner)


def unless(condition: sympy.Basic, slope: sympy.Expr) -> sympy.Expr:
    """A slope, or 0 where the condition holds."""
    return sympy.Piecewise((0, condition), (slope, True), evaluate=False)


def _may_be_infinite(slope: sympy.Expr) -> bool:
    """Whether a slope may be infinite or NaN at finite arguments, or has an infinite literal."""
    if slope.is_number:
        return not slope.is_finite
    if isinstance(slope, sympy.Pow) and not slope.exp.is_nonnegative:
        return True
    return getattr(slope, "has_poles", False) or any(map(_may_be_infinite, slope.args))


def _is_ignored(slope: sympy.Basic) -> sympy.Basic:
    """The condition on which the choices in a slope make it 0."""
    if isinstance(slope, sympy.Piecewise):
        cases: list[sympy.Basic] = []
        others: list[sympy.Basic] = []
        for value, test in slope.args:
            ignored = _is_ignored(value)
            cases.append(sympy.And(test, ignored, *map(sympy.Not, others)))
            if ignored != sympy.true:
                others.append(test)
        return sympy.Or(*cases)
    if isinstance(slope, sympy.Mul):
        return sympy.Or(*map(_is_ignored, slope.args))
    if isinstance(slope, sympy.Add):
        return sympy.And(*map(_is_ignored, slope.args))
    return sympy.true if slope == 0 else sympy.false


class FloorDiv(RealFunction):
    """``floor(a / b)``. Where b is 0, the quotient is 0 for integers, as in IEEE 754 for floats."""

    nargs = (2,)
    integer_closed = True
    natural = False
    form = staticmethod(lambda a, b: sympy.floor(a / b))
    slope = staticmethod(lambda a, b: sympy.S.Zero)

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if not (is_int(a) and is_int(b)):
            return None
        if b.is_zero:
            return sympy.nan
        if a.is_zero:
            return sympy.S.Zero
        if a == b and b.is_nonzero:
            return sympy.S.One
        if b.is_Integer:
            return cls._constant(a, int(b))
        return None

    @classmethod
    def _constant(cls, a: sympy.Expr, b: int) -> sympy.Expr | None:
        if a.is_Integer:
            return sympy.Integer(int(a) // b)
        if b < 0:
            return cls(-a, -b)
        if b == 1:
            return a
        if isinstance(a, cls) and a.args[1].is_Integer and 0 < a.args[1] * b < 2**62:
            return cls(a.args[0], a.args[1] * b)
        whole, rest, common = [], [], b
        for term in sympy.Add.make_args(a):
            coefficient = int(term.as_coeff_Mul()[0])
            if term.is_Integer:
                whole.append(sympy.Integer(coefficient // b))
                rest.append(sympy.Integer(coefficient % b))
                coefficient = coefficient % b
            elif coefficient % b == 0:
                whole.append(term / b)
                continue
            else:
                rest.append(term)
            common = gcd(common, coefficient)
        inner = sympy.Add(*rest)
        if common > 1:
            return sympy.Add(*whole) + cls(sympy.expand_mul(inner / common), b // common)
        if inner != a:
            return sympy.Add(*whole) + cls(inner, b)
        return None

    def _eval_is_integer(self) -> Any:
        return True if all(arg.is_real for arg in self.args) else None

    def _eval_is_nonnegative(self) -> Any:
        a, b = self.args
        if b.is_nonnegative and a.is_nonnegative is not None:
            return a.is_nonnegative
        return None


class FloorMod(RealFunction):
    """``a - b * floor(a / b)``. Where b is 0, the remainder of integers is 0 and of floats NaN."""

    nargs = (2,)
    integer_closed = True
    natural = False
    form = staticmethod(lambda a, b: a - b * sympy.floor(a / b))

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if not (is_int(a) and is_int(b)):
            return None
        if b.is_zero:
            return sympy.nan
        if a.is_zero or a == b:
            return sympy.S.Zero
        if b.is_Integer:
            return cls._constant(a, int(b))
        if isinstance(a, cls) and a.args[1] == b:
            return a
        return None

    @classmethod
    def _constant(cls, a: sympy.Expr, b: int) -> sympy.Expr | None:
        if a.is_Integer:
            return sympy.Integer(int(a) % b)
        if b < 0:
            return -cls(-a, -b)
        if b == 1:
            return sympy.S.Zero
        if isinstance(a, cls) and a.args[1] == b:
            return a
        terms = []
        for term in sympy.Add.make_args(a):
            coefficient, rest = term.as_coeff_Mul()
            if term.is_Integer or int(coefficient) % b == 0:
                coefficient = sympy.Integer(int(coefficient) % b)
            terms.append(coefficient * rest)
        inner = sympy.Add(*terms)
        return cls(inner, b) if inner != a else None

    def _eval_is_integer(self) -> Any:
        return True if all(arg.is_integer for arg in self.args) else None

    def _eval_is_nonnegative(self) -> Any:
        return True if self.args[1].is_nonnegative else None

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return sympy.S.One if argindex == 1 else -FloorDiv(*self.args)


class _Extremum(RealFunction):
    """The common part of Minimum and Maximum: distinct, sorted arguments without nesting."""

    integer_closed = True
    _least = True

    def __new__(cls, *args: object, **options: object) -> sympy.Expr:
        flat: list[sympy.Expr] = []
        for arg in map(sympy.sympify, args):
            flat.extend(arg.args if isinstance(arg, cls) else (arg,))
        extremes = flat if options.get("evaluate") is False else []
        for arg in [] if extremes else flat:
            if not any(cls._dominates(other, arg) for other in extremes):
                extremes = [other for other in extremes if not cls._dominates(arg, other)] + [arg]
        if len(extremes) == 1:
            return extremes[0]
        return super().__new__(cls, *sorted(extremes, key=default_sort_key), evaluate=False)

    @classmethod
    def _dominates(cls, winner: sympy.Expr, loser: sympy.Expr) -> bool:
        """True if ``loser`` never determines the extremum beside ``winner``."""
        if winner == loser:
            return True
        if not (is_int(winner) and is_int(loser)):
            return False  # a float may be NaN, which always determines the result
        margin = winner - loser
        # sympy finds the signs of the terms faster than the sign of a sum of several symbols.
        parts = sympy.Add.make_args(margin) if len(margin.free_symbols) > 1 else (margin,)
        return all(part.is_nonpositive if cls._least else part.is_nonnegative for part in parts)

    def _eval_is_integer(self) -> Any:
        return True if all(arg.is_integer for arg in self.args) else None

    def _eval_is_nonnegative(self) -> Any:
        return self._decided([arg.is_nonnegative for arg in self.args])

    def _eval_is_positive(self) -> Any:
        return self._decided([arg.is_positive for arg in self.args])

    def _decided(self, signs: list[bool | None]) -> bool | None:
        return True if (all(signs) if self._least else any(signs)) else None

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        """1 where this argument alone is the extremum; 1/2 at a tie, as in torch's autograd."""
        arg = self.args[argindex - 1]
        others = self.args[: argindex - 1] + self.args[argindex:]
        other = type(self)(*others)
        wins = relation(sympy.Lt if self._least else sympy.Gt, arg, other)
        is_tie = relation(sympy.Eq, arg, other)
        share = sympy.Rational(1, 2)
        return sympy.Piecewise((1, wins), (share, is_tie), (0, True), evaluate=False)


class Minimum(_Extremum):
    """The least of its arguments; NaN where one is NaN."""

    form = staticmethod(sympy.Min)


class Maximum(_Extremum):
    """The greatest of its arguments; NaN where one is NaN."""

    form = staticmethod(sympy.Max)
    _least = False


class _Rounding(RealFunction):
    """A function to integers, whose value for a fraction is ``compute``. Its derivative is 0."""

    nargs = (1,)
    slope = staticmethod(lambda x: sympy.S.Zero)
    compute: Callable[[Fraction], int]

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        if is_int(x):
            return x
        return sympy.Integer(cls.compute(Fraction(int(x.p), int(x.q)))) if x.is_Rational else None

    def _eval_is_integer(self) -> Any:
        return self.args[0].is_real


class Floor(_Rounding):
    """Round down."""

    form = staticmethod(sympy.floor)
    compute = staticmethod(floor)


class Round(_Rounding):
    """Round to the nearest integer, halves to the even one."""

    form = staticmethod(lambda x: sympy.Integer(round(x)))
    compute = staticmethod(round)


class Select(RealFunction):
    """``a`` where the condition holds, else ``b``.

    Unlike a Piecewise, it never rewrites its condition, even one that compares other choices.
    """

    nargs = (3,)

    @classmethod
    def eval(cls, test: sympy.Basic, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if test == sympy.true or a == b:
            return a
        if test == sympy.false:
            return b
        # A choice by the same condition is decided within the values.
        decided = [
            value.args[index] if isinstance(value, Select) and value.args[0] == test else value
            for index, value in ((1, a), (2, b))
        ]
        return None if decided == [a, b] else cls(test, *decided)

    def _eval_is_integer(self) -> Any:
        return True if all(arg.is_integer for arg in self.args[1:]) else None


def branches_of(choice: sympy.Expr) -> tuple[list[tuple[sympy.Expr, sympy.Basic]], sympy.Expr]:
    """The values of a Piecewise or a Select with their conditions, and the value of all others."""
    if isinstance(choice, Select):
        return [(choice.args[1], choice.args[0])], choice.args[2]
    *branches, (last, _) = choice.args
    return branches, last
