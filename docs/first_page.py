"""Writes the picture of docs/index.md: a mask, its tiles, and the loop that is emitted for it.

    python docs/first_page.py            writes docs/pictures/kernel.svg and kernel_narrow.svg
    python docs/first_page.py --check    exit status 1 when they are not what would be written

The tiles are those of `fg.visualize`, and the code is cut out of the emitted file.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import flashgen as fg
from flashgen.tools.views.svg import element, text_at
from flashgen.tools.views.tile_map import HeadTiles

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
SPEC, ARCH, SEQ, WINDOW, ROW = "specs/sliding_window.py", "sm_80", 1024, 512, 5

STYLES = ("skip", "mixed", "full")
"""The classes of colours, by the number of a tile's class."""

EXCERPTS = (
    (r"^// Every key that some query in", r"^}", "skip"),
    (r"^// Every query in .* keeps every", r"^}", "full"),
    (r"ROLLED while \(tile < tile_end\)", r"bool full_tile", ""),
    (r"// 5b\. S = Q K\^T", r"multiply_rows", ""),
    (r"// 5d\. The mask, on mixed tiles only", r"if \(!full_tile\)", "mixed"),
    (r"// 5e\. Online softmax", r"// 5e", ""),
    (r"// 5f\. P = exp2", r"// 5f", ""),
)
"""The parts of the emitted file that the picture shows: first line, last line, colour beside it."""

LABELS = {"skip": "tiles outside: skipped", "full": "tiles inside: full", "mixed": "mixed tiles"}

EXTRA = """<style>
.fgp .code{font:11.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}
.fgp .block{fill:none;stroke:var(--fgp-ink);stroke-width:2.5}
.fgp .panel{fill:var(--fgp-skip);opacity:.35}
.fgp .key{stroke:var(--fgp-soft);stroke-opacity:.5}
</style>"""

EDGE, LINE = 16, 18
LETTER = 7.0  # the width of a letter of code


@dataclass(frozen=True)
class Layout:
    """Where the parts stand: beside each other, or below each other on a phone."""

    width: int
    side: int

    @property
    def beside(self) -> bool:
        return self.width > 2 * self.side

    @property
    def prose(self) -> int:
        """The width of what stands to the left of the map."""
        return self.width - 2 * EDGE - (self.side + 44 if self.beside else 0)

    @property
    def columns(self) -> int:
        return int((self.width - 2 * EDGE - 14) / LETTER)


LAYOUTS = {"kernel.svg": Layout(760, 330), "kernel_narrow.svg": Layout(400, 330)}


def main() -> None:
    for name, layout in LAYOUTS.items():
        path, text = FOLDER / name, picture(layout)
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"docs/pictures/{name} is not up to date: python docs/first_page.py")


def picture(layout: Layout) -> str:
    """The SVG of a layout."""
    spec = fg.load(ROOT / SPEC)
    tiles = fg.visualize(spec, (1, 1, SEQ), window=WINDOW, arch=ARCH)
    (head,) = tiles.heads
    row = [int(each) for each in head.classes[ROW]]
    of_row = {name: row.count(code) for code, name in enumerate(STYLES)}
    meanings = {
        "skip": "skipped: nothing is loaded",
        "mixed": "mixed: computed with the mask",
        "full": "full: computed without the mask",
    }
    counts = dict(zip(STYLES, (tiles.counts[n] for n in ("empty", "mixed", "full")), strict=True))

    parts = [EXTRA, text_at(EDGE, 28, "You write the mask in Python", "head")]
    y = code(parts, [(line, "") for line in mask_lines(spec)], 52, layout)
    y = paragraph(
        parts,
        f"flashgen solves it for the tiles of a kernel. Here {SEQ:,} queries meet {SEQ:,} keys, "
        f"window is {WINDOW}, and a tile is {tiles.tile[0]} x {tiles.tile[1]}:",
        y + 8,
        layout,
    )
    for name, meaning in meanings.items():
        y += 24
        box = f'x="{EDGE + 0.5}" y="{y - 11.5}" width="13" height="13"'
        parts.append(f'<rect class="key {name}" {box}/>')
        parts.append(text_at(EDGE + 22, y, f"{counts[name]} tiles are {meaning}"))
    y = paragraph(
        parts,
        f"A thread block computes one row of tiles. The block that is outlined loads "
        f"{of_row['full'] + of_row['mixed']} of {len(row)} tiles, and evaluates the mask in "
        f"{of_row['mixed']}.",
        y + 14,
        layout,
    )
    x, top = (layout.width - EDGE - layout.side, 40) if layout.beside else (EDGE + 24, y + 32)
    parts += tile_map(head, tiles.tile, x, top, layout.side)
    y = max(y, top + layout.side) + 34
    parts.append(text_at(EDGE, y, "flashgen emits the kernel (excerpt)", "head"))
    y = code(parts, emitted(spec), y + 26, layout)
    words = (
        f"The mask of {SPEC}; the {tiles.tiles} tiles of {SEQ:,} queries and keys, of which "
        f"{counts['skip']} are skipped, {counts['mixed']} computed with the mask and "
        f"{counts['full']} without it; lines of the emitted CUDA file that decide so"
    )
    page = f'<rect class="page" width="{layout.width}" height="{y + EDGE - 6}" rx="6"/>'
    title = "From a mask in Python to the loop of a CUDA kernel"
    return element(title, words, [page, *parts], (layout.width, y + EDGE - 6))


