"""Operations of floats as sympy functions that sympy does not simplify.

sympy calculates with real numbers, and floats are none: ``x - x`` is NaN for an infinite x,
``(i * 0.1) * 10`` is not always i, and a product of large numbers is infinite. Each operation of
floats in a mod is therefore a node of its own, which denotes one rounded operation of IEEE 754 on
exactly its arguments, as torch computes it. Only identities that hold for every float are applied.
Integers keep sympy's algebra.

An integer among the arguments is converted, and a number is a literal: both are rounded to float32.
``a - b`` is the sum of a and -b. The negation ``-x`` is exact and remains sympy's.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
from sympy.core.sorting import default_sort_key
from sympy.printing.precedence import PRECEDENCE

from flashgen.spec.language.comparisons import FloatEqual, relation
from flashgen.spec.language.float_functions import Log
from flashgen.spec.language.symbols import BATCH, HEADS, SEQ_K, SEQ_Q, is_int, with_args
from flashgen.spec.language.sympy_functions import RealFunction, unless


class AsFloat(RealFunction):
    """An integer, converted to float32. ``AsFloat(2)`` is the literal 2.0."""

    nargs = (1,)

    form = staticmethod(lambda x: x)
    slope = staticmethod(lambda x: sympy.S.One)

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        return None if is_int(x) else x

    # A literal has the sign of its number.

    def _eval_is_zero(self) -> Any:
        return self.args[0].is_zero

    def _eval_is_positive(self) -> Any:
        return self.args[0].is_positive

    def _eval_is_negative(self) -> Any:
        return self.args[0].is_negative


def plain(x: sympy.Expr) -> sympy.Expr:
    """An argument of an operation without its conversion, which the operation implies."""
    return x.args[0] if isinstance(x, AsFloat) else x


def negative(x: sympy.Expr) -> sympy.Expr:
    """``-x``, exactly: the negative zero is not 0."""
    if isinstance(x, AsFloat) and x.args[0].is_Number and not x.is_zero:
        return AsFloat(-x.args[0])
    return -x


def _positive(x: sympy.Expr) -> sympy.Expr | None:
    """The float that ``x`` negates; None where ``x`` is not written as a negation."""
    if x.is_Number:
        return -x if x.is_negative else None
    if isinstance(x, sympy.Mul) and x.args[0] is sympy.S.NegativeOne and not is_int(x):
        return -x
    return None


class _FloatOperation(RealFunction):
    """One operation of two floats."""

    nargs = (2,)

    def _eval_is_integer(self) -> Any:
        """True of sums, products and powers of floats without a fraction, such as ``floor(x)``."""
        are_whole = all(x.is_integer for x in self.args) and not all(map(is_int, self.args))
        return True if are_whole and self._keeps_integers() else None

    def _keeps_integers(self) -> bool:
        return True


class FloatSum(_FloatOperation):
    """``a + b``. A sum with 0 is not b itself, which may be the negative zero."""

    precedence = PRECEDENCE["Add"]
    form = staticmethod(operator.add)
    slope = staticmethod(lambda a, b: sympy.S.One)

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        first, second = sorted((plain(a), plain(b)), key=default_sort_key)
        return None if (first, second) == (a, b) else cls(first, second)


class FloatProduct(_FloatOperation):
    """``a * b``, without the signs of its factors."""

    precedence = PRECEDENCE["Mul"]
    form = staticmethod(operator.mul)

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        first, second = sorted((plain(a), plain(b)), key=default_sort_key)
        for factor, other in ((first, second), (second, first)):
            positive = _positive(factor)
            if positive is not None:
                return negative(cls(positive, other))
            if factor is sympy.S.One:
                return AsFloat(other)
        return None if (first, second) == (a, b) else cls(first, second)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return _as_factor(self.args[2 - argindex])


class FloatQuotient(_FloatOperation):
    """``a / b``, without the signs of its arguments."""

    precedence = PRECEDENCE["Mul"]
    form = staticmethod(operator.truediv)

    @property
    def has_poles(self) -> bool:
        """Whether the divisor can be 0. A size of a call cannot: without rows there is no score."""
        return self.args[1] not in (BATCH, HEADS, SEQ_Q, SEQ_K)

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        above, below = plain(a), plain(b)
        if (positive := _positive(above)) is not None:
            return negative(cls(positive, below))
        if (positive := _positive(below)) is not None:
            return negative(cls(above, positive))
        if below is sympy.S.One:
            return AsFloat(above)
        return None if (above, below) == (a, b) else cls(above, below)

    def _keeps_integers(self) -> bool:
        return False

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        a, b = self.args
        if argindex == 1:
            return 1 / b if b.is_number else FloatQuotient(sympy.S.One, b)
        return -_as_factor(a) / _as_factor(b) ** 2


class FloatPower(_FloatOperation):
    """``a ** b``."""

    precedence = PRECEDENCE["Pow"]
    form = staticmethod(operator.pow)

    @property
    def has_poles(self) -> bool:
        return not (self.args[1].is_integer and self.args[1].is_nonnegative)

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        base, exponent = plain(a), plain(b)
        if exponent is sympy.S.Zero or base is sympy.S.One:
            return AsFloat(sympy.S.One)  # where the other is NaN too
        if exponent is sympy.S.One:
            return AsFloat(base)
        return None if (base, exponent) == (a, b) else cls(base, exponent)

    def _keeps_integers(self) -> bool:
        return bool(self.args[1].is_nonnegative)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        """The derivative of torch: without a division by the base, 0 where the exponent is 0."""
        a, n = map(_as_factor, self.args)
        if argindex == 1 and n.is_number:
            return n * a ** (n - 1)
        if argindex == 1:
            slope = n * FloatPower(a, FloatSum(n, -1))
            return unless(FloatEqual(n, 0), slope)
        if a.is_number and a.is_positive:
            return self * Log(a)
        none = sympy.And(FloatEqual(a, sympy.S.Zero), relation(sympy.Ge, n, sympy.S.Zero))
        return unless(none, self * Log(a))


def _as_factor(x: sympy.Expr) -> sympy.Expr:
    """An argument as a factor of a derivative, in which sympy must not multiply out integers."""
    return x if x.is_number else AsFloat(x)


def in_reals(expr: sympy.Basic) -> sympy.Basic:
    """The expression with sympy's arithmetic, as if no operation rounded: for proofs and counts."""
    if expr in (sympy.oo, -sympy.oo):
        return _INFINITY if expr is sympy.oo else -_INFINITY
    args = [in_reals(arg) for arg in expr.args]
    if isinstance(expr, FloatPower) and args[0].args and not args[1].is_Integer:
        # sympy would ask for the sign of the base, in time exponential in the roots inside it.
        return sympy.Pow(*args, evaluate=False)
    if isinstance(expr, AsFloat | _FloatOperation):
        assert expr.form is not None
        return expr.form(*args)
    # Comparisons of floats remain: sympy rewrites its own comparisons in a choice that is a power's
    # base, dividing by the factor of the unknown, which is 0 where both sides are numbers.
    return with_args(expr, args)


_INFINITY = sympy.Symbol("inf", positive=True)

NAN = FloatSum(sympy.oo, -sympy.oo, evaluate=False)
"""The literal NaN; sympy's own swallows everything that it is combined with."""
