"""What a tile needs and what it costs on the sm_90a path, as formulas: TMA and wgmma.

The forward kernel: one warpgroup copies, ``warps`` warps in groups of four compute, each group for
64 query rows. K and V have ``stages`` buffers each, which the copying warpgroup fills ahead. S, P
and O live in registers; the softmax of one tile runs behind the products of the next.

Tiles lie in panels, as wide as the pattern that TMA permutes them by and that wgmma reads; columns
beyond the head dim are filled with zeros on the way. The products' depth goes in steps of 16.

Source of the overlap: FlashAttention-3 (Shah et al., 2024), section 3.2.
"""

from __future__ import annotations

from flashgen.arch import SMEM_BYTES_PER_CLOCK, WARP
from flashgen.plan.formulas import Formula
from flashgen.plan.model import ISSUE, SPECIAL, KernelModel

PRODUCER_WARPS = 4
GROUP_ROWS = 64  # query rows that a warpgroup multiplies at a time
DEPTH_STEP = 16  # of a product of 16-bit operands
STAGES = 2
PANELS = (64, 32, 16)  # columns, widest first: patterns of 128, 64 and 32 bytes
BARRIER_BYTES = 8


# What the copying warps need where they look for live tiles, or where a range has two ends, and how
# much more where the mask is asked of each tile. Measured on compiled kernels, as are those below.
SEARCHING_REGISTERS = 40
SEARCHING_TILES = 16


def panels_of(dim: int) -> tuple[int, int]:
    """Columns of a panel and the number of panels for rows of ``dim`` elements of 16 bits."""
    padded = DEPTH_STEP * -(-dim // DEPTH_STEP)
    width = next(width for width in PANELS if padded % width == 0)
    return width, padded // width


DEPTH = Formula("depth", f"{DEPTH_STEP}*ceil(d_qk/{DEPTH_STEP})")
DEPTH_V = Formula("depth_v", f"{DEPTH_STEP}*ceil(d_v/{DEPTH_STEP})")
# For each buffer a barrier that it is full and one that it is empty, the same for the number of the
# next job and that number, and for each warpgroup one for its Q.
BARRIERS_BYTES = f"{BARRIER_BYTES}*(3 + 4*stages) + 2*warps"
SMEM = Formula(
    "smem",
    f"e*(block_q*max(depth, depth_v) + stages*block_k*(depth + depth_v)) + {BARRIERS_BYTES}",
    "B",
)
BLOCK_K_BY_SMEM = Formula(
    "block_k",
    f"((min(M, M_sm/blocks - reserved) - ({BARRIERS_BYTES}))/e - block_q*max(depth, depth_v))"
    "/(stages*(depth + depth_v))",
)

# A block gets its registers in equal shares at launch; then the warpgroup that copies gives up all
# but `producer` of them, which the others share.
LAUNCHED = Formula("launched", f"8*floor(R/{8 * WARP}/(blocks*(warps + {PRODUCER_WARPS})))")
PRODUCER = Formula("producer", "max(2*warps + 8, searching)")
CONSUMER = Formula(
    "register_limit",
    f"8*floor((launched*(warps + {PRODUCER_WARPS}) - {PRODUCER_WARPS}*producer)/(8*warps))",
)
# S, P rounded, O; row statistics, descriptors, addresses.
_PER_KEY = "3/4"
REGISTERS = Formula("registers", f"block_k*{_PER_KEY} + d_v/2 + 32 + extra")
BLOCK_K_BY_REGISTERS = Formula("block_k", f"(register_limit - 32 - extra - d_v/2)/({_PER_KEY})")

# ---- what a tile costs: clocks per score element of one SM --------------------------------------

# Instructions around the products in a step, per thread: descriptors, barriers, loop; each score is
# one of block_k/2 of a thread. Counted in the machine code of compiled kernels.
PRODUCTS = Formula("products", f"(45 + 3.7*(depth + block_k)/{DEPTH_STEP})/(block_k/2)")
# A maximum, a multiply-add, an exponential, a sum, and half of a rounding.
REST = Formula("rest", "4.5 + score_ops + dropout_ops")
TENSOR = Formula("tensor", "(depth + d_v)/tensor_rate", "clk")
# A warpgroup reads Q, K and V from shared memory for its 64 rows; TMA writes K and V for all.
SHARED = Formula(
    "shared",
    f"e*(depth/block_k + (depth + d_v)/{GROUP_ROWS} + (depth + depth_v)/block_q)"
    f"/{SMEM_BYTES_PER_CLOCK}",
    "clk",
)
L2 = Formula("l2", "e*(d_qk + d_v)/block_q/l2_rate", "clk")
BUSIEST = Formula("busiest", "max(tensor, shared, l2, special, issue)", "clk")
# At each of two hand-overs a step, of K and of V, the products stand still for about 150 clocks.
BARRIERS = Formula("barriers", "2*150/(block_q*block_k*blocks)", "clk")
COST = Formula("cost", "busiest + barriers", "clk")
# A prediction: the share of the time in which the tensor cores multiply.
BUSY = Formula("busy", "tensor/cost")

FORWARD = KernelModel(
    name="forward",
    owns="block_q",
    sizes=(DEPTH, DEPTH_V, LAUNCHED, PRODUCER),
    smem=SMEM,
    smem_bound=BLOCK_K_BY_SMEM,
    registers=REGISTERS,
    register_bound=BLOCK_K_BY_REGISTERS,
    register_limit=CONSUMER,
    cost_steps=(PRODUCTS, REST, TENSOR, SHARED, L2, SPECIAL, ISSUE, BUSIEST, BARRIERS, COST, BUSY),
    stages=STAGES,
    warp_counts=(8, 12),
    other_warps=PRODUCER_WARPS,
    row_groups=(1,),
    max_step=256,
    copies_rows=False,
)

MODELS = {("forward", 2): FORWARD}
