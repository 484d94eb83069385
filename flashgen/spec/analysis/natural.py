"""Divisions in masks whose numerators are negative only where the mask is false without them.

In ``(q >= k) & ((q - k) // block < n)`` the quotient of a negative number decides nothing: a kernel
may compute any number in its place, which spares the correction that rounds down.
"""

from __future__ import annotations

from collections.abc import Iterator
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


Nonnegative = frozenset[sympy.Expr]
_MOST_NUMBERS = 8  # of those that have a symbol of a numerator


def with_natural_divisions(mask: sympy.Basic, positions: Nonnegative = frozenset()) -> sympy.Basic:
    """The mask with `NaturalDiv` and `NaturalMod` for its divisions that are natural everywhere.

    An index of a tensor and a divisor are computed whatever the mask is, and keep their divisions.

    Args:
        positions: `Q`, `K` or both, if they are not negative wherever the mask decides a score.
    """
    holds: dict[sympy.Expr, bool] = {}
    seen: set[tuple[sympy.Basic, Nonnegative]] = set()

    def visit(part: sympy.Basic, nonnegative: Nonnegative) -> None:
        """``nonnegative``: integers that are not negative where the value of the part is used."""
        if (part, nonnegative) in seen or isinstance(part, Let):
            return
        seen.add((part, nonnegative))
        if isinstance(part, FloorDiv | FloorMod) and is_int(part):
            a, b = part.args
            natural = limits(b)[0] > 0 and _is_natural(a, nonnegative)
            holds[part] = natural and holds.get(part, True)
            visit(a, nonnegative)
            visit(b, frozenset())
            return
        if isinstance(part, TensorRead):
            nonnegative = frozenset()
        # Where an operand decides, by being false in an and, true in an or, the others do not.
        stated_by_arg: list[set[sympy.Expr]] = [set() for _ in part.args]
        if isinstance(part, sympy.And | sympy.Or):
            negated = isinstance(part, sympy.Or)
            stated_by_arg = [set(_stated(arg, negated=negated)) for arg in part.args]
        for index, arg in enumerate(part.args):
            visit(arg, nonnegative.union(*stated_by_arg[:index], *stated_by_arg[index + 1 :]))

    visit(mask, positions)
    results: dict[sympy.Basic, sympy.Basic] = {}

    def rebuilt(part: sympy.Basic) -> sympy.Basic:
        if part not in results:
            args = [rebuilt(arg) for arg in part.args]
            same = all(new is old for new, old in zip(args, part.args, strict=True))
            kind = _KINDS[part.func] if holds.get(part) else part.func
            options = {"evaluate": False} if isinstance(part, sympy.Piecewise | Relational) else {}
            results[part] = part if same and kind == part.func else kind(*args, **options)
        return results[part]

    return rebuilt(mask) if any(holds.values()) else mask


_KINDS = {FloorDiv: NaturalDiv, FloorMod: NaturalMod}


def _is_natural(number: sympy.Expr, nonnegative: Nonnegative) -> bool:
    """Whether the number is at least 0, or one of ``nonnegative``, or the sum of two of them."""
    near = [x for x in nonnegative if not x.free_symbols.isdisjoint(number.free_symbols)]
    near = sorted(near, key=sympy.default_sort_key)[:_MOST_NUMBERS]
    return any(
        limits(number - sympy.Add(*terms))[0] >= 0
        for count in range(3)
        for terms in combinations_with_replacement(near, count)
    )


def _stated(condition: sympy.Basic, *, negated: bool) -> Iterator[sympy.Expr]:
    """The integers that a comparison, or its negation, states to be not negative.

    A comparison with a division states nothing: it might itself guard the numerator.
    """
    if not isinstance(condition, Relational) or contains(condition, FloorDiv, FloorMod):
        return
    if not all(map(is_int, condition.args)):  # the negation of floats is no comparison: NaN
        return
    relation = condition.negated if negated else condition
    left, right, sign = relation.lhs, relation.rhs, relation.rel_op
    if sign in (">", ">=", "=="):
        yield left - right - int(sign == ">")
    if sign in ("<", "<=", "=="):
        yield right - left - int(sign == "<")
