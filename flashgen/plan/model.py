"""What a tile needs and what it costs on the sm_80 path, as formulas.

A kernel's block owns rows of one side, queries or keys, and walks the other side in steps. Each
kernel's formulas are one `KernelModel`; the search and the derivation know nothing else of it.
Those of the forward kernel are here, those of the backward kernels in `model_backward`.

The forward kernel: a block of ``warps`` warps owns ``block_q`` query rows, each warp
``row_groups`` groups of 16 of them. It walks the keys in steps of ``block_k``, with one K buffer
and one V buffer in shared memory (stages 1): V arrives during Q K^T, the next K during softmax and
P V. S, P and O live in registers. O is staged over Q, K and V at the end.

Source of the constraints: FlashAttention (Dao et al., 2022), section 3.1 and Algorithm 1, where
Bc and Br follow from the SRAM size M; here with what the kernel really keeps where.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashgen.arch import (
    MAX_REGISTERS,
    REGISTER_STEP,
    SCHEDULERS,
    SMEM_BYTES_PER_CLOCK,
    SPECIAL_PER_CLOCK,
    WARP,
)
from flashgen.plan.formulas import Formula, Steps

# What the templates can run: the granularity of mma.m16n8k16, and what they unroll.
MMA_ROWS = 16
STEP = 16  # rows of the walked side go in groups of this, for each warp that shares them
MAX_STEP = 128  # the main loop is unrolled over a step's rows
WARP_COUNTS = (1, 2, 4, 8)
ROW_GROUPS = (1, 2)
GRANULE = 16  # bytes: the unit of cp.async and ldmatrix

# ---- what a tile of any kernel needs -------------------------------------------------------------

SMEM_OF_SM = Formula("smem_sm", "blocks*(smem + reserved)", "B")

# The launch bounds hold a thread to this, so that `blocks` blocks are resident. Each scheduler has
# a quarter of the registers, for its share of the warps.
REGISTER_LIMIT = Formula(
    "register_limit",
    f"min({MAX_REGISTERS}, {REGISTER_STEP}*floor(R/{REGISTER_STEP * WARP * SCHEDULERS}"
    f"/ceil(blocks*warps/{SCHEDULERS})))",
)

# A row is copied in one pass, a granule by each thread.
COPY_WARPS = Formula("copy_warps", f"ceil(e*max(d_qk, d_v)/{GRANULE}/{WARP})", "warps")


@dataclass(frozen=True)
class KernelModel:
    """The formulas of one kernel for one operand size.

    Attributes:
        name: of the kernel, as `Plan.kernel` has it.
        owns: the block size that warps and row groups make up: "block_q" or "block_k".
        sizes: quantities that what follows is made of.
        smem: shared memory of a block.
        smem_bound: the walked block size that shared memory allows: ``smem`` solved for it.
        registers: per thread. The accumulators (a row group of 16 x n is n/2 registers), and what
            fragments, row statistics, addresses and the compiler's interleaving add.
        register_bound: the walked block size that the register limit allows: ``registers`` solved.
        cost_steps: formulas of the cost in the order in which each needs those before it;
            "products" and "rest" are instructions per score element and thread, "cost" is last.
        sharing: the pairs (column_warps, score_warps) that the template can run.
        register_limit: what a thread can have.
        stages: buffers, where the kernel has any to choose.
        warp_counts, row_groups, max_step: what else the template can run.
        other_warps: of a block, besides those that compute.
        copies_rows: threads copy, a granule of 16 bytes each at a time.

    The constants of ``registers``, "products" and "rest" are measured on compiled kernels of all
    dtypes, head dims and kinds of spec. Those of ``registers`` are such that no chosen tile spills:
    tests/test_plan_compiled.py and tests/test_plan_backward_compiled.py.
    """

    name: str
    owns: str
    sizes: tuple[Formula, ...]
    smem: Formula
    smem_bound: Formula
    registers: Formula
    register_bound: Formula
    cost_steps: tuple[Formula, ...]
    sharing: tuple[tuple[int, int], ...] = ((1, 1),)
    register_limit: Formula = REGISTER_LIMIT
    stages: int = 1
    warp_counts: tuple[int, ...] = WARP_COUNTS
    other_warps: int = 0
    row_groups: tuple[int, ...] = ROW_GROUPS
    max_step: int = MAX_STEP
    copies_rows: bool = True

    @property
    def walks(self) -> str:
        """The block size that the main loop takes in each step."""
        return "block_k" if self.owns == "block_q" else "block_q"

    @functools.cached_property
    def needs(self) -> Steps:
        """What a tile needs: ``sizes``, smem, smem_sm, register_limit, registers."""
        return Steps(*self.sizes, self.smem, SMEM_OF_SM, self.register_limit, self.registers)

    @functools.cached_property
    def costs(self) -> Steps:
        """What it costs, to the last step, "cost"."""
        return Steps(*self.cost_steps)


# ---- what a tile of the forward kernel needs -----------------------------------------------------

SMEM = Formula("smem", "e*max(block_q*d_qk + stages*block_k*(d_qk + d_v), block_q*d_v)", "B")
# Q comes first; where O is larger than Q, K and V together, the gap is between Q and K.
K_OFFSET = Formula("smem_k", "e*max(block_q*d_qk, block_q*d_v - stages*block_k*(d_qk + d_v))", "B")
BLOCK_K_BY_SMEM = Formula(
    "block_k", "(min(M, M_sm/blocks - reserved)/e - block_q*d_qk)/(stages*(d_qk + d_v))"
)

# ---- what a tile costs: clocks per score element of one SM with its resident blocks --------------

TENSOR = Formula("tensor", "factors*(d_qk + d_v)/tensor_rate", "clk")
SHARED = Formula(
    "shared",
    "e*((d_qk + d_v)/(16*row_groups) + d_qk/block_k + (d_qk + d_v)/block_q)"
    f"/{SMEM_BYTES_PER_CLOCK}",
    "clk",
)
L2 = Formula("l2", "e*(d_qk + d_v)/block_q/l2_rate", "clk")
SPECIAL = Formula("special", f"1/{SPECIAL_PER_CLOCK}", "clk")
ISSUE = Formula("issue", f"(products + rest)/{SCHEDULERS * WARP}", "clk")
# No resource can be passed: the busiest sets the pace.
BUSIEST = Formula("busiest", "max(tensor, shared, l2, special, issue)", "clk")
# A warp alone waits for its keys, then takes the products' time, then the softmax's.
ALONE = Formula("alone", f"l2 + max(tensor, shared) + special + rest/{SCHEDULERS * WARP}", "clk")
# What it leaves idle is filled by warps that are out of step with it: those of other blocks are;
# those of the same block, which meet at two barriers a step, half the time.
OVERLAP = Formula("overlap", "blocks*min(warps/4, (warps + 4)/8)")
# With fewer than four warps on an SM, some of its schedulers have none.
OCCUPIED = Formula("occupied", "min(1, blocks*warps/4)")
# At each of two barriers a step a block stands still for about 300 clocks, from the last product
# before it, through the wait for copies, to the first product after it; other blocks fill the time.
BARRIERS = Formula("barriers", "2*300/(block_q*block_k*blocks)", "clk")
COST = Formula("cost", "(busiest + (alone - busiest)/max(1, overlap))/occupied + barriers", "clk")

COST_STEPS = (TENSOR, SHARED, L2, SPECIAL, ISSUE, BUSIEST, ALONE, OVERLAP, OCCUPIED, BARRIERS, COST)


_REST = (
    "100/(row_groups*block_k) + copy_ops*e*(d_qk + d_v)/(access*block_q) + score_ops + dropout_ops"
)


def _forward(registers: str, register_bound: str, products: str, rest: str) -> KernelModel:
    """The forward kernel for one operand size."""
    return KernelModel(
        name="forward",
        owns="block_q",
        sizes=(),
        smem=SMEM,
        smem_bound=BLOCK_K_BY_SMEM,
        registers=Formula("registers", registers),
        register_bound=Formula("block_k", register_bound),
        cost_steps=(Formula("products", products), Formula("rest", rest), *COST_STEPS),
    )


FORWARD_16BIT = _forward(
    registers="row_groups*(block_k + d_v)/2 + 64 + row_groups*block_k/8 + extra",
    register_bound=("(register_limit - 64 - extra - row_groups*d_v/2)/(row_groups*(1/2 + 1/8))"),
    products="(d_qk + d_v)/64 + e*(d_qk + d_v)/(256*row_groups) + e*d_qk/(16*block_k)",
    rest=f"4.5 + {_REST}",
)
FORWARD_32BIT = _forward(
    registers="row_groups*(block_k + d_v)/2 + 82 + row_groups*block_k*5/16 + extra",
    register_bound=("(register_limit - 82 - extra - row_groups*d_v/2)/(row_groups*(1/2 + 5/16))"),
    products="6*(d_qk + d_v)/32 + 10.7*(d_qk + d_v)/(16*row_groups) + 10.3*d_qk/block_k",
    rest=f"15 + {_REST}",
)
