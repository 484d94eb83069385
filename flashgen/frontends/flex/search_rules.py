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
    to: Result, /, x: Any, boundaries: TracedArray, *, right: bool = False, **_: Any
) -> TracedArray:
    return _counted(to, "bucketize", x, boundaries, right)


def _searchsorted(
    to: Result,
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
        to.tracer.refuse("searchsorted with a sorter", way_out="boundaries that are sorted")
    return _counted(to, "searchsorted", x, boundaries, right or side == "right")


def _counted(to: Result, name: str, x: Any, boundaries: TracedArray, right: bool) -> TracedArray:
    values = x if isinstance(x, TracedArray) else single(literal(x), to.dtype)
    if len(boundaries.shape) != 1 or boundaries.shape[0] > MOST_BOUNDARIES:
        to.tracer.refuse(
            f"torch.{name} counts boundaries of one dimension, at most {MOST_BOUNDARIES}",
            numbers=f"boundaries of shape {boundaries.shape}",
            way_out="fewer boundaries, or the buckets of all distances as a captured tensor",
        )
    to.tracer.rigid = True  # one comparison for each boundary

    def at(indices: tuple[Index, ...]) -> Entry:
        value = number(values.at(indices).whole)
        count: Traced = Value(sympy.S.Zero)
        for place in range(boundaries.shape[0]):
            edge = number(boundaries.at((place,)).whole)
            above = value < edge if right else value <= edge  # false for NaN, which comes last
            count = count + where(above, 0, 1)
        return Entry(count)

    return to.array(at, values.sizes)


RULES: dict[str, Callable[..., Any]] = {"bucketize": _bucketize, "searchsorted": _searchsorted}
"""The rule of each operation by its name; it takes and returns arrays."""
