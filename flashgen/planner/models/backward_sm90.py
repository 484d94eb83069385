"""The cost models of the backward kernels on the sm_90a path: TMA and wgmma.

Algorithm 4 of FlashAttention with the warp roles of FlashAttention-3 (Shah et al., 2024, appendix
B.2): one producer warpgroup copies, two consumer warpgroups compute, 64 rows of a product each.

dkdv and fused: a thread block owns ``block_k`` keys, whose K and V stay in shared memory, and walks
the query tiles of ``block_q`` rows. Scores are computed transposed, so that P^T and dS^T are used
as operands directly from registers. Each warpgroup owns 64 of 128 keys with all columns of dK and
dV. fused also computes dQ^T = K^T dS^T of each step, in blocks of 64 columns of dQ, and adds it in
global memory. The other form of both, for large head dims, is in `backward_columns_sm90`.

dq: a block owns 128 queries and walks the keys in steps of ``block_k``.

captured and captured_exact: the loop of dq without the product for dQ. They sum the gradients of
learned tensors.

Buffers: Q and dO (in dq, captured and captured_exact: K and V) have two each where they fit, else
one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from flashgen.arch import SMEM_BYTES_PER_CLOCK
from flashgen.launch_facts import KEY_KERNELS
from flashgen.planner.formulas import Formula
from flashgen.planner.models import backward_columns_sm90
from flashgen.planner.models import fitted_sm90 as fitted
from flashgen.planner.models.backward_columns_sm90 import TILE_BYTES
from flashgen.planner.models.forward_sm90 import (
    ALONE,
    BUSY,
    CONSUMER,
    DEPTH,
    DEPTH_V,
    LAUNCHED,
    PACE,
    PRODUCER,
    PRODUCER_WARPS,
)
from flashgen.planner.models.forward_sm90 import COST as FORWARD_COST
from flashgen.planner.models.kernel_model import (
    LEARNED_KERNELS,
    KernelModel,
    rates,
    sides,
    solved_registers,
)
from flashgen.planner.models.panels_sm90 import DEPTH_STEP, GROUP_ROWS
from flashgen.planner.models.spec_terms import registers_sm90

QUERY_KERNELS = ("dq", *LEARNED_KERNELS)
DS_BUFFERS = 2  # of "fused": one is read while the other is written
ALIGNED = 1024  # bytes: alignment of a swizzle pattern of 128 bytes
# Producer warps that search for the tiles of the walk, and those of them that evaluate whether a
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


def _smem(kernel: str) -> tuple[Formula, Formula, Formula]:
    """Stages, shared memory of a block, and the same solved for the walked block size."""
    owned, walked = sides(kernel)
    room = "min(M, M_sm/blocks - reserved)"
    # K and V, or Q and dO, which the block owns, and what it keeps whatever the stages.
    mine = f"e*{owned}*(depth + depth_v)"
    more, less = (" + warps*windows", " - warps*windows") if kernel in LEARNED_KERNELS else ("", "")
    kept = ""
    # Per stage: a row of the other two, and the step's tile number; then the barriers.
    of_row = "e*(depth + depth_v)"
    barriers = "8*(1 + 4*stages)"
    if kernel in KEY_KERNELS:
        # dS with two buffers, and the outgoing dQ tile; LSE, delta.
        kept = f"{DS_BUFFERS}*e*block_k + 4*depth" if kernel == "fused" else ""
        of_row = f"({of_row} + query_bytes)"
        smem = (
            f"{mine} + {ALIGNED}*ceil(stages*block_q*e*depth_v/{ALIGNED})"
            f" + block_q*({' + '.join(filter(None, ('stages*e*depth', kept)))})"
            f" + stages*(query_bytes*block_q + {TILE_BYTES}) + {barriers}"
        )
    else:
        smem = f"{mine}{more} + stages*(block_k*{of_row} + {TILE_BYTES}) + {barriers}"
    left = f"{room} - 8 - {mine}{less}" + (f" - block_q*({kept})" if kept else "")
    per_row = f"stages*{of_row}" + (f" + {kept}" if kept else "")
    return (
        Formula(
            "stages",
            f"max(1, min(2, floor(({left})/({walked}*{of_row} + {TILE_BYTES} + 32))))",
        ),
        Formula("smem", smem, "B"),
        Formula(walked, f"({room} - {mine}{less} - {TILE_BYTES}*stages - {barriers})/({per_row})"),
    )


def _registers(kernel: str) -> tuple[Formula, Formula]:
    """Registers per thread, and the same solved for the walked block size.

    Accumulators of the gradients and addresses; then S and dP of the step, with the values that are
    pending while they are rounded.
    """
    if kernel in LEARNED_KERNELS:
        own = f"{fitted.LEARNED_REGISTERS} + extra"
    else:
        own = (
            f"{fitted.BACKWARD_REGISTERS} + max(0, columns - {fitted.WIDE_COLUMNS})"
            f"/{fitted.WIDE_COLUMNS_PER_REGISTER} + extra + columns/2"
        )
    return solved_registers(kernel, own, "(1 + pending)")


def _parts(kernel: str, at: Mapping[str, int]) -> dict[str, int]:
    stages, depth, depth_v = at["stages"], at["depth"], at["depth_v"]
    block_q, queries, keys = at["block_q"], at["e"] * at["block_q"], at["e"] * at["block_k"]
    barriers = 8 * (1 + 4 * stages)
    if kernel not in KEY_KERNELS:
        return {
            "smem_q": queries * depth,
            "smem_do": queries * depth_v,
            "smem_k": stages * keys * depth,
            "smem_v": stages * keys * depth_v,
            "smem_rows": TILE_BYTES * stages,
            "mbarriers": barriers,
            "smem_windows": at["warps"] * at["windows"],
        }
    fused = kernel == "fused"
    return {
        "smem_k": keys * depth,
        "smem_v": keys * depth_v,
        "smem_q": stages * queries * depth,
        "smem_do": ALIGNED * -(-stages * queries * depth_v // ALIGNED),
        "smem_ds": DS_BUFFERS * block_q * keys if fused else 0,
        "sums of dQ": 4 * block_q * depth if fused else 0,
        "smem_rows": stages * (block_q * at["query_bytes"] + TILE_BYTES),
        "mbarriers": barriers,
    }


# ---- what it costs: clocks per score element of one SM with its resident blocks ------------------

TENSOR = Formula("tensor", "macs/tensor_rate", "clk")
COST = Formula("cost", f"{FORWARD_COST.text} + waits", "clk")


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
        shared += " + e + 8*dq_columns/block_k"
    per_step = fitted.BACKWARD_STEP_INSTRUCTIONS
    per_wgmma = fitted.BACKWARD_WGMMA_INSTRUCTIONS
    # The buffers that are handed over in a step. With one buffer, a step waits for its Q (where a
    # block owns queries: for its K) to arrive.
    clocks = f"{2 if kernel in LEARNED_KERNELS else 3}*{fitted.HANDOVER_CLOCKS}"
    clocks += f" + (2 - stages)*{fitted.COPY_LATENCY_CLOCKS}"
    return (
        Formula("macs", macs),
        Formula("reads", reads, "B"),
        # A step has walked*64 scores of a warpgroup, walked/2 of each of its 128 threads.
        Formula("products", f"({per_step} + {per_wgmma}*macs/{DEPTH_STEP})/({walked}/2)"),
        Formula("rest", rest),
        TENSOR,
        Formula("shared", f"({shared})/{SMEM_BYTES_PER_CLOCK}", "clk"),
        *rates(kernel),
        ALONE,
        PACE,
        Formula("barriers", f"({clocks})/(block_q*block_k*blocks)", "clk"),
        Formula("waits", f"(2 - stages)*e*d_qk/{owned}/l2_rate", "clk"),
        COST,
        BUSY,
    )


def _model(kernel: str) -> KernelModel:
    stages, smem, smem_bound = _smem(kernel)
    return KernelModel(
        kernel,
        (*SIZES[kernel], stages, LAUNCHED, PRODUCER),
        smem,
        smem_bound,
        *_registers(kernel),
        functools.partial(_parts, kernel),
        registers_sm90,
        _cost_steps(kernel),
        register_limit=CONSUMER,
        stages=2,
        warp_counts=(8,),  # two consumer warpgroups
        row_groups=(1,),
        other_warps=PRODUCER_WARPS,
        other_form=backward_columns_sm90.MODELS.get(kernel),
    )


MODELS = {(kernel, 2): _model(kernel) for kernel in SIZES}
