"""The cost models of the backward kernels on the sm_90a path: TMA and wgmma.

Algorithm 4 of FlashAttention with the warp roles of FlashAttention-3 (Shah et al., 2024, appendix
B.2): one producer warpgroup copies, two consumer warpgroups compute, 64 rows of a product each.

dkdv and fused: a thread block owns ``block_k`` keys, whose K and V stay in shared memory, and walks
the query tiles of ``block_q`` rows. Scores are computed transposed, so that P^T and dS^T are used
as operands directly from registers. Each warpgroup owns 64 of 128 keys with all columns of dK and
dV. fused also computes dQ^T = K^T dS^T of each step, in blocks of 64 columns of dQ, and adds it in
global memory. The other form of both, for large head dims, is in `backward_columns_sm90`; that of
dkdv and dq for wide heads in `streamed_sm90`.

dq: a block owns 128 queries and walks the keys in steps of ``block_k``.

captured and captured_exact: the loop of dq without the product for dQ. They sum the gradients of
learned tensors.

Buffers: Q and dO (in dq, captured and captured_exact: K and V) have two each where they fit, else
one.
"""

from __future__ import annotations

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models import backward_columns_sm90, streamed_sm90
from flashgen.kernels.planner.models import fitted_sm90 as fitted
from flashgen.kernels.planner.models.backward_columns_sm90 import TILE_BYTES, time_of_step
from flashgen.kernels.planner.models.backward_sm80 import ROW_BYTES
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
    LEARNED_KERNELS,
    PRODUCT_CLOCKS,
    SPACE,
    KernelModel,
    rates,
    sides,
    solved_registers,
    sum_of,
)
from flashgen.kernels.planner.models.panels_sm90 import DEPTH_STEP, GROUP_ROWS
from flashgen.kernels.planner.models.spec_terms import registers_sm90
from flashgen.shared.arch import SMEM_BYTES_PER_CLOCK
from flashgen.shared.launch_facts import KEY_KERNELS

QUERY_KERNELS = ("dq", *LEARNED_KERNELS)
DS_BUFFERS = 2  # of "fused": one is read while the other is written
ALIGNED = 1024  # bytes: alignment of a swizzle pattern of 128 bytes
# Producer warps that search for the tiles of the walk, and how many of these evaluate whether a
# tile is full. Where a block owns keys, two of the three load LSE and delta and pass on the tile.
WALKING_WARPS = dict.fromkeys(KEY_KERNELS, (3, 2)) | dict.fromkeys(QUERY_KERNELS, (1, 1))

# ---- what a tile needs ---------------------------------------------------------------------------

_BY_KEYS = (
    Formula("depth", f"{GROUP_ROWS}*ceil(d_qk/{GROUP_ROWS})"),
    DEPTH_V,
    Formula("columns", "d_qk + d_v"),
)
SIZES = {
    "dkdv": _BY_KEYS,
    "fused": (
        *_BY_KEYS,
        Formula("dq_columns", "depth"),
        # The warpgroups divide the blocks of 64 columns of dQ where their number is even, else its
        # queries.
        Formula("dq_groups", f"1 + depth/{GROUP_ROWS} - 2*floor(depth/{2 * GROUP_ROWS})"),
    ),
    "dq": (DEPTH, DEPTH_V, Formula("columns", "d_qk")),
} | dict.fromkeys(LEARNED_KERNELS, (DEPTH, DEPTH_V, Formula("columns", "0")))


def _smem(kernel: str) -> tuple[Formula, Formula, tuple[Formula, ...], Formula]:
    """Stages, shared memory of a block and its parts, and the walked block size that it allows."""
    owned, walked = sides(kernel)
    # K and V, or Q and dO, which the block owns.
    owned_bytes = f"e*{owned}*(depth + depth_v)"
    # Per stage: a row of the other two, and the step's tile number; then the barriers.
    row_bytes, per_query, step = "e*(depth + depth_v)", "", f"{TILE_BYTES} + records"
    parts = {
        "smem_q": "e*block_q*depth",
        "smem_do": "e*block_q*depth_v",
        "smem_k": "stages*e*block_k*depth",
        "smem_v": "stages*e*block_k*depth_v",
        "smem_rows": f"({step})*stages",
        "mbarriers": "8*(1 + 4*stages)",
    }
    if kernel in LEARNED_KERNELS:
        parts["smem_windows"] = "warps*windows"
        owned_bytes += " - warps*windows"
    if kernel in KEY_KERNELS:
        row_bytes = f"({row_bytes} + {ROW_BYTES})"
        parts = {
            "smem_k": "e*block_k*depth",
            "smem_v": "e*block_k*depth_v",
            "smem_q": "stages*e*block_q*depth",
            "smem_do": f"{ALIGNED}*ceil(stages*e*block_q*depth_v/{ALIGNED})",
            # dS with two buffers, and the outgoing dQ tile.
            "smem_ds": f"{DS_BUFFERS}*e*block_q*block_k",
            "sums of dQ": "4*block_q*depth",
            "smem_rows": f"stages*({ROW_BYTES}*block_q + {step})",
            "mbarriers": "32*stages",  # K and V arrive with the first Q
        }
        if kernel == "fused":
            per_query = f"{DS_BUFFERS}*e*block_k + 4*depth"
        else:
            del parts["smem_ds"], parts["sums of dQ"]
    resident = "" if kernel in KEY_KERNELS else " - 8"
    free = f"{SPACE}{resident} - {owned_bytes}" + (f" - block_q*({per_query})" if per_query else "")
    stages = f"max(1, min(2, floor(({free})/({walked}*{row_bytes} + {step} + 32))))"
    per_row = f"stages*{row_bytes}" + (f" + {per_query}" if per_query else "")
    bound = f"({SPACE} - {owned_bytes} - stages*({step}) - {parts['mbarriers']})/({per_row})"
    return (Formula("stages", stages), *sum_of(parts), Formula(walked, bound))


