"""Functions of floats as sympy functions that sympy does not simplify.

sympy's own exp, log, tanh, sin, cos and Abs are functions of real or complex numbers: they cancel
one another, and rewrite their arguments. Outside its domain a function of floats is NaN.
"""

from __future__ import annotations

from typing import Any

import sympy

from flashgen.language.comparisons import relation
from flashgen.language.symbols import is_int
from flashgen.language.sympy_functions import RealFunction


class Abs(RealFunction):
    """The absolute value of a float. `sympy.Abs`, that of an integer, rewrites its argument."""

    nargs = (1,)
    form = staticmethod(sympy.Abs)

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        return sympy.Abs(x) if is_int(x) else None

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return sympy.sign(self.args[0])


class Exp(RealFunction):
    """e to the power x."""

    nargs = (1,)
    form = staticmethod(sympy.exp)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return self


class Log(RealFunction):
    """Natural logarithm."""

    nargs = (1,)
    form = staticmethod(sympy.log)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return 1 / self.args[0]


class Log2(RealFunction):
    """Logarithm to base 2."""

    nargs = (1,)

    @staticmethod
    def form(x: sympy.Expr) -> sympy.Expr:
        return sympy.log(x) / sympy.log(2)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return 1 / (self.args[0] * Log(sympy.Integer(2)))


class Tanh(RealFunction):
    """Hyperbolic tangent."""

    nargs = (1,)
    form = staticmethod(sympy.tanh)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return 1 - self**2


class Sin(RealFunction):
    """Sine of x radians."""

    nargs = (1,)
    form = staticmethod(sympy.sin)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return Cos(self.args[0])


class Cos(RealFunction):
    """Cosine of x radians."""

    nargs = (1,)
    form = staticmethod(sympy.cos)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return -Sin(self.args[0])


class Sigmoid(RealFunction):
    """1 / (1 + exp(-x))."""

    nargs = (1,)

    @staticmethod
    def form(x: sympy.Expr) -> sympy.Expr:
        return 1 / (1 + sympy.exp(-x))

    def _eval_is_positive(self) -> Any:
        return self.args[0].is_real

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return self * (1 - self)


class Erf(RealFunction):
    """The error function."""

    nargs = (1,)
    form = staticmethod(sympy.erf)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return 2 / sympy.sqrt(sympy.pi) * Exp(-(self.args[0] ** 2))


class Erfc(RealFunction):
    """1 - erf(x), also where that is tiny."""

    nargs = (1,)
    form = staticmethod(sympy.erfc)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return -2 / sympy.sqrt(sympy.pi) * Exp(-(self.args[0] ** 2))


class Log1p(RealFunction):
    """log(1 + x), also where x is tiny."""

    nargs = (1,)

    @staticmethod
    def form(x: sympy.Expr) -> sympy.Expr:
        return sympy.log(1 + x)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return 1 / (1 + self.args[0])


class Expm1(RealFunction):
    """exp(x) - 1, also where x is tiny."""

    nargs = (1,)

    @staticmethod
    def form(x: sympy.Expr) -> sympy.Expr:
        return sympy.exp(x) - 1

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return Exp(self.args[0])


class Atan2(RealFunction):
    """The angle of the point (x, y) in radians, from -pi to pi."""

    nargs = (2,)
    form = staticmethod(sympy.atan2)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        y, x = self.args
        square = x**2 + y**2
        part = x if argindex == 1 else -y
        none = relation(sympy.Eq, square, sympy.S.Zero)
        return sympy.Piecewise((0, none), (part / square, True), evaluate=False)
