"""The cost models of backward kernels on the sm_90a path whose tiles come panel by panel.

Where heads are wide, no whole tile of the side that a block walks fits beside the rows that it
owns. Panels of 64 columns then pass through a ring, as many as fit. A block has 64 rows, which two
consumer warpgroups share: each computes all of these rows' scores with half of a step's columns,
hands its half of dS over in shared memory, in the order of registers, and has half of the
columns of the gradient: every other panel.

dkdv: a block owns the K and V of 64 keys and walks the queries twice: for dV, with the panels of Q
for S and then those of dO for dV += P^T dO; and for dK, with those of dO for dP and then those of Q
for S, which stay in the ring until dK += dS^T Q has read them.

dq: a block owns the Q and dO of 64 queries and walks the keys. The panels of V come first, for dP,
and then those of K, for S; the latter stay in the ring until dQ += dS K has read them, so that each
is copied once.
"""

from __future__ import annotations

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models import fitted_sm90 as fitted
from flashgen.kernels.planner.models.backward_columns_sm90 import TILE_BYTES
from flashgen.kernels.planner.models.backward_sm80 import ROW_BYTES
from flashgen.kernels.planner.models.forward_sm90 import (
    BARRIER_BYTES,
    BUSY,
    CONSUMER,
    LAUNCHED,
    OWN_ISSUE,
    PRODUCER,
    PRODUCER_WARPS,
)
from flashgen.kernels.planner.models.kernel_model import (
    PRODUCT_CLOCKS,
    SPACE,
    KernelModel,
    rates,
    sides,
    solved_registers,
    sum_of,
    time_alone,
)
from flashgen.kernels.planner.models.panels_sm90 import DEPTH_STEP, GROUP_ROWS
from flashgen.kernels.planner.models.spec_terms import registers_sm90
from flashgen.shared.arch import SMEM_BYTES_PER_CLOCK, WARP
from flashgen.shared.launch_facts import KEY_KERNELS

WARPS = 8  # two consumer warpgroups
GROUPS = 2

# ---- what a tile needs ---------------------------------------------------------------------------

# Two warps copy LSE and delta of 64 queries; where there are fewer, each thread tests whether it
# has any.
PRODUCER_OF_KEYS = Formula(
    "producer", f"max(24 + 8*ceil(max(0, {GROUP_ROWS} - block_q)/{GROUP_ROWS}), searching)"
)
DEPTH = Formula("depth", f"{GROUP_ROWS}*ceil(d_qk/{GROUP_ROWS})")
DEPTH_V = Formula("depth_v", f"{GROUP_ROWS}*ceil(d_v/{GROUP_ROWS})")


def _columns(depth: str) -> str:
    """Columns of a gradient that a warpgroup has; both have the last of an odd number of panels."""
    return f"{GROUP_ROWS}*ceil({depth}/{GROUPS * GROUP_ROWS})"


def _model(kernel: str) -> KernelModel:
    owned, walked = sides(kernel)
    by_keys = kernel in KEY_KERNELS
    own_rows = ("smem_k", "smem_v") if by_keys else ("smem_q", "smem_do")
    owned_bytes = f"e*{owned}*(depth + depth_v)"
    handover_bytes = f"e*{owned}*{walked}"
    slot = f"e*{GROUP_ROWS}*{walked}"
    record_bytes = f"stages*{TILE_BYTES}"
    if by_keys:
        record_bytes = f"stages*({ROW_BYTES}*{walked} + {TILE_BYTES})"
    barriers = f"{BARRIER_BYTES}*(1 + 2*stages"
    remaining = f"{SPACE} - {owned_bytes} - {record_bytes} - {barriers})"
    # At most two steps, and at least a panel more than those that are kept.
    ring = Formula(
        "ring",
        f"max(1 + max(depth, depth_v)/{GROUP_ROWS}, min((depth + depth_v)/{GROUP_ROWS // 2},"
        f" floor(({remaining} - {handover_bytes})/({slot} + {2 * BARRIER_BYTES}))))",
    )
    smem, parts = sum_of(
        {
            own_rows[0]: f"e*{owned}*depth",
            own_rows[1]: f"e*{owned}*depth_v",
            "smem_ring": f"ring*{slot}",
            "smem_ds": handover_bytes,
            "smem_rows": record_bytes,
            "mbarriers": f"{barriers} + 2*ring)",
        }
    )
    fixed = f"{SPACE} - {owned_bytes} - stages*{TILE_BYTES} - {barriers} + 2*ring)"
    per_row = f"e*{owned} + ring*e*{GROUP_ROWS}" + (f" + stages*{ROW_BYTES}" if by_keys else "")
    # S and dP of half of a step, and dS of both halves.
    fixed_registers = f"{fitted.STREAMED_REGISTERS} + extra + columns/2"
    return KernelModel(
        kernel,
        (
            DEPTH,
            DEPTH_V,
            Formula("columns", _columns("max(depth, depth_v)" if by_keys else "depth")),
            ring,
            LAUNCHED,
            PRODUCER_OF_KEYS if by_keys else PRODUCER,
        ),
        smem,
        parts,
        Formula(walked, f"({fixed})/({per_row})"),
        *solved_registers(
            kernel,
            fixed_registers,
            f"((1 + pending)/{GROUPS} + {fitted.STREAMED_REGISTERS_PER_ROW})",
        ),
        registers_sm90,
        _cost_steps(kernel),
        register_limit=CONSUMER,
        sharing=((GROUPS, GROUPS),),
        beyond=fitted.STREAMED_BEYOND,
        warp_counts=(WARPS,),
        row_groups=(1,),
        other_warps=PRODUCER_WARPS,
    )


