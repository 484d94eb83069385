"""The policy "paper": the block sizes of Algorithm 1, Bc = ceil(M/4d) and Br = min(Bc, d)."""

from __future__ import annotations

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models.kernel_model import (
    MAX_STEP,
    MMA_ROWS,
    ROW_GROUPS,
    STEP,
    WARP_COUNTS,
)
from flashgen.kernels.planner.quantities import Number
from flashgen.kernels.planner.search import Evaluated, best_occupancy
from flashgen.kernels.planner.tile_problem import Tile, TileProblem

# In the paper, M counts elements, and four tiles of M/4 elements must be on chip: Q, K, V and O.
BC = Formula("Bc", "ceil(M/e/(4*d))")
BR = Formula("Br", "min(ceil(M/e/(4*d)), d)")


def sizes(problem: TileProblem) -> tuple[int, int]:
    """The paper's (Br, Bc) for M in elements; d is the larger head dim."""
    quantities: dict[str, Number] = {
        "M": problem.quantities["M"],
        "e": problem.quantities["e"],
        "d": max(problem.quantities["d_qk"], problem.quantities["d_v"]),
    }
    return int(BR(quantities)), int(BC(quantities))


def tile_of_paper(problem: TileProblem) -> tuple[Evaluated | None, tuple[str, ...]]:
    """The feasible tile nearest to the paper's block sizes, and notes on how it follows from them.

    The tile is None when no tile fits.
    """
    (br, bc), quantities = sizes(problem), problem.quantities
    d, elements = max(quantities["d_qk"], quantities["d_v"]), quantities["M"] / quantities["e"]
    notes = [
        f"paper  M = {quantities['M']:,} B = {elements:,.0f} elements of {quantities['e']} B",
        f"paper  Bc = ceil(M/4d) = ceil({elements:.0f}/(4*{d})) = {bc}; Br = min(Bc, d) = {br}",
    ]
    shapes = sorted({MMA_ROWS * w * g for w in WARP_COUNTS for g in ROW_GROUPS})
    block_q = max([rows for rows in shapes if rows <= br], default=shapes[0])
    if block_q != br:
        notes.append(f"paper  Br {br} -> block_q {block_q}: {_rows_reason(br)}")
    block_k = max(STEP, min(bc // STEP * STEP, MAX_STEP))
    if block_k != bc:
        notes.append(f"paper  Bc {bc} -> block_k {block_k}: {_keys_reason(bc)}")

    for rows in [rows for rows in reversed(shapes) if rows <= block_q] + [
        rows for rows in shapes if rows > block_q
    ]:
        for keys in range(block_k, 0, -STEP):
            candidate = _best(problem, rows, keys)
            if candidate is None:
                continue
            if (rows, keys) != (block_q, block_k):
                why = _why_not(problem, block_q, block_k)
                notes.append(
                    f"paper  block_q {block_q}, block_k {block_k} -> {rows}, {keys}: {why}"
                )
            return candidate, tuple(notes)
    return None, ()


def _arrangements(rows: int) -> list[tuple[int, int]]:
    """Pairs (warps, row groups) that own this number of rows."""
    return [(w, g) for w in WARP_COUNTS for g in ROW_GROUPS if MMA_ROWS * w * g == rows]


def _best(problem: TileProblem, rows: int, keys: int) -> Evaluated | None:
    """The cheapest arrangement of warps for a tile of this size; None where none fits."""
    candidates = [
        best_occupancy(problem, Tile(keys, warps, groups, 1))
        for warps, groups in _arrangements(rows)
    ]
    fitting = (candidate for candidate in candidates if not candidate.excesses)
    return min(fitting, key=lambda candidate: candidate.rank, default=None)


def _why_not(problem: TileProblem, rows: int, keys: int) -> str:
    """The constraint that the tile of the wanted size violates, with the most warps."""
    warps, groups = max(_arrangements(rows))
    broken = best_occupancy(problem, Tile(keys, warps, groups, 1)).excesses[0]
    return f"{broken.quantity} {broken.needs:,} {broken.unit}".rstrip() + f" of {broken.limit:,}"


def _rows_reason(br: int) -> str:
    if br < MMA_ROWS:
        return f"an mma has {MMA_ROWS} rows"
    return "16 or 32 rows for each of 1, 2, 4 or 8 warps"


def _keys_reason(bc: int) -> str:
    if bc > MAX_STEP:
        return f"the main loop is unrolled over at most {MAX_STEP} keys"
    return f"a step has a multiple of {STEP} keys"
