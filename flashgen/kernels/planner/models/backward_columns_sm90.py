"""The cost models of dkdv and fused on the sm_90a path where warps own the same keys.

The accumulators of dK and dV of 64 keys for each warpgroup, as in `backward_sm90`, fit up to a head
dim of about 160. Beyond it, the gradients' columns are split: dK^T = Q^T dS and dV^T = dO^T P have
strips of 64 rows, which are columns of dK and dV, and each warpgroup computes some strips for all
keys of the block. Keys are then the columns of the products, so that ``block_k`` is any multiple
of 16. FlashAttention-3 (Shah et al., 2024) does so at head dims 192 and 256
(hopper/flash_bwd_launch_template.h), with 96 and 80 keys.

A step has 64 queries, the rows of S = Q K^T. The keys are divided among the warpgroups. A
warpgroup computes the scores of its keys in passes of ``pass_keys`` keys, as many as the registers
beside the gradients hold, and writes P and dS to shared memory, where all products read them. fused
adds dQ^T in global memory directly from registers, because shared memory is full.

Q has two buffers. dO has one, whose next tile arrives while dK, and in fused dQ, are computed.
"""

from __future__ import annotations

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models import fitted_sm90 as fitted
from flashgen.kernels.planner.models.backward_sm80 import ROW_BYTES
from flashgen.kernels.planner.models.forward_sm90 import (
    BUSY,
    CONSUMER,
    LAUNCHED,
    OWN_ISSUE,
    PACE,
    PRODUCER,
    PRODUCER_WARPS,
)
from flashgen.kernels.planner.models.kernel_model import (
    PRODUCT_CLOCKS,
    SPACE,
    KernelModel,
    rates,
    sum_of,
    time_alone,
)
from flashgen.kernels.planner.models.panels_sm90 import DEPTH_STEP, GROUP_ROWS
from flashgen.kernels.planner.models.spec_terms import registers_sm90
from flashgen.shared.arch import SMEM_BYTES_PER_CLOCK, WARP
from flashgen.shared.launch_facts import KEY_KERNELS

WARPS = 8  # two consumer warpgroups
ROW_GROUPS = tuple(range(1, 9))  # of 16 keys each; head dims with room for more have another form
TILE_BYTES = 16  # per buffer of Q: the step's tile number, which the producer passes on
PASS_UNIT = 8  # keys: columns of an accumulator that four lanes hold

# ---- what a tile needs ---------------------------------------------------------------------------

# Besides K and V, for each query: dO, P and dS; and for each buffer Q, LSE and delta.
_OF_QUERY = f"e*depth_v + stages*(e*depth + {ROW_BYTES})"
_BARRIERS = f"stages*{TILE_BYTES} + 8*(2 + 2*stages)"
SIZES = (
    Formula("depth", f"{GROUP_ROWS}*ceil(d_qk/{GROUP_ROWS})"),
    Formula("depth_v", f"{GROUP_ROWS}*ceil(d_v/{GROUP_ROWS})"),
    # A warp has 16 of the 64 columns of each strip that its warpgroup computes.
    Formula("columns", "16*ceil((depth + depth_v)/(16*warps))"),
)
SMEM, PARTS = sum_of(
    {
        "smem_k": "e*block_k*depth",
        "smem_v": "e*block_k*depth_v",
        "smem_q": "stages*e*block_q*depth",
        "smem_do": "e*block_q*depth_v",
        "smem_p": "e*block_q*block_k",
        "smem_ds": "e*block_q*block_k",
        "smem_rows": f"stages*({ROW_BYTES}*block_q + {TILE_BYTES})",
        "mbarriers": "8*(2 + 2*stages)",
    }
)
BLOCK_K_BY_SMEM = Formula(
    "block_k",
    f"({SPACE} - block_q*({_OF_QUERY}) - ({_BARRIERS}))/(e*(depth + depth_v + 2*block_q))",
)


_OWN = fitted.COLUMNS_REGISTERS
# The registers of a pass: P, and values that are pending, for each key; and accumulators, first of
# S and then of dP, in groups of 8 registers for 16 keys. dQ takes their place: 64 columns of
# half of the queries, and addresses.
ROOM = Formula("room", f"register_limit - {_OWN} - extra - columns*block_k/32")
FITTING = Formula(
    "fitting",
    "2*floor(room/(16 + 16*pending))"
    " + floor((room - (16 + 16*pending)*floor(room/(16 + 16*pending)))/(12 + 8*pending))",
)
PASSES = Formula("passes", "ceil(block_k/(2*warps)/max(1, fitting))")
PASS_KEYS = Formula("pass_keys", f"{PASS_UNIT}*ceil(block_k/(2*warps)/passes)")
_OF_DQ = fitted.COLUMNS_DQ_REGISTERS