# ---- what it costs: clocks per score element of one SM with its resident blocks ------------------


def _cost_steps(kernel: str) -> tuple[Formula, ...]:
    """The formulas of the cost of one kernel."""
    owned, walked = sides(kernel)
    by_keys = kernel in KEY_KERNELS
    walks = 2 if by_keys else 1
    depths, gradient_columns = "(depth + depth_v)", _columns("depth")
    macs = f"{depths} + {GROUPS}*{gradient_columns}"
    # For a product a warpgroup reads its 64 rows of A, and B once for them: S and dP. A of the
    # gradient is in registers.
    row_reads = f"({GROUPS}/{walked} + 1/{GROUP_ROWS})"
    reads = f"{depths}*{row_reads} + {GROUPS}*{gradient_columns}/{GROUP_ROWS}"
    # The reads, what TMA writes, and the scores that are handed over.
    moved_bytes = f"e*{depths}/{owned} + 2*e"
    issued = f"{depths}/{DEPTH_STEP} + {gradient_columns}/{GROUP_ROWS}*{walked}/{DEPTH_STEP}"
    panel_count = f"{depths}/{GROUP_ROWS} + {gradient_columns}/{GROUP_ROWS}"
    per_score = fitted.BY_KEYS_INSTRUCTIONS if by_keys else fitted.BY_QUERIES_INSTRUCTIONS
    # Half of a store and half of a load of two elements that are handed over.
    rest = f"{per_score} + score_ops + dropout_ops + 1"
    # The warpgroups meet in every step: they compute scores at the same time, and multiply at the
    # same time. The ring is then full of panels that are kept.
    alone = time_alone("tensor, l2", between=OWN_ISSUE)
    shared_v: tuple[Formula, ...] = ()
    if by_keys:
        value_columns = _columns("depth_v")
        walk_reads = f"depth*{row_reads} + {GROUPS}*{value_columns}/{GROUP_ROWS}"
        shared_v = (
            Formula(
                "shared_v", f"(e*({walk_reads}) + {moved_bytes})/{SMEM_BYTES_PER_CLOCK}", "clk"
            ),
        )
        macs += f" + depth + {GROUPS}*{value_columns}"
        reads += f" + {walk_reads}"
        issued += f" + depth/{DEPTH_STEP} + {value_columns}/{GROUP_ROWS}*{walked}/{DEPTH_STEP}"
        panel_count += f" + depth/{GROUP_ROWS} + {value_columns}/{GROUP_ROWS}"
        # Each walk has its own busiest resource.
        walk_clocks = f"max(shared - shared_v, l2/2) + max(shared_v, l2/2) + special + {OWN_ISSUE}"
        alone = Formula("alone", f"max(busiest, {walk_clocks})", "clk")
    return (
        Formula("macs", macs),
        Formula("reads", f"e*({reads})", "B"),
        Formula(
            "products",
            f"({walks}*{fitted.STREAMED_STEP_INSTRUCTIONS}"
            f" + {fitted.STREAMED_WGMMA_INSTRUCTIONS}*({issued})"
            f" + {fitted.STREAMED_PANEL_INSTRUCTIONS}*({panel_count}))"
            f"*{WARP}*warps/(block_q*block_k)",
        ),
        Formula("rest", f"{walks}*({rest})" if walks > 1 else rest),
        PRODUCT_CLOCKS,
        Formula("shared", f"(reads + {walks}*({moved_bytes}))/{SMEM_BYTES_PER_CLOCK}", "clk"),
        *shared_v,
        *rates(
            kernel,
            special=f"{walks}*(1 + special_ops)",
            row_elements=f"{walks}*(d_qk + d_v)",
        ),
        alone,
        Formula("cost", "alone", "clk"),
        BUSY,
    )


MODELS = {kernel: _model(kernel) for kernel in ("dkdv", "dq")}