def _registers(kernel: str) -> tuple[Formula, Formula]:
    """Registers per thread, and the formula solved for the walked block size.

    Registers hold accumulators of the gradients and addresses, S and dP of the step, and the values
    that are pending while these are rounded.
    """
    if kernel in LEARNED_KERNELS:
        fixed = f"{fitted.LEARNED_REGISTERS} + extra"
    else:
        fixed = (
            f"{fitted.BACKWARD_REGISTERS} + max(0, columns - {fitted.WIDE_COLUMNS})"
            f"/{fitted.WIDE_COLUMNS_PER_REGISTER} + extra + columns/2"
        )
    return solved_registers(kernel, fixed, "(1 + pending)")


# "fused" computes S of the next step behind dK, where S and dQ have registers of their own beside
# the rounded P and dS: 1 where they do, else 0.
AHEAD = Formula(
    "ahead",
    f"max(0, first_plan + floor((register_limit - {fitted.AHEAD_REGISTERS} - columns/2"
    f" - block_q*(1 + dq_columns/{4 * GROUP_ROWS}))/register_limit))",
)
AHEAD_GAIN = f" - {fitted.AHEAD_CLOCKS}*ahead/(block_q*block_k)"

# ---- what it costs: clocks per score element of one SM with its resident blocks ------------------


def _cost_steps(kernel: str) -> tuple[Formula, ...]:
    """The formulas of the cost of one kernel."""
    owned, walked = sides(kernel)
    # The depth of S and dP is padded to multiples of 16; the columns of dQ to multiples of 64.
    depths = f"{DEPTH_STEP}*ceil(d_qk/{DEPTH_STEP}) + {DEPTH_STEP}*ceil(d_v/{DEPTH_STEP})"
    macs = f"{depths} + columns"
    # For a product with both operands in shared memory, a warpgroup reads its 64 rows of A, and B
    # once for them: S and dP; dV and dK, or dQ.
    reads = f"e*((depth + depth_v)*(1/{walked} + 1/{GROUP_ROWS}) + columns/{GROUP_ROWS})"
    by_keys = kernel in KEY_KERNELS
    per_score = fitted.BY_KEYS_INSTRUCTIONS if by_keys else fitted.BY_QUERIES_INSTRUCTIONS
    rest = f"{per_score} + score_ops + dropout_ops"
    # The reads, what TMA writes, and bytes of dS and dQ that warps store.
    shared = f"reads + e*(depth + depth_v)/{owned}"
    if kernel == "fused":
        macs += " + dq_columns"
        reads += f" + e*dq_columns*(dq_groups/block_q + 1/{GROUP_ROWS})"
        rest += " + 1/2 + dq_columns/block_k"  # a store for dS, and sums of dQ
        # Warps store whole strips of 64 columns of dQ; the columns that exist are added.
        shared += f" + e + 4*(dq_columns + {DEPTH_STEP}*ceil(d_qk/{DEPTH_STEP}))/block_k"
    per_step = fitted.BACKWARD_STEP_INSTRUCTIONS
    per_wgmma = fitted.BACKWARD_WGMMA_INSTRUCTIONS
    return (
        Formula("macs", macs),
        Formula("reads", reads, "B"),
        # A step has walked*64 scores of a warpgroup, walked/2 of each of its 128 threads.
        Formula("products", f"({per_step} + {per_wgmma}*macs/{DEPTH_STEP})/({walked}/2)"),
        Formula("rest", rest),
        PRODUCT_CLOCKS,
        Formula("shared", f"({shared})/{SMEM_BYTES_PER_CLOCK}", "clk"),
        *rates(kernel),
        # With one buffer, a step waits for its Q (where a block owns queries: for its K) to arrive.
        Formula("waits", f"(2 - stages)*e*d_qk/{owned}/l2_rate", "clk"),
        *((AHEAD,) if kernel == "fused" else ()),
        *time_of_step(kernel, " + waits" + (AHEAD_GAIN if kernel == "fused" else "")),
        BUSY,
    )


def _model(kernel: str) -> KernelModel:
    stages, smem, parts, smem_bound = _smem(kernel)
    return KernelModel(
        kernel,
        (*SIZES[kernel], stages, LAUNCHED, PRODUCER),
        smem,
        parts,
        smem_bound,
        *_registers(kernel),
        registers_sm90,
        _cost_steps(kernel),
        register_limit=CONSUMER,
        stages=2,
        # One consumer warpgroup or two.
        warp_counts=(4, 8) if kernel in LEARNED_KERNELS else (8,),
        row_groups=(1,),
        other_warps=PRODUCER_WARPS,
        other_forms=tuple(
            form.MODELS[kernel]
            for form in (backward_columns_sm90, streamed_sm90)
            if kernel in form.MODELS
        ),
    )


MODELS = {(kernel, 2): _model(kernel) for kernel in SIZES}
