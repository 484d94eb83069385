"""Interval arithmetic over a tile, with sympy expressions for the ends.

A tile has a range for each varying position; all other symbols have one value in the whole tile.
Integer ends are exact. Float ends are widened by more than the accumulated float32 rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy

from flashgen.analysis.tile_bounds import End, TileBounds, linear, normal_form, pick_known
from flashgen.language import (
    AsFloat,
    Atan2,
    Cos,
    Element,
    Erf,
    Erfc,
    Exp,
    Expm1,
    FloatPower,
    FloatProduct,
    FloatQuotient,
    FloatSum,
    Floor,
    FloorDiv,
    FloorMod,
    Greatest,
    Least,
    Log,
    Log1p,
    Log2,
    Maximum,
    Minimum,
    Round,
    Sigmoid,
    Sin,
    Tanh,
    is_int,
)
from flashgen.language.bit_functions import BitFunction
from flashgen.language.divisors import is_data, may_be_zero
from flashgen.language.integer_limits import limits
from flashgen.language.lets import Let
from flashgen.language.sympy_functions import Select

# Relative slack of one float operation: many times float32's 2^-24, so that it covers the order of
# summation, fused multiply-add and the rounding of the slack itself.
ROUNDING = sympy.Rational(1, 2**18)
# tanh and sigmoid may be hardware approximations with an error of about 2^-11.
APPROXIMATION = sympy.Rational(1, 2**9)
# exp of more than this overflows float32.
EXPONENT_LIMIT = 80

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


def range_of(expr: sympy.Expr, tile: TileBounds) -> Range:
    """The range of ``expr`` over ``tile``."""
    if not tile.varies(expr):
        return Range(expr, expr)
    if expr in tile.ends:
        return Range(*tile.ends[expr])
    if isinstance(expr, Let):  # no bound: a part of a large expression is not analysed
        return Range(None, None, sympy.false)
    if isinstance(expr, AsFloat | FloatSum | FloatProduct | FloatQuotient | FloatPower):
        return Range(None, None, sympy.false)
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
    if isinstance(expr, BitFunction):
        least_value, greatest_value = map(sympy.Integer, limits(expr))
        known = sympy.And(*(range_of(arg, tile).defined for arg in expr.args))
        return Range(least_value, greatest_value, known)
    parts = [range_of(arg, tile) for arg in expr.args]
    defined = sympy.And(*(part.defined for part in parts))
    if isinstance(expr, Minimum | sympy.Min):
        lo, hi = least(*(p.lo for p in parts)), pick_known(Minimum, (p.hi for p in parts))
        return Range(lo, hi, defined)
    if isinstance(expr, Maximum | sympy.Max):
        lo, hi = pick_known(Maximum, (p.lo for p in parts)), greatest(*(p.hi for p in parts))
        return Range(lo, hi, defined)
    return _function(expr, parts, defined)


def _function(expr: sympy.Expr, parts: list[Range], defined: sympy.Basic) -> Range:
    x = parts[0]
    if isinstance(expr, sympy.Abs):
        if x.lo is None or x.hi is None:
            return Range(sympy.S.Zero, None, defined)
        return Range(
            Maximum(0, x.lo, _times(_MINUS, x.hi)), Maximum(x.hi, _times(_MINUS, x.lo)), defined
        )
    if isinstance(expr, Sin | Cos):
        return Range(-1 - APPROXIMATION, 1 + APPROXIMATION, defined)
    if isinstance(expr, Atan2):
        return Range(sympy.Integer(-4), sympy.Integer(4), defined)
    if x.lo is None or x.hi is None:
        return Range(None, None, defined)
    if isinstance(expr, Erf):
        return _outward(Range(Erf(x.lo), Erf(x.hi), defined), ROUNDING)
    if isinstance(expr, Erfc):
        return _outward(Range(Erfc(x.hi), Erfc(x.lo), defined), ROUNDING, sympy.S.One)
    if isinstance(expr, Log1p):
        nearest = sympy.Rational(1, 2**20) - 1
        above = sympy.And(defined, x.lo > nearest)
        low, high = Maximum(nearest, x.lo), Maximum(nearest, x.hi)
        return _outward(Range(Log1p(low), Log1p(high), above), ROUNDING)
    if isinstance(expr, Floor | Round | sympy.sign):
        return Range(expr.func(x.lo), expr.func(x.hi), defined)
    if isinstance(expr, Exp | Expm1):
        inside = sympy.And(defined, x.hi < EXPONENT_LIMIT)
        return _outward(Range(expr.func(x.lo), expr.func(x.hi), inside), ROUNDING)
    if isinstance(expr, Tanh | Sigmoid):
        return _outward(Range(expr.func(x.lo), expr.func(x.hi), defined), APPROXIMATION)
    if isinstance(expr, Log | Log2):
        positive = sympy.And(defined, x.lo > 0)
        safe = Maximum(x.lo, sympy.Rational(1, 2**100))
        return _outward(Range(expr.func(safe), expr.func(Maximum(safe, x.hi)), positive), ROUNDING)
    return Range(None, None, sympy.false)


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
    others = (i for place, i in enumerate(expr.indices) if place != axis)
    args = (expr.tensor, sympy.Integer(axis), index.lo, index.hi, *others)
    return Range(Least(*args), Greatest(*args))


def _magnitude(x: Range) -> sympy.Expr:
    return Maximum(x.hi, _times(_MINUS, x.lo))


def _outward(x: Range, slack: sympy.Rational, magnitude: sympy.Expr | None = None) -> Range:
    if x.lo is None or x.hi is None:
        return x
    room = slack * ((_magnitude(x) if magnitude is None else magnitude) + slack)
    return Range(x.lo - room, x.hi + room, x.defined)


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
    return sympy.expand_mul(weight * end)


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
    result = Range(
        None if lo is None else sympy.expand_mul(lo + rest),
        None if hi is None else sympy.expand_mul(hi + rest),
        defined,
    )
    if is_int(expr) or lo is None or hi is None:
        return result
    magnitude = sympy.Add(*(_magnitude(piece) for piece in pieces), Maximum(rest, -rest))
    return _outward(result, ROUNDING, magnitude)


def _pieces(
    atoms: Mapping[sympy.Expr, sympy.Expr], tile: TileBounds
) -> list[tuple[sympy.Expr, Range]]:
    """(weight, range) of each atom; two floor divisions at a constant distance are one piece."""
    left = dict(atoms)
    pieces: list[tuple[sympy.Expr, Range]] = []
    for atom in list(left):
        if atom not in left:
            continue
        weight = left.pop(atom)
        for other in list(left):
            step = _step_between(atom, other, tile)
            if step is not None and weight + left[other] == 0:
                del left[other]
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
    step = sympy.expand(a.args[0] - b.args[0])
    divisor = a.args[1]
    if tile.varies(step) or tile.varies(divisor) or not divisor.is_positive or not is_int(step):
        return None
    return step


def _within_form(
    atoms: Mapping[sympy.Expr, sympy.Expr], lo: End, hi: End, tile: TileBounds
) -> tuple[End, End]:
    """The ends, tightened by the context's bounds of the same linear form."""
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
    exact = is_int(factors[0])
    for factor in factors[1:]:
        y = range_of(factor, tile)
        exact = exact and is_int(factor)
        defined = sympy.And(x.defined, y.defined)
        if x.lo is None or x.hi is None or y.lo is None or y.hi is None:
            x = Range(None, None, defined)
            continue
        corners = [a * b for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
        x = Range(Minimum(*corners), Maximum(*corners), defined)
        x = x if exact else _outward(x, ROUNDING)
    return x


def _power(expr: sympy.Expr, tile: TileBounds) -> Range:
    base, exponent = expr.args
    if base.is_number and base.is_positive:
        x = range_of(exponent, tile)
        if x.lo is None or x.hi is None:
            return Range(None, None, x.defined)
        grows = bool((base - 1).is_nonnegative)
        lo, hi = (base**x.lo, base**x.hi) if grows else (base**x.hi, base**x.lo)
        inside = sympy.And(x.defined, hi < 2**100)
        return _outward(Range(lo, hi, inside), ROUNDING)
    if not exponent.is_Rational:
        return Range(None, None, sympy.false)
    if exponent < 0:
        return _reciprocal(range_of(base**-exponent, tile))
    x = range_of(base, tile)
    if x.lo is None or x.hi is None:
        return Range(None, None, x.defined)
    if not exponent.is_Integer:
        real = sympy.And(x.defined, x.lo >= 0)
        low, high = Maximum(x.lo, 0), Maximum(x.hi, 0)
        return _outward(Range(low**exponent, high**exponent, real), ROUNDING)
    if exponent % 2 == 0:
        near = Maximum(0, x.lo, _times(_MINUS, x.hi))
        far = Maximum(x.hi, _times(_MINUS, x.lo))
        result = Range(near**exponent, far**exponent, x.defined)
    else:
        result = Range(x.lo**exponent, x.hi**exponent, x.defined)
    return result if is_int(expr) else _outward(result, ROUNDING * exponent)


def _reciprocal(x: Range) -> Range:
    if x.lo is None or x.hi is None or x.lo.is_zero or x.hi.is_zero:
        return Range(None, None, sympy.false)
    nonzero = sympy.And(x.defined, sympy.Or(x.lo > 0, x.hi < 0))
    return _outward(Range(1 / x.hi, 1 / x.lo, nonzero), ROUNDING)


def _choice(expr: sympy.Expr, tile: TileBounds) -> Range:
    if isinstance(expr, Select):
        branches, last = [(expr.args[1], expr.args[0])], expr.args[2]
    else:
        *branches, (last, _) = expr.args
    result = range_of(last, tile)
    for value, condition in reversed(branches):
        part = range_of(value, tile)
        yes, some = tile.must_and_may(condition, tile)
        result = Range(
            _joined(yes, some, part.lo, result.lo, least),
            _joined(yes, some, part.hi, result.hi, greatest),
            sympy.And(part.defined, result.defined),
        )
    return result


def _joined(yes: sympy.Basic, some: sympy.Basic, a: End, b: End, join: Callable[..., End]) -> End:
    if a is None or b is None:
        return None
    either = join(a, b)
    if either == a:
        return Select(some, a, b)
    return Select(yes, a, b) if either == b else Select(yes, a, Select(some, either, b))


def _quotient(expr: sympy.Expr, tile: TileBounds) -> Range:
    x, divisor = range_of(expr.args[0], tile), expr.args[1]
    if not is_int(expr):
        ratio = range_of(expr.args[0] / divisor, tile)
        if ratio.lo is None or ratio.hi is None:
            return ratio
        return Range(Floor(ratio.lo), Floor(ratio.hi), ratio.defined)
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
    unit = 1 if is_int(expr) else 0
    if divisor.is_nonnegative:
        lowest, highest = sympy.S.Zero, d.hi - unit
        if is_data(divisor) and may_be_zero(divisor):
            highest = Maximum(highest, 0)
    else:
        lowest, highest = Minimum(d.lo + unit, 0), Maximum(d.hi - unit, 0)
    defined = sympy.And(x.defined, d.defined)
    if tile.varies(divisor):
        defined = sympy.And(defined, sympy.Or(d.lo > 0, d.hi < 0))
    if not is_int(expr):
        return _outward(Range(lowest, highest, defined), ROUNDING)
    if x.lo is None or x.hi is None or tile.varies(divisor):
        return Range(lowest, highest, defined)
    # Within one period the remainder increases with x.
    together = sympy.Eq(FloorDiv(x.lo, divisor), FloorDiv(x.hi, divisor))
    return Range(
        Select(together, FloorMod(x.lo, divisor), lowest),
        Select(together, FloorMod(x.hi, divisor), highest),
        defined,
    )
