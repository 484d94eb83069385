"""Work per score: SASS instructions of the forward kernel's main loop, per score element.

    python benchmarks/instructions.py [--head-dim 128] [--dtype float16] [specs/causal.py ...]

Static counts times 32 lanes, divided by the elements of a warp's tile. "full" counts the
instructions that every tile runs, with the copy of the next K tile; "mixed" adds the mask. The
rescaling of O is a rare branch and has a column of its own. What tiles with far rows run instead,
and what only the last tile of queries does, is not counted. A Triton kernel has 16.9 / 25.2 and
FlexAttention's 18.5 / 23.3 at 128 x 64 tiles, 8 warps, d = 128.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import flashgen as fg  # noqa: E402
from benchmarks.sass import (  # noqa: E402
    TENSOR,
    Block,
    Instruction,
    Loop,
    listing_of,
    main_loop,
    product_loops,
)
from flashgen.kernels.pipeline import Build  # noqa: E402

# The lines of the source in front of blocks that only some tiles execute.
MASK = (
    "if (!full_tile) {",
    "if (!tile.full) {",
    "if (!here.full) {",
    "if (tile.masked) {",
)
SCORE = "score_mod("
SUBTRACT_FAR = "subtract_far("
FAR = (
    "if (far) {",
    "if (tile.far) {",
    "if (const Tile tile = read_tile(rows_here + ROWS_BYTES - 16); tile.far) {",
)
RESCALE = (
    "if (rescale) {",
    "if (find_maxima(tile_max, s, row_max, exp_scale, lag)) {",
    "if (find_maxima(tile_max, s, row_max, exp_scale, MAX_LAG)) {",
)
# Of gathered tiles: boxes without a live block of some rows, and boxes in which rows differ.
DEAD = ("if (live != (1u << BOXES) - 1) {",)
# In the last tiles alone, of elements that do not exist.
LAST = (
    "if (q_start + BLOCK_Q > p.seq_q || k_start + BLOCK_K > p.seq_k) {",
    "if (q_start + BOX_Q > p.seq_q || k_start + BLOCK_K > p.seq_k) {",
    "if (k_start + BLOCK_K > p.seq_k) {",
    "if (k_start + BOX_K > p.seq_k) {",
    "if (!whole) {",
)
DIFFER = ("if (live >> 31) {",)


@dataclass(frozen=True)
class Work:
    """Instructions of a thread in one step of the main loop, all branches included.

    Attributes:
        full: the instructions that every tile runs.
        mask: the further instructions of a mixed tile.
        rescale: the further instructions of a tile in which a row maximum exceeds the threshold.
        search: the instructions between two tiles: the search for a live tile, other branches.
        dead: the further instructions of a gathered tile with a box that has no live block of some
            rows; those of boxes in which rows differ are not counted.
        scores: elements of S that the thread has in a step. Where warps with different work share
            the rows of a tile, the instructions are those of one of each.
    """

    full: Block
    mask: Block
    rescale: Block
    search: Block
    dead: Block
    scores: float
    loop: Loop

    def per_score(self, *parts: Block) -> float:
        return sum(map(len, parts)) / self.scores

    def by_kind(self, *parts: Block) -> dict[str, float]:
        """Instructions per score of each class, the most frequent first."""
        kinds = Counter(i.kind for part in parts for i in part)
        return {kind: count / self.scores for kind, count in kinds.most_common()}


def work_of(built: Build, listing: str | None = None) -> Work:
    """The main loop of a kernel, divided by the conditions of its source.

    Args:
        listing: the text of its disassembly; None to make it.
    """
    plan = built.plan
    if listing is None:
        listing = listing_of(built.cubin, built.binary.kernel, built.binary.arch)
    loops = [main_loop(listing, around_passes=plan.passes > 1)]
    if plan.column_warps > 1 and plan.code_path.copies_by_tma:
        loops = product_loops(listing)
    parts = [_parts_of_loop(built, loop) for loop in loops]
    full, mask, rescale, search, dead = (
        tuple(i for block in blocks for i in block) for blocks in zip(*parts, strict=True)
    )
    scores = plan.block_q * plan.block_k * len(loops) / (32 * plan.warps)
    return Work(full, mask, rescale, search, dead, scores, loops[0])


def _parts_of_loop(built: Build, loop: Loop) -> tuple[Block, Block, Block, Block, Block]:
    """The first five attributes of `Work`."""
    plan, passes = built.plan, built.plan.passes
    masks, rescales, far = (_guarded(built.source.text, heads) for heads in (MASK, RESCALE, FAR))
    # Without a mask only the last tiles are mixed.
    masks_more = any(
        line in built.source.text for line in ("Range range[2];", "mask_mod(", "LAYOUT_Q")
    )
    rare = (*DIFFER, *LAST) if masks_more else DIFFER
    far |= _calls(built.source.text, SUBTRACT_FAR) | _guarded(built.source.text, rare)
    dead = _guarded(built.source.text, DEAD) - far
    near = _guarded(built.source.text, FAR, "} else {")
    score_lines = _calls(built.source.text, SCORE)
    parts: dict[str, list[Block]] = {
        name: [] for name in ("mask", "rescale", "copy", "search", "dead")
    }
    for block in loop.conditional:
        if _mostly_in(block, far):
            continue
        elif _mostly_in(block, masks):
            name = "mask"
        elif _mostly_in(block, dead):
            name = "dead"
        elif _mostly_in(block, rescales):
            name = "rescale"
        elif _mostly_in(block, near):
            name = "copy"
        elif _mostly_in(block, score_lines):
            name = "copy"  # a branch of the score function, which most tiles take
        else:
            name = "copy" if any(i.base == "LDGSTS" for i in block) else "search"
            if plan.gathers and name == "search":
                continue  # none is searched: it belongs to boxes in which rows differ
        parts[name].append(block)
    # Scores are computed in passes, with the mask's part of each.
    passes_of_scores = [turn for turn in loop.inner if any(i.base in TENSOR for i in turn)]
    in_passes: dict[bool, Block] = {
        masked: passes
        * tuple(
            i
            for turn in passes_of_scores
            for i in turn
            if _in(i, masks) == masked and not _in(i, far)
        )
        for masked in (False, True)
    }
    parts["copy"].append(in_passes[False])
    parts["mask"].append(in_passes[True])
    other = [turn for turn in loop.inner if turn not in passes_of_scores]
    mask_loops = [turn for turn in other if _mostly_in(turn, masks)]
    if plan.score_warps > 1:
        # Ranges with two ends are evaluated in a loop for each two keys. The loop around passes
        # counts one iteration of it.
        turns = len(mask_loops) * [2 if passes == 1 else passes]
    else:
        # A mask that reads memory is evaluated in a loop for each word of bits: two columns of 8 in
        # an iteration, 16 iterations or less.
        turns = [min(16, plan.block_k // 8 - n) for n in range(0, plan.block_k // 8, 16)]
    if mask_loops:
        parts["mask"] += [turn * n for turn, n in zip(mask_loops, turns, strict=True)]
    # A tile search tests 32 tiles in one iteration of its loop: one iteration is counted.
    parts["search"] += [
        turn for turn in other if turn not in mask_loops and not _mostly_in(turn, far)
    ]
    mask, rescale, copy, search, without_live = (
        tuple(i for block in blocks for i in block) for blocks in parts.values()
    )
    return (*loop.always, *copy), mask, rescale, search, without_live


def _calls(text: str, function: str) -> set[int]:
    """Numbers of the lines that call a function of the source."""
    lines = enumerate(text.splitlines(), 1)
    return {n for n, line in lines if function in line and "__device__" not in line}


def _guarded(text: str, heads: tuple[str, ...], other: str = "") -> set[int]:
    """Numbers of the lines in braces after a line that is one of ``heads``.

    Args:
        other: "} else {" for the lines of the other branch.
    """
    numbers: set[int] = set()
    lines = text.splitlines()
    for start, line in enumerate(lines):
        if line.strip() in heads:
            indent = line[: len(line) - len(line.lstrip())]
            if other:
                start = next(
                    (n for n in range(start, len(lines)) if lines[n] == indent + other), -1
                )
                if start < 0:
                    continue
            ends = (indent + "}", indent + "} else {")
            end = next(n for n in range(start + 1, len(lines)) if lines[n] in ends)
            numbers.update(range(start + 2, end + 1))
    return numbers


def _mostly_in(block: Block, lines: set[int]) -> bool:
    inside = sum(_in(instruction, lines) for instruction in block)
    return 2 * inside > len(block)


def _in(instruction: Instruction, lines: set[int]) -> bool:
    return not lines.isdisjoint(instruction.lines)


def row(path: Path, head_dim: int, dtype: str, arch: str) -> list[str]:
    spec = fg.load(path).replace(head_dim=head_dim, dtype=dtype)
    built = fg.build(spec, arch)
    plan, work = built.plan, work_of(built)
    return [
        path.stem,
        f"{plan.block_q} x {plan.block_k}, {plan.warps} warps",
        f"{work.per_score(work.full):.2f}",
        f"{work.per_score(work.full, work.mask):.2f}",
        f"{work.per_score(work.full, work.dead):.2f}" if plan.gathers else "",
        f"{work.per_score(work.rescale):.2f}",
        f"{work.per_score(work.search):.2f}",
        str(built.binary.resources.registers),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="*", type=Path)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--arch", default="sm_80")
    args = parser.parse_args()
    table = Table(title=f"instructions per score, {args.dtype}, d = {args.head_dim}, {args.arch}")
    for column in ("spec", "tile", "full", "mixed", "dead boxes", "rescale", "search", "registers"):
        table.add_column(column, justify="left" if column in ("spec", "tile") else "right")
    for path in args.specs or sorted((ROOT / "specs").glob("*.py")):
        table.add_row(*row(path, args.head_dim, args.dtype, args.arch))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
