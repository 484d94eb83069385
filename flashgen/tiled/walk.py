"""Which tiles are visited: the analysis' classification, a row or a column of tiles at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from flashgen.analysis import MaskAnalysis, evaluate
from flashgen.expr import K_HI, K_LO, Q_HI, Q_LO

Array = np.ndarray[Any, np.dtype[Any]]

EMPTY, MIXED, FULL = 0, 1, 2

_MOST_KEPT = 1 << 14
"""Runs of one walk that are kept for the next call, some 2 MiB; longer sequences find them anew."""


@dataclass(frozen=True)
class Axis:
    """Positions along q or k, in tiles.

    Attributes:
        length: of the sequence.
        block: positions per tile; the last tile may have fewer.
        offset: global position of the first.
    """

    length: int
    block: int
    offset: int

    def tiles(self) -> Iterator[tuple[int, int]]:
        """First position of each tile and the first after it, counted from 0."""
        for start in range(0, self.length, self.block):
            yield start, min(start + self.block, self.length)

    def corners(self) -> tuple[Array, Array]:
        """Global first and last position of every tile, int64."""
        first = np.arange(0, self.length, self.block, dtype=np.int64)
        last = np.minimum(first + self.block, self.length) - 1
        return first + self.offset, last + self.offset


@dataclass(frozen=True)
class Run:
    """Neighbouring tiles of one class, treated as one tile.

    Attributes:
        start, stop: positions along the walked axis, counted from 0.
        full: the mask is true everywhere, and need not be evaluated.
    """

    start: int
    stop: int
    full: bool


class Layout:
    """A block-sparse layout, for some (batch, head) pairs together.

    Args:
        live: numpy bool [pairs or 1, rows, columns] of blocks.
        block_q, block_k: positions per block.
    """

    def __init__(self, live: Array, block_q: int, block_k: int) -> None:
        self.live = live
        self.block_q = block_q
        self.block_k = block_k

    def of_tiles(
        self, q: tuple[Array | np.int64, ...], k: tuple[Array | np.int64, ...]
    ) -> tuple[Array, Array]:
        """Of each tile with these corners, whether some and whether every block in it is live.

        One of the two axes has one tile; the other axis' blocks are counted up to each place, so
        that no tile looks at its blocks one by one.

        Returns:
            Twice bool [pairs or 1, tiles].
        """
        rows = [np.clip(end // self.block_q, 0, self.live.shape[1] - 1) for end in q]
        columns = [np.clip(end // self.block_k, 0, self.live.shape[2] - 1) for end in k]
        if np.ndim(rows[0]) == 0:
            owned, (first, last) = self.live[:, rows[0] : rows[1] + 1], columns
            axis = 1
        else:
            owned, (first, last) = self.live[:, :, columns[0] : columns[1] + 1], rows
            axis = 2
        found = []
        for lines in (owned.any(axis), ~owned.all(axis)):
            counts = np.cumsum(np.pad(lines, ((0, 0), (1, 0))), axis=1)
            found.append(counts[:, last + 1] > counts[:, first])
        return found[0], ~found[1]


class Walk:
    """The tiles of one problem, classified for some (batch, head) pairs together.

    A tile is empty when it is so for every pair, and full when it is so for every pair.

    Args:
        mask: the mask's analysis.
        env: values of the sizes and scalars that the mask uses, and of b and h: numpy int64 [n, 1]
            where the mask depends on them.
        queries, keys: the two axes.
        layout: a block-sparse one, for the same pairs; None for none.
    """

    def __init__(
        self,
        mask: MaskAnalysis,
        env: Iterable[tuple[sympy.Symbol, Any]],
        queries: Axis,
        keys: Axis,
        layout: Layout | None = None,
    ) -> None:
        self.mask = mask
        self.layout = layout
        self.env = {symbol: _exact(value) for symbol, value in env}
        self.queries = queries
        self.keys = keys
        self._q_corners = queries.corners()
        self._k_corners = keys.corners()
        self._room = _MOST_KEPT
        self._kept: dict[tuple[str, int, int], list[Run]] = {}

    def of_queries(self, start: int, stop: int) -> Array:
        """The class of every key tile for the query rows [start, stop)."""
        lo, hi = start + self.queries.offset, stop + self.queries.offset - 1
        return self._classes((np.int64(lo), np.int64(hi)), self._k_corners, len(self._k_corners[0]))

    def of_keys(self, start: int, stop: int) -> Array:
        """The class of every query tile for the keys [start, stop)."""
        lo, hi = start + self.keys.offset, stop + self.keys.offset - 1
        return self._classes(self._q_corners, (np.int64(lo), np.int64(hi)), len(self._q_corners[0]))

    def key_runs(self, start: int, stop: int, most: int) -> list[Run]:
        """The key tiles that the query rows [start, stop) reach, joined up to ``most`` keys."""
        return self._runs("keys", start, stop, most)

    def query_runs(self, start: int, stop: int, most: int) -> list[Run]:
        """The query tiles that reach the keys [start, stop), joined up to ``most`` rows."""
        return self._runs("queries", start, stop, most)

    def _runs(self, axis: str, start: int, stop: int, most: int) -> list[Run]:
        runs = self._kept.get((axis, start, most))
        if runs is None:
            if axis == "keys":
                runs = _joined(self.of_queries(start, stop), self.keys, most)
            else:
                runs = _joined(self.of_keys(start, stop), self.queries, most)
            self._room -= 1 + len(runs)
            if self._room >= 0:
                self._kept[axis, start, most] = runs
        return runs

    def _classes(
        self, q: tuple[Array | np.int64, ...], k: tuple[Array | np.int64, ...], count: int
    ) -> Array:
        if self.mask.always and self.layout is None:
            return np.full(count, FULL)
        corners = {Q_LO: q[0], Q_HI: q[1], K_LO: k[0], K_HI: k[1]}
        values = {**self.env, **corners}
        with np.errstate(all="ignore"):  # what is undefined counts as mixed, by `may` and `must`
            some = _each(evaluate(self.mask.may, values), count)
            every = _each(evaluate(self.mask.must, values), count)
        if self.layout is not None:
            live, all_live = self.layout.of_tiles(q, k)
            some, every = some & live, every & all_live
        return np.where(some.any(axis=0), np.where(every.all(axis=0), FULL, MIXED), EMPTY)


def _exact(value: Any) -> Any:
    """Python's numbers as numpy's: of these a division by 0 is no exception."""
    if isinstance(value, float):
        return np.float64(value)
    return np.int64(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _each(condition: Any, count: int) -> Array:
    """Bool [pairs or 1, count]."""
    found = np.asarray(condition, dtype=bool)
    return np.broadcast_to(found, (found.shape[0] if found.ndim == 2 else 1, count))


def _joined(classes: Array, axis: Axis, most: int) -> list[Run]:
    together = max(1, most // axis.block)
    runs = []
    place, kinds = 0, classes.tolist()
    while place < len(kinds):
        first = place
        while place < len(kinds) and kinds[place] == kinds[first] and place - first < together:
            place += 1
        if kinds[first] != EMPTY:
            stop = min(place * axis.block, axis.length)
            runs.append(Run(first * axis.block, stop, kinds[first] == FULL))
    return runs
