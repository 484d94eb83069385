"""The operators of mods on sympy expressions, with their checks."""

from __future__ import annotations

from collections.abc import Callable

import sympy

from flashgen.spec.language.bit_functions import BitAnd, BitOr, BitXor, ShiftLeft, ShiftRight
from flashgen.spec.language.comparisons import FLOAT_RELATIONS, MIRRORED, as_float32
from flashgen.spec.language.divisors import check_divisors
from flashgen.spec.language.float_operations import (
    FloatPower,
    FloatProduct,
    FloatQuotient,
    FloatSum,
    negative,
    plain,
)
from flashgen.spec.language.integer_limits import KERNEL_BITS, decided, limits, magnitude, too_large
from flashgen.spec.language.lets import contains
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.symbols import is_condition, is_int
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod, Maximum, Minimum
from flashgen.spec.language.tensor_elements import TensorRead
from flashgen.spec.language.user_source import refuse


def combined(operator: str, a: sympy.Basic, b: sympy.Basic) -> sympy.Basic:
    """``a operator b`` with the meaning that torch gives it, elementwise.

    Raises:
        SpecError: a condition where a number belongs or the other way round, a division by 0, or
            integers that may be too large for kernels.
    """
    if operator in _BIT_OPERATORS and is_int(a) and is_int(b):
        if operator in ("<<", ">>"):
            b = _shift_distance(operator, a, b)
        _check_integers(operator, a, b)
        return _BIT_OPERATORS[operator](a, b)
    if operator in ("<<", ">>"):
        refuse(
            f"{operator} is for integers",
            numbers=_both(operator, a, b),
            way_out="x * 2**n and x / 2**n for floats",
        )
    if operator in _CONDITION_OPERATORS:
        a, b = as_condition(a), as_condition(b)
        if not (is_condition(a) and is_condition(b)):
            refuse(
                f"{operator} is for two conditions or two integers",
                numbers=_both(operator, a, b),
                way_out=f"brackets around comparisons, as in (q >= k) {operator} (q - k < 128): "
                f"{operator} binds tighter than < and ==",
            )
        return _CONDITION_OPERATORS[operator](a, b)
    if is_condition(a) and is_condition(b) and operator in ("==", "!="):
        same = sympy.Or(sympy.And(a, b), sympy.And(sympy.Not(a), sympy.Not(b)))
        return same if operator == "==" else sympy.Not(same)
    if is_condition(a) or is_condition(b):
        refuse(
            f"{operator} is for numbers, and one side is a condition",
            numbers=_both(operator, a, b),
            way_out="fg.where(condition, 1, 0) to make a number of a condition",
        )
    if operator in ("/", "//", "%") and b.is_zero:
        refuse(
            f"{operator} by 0",
            numbers=_both(operator, a, b),
            way_out="a divisor that is not 0",
        )
    if operator in _EXACT_OPERATORS:
        _check_integers(operator, a, b)
    if operator in _RELATIONS:
        return compare(_RELATIONS[operator], a, b)
    in_integers = is_int(a) and is_int(b) and (operator != "**" or b in _EXACT_POWERS)
    if in_integers and operator in ("*", "**"):
        _check_growth(operator, a, b)
    result = (_INTEGER_OPERATORS if in_integers else _FLOAT_OPERATORS)[operator](a, b)
    if operator in ("//", "%"):
        check_divisors(result, a, b)
    return result


def as_condition(expr: sympy.Basic) -> sympy.Basic:
    """An integer that a captured tensor holds as the condition that it is not 0."""
    if not is_condition(expr) and is_int(expr) and contains(expr, TensorRead):
        return sympy.Ne(expr, 0)
    return expr


def _shift_distance(operator: str, x: sympy.Expr, n: sympy.Expr) -> sympy.Expr:
    most = LARGEST_SHIFTS[operator]
    if n.is_Integer and not 0 <= n <= most:
        refuse(
            f"{operator} by a number that is not from 0 to {most}",
            numbers=f"by {n}",
            way_out="a product with 2**n, or a quotient",
        )
    low, high = limits(n)
    farthest = _BIT_OPERATORS[operator].farthest(limits(x))
    if low < 0:
        n = Maximum(n, 0)
    return Minimum(n, farthest) if high > farthest else n


