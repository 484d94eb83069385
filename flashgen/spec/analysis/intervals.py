"""Closed-form intervals along one axis: the keys that a tile of queries reaches or keeps entirely.

They exist for and/or combinations of inequalities that are affine in the walked position, including
floor divisions by positive numbers, and arbitrary in the other position. The same functions give
the queries that a tile of keys reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import sympy

from flashgen.spec.analysis.mask_tree import AllOf, AnyOf, AtLeast0, Congruent, Fact, Node, lower
from flashgen.spec.analysis.ranges import Range, greatest, least, range_of
from flashgen.spec.analysis.tile_bounds import End, TileBounds, expanded, linear, pick_known
from flashgen.spec.analysis.tile_classes import bounds, exactly_at_least, may, must
from flashgen.spec.language.bit_functions import ShiftLeft, ShiftRight
from flashgen.spec.language.divisors import is_data, may_be_zero
from flashgen.spec.language.integer_limits import fits, limits
from flashgen.spec.language.symbols import CORNERS, K, Q
from flashgen.spec.language.sympy_functions import (
    FloorDiv,
    FloorMod,
    Maximum,
    Minimum,
    Select,
    branches_of,
)

FAR = sympy.Integer(2**30)
"""A number beyond every position, in place of infinity where a bound depends on a condition."""


@dataclass(frozen=True)
class Interval:
    """The positions x with ``lo <= x < hi``; None where there is no bound."""

    lo: End
    hi: End

    @property
    def ends(self) -> tuple[sympy.Expr, ...]:
        return tuple(end for end in (self.lo, self.hi) if end is not None)

    def slides(self, row: sympy.Symbol) -> bool:
        """Whether the interval of row + 8 is the interval of ``row``, moved by 8 positions."""
        moves = (sympy.expand(end.xreplace({row: row + 8}) - end) for end in self.ends)
        return all(difference == 8 for difference in moves)


EVERYTHING = Interval(None, None)
NOTHING = Interval(FAR, -FAR)


@dataclass(frozen=True)
class WalkedAxis:
    """The axis along which a walk visits tiles, for a fixed tile of the other axis."""

    symbol: sympy.Symbol = K

    @property
    def fixed(self) -> sympy.Symbol:
        return Q if self.symbol == K else K

    @property
    def tile(self) -> TileBounds:
        return bounds({self.fixed: CORNERS[self.fixed]})

    def lowered(self, mask: sympy.Basic) -> Node:
        """The tree of ``mask``, with functions of the walked position resolved into cases."""
        return lower(mask, bounds(), lambda atom: self.symbol in atom.free_symbols)


@lru_cache(maxsize=256)
def row_interval(mask: sympy.Basic, walk: WalkedAxis | None = None) -> Interval | None:
    """The interval of one row whose mask is true, as expressions of the row.

    None if the kept positions are not an interval.
    """
    return _closed(mask, walk or WalkedAxis(), _row_of_mask)[0]


def reach(mask: sympy.Basic, walk: WalkedAxis | None = None) -> tuple[Interval, bool]:
    """An interval that contains every walked position whose mask is true for some row of the tile.

    The flag is true if it contains no other positions (given q_lo <= q_hi).
    """
    interval, exact = _closed(mask, walk or WalkedAxis(), _reach_of_mask)
    return interval or EVERYTHING, exact


def full(mask: sympy.Basic, walk: WalkedAxis | None = None) -> tuple[Interval | None, bool]:
    """An interval of walked positions whose mask is true for every row of the tile, or None.

    The flag is true if it contains all such positions.
    """
    return _closed(mask, walk or WalkedAxis(), _full_of_mask)


# Cases of what all rows share.

Solved: TypeAlias = tuple[Interval | None, bool]
"""An interval, and whether it is exact; None, which is not, where there is no closed form."""

MOST_SHARED = 3
"""Conditions whose cases are solved one by one; each doubles their number."""


def _closed(
    mask: sympy.Basic,
    walk: WalkedAxis,
    solve: Callable[[sympy.Basic, WalkedAxis], Solved],
    depth: int = 0,
) -> Solved:
    """The interval of ``mask``. If it is not exact, but all scores of a head share a condition, and
    both cases are exact, as in ``where(h < 4, causal, window)``: the choice of their intervals."""
    solved = solve(mask, walk)
    condition = None if solved[1] or depth == MOST_SHARED else _shared_condition(mask)
    if condition is None:
        return solved
    cases = []
    for value in (sympy.true, sympy.false):
        decided = mask.xreplace({condition: value, sympy.Not(condition): sympy.Not(value)})
        interval, exact = _closed(decided, walk, solve, depth + 1)
        if interval is None or not exact:
            return solved
        cases.append(interval)
    return _when(condition, *cases), True


def _shared_condition(mask: sympy.Basic) -> sympy.Basic | None:
    """The first condition of a mask that depends on neither position."""
    if not mask.free_symbols & {Q, K}:
        return None if mask in (sympy.true, sympy.false) else mask
    if isinstance(mask, sympy.And | sympy.Or | sympy.Not):
        shared = (_shared_condition(part) for part in mask.args)
        return next((condition for condition in shared if condition is not None), None)
    return None


def _row_of_mask(mask: sympy.Basic, walk: WalkedAxis) -> Solved:
    row = _row(walk.lowered(mask), walk)
    return row, row is not None


def _reach_of_mask(mask: sympy.Basic, walk: WalkedAxis) -> Solved:
    tree = walk.lowered(mask)
    row = _row(tree, walk)
    return _reach(tree, walk, walk.tile), row is not None and _union_is_hull(row, walk)


def _full_of_mask(mask: sympy.Basic, walk: WalkedAxis) -> Solved:
    tree = walk.lowered(mask)
    row, full_interval = _row(tree, walk), _full(tree, walk)
    if row is None or full_interval is None:
        return full_interval, False
    return full_interval, all(_direction(end, walk) is not None for end in _ends(row))


# One row.


def _row(node: Node, walk: WalkedAxis) -> Interval | None:
    condition = _row_condition(node, walk)
    if condition is not None:
        return _when(condition, EVERYTHING, NOTHING)
    if isinstance(node, AtLeast0):
        return _solve(node.expr, walk)
    if not isinstance(node, AllOf | AnyOf):
        return None
    conditions, others = _split_conditions(node, walk)
    rows = [_row(part, walk) for part in others]
    solved = [row for row in rows if row is not None]
    if len(solved) < len(rows):
        return None
    if isinstance(node, AllOf):
        return _when(sympy.And(*conditions), _intersection(solved), NOTHING)
    union = _same_direction(solved)
    return None if union is None else _when(sympy.Or(*conditions), EVERYTHING, union)


def _row_condition(node: Node, walk: WalkedAxis) -> sympy.Basic | None:
    """The node as a condition, when it does not depend on the walked position."""
    if isinstance(node, AllOf | AnyOf):
        parts = [_row_condition(part, walk) for part in node.parts]
        if any(part is None for part in parts):
            return None
        return sympy.And(*parts) if isinstance(node, AllOf) else sympy.Or(*parts)
    condition = _condition(node)
    return None if walk.symbol in condition.free_symbols else condition


def _condition(node: AtLeast0 | Congruent | Fact) -> sympy.Basic:
    if isinstance(node, AtLeast0):
        return exactly_at_least(node.expr, sympy.S.Zero)
    if isinstance(node, Congruent):
        relation = sympy.Eq if node.holds else sympy.Ne
        return relation(FloorMod(node.x, node.modulus), node.remainder)
    return node.expr


def _solve(expr: sympy.Expr, walk: WalkedAxis) -> Interval | None:
    """``expr >= 0`` solved for the walked position, if it occurs once and can be isolated."""
    atoms, rest = linear(expr, bounds({walk.symbol: (None, None)}))
    if len(atoms) != 1:
        return None
    ((atom, weight),) = atoms.items()
    above = bool(weight.is_positive)  # atom >= bound, else atom <= bound
    if not above and not weight.is_negative:
        return None
    bound = -FloorDiv(rest, weight) if above else FloorDiv(rest, -weight)
    solved: Interval | None
    if atom == walk.symbol:
        solved = Interval(bound, None) if above else Interval(None, expanded(bound + 1))
    elif _is_division(atom, walk):
        x, divisor = atom.args
        multiple = divisor * bound
        solved = _solve(expanded(x - multiple if above else multiple + divisor - 1 - x), walk)
    elif isinstance(atom, ShiftRight) and walk.symbol not in atom.args[1].free_symbols:
        x, amount = atom.args
        multiple = bound if above else bound + 1
        if limits(amount)[1] > ShiftLeft.farthest(limits(multiple)):
            return None
        first = ShiftLeft(multiple, amount)
        solved = _solve(expanded(x - first if above else first - 1 - x), walk)
    else:
        return None
    if solved is None or not all(end is None or fits(end) for end in (solved.lo, solved.hi)):
        return None
    return solved


def _is_division(atom: sympy.Expr, walk: WalkedAxis) -> bool:
    if not isinstance(atom, FloorDiv):
        return False
    divisor = atom.args[1]
    if is_data(divisor) and may_be_zero(divisor):
        return False
    return bool(divisor.is_nonnegative) and walk.symbol not in divisor.free_symbols


def _intersection(rows: list[Interval]) -> Interval:
    return Interval(
        pick_known(Maximum, [row.lo for row in rows]), pick_known(Minimum, [row.hi for row in rows])
    )


def _same_direction(rows: list[Interval]) -> Interval | None:
    """The union, if it surely is an interval: one part, or all parts unbounded on one side."""
    if not rows:
        return NOTHING
    if len(rows) == 1:
        return rows[0]
    if all(row.lo is None for row in rows):
        return Interval(None, greatest(*(row.hi for row in rows)))
    if all(row.hi is None for row in rows):
        return Interval(least(*(row.lo for row in rows)), None)
    return None


def _when(condition: sympy.Basic, if_true: Interval, if_false: Interval) -> Interval:
    """``if_true`` or ``if_false``, chosen when the kernel runs."""
    if condition == sympy.true:
        return if_true
    if condition == sympy.false:
        return if_false
    lo = _either(condition, if_true.lo, if_false.lo, -FAR)
    hi = _either(condition, if_true.hi, if_false.hi, FAR)
    if if_false == NOTHING and hi is not None:
        lo = if_true.lo  # an end that no position satisfies makes the interval empty
    return Interval(lo, hi)


def _either(condition: sympy.Basic, a: End, b: End, infinite: sympy.Expr) -> End:
    if a is None and b is None:
        return None
    return Select(condition, infinite if a is None else a, infinite if b is None else b)


# Many rows.


def _range(end: End, tile: TileBounds) -> Range:
    result = Range(None, None) if end is None else range_of(end, tile)
    return result if result.defined == sympy.true else Range(None, None)


def _reach(node: Node, walk: WalkedAxis, tile: TileBounds) -> Interval:
    row = _row(node, walk)
    if row is not None:
        return Interval(_range(row.lo, tile).lo, _range(row.hi, tile).hi)
    if isinstance(node, AllOf):
        conditions, others = _split_conditions(node, walk)
        inner = _narrowed(conditions, walk, tile)
        interval = _intersection([_reach(part, walk, inner) for part in others])
        possible = sympy.And(*(may(condition, walk.tile) for condition in conditions))
        return _when(possible, interval, NOTHING)
    if isinstance(node, AnyOf):
        return _hull([_reach(part, walk, tile) for part in node.parts])
    return EVERYTHING


def _hull(parts: list[Interval]) -> Interval:
    parts = [part for part in parts if part != NOTHING]
    if not parts:
        return NOTHING
    return Interval(least(*(part.lo for part in parts)), greatest(*(part.hi for part in parts)))


def _split_conditions(
    node: AllOf | AnyOf, walk: WalkedAxis
) -> tuple[list[sympy.Basic], list[Node]]:
    """The parts that are conditions on the row alone, and the others."""
    conditions, others = [], []
    for part in node.parts:
        condition = _row_condition(part, walk)
        if condition is None:
            others.append(part)
        else:
            conditions.append(condition)
    return conditions, others


def _narrowed(conditions: list[sympy.Basic], walk: WalkedAxis, tile: TileBounds) -> TileBounds:
    """The tile without the rows that conditions on the row alone rule out at its ends."""
    lo, hi = tile.ends[walk.fixed]
    across = WalkedAxis(walk.fixed)
    for condition in conditions:
        rows = row_interval(condition, across)
        if rows is None or walk.symbol in condition.free_symbols:
            continue
        if rows.lo is not None and lo is not None:
            lo = Maximum(lo, rows.lo)
        if rows.hi is not None and hi is not None:
            hi = Minimum(hi, rows.hi - 1)
    return bounds({walk.fixed: (lo, hi)})


def _full(node: Node, walk: WalkedAxis) -> Interval | None:
    row = _row(node, walk)
    if row is not None:
        lo, hi = _range(row.lo, walk.tile), _range(row.hi, walk.tile)
        unknown = (row.lo is not None and lo.hi is None) or (row.hi is not None and hi.lo is None)
        return None if unknown else Interval(lo.hi, hi.lo)
    if isinstance(node, AllOf):
        parts = [_full(part, walk) for part in node.parts]
        solved = [part for part in parts if part is not None]
        return _intersection(solved) if len(solved) == len(parts) else None
    if isinstance(node, AnyOf):
        conditions, others = _split_conditions(node, walk)
        always = sympy.Or(*(must(condition, walk.tile) for condition in conditions))
        rest = [_full(part, walk) for part in others]
        # A part without a closed form only adds to the union.
        solved = [part for part in rest if part is not None and part != NOTHING]
        union = _same_direction(solved) if solved else None
        if union is None:
            return None
        return _when(always, EVERYTHING, union)
    return None


# Proofs.


def _ends(row: Interval) -> list[sympy.Expr]:
    return [*_parts(row.lo, Maximum), *_parts(row.hi, Minimum)]


def _parts(end: End, kind: type[sympy.Expr]) -> list[sympy.Expr]:
    if end is None:
        return []
    return list(end.args) if isinstance(end, kind) else [end]


def _direction(expr: sympy.Expr, walk: WalkedAxis) -> int | None:
    """+1, -1 or 0: the direction in which a bound moves with the row; None when unknown."""
    if walk.fixed not in expr.free_symbols:
        return 0
    if expr == walk.fixed:
        return 1
    if isinstance(expr, sympy.Add | sympy.Mul):
        atoms, _ = linear(expr, walk.tile)
        moves = []
        for atom, weight in atoms.items():
            sign = 1 if weight.is_nonnegative else -1 if weight.is_nonpositive else None
            move = None if isinstance(atom, sympy.Mul) else _direction(atom, walk)
            moves.append(None if sign is None or move is None else sign * move)
        return _common_direction(moves)
    if isinstance(expr, Minimum | Maximum):
        return _common_direction([_direction(arg, walk) for arg in expr.args])
    if isinstance(expr, sympy.Piecewise | Select):
        branches, last = branches_of(expr)
        if any(walk.fixed in condition.free_symbols for _, condition in branches):
            return None
        return _common_direction([_direction(value, walk) for value in (*dict(branches), last)])
    if isinstance(expr, ShiftLeft | ShiftRight) or (
        isinstance(expr, FloorDiv) and expr.args[1].is_nonnegative
    ):
        return None if walk.fixed in expr.args[1].free_symbols else _direction(expr.args[0], walk)
    return None


def _common_direction(moves: list[int | None]) -> int | None:
    if any(move is None for move in moves):
        return None
    nonzero = {move for move in moves if move}
    return None if len(nonzero) > 1 else (nonzero.pop() if nonzero else 0)


def _union_is_hull(row: Interval, walk: WalkedAxis) -> bool:
    """True when the rows' intervals, over any range of rows, leave no gap in their hull.

    All bounds must move the same way, and where there are bounds on both sides the
    interval of each row must be non-empty and touch its neighbour's.
    """
    move = _common_direction([_direction(end, walk) for end in _ends(row)])
    if move is None:
        return False
    if move == 0 or row.lo is None or row.hi is None:
        return True
    following = {walk.fixed: walk.fixed + 1}
    for lo in _parts(row.lo, Maximum):
        for hi in _parts(row.hi, Minimum):
            gap = hi - lo.xreplace(following) if move > 0 else hi.xreplace(following) - lo
            if not (_never_negative(hi - lo - 1, walk) and _never_negative(gap, walk)):
                return False
    return True


def _never_negative(expr: sympy.Expr, walk: WalkedAxis) -> bool:
    unbounded = bounds({walk.fixed: (None, None)})
    low = range_of(expanded(expr), unbounded).lo
    return low is not None and limits(low)[0] >= 0
