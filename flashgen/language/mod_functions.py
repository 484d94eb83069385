"""The functions for mods: ``fg.where``, ``fg.exp`` and so on.

Each takes traced values and Python numbers. Given only Python numbers, it returns a traced
constant, so that ``fg.sqrt(2) * score`` works.
"""

from __future__ import annotations

import sympy

from flashgen.language.operators import absolute_value
from flashgen.language.python_printer import python_text
from flashgen.language.symbols import is_condition
from flashgen.language.sympy_functions import Floor, Log2, Maximum, Minimum, Sigmoid
from flashgen.language.traced import Operand, Traced, apply_function, as_expr, made
from flashgen.language.user_source import refuse


def where(condition: Operand, a: Operand, b: Operand) -> Traced:
    """``a`` where ``condition`` holds, else ``b``; both are numbers or both are conditions."""
    test, yes, no = as_expr(condition), as_expr(a), as_expr(b)
    if not is_condition(test):
        refuse(
            "the first argument of fg.where is a condition, this is a number",
            numbers=f"operand {python_text(test)}",
            way_out="a comparison, as in fg.where(q < k, a, b)",
        )
    if is_condition(yes) != is_condition(no):
        refuse(
            "fg.where chooses between two numbers or two conditions, not one of each",
            numbers=f"{python_text(yes)} and {python_text(no)}",
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
    # Without evaluate=False sympy would rewrite the user's conditions.
    return sympy.Piecewise((yes, _without_choices(test)), (no, True), evaluate=False)


def _without_choices(test: sympy.Basic) -> sympy.Basic:
    """The condition without a Piecewise inside, which sympy would turn into an ITE."""
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
    return apply_function("minimum", Minimum, a, b)


def maximum(a: Operand, b: Operand) -> Traced:
    """The greater of two numbers."""
    return apply_function("maximum", Maximum, a, b)


def exp(x: Operand) -> Traced:
    """e to the power x."""
    return apply_function("exp", sympy.exp, x)


def log(x: Operand) -> Traced:
    """Natural logarithm."""
    return apply_function("log", sympy.log, x)


def log2(x: Operand) -> Traced:
    """Logarithm to base 2."""
    return apply_function("log2", Log2, x)


def sqrt(x: Operand) -> Traced:
    """Square root."""
    return apply_function("sqrt", sympy.sqrt, x)


def tanh(x: Operand) -> Traced:
    """Hyperbolic tangent."""
    return apply_function("tanh", sympy.tanh, x)


def sigmoid(x: Operand) -> Traced:
    """1 / (1 + exp(-x))."""
    return apply_function("sigmoid", Sigmoid, x)


def absolute(x: Operand) -> Traced:
    """Absolute value; exported as ``fg.abs``."""
    return apply_function("abs", absolute_value, x)


def sin(x: Operand) -> Traced:
    """Sine of x in radians."""
    return apply_function("sin", sympy.sin, x)


def cos(x: Operand) -> Traced:
    """Cosine of x in radians."""
    return apply_function("cos", sympy.cos, x)


def floor(x: Operand) -> Traced:
    """The greatest integer that is at most x."""
    return apply_function("floor", Floor, x)
