"""Which masks depend on distances of positions, and not on the positions themselves."""

from __future__ import annotations

from functools import lru_cache

import sympy
from sympy.core.relational import Relational

from flashgen.shared.dtypes import POSITION_LIMIT
from flashgen.spec.language.integer_limits import decided
from flashgen.spec.language.lets import Let
from flashgen.spec.language.symbols import K, Q, is_int
from flashgen.spec.language.tensor_elements import Element

_POSITIONS = dict.fromkeys((Q, K), (0, POSITION_LIMIT))


def is_of_distances(expr: sympy.Basic) -> bool:
    """Whether a condition stays the same where query and key move by the same number.

    Positions are 0 or more. Elements of tensors count as numbers of their own. The result may be
    False for a condition that stays the same, if its form does not show it.
    """
    return _step(expr) == 0


@lru_cache(maxsize=1 << 12)
def _step(expr: sympy.Basic) -> sympy.Expr | None:
    """The growth of an expression where query and key move by 1; None if it is not known.

    A known growth is the same from one move to the next.
    """
    if expr in (Q, K):
        return sympy.S.One
    if isinstance(expr, Let):
        return _step(expr.value)
    if isinstance(expr, Element):
        return sympy.S.Zero
    steps = [_step(arg) for arg in expr.args]
    moving = [index for index, step in enumerate(steps) if step != 0]
    if not moving:
        return sympy.S.Zero
    if isinstance(expr, Relational):
        same = None not in steps and steps[0] == steps[1]
        are_integers = is_int(expr.lhs) and is_int(expr.rhs)
        same |= are_integers and decided(expr.func, expr.lhs, expr.rhs, _POSITIONS) is not None
        return sympy.S.Zero if same else None
    if None in steps:
        return None
    if isinstance(expr, sympy.Add):
        return sympy.Add(*steps)
    if isinstance(expr, sympy.Mul) and len(moving) == 1:
        return expr / expr.args[moving[0]] * steps[moving[0]]
    return None
