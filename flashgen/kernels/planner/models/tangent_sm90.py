"""The cost model of the kernel of tangents on the sm_90a path: TMA and wgmma.

O and LSE are known: P = exp(S - LSE). One producer warpgroup copies, two consumer warpgroups
compute, for 64 queries each. A block owns 128 queries, whose Q, and tangent of Q, stay in shared
memory, and walks the keys in steps of ``block_k``. K and V and their tangents have two buffers each
where they fit, else one. The products are those of `tangent_sm80`; Y and P are used as operands
directly from registers. The tangent of O is staged over the operands.
"""

from __future__ import annotations

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models import fitted_sm90 as fitted
from flashgen.kernels.planner.models.backward_columns_sm90 import TILE_BYTES, time_of_step
from flashgen.kernels.planner.models.forward_sm90 import (
    BUSY,
    CONSUMER,
    DEPTH,
    DEPTH_V,
    LAUNCHED,
    PRODUCER,
    PRODUCER_WARPS,
)
from flashgen.kernels.planner.models.kernel_model import (
    PRODUCT_CLOCKS,
    SPACE,
    KernelModel,
    rates,
    solved_registers,
    sum_of,
)
from flashgen.kernels.planner.models.panels_sm90 import DEPTH_STEP, GROUP_ROWS
from flashgen.kernels.planner.models.spec_terms import registers_sm90
from flashgen.kernels.planner.models.tangent_sm80 import OF_RESULTS, OF_SCORES, ROW_ELEMENTS
from flashgen.shared.arch import SMEM_BYTES_PER_CLOCK

_OWNED = "e*block_q*depth*(1 + q_moves)"
_OF_KEY = f"e*(depth*(1 + k_moves) + depth_v*{OF_RESULTS})"
STAGES = Formula(
    "stages",
    f"max(1, min(2, floor(({SPACE} - 8 - {_OWNED})/(block_k*{_OF_KEY} + {TILE_BYTES} + 32))))",
)
PARTS = {
    "smem_q": "e*block_q*depth",
    "smem_q_tangent": "e*q_moves*block_q*depth",
    "smem_k": "stages*e*block_k*depth",
    "smem_k_tangent": "stages*e*k_moves*block_k*depth",
    "smem_v": "stages*e*scores_move*block_k*depth_v",
    "smem_v_tangent": "stages*e*v_moves*block_k*depth_v",
    "O's end": f"max(0, e*block_q*d_v - {_OWNED} - stages*block_k*{_OF_KEY})",
    "smem_rows": f"{TILE_BYTES}*stages",
    "mbarriers": "8*(1 + 4*stages)",
}
BOUND = Formula(
    "block_k",
    f"({SPACE} - {_OWNED} - {TILE_BYTES}*stages - {PARTS['mbarriers']})/(stages*{_OF_KEY})",
)
_OWN = f"{fitted.TANGENT_REGISTERS} + d_v/{fitted.TANGENT_COLUMNS_PER_REGISTER} + extra + d_v/2"

COST_STEPS = (
    Formula("macs", f"depth*{OF_SCORES} + d_v*{OF_RESULTS}"),
    # Of a product of scores, a warpgroup reads its 64 rows of A, and B once for them; of a product
    # with V, B alone.
    Formula(
        "reads",
        f"e*(depth*{OF_SCORES}*(1/block_k + 1/{GROUP_ROWS}) + depth_v*{OF_RESULTS}/{GROUP_ROWS})",
        "B",
    ),
    Formula(
        "products",
        f"({fitted.BACKWARD_STEP_INSTRUCTIONS} + {fitted.BACKWARD_WGMMA_INSTRUCTIONS}"
        f"*macs/{DEPTH_STEP})/(block_k/2)",
    ),
    Formula("rest", f"{fitted.TANGENT_INSTRUCTIONS} + score_ops + dropout_ops"),
    PRODUCT_CLOCKS,
    Formula("shared", f"(reads + {_OF_KEY}/block_q)/{SMEM_BYTES_PER_CLOCK}", "clk"),
    *rates("tangent", row_elements=ROW_ELEMENTS),
    # With one buffer, a step waits for its keys to arrive.
    Formula("waits", "(2 - stages)*e*d_qk*(1 + k_moves)/block_q/l2_rate", "clk"),
    *time_of_step("tangent", " + waits"),
    BUSY,
)

MODELS = {
    ("tangent", 2): KernelModel(
        "tangent",
        (DEPTH, DEPTH_V, STAGES, LAUNCHED, PRODUCER),
        *sum_of(PARTS),
        BOUND,
        *solved_registers("tangent", _OWN, "((1 + scores_move)*(1/2 + pending))"),
        registers_sm90,
        COST_STEPS,
        register_limit=CONSUMER,
        stages=2,
        warp_counts=(8,),  # two consumer warpgroups
        row_groups=(1,),
        other_warps=PRODUCER_WARPS,
    )
}
