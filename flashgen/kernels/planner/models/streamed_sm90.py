"""The cost models of backward kernels on the sm_90a path whose tiles come panel by panel.

Where heads are wide, no whole tile of the side that a block walks fits beside the rows that it
owns. Panels of 64 columns then pass through a ring, as many as fit. A block has 64 rows, which two
consumer warpgroups share: each computes all of these rows' scores with half of a step's columns,
hands its half of dS over in shared memory, in the order of registers, and has half of the columns of
the gradient: every other panel.

dq: a block owns the Q and dO of 64 queries and walks the keys. The panels of V come first, for dP,
and then those of K, for S; the latter stay in the ring until dQ += dS K has read them, so that each
is copied once.
"""

from __future__ import annotations

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models import fitted_sm90 as fitted
from flashgen.kernels.planner.models.backward_columns_sm90 import TILE_BYTES
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

WARPS = 8  # two consumer warpgroups
GROUPS = 2
TILES = 2  # steps of which the producer tells the consumers ahead

# ---- what a tile needs ---------------------------------------------------------------------------

DEPTH = Formula("depth", f"{GROUP_ROWS}*ceil(d_qk/{GROUP_ROWS})")
DEPTH_V = Formula("depth_v", f"{GROUP_ROWS}*ceil(d_v/{GROUP_ROWS})")
# Of an odd number of panels the warpgroups compute the last one twice.
COLUMNS = Formula("columns", f"{GROUP_ROWS}*ceil(depth/{GROUPS * GROUP_ROWS})")


def _model(kernel: str) -> KernelModel:
    owned, walked = sides(kernel)
    mine = f"e*{owned}*(depth + depth_v)"
    handed = f"e*{owned}*{walked}"
    slot = f"e*{GROUP_ROWS}*{walked}"
    told = f"{TILES}*{TILE_BYTES}"
    barriers = f"{BARRIER_BYTES}*(1 + 2*{TILES} + 2*ring)"
    room = (
        f"min(M, M_sm/blocks - reserved) - {mine} - {told} - {BARRIER_BYTES}*{1 + 2 * TILES}"
    )
    # At most two steps, and at least a panel more than those that are kept.
    ring = Formula(
        "ring",
        f"max(1 + depth/{GROUP_ROWS}, min((depth + depth_v)/{GROUP_ROWS // 2},"
        f" floor(({room} - {handed})/({slot} + {2 * BARRIER_BYTES}))))",
    )
    smem, parts = sum_of(
        {
            "smem_q": f"e*{owned}*depth",
            "smem_do": f"e*{owned}*depth_v",
            "smem_ring": f"ring*{slot}",
            "smem_ds": handed,
            "smem_rows": told,
            "mbarriers": barriers,
        }
    )
    bound = Formula(
        walked,
        f"({room} - {2 * BARRIER_BYTES}*ring)/(e*{owned} + ring*e*{GROUP_ROWS})",
    )
    # S and dP of half of a step.
    own = f"{fitted.STREAMED_REGISTERS} + extra + columns/2"
    registers = solved_registers(kernel, own, f"((1 + pending)/{GROUPS})")
    # For a product a warpgroup reads its 64 rows of A, and B once for them: S and dP. A of dQ is in
    # registers.
    depths = "(depth + depth_v)"
    issued = f"{depths}/{DEPTH_STEP} + columns/{GROUP_ROWS}*{walked}/{DEPTH_STEP}"
    of_panels = f"{depths}/{GROUP_ROWS} + columns/{GROUP_ROWS}"
    return KernelModel(
        kernel,
        (DEPTH, DEPTH_V, COLUMNS, ring, LAUNCHED, PRODUCER),
        smem,
        parts,
        bound,
        *registers,
        registers_sm90,
        (
            Formula("macs", f"depth + depth_v + {GROUPS}*columns"),
            Formula(
                "reads",
                f"e*({depths}*({GROUPS}/{walked} + 1/{GROUP_ROWS})"
                f" + {GROUPS}*columns/{GROUP_ROWS})",
                "B",
            ),
            Formula(
                "products",
                f"({fitted.STREAMED_STEP_INSTRUCTIONS}"
                f" + {fitted.STREAMED_WGMMA_INSTRUCTIONS}*({issued})"
                f" + {fitted.STREAMED_PANEL_INSTRUCTIONS}*({of_panels}))"
                f"*{WARP}*warps/(block_q*block_k)",
            ),
            # Half of a store and half of a load of two elements of dS.
            Formula("rest", f"{fitted.BY_QUERIES_INSTRUCTIONS} + score_ops + dropout_ops + 1"),
            Formula("tensor", "macs/tensor_rate", "clk"),
            # The reads, what TMA writes, and the dS that is handed over.
            Formula(
                "shared",
                f"(reads + e*{depths}/{owned} + 2*e)/{SMEM_BYTES_PER_CLOCK}",
                "clk",
            ),
            *rates(kernel),
            # The warpgroups meet in every step: they compute dS at the same time, and multiply at
            # the same time. The ring is then full of panels that are kept.
            time_alone("tensor, l2", between=OWN_ISSUE),
            Formula("cost", "alone", "clk"),
            BUSY,
        ),
        register_limit=CONSUMER,
        sharing=((GROUPS, GROUPS),),
        beyond=fitted.STREAMED_BEYOND,
        warp_counts=(WARPS,),
        row_groups=(1,),
        other_warps=PRODUCER_WARPS,
    )


MODELS = {"dq": _model("dq")}
