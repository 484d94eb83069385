"""The cost model of a kernel: formulas for what a tile needs and for what it costs.

A thread block owns rows of one side, queries or keys, and walks the rows of the other side in steps
of its main loop. The formulas of each kernel are one `KernelModel`. The search and the printed
derivation read nothing else of a kernel.

Source of the constraints: FlashAttention (Dao et al., 2022), section 3.1 and Algorithm 1, where
the block sizes Bc and Br follow from the SRAM size M; here with the registers as well.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction

from flashgen.arch import MAX_REGISTERS, REGISTER_STEP, SCHEDULERS, SPECIAL_PER_CLOCK, WARP
from flashgen.planner.formulas import Formula, FormulaSequence

# The granularity of mma.m16n8k16.
MMA_ROWS = 16
STEP = 16  # a step has a multiple of this number of rows for each warp that shares it
VECTOR = 16  # bytes: the unit of cp.async and ldmatrix

KEY_KERNELS = ("dkdv", "fused")
"""The backward kernels whose thread blocks own keys; those of all others own queries."""

LEARNED_KERNELS = ("captured", "captured_exact")
"""The kernels for the gradients of learned tensors."""

# ---- formulas that several kernels share ---------------------------------------------------------

SMEM_OF_SM = Formula("smem_sm", "blocks*(smem + reserved)", "B")

# The launch bounds limit each thread to this number, so that `blocks` blocks are resident. Each
# scheduler has a quarter of the registers, for its share of the warps.
REGISTER_LIMIT = Formula(
    "register_limit",
    f"min({MAX_REGISTERS}, {REGISTER_STEP}*floor(R/{REGISTER_STEP * WARP * SCHEDULERS}"
    f"/ceil(blocks*warps/{SCHEDULERS})))",
)
SPECIAL = Formula("special", f"1/{SPECIAL_PER_CLOCK}", "clk")
ISSUE = Formula("issue", f"(products + rest)/{SCHEDULERS * WARP}", "clk")
# Every resource must do its work: the busiest one sets the pace.
BUSIEST = Formula("busiest", "max(tensor, shared, l2, special, issue)", "clk")
BUSIEST_FUSED = Formula("busiest", "max(tensor, shared, l2, atomics, special, issue)", "clk")
ATOMICS = Formula("atomics", "4*d_qk/block_k/atomic_rate", "clk")


def scaled(text: str, factor: Fraction) -> str:
    """The formula ``text`` times a fraction: "x/8" for 1/8, "x*5/16" for 5/16."""
    product = text if factor.numerator == 1 else f"{text}*{factor.numerator}"
    return product if factor.denominator == 1 else f"{product}/{factor.denominator}"


@dataclass(frozen=True)
class KernelModel:
    """The formulas of one kernel for one operand size.

    Attributes:
        name: the kernel's name, as in `Plan.kernel`.
        owns: the block size of the side that a thread block owns: "block_q" or "block_k".
        sizes: quantities from which the formulas below are made.
        smem: shared memory of a thread block.
        smem_bound: the walked block size that shared memory allows: ``smem`` solved for it.
        registers: registers per thread: the accumulators (16 x n per row group are n/2 registers)
            and what fragments, row statistics and addresses add.
        register_bound: the walked block size that the register limit allows: ``registers`` solved
            for it.
        cost_steps: formulas of the cost, each after those it depends on. "products" and "rest" are
            instructions per score element and thread; "cost" is among the last.
        register_limit: the registers that a thread can have.
        sharing: pairs (column_warps, score_warps) that the template supports.
        stages: number of buffers, where the kernel has a choice.
        warp_counts: numbers of computing warps that the template supports.
        row_groups: numbers of row groups per warp that the template supports.
        max_step: largest walked block size that the template supports.
        other_warps: warps of a block that do not compute (the producer warpgroup).
        copies_rows: whether threads copy rows themselves, one 16-byte vector at a time.
    """

    name: str
    owns: str
    sizes: tuple[Formula, ...]
    smem: Formula
    smem_bound: Formula
    registers: Formula
    register_bound: Formula
    cost_steps: tuple[Formula, ...]
    register_limit: Formula
    sharing: tuple[tuple[int, int], ...]
    stages: int
    warp_counts: tuple[int, ...]
    row_groups: tuple[int, ...]
    max_step: int
    other_warps: int
    copies_rows: bool

    @property
    def walks(self) -> str:
        """The block size of the side that the main loop walks: "block_k" or "block_q"."""
        return "block_k" if self.owns == "block_q" else "block_q"

    @functools.cached_property
    def needs(self) -> FormulaSequence:
        """What a tile needs: ``sizes``, smem, smem_sm, register_limit, registers."""
        return FormulaSequence(
            *self.sizes, self.smem, SMEM_OF_SM, self.register_limit, self.registers
        )

    @functools.cached_property
    def costs(self) -> FormulaSequence:
        """What a tile costs: all of ``cost_steps``."""
        return FormulaSequence(*self.cost_steps)
