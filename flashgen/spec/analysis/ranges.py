"""Interval arithmetic of integers over a tile, with sympy expressions for the ends.

A tile has a range for each varying position; all other symbols have one value in the whole tile.
Integer ends are exact. Those of floats are in `flashgen.spec.analysis.float_ranges`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import sympy

from flashgen.spec.analysis.tile_bounds import (
    End,
    TileBounds,
    expanded,
    linear,
    normal_form,
    pick_known,
)
from flashgen.spec.language.bit_functions import (
    BitAnd,
    BitFunction,
    BitOr,
    BitXor,
    Filled,
    Popcount,
    ShiftLeft,
    ShiftRight,
)
from flashgen.spec.language.divisors import is_data, may_be_zero
from flashgen.spec.language.integer_limits import fits, limits
from flashgen.spec.language.lets import Let, named
from flashgen.spec.language.symbols import is_int
from flashgen.spec.language.sympy_functions import (
    FloorDiv,
    FloorMod,
    Maximum,
    Minimum,
    Select,
    branches_of,
)
from flashgen.spec.language.tensor_elements import Element, Greatest, Least

_MINUS = sympy.S.NegativeOne


@dataclass(frozen=True)
class Range:
    """If ``defined`` holds, all values lie in [lo, hi]; None where there is no bound.

    If ``defined`` is false, some value may be undefined (a division by 0, a root of a negative
    number) and the bounds mean nothing.
    """

    lo: End
    hi: End
    defined: sympy.Basic = sympy.true


def least(*ends: End) -> End:
    """The lowest end; no end at all if one is missing."""
    return None if any(end is None for end in ends) else Minimum(*ends)


def greatest(*ends: End) -> End:
    """The highest end; no end at all if one is missing."""
    return None if any(end is None for end in ends) else Maximum(*ends)


UNKNOWN = Range(None, None, sympy.false)


def range_of(expr: sympy.Expr, tile: TileBounds) -> Range:
    """The range of an integer expression over ``tile``; of a float, nothing is known."""
    if not tile.varies(expr):
        return Range(expr, expr)
    if expr in tile.ends:
        return Range(*tile.ends[expr])
    result: Range | None = tile.ranges.get(expr)
    if result is None:
        result = _range(expr, tile) if tile.effort.spend() else UNKNOWN
        lo, hi = (None if end is None else named(end) for end in (result.lo, result.hi))
        result = tile.ranges[expr] = Range(lo, hi, named(result.defined))
    return result


def _range(expr: sympy.Expr, tile: TileBounds) -> Range:
    if isinstance(expr, Let) or not is_int(expr):  # a part of a large expression is not analysed
        return UNKNOWN
    if isinstance(expr, sympy.Add):
        return _sum(expr, tile)
    if isinstance(expr, sympy.Mul):
        uniform = [factor for factor in expr.args if not tile.varies(factor)]
        single = len(expr.args) - len(uniform) == 1
        return _sum(expr, tile) if uniform or single else _product(expr.args, tile)
    if isinstance(expr, sympy.Pow):
        return _power(expr, tile)
    if isinstance(expr, sympy.Piecewise | Select):
        return _choice(expr, tile)
    if isinstance(expr, FloorDiv):
        return _quotient(expr, tile)
    if isinstance(expr, FloorMod):
        return _remainder(expr, tile)
    if isinstance(expr, Element):
        return _element(expr, tile)
    parts = [range_of(arg, tile) for arg in expr.args]
    defined = sympy.And(*(part.defined for part in parts))
    if isinstance(expr, BitFunction):
        return replace(_bits(expr, parts), defined=defined)
    if isinstance(expr, Minimum | sympy.Min):
        lo, hi = least(*(p.lo for p in parts)), pick_known(Minimum, (p.hi for p in parts))
        return Range(lo, hi, defined)
    if isinstance(expr, Maximum | sympy.Max):
        lo, hi = pick_known(Maximum, (p.lo for p in parts)), greatest(*(p.hi for p in parts))
        return Range(lo, hi, defined)
    x = parts[0]
    if isinstance(expr, sympy.Abs):
        if x.lo is None or x.hi is None:
            return Range(sympy.S.Zero, None, defined)
        return Range(
            Maximum(0, x.lo, _times(_MINUS, x.hi)), Maximum(x.hi, _times(_MINUS, x.lo)), defined
        )
    if isinstance(expr, sympy.sign):
        return Range(sympy.S.NegativeOne, sympy.S.One, defined)
    return UNKNOWN


def _element(expr: Element, tile: TileBounds) -> Range:
    """The range of the elements of an integer tensor that the tile reads.

    It is known for tensors that are read along one axis, whose min/max tables give it quickly.
    """
    anything = Range(None, None)  # an element is defined wherever its index is
    varying = [axis for axis, index in enumerate(expr.indices) if tile.varies(index)]
    if len(varying) != 1 or not is_int(expr):
        return anything
    (axis,) = varying
    index = range_of(expr.indices[axis], tile)
    if index.lo is None or index.hi is None or index.defined != sympy.true:
        return anything
    others = (i for n, i in enumerate(expr.indices) if n != axis)
    args = (expr.tensor, sympy.Integer(axis), index.lo, index.hi, *others)
    return Range(Least(*args), Greatest(*args))


def _scaled(weight: sympy.Expr, x: Range) -> Range:
    if weight.is_nonnegative:
        return Range(_times(weight, x.lo), _times(weight, x.hi), x.defined)
    if weight.is_nonpositive:
        return Range(_times(weight, x.hi), _times(weight, x.lo), x.defined)
    a, b = _times(weight, x.lo), _times(weight, x.hi)
    return Range(least(a, b), greatest(a, b), x.defined)


def _times(weight: sympy.Expr, end: End) -> End:
    if end is None:
        return None
    if weight.is_Integer and isinstance(end, Minimum | Maximum):
        kind = end.func if weight > 0 else Maximum if end.func is Minimum else Minimum
        return kind(*(_times(weight, arg) for arg in end.args))
    return expanded(weight * end)


def _sum(expr: sympy.Expr, tile: TileBounds) -> Range:
    atoms, rest = linear(expr, tile)
    if not atoms:
        return Range(rest, rest)
    pieces, defined = [], sympy.true
    for weight, piece in _pieces(atoms, tile):
        part = _scaled(weight, piece)
        pieces.append(part)
        defined = sympy.And(defined, part.defined)
    lo = None if any(p.lo is None for p in pieces) else sympy.Add(*(p.lo for p in pieces))
    hi = None if any(p.hi is None for p in pieces) else sympy.Add(*(p.hi for p in pieces))
    lo, hi = _within_form(atoms, lo, hi, tile)
    return Range(
        None if lo is None else expanded(lo + rest),
        None if hi is None else expanded(hi + rest),
        defined,
    )


def _pieces(
    atoms: Mapping[sympy.Expr, sympy.Expr], tile: TileBounds
) -> list[tuple[sympy.Expr, Range]]:
    """(weight, range) of each atom; two floor divisions at a constant distance are one piece."""
    remaining = dict(atoms)
    pieces: list[tuple[sympy.Expr, Range]] = []
    for atom in list(remaining):
        if atom not in remaining:
            continue
        weight = remaining.pop(atom)
        for other in list(remaining):
            step = _step_between(atom, other, tile)
            if step is not None and weight + remaining[other] == 0:
                del remaining[other]
                divisor = atom.args[1]
                ends = (FloorDiv(step, divisor), -FloorDiv(-step, divisor))
                pieces.append((weight, Range(*ends)))
                break
        else:
            pieces.append((weight, range_of(atom, tile)))
    return pieces


def _step_between(a: sympy.Expr, b: sympy.Expr, tile: TileBounds) -> sympy.Expr | None:
    """x - y for a = x // d and b = y // d with the same d > 0, if it is constant in the tile."""
    if not (isinstance(a, FloorDiv) and isinstance(b, FloorDiv) and a.args[1] == b.args[1]):
        return None
    step = expanded(a.args[0] - b.args[0])
    divisor = a.args[1]
    if tile.varies(step) or tile.varies(divisor) or not divisor.is_positive or not is_int(step):
        return None
    return step


