"""The feasible tiles of a kernel, and the cheapest of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from flashgen.arch import SMEM_RESERVED, Arch
from flashgen.plan import model, model_backward, model_backward_sm90, model_sm90
from flashgen.plan.formulas import Number, tidy
from flashgen.plan.model import MMA_ROWS, STEP, KernelModel
from flashgen.plan.model_backward import SYNCS, dq_row_warps
from flashgen.plan.model_sm90 import GROUP_ROWS

# The formulas of each kernel for operands of 2 and 4 bytes.
MODELS: dict[tuple[str, int], KernelModel] = {
    ("forward", 2): model.FORWARD_16BIT,
    ("forward", 4): model.FORWARD_32BIT,
    **model_backward.MODELS,
}
PATHS = {"sm_80": MODELS, "sm_90a": model_sm90.MODELS | model_backward_sm90.MODELS}


def model_of(path: str, kernel: str, itemsize: int) -> KernelModel:
    """The formulas of a kernel on a code path."""
    return PATHS[path][kernel, itemsize]


@dataclass(frozen=True)
class Problem:
    """What is planned for: the kernel, the operands and the machine."""

    kernel: str
    arch: Arch
    dtype: str
    itemsize: int
    d_qk: int
    d_v: int
    access_bytes: int
    smem_limit: int  # M
    smem_of_sm: int  # M_sm
    extra_registers: int
    pending: float  # 0 in the forward kernel, whose formulas have their own
    score_ops: int
    dropout_ops: int
    sink_bytes: int
    layout: str = ""  # a block-sparse layout in words; "" where there is none
    searching: int = 0
    heads_per_tile: int = 1
    path: str = "sm_80"
    path_note: str = ""  # why it is not the architecture's own

    @functools.cached_property
    def model(self) -> KernelModel:
        return model_of(self.path, self.kernel, self.itemsize)

    @functools.cached_property
    def given(self) -> dict[str, Number]:
        """The quantities that do not depend on the tile."""
        wide = self.itemsize == 4
        fastest = self.arch.mma_16bit if self.path == "sm_80" else self.arch.tensor_16bit
        return {
            "stages": self.model.stages,
            "d_qk": self.d_qk,
            "d_v": self.d_v,
            "d": max(self.d_qk, self.d_v),
            "e": self.itemsize,
            "M": self.smem_limit,
            "M_sm": self.smem_of_sm,
            "reserved": SMEM_RESERVED,
            "R": self.arch.registers_per_sm,
            "extra": self.extra_registers,
            "pending": self.pending,
            "searching": self.searching,
            # Random bits take delta apart from its sign, and once instead of twice.
            "query_bytes": 8 if self.dropout_ops else 12,
            "access": self.access_bytes,
            "copy_ops": 1 if self.access_bytes == model.GRANULE else 3,
            "factors": 6 if wide else 1,
            "tensor_rate": self.arch.mma_tf32 if wide else fastest,
            "l2_rate": self.arch.l2_bytes_per_clock,
            "atomic_rate": self.arch.l2_bytes_per_clock / 2,
            "score_ops": self.score_ops,
            "dropout_ops": self.dropout_ops,
        }

    @functools.cached_property
    def copy_warps(self) -> Number:
        """Warps that it takes to copy a row in one pass."""
        return model.COPY_WARPS(self.given)


@dataclass(frozen=True, order=True)
class Tile:
    """A candidate. Ordered, so that ties between equal costs are broken the same way each time.

    Attributes:
        step: rows of the walked side per step of the main loop.
        warps, row_groups, blocks, column_warps, score_warps: see `QUANTITIES`.
    """

    step: int
    warps: int
    row_groups: int
    blocks: int
    column_warps: int = 1
    score_warps: int = 1

    @property
    def owned(self) -> int:
        """Rows of the side that the block owns."""
        return MMA_ROWS * self.row_groups * self.warps // self.column_warps

    @property
    def unit(self) -> int:
        """What a step is a multiple of."""
        return STEP * self.score_warps

    @property
    def exchanged(self) -> int:
        """P and dS, where the warps that own the same rows share their scores."""
        return 2 if self.score_warps > 1 else 0


@dataclass(frozen=True)
class Excess:
    """A constraint that a tile breaks: the quantity, what it needs, what is allowed."""

    quantity: str
    needs: Number
    limit: Number
    unit: str


def quantities(problem: Problem, tile: Tile) -> dict[str, Number]:
    """Values for all that the kernel's constraints mention, and what the tile needs."""
    at: dict[str, Number] = {
        **problem.given,
        problem.model.owns: tile.owned,
        problem.model.walks: tile.step,
        "warps": tile.warps,
        "row_groups": tile.row_groups,
        "blocks": tile.blocks,
    }
    if problem.kernel != "forward":
        at |= {
            "column_warps": tile.column_warps,
            "score_warps": tile.score_warps,
            "repeats": tile.column_warps // tile.score_warps,
            "exchanged": tile.exchanged,
            "dq_row_warps": dq_row_warps(int(at["block_q"]), tile.warps, problem.d_qk),
            "syncs": SYNCS + (1 if tile.exchanged else 0),
        }
    return problem.model.needs(at)


def costs(problem: Problem, tile: Tile) -> dict[str, Number]:
    """`quantities`, and all that the cost is made of; "cost" is clocks per score element."""
    return problem.model.costs(quantities(problem, tile))


def cost(problem: Problem, tile: Tile) -> float:
    """Predicted clocks of one SM per score element."""
    return float(costs(problem, tile)["cost"])