def _check_integers(operator: str, a: sympy.Expr, b: sympy.Expr) -> None:
    for side, other in ((a, b), (b, a)):
        is_exact = is_int(side) and (is_int(other) or not side.is_number)
        part = too_large(side) if is_exact else None
        if part is not None:
            refuse(
                f"{operator} of integers that can be too large for kernels",
                numbers=f"{python_text(part)} can reach 2^{magnitude(part).bit_length() - 1}, for "
                "positions up to 2^28 and int32 scalars up to 2^30; the limit is below "
                f"2^{KERNEL_BITS}",
                way_out="smaller factors, as elements of int16 Tensors are, or 1.0 as a first "
                "factor, which makes a float of the product",
            )


def _check_growth(operator: str, a: sympy.Expr, b: sympy.Expr) -> None:
    """Refuses products of integers that no type of a kernel can hold, before they are computed."""
    bits = [max(map(abs, limits(x))).bit_length() for x in (a, b)]
    size = bits[0] * int(b) if operator == "**" else sum(bits)
    if size > _MOST_BITS:
        refuse(
            f"{operator} of integers that become too large",
            numbers=f"the result can reach 2^{size}; integers have 64 bits in kernels, and floats "
            "end at 2^128",
            way_out="% to keep integers small, or 1.0 as a first factor for a float",
        )


def _both(operator: str, a: sympy.Basic, b: sympy.Basic) -> str:
    left, right = (
        text if text.isalnum() else f"({text})" for text in (python_text(a), python_text(b))
    )
    return f"{left} {operator} {right}"


def _exclusive(a: sympy.Basic, b: sympy.Basic) -> sympy.Basic:
    return sympy.Or(sympy.And(a, sympy.Not(b)), sympy.And(sympy.Not(a), b))


def compare(kind: type[sympy.Basic], a: sympy.Expr, b: sympy.Expr) -> sympy.Basic:
    """``kind(a, b)``, as a comparison of integers if both sides are integers."""
    if is_int(a) and is_int(b):
        # sympy would try in vain to decide it, which takes long.
        truth = decided(kind, a, b)
        return kind(a, b, evaluate=False) if truth is None else sympy.sympify(truth)
    for x, literal, relation in ((a, b, kind), (b, a, MIRRORED[kind])):
        bound = _whole_bound(relation, plain(literal)) if is_int(x) else None
        if bound is not None:
            return compare(bound[0], x, bound[1])
    return FLOAT_RELATIONS[kind](a, b)


def _whole_bound(
    kind: type[sympy.Basic], literal: sympy.Expr
) -> tuple[type[sympy.Basic], sympy.Expr] | None:
    """The comparison with an integer that equals ``kind(x, literal)`` for every integer x, or None.

    The rounding of x to float32 does not change its order with small numbers.
    """
    if not literal.is_Rational or abs(literal) > _LARGEST_EXACT:
        return None
    rounded = sympy.Rational(as_float32(literal))
    if rounded.is_Integer:
        return kind, rounded
    if kind in (sympy.Lt, sympy.Le):
        return sympy.Le, sympy.floor(rounded)
    return (sympy.Ge, sympy.ceiling(rounded)) if kind in (sympy.Gt, sympy.Ge) else None


_LARGEST_EXACT = 2**23

_MOST_BITS = 2048
"""Bits of the largest integer that an expression may have, which only floats can stand for."""

_EXACT_POWERS = range(63)
"""The exponents of integers; only 0, 1 and -1 have larger powers in 64 bits."""

LARGEST_SHIFTS = {"<<": 60, ">>": 63}

_BIT_OPERATORS: dict[str, type[sympy.Expr]] = {
    "&": BitAnd,
    "|": BitOr,
    "^": BitXor,
    "<<": ShiftLeft,
    ">>": ShiftRight,
}

_EXACT_OPERATORS = ("<", "<=", ">", ">=", "==", "!=", "//", "%")

_CONDITION_OPERATORS: dict[str, Callable[[sympy.Basic, sympy.Basic], sympy.Basic]] = {
    "&": sympy.And,
    "|": sympy.Or,
    "^": _exclusive,
}

_INTEGER_OPERATORS: dict[str, Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": FloatQuotient,
    "//": FloorDiv,
    "%": FloorMod,
    "**": lambda a, b: a**b,
}

_FLOAT_OPERATORS = _INTEGER_OPERATORS | {
    "+": FloatSum,
    "-": lambda a, b: FloatSum(a, negative(b)),
    "*": FloatProduct,
    "**": FloatPower,
}

_RELATIONS = {kind.rel_op: kind for kind in FLOAT_RELATIONS}
