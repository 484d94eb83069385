"""A drawing as one SVG element, readable on light and on dark pages.

It has its own style, takes the font of the page and refers to nothing outside of itself. The
colours are those of Okabe and Ito, which people who do not see all colours can tell apart.
"""

from __future__ import annotations

import math
import textwrap
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from flashgen.pictures.drawing import Drawing, Grid, Joined, joined

Array = np.ndarray[Any, np.dtype[Any]]

MOST_CELLS = 1 << 16
"""The cells of all grids together. A cell takes at most about 15 B."""

_WIDTH, _COUNTS = 720, 560
_LARGE, _SMALL, _LEAST = 400, 190, 14
_LINE, _GAP, _LEFT = 18, 16, 26

STYLE = """
.fgp{--fgp-ink:#24292f;--fgp-soft:#57606a;--fgp-skip:#eaeef2;--fgp-full:#0072b2;--fgp-mixed:#e69f00;
--fgp-masked:#56b4e9;--fgp-empty:#cc79a7;--fgp-open:#9a8358;--fgp-line:#fff;font:13px system-ui,
sans-serif}
@media(prefers-color-scheme:dark){.fgp{--fgp-ink:#e6edf3;--fgp-soft:#9ea7b3;--fgp-skip:#30363d;
--fgp-full:#2f8fd0;--fgp-line:#161b22}}
[data-md-color-scheme=default] .fgp,[data-jp-theme-light=true] .fgp{--fgp-ink:#24292f;
--fgp-soft:#57606a;--fgp-skip:#eaeef2;--fgp-full:#0072b2;--fgp-line:#fff}
[data-md-color-scheme=slate] .fgp,[data-jp-theme-light=false] .fgp{--fgp-ink:#e6edf3;
--fgp-soft:#9ea7b3;--fgp-skip:#30363d;--fgp-full:#2f8fd0;--fgp-line:#161b22}
.fgp text{fill:var(--fgp-ink)}.fgp .soft{fill:var(--fgp-soft)}.fgp .head{font-weight:600}
.fgp .end{text-anchor:end}.fgp .mid{text-anchor:middle}
.fgp .skip{fill:var(--fgp-skip)}.fgp .full{fill:var(--fgp-full)}.fgp .mixed{fill:var(--fgp-mixed)}
.fgp .masked{fill:var(--fgp-masked)}.fgp .empty{fill:var(--fgp-empty)}
.fgp .open{fill:var(--fgp-open)}
.fgp .lines{stroke:var(--fgp-line);stroke-width:1;fill:none;vector-effect:non-scaling-stroke}
"""


