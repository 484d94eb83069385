"""The cost model of the forward kernel on the sm_80 path: cp.async, ldmatrix and mma.sync.

A thread block of ``warps`` warps owns ``block_q`` query rows, each warp ``row_groups`` groups of 16
of them. It walks the keys in steps of ``block_k``, with one K buffer and one V buffer in shared
memory (stages 1): V is copied during Q K^T, the next K during softmax and P V. S, P and O are held
in registers. At the end, O is staged in shared memory over Q, K and V.

Where values are the first columns of keys, one tile serves both products, and the next one is
copied to a second buffer meanwhile. Warps may then own the same rows, each with a share of the
columns of O: each of them computes the scores of these rows.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models import fitted_sm80 as fitted
from flashgen.kernels.planner.models.kernel_model import (
    ONE_TENSOR,
    TWO_TENSORS,
    Columns,
    KernelModel,
    rates,
    scaled,
    sum_of,
    time_alone,
)
from flashgen.kernels.planner.models.spec_terms import registers_sm80
from flashgen.shared.arch import SMEM_BYTES_PER_CLOCK

# ---- what a tile needs ---------------------------------------------------------------------------

SMEM = Formula("smem", "e*max(block_q*d_qk + stages*block_k*(d_qk + d_v), block_q*d_v)", "B")
# Q comes first; where O is larger than Q, K and V together, the gap is between Q and K.
PARTS = (
    Formula("smem_q", "e*block_q*d_qk"),
    Formula("O's end", "e*max(0, block_q*(d_v - d_qk) - stages*block_k*(d_qk + d_v))"),
    Formula("smem_k", "e*stages*block_k*d_qk"),
    Formula("smem_v", "e*stages*block_k*d_v"),
)
BLOCK_K_BY_SMEM = Formula(
    "block_k", "(min(M, M_sm/blocks - reserved)/e - block_q*d_qk)/(stages*(d_qk + d_v))"
)


# ---- what a tile costs: clocks per score element of one SM with its resident blocks --------------

# The tensor cores at the rate that they sustain.
SUSTAINED = f"tensor/{fitted.SUSTAINED_SHARE}"
ALONE = time_alone(SUSTAINED)
# Where keys and values are one tile, which has two buffers.
ONE_SMEM, ONE_PARTS = sum_of({"smem_q": "e*block_q*d_qk", "smem_k": "e*stages*block_k*d_qk"})
ONE_BLOCK_K_BY_SMEM = Formula(
    "block_k", "(min(M, M_sm/blocks - reserved)/e - block_q*d_qk)/(stages*d_qk)"
)
COLUMN_WARPS = (1, 2, 4)
# Warps that are out of step with it fill the time that it leaves idle: those of other blocks
# always; those of the same block, which meet at two barriers in each step, half of the time.
OVERLAP = Formula("overlap", "blocks*min(warps/4, (warps + 4)/8)")
# With fewer than four warps on an SM, some of its schedulers have none.
OCCUPIED = Formula("occupied", "min(1, blocks*warps/4)")
# Two barriers per step; other blocks fill the time.
BARRIERS = Formula("barriers", "2*barrier/(block_q*block_k*blocks)", "clk")
COST = Formula("cost", "(busiest + (alone - busiest)/max(1, overlap))/occupied + barriers", "clk")

# ---- instructions per score element and thread ---------------------------------------------------


# mma.sync and ldmatrix of 16-bit operands, counted from the tile. A product of float32 operands is
# six products of their parts, and additions outside the tensor cores: one for each step of S, two
# for each step of O.
def _products(itemsize: int, d_qk: str) -> str:
    if itemsize == 2:
        return f"({d_qk} + d_v)/64 + e*({d_qk} + d_v)/(256*row_groups) + e*{d_qk}/(16*block_k)"
    return (
        f"6*({d_qk} + d_v)/64 + {d_qk}/16 + d_v/8"
        f" + {fitted.SPLIT_INSTRUCTIONS}*(({d_qk} + d_v)/(16*row_groups) + {d_qk}/block_k)"
    )


def _forward(itemsize: int, columns: Columns = TWO_TENSORS) -> KernelModel:
    """The forward kernel for operands of this number of bytes per element."""
    d_qk, copied = columns.of_scores, columns.copied
    own, pending = fitted.FORWARD_REGISTERS[itemsize], fitted.FORWARD_PENDING[itemsize]
    of_step = f"{fitted.FORWARD_STEP_INSTRUCTIONS}/(row_groups*block_k)"
    rest = (
        f"{fitted.FORWARD_INSTRUCTIONS[itemsize]} + {of_step}"
        " + copy_ops*e*(d_qk + d_v)/(access*block_q) + score_ops + dropout_ops"
    )
    if columns is ONE_TENSOR:
        rest = (
            f"column_warps*({fitted.FORWARD_INSTRUCTIONS[itemsize]} + {of_step}"
            " + score_ops + dropout_ops) + copy_ops*e*d_qk/(access*block_q)"
        )
    made = KernelModel(
        name="forward",
        sizes=(),
        smem=SMEM,
        parts=PARTS,
        smem_bound=BLOCK_K_BY_SMEM,
        registers=Formula(
            "registers",
            f"row_groups*(block_k + {columns.of_output})/2 + {own}"
            f" + {scaled('row_groups*block_k', pending)} + extra",
        ),
        register_bound=Formula(
            "block_k",
            f"(register_limit - {own} - extra - row_groups*{columns.of_output}/2)"
            f"/(row_groups*(1/2 + {pending}))",
        ),
        registers_of=registers_sm80,
        warps_of_few_rows=1,
        cost_steps=(
            Formula("products", _products(itemsize, d_qk)),
            Formula("rest", rest),
            Formula("tensor", f"factors*({d_qk} + d_v)/tensor_rate", "clk"),
            Formula(
                "shared",
                f"e*(({d_qk} + d_v)/(16*row_groups) + {d_qk}/block_k + {copied}/block_q)"
                f"/{SMEM_BYTES_PER_CLOCK}",
                "clk",
            ),
            *rates("forward", columns.repeats, SUSTAINED, of_step=copied.strip("()")),
            ALONE,
            OVERLAP,
            OCCUPIED,
            BARRIERS,
            COST,
        ),
    )
    if columns is TWO_TENSORS:
        return replace(made, one_tensor=_forward(itemsize, ONE_TENSOR))
    return replace(
        made,
        smem=ONE_SMEM,
        parts=ONE_PARTS,
        smem_bound=ONE_BLOCK_K_BY_SMEM,
        stages=2,
        sharing=tuple((warps, 1) for warps in COLUMN_WARPS),
    )


MODELS = {("forward", itemsize): _forward(itemsize) for itemsize in (2, 4)}
