"""The walk over tiles: the classes of a row or a column of tiles, evaluated on numpy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from flashgen.shared.dtypes import SCALAR_DTYPES, Number
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.intervals import Interval
from flashgen.spec.analysis.mask import MaskAnalysis
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import BATCH, HEADS, K_HI, K_LO, Q_HI, Q_LO, SEQ_K, SEQ_Q

Array = np.ndarray[Any, np.dtype[Any]]

EMPTY, MIXED, FULL = 0, 1, 2

_MOST_KEPT = 1 << 14
"""The number of runs that a walk caches, about 2 MiB."""


def numbers_of(
    spec: AttentionSpec, sizes: tuple[int, int, int, int], scalars: Mapping[str, Number]
) -> dict[sympy.Symbol, Number]:
    """The values of batch, heads, seq_q and seq_k, and of a call's scalars, by symbol."""
    stored = {
        scalar.expr: SCALAR_DTYPES[scalar.dtype].stored(scalars[scalar.name])
        for scalar in spec.scalars
    }
    return {**dict(zip((BATCH, HEADS, SEQ_Q, SEQ_K), sizes, strict=True)), **stored}


@dataclass(frozen=True)
class TileAxis:
    """The tiles along q or k.

    Attributes:
        length: the length of the sequence.
        block: positions per tile; the last tile may have fewer, and the first by ``before``.
        offset: the global position of the first position.
        before: the number of positions that the first tile lacks at its start.
    """

    length: int
    block: int
    offset: int
    before: int = 0

    def tiles(self) -> Iterator[tuple[int, int]]:
        """The first position of each tile and the end of the tile, counted from 0."""
        for start in range(-self.before, self.length, self.block):
            yield max(start, 0), min(start + self.block, self.length)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The first and last positions of a tile, or of each of its boxes."""
        return [(start, stop - 1)]

    def row(self, start: int, row: int) -> int:
        """The position of a row of the tile that begins at ``start``."""
        return start + row

    def positions(self, first: int, tiles: int = 1) -> range:
        """The positions of adjacent tiles, counted from 0."""
        start = first * self.block - self.before
        return range(max(start, 0), min(start + tiles * self.block, self.length))

    def corners(self) -> tuple[Array, Array]:
        """The global first and last positions of all tiles, int64 [tiles] each."""
        first = np.arange(-self.before, self.length, self.block, dtype=np.int64)
        last = np.minimum(first + self.block, self.length) - 1
        return np.maximum(first, 0) + self.offset, last + self.offset


@dataclass(frozen=True)
class StridedAxis(TileAxis):
    """Tiles with boxes that do not follow each other: every stride-th box of ``stride`` tiles.

    The fewer tiles at the end have neighbouring boxes.

    Attributes:
        box: positions of a box.
        stride: the number of tiles that share their positions box by box.
    """

    box: int = 0
    stride: int = 1

    def tiles(self) -> Iterator[tuple[int, int]]:
        for tile in range(-(-self.length // self.block)):
            start = tile * self.block
            if self._whole(start):
                start += tile % self.stride * (self.box - self.block)
            yield start, min(self.row(start, self.block - 1) + 1, self.length)

    def _whole(self, start: int) -> bool:
        group = self.stride * self.block
        return (start // group + 1) * group <= self.length

    def row(self, start: int, row: int) -> int:
        step = self.box * (self.stride if self._whole(start) else 1)
        return start + row // self.box * step + row % self.box

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        firsts = [self.row(start, row) for row in range(0, self.block, self.box)]
        return [(min(first, stop - 1), min(first + self.box, stop) - 1) for first in firsts]


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
        live: whether each block is live, numpy bool [pairs or 1, owned, walked].
        owned_block, walked_block: positions per block along the two axes of a walk.
    """

    def __init__(self, live: Array, owned_block: int, walked_block: int) -> None:
        self.live = live
        self.owned_block = owned_block
        self.walked_block = walked_block

    def liveness(
        self, owned: tuple[np.int64, np.int64], walked: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """Whether some block, and whether every block, in each tile with these corners is live.

        Returns:
            Two bool arrays [pairs or 1, tiles].
        """
        top, bottom = (self._inside(end // self.owned_block, axis=1) for end in owned)
        first, last = (self._inside(end // self.walked_block, axis=2) for end in walked)
        blocks = self.live[:, top : bottom + 1]
        results = []
        for lines in (blocks.any(axis=1), ~blocks.all(axis=1)):
            counts = np.cumsum(np.pad(lines, ((0, 0), (1, 0))), axis=1)
            results.append(counts[:, last + 1] > counts[:, first])
        return results[0], ~results[1]

    def _inside(self, blocks: Any, axis: int) -> Any:
        return np.clip(blocks, 0, self.live.shape[axis] - 1)


class TileWalk:
    """The tiles of one problem, classified for several (batch, head) pairs together.

    A walk owns a tile along one axis and visits tiles along the other. A tile is empty if it is
    empty for every pair, and full if it is full for every pair.

    Args:
        mask: the analysis of the mask.
        env: the values of the sizes and scalars that the mask uses, and of b and h (numpy int64
            [pairs, 1]) if the mask depends on them.
        queries, keys: the two axes.
        owns_keys: whether tiles of keys are owned and query tiles visited, not the reverse.
        layout: the block-sparse layout of the same pairs; None without one.
    """

    def __init__(
        self,
        mask: MaskAnalysis,
        env: Iterable[tuple[sympy.Symbol, Any]],
        queries: TileAxis,
        keys: TileAxis,
        owns_keys: bool = False,
        layout: BlockLayoutTiles | None = None,
    ) -> None:
        self.mask = mask
        self.layout = layout
        self.owns_keys = owns_keys
        self.env = {symbol: exact(value) for symbol, value in env}
        self.owned, self.walked = (keys, queries) if owns_keys else (queries, keys)
        q, k = (Q_LO, Q_HI), (K_LO, K_HI)
        self._owned_ends, self._walked_ends = (k, q) if owns_keys else (q, k)
        self._walked_corners = self.walked.corners()
        self._room = _MOST_KEPT
        self._runs: dict[tuple[int, int], list[TileRun]] = {}

    def classes(self, start: int, stop: int) -> Array:
        """The class of every walked tile for the owned positions [start, stop)."""
        count = len(self._walked_corners[0])
        if self.mask.always and self.layout is None:
            return np.full(count, FULL)
        values = self._values(start, stop)
        values |= zip(self._walked_ends, self._walked_corners, strict=True)
        with np.errstate(all="ignore"):  # tiles with undefined values are classified as mixed
            some = _as_array(evaluate(self.mask.may, values), count)
            every = _as_array(evaluate(self.mask.must, values), count)
        if self.layout is not None:
            owned = values[self._owned_ends[0]], values[self._owned_ends[1]]
            live, all_live = self.layout.liveness(owned, self._walked_corners)
            some, every = some & live, every & all_live
        return np.where(some.any(axis=0), np.where(every.all(axis=0), FULL, MIXED), EMPTY)

    def runs(self, start: int, stop: int, most: int) -> list[TileRun]:
        """The walked tiles that are not empty, in runs of at most ``most`` positions."""
        runs = self._runs.get((start, most))
        if runs is None:
            runs = _runs_of_classes(self.classes(start, stop), self.walked, most)
            self._room -= 1 + len(runs)
            if self._room >= 0:
                self._runs[start, most] = runs
        return runs

    def ends(self, interval: Interval, start: int, stop: int) -> tuple[int | None, int | None]:
        """The ends of an interval of walked positions, counted from 0; None: unbounded."""
        values = self._values(start, stop)
        lo, hi = (
            None if end is None else int(np.max(evaluate(end, values))) - self.walked.offset
            for end in (interval.lo, interval.hi)
        )
        return lo, hi

    def _values(self, start: int, stop: int) -> dict[sympy.Symbol, Any]:
        """The values of the symbols of bounds for the owned positions [start, stop)."""
        owned = (np.int64(position + self.owned.offset) for position in (start, stop - 1))
        return {**self.env, **dict(zip(self._owned_ends, owned, strict=True))}


def exact(value: Any) -> Any:
    """Python numbers as numpy numbers, whose division by 0 raises no exception."""
    if isinstance(value, float):
        return np.float64(value)
    return np.int64(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_array(condition: Any, count: int) -> Array:
    """The condition as bool [pairs or 1, count]."""
    array = np.asarray(condition, dtype=bool)
    return np.broadcast_to(array, (array.shape[0] if array.ndim == 2 else 1, count))


def _runs_of_classes(classes: Array, axis: TileAxis, most: int) -> list[TileRun]:
    most_tiles = max(1, most // axis.block)
    runs = []
    tile, kinds = 0, classes.tolist()
    while tile < len(kinds):
        first = tile
        while tile < len(kinds) and kinds[tile] == kinds[first] and tile - first < most_tiles:
            tile += 1
        if kinds[first] != EMPTY:
            stop = min(tile * axis.block, axis.length)
            runs.append(TileRun(first * axis.block, stop, kinds[first] == FULL))
    return runs
