"""A drawing as a PNG image, drawn by matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
import io
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashgen.shared.errors import InputError
from flashgen.tools.views.drawing import (
    COLOURS,
    PAPER,
    Array,
    Drawing,
    Grid,
    Joined,
    join_cells,
    positions,
)

_WIDTH, _LINE, _MARGIN, _COLUMNS = 4.0, 0.15, 0.15, 58
_DPI = 200
_MOST = 600
"""Cells of a grid in each direction: about one for each pixel."""


def png_of(drawing: Drawing) -> bytes:
    """The drawing as a PNG image on white, 800 pixels wide.

    Raises:
        InputError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "PNG images are drawn by matplotlib, which is not installed",
            where="a file that ends with .png",
            numbers="no module named matplotlib",
            way_out="pip install matplotlib, or a file that ends with .svg or .html",
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [join_cells(grid.cells, _MOST) for grid in drawing.grids]
    across = min(2, len(cells))
    width, largest = (_WIDTH - (1 + across) * _MARGIN) / across, drawing.largest
    boxes = [
        tuple(max(0.1, width * positions(ends) / largest) for ends in (grid.keys, grid.queries))
        for grid in drawing.grids
    ]
    rows = [boxes[first : first + across] for first in range(0, len(boxes), across)]
    head = [drawing.title, *_wrapped(drawing.lines)]
    notes = _wrapped((*drawing.notes, *drawing.note_on(cells, drawing.fainter)))
    lines = len(head) + 4 * len(rows) + 2.5 * len(drawing.legend) + len(notes)
    height = 2 * _MARGIN + sum(max(box[1] for box in row) for row in rows) + lines * _LINE
    figure = Figure((_WIDTH, height), dpi=_DPI, facecolor=PAPER)
    y = height - _MARGIN

    def write(x: float, text: str, **style: Any) -> None:
        figure.text(x / _WIDTH, y / height, text, fontsize=8, va="top", **style)

    for number, line in enumerate(head):
        write(_MARGIN, line, weight="bold" if number == 0 else "normal")
        y -= _LINE
    for number, (grid, box, joined_cells) in enumerate(
        zip(drawing.grids, boxes, cells, strict=True)
    ):
        x = _MARGIN + number % across * (width + _MARGIN)
        ends = (f"{name} {a:,} to {b:,}" for name, (a, b) in _axes(grid))
        write(x, "\n".join([grid.label, *ends]))
        bottom = y - 3.2 * _LINE - box[1]
        rectangle = x / _WIDTH, bottom / height, box[0] / _WIDTH, box[1] / height
        axes = figure.add_axes(rectangle)
        axes.imshow(_pixels(drawing, joined_cells), aspect="auto", interpolation="nearest")
        axes.set_axis_off()
        if number % across == across - 1 or number == len(cells) - 1:
            y -= max(other_box[1] for other_box in rows[number // across]) + 4 * _LINE
    for entry in drawing.legend:
        write(_MARGIN, "\N{BLACK SQUARE}", color=COLOURS[entry.style])
        write(_MARGIN + 0.2, f"{entry.text}\n{entry.count}")
        y -= 2.5 * _LINE
    for line in notes:
        write(_MARGIN, line)
        y -= _LINE
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)  # type: ignore[no-untyped-call]
    return image.getvalue()


def _wrapped(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, _COLUMNS)]


def _axes(grid: Grid) -> tuple[tuple[str, tuple[int, int]], ...]:
    return ("\N{DOWNWARDS ARROW} queries", grid.queries), ("\N{RIGHTWARDS ARROW} keys", grid.keys)


def _pixels(drawing: Drawing, joined_cells: Joined) -> Array:
    """Floats [rows, columns, 3]: the colour of each cell, fainter where few joined cells count."""
    colours = {entry.code: _rgb(COLOURS[entry.style]) for entry in drawing.legend}
    empty, partly = _rgb(COLOURS["skip"]), _rgb(COLOURS[drawing.partly[0]])
    table = np.array([colours.get(code, empty) for code in range(max(colours) + 1)])
    strength = np.array([0.0, 0.4, 0.6, 0.8, 1.0])[joined_cells.shares][..., None]
    mixed = empty + strength * (partly - empty)
    return np.where(strength > 0, mixed, table[joined_cells.codes])


def _rgb(colour: str) -> Array:
    return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
