"""Divisions in masks whose numerators are negative only where the mask is false without them.

In ``(q >= k) & ((q - k) // block < n)`` the quotient of a negative number decides nothing: a kernel
may compute any number in its place, which spares the correction that rounds down.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations_with_replacement

import sympy
from sympy.core.relational import Relational

from flashgen.spec.language.integer_limits import limits
from flashgen.spec.language.lets import Let, contains
from flashgen.spec.language.symbols import is_int
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod
from flashgen.spec.language.tensor_elements import TensorRead


class NaturalDiv(FloorDiv):
    """``a // b`` where it is used with a >= 0 only; any number from 0 on for another a."""

    natural = True


class NaturalMod(FloorMod):
    """``a % b`` where it is used with a >= 0 only; any number for another a."""

    natural = True


Facts = tuple[sympy.Expr, ...]
_MOST_FACTS = 2  # that are added up


def with_natural_divisions(mask: sympy.Basic) -> sympy.Basic:
    """The mask with `NaturalDiv` and `NaturalMod` for the divisions of which this holds everywhere.

    An index of a tensor and a divisor are computed whatever the mask is, and keep their divisions.
    """
    holds: dict[sympy.Expr, bool] = {}
    seen: set[tuple[sympy.Basic, Facts]] = set()

    def visit(part: sympy.Basic, facts: Facts) -> None:
        """``facts``: integers that are not negative where the value of the part is used."""
        if (part, facts) in seen or isinstance(part, Let):
            return
        seen.add((part, facts))
        if isinstance(part, FloorDiv | FloorMod) and is_int(part):
            a, b = part.args
            natural = limits(b)[0] > 0 and _is_natural(a, facts)
            holds[part] = natural and holds.get(part, True)
            visit(a, facts)
            visit(b, ())
            return
        if isinstance(part, TensorRead):
            facts = ()
        for arg in part.args:
            others = [other for other in part.args if other is not arg]
            if isinstance(part, sympy.And):
                visit(arg, _joined(facts, others))
            elif isinstance(part, sympy.Or):
                visit(arg, _joined(facts, map(sympy.Not, others)))
            else:
                visit(arg, facts)

    visit(mask, ())
    made: dict[sympy.Basic, sympy.Basic] = {}

    def rebuilt(part: sympy.Basic) -> sympy.Basic:
        if part not in made:
            args = [rebuilt(arg) for arg in part.args]
            same = all(new is old for new, old in zip(args, part.args, strict=True))
            kind = _KINDS[part.func] if holds.get(part) else part.func
            options = {"evaluate": False} if isinstance(part, sympy.Piecewise | Relational) else {}
            made[part] = part if same and kind == part.func else kind(*args, **options)
        return made[part]

    return rebuilt(mask) if any(holds.values()) else mask


_KINDS = {FloorDiv: NaturalDiv, FloorMod: NaturalMod}


def _is_natural(number: sympy.Expr, facts: Facts) -> bool:
    """Whether the number is at least a sum of facts, or 0."""
    return any(
        limits(number - sympy.Add(*some))[0] >= 0
        for count in range(_MOST_FACTS + 1)
        for some in combinations_with_replacement(facts, count)
    )


def _joined(facts: Facts, conditions: Iterable[sympy.Basic]) -> Facts:
    """The facts with those that comparisons of integers state, in order and once each.

    A comparison that divides states none: its own numerator might rest on what it guards.
    """
    found = dict.fromkeys(facts)
    for condition in conditions:
        if isinstance(condition, Relational) and not contains(condition, FloorDiv, FloorMod):
            found |= dict.fromkeys(_stated(condition))
    return tuple(found)


def _stated(relation: Relational) -> Iterator[sympy.Expr]:
    left, right, sign = relation.lhs, relation.rhs, relation.rel_op
    if not (is_int(left) and is_int(right)):
        return
    if sign in (">", ">=", "=="):
        yield left - right - int(sign == ">")
    if sign in ("<", "<=", "=="):
        yield right - left - int(sign == "<")
