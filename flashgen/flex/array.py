"""Values inside a torch mod: arrays of traced numbers, most of them without dimensions.

An array is a function from indices to elements. Indexing, views and arithmetic on captured tensors
make functions of functions, and only the elements that a mod returns become expressions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy
import torch

from flashgen.expr import Traced, where
from flashgen.expr.literal import LARGEST_LITERAL
from flashgen.expr.traced import Value, as_expr

Index = Traced | int
Number = bool | int | float


@dataclass(frozen=True)
class Entry:
    """A number or a condition, or minus infinity.

    Attributes:
        value: what it is wherever it is finite.
        lost: where it is minus infinity; None for nowhere.
    """

    value: Traced
    lost: Traced | None = None

    @property
    def is_lost(self) -> bool:
        """True for minus infinity itself."""
        return self.lost is not None and self.lost.expr == sympy.true


@dataclass(frozen=True)
class Array:
    """
    Attributes:
        shape: its lengths while the mod is read.
        dtype: torch's; elements of bools are conditions.
        at: the element at some indices, none of them negative.
        sizes: a length of each dimension that is right in other calls too, where there is one.
        data: the numbers themselves, of arrays that a mod makes of constants.
        learned: the same array as one that has no gradient; None where that is no other.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    at: Callable[[tuple[Index, ...]], Entry]
    sizes: tuple[Callable[[], Index], ...] = ()
    data: torch.Tensor | None = None
    detached: Callable[[], Array] | None = None

    @property
    def entry(self) -> Entry:
        return self.at(())


def single(entry: Entry, dtype: torch.dtype) -> Array:
    """An array without dimensions."""
    return Array((), dtype, lambda _: entry)


def literal(value: Number) -> Entry:
    """Minus infinity, and what float32 makes of it, are kept apart from numbers."""
    if isinstance(value, float) and value < -LARGEST_LITERAL and not math.isnan(value):
        return Entry(Value(sympy.S.Zero), Value(sympy.true))
    return Entry(Value(as_expr(value)))


def number(x: Traced) -> Traced:
    """A condition as 0 or 1."""
    return where(x, 1, 0) if x.is_condition else x


def condition(x: Traced) -> Traced:
    """A number as whether it is not 0."""
    if x.is_condition:
        return x
    expr = x.expr
    if isinstance(expr, sympy.Piecewise) and len(expr.args) == 2:
        (yes, test), (no, _) = expr.args
        if yes == 1 and no == 0:
            return Value(test, x.captures)
    return x != 0


def either(a: Traced | None, b: Traced | None) -> Traced | None:
    if a is None or b is None:
        return a if b is None else b
    return a | b


def strides_of(shape: Sequence[int]) -> list[int]:
    """The distance between neighbours of each dimension, in a contiguous array."""
    return [math.prod(shape[place + 1 :]) for place in range(len(shape))]