def _within_form(
    atoms: Mapping[sympy.Expr, sympy.Expr], lo: End, hi: End, tile: TileBounds
) -> tuple[End, End]:
    """The ends, narrowed by the bounds that the context has for the same linear form."""
    named = normal_form(atoms)
    if named is None or named[0] not in tile.forms:
        return lo, hi
    form, factor = named
    below, above = tile.forms[form]
    if factor < 0:
        below, above = above, below
    below, above = _times(sympy.Integer(factor), below), _times(sympy.Integer(factor), above)
    return pick_known(Maximum, (lo, below)), pick_known(Minimum, (hi, above))


def _product(factors: tuple[sympy.Expr, ...], tile: TileBounds) -> Range:
    x = range_of(factors[0], tile)
    for factor in factors[1:]:
        y = range_of(factor, tile)
        defined = sympy.And(x.defined, y.defined)
        if x.lo is None or x.hi is None or y.lo is None or y.hi is None:
            x = Range(None, None, defined)
            continue
        corners = [a * b for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
        x = Range(Minimum(*corners), Maximum(*corners), defined)
    return x


def _power(expr: sympy.Expr, tile: TileBounds) -> Range:
    base, exponent = expr.args
    x = range_of(base, tile)
    if x.lo is None or x.hi is None:
        return Range(None, None, x.defined)
    if exponent % 2 == 1:
        return Range(x.lo**exponent, x.hi**exponent, x.defined)
    near = Maximum(0, x.lo, _times(_MINUS, x.hi))
    far = Maximum(x.hi, _times(_MINUS, x.lo))
    return Range(near**exponent, far**exponent, x.defined)


def _choice(expr: sympy.Expr, tile: TileBounds) -> Range:
    branches, last = branches_of(expr)
    result = range_of(last, tile)
    for value, condition in reversed(branches):
        part = range_of(value, tile)
        must, may = tile.must_and_may(condition, tile)
        result = Range(
            _joined(must, may, part.lo, result.lo, least),
            _joined(must, may, part.hi, result.hi, greatest),
            sympy.And(part.defined, result.defined),
        )
    return result


def _joined(must: sympy.Basic, may: sympy.Basic, a: End, b: End, join: Callable[..., End]) -> End:
    if a is None or b is None:
        return None
    joined = join(a, b)
    if joined == a:
        return Select(may, a, b)
    return Select(must, a, b) if joined == b else Select(must, a, Select(may, joined, b))


def _quotient(expr: sympy.Expr, tile: TileBounds) -> Range:
    x, divisor = range_of(expr.args[0], tile), expr.args[1]
    if x.lo is None or x.hi is None:
        lo = None if x.lo is None or not divisor.is_nonnegative else FloorDiv(x.lo, divisor)
        hi = None if x.hi is None or not divisor.is_nonnegative else FloorDiv(x.hi, divisor)
        return Range(None, None, x.defined) if tile.varies(divisor) else Range(lo, hi, x.defined)
    if tile.varies(divisor):
        d = range_of(divisor, tile)
        if d.lo is None or d.hi is None:
            return Range(None, None, sympy.false)
        nonzero = sympy.And(x.defined, d.defined, sympy.Or(d.lo > 0, d.hi < 0))
        far = Maximum(x.hi, -x.lo)  # no quotient by an integer is farther from 0 than its dividend
        return Range(-far, far, nonzero)
    ends = FloorDiv(x.lo, divisor), FloorDiv(x.hi, divisor)
    if divisor.is_nonnegative:
        return Range(*ends, x.defined)
    return Range(Minimum(*ends), Maximum(*ends), x.defined)


def _remainder(expr: sympy.Expr, tile: TileBounds) -> Range:
    x, divisor = range_of(expr.args[0], tile), expr.args[1]
    d = range_of(divisor, tile)
    if d.lo is None or d.hi is None:
        return Range(None, None, sympy.false)
    if divisor.is_nonnegative:
        lowest, highest = sympy.S.Zero, d.hi - 1
        if is_data(divisor) and may_be_zero(divisor):
            highest = Maximum(highest, 0)
    else:
        lowest, highest = Minimum(d.lo + 1, 0), Maximum(d.hi - 1, 0)
    defined = sympy.And(x.defined, d.defined)
    if tile.varies(divisor):
        defined = sympy.And(defined, sympy.Or(d.lo > 0, d.hi < 0))
    if x.lo is None or x.hi is None or tile.varies(divisor):
        return Range(lowest, highest, defined)
    # Within one period the remainder increases with x.
    same_quotient = sympy.Eq(FloorDiv(x.lo, divisor), FloorDiv(x.hi, divisor))
    return Range(
        Select(same_quotient, FloorMod(x.lo, divisor), lowest),
        Select(same_quotient, FloorMod(x.hi, divisor), highest),
        defined,
    )


def _bits(expr: sympy.Expr, parts: list[Range]) -> Range:
    """The range of an operation on bits, from the ranges of its arguments."""
    everything = Range(*map(sympy.Integer, limits(expr)))
    ends = [(part.lo, part.hi) for part in parts]
    if any(end is None for pair in ends for end in pair):
        return everything
    if isinstance(expr, ShiftLeft | ShiftRight):
        farthest = expr.farthest(limits(expr.args[0]))
        x, amounts = ends[0], {Minimum(Maximum(end, 0), farthest) for end in ends[1]}
        most = max(limits(amount)[1] for amount in amounts)
        if any(most > expr.farthest(limits(end)) for end in x):  # a bound may be wider than x
            return everything
        lo, hi = ([expr.func(end, amount) for amount in amounts] for end in x)
        return Range(Minimum(*lo), Maximum(*hi))
    if not all(fits(end, 31) for pair in ends for end in pair):
        return everything
    known_bits = [_known_bits(lo, hi) for lo, hi in ends]
    if isinstance(expr, Popcount):
        return Range(*map(Popcount, known_bits[0]))
    if isinstance(expr, BitAnd | BitOr):
        lo, hi = (expr.func(*bits) for bits in zip(*known_bits, strict=True))
    elif isinstance(expr, BitXor):
        different = BitOr(*(BitXor(*bits) for bits in known_bits))
        one_value = BitXor(*(bits[0] for bits in known_bits))
        lo, hi = BitAnd(one_value, -1 - different), BitOr(one_value, different)
    else:
        return everything
    if limits(hi)[0] >= 0 or limits(lo)[1] < 0:
        return Range(lo, hi)
    any_sign = sympy.And(hi < 0, lo >= 0)
    return Range(Select(any_sign, everything.lo, lo), Select(any_sign, everything.hi, hi))


def _known_bits(lo: sympy.Expr, hi: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """The bits that all numbers from lo to hi have, and the bits that any of them has."""
    if lo == hi:
        return lo, hi
    different = Filled(BitXor(lo, hi))
    return BitAnd(lo, -1 - different), BitOr(lo, different)
