"""The problem that the search solves: a kernel, its operands and the machine; and its tiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashgen.arch import SMEM_RESERVED, Arch
from flashgen.dtypes import ITEMSIZE, OPERANDS
from flashgen.language.spec import AttentionSpec
from flashgen.planner.models import (
    backward_sm80,
    backward_sm90,
    fitted_sm80,
    fitted_sm90,
    forward_sm80,
    forward_sm90,
    spec_terms,
)
from flashgen.planner.models.fitted_time import CONSTANTS
from flashgen.planner.models.kernel_model import MMA_ROWS, STEP, VECTOR, KernelModel
from flashgen.planner.models.panels_sm90 import GROUP_ROWS
from flashgen.planner.quantities import Number
from flashgen.planner.windows import Learned, added_by_scores

PATHS: dict[str, dict[tuple[str, int], KernelModel]] = {
    "sm_80": forward_sm80.MODELS | backward_sm80.MODELS,
    "sm_90a": forward_sm90.MODELS | backward_sm90.MODELS,
}
"""By code path: the cost models by kernel and bytes per operand element."""


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

    def at_occupancy(self, blocks: int) -> Tile:
        """The tile with another number of resident blocks."""
        return Tile(
            self.step, self.warps, self.row_groups, blocks, self.column_warps, self.score_warps
        )

    @property
    def owned(self) -> int:
        """Rows of the side that the block owns."""
        return MMA_ROWS * self.row_groups * self.warps // self.column_warps

    @property
    def unit(self) -> int:
        """The number of rows of which a step is a multiple.

        Warps of a warpgroup share 64 queries; warpgroups share the keys.
        """
        return min(STEP * self.score_warps, GROUP_ROWS)

    @property
    def exchanged(self) -> int:
        """Tiles that warps exchange through shared memory: P and dS, or none."""
        return 2 if self.score_warps > 1 else 0


@dataclass(frozen=True)
class TileProblem:
    """One kernel for which a tile is sought.

    Attributes:
        kernel: the kernel's name, as in `Plan.kernel`.
        arch: the facts of the architecture.
        path, path_note: the code path, and the reason why it is not the architecture's own, or "".
        dtype, itemsize: the dtype of the operands, and its bytes per element.
        d_qk, d_v: head dims of Q and K, and of V and O.
        access_bytes: bytes per access to global memory.
        smem_limit, smem_of_sm: M and M_sm, bytes of shared memory of a block and of an SM.
        extra_registers: registers per thread that the spec and the architecture add.
        pending: registers per accumulator element of S and dP; 0 in the forward kernel.
        searching: registers of a producer thread that searches for tiles; 0 where none does.
        score_ops, dropout_ops: instructions per score element.
        sink_bytes: bytes of the sink's logit; 0 where the kernel reads none.
        block_layout: a block-sparse layout in words; "" without one.
        heads_per_tile: query heads that share a tile.
        learned: the elements of learned tensors to which each score adds for itself.
        partial: as in `Plan`.
    """

    kernel: str
    arch: Arch
    path: str
    path_note: str
    dtype: str
    itemsize: int
    d_qk: int
    d_v: int
    access_bytes: int
    smem_limit: int
    smem_of_sm: int
    extra_registers: int
    pending: float
    searching: int
    score_ops: int
    dropout_ops: int
    sink_bytes: int
    block_layout: str
    heads_per_tile: int
    learned: Learned = ()
    partial: bool = False

    @functools.cached_property
    def model(self) -> KernelModel:
        """The cost model of the kernel, of its first form where it has two."""
        return PATHS[self.path][self.kernel, self.itemsize]

    def model_of(self, tile: Tile) -> KernelModel:
        """The cost model of the form of the kernel that a tile is for."""
        other = self.model.other_form
        pair = tile.column_warps, tile.score_warps
        return other if other is not None and pair in other.sharing else self.model

    @functools.cached_property
    def given(self) -> dict[str, Number]:
        """The quantities that do not depend on the tile."""
        vectors = self.access_bytes == VECTOR
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
            # LSE and delta. Without dropout, -delta is stored twice: the dP accumulators of a
            # pair of keys are initialised with it.
            "query_bytes": 8 if self.dropout_ops else 12,
            "access": self.access_bytes,
            "windows": 0,
            "copy_ops": fitted_sm80.VECTOR_COPY_INSTRUCTIONS
            if vectors
            else fitted_sm80.ELEMENT_COPY_INSTRUCTIONS,
            "factors": OPERANDS[self.dtype].products,
            "tensor_rate": self.arch.tensor_rate(self.path),
            "l2_rate": self.arch.l2_bytes_per_clock,
            "score_ops": self.score_ops,
            "dropout_ops": self.dropout_ops,
            **CONSTANTS,
        }

    @functools.cached_property
    def copy_warps(self) -> Number:
        """Warps that are needed to copy a row in one pass."""
        return forward_sm80.COPY_WARPS(self.given)


def served_registers(spec: AttentionSpec, path: str) -> int:
    """The registers that calls with split keys or pages take beyond those of other calls."""
    if not spec.is_served:
        return 0
    if path == "sm_80":
        return fitted_sm80.FORWARD_SERVED_REGISTERS
    wide = (spec.head_dim_v or spec.head_dim) > fitted_sm90.SERVED_HEAD_DIM
    needed = wide or spec_terms.reads_for_each_score(spec)
    return fitted_sm80.FORWARD_SERVED_REGISTERS * (needed + (spec.block_sparse is not None))


def problem_of(
    spec: AttentionSpec,
    arch: Arch,
    sram: int | None,
    access_bytes: int,
    spare_registers: int = 0,
    kernel: str = "forward",
    heads_per_tile: int = 1,
) -> TileProblem:
    """The problem of one kernel of a spec. Arguments as in `flashgen.planner.plan`."""
    limit = arch.smem_per_block if sram is None else sram
    path, path_note = _path(spec, arch, access_bytes)
    pending, searching = 0.0, 0
    sink = None if spec.split else spec.sink  # the sink of split keys counts once, in the merge
    if kernel == "forward" or path == "sm_80":  # a spec adds the same to both forward kernels
        extra = spec_terms.extra_sm80(spec, arch, kernel)
    else:
        extra = spec_terms.extra_sm90(spec, kernel)
    if kernel != "forward":  # its formulas have a constant of their own
        by_tile = spec_terms.pending_sm90(spec, kernel)
        pending = spec_terms.pending_sm80(spec) if path == "sm_80" else by_tile
    block_layout = spec.block_sparse.described if spec.block_sparse else ""
    extra += served_registers(spec, path)
    if path != "sm_80":
        searching = spec_terms.searching_sm90(spec, kernel, spare_registers)
    return TileProblem(
        kernel=kernel,
        arch=arch,
        path=path,
        path_note=path_note,
        dtype=spec.dtype,
        itemsize=ITEMSIZE[spec.dtype],
        d_qk=spec.head_dim,
        d_v=spec.head_dim_v or spec.head_dim,
        access_bytes=access_bytes,
        smem_limit=limit,
        # Every architecture has 1 KiB more per SM than one block can have.
        smem_of_sm=limit + arch.smem_per_sm - arch.smem_per_block,
        extra_registers=extra + spare_registers,
        pending=pending,
        searching=searching,
        score_ops=spec_terms.score_instructions(spec, kernel),
        dropout_ops=spec_terms.dropout_instructions(spec, kernel),
        sink_bytes=0 if sink is None or kernel != "forward" else ITEMSIZE[sink.dtype],
        block_layout=block_layout,
        heads_per_tile=heads_per_tile,
        learned=added_by_scores(spec, kernel),
        partial=spec.partial or (spec.split and ITEMSIZE[spec.dtype] == 2),
    )


def _path(spec: AttentionSpec, arch: Arch, access_bytes: int) -> tuple[str, str]:
    """The code path of a kernel, and why it is not the architecture's own, or ""."""
    if arch.path == "sm_80":
        return arch.path, ""
    if ITEMSIZE[spec.dtype] != 2:
        why = "float32 is split into parts of bfloat16, which mma.sync multiplies"
    elif access_bytes != VECTOR:
        why = "TMA takes addresses and strides in multiples of 16 bytes"
    else:
        return arch.path, ""
    return "sm_80", f"sm_80 path: {why}"
