"""The cost model of a kernel: formulas for what a tile needs and for what it costs.

A thread block owns rows of one side, queries or keys, and walks the rows of the other side in steps
of its main loop. The formulas of each kernel are one `KernelModel`. The search and the printed
derivation read nothing else of a kernel.

Source of the constraints: FlashAttention (Dao et al., 2022), section 3.1 and Algorithm 1, where
the block sizes Bc and Br follow from the SRAM size M; here with the registers as well.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from flashgen.kernels.planner.formulas import Formula, FormulaSequence
from flashgen.kernels.planner.quantities import Number
from flashgen.shared.arch import (
    MAX_REGISTERS,
    REGISTER_STEP,
    SCHEDULERS,
    SPECIAL_PER_CLOCK,
    WARP,
    Arch,
)
from flashgen.shared.launch_facts import KEY_KERNELS
from flashgen.spec.language.spec import AttentionSpec

# The granularity of mma.m16n8k16.
MMA_ROWS = 16
STEP = 16  # a step has a multiple of this number of rows for each warp that shares it
VECTOR = 16  # bytes: the unit of cp.async and ldmatrix

# What the templates of the sm_80 path support.
MAX_STEP = 128  # the main loop is unrolled over a step's rows
WARP_COUNTS = (1, 2, 4, 8)
ROW_GROUPS = (1, 2)

LEARNED_KERNELS = ("captured", "captured_exact")
"""The kernels for the gradients of learned tensors."""

# ---- formulas that several kernels share ---------------------------------------------------------

# The bytes of shared memory that a block may have beside the others of its SM.
SPACE = "min(M, M_sm/blocks - reserved)"
SMEM_OF_SM = Formula("smem_sm", "blocks*(smem + reserved)", "B")

# The launch bounds limit each thread to this number, so that `blocks` blocks are resident. Each
# scheduler has a quarter of the registers, for its share of the warps.
REGISTER_LIMIT = Formula(
    "register_limit",
    f"min({MAX_REGISTERS}, {REGISTER_STEP}*floor(R/{REGISTER_STEP * WARP * SCHEDULERS}"
    f"/ceil(blocks*warps/{SCHEDULERS})))",
)


# Where each multiply-add is one product of the tensor cores.
PRODUCT_CLOCKS = Formula("tensor", "macs/tensor_rate", "clk")


def sides(kernel: str) -> tuple[str, str]:
    """The block size of the side that thread blocks own, and of the side that they walk."""
    return ("block_k", "block_q") if kernel in KEY_KERNELS else ("block_q", "block_k")


def time_alone(tensor: str = "tensor", between: str = "issue") -> Formula:
    """Clocks of a warp that nothing overlaps but the copies, which run ahead.

    It waits for its products, then computes the softmax, or P and dS, and issues the next products.

    Args:
        tensor: as in `rates`.
        between: the clocks between its products, without special-function units.
    """
    warp_clocks = f"max({tensor}, shared) + special + {between}"
    return Formula("alone", f"max(busiest, {warp_clocks})", "clk")


def rates(
    kernel: str,
    computed: str = "1",
    tensor: str = "tensor",
    special: str = "1 + special_ops",
    row_elements: str = "d_qk + d_v",
) -> tuple[Formula, ...]:
    """Clocks of the resources that all kernels use alike, and of the busiest resource of all.

    Args:
        computed: the number of times that each score is computed.
        tensor: the clocks of the products at the rate that kernels reach.
        special: the functions of a score that the special-function units compute.
        row_elements: the elements of each row of a step that a block reads.
    """
    formulas = [Formula("l2", f"e*({row_elements})/{sides(kernel)[0]}/l2_rate", "clk")]
    if kernel == "fused":
        formulas.append(Formula("atomics", "4*d_qk/block_k/(atomic_share*l2_rate)", "clk"))
    formulas.append(Formula("special", f"{computed}*({special})/{SPECIAL_PER_CLOCK}", "clk"))
    formulas.append(Formula("issue", f"(products + rest)/{SCHEDULERS * WARP}", "clk"))
    # Every resource must do its work: the busiest one sets the pace.
    names = ", ".join((tensor, "shared", *(formula.name for formula in formulas)))
    return (*formulas, Formula("busiest", f"max({names})", "clk"))


def solved_registers(kernel: str, fixed: str, per_row: str) -> tuple[Formula, Formula]:
    """Registers per thread, and the formula solved for the walked block size.

    Args:
        fixed: registers that do not depend on the step.
        per_row: registers for each row of a step.
    """
    _, walked = sides(kernel)
    divisor = per_row if re.fullmatch(r"(max)?\(.*\)", per_row) else f"({per_row})"
    return (
        Formula("registers", f"{fixed} + {walked}*{per_row}"),
        Formula(walked, f"(register_limit - ({fixed}))/{divisor}"),
    )


class Columns(NamedTuple):
    """Columns of operands in the formulas of a forward kernel, as text.

    Attributes:
        scores: columns of Q and K, as often as the warps of a row multiply them.
        copied: columns of a key and its value that a block copies.
        output: columns of O that a warp has.
        repeats: the number of times that each score is computed.
    """

    scores: str
    copied: str
    output: str
    repeats: str


TWO_TENSORS = Columns("d_qk", "(d_qk + d_v)", "d_v", "1")
ONE_TENSOR = Columns("column_warps*d_qk", "d_qk", "d_v/column_warps", "column_warps")
"""The columns where the values are the first columns of the keys."""


def sum_of(parts: dict[str, str]) -> tuple[Formula, tuple[Formula, ...]]:
    """Shared memory of a block, and its parts in their order, given as text by their names."""
    formulas = tuple(Formula(name, text, "B") for name, text in parts.items())
    return Formula("smem", " + ".join(parts.values()), "B"), formulas


def scaled(text: str, factor: Fraction) -> str:
    """The formula ``text`` times a fraction: "x/8" for 1/8, "x*5/16" for 5/16."""
    product = text if factor.numerator == 1 else f"{text}*{factor.numerator}"
    return product if factor.denominator == 1 else f"{product}/{factor.denominator}"


RegistersOf = Callable[[AttentionSpec, Arch, str, int], dict[str, Number]]


@dataclass(frozen=True)
class KernelModel:
    """The formulas of one kernel for one operand size; by default, limits of the sm_80 path.

    Attributes:
        name: the kernel's name, as in `Plan.kernel`.
        sizes: quantities from which the formulas below are made.
        smem: shared memory of a thread block.
        parts: the bytes of each of its parts, in their order. Parts whose names begin with "smem"
            have offsets in `Plan`.
        smem_bound: the walked block size that shared memory allows: ``smem`` solved for it.
        registers: registers per thread: the accumulators (16 x n per row group are n/2 registers)
            and what fragments, row statistics and addresses add.
        register_bound: the walked block size that the register limit allows: ``registers`` solved
            for it.
        registers_of: the given quantities "extra", "pending" and "searching" that a spec, an
            architecture, a kernel and a number of registers to keep free result in.
        cost_steps: formulas of the cost, each after those it depends on. "products" and "rest" are
            instructions per score element and thread; "cost" is among the last.
        register_limit: the registers that a thread can have.
        after_limit: quantities that follow from ``register_limit``, before ``registers``.
        sharing: pairs (column_warps, score_warps) that the template supports.
        clusters: numbers of blocks that may copy the same keys together, where warps share rows.
        stages: number of buffers, where the kernel has a choice.
        stages_of_shares: number of buffers where warps share rows, if it is another number; else 0.
        warp_counts: numbers of computing warps that the template supports.
        warps_of_few_rows: fewest computing warps of a tile for few rows of calls with split keys; 0
            where there is none.
        row_groups: numbers of row groups per warp that the template supports.
        max_step: largest walked block size that the template supports.
        other_warps: warps of a block that do not compute (the producer warpgroup).
        other_forms: the models of the kernel's other forms, with other pairs in ``sharing``.
        beyond: head dims of q and k, or of v, up to which this form is not considered.
        wide: a number of columns of V, and the model of the kernel for more columns; or None.
        one_tensor: the model where the values are the first columns of the keys.
    """

    name: str
    sizes: tuple[Formula, ...]
    smem: Formula
    parts: tuple[Formula, ...]
    smem_bound: Formula
    registers: Formula
    register_bound: Formula
    registers_of: RegistersOf
    cost_steps: tuple[Formula, ...]
    register_limit: Formula = REGISTER_LIMIT
    after_limit: tuple[Formula, ...] = ()
    sharing: tuple[tuple[int, int], ...] = ((1, 1),)
    clusters: tuple[int, ...] = (1,)
    stages: int = 1
    stages_of_shares: int = 0
    warp_counts: tuple[int, ...] = WARP_COUNTS
    warps_of_few_rows: int = 0
    row_groups: tuple[int, ...] = ROW_GROUPS
    max_step: int = MAX_STEP
    other_warps: int = 0
    other_forms: tuple[KernelModel, ...] = ()
    beyond: int = 0
    wide: tuple[int, KernelModel] | None = None
    one_tensor: KernelModel | None = None

    @property
    def owns(self) -> str:
        """The block size of the side that a thread block owns: "block_q" or "block_k"."""
        return sides(self.name)[0]

    @property
    def walks(self) -> str:
        """The block size of the side that the main loop walks: "block_k" or "block_q"."""
        return sides(self.name)[1]

    def for_columns(self, columns: int, *, one_tensor: bool) -> KernelModel:
        """The model for so many columns of V, or for values that are columns of the keys."""
        if one_tensor and self.one_tensor is not None:
            return self.one_tensor
        return self.wide[1] if self.wide and columns > self.wide[0] else self

    def form_of(self, *pair: int) -> KernelModel:
        """The model of the form for a pair (column_warps, score_warps), by default this one."""
        return next((form for form in self.other_forms if pair in form.sharing), self)

    @functools.cached_property
    def divides_exponentials(self) -> bool:
        """Whether the kernel can compute exponentials of some columns on FMA units."""
        return any("fma_columns" in formula.names for formula in self.cost_steps)

    @functools.cached_property
    def needs(self) -> FormulaSequence:
        """What a tile needs: its ``sizes``, shared memory and registers."""
        return FormulaSequence(
            *self.sizes,
            self.smem,
            SMEM_OF_SM,
            self.register_limit,
            *self.after_limit,
            self.registers,
        )

    @functools.cached_property
    def costs(self) -> FormulaSequence:
        """What a tile costs: all of ``cost_steps``."""
        return FormulaSequence(*self.cost_steps)
