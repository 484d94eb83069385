"""Classification of tiles: whether the mask may be true somewhere, and must be true everywhere.

``may`` follows the tree of the mask. Inside a conjunction each part is bounded within the ranges
that the other parts leave (of rows, columns and linear forms such as q - k), which makes the result
exact for windows, strides and similar masks. ``must`` states that the negation is nowhere true.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import sympy

from flashgen.spec.analysis.float_ranges import float_range
from flashgen.spec.analysis.mask_tree import AllOf, AnyOf, AtLeast0, Congruent, Fact, Node, lower
from flashgen.spec.analysis.ranges import range_of
from flashgen.spec.analysis.tile_bounds import (
    End,
    Form,
    TileBounds,
    expanded,
    linear,
    normal_form,
    pick_known,
)
from flashgen.spec.language.comparisons import (
    FloatEqual,
    FloatGreater,
    FloatGreaterEqual,
    FloatLess,
    FloatLessEqual,
    FloatRelation,
    FloatUnequal,
)
from flashgen.spec.language.float_operations import AsFloat
from flashgen.spec.language.integer_limits import fits
from flashgen.spec.language.symbols import CORNERS, is_int
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod, Maximum, Minimum

_MOST_CASES = 2
"""Alternatives that a conjunction is split into; each has the conditions of all other parts."""


def may(mask: sympy.Basic, tile: TileBounds | None = None) -> sympy.Basic:
    """A condition on the tile that is false only if no element can satisfy ``mask``."""
    tile = tile or bounds()
    return _may(lower(mask, tile, _splitter(tile)), tile)


def must(mask: sympy.Basic, tile: TileBounds | None = None) -> sympy.Basic:
    """A condition on the tile that is true only if every element satisfies ``mask``."""
    tile = tile or bounds()
    return negation(_may(lower(mask, tile, _splitter(tile), negate=True), tile))


def bounds(ends: Mapping[sympy.Symbol, tuple[End, End]] = CORNERS) -> TileBounds:
    """A tile with these ranges of its varying positions; by default from corner to corner."""
    return TileBounds(ends, lambda condition, tile: (must(condition, tile), may(condition, tile)))


def _splitter(tile: TileBounds) -> Callable[[sympy.Expr], bool]:
    # A function of one position has exact bounds as it is; one of two positions is split.
    return lambda atom: sum(symbol in tile.ends for symbol in atom.free_symbols) > 1


def negation(condition: sympy.Basic) -> sympy.Basic:
    """The negation, with opposite comparisons instead of ``not``."""
    if isinstance(condition, sympy.And):
        return sympy.Or(*map(negation, condition.args))
    if isinstance(condition, sympy.Or):
        return sympy.And(*map(negation, condition.args))
    opposite = sympy.Not(condition)
    if isinstance(opposite, sympy.Lt | sympy.Gt) and is_int(opposite.lhs) and is_int(opposite.rhs):
        return exactly_at_least(opposite.gts, opposite.lts + 1)
    return opposite


def at_least(a: sympy.Expr, b: sympy.Expr) -> sympy.Basic:
    """``a >= b`` of integers, or true if computing it could overflow 64 bits.

    Only for conditions that may be weakened.
    """
    return exactly_at_least(a, b) if fits(a - b) else sympy.true


@functools.lru_cache(maxsize=4096)  # the kernels of a spec compare few pairs, each many times
def exactly_at_least(a: sympy.Expr, b: sympy.Expr) -> sympy.Basic:
    """``a >= b`` of integers that fit, with subtracted terms moved to the other side."""
    greater, lesser = [], []
    constant = sympy.S.Zero
    for term in sympy.Add.make_args(expanded(a - b)):
        if term.is_Integer:
            constant = term
        elif term.could_extract_minus_sign():
            lesser.append(-term)
        else:
            greater.append(term)
    left, right = sympy.Add(*greater), sympy.Add(*lesser)
    if constant == -1:
        return left > right
    return left + constant >= right if constant > 0 else left >= right - constant


def _may(node: Node, tile: TileBounds) -> sympy.Basic:
    if isinstance(node, AnyOf):
        some = sympy.Or(*(_may(part, tile) for part in node.parts))
        return some if node.whole is None else sympy.And(some, _may(node.whole, tile))
    if isinstance(node, AllOf):
        return _may_all(node, tile)
    if isinstance(node, AtLeast0):
        x = range_of(node.expr, tile)
        if x.hi is None:
            return sympy.true
        return sympy.Or(negation(x.defined), at_least(x.hi, sympy.S.Zero))
    if isinstance(node, Congruent):
        return _may_congruent(node, tile)
    return _may_fact(node, tile)


def _may_congruent(node: Congruent, tile: TileBounds) -> sympy.Basic:
    x = range_of(node.x, tile)
    if x.lo is None or x.hi is None:
        return sympy.true
    modulus, remainder = node.modulus, node.remainder
    if node.holds:
        # Some multiple of the modulus lies in [lo - remainder, hi - remainder].
        below = FloorDiv(x.lo - remainder - 1, modulus)
        has_multiple = at_least(FloorDiv(x.hi - remainder, modulus), below + 1)
        possible = sympy.And(at_least(remainder, sympy.S.Zero), at_least(modulus, remainder + 1))
        result = sympy.And(has_multiple, possible)
    else:
        # One of two neighbours is not congruent, unless the modulus is 1.
        several = sympy.And(at_least(x.hi, x.lo + 1), at_least(modulus, sympy.Integer(2)))
        first = FloorMod(x.lo, modulus)
        result = sympy.Or(several, sympy.Ne(first, remainder) if fits(first) else sympy.true)
    return sympy.Or(negation(x.defined), result)


def _may_fact(node: Fact, tile: TileBounds) -> sympy.Basic:
    fact = node.expr
    relation = fact.args[0] if isinstance(fact, sympy.Not) else fact
    if isinstance(relation, FloatRelation):
        return _may_compare(fact, tile)
    return sympy.true if tile.varies(fact) else fact


def _may_compare(fact: sympy.Basic, tile: TileBounds) -> sympy.Basic:
    """A condition on the tile that is false only where a comparison, or its negation, holds for no
    element."""
    holds = not isinstance(fact, sympy.Not)
    relation = fact if holds else fact.args[0]
    assert isinstance(relation, FloatRelation)
    if isinstance(relation, FloatGreater | FloatGreaterEqual):
        relation = relation.reversed
    left, right = relation.args
    a, b = float_range(left, tile), float_range(right, tile)
    if (a.lo, b.lo) == (a.hi, b.hi) == (left, right):
        return fact  # one value for the whole tile, which may also be NaN
    if a.lo is None or a.hi is None or b.lo is None or b.hi is None:
        return sympy.true
    a_lo, a_hi, b_lo, b_hi = map(_converted, (a.lo, a.hi, b.lo, b.hi))
    if isinstance(relation, FloatLess):
        never = FloatGreaterEqual(a_lo, b_hi) if holds else FloatLess(a_hi, b_lo)
    elif isinstance(relation, FloatLessEqual):
        never = FloatGreater(a_lo, b_hi) if holds else FloatLessEqual(a_hi, b_lo)
    elif isinstance(relation, FloatEqual) == holds:
        never = sympy.Or(FloatGreater(a_lo, b_hi), FloatLess(a_hi, b_lo))
    else:
        assert isinstance(relation, FloatEqual | FloatUnequal)
        never = sympy.And(FloatGreaterEqual(a_lo, b_hi), FloatLessEqual(a_hi, b_lo))
    never_holds = sympy.And(a.defined, b.defined, never)
    return sympy.Or(*map(sympy.Not, sympy.And.make_args(never_holds)))


def _converted(end: sympy.Expr) -> sympy.Expr:
    """An end as a float, so that it is compared as one even with another integer."""
    return end if end.is_Number else AsFloat(end)


def _may_all(node: AllOf, tile: TileBounds) -> sympy.Basic:
    parts = list(_flat(node))
    if len(parts) == 1:
        return _may(parts[0], tile)
    cases = _cases(parts, tile)
    if cases is not None:
        return sympy.Or(*(_may_all(case, tile) for case in cases))
    conditions: list[sympy.Basic] = []
    tile, parts = _tighten(parts, tile, conditions, single=True)
    tile, parts = _tighten(parts, tile, conditions, single=False)
    conditions.extend(_may(part, tile) for part in parts)
    return sympy.And(*conditions)


def _cases(parts: list[Node], tile: TileBounds) -> list[AllOf] | None:
    """The alternatives of one part, each with all other parts, or None.

    All alternatives must narrow a position, beside parts with functions of positions, as in
    ``(q < n) == (k < n) and q % n == k % n``: such functions have their exact ranges only within
    one alternative.
    """
    for index, part in enumerate(parts):
        others = parts[:index] + parts[index + 1 :]
        if not isinstance(part, AnyOf) or len(part.parts) > _MOST_CASES:
            continue
        if not tile.effort.split():
            return None
        if not all(_narrows(alternative, tile) for alternative in part.parts):
            continue
        if not any(_has_functions(other, tile) for other in others):
            continue
        return [AllOf((alternative, *others)) for alternative in part.parts]
    return None


def _narrows(node: Node, tile: TileBounds) -> bool:
    """Whether the node holds only within a range of one position."""
    parts = _flat(node) if isinstance(node, AllOf) else [node]
    return any(_bound(part, tile, single=True) is not None for part in parts)


def _has_functions(node: Node, tile: TileBounds) -> bool:
    """Whether the node is a condition on more than sums of positions."""
    if isinstance(node, AllOf | AnyOf):
        return False
    if not isinstance(node, AtLeast0):
        return True
    return any(atom not in tile.ends for atom in linear(node.expr, tile)[0])


def _flat(node: AllOf) -> list[Node]:
    flat: list[Node] = []
    for part in node.parts:
        flat.extend(_flat(part) if isinstance(part, AllOf) else [part])
    return flat if node.whole is None else [*flat, node.whole]


def _tighten(
    parts: list[Node], tile: TileBounds, conditions: list[sympy.Basic], *, single: bool
) -> tuple[TileBounds, list[Node]]:
    """Moves inequalities into the tile: on one position if ``single``, else on a linear form.

    The conditions that the narrowed ranges are not empty are appended to ``conditions``.
    """
    lows: dict[Form, list[sympy.Expr]] = {}
    highs: dict[Form, list[sympy.Expr]] = {}
    remaining: list[Node] = []
    for part in parts:
        bound = _bound(part, tile, single)
        if bound is None:
            remaining.append(part)
            continue
        form, end, below = bound
        lows.setdefault(form, [])
        highs.setdefault(form, [])
        (lows if below else highs)[form].append(end)
    ends, forms = dict(tile.ends), dict(tile.forms)
    for form in lows:
        expr = sympy.Add(*(weight * atom for atom, weight in form))
        natural = range_of(expr, tile)
        conditions.extend(
            at_least(high, low)
            for low in [natural.lo, *lows[form]]
            for high in [natural.hi, *highs[form]]
            if low is not None and high is not None and (low, high) != (natural.lo, natural.hi)
        )
        narrowed = (
            pick_known(Maximum, [natural.lo, *lows[form]]),
            pick_known(Minimum, [natural.hi, *highs[form]]),
        )
        if single:
            ends[form[0][0]] = narrowed
        else:
            forms[form] = narrowed
    return replace(tile, ends=ends, forms=forms), remaining


def _bound(part: Node, tile: TileBounds, single: bool) -> tuple[Form, sympy.Expr, bool] | None:
    """(form, end, whether it is the lower end) of an inequality on a linear form."""
    if not isinstance(part, AtLeast0):
        return None
    atoms, rest = linear(part.expr, tile)
    named = normal_form(atoms)
    if named is None:
        return None
    form, factor = named
    if single != (len(form) == 1 and form[0][0] in tile.ends):
        return None
    if any(range_of(atom, tile).defined != sympy.true for atom, _ in form):
        return None
    if factor > 0:
        return form, -FloorDiv(rest, factor), True
    return form, FloorDiv(rest, -factor), False
