"""Which masks depend on distances of positions, and not on the positions themselves."""

from __future__ import annotations

import sympy
from sympy.core.relational import Relational

from flashgen.spec.language.symbols import K, Q, is_condition
from flashgen.spec.language.tensor_elements import Element

_MOVED = sympy.Dummy("moved", integer=True)
_POSITIONS = {each: sympy.Dummy(each.name, integer=True, nonnegative=True) for each in (Q, K)}


def is_of_distances(expr: sympy.Basic) -> bool:
    """Whether a condition stays the same where query and key move by the same number.

    Elements of tensors count as numbers of their own. False may be said of a condition that stays
    the same but does not look so.
    """
    return _is_of_distances(expr.xreplace(_POSITIONS))  # so that q >= 0 is true


def _is_of_distances(expr: sympy.Basic) -> bool:
    if not isinstance(expr, Relational) and is_condition(expr):
        return all(map(_is_of_distances, expr.args))
    if isinstance(expr, Relational) and not is_condition(expr.lhs):
        expr = expr.lhs - expr.rhs
    plain = expr.xreplace({each: sympy.Dummy(integer=True) for each in expr.atoms(Element)})
    moved = plain.xreplace({each: each + _MOVED for each in _POSITIONS.values()})
    return bool(moved == plain or sympy.expand(moved - plain) == 0)
