"""Comparisons of floats, as IEEE 754 defines them.

sympy's relations are those of real numbers: the opposite of ``a < b`` is ``a >= b``, and equal
terms of both sides cancel. With NaN both comparisons are false, and with rounding or infinities
nothing cancels. The relations of this module are never simplified or negated, except between two
numbers. They are subclasses of sympy's, with ``lhs`` and ``rhs``; `sympy.Not` of one stays a Not.
"""

from __future__ import annotations

import operator
from ctypes import c_float
from typing import Any

import sympy

from flashgen.spec.language.symbols import is_int


def as_float32(number: sympy.Expr) -> float:
    """The float32 that kernels compute with in place of a number, as a Python float."""
    return float(c_float(float(number)).value)


class _Negation(sympy.Not):  # type: ignore[misc]
    """The attribute that sympy's choices ask a relation for, to find its opposite condition."""

    @property
    def canonical(self) -> sympy.Basic:
        return sympy.Not(self.args[0])


class FloatRelation:
    """The common part of comparisons of two numbers that are not both integers."""

    is_Relational = False  # what sympy would rewrite by the rules of real numbers
    decide: Any  # the same comparison of two Python numbers

    def __new__(cls, a: sympy.Expr, b: sympy.Expr, **_: object) -> Any:
        if a.is_Number and b.is_Number:
            return sympy.true if cls.decide(as_float32(a), as_float32(b)) else sympy.false
        return sympy.Basic.__new__(cls, sympy.sympify(a), sympy.sympify(b))

    @property
    def reversed(self) -> Any:
        """The same comparison with its sides exchanged."""
        mirrored = FLOAT_RELATIONS[MIRRORED[REAL_RELATIONS[type(self)]]]
        return mirrored(*reversed(self.args))  # type: ignore[attr-defined]

    @property
    def negated(self) -> sympy.Basic:
        """The condition that the comparison is false. The opposite comparison is another condition:
        where a side is NaN, both are false."""
        return _Negation(self)

    @property
    def weak(self) -> Any:
        """The comparison that also holds for equal sides; sympy's choices ask for it."""
        kind = _WEAK.get(REAL_RELATIONS[type(self)])
        return FLOAT_RELATIONS[kind](*self.args) if kind else self  # type: ignore[attr-defined]


class FloatLess(FloatRelation, sympy.StrictLessThan):  # type: ignore[misc]
    """``a < b``"""

    decide = operator.lt


class FloatLessEqual(FloatRelation, sympy.LessThan):  # type: ignore[misc]
    """``a <= b``"""

    decide = operator.le


class FloatGreater(FloatRelation, sympy.StrictGreaterThan):  # type: ignore[misc]
    """``a > b``"""

    decide = operator.gt


class FloatGreaterEqual(FloatRelation, sympy.GreaterThan):  # type: ignore[misc]
    """``a >= b``"""

    decide = operator.ge


class FloatEqual(FloatRelation, sympy.Equality):  # type: ignore[misc]
    """``a == b``"""

    decide = operator.eq


class FloatUnequal(FloatRelation, sympy.Unequality):  # type: ignore[misc]
    """``a != b``; true where a side is NaN"""

    decide = operator.ne


FLOAT_RELATIONS: dict[type[sympy.Basic], type[sympy.Basic]] = {
    sympy.StrictLessThan: FloatLess,
    sympy.LessThan: FloatLessEqual,
    sympy.StrictGreaterThan: FloatGreater,
    sympy.GreaterThan: FloatGreaterEqual,
    sympy.Equality: FloatEqual,
    sympy.Unequality: FloatUnequal,
}
"""The comparison of floats for each relation of sympy."""


REAL_RELATIONS = {float_relation: kind for kind, float_relation in FLOAT_RELATIONS.items()}


_WEAK = {sympy.StrictLessThan: sympy.LessThan, sympy.StrictGreaterThan: sympy.GreaterThan}


def relation(kind: type[sympy.Basic], a: sympy.Expr, b: sympy.Expr) -> sympy.Basic:
    """The comparison ``kind(a, b)`` of integers, or of floats where a side is a float."""
    return kind(a, b) if is_int(a) and is_int(b) else FLOAT_RELATIONS[kind](a, b)


MIRRORED = {
    sympy.Lt: sympy.Gt,
    sympy.Le: sympy.Ge,
    sympy.Gt: sympy.Lt,
    sympy.Ge: sympy.Le,
    sympy.Eq: sympy.Eq,
    sympy.Ne: sympy.Ne,
}
"""The relation that holds with exchanged sides."""
