"""The cost model of the forward kernel on the sm_80 path: cp.async, ldmatrix and mma.sync.

A thread block of ``warps`` warps owns ``block_q`` query rows, each warp ``row_groups`` groups of 16
of them. It walks the keys in steps of ``block_k``, with one K buffer and one V buffer in shared
memory (stages 1): V is copied during Q K^T, the next K during softmax and P V. S, P and O are held
in registers. At the end, O is staged in shared memory over Q, K and V.

Where values are the first columns of keys, one tile serves both products, and the next one is
copied to a second buffer meanwhile. For float32 warps may then own the same rows, each with a share
of the columns of O: each of them computes the scores of these rows.

Wide heads of 16 bits have another form, in which O fits and a step is not limited to the few keys
whose rows fit in shared memory. Warps that own the same rows share the scores: each computes those
of some keys, the maxima and P pass through shared memory, and each multiplies P with a share of the
columns of V. K and V are copied in panels of 64 columns, as many at once as fit twice: while one
buffer is multiplied, the other one is filled. Values that are columns of the keys are read as a
tensor of their own, the second time from L2.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models import fitted_sm80 as fitted
from flashgen.kernels.planner.models.kernel_model import (
    ONE_TENSOR,
    SPACE,
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
BLOCK_K_BY_SMEM = Formula("block_k", f"({SPACE}/e - block_q*d_qk)/(stages*(d_qk + d_v))")


# ---- what a tile costs: clocks per score element of one SM with its resident blocks --------------

# The tensor cores at the rate that they sustain.
SUSTAINED = f"tensor/{fitted.SUSTAINED_SHARE}"
ALONE = time_alone(SUSTAINED)
# Where keys and values are one tile, which has two buffers.
ONE_SMEM, ONE_PARTS = sum_of({"smem_q": "e*block_q*d_qk", "smem_k": "e*stages*block_k*d_qk"})
ONE_BLOCK_K_BY_SMEM = Formula("block_k", f"({SPACE}/e - block_q*d_qk)/(stages*d_qk)")
COLUMN_WARPS = (1, 2, 4)
# Warps that are out of step with a warp fill the time that it leaves idle: warps of other blocks
# always; warps of the same block, which meet at two barriers in each step, half of the time.
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


# ---- wide heads: warps of a row exchange P, and K and V come in panels of columns ----------------

PANEL = 64  # columns: 128 bytes, after which the order of vectors in shared memory repeats
WIDER_THAN = 320  # columns of V; the kernels of fewer have each row in one warp
EXCHANGES = ((2, 2), (4, 4))  # a warp has at least 16 columns of a panel
# Q, over which O is staged, P, and a number of each warp of a row.
_OWNED = "e*block_q*(max(d_qk, d_v) + block_k) + 4*block_q*column_warps"
PANELS_AT_ONCE = Formula(
    "panels",
    f"max(1, min(max(d_qk, d_v)/{PANEL}, floor(({SPACE} - ({_OWNED}))/({2 * PANEL}*e*block_k))))",
)
_RING = f"{2 * PANEL}*e*panels*block_k"
EXCHANGED_PARTS = (
    Formula("smem_q", "e*block_q*d_qk"),
    Formula("O's end", "e*block_q*max(0, d_v - d_qk)"),
    Formula("smem_p", "e*block_q*block_k"),
    Formula("smem_rows", "4*block_q*column_warps"),
    Formula("smem_k", _RING),
)
# One barrier before each buffer is read, and one between the writes and the reads of the maxima.
SYNCS = Formula("syncs", f"ceil(d_qk/({PANEL}*panels)) + ceil(d_v/({PANEL}*panels)) + 1")
# The columns of O, and the fragments of P of a whole step.
_OF_EXCHANGE = "row_groups*(d_v/column_warps + block_k/2)/2"
_OWN_OF_EXCHANGE = f"{fitted.EXCHANGE_REGISTERS} + extra"


def _exchanging(form: KernelModel) -> KernelModel:
    """The form for wide heads, made from the form in which no warps share rows."""
    # B operands for the rows of a warp; A operands: Q for the keys of a warp, and P by each warp.
    reads = "e*((d_qk + d_v)/(16*row_groups) + d_qk*column_warps/block_k + column_warps)"
    share = "column_warps/(row_groups*block_k)"
    # The maxima and P pass through shared memory.
    rest = (
        f"{fitted.FORWARD_INSTRUCTIONS[2]} + 1 + score_ops + dropout_ops"
        f" + ({fitted.FORWARD_STEP_INSTRUCTIONS} + 2*{fitted.EXCHANGED_TILE_INSTRUCTIONS})*{share}"
        " + copy_ops*e*(d_qk + d_v)/(access*block_q)"
    )
    return replace(
        form,
        sizes=(Formula("stages", "2"), PANELS_AT_ONCE),
        smem=Formula("smem", f"{_OWNED} + {_RING}", "B"),
        parts=EXCHANGED_PARTS,
        smem_bound=Formula(
            "block_k",
            f"({SPACE} - block_q*(e*max(d_qk, d_v) + 4*column_warps))"
            f"/(e*(block_q + {2 * PANEL}*panels))",
        ),
        registers=Formula("registers", f"{_OF_EXCHANGE} + {_OWN_OF_EXCHANGE}"),
        register_bound=Formula(
            "block_k",
            f"(register_limit - ({_OWN_OF_EXCHANGE}))*4/row_groups - 2*d_v/column_warps",
        ),
        cost_steps=(
            Formula("reads", reads, "B"),
            Formula("products", "(d_qk + d_v)/64 + reads/16"),
            Formula("rest", rest),
            Formula("tensor", "factors*(d_qk + d_v)/tensor_rate", "clk"),
            Formula(
                "shared", f"(reads + e + e*(d_qk + d_v)/block_q)/{SMEM_BYTES_PER_CLOCK}", "clk"
            ),
            *rates("forward", "1", SUSTAINED),
            ALONE,
            OVERLAP,
            OCCUPIED,
            SYNCS,
            Formula("barriers", "syncs*barrier/(block_q*block_k*blocks)", "clk"),
            COST,
        ),
        sharing=EXCHANGES,
        one_tensor=None,
    )


def _forward(itemsize: int, columns: Columns = TWO_TENSORS) -> KernelModel:
    """The model of the forward kernel for operands of this number of bytes per element."""
    d_qk, copied = columns.scores, columns.copied
    fixed, pending = fitted.FORWARD_REGISTERS[itemsize], fitted.FORWARD_PENDING[itemsize]
    step_instructions = f"{fitted.FORWARD_STEP_INSTRUCTIONS}/(row_groups*block_k)"
    rest = (
        f"{fitted.FORWARD_INSTRUCTIONS[itemsize]} + {step_instructions}"
        " + copy_ops*e*(d_qk + d_v)/(access*block_q) + score_ops + dropout_ops"
    )
    if columns is ONE_TENSOR:
        rest = (
            f"column_warps*({fitted.FORWARD_INSTRUCTIONS[itemsize]} + {step_instructions}"
            " + score_ops + dropout_ops) + copy_ops*e*d_qk/(access*block_q)"
        )
    model = KernelModel(
        name="forward",
        sizes=(),
        smem=SMEM,
        parts=PARTS,
        smem_bound=BLOCK_K_BY_SMEM,
        registers=Formula(
            "registers",
            f"row_groups*(block_k + {columns.output})/2 + {fixed}"
            f" + {scaled('row_groups*block_k', pending)} + extra",
        ),
        register_bound=Formula(
            "block_k",
            f"(register_limit - {fixed} - extra - row_groups*{columns.output}/2)"
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
            *rates("forward", columns.repeats, SUSTAINED, row_elements=copied.strip("()")),
            ALONE,
            OVERLAP,
            OCCUPIED,
            BARRIERS,
            COST,
        ),
    )
    model = replace(model, other_forms=(_exchanging(model),) if itemsize == 2 else ())
    if columns is TWO_TENSORS:
        return replace(model, one_tensor=_forward(itemsize, ONE_TENSOR))
    return replace(
        model,
        smem=ONE_SMEM,
        parts=ONE_PARTS,
        smem_bound=ONE_BLOCK_K_BY_SMEM,
        stages=2,
        sharing=((1, 1),) if itemsize == 2 else tuple((warps, 1) for warps in COLUMN_WARPS),
    )


MODELS = {("forward", itemsize): _forward(itemsize) for itemsize in (2, 4)}
