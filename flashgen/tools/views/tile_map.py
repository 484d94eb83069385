"""The tile map of a mask: a frozen value with the kind of every tile."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from flashgen.shared.errors import InputError
from flashgen.tools.views.drawing import Array, Drawing, Grid, LegendEntry, percent, ranges
from flashgen.tools.views.mask_call import HeadGroup, MaskCall, Pair
from flashgen.tools.views.shown import Shown
from flashgen.tools.views.tile_kinds import TileKind, elements_of

MOST_GRIDS = 12
"""Different maps that one picture shows."""

_MOST_ELEMENTS = 1 << 22

_LEGEND = (
    (TileKind.SKIPPED, "skip", "·", "skipped: every score is masked"),
    (TileKind.FULL, "full", "█", "visited without the mask: every score is kept"),
    (TileKind.MIXED, "mixed", "▒", "visited with the mask: some scores are kept"),
    (
        TileKind.FULL_BUT_MASKED,
        "masked",
        "▓",
        "visited with the mask, although every score is kept",
    ),
    (TileKind.EMPTY_BUT_VISITED, "empty", "x", "visited with the mask, although no score is kept"),
    (TileKind.NOT_DECIDED, "open", "?", "visited with the mask: the exact class was not computed"),
)
_EXACT = {
    "empty": (TileKind.SKIPPED, TileKind.EMPTY_BUT_VISITED),
    "mixed": (TileKind.MIXED,),
    "full": (TileKind.FULL, TileKind.FULL_BUT_MASKED),
    "not computed": (TileKind.NOT_DECIDED,),
}
_BY_KERNEL = {
    "empty": (TileKind.SKIPPED,),
    "mixed": (
        TileKind.MIXED,
        TileKind.FULL_BUT_MASKED,
        TileKind.EMPTY_BUT_VISITED,
        TileKind.NOT_DECIDED,
    ),
    "full": (TileKind.FULL,),
}


@dataclass(frozen=True, eq=False, repr=False)
class ElementMap(Shown):
    """The scores of a few tiles: which of them the mask and the block layout keep.

    Attributes:
        title: the name of the spec and the place of the tiles.
        elements: bool [queries, keys], true where the score is kept.
        queries, keys: the first and the last global position, both inclusive.
    """

    title: str
    elements: Array
    queries: tuple[int, int]
    keys: tuple[int, int]

    def drawing(self) -> Drawing:
        """What the picture shows."""
        cells = self.elements.astype(np.uint8)
        kept_scores, total = int(cells.sum()), cells.size
        shares = [f"{n:,} ({percent(n, total)})" for n in (total - kept_scores, kept_scores)]
        return Drawing(
            title=self.title,
            lines=(f"{cells.shape[0]:,} queries x {cells.shape[1]:,} keys, score by score",),
            grids=(Grid("", cells, self.queries, self.keys),),
            legend=(
                LegendEntry(0, "skip", "·", "masked", shares[0]),
                LegendEntry(1, "full", "█", "kept", shares[1]),
            ),
            cell="score",
            partly=("full", "▒"),
        )


@dataclass(frozen=True, eq=False)
class HeadTiles:
    """The tiles of some pairs of a batch entry and a query head, which are the same for all.

    Attributes:
        pairs: the pairs (b, h); with packed sequences b is the number of the sequence.
        kinds: uint8 [query tiles, key tiles], of `flashgen.tools.views.tile_kinds.TileKind`.
        kept: the number of scores of one pair that the mask keeps; None where it was not counted.
        place: the axes of queries and keys.
    """

    pairs: tuple[Pair, ...]
    kinds: Array
    kept: int | None
    place: HeadGroup = field(repr=False)

    @property
    def classes(self) -> Array:
        """What the kernel does: uint8 [query tiles, key tiles].

        0: the tile is skipped; 1: it is visited and its mask evaluated; 2: it is visited and its
        mask is not evaluated.
        """
        return np.array([0, 2, 1, 1, 1, 1], dtype=np.uint8)[self.kinds]

    @property
    def exact_classes(self) -> Array:
        """What the mask keeps: uint8 [query tiles, key tiles].

        0: no score of the tile; 1: some; 2: all; 3: not computed (`TileMap.exact`).
        """
        return np.array([0, 2, 1, 2, 0, 3], dtype=np.uint8)[self.kinds]


@dataclass(frozen=True, eq=False, repr=False)
class TileMap(Shown):
    """The tiles of a mask: which of them a kernel skips, and in which it evaluates the mask.

    Notebooks show it as a picture, terminals as text.

    Attributes:
        name: the name of the spec.
        tile: queries and keys of a tile.
        heads: the tiles, for each group of pairs of a batch entry and a query head that have the
            same.
    """

    name: str
    tile: tuple[int, int]
    heads: tuple[HeadTiles, ...]
    _call: MaskCall = field(repr=False)
    _notes: tuple[str, ...] = field(repr=False, default=())

    @property
    def tiles(self) -> int:
        """The number of tiles of all pairs."""
        return sum(len(head_tiles.pairs) * head_tiles.kinds.size for head_tiles in self.heads)

    @property
    def kinds(self) -> dict[TileKind, int]:
        """The number of tiles of each kind, of all pairs."""
        counts = np.zeros(len(TileKind), dtype=np.int64)
        for head_tiles in self.heads:
            counts += len(head_tiles.pairs) * np.bincount(
                head_tiles.kinds.ravel(), minlength=len(TileKind)
            )
        return {kind: int(counts[kind]) for kind in TileKind}

    @property
    def counts(self) -> dict[str, int]:
        """The number of tiles that the kernel skips ("empty"), masks ("mixed") and does not mask.

        The last are "full". Tiles of all pairs are counted.
        """
        kinds = self.kinds
        return {name: sum(kinds[kind] for kind in members) for name, members in _BY_KERNEL.items()}

    @property
    def exact_counts(self) -> dict[str, int]:
        """The number of tiles of which the mask keeps no score, some and all, of all pairs."""
        kinds = self.kinds
        return {name: sum(kinds[kind] for kind in members) for name, members in _EXACT.items()}

    @property
    def exact(self) -> bool:
        """Whether the exact class of every tile is known."""
        return not self.kinds[TileKind.NOT_DECIDED]

    @property
    def density(self) -> float:
        """The share of tiles that the kernel visits, from 0 to 1."""
        return 1 - self.counts["empty"] / self.tiles

    @property
    def kept(self) -> float | None:
        """The share of scores that the mask keeps, from 0 to 1; None where it was not counted."""
        counted = [
            (len(head_tiles.pairs), head_tiles.kept, head_tiles.place) for head_tiles in self.heads
        ]
        if any(kept_scores is None for _, kept_scores, _ in counted):
            return None
        scores = sum(n * group.queries.length * group.keys.length for n, _, group in counted)
        return sum(n * (kept_scores or 0) for n, kept_scores, _ in counted) / scores

    def of(self, batch: int = 0, head: int = 0) -> HeadTiles:
        """The tiles of one batch entry (or packed sequence) and query head.

        Raises:
            InputError: the map does not have this pair.
        """
        for head_tiles in self.heads:
            if (batch, head) in head_tiles.pairs:
                return head_tiles
        raise InputError(
            "the tile map does not have this batch entry and head",
            where="arguments batch and head",
            numbers=f"batch {batch!r}, head {head!r}; it has "
            f"{pairs_in_words([pair for head_tiles in self.heads for pair in head_tiles.pairs])}",
            way_out=f"fg.visualize(..., batch={batch}, head={head})",
        )

    def elements(self, row: int, column: int, *, batch: int = 0, head: int = 0) -> Array:
        """The scores of one tile that the mask and the block layout keep.

        Args:
            row: the number of the tile among those of queries.
            column: the number of the tile among those of keys.
            batch: the batch entry, or the packed sequence.
            head: the query head.

        Returns:
            bool [queries of the tile, keys of the tile]; the last tiles may be smaller.

        Raises:
            InputError: the map does not have the tile, or the pair.
        """
        return self.zoom(row, column, batch=batch, head=head).elements

    def zoom(
        self, row: int, column: int, *, size: int = 1, batch: int = 0, head: int = 0
    ) -> ElementMap:
        """A few tiles, score by score, as a picture.

        Args:
            row: the number of the first tile among those of queries.
            column: the number of the first tile among those of keys.
            size: the number of tiles in both directions, fewer at the end of the map.
            batch: the batch entry, or the packed sequence.
            head: the query head.

        Raises:
            InputError: the map does not have the tile, or the pair, or there are too many scores.
        """
        head_tiles = self.of(batch, head)
        rows, columns = head_tiles.kinds.shape
        numbers = all(isinstance(n, int) for n in (row, column, size))
        if not (numbers and 0 <= row < rows and 0 <= column < columns and size > 0):
            raise InputError(
                "the tile map does not have this tile",
                where="arguments row, column and size",
                numbers=f"row {row!r} of {rows:,}, column {column!r} of {columns:,}, size {size!r}",
                way_out="zoom(0, 0) for the first tile",
            )
        axes, first_tiles = (head_tiles.place.queries, head_tiles.place.keys), (row, column)
        queries, keys = (axis.positions(i, size) for i, axis in zip(first_tiles, axes, strict=True))
        if len(queries) * len(keys) > _MOST_ELEMENTS:
            raise InputError(
                "these are too many scores to show one by one",
                where="argument size",
                numbers=f"{len(queries):,} x {len(keys):,}; at most {_MOST_ELEMENTS:,}",
                way_out="zoom(..., size=1)",
            )
        group = HeadGroup((batch, head), ((batch, head),), head_tiles.place.entries, *axes)
        elements = elements_of(self._call, group, queries, keys)
        ends = [
            (part[0] + axis.offset, part[-1] + axis.offset)
            for part, axis in zip((queries, keys), axes, strict=True)
        ]
        end_text = f" to ({row + size - 1}, {column + size - 1})" if size > 1 else ""
        return ElementMap(f"{self.name}, tile ({row}, {column}){end_text}", elements, *ends)

    def drawing(self) -> Drawing:
        """What the picture shows."""
        call, total = self._call, self.tiles
        counts = {kind: f"{n:,} ({percent(n, total)})" for kind, n in self.kinds.items()}
        legend = [
            LegendEntry(kind, style, mark, text, counts[kind])
            for kind, style, mark, text in _LEGEND
            if kind in (TileKind.SKIPPED, TileKind.FULL, TileKind.MIXED) or self.kinds[kind]
        ]
        p = call.problem
        lengths = f"{p.seq_q:,} queries x {p.seq_k:,} keys"
        tile = f"tiles of {self.tile[0]} x {self.tile[1]} ({call.tile.origin})"
        share = f"; the mask keeps {100 * self.kept:.1f} % of the scores" if self.kept else ""
        visited = percent(total - self.kinds[TileKind.SKIPPED], total)
        notes = list(self._notes)
        if len(self.heads) > MOST_GRIDS:
            notes.append(
                f"The picture shows {MOST_GRIDS} of {len(self.heads):,} different maps; batch= and "
                "head= choose others. All are counted."
            )
        return Drawing(
            title=self.name,
            lines=(
                f"{lengths}, {tile}",
                f"the {call.tile.kernel} kernel visits {visited} of the tiles{share}",
            ),
            grids=tuple(self._grid(head_tiles) for head_tiles in self.heads[:MOST_GRIDS]),
            legend=tuple(legend),
            cell="tile",
            partly=("mixed", "▒"),
            notes=tuple(notes),
        )

    def _grid(self, head_tiles: HeadTiles) -> Grid:
        p, queries, keys = self._call.problem, head_tiles.place.queries, head_tiles.place.keys
        label = ""
        if p.batch * p.heads_q > 1:
            label = pairs_in_words(
                head_tiles.pairs, (p.batch, p.heads_q), packed=self._call.spec.packed
            )
        return Grid(
            label,
            head_tiles.kinds,
            (queries.offset, queries.offset + queries.length - 1),
            (keys.offset, keys.offset + keys.length - 1),
        )


def pairs_in_words(
    pairs: Iterable[Pair], call_sizes: tuple[int, int] | None = None, *, packed: bool = False
) -> str:
    """Pairs of a batch entry and a head in words, as in "batch 0, heads 0 to 3".

    Args:
        call_sizes: the batch entries and heads of the call; pairs that are all of them are not
            enumerated.
        packed: whether batch entries are packed sequences.
    """
    ordered = sorted(set(pairs))
    batches, heads = (sorted({pair[i] for pair in ordered}) for i in (0, 1))
    entry, entries = ("sequence", "sequences") if packed else ("batch", "batch entries")
    if len(ordered) == len(batches) * len(heads):
        b = f"{entry} {ranges(batches)}"
        h = f"{'head' if len(heads) == 1 else 'heads'} {ranges(heads)}"
        if call_sizes is None:
            return f"{b}, {h}"
        if (len(batches), len(heads)) == call_sizes:
            return f"all {entries} and heads"
        if len(batches) == call_sizes[0]:
            return h
        return b if len(heads) == call_sizes[1] else f"{b}, {h}"
    parts = [
        pairs_in_words(list(entry_pairs), packed=packed)
        for _, entry_pairs in itertools.groupby(ordered, key=lambda pair: pair[0])
    ]
    return "; ".join(parts if len(parts) < 3 else [parts[0], f"... ({len(ordered):,} pairs)"])
