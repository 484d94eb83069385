"""The walk over tiles: the classes of a row or a column of tiles, evaluated on numpy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from flashgen.analysis.evaluate import evaluate
from flashgen.analysis.mask import MaskAnalysis
from flashgen.language import K_HI, K_LO, Q_HI, Q_LO

Array = np.ndarray[Any, np.dtype[Any]]

EMPTY, MIXED, FULL = 0, 1, 2

_MOST_KEPT = 1 << 14
"""The number of runs that a walk caches, about 2 MiB."""


@dataclass(frozen=True)
class TileAxis:
    """The tiles along q or k.

    Attributes:
        length: the length of the sequence.
        block: positions per tile; the last tile may have fewer.
        offset: the global position of the first position.
    """

    length: int
    block: int
    offset: int

    def tiles(self) -> Iterator[tuple[int, int]]:
        """The first position of each tile and the end of the tile, counted from 0."""
        for start in range(0, self.length, self.block):
            yield start, min(start + self.block, self.length)

    def corners(self) -> tuple[Array, Array]:
        """The global first and last positions of all tiles, int64 [tiles] each."""
        first = np.arange(0, self.length, self.block, dtype=np.int64)
        last = np.minimum(first + self.block, self.length) - 1
        return first + self.offset, last + self.offset


@dataclass(frozen=True)
class TileRun:
    """Adjacent tiles of one class, processed as one tile.

    Attributes:
        start, stop: positions along the walked axis, counted from 0.
        full: whether the mask is true everywhere, so that it need not be evaluated.
    """

    start: int
    stop: int
    full: bool


class BlockLayoutTiles:
    """Classifies tiles by a block-sparse layout, for several (batch, head) pairs together.

    Args:
        live: whether each block is live, numpy bool [pairs or 1, rows, columns].
        block_q, block_k: positions per block.
    """

    def __init__(self, live: Array, block_q: int, block_k: int) -> None:
        self.live = live
        self.block_q = block_q
        self.block_k = block_k

    def of_tiles(
        self, q: tuple[Array | np.int64, ...], k: tuple[Array | np.int64, ...]
    ) -> tuple[Array, Array]:
        """Whether some block and whether every block in each tile with these corners is live.

        One of the two axes has a single tile. Prefix sums along the other axis give the results of
        all tiles at once.

        Returns:
            Two bool arrays [pairs or 1, tiles].
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


class TileWalk:
    """The tiles of one problem, classified for several (batch, head) pairs together.

    A tile is empty if it is empty for every pair, and full if it is full for every pair.

    Args:
        mask: the analysis of the mask.
        env: the values of the sizes and scalars that the mask uses, and of b and h (numpy int64
            [pairs, 1]) if the mask depends on them.
        queries, keys: the two axes.
        layout: the block-sparse layout of the same pairs; None without one.
    """

    def __init__(
        self,
        mask: MaskAnalysis,
        env: Iterable[tuple[sympy.Symbol, Any]],
        queries: TileAxis,
        keys: TileAxis,
        layout: BlockLayoutTiles | None = None,
    ) -> None:
        self.mask = mask
        self.layout = layout
        self.env = {symbol: _exact(value) for symbol, value in env}
        self.queries = queries
        self.keys = keys
        self._q_corners = queries.corners()
        self._k_corners = keys.corners()
        self._room = _MOST_KEPT
        self._kept: dict[tuple[str, int, int], list[TileRun]] = {}

    def of_queries(self, start: int, stop: int) -> Array:
        """The class of every key tile for the query rows [start, stop)."""
        lo, hi = start + self.queries.offset, stop + self.queries.offset - 1
        return self._classes((np.int64(lo), np.int64(hi)), self._k_corners, len(self._k_corners[0]))

    def of_keys(self, start: int, stop: int) -> Array:
        """The class of every query tile for the keys [start, stop)."""
        lo, hi = start + self.keys.offset, stop + self.keys.offset - 1
        return self._classes(self._q_corners, (np.int64(lo), np.int64(hi)), len(self._q_corners[0]))

    def key_runs(self, start: int, stop: int, most: int) -> list[TileRun]:
        """The key tiles that the rows [start, stop) reach, in runs of at most ``most`` keys."""
        return self._runs("keys", start, stop, most)

    def query_runs(self, start: int, stop: int, most: int) -> list[TileRun]:
        """The query tiles that reach the keys [start, stop), in runs of at most ``most`` rows."""
        return self._runs("queries", start, stop, most)

    def _runs(self, axis: str, start: int, stop: int, most: int) -> list[TileRun]:
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
        with np.errstate(
            all="ignore"
        ):  # `may` and `must` classify tiles with undefined values as mixed
            some = _each(evaluate(self.mask.may, values), count)
            every = _each(evaluate(self.mask.must, values), count)
        if self.layout is not None:
            live, all_live = self.layout.of_tiles(q, k)
            some, every = some & live, every & all_live
        return np.where(some.any(axis=0), np.where(every.all(axis=0), FULL, MIXED), EMPTY)


def _exact(value: Any) -> Any:
    """Python numbers as numpy numbers, whose division by 0 raises no exception."""
    if isinstance(value, float):
        return np.float64(value)
    return np.int64(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _each(condition: Any, count: int) -> Array:
    """The condition as bool [pairs or 1, count]."""
    found = np.asarray(condition, dtype=bool)
    return np.broadcast_to(found, (found.shape[0] if found.ndim == 2 else 1, count))


def _joined(classes: Array, axis: TileAxis, most: int) -> list[TileRun]:
    together = max(1, most // axis.block)
    runs = []
    place, kinds = 0, classes.tolist()
    while place < len(kinds):
        first = place
        while place < len(kinds) and kinds[place] == kinds[first] and place - first < together:
            place += 1
        if kinds[first] != EMPTY:
            stop = min(place * axis.block, axis.length)
            runs.append(TileRun(first * axis.block, stop, kinds[first] == FULL))
    return runs
