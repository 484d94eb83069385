"""A tile: the block sizes and the warps of a kernel, as the search varies them."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.planner.models.kernel_model import MMA_ROWS, STEP


@dataclass(frozen=True, order=True)
class Tile:
    """A candidate of the search. Tiles are ordered, so that ties between costs are reproducible.

    Attributes:
        step: rows of the walked side per step of the main loop.
        warps: computing warps per thread block.
        row_groups: groups of 16 rows per warp, of the side that the block owns.
        blocks: resident blocks per SM.
        column_warps: warps that own the same rows, each with a share of the gradients' columns.
        score_warps: the number of these warps that share their scores; 1 where each warp computes
            all scores.
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
        """The number of rows of which a step is a multiple."""
        return STEP * self.score_warps

    @property
    def exchanged(self) -> int:
        """Tiles that warps exchange through shared memory: P and dS, or none."""
        return 2 if self.score_warps > 1 else 0
