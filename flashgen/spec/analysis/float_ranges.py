"""Interval arithmetic of floats over a tile: the ends are rounded like the elements themselves.

An operation of floats is one rounded operation of IEEE 754 (`spec.language.float_operations`),
and rounding never changes the order of two numbers. The ends of a sum, a product or a quotient are
therefore the same operations on the ends of their operands, infinities included, without any slack;
a kernel, and `evaluate`, round both alike. Functions that are approximated get slack.

An operation whose result may be NaN somewhere in the tile has a condition under which it is not.
The ends themselves may be NaN where that condition is false, or where a number that a call gives is
NaN. Comparisons of ends are therefore written such that NaN means "not known".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import c_float

import sympy

from flashgen.spec.analysis.float_rules import RULES, UNKNOWN, FloatRange
from flashgen.spec.analysis.ranges import range_of
from flashgen.spec.analysis.tile_bounds import TileBounds
from flashgen.spec.language.comparisons import as_float32
from flashgen.spec.language.float_operations import AsFloat
from flashgen.spec.language.integer_limits import fits, limits
from flashgen.spec.language.lets import Let, named
from flashgen.spec.language.symbols import is_int
from flashgen.spec.language.sympy_functions import Maximum, Minimum, Select, branches_of
from flashgen.spec.language.tensor_elements import Element


def float_range(expr: sympy.Expr, tile: TileBounds) -> FloatRange:
    """The range over ``tile`` of a number that is computed or compared as a float."""
    result = tile.float_ranges.get(expr)
    if result is None:
        result = _range(expr, tile) if tile.effort.spend() else UNKNOWN
        if result.lo is None or result.hi is None:
            result = UNKNOWN
        else:
            lo = named(result.lo)
            hi = lo if result.is_one_value else named(result.hi)
            defined = named(result.defined)
            least, most = (float(c_float(end).value) for end in (result.least, result.most))
            result = FloatRange(lo, hi, defined, least, most)
        tile.float_ranges[expr] = result
    return result


def _range(expr: sympy.Expr, tile: TileBounds) -> FloatRange:
    if expr.is_Number:
        value = as_float32(expr)
        return UNKNOWN if math.isnan(value) else FloatRange(expr, expr, sympy.true, value, value)
    if is_int(expr):
        return _integer(expr, tile)
    if isinstance(expr, (sympy.Symbol, Element)):
        return _leaf(expr, tile)
    if isinstance(expr, sympy.Piecewise | Select):
        return _choice(expr, tile)
    rule = RULES.get(expr.func)
    if rule is None:
        return UNKNOWN
    parts = [float_range(arg, tile) for arg in expr.args]
    return UNKNOWN if UNKNOWN in parts else rule(expr, *parts)


def _integer(expr: sympy.Expr, tile: TileBounds) -> FloatRange:
    """The range of integers that are converted to floats, which keeps their order."""
    if not fits(expr):  # computed in floats
        return UNKNOWN
    x = range_of(expr, tile)
    low, high = limits(expr)
    lo, hi = sympy.Integer(low), sympy.Integer(high)
    if x.lo is not None and fits(x.lo):
        lo = x.lo if limits(x.lo)[0] >= low else Maximum(x.lo, lo)
    if x.hi is not None and fits(x.hi):
        hi = x.hi if limits(x.hi)[1] <= high else Minimum(x.hi, hi)
    return FloatRange(lo, hi, x.defined, low, high)


def _leaf(expr: sympy.Expr, tile: TileBounds) -> FloatRange:
    """A number of the call, or a part of a large expression, which is not analysed."""
    if tile.varies(expr) or isinstance(expr, Let):
        return UNKNOWN
    least = 2.0**-126 if expr.is_positive else 0.0 if expr.is_nonnegative else -math.inf
    return FloatRange(expr, expr, sympy.true, least)


def _choice(expr: sympy.Expr, tile: TileBounds) -> FloatRange:
    branches, last = branches_of(expr)
    result = float_range(last, tile)
    for value, condition in reversed(branches):
        part = float_range(value, tile)
        if part.lo is None or part.hi is None or result.lo is None or result.hi is None:
            return UNKNOWN
        must, may = tile.must_and_may(condition, tile)
        result = FloatRange(
            _joined(must, may, part.lo, result.lo, Minimum),
            _joined(must, may, part.hi, result.hi, Maximum),
            sympy.And(part.defined, result.defined),
            min(part.least, result.least),
            max(part.most, result.most),
        )
    return result


def _joined(
    must: sympy.Basic,
    may: sympy.Basic,
    a: sympy.Expr,
    b: sympy.Expr,
    join: Callable[..., sympy.Expr],
) -> sympy.Expr:
    return Select(must, a, Select(may, join(AsFloat(a), AsFloat(b)), b))
