"""Values inside a torch mod: arrays of traced numbers, most of them without dimensions.

An array is a function from indices to elements. Indexing, views and arithmetic on captured tensors
compose such functions, so that only the elements that a mod returns become expressions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from flashgen.shared.dtypes import FLOAT32_MAX, Number
from flashgen.spec.language.float_operations import plain
from flashgen.spec.language.mod_functions import where
from flashgen.spec.language.traced import Traced, Value, as_expr

Index = Traced | int


@dataclass(frozen=True)
class Entry:
    """An element of an array: a number or a condition, which may be minus infinity.

    Attributes:
        value: the value wherever it is finite.
        lost: the condition under which it is minus infinity; None if it is finite everywhere.
    """

    value: Traced
    lost: Traced | None = None

    @property
    def is_lost(self) -> bool:
        """True for minus infinity itself."""
        return self.lost is not None and self.lost.expr == sympy.true

    @property
    def whole(self) -> Traced:
        """The value, minus infinity included."""
        if self.lost is None:
            return self.value
        return where(self.lost, Value(as_expr(-math.inf)), number(self.value))


@dataclass(frozen=True)
class TracedArray:
    """A torch tensor inside a mod, as a function from indices to elements.

    Attributes:
        shape: the lengths at the time of tracing.
        dtype: the torch dtype; elements of bool arrays are conditions.
        at: the element at the given indices, none of which is negative.
        sizes: for each dimension its length, as a value that is also valid in other calls.
        data: the numbers, for an array that the mod makes of constants.
        detached: the same array without a gradient; None where it has none anyway.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    at: Callable[[tuple[Index, ...]], Entry]
    sizes: tuple[Callable[[], Index], ...] = ()
    data: torch.Tensor | None = None
    detached: Callable[[], TracedArray] | None = None

    @property
    def entry(self) -> Entry:
        return self.at(())

    def broadcast(self, indices: tuple[Index, ...]) -> tuple[Index, ...]:
        """The indices of the element that broadcasting puts at ``indices`` of a larger array."""
        own_indices = indices[len(indices) - len(self.shape) :]
        return tuple(0 if n == 1 else i for n, i in zip(self.shape, own_indices, strict=True))


@dataclass(frozen=True)
class Result:
    """The results of an operation, as torch announces them to the operation's rule.

    Attributes:
        tracer: the `Tracer`.
        shapes: a shape for each result.
    """

    tracer: Any
    dtype: torch.dtype
    shapes: list[tuple[int, ...]]

    def array(
        self,
        element_at: Callable[[tuple[Index, ...]], Entry],
        sizes: Sequence[Callable[[], Index]] | None = None,
    ) -> TracedArray:
        """An array of the first shape; without ``sizes`` its lengths are the same in all calls."""
        shape = self.shapes[0]
        if not shape:
            return single(element_at(()), self.dtype)
        return TracedArray(
            shape, self.dtype, element_at, fixed(shape) if sizes is None else tuple(sizes)
        )


def fixed(shape: Sequence[int]) -> tuple[Callable[[], Index], ...]:
    """Lengths that are the same in all calls."""
    return tuple(functools.partial(int, length) for length in shape)


def single(entry: Entry, dtype: torch.dtype) -> TracedArray:
    """An array without dimensions."""
    return TracedArray((), dtype, lambda _: entry)


def literal(value: Number) -> Entry:
    """The entry of a number; a value below the range of float32 counts as minus infinity."""
    if isinstance(value, float) and value < -FLOAT32_MAX and not math.isnan(value):
        return Entry(Value(sympy.S.Zero), Value(sympy.true))
    return Entry(Value(as_expr(value)))


def number(x: Traced) -> Traced:
    """A condition as 0 or 1."""
    return where(x, 1, 0) if x.is_condition else x


def condition(x: Traced) -> Traced:
    """A number as the condition that it is not 0."""
    if x.is_condition:
        return x
    expr = plain(x.expr)
    if isinstance(expr, sympy.Piecewise) and len(expr.args) == 2:
        (yes, test), (no, _) = expr.args
        if yes == 1 and no == 0:
            return Value(test, x.captures)
    return x != 0


def either(a: Traced | None, b: Traced | None) -> Traced | None:
    if a is None or b is None:
        return a if b is None else b
    return a | b
