"""The cost models of the backward kernels on the sm_80 path: cp.async, ldmatrix and mma.sync.

Algorithm 4 of FlashAttention (Dao et al., 2022), with the scores recomputed from Q, K and LSE.

dkdv and fused: a thread block owns ``block_k`` keys, whose K and V stay in shared memory, and walks
the query tiles of ``block_q`` rows, for every query head that shares these keys. Q has two buffers,
because a step uses it first and last; dO has one; LSE and delta of the rows (8 bytes) have two.
Each warp owns 16 * row_groups keys and a share of the columns of dK and dV, which are held in
registers with S^T and dP^T. Warps that own the same keys either share the scores, each computing
those of some queries and passing P and dS through shared memory, or compute them all (score_warps
1); then P^T and dS^T are used as operands directly from registers. fused also adds the tile dS K to
dQ in global memory: dS passes through shared memory, and all warps share the tile's rows and
columns.

dq: a block owns ``block_q`` queries, whose Q and dO stay in shared memory, and walks the keys in
steps of ``block_k``. K has two buffers, V one. Warps that own the same queries each compute all
their scores and have a share of the columns of dQ.

captured and captured_exact: the loop of dq without the product for dQ. They sum the gradients of
learned tensors. Warps that own the same queries divide these sums by the keys of a step.

The number of buffers is a property of each kernel: ``stages`` has no meaning here. The results are
staged over the operands that the block owns, and need no other space.
"""

from __future__ import annotations

import functools
import math

from flashgen.kernels.planner.formulas import Formula
from flashgen.kernels.planner.models import fitted_sm80 as fitted
from flashgen.kernels.planner.models.forward_sm80 import ALONE, COST, OCCUPIED, OVERLAP, SUSTAINED
from flashgen.kernels.planner.models.kernel_model import (
    LEARNED_KERNELS,
    MMA_ROWS,
    SPACE,
    KernelModel,
    rates,
    sides,
    solved_registers,
    sum_of,
)
from flashgen.kernels.planner.models.spec_terms import registers_sm80
from flashgen.shared.arch import SMEM_BYTES_PER_CLOCK, WARP
from flashgen.shared.launch_facts import KEY_KERNELS

ROW_BYTES = 8  # LSE and delta of a query, as a float2

# Barriers per step: before its tiles are read, and after dO (in dq: V) has been read. Where warps
# share scores there is one more, between the writes and the reads of P and dS.
SYNCS = 2

# Pairs (column_warps, score_warps). Where each warp computes all scores, the cost is higher, but
# neither tiles for P and dS nor a second group of queries are needed: this serves head dims whose
# smallest tile just fits.
SHARING = {
    "dkdv": ((1, 1), (2, 2), (4, 4), (2, 1), (4, 1)),
    "fused": ((1, 1), (2, 2), (4, 4)),
} | dict.fromkeys(("dq", *LEARNED_KERNELS), ((1, 1), (2, 1), (4, 1)))

# Tiles of P and dS that warps write to shared memory.
WRITTEN_TILES = {"dkdv": "2*min(1, exchanged)", "fused": "(1 + min(1, exchanged))"}


