"""Windows: the elements of a tensor that the scores of a warp's part of a tile can read.

A warp has the scores of some adjacent queries and all keys of a tile. Where the indices of an
element take few values there, as ``q - k`` takes rows + keys - 1 for rows * keys scores, the warp
sums their gradients in shared memory, and adds each sum to global memory once per tile.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import sympy

from flashgen.spec.analysis.ranges import range_of
from flashgen.spec.analysis.tile_bounds import TileBounds, linear
from flashgen.spec.analysis.tile_classes import bounds
from flashgen.spec.language.symbols import SCORE, K, Q, is_int
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod, Maximum, Minimum
from flashgen.spec.language.tensor_elements import Element, Greatest, Least

SCORES_PER_SUM = 4
"""A window has at most one sum for this number of scores: more would save few additions."""

Dims = tuple[int | str, ...]


@dataclass(frozen=True)
class WindowAxis:
    """An axis of a tensor along which the elements differ within a tile.

    Attributes:
        axis: the number of the axis.
        first: the first index, from the corners of the warp's part of the tile.
        extent: the number of indices from there on.
    """

    axis: int
    first: sympy.Expr
    extent: int


@dataclass(frozen=True)
class Window:
    """The elements of one read of a tensor: all combinations of the indices of its axes."""

    element: Element
    axes: tuple[WindowAxis, ...]

    @property
    def entries(self) -> int:
        """The number of elements."""
        return math.prod(axis.extent for axis in self.axes)


@functools.lru_cache(maxsize=4096)
def window_of(element: Element, dims: Dims, rows: int, keys: int) -> Window | None:
    """The window of an element; None where it has no bound or is not much smaller than the tile.

    Args:
        dims: the dims of the tensor: numbers, or names where a call determines them.
        rows, keys: the warp's part of a tile.
    """
    axes = []
    for axis, (index, dim) in enumerate(zip(element.indices, dims, strict=True)):
        if not index.free_symbols.isdisjoint((Q, K, SCORE)):
            window_axis = _axis(axis, index, dim, rows, keys)
            if window_axis is None:
                return None
            axes.append(window_axis)
    window = Window(element, tuple(axes))
    return window if SCORES_PER_SUM * window.entries <= rows * keys else None


def _axis(axis: int, index: sympy.Expr, dim: int | str, rows: int, keys: int) -> WindowAxis | None:
    tile = bounds()
    span = None if SCORE in index.free_symbols else width(index, tile, rows, keys)
    whole_axis = WindowAxis(axis, sympy.S.Zero, dim) if isinstance(dim, int) else None
    if span is None or (whole_axis is not None and whole_axis.extent <= span + 1):
        return whole_axis
    first = range_of(index, tile).lo
    if first is None or first.has(Least, Greatest):  # no bound, or one from a min/max table
        return whole_axis
    return WindowAxis(axis, first, span + 1)


def width(expr: sympy.Expr, tile: TileBounds, rows: int, keys: int) -> int | None:
    """An upper bound of max - min of an integer expression over rows x keys adjacent positions;
    None where there is none.
    """
    if not tile.varies(expr):
        return 0
    if expr in (Q, K):
        return (rows if expr == Q else keys) - 1
    if not is_int(expr):
        return None
    if isinstance(expr, sympy.Add | sympy.Mul):
        atoms, _ = linear(expr, tile)
        if not all(weight.is_Integer for weight in atoms.values()) or expr in atoms:
            return None
        widths = [(abs(int(w)), width(atom, tile, rows, keys)) for atom, w in atoms.items()]
        return _total(widths)
    if isinstance(expr, FloorDiv):
        dividend, divisor = expr.args
        span = width(dividend, tile, rows, keys)
        if span is None or tile.varies(divisor) or not is_int(divisor) or not is_int(dividend):
            return None
        return -(-span // abs(int(divisor))) if divisor.is_Integer and divisor != 0 else span
    if isinstance(expr, FloorMod):
        divisor = expr.args[1]
        return abs(int(divisor)) - 1 if divisor.is_Integer and divisor != 0 else None
    if isinstance(expr, Minimum | Maximum | sympy.Min | sympy.Max | sympy.Abs):
        # None of them moves farther than the argument that moves farthest.
        spans = [width(arg, tile, rows, keys) for arg in expr.args]
        return None if None in spans else max(span for span in spans if span is not None)
    return None


def _total(widths: list[tuple[int, int | None]]) -> int | None:
    total = 0
    for weight, span in widths:
        if span is None:
            return None
        total += weight * span
    return total
