"""Writes docs/variants.md: every spec of specs/, with its tile map and what the analysis found.

python docs/variants.py            writes it
python docs/variants.py --check    exit status 1 when it is not what would be written
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sympy

import flashgen as fg
from flashgen.analysis import Analysis, Interval, analyse, classify, window_of
from flashgen.cli.captured_tensors import tensor_values
from flashgen.cli.inputs import Shape, example_scalars
from flashgen.language import BATCH, HEADS, SEQ_K, SEQ_Q, B, Element, H, python_text
from flashgen.language.tensor import SIZES
from flashgen.planner import plan_backward
from flashgen.signature import LAYOUT_NAMES

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs/variants.md"
SEQ, TILE = 256, 16
MARKS = {"empty": "·", "mixed": "▒", "full": "█"}

HEAD = f"""# Variants

Every file of `specs/`: its formula, its tile map, and what the analysis found. This page is written
by `python docs/variants.py`. A map shows {SEQ} queries (down) by {SEQ} keys (across), in tiles of
{TILE} x {TILE}, with the example values of the file: `{MARKS["empty"]}` is an empty tile, which is
not loaded; `{MARKS["mixed"]}` a partial (mixed) tile, in which the mask is evaluated;
`{MARKS["full"]}` a full tile, in which it is not.
"""


def main() -> None:
    text = document()
    if "--check" not in sys.argv:
        TARGET.write_text(text)
    elif not TARGET.is_file() or TARGET.read_text() != text:
        sys.exit("docs/variants.md is not up to date: python docs/variants.py")


def document() -> str:
    parts = [HEAD]
    for path in sorted((ROOT / "specs").glob("*.py")):
        parts.append("\n".join(section(path)))
    return "\n".join(parts) + "\n"


def section(path: Path) -> Iterator[str]:
    spec = fg.load(path)
    analysis = analyse(spec)
    yield f"## {path.stem}\n"
    yield f"{docstring(path)}\n"
    if spec.keep != sympy.true:
        yield f"```\n{tile_map(path, spec, analysis)}\n```\n"
    for line in findings(spec, analysis):
        yield f"- {line}"
    yield ""


def docstring(path: Path) -> str:
    """The docstring of the file; its formulas are indented, which Markdown shows unchanged."""
    found = ast.get_docstring(ast.parse(path.read_text()))
    assert found is not None, f"{path.name} says what it is"
    return found


def tile_map(path: Path, spec: fg.AttentionSpec, analysis: Analysis) -> str:
    sizes = Shape(1, 4, 4, SEQ, SEQ)
    scalars = example_scalars(str(path))
    tensors, _ = tensor_values(spec, str(path), sizes)
    env: dict[sympy.Symbol, Any] = {BATCH: 1, HEADS: 4, SEQ_Q: SEQ, SEQ_K: SEQ, B: 0, H: 1}
    env |= {scalar.expr: scalars[scalar.name] for scalar in spec.scalars}
    env |= {tensor.symbol: tensors[tensor.name].numpy() for tensor in spec.tensors}
    live = live_blocks(spec, tensors)

    def mark(q: int, k: int) -> str:
        ends = (q, q + TILE - 1), (k, k + TILE - 1)
        kind = classify(analysis.mask, env, *ends)
        blocks = {place for place in live if all(a <= b for a, b in overlaps(place, ends))}
        if spec.block_sparse is not None and kind != "empty":
            some = {live[place] for place in blocks}
            kind = "empty" if True not in some else "mixed" if False in some else kind
        return MARKS[kind]

    starts = range(0, SEQ, TILE)
    return "\n".join(" ".join(mark(q, k) for k in starts) for q in starts)


Ends = tuple[tuple[int, int], tuple[int, int]]


def live_blocks(spec: fg.AttentionSpec, tensors: dict[str, Any]) -> dict[Ends, bool]:
    """Whether each block is live, by its first and last query and key; for batch 0 and head 1."""
    sparse = spec.block_sparse
    if sparse is None:
        return {}
    rows, columns = sparse.blocks(SEQ, SEQ)
    if sparse.is_static:
        table = list(sparse.table(1, 4, rows, columns))
        line = table[rows * columns :] if sparse.by_head else table
    else:
        given = tensors["layout"]
        line = given[0, min(1, given.shape[1] - 1)].flatten().tolist()
    q, k = sparse.block_q, sparse.block_k
    return {
        ((i * q, i * q + q - 1), (j * k, j * k + k - 1)): bool(line[i * columns + j])
        for i in range(rows)
        for j in range(columns)
    }


def overlaps(one: Ends, other: Ends) -> Iterator[tuple[int, int]]:
    """On each axis, what must be in order where two rectangles meet."""
    for (a_lo, a_hi), (b_lo, b_hi) in zip(one, other, strict=True):
        yield max(a_lo, b_lo), min(a_hi, b_hi)


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