def svg_of(drawing: Drawing) -> str:
    """The drawing as an SVG element with a title and a description."""
    few = len(drawing.grids) == 1
    most = max(8, math.isqrt(MOST_CELLS // len(drawing.grids)))
    largest = max(_length(ends) for g in drawing.grids for ends in (g.queries, g.keys))
    scale = (_LARGE if few else _SMALL) / largest
    cells = [joined(grid.cells, most) for grid in drawing.grids]
    fainter = f"the fainter, the more of them are {drawing.legend[0].text.partition(':')[0]}."
    notes = [*drawing.notes, *drawing.note_on(cells, fainter)]
    parts: list[str] = []
    y = 20
    parts.append(_text(0, y, drawing.title, "head"))
    for line in drawing.lines:
        for piece in _wrapped(line):
            y += _LINE
            parts.append(_text(0, y, piece, "soft"))
    y = _grids(drawing, cells, scale, y + _LINE, parts)
    for entry in drawing.legend:
        y += _LINE
        parts.append(f'<rect class="{entry.style}" x="0" y="{y - 11}" width="12" height="12"/>')
        parts.append(_text(20, y, entry.text) + _text(_COUNTS, y, entry.count, "soft end"))
    for note in notes:
        for piece in _wrapped(note):
            y += _LINE
            parts.append(_text(0, y, piece, "soft"))
    title, words = escape(drawing.title), escape(drawing.described)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fgp" role="img" '
        f'viewBox="0 0 {_WIDTH} {y + 8}" width="{_WIDTH}" height="{y + 8}" '
        f'style="max-width:100%;height:auto"><title>{title}</title><desc>{words}</desc>'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _grids(drawing: Drawing, cells: list[Joined], scale: float, top: int, parts: list[str]) -> int:
    """Appends the grids, in lines of as many as fit; returns the y of their end."""
    x, y, below = 0, top, top
    for grid, found in zip(drawing.grids, cells, strict=True):
        width, height = (max(_LEAST, _length(e) * scale) for e in (grid.keys, grid.queries))
        needed = _LEFT + width + _GAP
        if x and x + needed > _WIDTH:
            x, y = 0, below + _GAP
        parts.append(_grid(drawing, grid, found, (x, y, round(width), round(height))))
        x += round(needed)
        below = max(below, y + 2 * _LINE + round(height))
    return below + 6


def _grid(drawing: Drawing, grid: Grid, found: Joined, box: tuple[int, int, int, int]) -> str:
    x, y, width, height = box
    rows, columns = found.codes.shape
    parts = [f'<g transform="translate({x} {y})">']
    if grid.label:
        parts.append(_text(_LEFT, 0, grid.label))
    (q, q_end), (k, k_end) = grid.queries, grid.keys
    parts.append(_text(_LEFT, 16, f"keys {k:,} to {k_end:,} \N{RIGHTWARDS ARROW}", "soft"))
    parts.append(
        f'<g transform="translate(16 {2 * _LINE - 12}) rotate(90)">'
        + _text(0, 0, f"queries {q:,} to {q_end:,} \N{RIGHTWARDS ARROW}", "soft")
        + "</g>"
        if height > 150
        else ""
    )
    scale = f"{width / columns:.6g} {height / rows:.6g}"
    parts.append(f'<g transform="translate({_LEFT} {2 * _LINE - 12}) scale({scale})">')
    parts.append(
        f'<rect class="skip" width="{columns}" height="{rows}" shape-rendering="crispEdges"/>'
    )
    styles = {entry.code: entry.style for entry in drawing.legend}
    for code in sorted({int(c) for c in np.unique(found.codes)} - {0}):
        parts.append(_path(found.codes * (found.shares == 0) == code, styles[code]))
    for share in (1, 2, 3, 4):
        opacity = f' opacity="{0.2 + 0.2 * share:.1f}"'
        parts.append(_path(found.shares == share, drawing.partly[0], opacity))
    if min(width / columns, height / rows) >= 5:
        across = "".join(f"M0 {i}h{columns}" for i in range(1, rows))
        down = "".join(f"M{j} 0v{rows}" for j in range(1, columns))
        parts.append(f'<path class="lines" d="{across}{down}"/>' if across + down else "")
    parts.append("</g></g>")
    return "".join(parts)


def _path(where: Array, style: str, extra: str = "") -> str:
    """Rectangles that cover the cells: runs of rows, joined while the next row has the same run."""
    open_runs: dict[tuple[int, int], int] = {}
    pieces: list[str] = []

    def close(run: tuple[int, int], first: int, row: int) -> None:
        start, stop = run
        pieces.append(f"M{start} {first}h{stop - start}v{row - first}h{start - stop}z")

    for row, line in enumerate(where):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], line.astype(np.int8), [0])))).tolist()
        runs = set(zip(edges[::2], edges[1::2], strict=True))
        for run in [run for run in open_runs if run not in runs]:
            close(run, open_runs.pop(run), row)
        for run in sorted(runs - open_runs.keys()):
            open_runs[run] = row
    for run, first in open_runs.items():
        close(run, first, len(where))
    if not pieces:
        return ""
    return f'<path class="{style}"{extra} shape-rendering="crispEdges" d="{"".join(pieces)}"/>'


def _text(x: int, y: int, text: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text x="{x}" y="{y}"{named}>{escape(text)}</text>'


def _length(ends: tuple[int, int]) -> int:
    return ends[1] - ends[0] + 1


def _wrapped(text: str, width: int = 108) -> list[str]:
    return textwrap.wrap(text, width) or [""]
