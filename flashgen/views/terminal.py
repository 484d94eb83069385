"""A drawing in characters, two for each cell."""

from __future__ import annotations

import textwrap

from flashgen.views.drawing import Drawing, joined

_WIDTH = 97


def text_of(drawing: Drawing, most: int = 32) -> str:
    """The drawing as lines of text, grids with at most ``most`` rows and columns."""
    marks = {entry.code: entry.mark for entry in drawing.legend}
    lines = [drawing.title, *drawing.lines]
    every = []
    for grid in drawing.grids:
        found = joined(grid.cells, most)
        every.append(found)
        (q, q_end), (k, k_end) = grid.queries, grid.keys
        lines += ["", grid.label] if grid.label else [""]
        lines.append(f"queries {q:,} to {q_end:,} down, keys {k:,} to {k_end:,} across")
        for codes, shares in zip(found.codes.tolist(), found.shares.tolist(), strict=True):
            cells = zip(codes, shares, strict=True)
            lines.append("".join(2 * (drawing.partly[1] if s else marks[c]) for c, s in cells))
    lines.append("")
    width = max(len(entry.text) for entry in drawing.legend)
    lines += [f"{e.mark * 2}  {e.text:<{width}}  {e.count}" for e in drawing.legend]
    for note in (*drawing.notes, *drawing.note_on(every, f"{2 * drawing.partly[1]}.")):
        lines += textwrap.wrap(note, _WIDTH)
    return "\n".join(lines)
