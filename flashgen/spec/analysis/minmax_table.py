"""Min/max tables: the least or greatest element of any range of a captured tensor, in two reads.

A sparse table: entry (level, i) is the minimum or maximum of 2^level spans of `SPAN` elements from
the i-th span on. Two entries of one level, which may overlap, cover a range. Kernels read the same
table from memory (templates/common/minmax_table.cu.j2), with the same spans, and skip the same
tiles.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from flashgen.shared.launch_facts import SPAN

Array = np.ndarray[Any, np.dtype[Any]]


class MinMaxTable:
    """The min/max table of one tensor along one axis.

    Args:
        tensor: integers or bools; no dimension has length 0.
        least: whether the table holds minima instead of maxima.
    """

    def __init__(self, tensor: Array, axis: int, least: bool) -> None:
        self.combine = np.minimum if least else np.maximum
        lines = np.moveaxis(tensor, axis, -1)
        self.size = lines.shape[-1]
        starts = np.arange(0, self.size, SPAN)
        level = self.combine.reduceat(lines, starts, axis=-1)
        self.levels = [level]
        while 1 << len(self.levels) <= len(starts):
            half = 1 << (len(self.levels) - 1)
            level = self.combine(level[..., :-half], level[..., half:])
            self.levels.append(level)

    def over(self, lo: Any, hi: Any, *others: Any) -> Any:
        """The minimum or maximum of the elements lo to hi, both inclusive, clamped to the tensor.

        The arguments are numbers or broadcastable arrays; ``others`` are the indices on the other
        axes.
        """
        first = np.clip(np.asarray(lo, dtype=np.int64), 0, self.size - 1)
        last = np.maximum(np.clip(np.asarray(hi, dtype=np.int64), 0, self.size - 1), first)
        first, last = first // SPAN, last // SPAN
        level = np.frexp((last - first + 1).astype(float))[1] - 1  # floor of log2, exact
        first, last, level, *rest = np.broadcast_arrays(first, last, level, *others)
        result = np.empty(level.shape, dtype=np.int64)
        for n in np.unique(level):
            at_level = level == n
            table = self.levels[n]
            row = tuple(
                np.clip(other[at_level], 0, size - 1)
                for other, size in zip(rest, table.shape[:-1], strict=True)
            )
            result[at_level] = self.combine(
                table[(*row, first[at_level])], table[(*row, last[at_level] - (1 << n) + 1)]
            )
        return result if result.ndim else result.item()


_tables: dict[tuple[int, int, bool], tuple[Any, MinMaxTable]] = {}


def table_of(tensor: Array, axis: int, least: bool) -> MinMaxTable:
    """The table of a tensor, cached while the array object exists; the array must not change."""
    key = id(tensor), axis, least
    cached = _tables.get(key)
    if cached is None or cached[0]() is not tensor:
        reference = weakref.ref(tensor, lambda _: _tables.pop(key, None))
        cached = reference, MinMaxTable(tensor, axis, least)
        _tables[key] = cached
    return cached[1]
