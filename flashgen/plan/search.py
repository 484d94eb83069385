"""The feasible tiles of the sm_80 path, and the cheapest of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.arch import SMEM_RESERVED, Arch
from flashgen.plan import model
from flashgen.plan.formulas import Number, tidy
from flashgen.plan.model import KEY_STEP, MAX_BLOCK_K, MMA_ROWS, ROW_GROUPS, WARP_COUNTS


@dataclass(frozen=True)
class Problem:
    """What is planned for: the operands and the machine."""

    arch: Arch
    dtype: str
    itemsize: int
    d_qk: int
    d_v: int
    access_bytes: int
    smem_limit: int  # M
    smem_of_sm: int  # M_sm
    extra_registers: int
    score_ops: int

    @functools.cached_property
    def formulas(self) -> model.PathModel:
        return model.path_model(self.itemsize)

    @functools.cached_property
    def given(self) -> dict[str, Number]:
        """The quantities that do not depend on the tile."""
        wide = self.itemsize == 4
        return {
            "stages": 1,
            "d_qk": self.d_qk,
            "d_v": self.d_v,
            "d": max(self.d_qk, self.d_v),
            "e": self.itemsize,
            "M": self.smem_limit,
            "M_sm": self.smem_of_sm,
            "reserved": SMEM_RESERVED,
            "R": self.arch.registers_per_sm,
            "extra": self.extra_registers,
            "access": self.access_bytes,
            "copy_ops": 1 if self.access_bytes == model.GRANULE else 3,
            "factors": 6 if wide else 1,
            "tensor_rate": self.arch.mma_tf32 if wide else self.arch.mma_16bit,
            "l2_rate": self.arch.l2_bytes_per_clock,
            "score_ops": self.score_ops,
        }

    @functools.cached_property
    def copy_warps(self) -> Number:
        """Warps that it takes to copy a row of K or V in one pass."""
        return model.COPY_WARPS(self.given)


@dataclass(frozen=True, order=True)
class Tile:
    """A candidate. Ordered, so that ties between equal costs are broken the same way each time."""

    block_k: int
    warps: int
    row_groups: int
    blocks: int

    @property
    def block_q(self) -> int:
        return MMA_ROWS * self.row_groups * self.warps


@dataclass(frozen=True)
class Excess:
    """A constraint that a tile breaks: the quantity, what it needs, what is allowed."""

    quantity: str
    needs: Number
    limit: Number
    unit: str


def quantities(problem: Problem, tile: Tile) -> dict[str, Number]:
    """Values for all that `model`'s constraints mention, and what the tile needs."""
    at = {
        **problem.given,
        "block_q": tile.block_q,
        "block_k": tile.block_k,
        "warps": tile.warps,
        "row_groups": tile.row_groups,
        "blocks": tile.blocks,
    }
    return problem.formulas.needs(at)


def costs(problem: Problem, tile: Tile) -> dict[str, Number]:
    """`quantities`, and all that the cost is made of; "cost" is clocks per score element."""
    return problem.formulas.costs(quantities(problem, tile))


def cost(problem: Problem, tile: Tile) -> float:
    """Predicted clocks of one SM per score element."""
    return float(costs(problem, tile)["cost"])


def excesses(problem: Problem, tile: Tile) -> Iterator[Excess]:
    """The constraints that a tile breaks, the most telling first."""
    arch, at = problem.arch, quantities(problem, tile)
    if tile.block_k > MAX_BLOCK_K:
        yield Excess("keys per step", tile.block_k, MAX_BLOCK_K, "")
    if tile.warps > max(WARP_COUNTS):
        yield Excess("warps", tile.warps, max(WARP_COUNTS), "")
    if at["smem"] > problem.smem_limit:
        yield Excess("shared memory", at["smem"], problem.smem_limit, "B")
    elif at["smem_sm"] > problem.smem_of_sm:
        yield Excess("shared memory per SM", at["smem_sm"], problem.smem_of_sm, "B")
    if at["registers"] > at["register_limit"]:
        yield Excess("registers per thread", tidy(at["registers"]), at["register_limit"], "")
    if tile.blocks * tile.warps > arch.warps_per_sm:
        yield Excess("resident warps", tile.blocks * tile.warps, arch.warps_per_sm, "")
    if tile.blocks > arch.blocks_per_sm:
        yield Excess("resident blocks", tile.blocks, arch.blocks_per_sm, "")
    if tile.warps < problem.copy_warps:
        yield Excess("warps to copy a row", problem.copy_warps, tile.warps, "")


def fits(problem: Problem, tile: Tile) -> bool:
    return next(excesses(problem, tile), None) is None


def with_blocks(problem: Problem, tile: Tile) -> list[Tile]:
    """The tile at every number of resident blocks with which it fits."""
    found: list[Tile] = []
    for blocks in range(1, problem.arch.blocks_per_sm + 1):
        candidate = Tile(tile.block_k, tile.warps, tile.row_groups, blocks)
        if not fits(problem, candidate):
            break  # more blocks leave less of everything to each
        found.append(candidate)
    return found


def tiles(problem: Problem) -> Iterator[Tile]:
    """Every feasible tile."""
    for warps in WARP_COUNTS:
        for row_groups in ROW_GROUPS:
            for block_k in range(KEY_STEP, MAX_BLOCK_K + 1, KEY_STEP):
                found = with_blocks(problem, Tile(block_k, warps, row_groups, 1))
                if not found:
                    break  # a larger block_k needs more of everything
                yield from found


def cheapest(problem: Problem) -> Tile | None:
    """The feasible tile of least predicted cost; None when there is none."""
    return _least(problem, tiles(problem))


def best_occupancy(problem: Problem, tile: Tile) -> Tile | None:
    """The tile with the number of resident blocks that serves it best; None when it never fits."""
    return _least(problem, with_blocks(problem, tile))


def _least(problem: Problem, candidates: Iterator[Tile] | list[Tile]) -> Tile | None:
    return min(candidates, key=lambda tile: (cost(problem, tile), tile), default=None)


def larger(tile: Tile) -> Iterator[tuple[str, Tile]]:
    """The next larger tiles, each with what changes."""
    keys = Tile(tile.block_k + KEY_STEP, tile.warps, tile.row_groups, 1)
    yield f"block_k {keys.block_k}", keys
    if tile.row_groups < max(ROW_GROUPS):
        rows = Tile(tile.block_k, tile.warps, tile.row_groups + 1, 1)
        yield f"block_q {rows.block_q} by {MMA_ROWS * rows.row_groups} rows per warp", rows
    warps = Tile(tile.block_k, 2 * tile.warps, tile.row_groups, 1)
    yield f"block_q {warps.block_q} by {warps.warps} warps", warps


def smallest(problem: Problem) -> Tile:
    """The tile that needs the least shared memory, with enough warps to copy a row."""
    warps = next(count for count in WARP_COUNTS if count >= problem.copy_warps)
    return Tile(KEY_STEP, warps, min(ROW_GROUPS), 1)
