"""The functions for mods: ``fg.where``, ``fg.exp`` and the rest.

Each takes traced values and Python numbers. On Python numbers alone it returns a traced constant,
so that ``fg.sqrt(2) * score`` works.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy

from .functions import Floor, Log2, Maximum, Minimum, Sigmoid
from .shown import shown
from .symbols import is_condition
from .traced import Operand, Traced, as_expr, made, refuse


def _number(name: str, value: object) -> sympy.Expr:
    expr = as_expr(value)
    if is_condition(expr):
        refuse(
            f"fg.{name} is for numbers, this is a condition",
            numbers=f"operand {shown(expr)}",
            way_out="fg.where(condition, 1, 0) to make a number of a condition",
        )
    return expr


def _apply(name: str, function: Callable[..., sympy.Expr], *values: object) -> Traced:
    return made(function(*(_number(name, value) for value in values)), *values)


def where(condition: Operand, a: Operand, b: Operand) -> Traced:
    """``a`` where ``condition`` holds, else ``b``; both are numbers or both are conditions."""
    test, yes, no = as_expr(condition), as_expr(a), as_expr(b)
    if not is_condition(test):
        refuse(
            "the first argument of fg.where is a condition, this is a number",
            numbers=f"operand {shown(test)}",
            way_out="a comparison, as in fg.where(q < k, a, b)",
        )
    if is_condition(yes) != is_condition(no):
        refuse(
            "fg.where chooses between two numbers or two conditions, not one of each",
            numbers=f"{shown(yes)} and {shown(no)}",
            way_out="fg.where(condition, 1, 0) to make a number of a condition",
        )
    return made(choose(test, yes, no), condition, a, b)


def choose(test: sympy.Basic, yes: sympy.Basic, no: sympy.Basic) -> sympy.Basic:
    """The expression of ``where``."""
    if is_condition(yes):
        return sympy.Or(sympy.And(test, yes), sympy.And(sympy.Not(test), no))
    if test == sympy.true or yes == no:
        return yes
    if test == sympy.false:
        return no
    # sympy would rewrite the conditions of a Piecewise; the kernel keeps the user's.
    return sympy.Piecewise((yes, _without_choices(test)), (no, True), evaluate=False)


def _without_choices(test: sympy.Basic) -> sympy.Basic:
    """The condition with no Piecewise inside, for sympy would make another kind of choice of it."""
    if isinstance(test, sympy.And | sympy.Or | sympy.Not):
        return test.func(*map(_without_choices, test.args))
    inner = next(iter(sympy.ordered(test.atoms(sympy.Piecewise))), None)
    if inner is None:
        return test
    cases, before = [], sympy.true
    for value, condition in inner.args:
        case = test.xreplace({inner: value})
        cases.append(sympy.And(before, condition, _without_choices(case)))
        before = sympy.And(before, sympy.Not(condition))
    return sympy.Or(*cases)


def minimum(a: Operand, b: Operand) -> Traced:
    """The lesser of two numbers."""
    return _apply("minimum", Minimum, a, b)


def maximum(a: Operand, b: Operand) -> Traced:
    """The greater of two numbers."""
    return _apply("maximum", Maximum, a, b)


def exp(x: Operand) -> Traced:
    """e to the power x."""
    return _apply("exp", sympy.exp, x)


def log(x: Operand) -> Traced:
    """Natural logarithm."""
    return _apply("log", sympy.log, x)


def log2(x: Operand) -> Traced:
    """Logarithm to base 2."""
    return _apply("log2", Log2, x)


def sqrt(x: Operand) -> Traced:
    """Square root."""
    return _apply("sqrt", sympy.sqrt, x)


def tanh(x: Operand) -> Traced:
    """Hyperbolic tangent."""
    return _apply("tanh", sympy.tanh, x)


def sigmoid(x: Operand) -> Traced:
    """1 / (1 + exp(-x))."""
    return _apply("sigmoid", Sigmoid, x)


def absolute(x: Operand) -> Traced:
    """Absolute value; exported as ``fg.abs``."""
    return _apply("abs", _absolute, x)


def _absolute(x: sympy.Expr) -> sympy.Expr:
    # Of what might be complex, sympy takes the modulus: square roots of products with conjugates.
    return sympy.Abs(x) if x.is_real else Maximum(x, -x)


def sin(x: Operand) -> Traced:
    """Sine of x in radians."""
    return _apply("sin", sympy.sin, x)


def cos(x: Operand) -> Traced:
    """Cosine of x in radians."""
    return _apply("cos", sympy.cos, x)


def floor(x: Operand) -> Traced:
    """The greatest integer that is at most x."""
    return _apply("floor", Floor, x)