@functools.lru_cache(maxsize=1024)
def dq_row_warps(block_q: int, warps: int, d_qk: int) -> int:
    """The number of warps of "fused" that divide the row groups of a dQ tile; others share columns.

    The chosen number computes the fewest columns beyond d_qk; among equals, it reads the fewest
    elements of K and dS from shared memory.
    """

    def work(rows: int) -> tuple[float, float, int]:
        columns = 16 * math.ceil(d_qk * rows / (16 * warps))
        return columns / rows, columns / block_q + 1 / rows, rows

    most = math.gcd(block_q // MMA_ROWS, warps)
    return min((rows for rows in range(1, most + 1) if most % rows == 0), key=work)


# ---- what a tile needs ---------------------------------------------------------------------------

COLUMNS = Formula("columns", "16*(ceil(d_qk/(16*column_warps)) + ceil(d_v/(16*column_warps)))")
SIZES = {
    "dkdv": (COLUMNS,),
    "fused": (COLUMNS, Formula("dq_columns", "16*ceil(d_qk*dq_row_warps/(16*warps))")),
    "dq": (Formula("columns", "16*ceil(d_qk/(16*column_warps))"),),
} | dict.fromkeys(LEARNED_KERNELS, (Formula("columns", "0"),))


def _smem(kernel: str) -> tuple[Formula, tuple[Formula, ...], Formula]:
    """Shared memory of a block, its parts, and the formula solved for the walked block size."""
    owned, walked = sides(kernel)
    # Q (in dq: K) has two buffers.
    row_elements = "d_qk + d_v + d_qk"
    if kernel in KEY_KERNELS:
        per_row = f"e*({row_elements} + {WRITTEN_TILES[kernel]}*block_k) + {2 * ROW_BYTES}"
        scores = "e*block_q*block_k"
        parts = {
            "smem_k": "e*block_k*d_qk",
            "smem_v": "e*block_k*d_v",
            "smem_q": "2*e*block_q*d_qk",
            "smem_do": "e*block_q*d_v",
            "smem_rows": f"{2 * ROW_BYTES}*block_q",
            "smem_p": f"min(1, exchanged)*{scores}",
            "smem_ds": scores if kernel == "fused" else f"min(1, exchanged)*{scores}",
        }
    else:
        per_row = f"e*({row_elements})"
        parts = {
            "smem_q": "e*block_q*d_qk",
            "smem_do": "e*block_q*d_v",
            "smem_k": "2*e*block_k*d_qk",
            "smem_v": "e*block_k*d_v",
        }
    owned_bytes = f"e*{owned}*(d_qk + d_v)"
    if kernel in LEARNED_KERNELS:
        parts["smem_windows"] = "warps*windows"
        owned_bytes += " - warps*windows"
    bound = Formula(walked, f"({SPACE} - {owned_bytes})/({per_row})")
    return (*sum_of(parts), bound)


def _registers(kernel: str, itemsize: int) -> tuple[Formula, Formula]:
    """Registers per thread, and the formula solved for the walked block size."""
    learned = kernel in LEARNED_KERNELS
    constant, per_row_group = fitted.BACKWARD_REGISTERS["captured" if learned else kernel, itemsize]
    fixed = f"{constant} + {per_row_group}*row_groups" if per_row_group else str(constant)
    fixed += " + extra" if learned else " + extra + row_groups*columns/2"
    per_row = "row_groups*(1 + pending)"
    if kernel in KEY_KERNELS:
        per_row += "/score_warps"
    if kernel == "fused":
        # The tile dS K is summed when S^T and dP^T are no longer needed.
        dq_tile = f"({fitted.FUSED_DQ_REGISTERS[itemsize]})/({WARP}*dq_row_warps)"
        per_row = f"max({per_row}, {dq_tile})"
    return solved_registers(kernel, fixed, per_row)


# ---- what it costs: clocks per score element of one SM with its resident blocks ------------------

# mma.sync and ldmatrix of 16-bit operands. For float32 six products of parts, and additions outside
# the tensor cores: one for each step of S and dP, two for each step of a gradient.
PRODUCTS = {
    2: Formula("products", "macs/64 + reads/16"),
    4: Formula(
        "products",
        f"6*macs/64 + macs/8 - repeats*(d_qk + d_v)/16 + {fitted.SPLIT_INSTRUCTIONS}*reads/4",
    ),
}


def steps_to_cost(
    kernel: str,
    itemsize: int,
    macs: str,
    reads: str,
    rest: str,
    shared: str,
    row_elements: str = "d_qk + d_v",
) -> tuple[Formula, ...]:
    """The steps to the cost of a kernel that starts from O and LSE.

    Args:
        macs, reads, rest: the quantities of these names.
        shared: bytes that pass through shared memory, by score element.
        row_elements: as in `rates`.
    """
    return (
        Formula("macs", macs),
        Formula("reads", reads, "B"),
        PRODUCTS[itemsize],
        Formula("rest", rest),
        Formula("tensor", "factors*macs/tensor_rate", "clk"),
        Formula("shared", f"({shared})/{SMEM_BYTES_PER_CLOCK}", "clk"),
        *rates(kernel, computed="repeats", tensor=SUSTAINED, row_elements=row_elements),
        ALONE,
        OVERLAP,
        OCCUPIED,
        Formula("barriers", "syncs*barrier/(block_q*block_k*blocks)", "clk"),
        COST,
    )


def _cost_steps(kernel: str, itemsize: int) -> tuple[Formula, ...]:
    """The steps to the cost of one kernel."""
    fused, by_keys = kernel == "fused", kernel in KEY_KERNELS
    owned, walked = sides(kernel)
    # Scores and dP are recomputed for every product that needs them. The columns of the gradients
    # are padded where the warps cannot divide them evenly.
    macs = "(d_qk + d_v)*repeats + column_warps*columns"
    # A operands: each warp reads the rows that it owns once per step. B operands: each warp reads
    # the rows of the step, for its own 16 * row_groups rows. P and dS: written once, read by each
    # warp that shares them.
    reads = (
        f"e*column_warps*((d_qk + d_v)/{walked}"
        " + ((d_qk + d_v)/score_warps + columns)/(16*row_groups))"
    )
    per_score = fitted.BY_KEYS_INSTRUCTIONS if by_keys else fitted.BY_QUERIES_INSTRUCTIONS
    per_step = fitted.BY_KEYS_STEP_INSTRUCTIONS if by_keys else fitted.BY_QUERIES_STEP_INSTRUCTIONS
    share = f"column_warps/(row_groups*{walked})"  # the scores of a warp share these of each step
    rest = (
        f"repeats*({per_score[itemsize]} + score_ops + dropout_ops)"
        f" + {per_step}*{share} + e*(d_qk + d_v)/(access*{owned})"
    )
    shared = f"reads + e*(d_qk + d_v)/{owned}"
    if by_keys:
        tiles = WRITTEN_TILES[kernel]
        reads += " + e*exchanged*column_warps"
        rest += f" + {tiles}*(1 + {fitted.EXCHANGED_TILE_INSTRUCTIONS}*{share})"
        shared += f" + e*{tiles}"
    if fused:
        macs += " + warps*dq_columns/dq_row_warps"
        reads += " + e*warps*(dq_columns/block_q + 1/dq_row_warps)"
        rest += f" + {fitted.ATOMIC_INSTRUCTIONS}*d_qk/block_k"
    return steps_to_cost(kernel, itemsize, macs, reads, rest, shared)


MODELS = {
    (kernel, itemsize): KernelModel(
        kernel,
        SIZES[kernel],
        *_smem(kernel),
        *_registers(kernel, itemsize),
        registers_sm80,
        _cost_steps(kernel, itemsize),
        sharing=SHARING[kernel],
    )
    for itemsize in (2, 4)
    for kernel in SIZES
}
