"""Writes docs/variants.md, docs/gallery.md and the pictures in docs/tile_maps/.

python docs/variants.py            writes them
python docs/variants.py --check    exit status 1 when they are not what would be written
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sympy

import flashgen as fg
from flashgen.kernels.planner import plan_backward
from flashgen.shared.signature import LAYOUT_NAMES
from flashgen.spec.analysis import Analysis, analyse
from flashgen.spec.analysis.intervals import Interval
from flashgen.spec.analysis.windows import window_of
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.tensor import SIZES
from flashgen.spec.language.tensor_elements import Element
from flashgen.tools.cli.captured_tensors import tensor_values
from flashgen.tools.cli.inputs import Shape, example_scalars
from flashgen.tools.views.tile_map import TileMap

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MAPS = "tile_maps"
SEQ, TILE, HEADS = 256, 16, 4

HEAD = f"""# Variants

Every file of `specs/`: its formula, its [tile map](visualize.md), and what the analysis found. This
page is written by `python docs/variants.py`. A map shows {SEQ} queries (down) by {SEQ} keys
(across), in tiles of {TILE} x {TILE}, with the example values of the file.
"""

GALLERY = f"""# Gallery

The tile maps of the files of `specs/` that leave out scores, as `fg.visualize` draws them: {SEQ}
queries (down) by {SEQ} keys (across), in tiles of {TILE} x {TILE}, with the example values of the
files. Each picture leads to its variant. Blue tiles are visited without the mask, orange tiles with
it, and grey tiles are skipped. Several maps in one square are those of batch entries, heads or
packed sequences that differ. [Tile maps](visualize.md) says how to make such pictures; this page is
written by `python docs/variants.py`.

