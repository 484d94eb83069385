"""The cost model of the forward kernel on the sm_90a path: TMA and wgmma.

One producer warpgroup copies; ``warps`` consumer warps in warpgroups of four compute, each
warpgroup for 64 query rows. K and V have ``stages`` buffers each, which the producer fills ahead.
S, P and O are held in registers; the softmax of one tile overlaps the products of the next.

Tiles are stored as panels (`panels_sm90`). The depth of the products is padded to multiples of 16.

Source of the overlap: FlashAttention-3 (Shah et al., 2024), section 3.2.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models import fitted_sm90 as fitted
from flashgen.kernels.planner.models.kernel_model import (
    SPACE,
    KernelModel,
    rates,
    sum_of,
    time_alone,
)
from flashgen.kernels.planner.models.panels_sm90 import DEPTH_STEP, GROUP_ROWS
from flashgen.kernels.planner.models.spec_terms import registers_sm90
from flashgen.shared.arch import SCHEDULERS, SMEM_BYTES_PER_CLOCK, WARP

PRODUCER_WARPS = 4
BARRIER_BYTES = 8
GROUP_THREADS = 128  # of a warpgroup

# ---- what a tile needs ---------------------------------------------------------------------------

DEPTH = Formula("depth", f"{DEPTH_STEP}*ceil(d_qk/{DEPTH_STEP})")
DEPTH_V = Formula("depth_v", f"{DEPTH_STEP}*ceil(d_v/{DEPTH_STEP})")
# For each buffer a "full" and an "empty" barrier, the same for the next work tile's number, and
# that number; and for each warpgroup a barrier for its Q.
_BARRIERS = f"{BARRIER_BYTES}*(3 + 4*stages) + 2*warps + records"


SMEM, PARTS = sum_of(
    {
        "smem_q": "e*block_q*depth",
        "smem_k": "e*stages*block_k*depth",
        "smem_v": "e*stages*block_k*depth_v",
        "mbarriers and work tiles": _BARRIERS,
    }
)
BLOCK_K_BY_SMEM = Formula(
    "block_k",
    f"(({SPACE} - ({_BARRIERS}))/e - block_q*depth)/(stages*(depth + depth_v))",
)


# At launch all threads of a block have equal shares of the registers. Then the producer warpgroup
# releases all but `producer` of its registers (setmaxnreg), which the consumers share. That takes
# numbers from 24 to 240.
LAUNCHED = Formula("launched", f"8*floor(R/{8 * WARP}/(blocks*(warps + {PRODUCER_WARPS})))")
PRODUCER = Formula("producer", "max(24, 2*warps + 8, searching)")
CONSUMER = Formula(
    "register_limit",
    f"min(240, 8*floor((launched*(warps + {PRODUCER_WARPS}) - {PRODUCER_WARPS}*producer)"
    "/(8*warps)))",
)
_OWN, _PER_KEY = fitted.FORWARD_REGISTERS, fitted.FORWARD_REGISTERS_PER_KEY
REGISTERS = Formula("registers", f"block_k*{_PER_KEY} + d_v/2 + {_OWN} + extra")
BLOCK_K_BY_REGISTERS = Formula("block_k", f"(register_limit - {_OWN} - extra - d_v/2)/({_PER_KEY})")

# ---- what a tile costs: clocks per score element of one SM --------------------------------------

# The instructions of the products are issued while tensor cores work.
OWN_ISSUE = f"rest/{SCHEDULERS * WARP}"
# In each step a warpgroup stands still until it has its turn with the tensor cores and their first
# product is through the pipeline.
ALONE = time_alone(between=f"{OWN_ISSUE} + handover/({GROUP_ROWS}*block_k)")
# Warpgroups take turns with the tensor cores. Where the softmax takes longer than the products, two
# of them cannot keep the tensor cores busy.
PACE = Formula("pace", "max(busiest, alone/(blocks*warps/4))", "clk")
# The more warpgroups an SM has, the more of the waits of one the others fill: at head dim 128 tiles
# of 192 rows were 8 to 11 % faster than tiles of 128 on an H200, whatever their keys.
COST = Formula("cost", "pace + exposed*(alone - pace)*8/(blocks*warps)", "clk")
# The predicted share of the time in which the tensor cores multiply.
BUSY = Formula("busy", "tensor/cost")

FORWARD = KernelModel(
    name="forward",
    sizes=(DEPTH, DEPTH_V, LAUNCHED, PRODUCER),
    smem=SMEM,
    parts=PARTS,
    smem_bound=BLOCK_K_BY_SMEM,
    registers=REGISTERS,
    register_bound=BLOCK_K_BY_REGISTERS,
    registers_of=registers_sm90,
    cost_steps=(
        # Each score element is one of block_k/2 elements of a thread.
        Formula(
            "products",
            f"({fitted.FORWARD_STEP_INSTRUCTIONS} + {fitted.FORWARD_WGMMA_INSTRUCTIONS}"
            f"*(depth + block_k)/{DEPTH_STEP})/(block_k/2)",
        ),
        Formula(
            "rest",
            f"{fitted.FORWARD_INSTRUCTIONS} + score_ops + dropout_ops"
            f" + {fitted.FMA_EXP2_INSTRUCTIONS}*fma_columns/block_k",
        ),
        Formula("tensor", "(depth + d_v)/tensor_rate", "clk"),
        # A warpgroup reads Q, K and V from shared memory for its 64 rows; TMA writes K and V.
        Formula(
            "shared",
            f"e*(depth/block_k + (depth + d_v)/{GROUP_ROWS} + (depth + depth_v)/block_q)"
            f"/{SMEM_BYTES_PER_CLOCK}",
            "clk",
        ),
        *rates("forward", special="1 - fma_columns/block_k + special_ops"),
        ALONE,
        PACE,
        COST,
        BUSY,
    ),
    register_limit=CONSUMER,
    stages=2,
    warp_counts=(8, 12),
    warps_of_few_rows=4,
    row_groups=(1,),
    max_step=256,
    other_warps=PRODUCER_WARPS,
)

# Two warpgroups may own the same rows, each with half of the columns of O. One of them computes the
# scores, and sends P, and a factor of O for each row, to the other one, a thread to a thread.
SHARING = ((1, 1), (2, 1))
# Two blocks with the same keys may form a cluster: each copies half of them to both, so that L2 is
# read once for the rows of both.
CLUSTERS = (1, 2)
_COPIERS = "(cluster*block_q)"
_SENDS = "(column_warps - 1)"
FACTORS = f"{_SENDS}*{8 * GROUP_THREADS}"
SENT = f"{_SENDS}*e*block_q*block_k + {FACTORS}"
_OF_OUTPUT = "d_v/column_warps"
# The warpgroup of the scores computes the scores of a tile beside the other warpgroup's product
# with V, then the softmax beside its own product: nothing of the next tile is computed before.
CHAIN = Formula(
    "chain",
    f"{_SENDS}*(max((depth + {_OF_OUTPUT})/tensor_rate, e*(depth/block_k + (depth + {_OF_OUTPUT})"
    f"/{GROUP_ROWS})/{SMEM_BYTES_PER_CLOCK}) + special + {OWN_ISSUE}"
    f" + handover/({GROUP_ROWS}*block_k))",
    "clk",
)


def _cost_steps(copied: str, *limits: Formula, **texts: str) -> tuple[Formula, ...]:
    """The cost of a form whose warpgroups may share rows.

    Args:
        copied: the columns of a key, and of its value, that TMA writes.
        limits: limits of the pace besides "chain".
        texts: further formulas by their names.
    """
    texts |= {
        "products": f"(column_warps*{fitted.FORWARD_STEP_INSTRUCTIONS}"
        f" + {fitted.FORWARD_WGMMA_INSTRUCTIONS}*(depth + column_warps*block_k)/{DEPTH_STEP})"
        "/(block_k/2)",
        "rest": f"{FORWARD.cost_steps[1].text} + {fitted.EXCHANGE_INSTRUCTIONS}*{_SENDS}",
        # P is written and read.
        "shared": f"e*(depth/block_k + (depth + d_v)/{GROUP_ROWS} + {copied}/block_q"
        f" + 2*{_SENDS})/{SMEM_BYTES_PER_CLOCK}",
        "pace": f"max({', '.join(x.name for x in (*limits, CHAIN))}, {PACE.text})",
    }
    steps = [Formula(x.name, texts.get(x.name, x.text), x.unit) for x in FORWARD.cost_steps]
    pace_index = FORWARD.cost_steps.index(PACE)
    return (*steps[:pace_index], *limits, CHAIN, *steps[pace_index:])


# For more columns of O the compiler needs further registers in one warpgroup. V has one buffer
# where two do not fit. The buffer is in use during the product with V and the softmax beside it,
# and is filled while the next scores are computed. K is read ahead in any case.
_MORE = (
    f"max(0, {_OF_OUTPUT} - {fitted.FORWARD_WIDE_COLUMNS})/{fitted.FORWARD_COLUMNS_PER_REGISTER}"
)
_WIDE_BARRIERS = f"{BARRIER_BYTES}*(3 + 4*stages) + floor(2*warps/column_warps) + records"
_WIDE_ROOM = f"{SPACE} - ({_WIDE_BARRIERS})"
STAGES_V = Formula(
    "stages_v",
    f"max(1, min(stages, floor((({_WIDE_ROOM} - ({SENT}))/e - block_q*depth - stages*block_k*depth)"
    "/(block_k*depth_v))))",
)
WIDE_SMEM, WIDE_PARTS = sum_of(
    {
        "smem_q": "e*block_q*depth",
        "smem_k": "e*stages*block_k*depth",
        "smem_v": "e*stages_v*block_k*depth_v",
        "smem_p": SENT,
        "mbarriers and work tiles": _WIDE_BARRIERS,
    }
)
REFILL = Formula(
    "refill",
    f"(stages - stages_v)*(max(d_v/tensor_rate, special + {OWN_ISSUE}) + e*d_v/{_COPIERS}/l2_rate"
    f" + {fitted.COPY_CLOCKS}/(block_q*block_k))",
    "clk",
)
WIDE = replace(
    FORWARD,
    sizes=(*FORWARD.sizes, STAGES_V),
    smem=WIDE_SMEM,
    parts=WIDE_PARTS,
    smem_bound=Formula(
        "block_k",
        f"(({_WIDE_ROOM} - {FACTORS})/e - block_q*depth)"
        f"/(stages*depth + stages_v*depth_v + {_SENDS}*block_q)",
    ),
    registers=Formula(
        "registers", f"block_k*{_PER_KEY} + {_OF_OUTPUT}/2 + {_OWN} + extra + {_MORE}"
    ),
    register_bound=Formula(
        "block_k",
        f"(register_limit - {_OWN} - extra - {_OF_OUTPUT}/2 - {_MORE})/({_PER_KEY})",
    ),
    cost_steps=_cost_steps("(depth + depth_v)", REFILL, l2=f"e*(d_qk + d_v)/{_COPIERS}/l2_rate"),
    sharing=SHARING,
    clusters=CLUSTERS,
)
# Values are the first columns of the keys: one tile of both, which is in use until its product with
# P, a step after the one for S, so that a third buffer is filled meanwhile. Where two warpgroups
# share rows, two buffers suffice: a tile has two parts. The part with the second warpgroup's values
# is free early in the next step, whose first product uses it; the part with the first warpgroup's
# values is free at the end of that step. The second part is then multiplied first.
_ONE_BARRIERS = (
    f"{BARRIER_BYTES}*(3 + 2*column_warps*stages) + floor(2*warps/column_warps) + records"
)
_LATENCY = f"{fitted.COPY_CLOCKS}/(block_q*block_k)"
REFILL_PARTS = Formula(
    "refill",
    f"{_SENDS}*(max(2*{_OF_OUTPUT}/tensor_rate + e*(d_qk - {_OF_OUTPUT})/{_COPIERS}/l2_rate,"
    f" {_OF_OUTPUT}/tensor_rate + max({_OF_OUTPUT}/tensor_rate, special + {OWN_ISSUE})"
    f" + e*{_OF_OUTPUT}/{_COPIERS}/l2_rate) + {_LATENCY})",
    "clk",
)
ONE_SMEM, ONE_PARTS = sum_of(
    {
        "smem_q": "e*block_q*depth",
        "smem_k": "e*stages*block_k*depth",
        "smem_p": SENT,
        "mbarriers and work tiles": _ONE_BARRIERS,
    }
)
ONE = replace(
    FORWARD,
    smem=ONE_SMEM,
    parts=ONE_PARTS,
    smem_bound=Formula(
        "block_k",
        f"(({SPACE} - ({_ONE_BARRIERS}) - {FACTORS})/e - block_q*depth)"
        f"/(stages*depth + {_SENDS}*block_q)",
    ),
    registers=Formula("registers", f"block_k*{_PER_KEY} + {_OF_OUTPUT}/2 + {_OWN} + extra"),
    register_bound=Formula(
        "block_k",
        f"(register_limit - {_OWN} - extra - {_OF_OUTPUT}/2)/({_PER_KEY})",
    ),
    cost_steps=_cost_steps("depth", REFILL_PARTS, l2=f"e*d_qk/{_COPIERS}/l2_rate"),
    stages=3,
    stages_of_shares=2,
    sharing=SHARING,
    clusters=CLUSTERS,
)

MODELS = {
    ("forward", 2): replace(FORWARD, wide=(fitted.SHARED_BEYOND, WIDE), one_tensor=ONE),
}