def excesses(problem: Problem, tile: Tile) -> Iterator[Excess]:
    """The constraints that a tile breaks, the most telling first."""
    arch, at = problem.arch, quantities(problem, tile)
    of = problem.model
    if tile.step > of.max_step:
        rows = "keys" if of.walks == "block_k" else "queries"
        yield Excess(f"{rows} per step", tile.step, of.max_step, "")
    if tile.warps > max(of.warp_counts):
        yield Excess("warps", tile.warps, max(of.warp_counts), "")
    if at["smem"] > problem.smem_limit:
        yield Excess("shared memory", at["smem"], problem.smem_limit, "B")
    elif at["smem_sm"] > problem.smem_of_sm:
        yield Excess("shared memory per SM", at["smem_sm"], problem.smem_of_sm, "B")
    if at["registers"] > at["register_limit"]:
        yield Excess("registers per thread", tidy(at["registers"]), at["register_limit"], "")
    resident = tile.blocks * (tile.warps + of.other_warps)
    if resident > arch.warps_per_sm:
        yield Excess("resident warps", resident, arch.warps_per_sm, "")
    if tile.blocks > arch.blocks_per_sm:
        yield Excess("resident blocks", tile.blocks, arch.blocks_per_sm, "")
    if of.copies_rows and tile.warps < problem.copy_warps:
        yield Excess("warps to copy a row", problem.copy_warps, tile.warps, "")
    yield from unshared(tile.owned, problem.heads_per_tile)


def unshared(block_q: int, heads: int) -> Iterator[Excess]:
    """Why a tile of so many rows cannot be shared by so many heads.

    A warp works for one of them, and one box of Q has the rows of a warpgroup: all of some heads,
    or some of one.
    """
    if heads == 1:
        return
    queries = Fraction(block_q, heads)
    if queries % MMA_ROWS:
        yield Excess("heads per warp", max(2, math.ceil(MMA_ROWS / queries)), 1, "")
    elif queries % GROUP_ROWS and GROUP_ROWS % queries:
        boxes = GROUP_ROWS // math.gcd(GROUP_ROWS, int(queries))
        yield Excess("boxes of Q per warpgroup", boxes, 1, "")


def fits(problem: Problem, tile: Tile) -> bool:
    return next(excesses(problem, tile), None) is None


def can_have(problem: Problem, tile: Tile) -> bool:
    """The template can run this tile, and it fits."""
    shape = replace(tile, blocks=1) in shapes(problem)
    return shape and tile.blocks >= 1 and fits(problem, tile)


def with_blocks(problem: Problem, tile: Tile) -> list[Tile]:
    """The tile at every number of resident blocks with which it fits."""
    found: list[Tile] = []
    for blocks in range(1, problem.arch.blocks_per_sm + 1):
        candidate = replace(tile, blocks=blocks)
        if not fits(problem, candidate):
            break  # more blocks leave less of everything to each
        found.append(candidate)
    return found


def shapes(problem: Problem) -> Iterator[Tile]:
    """Every tile that the template can run, whether it fits or not, with one block per SM."""
    for column_warps, score_warps in problem.model.sharing:
        for warps in problem.model.warp_counts:
            if warps % column_warps:
                continue
            for row_groups in problem.model.row_groups:
                unit = STEP * score_warps
                for step in range(unit, problem.model.max_step + 1, unit):
                    yield Tile(step, warps, row_groups, 1, column_warps, score_warps)


def tiles(problem: Problem) -> Iterator[Tile]:
    """Every feasible tile."""
    for shape in shapes(problem):
        yield from with_blocks(problem, shape)


def cheapest(problem: Problem) -> Tile | None:
    """The feasible tile of least predicted cost; None when there is none."""
    return _least(problem, tiles(problem))


def best_occupancy(problem: Problem, tile: Tile) -> Tile | None:
    """The tile with the number of resident blocks that serves it best; None when it never fits."""
    return _least(problem, with_blocks(problem, tile))


def _least(problem: Problem, candidates: Iterator[Tile] | list[Tile]) -> Tile | None:
    return min(candidates, key=lambda tile: (cost(problem, tile), tile), default=None)


def larger(problem: Problem, tile: Tile) -> Iterator[tuple[str, Tile]]:
    """The next larger tiles, each with what changes."""
    owns, walks = problem.model.owns, problem.model.walks
    rows = "rows" if owns == "block_q" else "keys"
    longer = replace(tile, step=tile.step + tile.unit, blocks=1)
    yield f"{walks} {longer.step}", longer
    if tile.row_groups < max(problem.model.row_groups):
        taller = replace(tile, row_groups=tile.row_groups + 1, blocks=1)
        yield f"{owns} {taller.owned} by {MMA_ROWS * taller.row_groups} {rows} per warp", taller
    more = [warps for warps in problem.model.warp_counts if warps > tile.warps]
    wider = replace(tile, warps=more[0] if more else 2 * tile.warps, blocks=1)
    yield f"{owns} {wider.owned} by {wider.warps} warps", wider


def smallest(problem: Problem) -> Tile:
    """The tile that needs least shared memory, of those with enough warps to copy a row.

    Tiles whose registers do not fit count only where none do.
    """

    def size(tile: Tile) -> tuple[bool, Number, Tile]:
        at = quantities(problem, tile)
        return at["registers"] > at["register_limit"], at["smem"], tile

    least = problem.copy_warps if problem.model.copies_rows else 1
    return min((s for s in shapes(problem) if s.warps >= least), key=size)
