"""What a picture shows, for every output: grids of cells, a legend and notes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

_COLUMNS = 97  # of text
_MOST_CELLS = 32  # rows and columns of a grid as text

Array = np.ndarray[Any, np.dtype[Any]]

PAPER = "#ffffff"
COLOURS = {
    "skip": "#eaeef2",
    "full": "#0072b2",
    "mixed": "#e69f00",
    "masked": "#56b4e9",
    "empty": "#cc79a7",
    "open": "#9a8358",
}
"""The colours of kinds of cells on light paper: those of Okabe and Ito, which people who do not see
all colours can tell apart."""


@dataclass(frozen=True)
class LegendEntry:
    """A kind of cell.

    Attributes:
        code: the number of the kind in the cells of grids.
        style: the name of its colour in SVG.
        mark: its character on terminals.
        text: the meaning of the kind.
        count: how often it occurs, in words.
    """

    code: int
    style: str
    mark: str
    text: str
    count: str


@dataclass(frozen=True, eq=False)
class Grid:
    """The cells of some batch entries and heads.

    Attributes:
        label: the batch entries and heads.
        cells: uint8 [rows of queries, columns of keys], codes of the legend.
        queries, keys: the first and the last position, both inclusive.
    """

    label: str
    cells: Array
    queries: tuple[int, int]
    keys: tuple[int, int]


class Joined(NamedTuple):
    """Cells joined until there are few enough.

    Attributes:
        codes: uint8 [rows, columns]; where cells of different kinds are joined, the first kind.
        shares: the share of joined cells that are not of kind 0, in quarters: 1 to 4 where they
            are of different kinds, else 0.
        rows, columns: the cells that are joined in each direction.
    """

    codes: Array
    shares: Array
    rows: int
    columns: int


@dataclass(frozen=True, eq=False)
class Drawing:
    """A picture.

    Attributes:
        title, lines: its head.
        grids: at least one grid.
        legend: the kinds of cells.
        cell: the thing that a cell shows, in the singular.
        partly: the style and the mark of joined cells of different kinds.
        notes: sentences on the parts that the picture leaves out.
    """

    title: str
    lines: tuple[str, ...]
    grids: tuple[Grid, ...]
    legend: tuple[LegendEntry, ...]
    cell: str
    partly: tuple[str, str]
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> str:
        """The legend in one sentence, for readers who do not see the picture."""
        return "; ".join(f"{entry.text}: {entry.count}" for entry in self.legend)

    @property
    def fainter(self) -> str:
        """How joined cells of different kinds look in colour."""
        return f"the fainter, the more of them are {self.legend[0].text.partition(':')[0]}."

    @property
    def largest(self) -> int:
        """The most positions along an axis of a grid."""
        return max(map(positions, (e for grid in self.grids for e in (grid.queries, grid.keys))))

    def note_on(self, cells: Sequence[Joined], as_what: str) -> tuple[str, ...]:
        """Sentences on joined cells and on the look of mixed ones; () where none were joined."""
        sizes = sorted({f"{c.rows} x {c.columns}" for c in cells if c.rows * c.columns > 1})
        if not sizes:
            return ()
        return (
            f"A cell stands for {' or '.join(sizes)} {self.cell}s. One with {self.cell}s of "
            f"different kinds is {as_what}",
        )


def positions(ends: tuple[int, int]) -> int:
    """The number of positions from the first to the last."""
    return ends[1] - ends[0] + 1


def join_cells(cells: Array, most: int) -> Joined:
    """The cells, joined until there are at most ``most`` rows and ``most`` columns."""
    rows, columns = (max(1, -(-length // most)) for length in cells.shape)
    if rows == columns == 1:
        return Joined(cells, np.zeros_like(cells), 1, 1)
    starts = [np.arange(0, cells.shape[axis], step) for axis, step in enumerate((rows, columns))]

    def combined(combine: np.ufunc, values: Array) -> Array:
        return combine.reduceat(combine.reduceat(values, starts[0], axis=0), starts[1], axis=1)

    low, high = combined(np.minimum, cells), combined(np.maximum, cells)
    counts = combined(np.add, (cells != 0).astype(np.int64))
    sizes = combined(np.add, np.ones(cells.shape, dtype=np.int64))
    quarters = np.clip(-(-4 * counts // sizes), 1, 4)
    return Joined(low, np.where(low == high, 0, quarters).astype(np.uint8), rows, columns)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words, as in "0 to 3, 6"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][-1:] = [parts[-1][-1], number] if len(parts[-1]) == 1 else [number]
        else:
            parts.append([number])
    shown = [f"{part[0]:,}" if len(part) == 1 else f"{part[0]:,} to {part[-1]:,}" for part in parts]
    return ", ".join(shown if len(shown) < 7 else [*shown[:5], f"... ({len(numbers):,} in all)"])


def percent(part: int, whole: int) -> str:
    """A share in percent, with two digits where it is below 1."""
    share = 100 * part / whole
    return f"{share:.2f} %" if 0 < share < 1 else f"{share:.1f} %"


def text_of(drawing: Drawing) -> str:
    """The drawing as lines of text, grids with at most `_MOST_CELLS` rows and columns."""
    marks = {entry.code: entry.mark for entry in drawing.legend}
    lines = [drawing.title, *drawing.lines]
    joined_grids = []
    for grid in drawing.grids:
        joined_cells = join_cells(grid.cells, _MOST_CELLS)
        joined_grids.append(joined_cells)
        (q, q_end), (k, k_end) = grid.queries, grid.keys
        lines += ["", grid.label] if grid.label else [""]
        lines.append(f"queries {q:,} to {q_end:,} down, keys {k:,} to {k_end:,} across")
        for codes, shares in zip(
            joined_cells.codes.tolist(), joined_cells.shares.tolist(), strict=True
        ):
            cells = zip(codes, shares, strict=True)
            lines.append("".join(2 * (drawing.partly[1] if s else marks[c]) for c, s in cells))
    lines.append("")
    width = max(len(entry.text) for entry in drawing.legend)
    lines += [f"{e.mark * 2}  {e.text:<{width}}  {e.count}" for e in drawing.legend]
    for note in (*drawing.notes, *drawing.note_on(joined_grids, f"{2 * drawing.partly[1]}.")):
        lines += textwrap.wrap(note, _COLUMNS)
    return "\n".join(lines)