def _registers(kernel: str) -> tuple[Formula, Formula]:
    """Registers per thread for the smallest pass, and the formula solved for the block size."""
    needed = "extra + pass_keys*(1/2 + pending) + 8*ceil(pass_keys/16)"
    least = "extra + 12 + 8*pending"
    if kernel == "fused":
        needed, least = f"max({_OF_DQ}, {needed})", f"max({_OF_DQ}, {least})"
    return (
        Formula("registers", f"{_OWN} + columns*block_k/32 + {needed}"),
        Formula("block_k", f"32*(register_limit - {_OWN} - ({least}))/columns"),
    )


# ---- what it costs: clocks per score element of one SM with its resident blocks ------------------

# The last pass ends with the keys of its warpgroup, so that it may compute scores once more.
REPEATS = Formula("repeats", "passes*pass_keys*warps/(4*block_k)")


def time_of_step(kernel: str, waits: str = "") -> tuple[Formula, ...]:
    """The formulas of the time of a warpgroup, of the time that others hide, and of the cost.

    In "fused" dQ is a product of all keys of the block: the warpgroups exchange dS in every step,
    and therefore compute P and dS at the same time and multiply at the same time.

    Args:
        waits: a further summand of the cost.
    """
    if kernel == "fused":
        return time_alone(), Formula("cost", f"alone{waits}", "clk")
    cost = f"pace + exposed*(alone - pace){waits}"
    return time_alone(between=OWN_ISSUE), PACE, Formula("cost", cost, "clk")


def _cost_steps(kernel: str) -> tuple[Formula, ...]:
    """The formulas of the cost of one kernel."""
    fused = kernel == "fused"
    depths = f"{DEPTH_STEP}*(ceil(d_qk/{DEPTH_STEP}) + ceil(d_v/{DEPTH_STEP}))"
    macs = f"repeats*{depths} + columns*warps"
    # Both operands of every product are in shared memory: a warpgroup reads 64 rows of A, and B
    # once for them. S and dP, then dV^T and dK^T.
    reads = (
        f"repeats*{depths}*(1/pass_keys + 1/{GROUP_ROWS})"
        f" + columns*warps*(1/block_k + 1/{GROUP_ROWS})"
    )
    # Instructions of a step's products, each 16 deep.
    issued = f"passes*{depths}/{DEPTH_STEP} + columns/16*block_q/{DEPTH_STEP}"
    # Two stores of 16 bits. What TMA writes; P and dS.
    rest = f"repeats*{fitted.BY_KEYS_INSTRUCTIONS} + score_ops + dropout_ops + 1"
    shared = "reads + e*(depth + depth_v)/block_k + 2*e"
    if fused:
        # dQ^T = K^T dS^T: each warpgroup has all columns of dQ for its share of the queries.
        macs += " + depth"
        reads += f" + depth*(warps/4/block_q + 1/{GROUP_ROWS})"
        issued += f" + depth/{GROUP_ROWS}*block_k/{DEPTH_STEP}"
        # An addition of four elements; all pass through the path of loads and stores.
        rest += " + d_qk/block_k/4"
        shared += " + 4*d_qk/block_k"
    per_step = f"{fitted.COLUMNS_STEP_INSTRUCTIONS[kernel]} + {fitted.PASS_INSTRUCTIONS}*passes"
    return (
        Formula("macs", macs),
        Formula("reads", f"e*({reads})", "B"),
        Formula(
            "products",
            f"({per_step} + {fitted.COLUMNS_WGMMA_INSTRUCTIONS}*({issued}))"
            f"*{WARP}*warps/(block_q*block_k)",
        ),
        Formula("rest", rest),
        PRODUCT_CLOCKS,
        Formula("shared", f"({shared})/{SMEM_BYTES_PER_CLOCK}", "clk"),
        *rates(kernel),
        *time_of_step(kernel),
        BUSY,
    )


def _model(kernel: str) -> KernelModel:
    return KernelModel(
        kernel,
        (*SIZES, LAUNCHED, PRODUCER),
        SMEM,
        PARTS,
        BLOCK_K_BY_SMEM,
        *_registers(kernel),
        registers_sm90,
        (REPEATS, *_cost_steps(kernel)),
        register_limit=CONSUMER,
        after_limit=(ROOM, FITTING, PASSES, PASS_KEYS),
        sharing=((WARPS, WARPS),),
        stages=2,
        warp_counts=(WARPS,),
        row_groups=ROW_GROUPS,
        max_step=GROUP_ROWS,
        other_warps=PRODUCER_WARPS,
    )


MODELS = {kernel: _model(kernel) for kernel in KEY_KERNELS}
