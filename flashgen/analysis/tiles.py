"""Three-valued classification of a tile: may the mask be true somewhere, must it be everywhere.

``may`` follows the tree of the mask; inside a conjunction each part is bounded within what the
others leave (the tile's rows, its columns and linear forms such as q - k), which makes the answer
exact for windows, strides and their like. ``must`` is that no element may be false.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy
from sympy.core.relational import Relational

from ..expr import CORNERS, FloorDiv, FloorMod, Maximum, Minimum, is_int
from ..expr.limits import fits
from .lower import All, AtLeast0, Congruent, Fact, Node, Some, lower
from .ranges import End, Form, Tile, linear, normal_form, range_of

TILE = Tile(CORNERS)


def may(mask: sympy.Basic, tile: Tile = TILE) -> sympy.Basic:
    """A condition on the tile that is false only when no element of it can satisfy ``mask``."""
    return _may(lower(mask, tile, _splitter(tile)), tile)


def must(mask: sympy.Basic, tile: Tile = TILE) -> sympy.Basic:
    """A condition on the tile that is true only when every element of it satisfies ``mask``."""
    return negation(_may(lower(mask, tile, _splitter(tile), negate=True), tile))


def _splitter(tile: Tile) -> Callable[[sympy.Expr], bool]:
    # A function of one position is bounded exactly as it is; of two it pays to look inside.
    return lambda atom: sum(symbol in tile.ends for symbol in atom.free_symbols) > 1


def negation(condition: sympy.Basic) -> sympy.Basic:
    """The negation with no ``not`` left before a comparison."""
    if isinstance(condition, sympy.And):
        return sympy.Or(*map(negation, condition.args))
    if isinstance(condition, sympy.Or):
        return sympy.And(*map(negation, condition.args))
    opposite = sympy.Not(condition)
    if isinstance(opposite, sympy.Lt | sympy.Gt) and is_int(opposite.lhs) and is_int(opposite.rhs):
        return exactly_at_least(opposite.gts, opposite.lts + 1)
    return opposite


def at_least(a: sympy.Expr, b: sympy.Expr) -> sympy.Basic:
    """``a >= b`` of integers, or true where computing it could overflow 64 bits.

    Only for conditions that may be weakened.
    """
    return exactly_at_least(a, b) if fits(a - b) else sympy.true


def exactly_at_least(a: sympy.Expr, b: sympy.Expr) -> sympy.Basic:
    """``a >= b`` of integers that fit, written with what is subtracted on the other side."""
    greater, lesser = [], []
    constant = sympy.S.Zero
    for term in sympy.Add.make_args(sympy.expand_mul(a - b)):
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


def _may(node: Node, tile: Tile) -> sympy.Basic:
    if isinstance(node, Some):
        return sympy.Or(*(_may(part, tile) for part in node.parts))
    if isinstance(node, All):
        return _may_all(node, tile)
    if isinstance(node, AtLeast0):
        x = range_of(node.expr, tile)
        if x.hi is None:
            return sympy.true
        return sympy.Or(negation(x.defined), at_least(x.hi, sympy.S.Zero))
    if isinstance(node, Congruent):
        return _may_congruent(node, tile)
    return _may_fact(node, tile)


def _may_congruent(node: Congruent, tile: Tile) -> sympy.Basic:
    x = range_of(node.x, tile)
    if x.lo is None or x.hi is None:
        return sympy.true
    modulus, remainder = node.modulus, node.remainder
    if node.holds:
        # Some multiple of the modulus lies in [lo - remainder, hi - remainder].
        below = FloorDiv(x.lo - remainder - 1, modulus)
        found = at_least(FloorDiv(x.hi - remainder, modulus), below + 1)
        possible = sympy.And(at_least(remainder, sympy.S.Zero), at_least(modulus, remainder + 1))
        result = sympy.And(found, possible)
    else:
        # Of two neighbours one is not congruent, unless everything is.
        several = sympy.And(at_least(x.hi, x.lo + 1), at_least(modulus, sympy.Integer(2)))
        first = FloorMod(x.lo, modulus)
        result = sympy.Or(several, sympy.Ne(first, remainder) if fits(first) else sympy.true)
    return sympy.Or(negation(x.defined), result)


def _may_fact(node: Fact, tile: Tile) -> sympy.Basic:
    fact = node.expr
    if not tile.varies(fact):
        return fact
    if not isinstance(fact, Relational) or isinstance(fact, sympy.Ne):
        return sympy.true
    x = range_of(fact.lhs - fact.rhs, tile)
    conditions = []
    if not isinstance(fact, sympy.Lt | sympy.Le):
        conditions.append(sympy.true if x.hi is None else x.hi >= 0)
    if not isinstance(fact, sympy.Gt | sympy.Ge):
        conditions.append(sympy.true if x.lo is None else x.lo <= 0)
    return sympy.Or(negation(x.defined), sympy.And(*conditions))


def _may_all(node: All, tile: Tile) -> sympy.Basic:
    parts = list(_flat(node))
    if len(parts) == 1:
        return _may(parts[0], tile)
    conditions: list[sympy.Basic] = []
    tile, parts = _tighten(parts, tile, conditions, single=True)
    tile, parts = _tighten(parts, tile, conditions, single=False)
    conditions.extend(_may(part, tile) for part in parts)
    return sympy.And(*conditions)


def _flat(node: All) -> list[Node]:
    flat: list[Node] = []
    for part in node.parts:
        flat.extend(_flat(part) if isinstance(part, All) else [part])
    return flat


def _tighten(
    parts: list[Node], tile: Tile, conditions: list[sympy.Basic], *, single: bool
) -> tuple[Tile, list[Node]]:
    """Move inequalities into the tile: on one position when ``single``, else on a linear form.

    What makes the narrowed ranges non-empty goes to ``conditions``.
    """
    lows: dict[Form, list[sympy.Expr]] = {}
    highs: dict[Form, list[sympy.Expr]] = {}
    left: list[Node] = []
    for part in parts:
        bound = _bound(part, tile, single)
        if bound is None:
            left.append(part)
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
            _tightest(Maximum, natural.lo, lows[form]),
            _tightest(Minimum, natural.hi, highs[form]),
        )
        if single:
            ends[form[0][0]] = narrowed
        else:
            forms[form] = narrowed
    return Tile(ends, forms), left


def _tightest(pick: Callable[..., sympy.Expr], natural: End, others: list[sympy.Expr]) -> End:
    ends = others if natural is None else [natural, *others]
    return pick(*ends) if ends else None


def _bound(part: Node, tile: Tile, single: bool) -> tuple[Form, sympy.Expr, bool] | None:
    """(form, end, whether the end is a lower one) of an inequality on a linear form."""
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
