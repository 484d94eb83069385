"""Rules for ATen's searches in sorted boundaries: ``torch.bucketize`` and ``torch.searchsorted``.

The bucket of a value is the number of boundaries below it, which a kernel counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from flashgen.frontends.flex.traced_array import (
    Entry,
    Index,
    Result,
    TracedArray,
    literal,
    number,
    single,
)
from flashgen.spec.language.mod_functions import where
from flashgen.spec.language.traced import Traced, Value

MOST_BOUNDARIES = 256


def _bucketize(
    result: Result, /, x: Any, boundaries: TracedArray, *, right: bool = False, **_: Any
) -> TracedArray:
    return _counted(result, "bucketize", x, boundaries, right)


def _searchsorted(
    result: Result,
    /,
    boundaries: TracedArray,
    x: Any,
    *,
    right: bool = False,
    side: str | None = None,
    sorter: TracedArray | None = None,
    **_: Any,
) -> TracedArray:
    if sorter is not None:
        result.tracer.refuse("searchsorted with a sorter", way_out="boundaries that are sorted")
    return _counted(result, "searchsorted", x, boundaries, right or side == "right")


def _counted(
    result: Result, name: str, x: Any, boundaries: TracedArray, right: bool
) -> TracedArray:
    values = x if isinstance(x, TracedArray) else single(literal(x), result.dtype)
    if len(boundaries.shape) != 1 or boundaries.shape[0] > MOST_BOUNDARIES:
        result.tracer.refuse(
            f"torch.{name} counts boundaries of one dimension, at most {MOST_BOUNDARIES}",
            numbers=f"boundaries of shape {boundaries.shape}",
            way_out="fewer boundaries, or the buckets of all distances as a captured tensor",
        )
    result.tracer.rigid = True  # one comparison for each boundary

    def element_at(indices: tuple[Index, ...]) -> Entry:
        value = number(values.at(indices).whole)
        count: Traced = Value(sympy.S.Zero)
        for index in range(boundaries.shape[0]):
            edge = number(boundaries.at((index,)).whole)
            above = value < edge if right else value <= edge  # false for NaN, which comes last
            count = count + where(above, 0, 1)
        return Entry(count)

    return result.array(element_at, values.sizes)


RULES: dict[str, Callable[..., Any]] = {"bucketize": _bucketize, "searchsorted": _searchsorted}
"""The rule of each operation by its name; it takes and returns arrays."""
