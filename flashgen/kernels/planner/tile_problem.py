"""The problem that the search solves: a kernel, its operands and the machine; and its tiles."""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass, field, replace

from flashgen.kernels.planner.layout_share import best_stride
from flashgen.kernels.planner.models import fitted_sm80, spec_terms
from flashgen.kernels.planner.models.codes_sm80 import model_of_codes
from flashgen.kernels.planner.models.fitted_time import constants_of
from flashgen.kernels.planner.models.kernel_model import MMA_ROWS, STEP, VECTOR, KernelModel
from flashgen.kernels.planner.models.panels_sm90 import GROUP_ROWS
from flashgen.kernels.planner.quantities import Number, Quantities
from flashgen.shared.arch import SMEM_RESERVED, Arch
from flashgen.shared.dtypes import ITEMSIZE, OPERANDS
from flashgen.shared.launch_facts import KEY_KERNELS
from flashgen.shared.paths import PATHS, CodePath
from flashgen.spec.analysis.intervals import WalkedAxis, row_interval
from flashgen.spec.language.block_layout import BlockSparse
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import H, Q

MODELS: dict[str, dict[tuple[str, int], KernelModel]] = {
    path.name: {
        key: model
        for name in path.models
        for key, model in importlib.import_module(
            f"flashgen.kernels.planner.models.{name}"
        ).MODELS.items()
    }
    for path in PATHS.values()
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
        column_warps: warps that own the same rows, each with a share of the columns of its sums.
        score_warps: the number of these warps that share their scores; 1 where each warp computes
            all scores, or one warpgroup also the scores of another.
        cluster: blocks that copy the same keys together, 1 or 2.
    """

    step: int
    warps: int
    row_groups: int
    blocks: int
    column_warps: int = 1
    score_warps: int = 1
    cluster: int = 1

    @property
    def owned(self) -> int:
        """Rows of the side that the block owns."""
        return MMA_ROWS * self.row_groups * self.warps // self.column_warps

    @property
    def unit(self) -> int:
        """The number of rows that divides each step.

        Warps of a warpgroup share 64 queries; warpgroups share the keys.
        """
        return min(STEP * self.score_warps, GROUP_ROWS)

    @property
    def exchanged(self) -> int:
        """Tiles that warps exchange through shared memory: P and dS, or none."""
        return 2 if self.score_warps > 1 else 0


@dataclass(frozen=True)
class TileProblem:
    """One kernel for which a tile is sought. Specs with the same numbers are the same problem.

    Attributes:
        spec: the spec that the kernel is for.
        kernel: the kernel's name, as in `Plan.kernel`.
        arch: the facts of the architecture.
        path: the code path.
        quantities: the quantities that do not depend on the tile.
        heads_per_tile: query heads that share a tile.
        layout: the block layout, where boxes with live blocks of it are gathered to tiles.
        records: whether the producer alone searches for tiles or boxes, and tells the consumers.
        strides: whether a block may own keys that are apart: its queries have at most one bound,
            so that it has hardly more queries.
        learned: the elements of learned tensors to which each score adds for itself.
        softmax: whether weights are exponentials.
        tangents: for "tangent", the names of the tensors that have a tangent.
        why_alone: why neighbouring blocks may not walk the same tiles of keys; "" where they can.
    """

    spec: AttentionSpec = field(compare=False)
    kernel: str
    arch: Arch
    path: CodePath
    quantities: Quantities
    heads_per_tile: int
    learned: spec_terms.Learned
    softmax: bool
    layout: BlockSparse | None = None
    records: bool = False
    strides: bool = False
    tangents: tuple[str, ...] = ()
    why_alone: str = ""

    @functools.cached_property
    def model(self) -> KernelModel:
        """The cost model of the kernel, of its first form where it has two."""
        model = MODELS[self.path.name][self.kernel, int(self.quantities["e"])]
        model = model.for_columns(
            int(self.quantities["d_v"]), one_tensor="one_tensor" in self.quantities
        )
        if "e_kv" in self.quantities:
            return model_of_codes(model, in_registers="k_row" in self.quantities)
        return model

    def with_two_tensors(self) -> TileProblem:
        """The problem with values in a tensor of their own; itself, where they have one."""
        if "one_tensor" not in self.quantities:
            return self
        stages = MODELS[self.path.name][self.kernel, int(self.quantities["e"])].stages
        quantities = {name: x for name, x in self.quantities.items() if name != "one_tensor"}
        return replace(self, quantities=Quantities({**quantities, "stages": stages}))

    def model_of(self, tile: Tile) -> KernelModel:
        """The cost model of the form of the kernel that a tile is for."""
        return self.model.form_of(tile.column_warps, tile.score_warps)

    def clusters(self, model: KernelModel, column_warps: int) -> tuple[int, ...]:
        """The numbers of blocks that may copy the same keys together, in a form of the kernel."""
        return (1,) if self.why_alone or column_warps == 1 else model.clusters

    def gathers(self, tile: Tile) -> bool:
        """Whether such tiles consist of boxes with live blocks of the layout."""
        return self.layout is not None and self.model_of(tile) is self.model

    @property
    def walked_block(self) -> int:
        """Positions of a block of the layout along the side that tiles walk."""
        assert self.layout is not None, "only a layout has blocks"
        return self.layout.block_q if self.kernel in KEY_KERNELS else self.layout.block_k

    def box_of(self, step: int) -> int:
        """Rows of a box in tiles of so many rows: they divide tiles and, where they can, blocks."""
        if self.layout is None:
            return step
        box = math.gcd(self.walked_block, step)
        return box if box % STEP == 0 else STEP

    def key_box(self, owned: int) -> int:
        """Keys of a box of the tile that a block owns: whole boxes are blocks of the layout."""
        assert self.layout is not None, "only blocks of a layout are boxes of keys"
        box = math.gcd(self.layout.block_k, owned)
        return box if box % MMA_ROWS == 0 else owned

    def stride(self, owned: int) -> int:
        """The number of blocks that share their keys box by box, where each owns ``owned`` keys."""
        assert self.layout is not None, "only the live blocks of a layout are known"
        return best_stride(self.layout, owned, self.key_box(owned)) if self.strides else 1

    def with_quantities(self, **changes: Number) -> TileProblem:
        """The problem with other values of some quantities."""
        return replace(self, quantities=Quantities({**self.quantities, **changes}))


def problem_of(
    spec: AttentionSpec,
    arch: Arch,
    sram: int | None,
    access_bytes: int,
    spare_registers: int = 0,
    kernel: str = "forward",
    heads_per_tile: int = 1,
    tangents: tuple[str, ...] = (),
) -> TileProblem:
    """The problem of one kernel of a spec. Arguments as in `flashgen.kernels.planner.plan`."""
    itemsize, path = ITEMSIZE[spec.dtype], arch.code_path
    vectors = access_bytes == VECTOR
    lacks_kernel = (kernel, itemsize) not in MODELS[path.name]
    if lacks_kernel or (path.copies_by_tma and not vectors):
        path = PATHS[path.fallback]
    model = MODELS[path.name][kernel, itemsize]
    one_tensor_model = model.one_tensor if spec.shared_kv else None
    model = one_tensor_model or model
    limit = arch.smem_per_block if sram is None else sram
    copy_ops = (fitted_sm80.ELEMENT_COPY_INSTRUCTIONS, fitted_sm80.VECTOR_COPY_INSTRUCTIONS)
    quantities: dict[str, Number] = {
        "stages": model.stages,
        "d_qk": spec.head_dim,
        "d_v": spec.head_dim_v or spec.head_dim,
        "e": itemsize,
        "M": limit,
        # Every architecture has 1 KiB more per SM than one block can have.
        "M_sm": limit + arch.smem_per_sm - arch.smem_per_block,
        "reserved": SMEM_RESERVED,
        "R": arch.registers_per_sm,
        **model.registers_of(spec, arch, kernel, spare_registers),
        "access": access_bytes,
        "windows": 0,
        "records": 0,
        "copy_ops": copy_ops[vectors],
        "factors": OPERANDS[spec.dtype].products,
        "tensor_rate": arch.tensor_rate(path.name),
        "l2_rate": arch.l2_bytes_per_clock,
        "score_ops": spec_terms.score_instructions(spec, kernel)
        - spec_terms.spared_instructions(spec, kernel),
        "special_ops": spec_terms.special_functions(spec, kernel) - (not spec.is_softmax),
        "fma_columns": 0,
        "dropout_ops": spec_terms.dropout_instructions(spec, kernel),
        **constants_of(kernel, path),
    }
    if one_tensor_model is not None:
        quantities["one_tensor"] = 1
    if kernel == "tangent":
        quantities |= spec_terms.moving_terms(spec, tangents)
    learned = spec_terms.added_by_scores(spec, kernel)
    by_tma = path.copies_by_tma
    # Bits of a row of a served call depend on no other row: no tile is gathered for several rows.
    gathers = by_tma and kernel in ("forward", "dq", *KEY_KERNELS) and not spec.is_served
    layout = spec.block_sparse if gathers else None
    searches = by_tma and kernel == "forward" and spec_terms.searches(spec)
    records = layout is not None or searches
    row = row_interval(spec.mask, WalkedAxis(Q))
    strides = layout is not None and kernel in KEY_KERNELS
    strides = strides and row is not None and None in (row.lo, row.hi)
    why_alone = (
        "each producer searches for the tiles of its own rows" if records else _why_alone(spec)
    )
    spec_fields = (learned, spec.is_softmax, layout, records, strides)
    numbers = Quantities(quantities)
    return TileProblem(
        spec, kernel, arch, path, numbers, heads_per_tile, *spec_fields, tangents, why_alone
    )


def _why_alone(spec: AttentionSpec) -> str:
    """Why neighbouring blocks of a forward kernel may not walk the same tiles; "" if they can."""
    if spec.packed:
        return "neighbouring tiles may have rows of two sequences"
    if spec.is_served:
        return "calls with split keys or pages may have one tile of the same keys"
    return "the mask depends on the head" if H in spec.mask.free_symbols else ""