"""


def main() -> None:
    for name, text in documents().items():
        path = DOCS / name
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"docs/{name} is not up to date: python docs/variants.py")
    unknown = sorted({path.name for path in (DOCS / MAPS).iterdir()} - {*pictures()})
    if unknown and "--check" in sys.argv:
        sys.exit(f"docs/{MAPS}/{unknown[0]} belongs to no spec: python docs/variants.py")
    for name in unknown:
        (DOCS / MAPS / name).unlink()


@functools.cache
def documents() -> dict[str, str]:
    """The text of every file that this program writes, by its path in docs/."""
    sections = ["\n".join(section(path)) for path in specs()]
    return {
        "variants.md": "\n".join([HEAD, *sections]) + "\n",
        "gallery.md": GALLERY + gallery(),
        **{f"{MAPS}/{name}": text for name, text in pictures().items()},
    }


def specs() -> list[Path]:
    return sorted((ROOT / "specs").glob("*.py"))


def leaves_out(spec: fg.AttentionSpec) -> bool:
    """Whether the mask or the block layout leaves out scores, so that a picture shows something."""
    return spec.keep != sympy.true or spec.packed


def gallery() -> str:
    """A table of small pictures."""
    names = [path.stem for path in specs() if leaves_out(fg.load(path))]
    cells = [
        f"[![{name}: tile map]({MAPS}/{name}_small.svg)](variants.md#{name})<br>`{name}`"
        for name in names
    ]
    across = 4
    lines = [cells[i : i + across] for i in range(0, len(cells), across)]
    lines[-1] += [""] * (across - len(lines[-1]))
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join(["|" + " |" * across, "|" + " --- |" * across, *rows]) + "\n"


@functools.cache
def pictures() -> dict[str, str]:
    """The SVG files by name: the picture of each variant, and the small one for the gallery."""
    found = {}
    for path in specs():
        spec = fg.load(path)
        if leaves_out(spec):
            made = tile_map(path, spec)
            found[f"{path.stem}.svg"] = made.to_svg()
            found[f"{path.stem}_small.svg"] = made.to_svg(compact=True)
    return {**found, "example_window.svg": example()}


def example() -> str:
    """The picture of docs/visualize.md."""

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (q - k < 300)

    return fg.visualize(window, (2, 8, 1024)).to_svg()


def tile_map(path: Path, spec: fg.AttentionSpec) -> TileMap:
    """The map of a spec with the example values of its file."""
    sizes = Shape(1 if spec.packed else 2, HEADS, HEADS, SEQ, SEQ)
    tensors, _ = tensor_values(spec, str(path), sizes)
    values = {**example_scalars(str(path)), **tensors}
    shape = sizes.batch, HEADS, SEQ
    return fg.visualize(spec, shape, tile=(TILE, TILE), captures=values)


def section(path: Path) -> Iterator[str]:
    spec = fg.load(path)
    analysis = analyse(spec)
    yield f"## {path.stem}\n"
    yield f"{docstring(path)}\n"
    if leaves_out(spec):
        yield f"![Tile map of {path.stem}]({MAPS}/{path.stem}.svg)\n"
    for line in findings(spec, analysis):
        yield f"- {line}"
    yield ""


def docstring(path: Path) -> str:
    """The docstring of the file; its formulas are indented, which Markdown shows unchanged."""
    found = ast.get_docstring(ast.parse(path.read_text()))
    assert found is not None, f"{path.name} says what it is"
    return found


def findings(spec: fg.AttentionSpec, analysis: Analysis) -> Iterator[str]:
    mask, score, sparse = analysis.mask, analysis.score, spec.block_sparse
    if sparse is not None:
        size = f"{sparse.block_q} x {sparse.block_k}"
        origin = "is a function" if sparse.is_static else "is given with each call"
        yield f"the block layout {origin}, in blocks of {size}; kernels walk the live blocks"
    if mask.always:
        yield "every tile is full" if sparse is None else "a tile is full where its blocks are live"
    else:
        exact = (
            "each of them is kept by some query of the tile"
            if mask.reach_exact
            else "each tile in this range is classified before it is loaded"
        )
        yield f"a tile of queries reaches keys {interval(mask.reach)}; {exact}"
        if mask.full is not None and mask.full_exact:
            yield f"tiles are full where all their keys are {interval(mask.full)}"
        elif mask.must == sympy.false:
            yield "no tile is known to be full"
        else:
            yield "a tile is full where the mask holds at its corners, by interval arithmetic"
        if mask.row is not None:
            yield f"the keys of a row are one range, {interval(mask.row)}"
    for symbol, axis in mask.minmax_tables:
        dim = next(t.dims[axis] for t in spec.tensors if t.symbol == symbol)
        yield f"tiles are skipped by a min/max table of `{symbol.name}` along {dim}"
    if not score.identity:
        derivative = python_text(score.derivative)
        yield f"`score_mod = {python_text(spec.score)}`, derivative `{derivative}`"
    for element, partial in score.learned:
        text, factor = python_text(element), python_text(partial)
        yield f"gradient of `{text}`: `{factor}` times dS', {added_up(spec, element)}"
    if spec.sink is not None:
        learned = "; its gradient is summed in a fixed order" if spec.sink.grad else ""
        yield f"`{spec.sink.name}` joins the denominator of each head's softmax{learned}"
    tensors = [t for t in spec.tensors if sparse is None or t.name not in LAYOUT_NAMES]
    free = [d for t in tensors for d in t.dims if isinstance(d, str) and d not in SIZES]
    if free:
        yield f"dimensions of any length: {', '.join(dict.fromkeys(free))}"


def added_up(spec: fg.AttentionSpec, element: Element) -> str:
    """Where the gradient of a learned tensor is summed, by what the index depends on."""
    symbols = {str(s) for index in element.indices for s in index.free_symbols}
    if {"q", "k"} <= symbols or "score" in symbols:
        plan = plan_backward(spec).kernels[-1]
        dims = next(t.dims for t in spec.tensors if t.symbol == element.tensor)
        if window_of(element, dims, 16 * plan.row_groups, plan.block_k) is not None:
            return "summed by a warp in shared memory, for each tile"
        return "added atomically for each score"
    if "q" in symbols:
        return "summed along the row in registers"
    return "summed along the column by a warp" if "k" in symbols else "summed by a whole block"


def interval(found: Interval) -> str:
    """The half-open range in words."""
    lo = "the first" if found.lo is None else f"`{python_text(found.lo)}`"
    hi = "the last" if found.hi is None else f"below `{python_text(found.hi)}`"
    return f"from {lo} to {hi}"


if __name__ == "__main__":
    main()