def mask_lines(spec: fg.AttentionSpec) -> list[str]:
    """The user's function, as it stands in the file."""
    assert spec.mask_mod is not None
    return inspect.getsource(spec.mask_mod).rstrip().splitlines()


def emitted(spec: fg.AttentionSpec) -> list[tuple[str, str]]:
    """The excerpts of the emitted file: each line, and the colour beside it."""
    lines = fg.emit(spec, arch=ARCH).forward.text.splitlines()
    found: list[tuple[str, str]] = []
    at = 0
    for first, last, style in EXCERPTS:
        before = at
        start = next(i for i in range(at, len(lines)) if re.search(first, lines[i]))
        at = next(i for i in range(start, len(lines)) if re.search(last, lines[i])) + 1
        indent = lines[start][: len(lines[start]) - len(lines[start].lstrip())]
        if found:
            left_out = any(lines[before:start])
            found.append((f"{indent}\N{MIDLINE HORIZONTAL ELLIPSIS}" if left_out else "", ""))
        found += [(line, style) for line in lines[start:at]]
    return [*found, ("  }", "")]


def code(parts: list[str], lines: list[tuple[str, str]], y: int, layout: Layout) -> int:
    """Appends lines of code, wrapped where the picture is narrow; the y of their end."""
    pieces = [(each, style) for line, style in lines for each in wrapped(line, layout.columns)]
    marked = any(style for _, style in pieces)
    width = layout.width - 2 * EDGE if marked or not layout.beside else layout.prose
    box = f'x="{EDGE}" y="{y - 18}" width="{width}" height="{LINE * len(pieces) + 12}" rx="4"'
    parts.append(f'<rect class="panel" {box}/>')
    for style, run in itertools.groupby(pieces, key=lambda each: each[1]):
        texts = [text for text, _ in run]
        if style:
            box = f'x="{EDGE + 0.5}" y="{y - 12.5}" width="5" height="{LINE * len(texts) - 1}"'
            parts.append(f'<rect class="key {style}" {box}/>')
        for text in texts:
            parts.append(text_at(EDGE + 14, y, text, "code"))
            y += LINE
        if style and layout.beside:
            parts.append(text_at(layout.width - EDGE - 8, y - LINE, LABELS[style], "soft end"))
    return y + 6


def wrapped(line: str, columns: int) -> Iterator[str]:
    """The line, or its pieces with a deeper indent."""
    indent = line[: len(line) - len(line.lstrip())]
    deeper = indent + ("// " if line.strip().startswith("//") else "    ")
    yield from textwrap.wrap(
        line.strip(), columns, initial_indent=indent, subsequent_indent=deeper
    ) or [""]


def paragraph(parts: list[str], text: str, y: int, layout: Layout) -> int:
    """Appends lines of prose; returns the base line of the last one."""
    for line in textwrap.wrap(text, int(layout.prose / 6.7)):
        y += LINE
        parts.append(text_at(EDGE, y, line, "soft"))
    return y


def tile_map(head: HeadTiles, tile: tuple[int, int], x: int, y: int, side: int) -> Iterator[str]:
    """The tiles, of which the last column and row may be cut off, and the outline of one row."""
    scale = side / SEQ
    height, width = (size * scale for size in tile)
    yield text_at(x, y - 10, "keys \N{RIGHTWARDS ARROW}", "soft")
    at = f"translate({x - 18} {y}) rotate(90)"
    yield f'<g transform="{at}">{text_at(0, 0, "queries →", "soft")}</g>'
    for i, line in enumerate(head.classes):
        for j, code_ in enumerate(line):
            w, h = (min(size, side - n * size) for n, size in ((j, width), (i, height)))
            yield (
                f'<rect class="{STYLES[code_]}" x="{x + j * width:.1f}" y="{y + i * height:.1f}" '
                f'width="{w - 1:.1f}" height="{h - 1:.1f}"/>'
            )
    outline = f'x="{x - 2}" y="{y + ROW * height - 2:.1f}" width="{side + 3}"'
    yield f'<rect class="block" {outline} height="{height + 3:.1f}" rx="3"/>'


if __name__ == "__main__":
    main()
