"""A drawing as one SVG element, readable on light and on dark pages.

It has its own style and background, takes the font of the page and refers to nothing outside of
itself. It is as wide as a phone, so that its text is not made smaller there.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from xml.sax.saxutils import escape

import numpy as np

from flashgen.kernels.codegen.text import printable
from flashgen.tools.views.drawing import COLOURS, Array, Drawing, Joined, join_cells, positions

MOST_CELLS = 1 << 16
"""The cells of all grids together. A cell takes at most about 15 B."""

_WIDTH, _EDGE = 360, 12
_LARGE, _SMALL, _LEAST = 334, 140, 14
_LINE, _GAP, _LEFT, _HEAD = 18, 12, 26, 24
_LETTER, _COLUMNS = 7, 54
_THUMBNAIL = 160

STYLE = """
.fgp{--fgp-ink:#24292f;--fgp-soft:#57606a;COLOURS;--fgp-line:#fff;font:13px system-ui,sans-serif}
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
.fgp .page{fill:var(--fgp-line)}
""".replace("COLOURS", ";".join(f"--fgp-{style}:{colour}" for style, colour in COLOURS.items()))


def svg_of(drawing: Drawing, *, compact: bool = False) -> str:
    """The drawing as an SVG element with a title and a description.

    Args:
        compact: the cells alone, in a square, without text.
    """
    most = max(8, math.isqrt(MOST_CELLS // len(drawing.grids)))
    cells = [join_cells(grid.cells, most) for grid in drawing.grids]
    notes = (*drawing.notes, *drawing.note_on(cells, drawing.fainter))
    if compact:
        return _element(drawing, notes, _thumbnail(drawing, cells), (_THUMBNAIL, _THUMBNAIL))
    parts = [text_at(0, 20, drawing.title, "head")]
    y = _paragraphs(drawing.lines, 20, parts)
    y = _grids(drawing, cells, y + _LINE + _GAP // 2, parts)
    for entry in drawing.legend:
        y += _LINE + 4
        parts.append(f'<rect class="{entry.style}" x="0" y="{y - 11}" width="12" height="12"/>')
        for line in textwrap.wrap(entry.text, _COLUMNS - 4):
            parts.append(text_at(20, y, line))
            y += _LINE
        parts.append(text_at(20, y, entry.count, "soft"))
    y = _paragraphs(notes, y + 4, parts) + 8
    inner = [f'<g transform="translate({_EDGE} 0)">', *parts, "</g>"]
    width = _WIDTH + 2 * _EDGE
    page = f'<rect class="page" width="{width}" height="{y}" rx="6"/>'
    return _element(drawing, notes, [page, *inner], (width, y))


def _element(
    drawing: Drawing, notes: Sequence[str], parts: Sequence[str], size: tuple[int, int]
) -> str:
    words = ". ".join(part.rstrip(".") for part in (*drawing.lines, drawing.counts, *notes))
    return element(drawing.title, words, parts, size)


def element(title: str, words: str, parts: Sequence[str], size: tuple[int, int]) -> str:
    """An SVG element in the style of all pictures, of this width and height.

    Args:
        words: a description for readers who do not see it.
    """
    width, height = size
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fgp" role="img" '
        f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'style="max-width:100%;height:auto"><title>{_escaped(title)}</title>'
        f"<desc>{_escaped(words)}.</desc><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _paragraphs(texts: Sequence[str], y: int, parts: list[str]) -> int:
    """Appends lines of text below ``y``; returns the y of the last one."""
    for line in (line for text in texts for line in textwrap.wrap(text, _COLUMNS)):
        y += _LINE
        parts.append(text_at(0, y, line, "soft"))
    return y


def _grids(drawing: Drawing, cells: list[Joined], top: int, parts: list[str]) -> int:
    """Appends the grids, in lines of as many as fit; returns the y of their end."""
    scale = (_LARGE if len(drawing.grids) == 1 else _SMALL) / drawing.largest
    x, y, below = 0, top, top
    for grid, joined_cells in zip(drawing.grids, cells, strict=True):
        width, height = (max(_LEAST, positions(e) * scale) for e in (grid.keys, grid.queries))
        (q, q_end), (k, k_end) = grid.queries, grid.keys
        keys = f"keys {k:,} to {k_end:,} \N{RIGHTWARDS ARROW}"
        queries = f"queries {q:,} to {q_end:,} \N{RIGHTWARDS ARROW}"
        needed = round(_LEFT + max(width, _LETTER * max(len(keys), len(grid.label))) + _GAP)
        if x and x + needed > _WIDTH:
            x, y = 0, below + 2 * _GAP
        parts.append(f'<g transform="translate({x} {y})">{text_at(_LEFT, 0, grid.label)}')
        parts.append(text_at(_LEFT, 16, keys, "soft"))
        if height > _LETTER * len(queries):
            transform = f"translate(14 {_HEAD}) rotate(90)"
            parts.append(f'<g transform="{transform}">{text_at(0, 0, queries, "soft")}</g>')
        box = _LEFT, _HEAD, round(width), round(height)
        parts.append(f"{_cells(drawing, joined_cells, box)}</g>")
        x += needed
        below = max(below, y + _HEAD + box[3])
    return below + _GAP


def _thumbnail(drawing: Drawing, cells: list[Joined]) -> list[str]:
    """The grids in the lines and columns of a square."""
    across = math.isqrt(len(cells) - 1) + 1
    size = (_THUMBNAIL - 4 * (across - 1)) // across
    top = (_THUMBNAIL - -(-len(cells) // across) * (size + 4) + 4) // 2
    return [
        _cells(
            drawing,
            joined_cells,
            (i % across * (size + 4), top + i // across * (size + 4), size, size),
        )
        for i, joined_cells in enumerate(cells)
    ]


def _cells(drawing: Drawing, joined_cells: Joined, box: tuple[int, int, int, int]) -> str:
    """The cells of a grid in a box: x, y, width and height."""
    x, y, width, height = box
    rows, columns = joined_cells.codes.shape
    scale = f"{width / columns:.6g} {height / rows:.6g}"
    parts = [f'<g transform="translate({x} {y}) scale({scale})">']
    parts.append(
        f'<rect class="skip" width="{columns}" height="{rows}" shape-rendering="crispEdges"/>'
    )
    styles = {entry.code: entry.style for entry in drawing.legend}
    for code in sorted({int(c) for c in np.unique(joined_cells.codes)} - {0}):
        parts.append(_path((joined_cells.codes == code) & (joined_cells.shares == 0), styles[code]))
    for share in (1, 2, 3, 4):
        opacity = f' opacity="{0.2 + 0.2 * share:.1f}"'
        parts.append(_path(joined_cells.shares == share, drawing.partly[0], opacity))
    if min(width / columns, height / rows) >= 5:
        across = "".join(f"M0 {i}h{columns}" for i in range(1, rows))
        down = "".join(f"M{j} 0v{rows}" for j in range(1, columns))
        parts.append(f'<path class="lines" d="{across}{down}"/>' if across + down else "")
    return "".join([*parts, "</g>"])


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


def text_at(x: float, y: float, text: str, style: str = "") -> str:
    """A line of text that begins at x, on the base line y; `style` names classes of `STYLE`."""
    named = f' class="{style}"' if style else ""
    return f'<text x="{x}" y="{y}"{named}>{_escaped(text)}</text>' if text else ""


def _escaped(text: str) -> str:
    """The text in XML, which has no control characters."""
    return escape(printable(text))
