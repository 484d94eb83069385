"""The cost model of the kernel of tangents on the sm_80 path: cp.async, ldmatrix and mma.sync.

O and LSE are known: P = exp(S - LSE). A thread block owns ``block_q`` queries, whose Q, and tangent
of Q, stay in shared memory, and walks the keys in steps of ``block_k``. K and V and their tangents
have one buffer each: V is copied during the products of scores, the next K during the rest of the
step. The tangents of scores are one accumulator, to which Q' K^T and Q K'^T are added; and those of
O are another, to which Y V and P V' are added. Which of these products a kernel has depends on the
tangents that a call gives. Warps that own the same queries each compute all their scores and have a
share of the columns of O.

The tangent of O is staged over the operands, and needs no other space.
"""

from __future__ import annotations

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models import fitted_sm80 as fitted
from flashgen.kernels.planner.models.backward_sm80 import steps_to_cost
from flashgen.kernels.planner.models.kernel_model import (
    SPACE,
    KernelModel,
    solved_registers,
    sum_of,
)
from flashgen.kernels.planner.models.spec_terms import registers_sm80

# Products of Q and K, with depth d_qk, and products with V, with d_v columns.
OF_SCORES, OF_RESULTS = "(1 + q_moves + k_moves)", "(scores_move + v_moves)"
ROW_ELEMENTS = f"d_qk*(1 + k_moves) + d_v*{OF_RESULTS}"  # elements of a key that a step copies

OPERANDS = {
    "smem_q": "e*block_q*d_qk",
    "smem_q_tangent": "e*q_moves*block_q*d_qk",
    "smem_k": "e*block_k*d_qk",
    "smem_k_tangent": "e*k_moves*block_k*d_qk",
    "smem_v": "e*scores_move*block_k*d_v",
    "smem_v_tangent": "e*v_moves*block_k*d_v",
}
PARTS = OPERANDS | {
    "O's end": f"e*max(0, block_q*(d_v - d_qk*(1 + q_moves)) - block_k*({ROW_ELEMENTS}))"
}
BOUND = Formula(
    "block_k",
    f"({SPACE}/e - block_q*d_qk*(1 + q_moves))/({ROW_ELEMENTS})",
)
COLUMNS = Formula("columns", "16*ceil(d_v/(16*column_warps))")


def _registers(itemsize: int) -> tuple[Formula, Formula]:
    """Registers per thread, and the formula solved for the walked block size."""
    constant, per_row_group = fitted.TANGENT_REGISTERS[itemsize]
    fixed = f"{constant} + {per_row_group}*row_groups + extra + row_groups*columns/2"
    return solved_registers("tangent", fixed, "row_groups*((1 + scores_move)/2 + pending)")


def _cost_steps(itemsize: int) -> tuple[Formula, ...]:
    """The steps to the cost of the kernel, as for "dq"."""
    macs = f"d_qk*{OF_SCORES}*repeats + column_warps*columns*{OF_RESULTS}"
    reads = (
        f"e*column_warps*(d_qk*{OF_SCORES}/block_k"
        f" + (d_qk*{OF_SCORES} + columns*{OF_RESULTS})/(16*row_groups))"
    )
    rest = (
        f"repeats*({fitted.TANGENT_INSTRUCTIONS[itemsize]} + score_ops + dropout_ops)"
        f" + {fitted.BY_QUERIES_STEP_INSTRUCTIONS}*column_warps/(row_groups*block_k)"
        f" + e*({ROW_ELEMENTS})/(access*block_q)"
    )
    shared = f"reads + e*({ROW_ELEMENTS})/block_q"
    return steps_to_cost("tangent", itemsize, macs, reads, rest, shared, ROW_ELEMENTS)


MODELS = {
    ("tangent", itemsize): KernelModel(
        "tangent",
        (COLUMNS,),
        *sum_of(PARTS),
        BOUND,
        *_registers(itemsize),
        registers_sm80,
        _cost_steps(itemsize),
        sharing=((1, 1), (2, 1)),
    )
    for itemsize in (2, 4)
}
