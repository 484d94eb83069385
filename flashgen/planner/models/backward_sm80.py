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
learned tensors.

The number of buffers is a property of each kernel: ``stages`` has no meaning here. The results are
staged over the operands that the block owns, and need no other space.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from flashgen.arch import SMEM_BYTES_PER_CLOCK, SPECIAL_PER_CLOCK, WARP
from flashgen.planner.formulas import Formula
from flashgen.planner.models import fitted_sm80 as fitted
from flashgen.planner.models.forward_sm80 import (
    ALONE,
    COST,
    MAX_STEP,
    OCCUPIED,
    OVERLAP,
    ROW_GROUPS,
    WARP_COUNTS,
)
from flashgen.planner.models.kernel_model import (
    ATOMICS,
    BUSIEST,
    BUSIEST_FUSED,
    ISSUE,
    KEY_KERNELS,
    LEARNED_KERNELS,
    MMA_ROWS,
    REGISTER_LIMIT,
    KernelModel,
)

ROW_BYTES = 8  # LSE and delta of a query, as a float2

# Barriers per step: before its tiles are read, and after dO (in dq: V) has been read. Where warps
# share scores there is one more, between the writes and the reads of P and dS.
SYNCS = 2

# Pairs (column_warps, score_warps). Where each warp computes all scores, the cost is higher, but
# neither tiles for P and dS nor a second group of queries are needed: this serves head dims whose
# smallest tile just fits.
SHARING_KEYS = ((1, 1), (2, 2), (4, 4), (2, 1), (4, 1))
SHARING_FUSED = ((1, 1), (2, 2), (4, 4))
SHARING_QUERIES = ((1, 1), (2, 1))


def dq_row_warps(block_q: int, warps: int, d_qk: int) -> int:
    """The number of warps of "fused" that divide the row groups of a dQ tile; others share columns.

    The division that computes the fewest columns beyond d_qk; among equals, the one that reads the
    fewest elements of K and dS from shared memory.
    """

    def work(rows: int) -> tuple[float, float, int]:
        columns = 16 * math.ceil(d_qk * rows / (16 * warps))
        return columns / rows, columns / block_q + 1 / rows, rows

    most = math.gcd(block_q // MMA_ROWS, warps)
    return min((rows for rows in range(1, most + 1) if most % rows == 0), key=work)


# ---- what a tile needs ---------------------------------------------------------------------------

COLUMNS = Formula("columns", "16*(ceil(d_qk/(16*column_warps)) + ceil(d_v/(16*column_warps)))")
COLUMNS_OF_DQ = Formula("columns", "16*ceil(d_qk/(16*column_warps))")
NO_COLUMNS = Formula("columns", "0")  # of the kernels for learned tensors
DQ_COLUMNS = Formula("dq_columns", "16*ceil(d_qk*dq_row_warps/(16*warps))")


def _smem(owned: str, walked: str, twice: str, rows: str, tiles: str) -> tuple[Formula, Formula]:
    """Shared memory of a block, and the same solved for the walked block size.

    Args:
        twice: head dim of the walked operand that has two buffers.
        rows: further bytes per walked row.
        tiles: further elements per walked row, of the tiles of P and dS.
    """
    per_row = f"e*(d_qk + d_v + {twice}{tiles})" + rows
    mine = f"e*{owned}*(d_qk + d_v)"
    return (
        Formula("smem", f"{mine} + {walked}*({per_row})", "B"),
        Formula(walked, f"(min(M, M_sm/blocks - reserved) - {mine})/({per_row})"),
    )


_ROWS = f" + {2 * ROW_BYTES}"
SMEM_DKDV, BLOCK_Q_BY_SMEM = _smem("block_k", "block_q", "d_qk", _ROWS, " + exchanged*block_k")
SMEM_FUSED, BLOCK_Q_BY_SMEM_FUSED = _smem(
    "block_k", "block_q", "d_qk", _ROWS, " + max(1, exchanged)*block_k"
)
SMEM_DQ, BLOCK_K_BY_SMEM_DQ = _smem("block_q", "block_k", "d_qk", "", "")

# ---- what it costs: clocks per score element of one SM with its resident blocks ------------------

# Scores and dP are recomputed for every product that needs them. The columns of the gradients are
# padded where the warps cannot divide them evenly.
_MACS = "(d_qk + d_v)*repeats + column_warps*columns"
MACS = Formula("macs", _MACS)
MACS_FUSED = Formula("macs", f"{_MACS} + warps*dq_columns/dq_row_warps")

# A operands: each warp reads the rows that it owns once per step. B operands: each warp reads the
# rows of the step, for its own 16 * row_groups rows. P and dS: written once, read by each warp that
# shares them.
_READS = (
    "e*column_warps*((d_qk + d_v)/{walked} + ((d_qk + d_v)/score_warps + columns)/(16*row_groups))"
)
_READS_DKDV = _READS.format(walked="block_q") + " + e*exchanged*column_warps"
READS_DKDV = Formula("reads", _READS_DKDV, "B")
READS_FUSED = Formula(
    "reads", f"{_READS_DKDV} + e*warps*(dq_columns/block_q + 1/dq_row_warps)", "B"
)
READS_DQ = Formula("reads", _READS.format(walked="block_k"), "B")

TENSOR = Formula("tensor", "factors*macs/tensor_rate", "clk")
SPECIAL = Formula("special", f"repeats/{SPECIAL_PER_CLOCK}", "clk")
BARRIERS = Formula("barriers", f"syncs*{fitted.BARRIER_CLOCKS}/(block_q*block_k*blocks)", "clk")

# mma.sync and ldmatrix of 16-bit operands; six products of tf32 parts for float32.
PRODUCTS = {
    2: Formula("products", "macs/64 + reads/16"),
    4: Formula("products", f"6*macs/32 + {fitted.BACKWARD_SPLIT_INSTRUCTIONS}*reads/4"),
}


def _cost_steps(itemsize: int, macs: Formula, reads: Formula, tiles: str) -> tuple[Formula, ...]:
    """The steps to the cost of one kernel.

    Args:
        tiles: of P and dS that warps write to shared memory; "" in dq.
    """
    fused, by_keys = macs is MACS_FUSED, bool(tiles)
    owned, walked = ("block_k", "block_q") if by_keys else ("block_q", "block_k")
    per_score = fitted.BY_KEYS_INSTRUCTIONS if by_keys else fitted.BY_QUERIES_INSTRUCTIONS
    per_step = fitted.BY_KEYS_STEP_INSTRUCTIONS if by_keys else fitted.BY_QUERIES_STEP_INSTRUCTIONS
    share = f"column_warps/(row_groups*{walked})"  # the scores of a warp share these of each step
    rest = (
        f"repeats*({per_score[itemsize]} + score_ops + dropout_ops)"
        f" + {per_step}*{share} + e*(d_qk + d_v)/(access*{owned})"
    )
    rest += f" + {tiles}*(1 + {fitted.EXCHANGED_TILE_INSTRUCTIONS}*{share})" if tiles else ""
    rest += f" + {fitted.ATOMIC_INSTRUCTIONS}*d_qk/block_k" if fused else ""
    stored = f" + e*{tiles}" if tiles else ""
    return (
        macs,
        reads,
        PRODUCTS[itemsize],
        Formula("rest", rest),
        TENSOR,
        Formula(
            "shared", f"(reads + e*(d_qk + d_v)/{owned}{stored})/{SMEM_BYTES_PER_CLOCK}", "clk"
        ),
        Formula("l2", f"e*(d_qk + d_v)/{owned}/l2_rate", "clk"),
        *((ATOMICS,) if fused else ()),
        SPECIAL,
        ISSUE,
        BUSIEST_FUSED if fused else BUSIEST,
        ALONE,
        OVERLAP,
        OCCUPIED,
        BARRIERS,
        COST,
    )


def _kernel(
    name: str,
    itemsize: int,
    smem: tuple[Formula, Formula],
    sizes: tuple[Formula, ...],
    registers_of_step: str,
    cost_steps: tuple[Formula, ...],
    sharing: tuple[tuple[int, int], ...],
) -> KernelModel:
    """The model of one kernel.

    Args:
        smem: shared memory, and the same solved for the walked block size.
        sizes: the formula of "columns" first.
        registers_of_step: registers for each row of a step.
    """
    by_keys = name in KEY_KERNELS
    walked = "block_q" if by_keys else "block_k"
    constant, per_row_group = fitted.BACKWARD_REGISTERS[
        "captured" if name in LEARNED_KERNELS else name, itemsize
    ]
    own = f"{constant} + {per_row_group}*row_groups" if per_row_group else str(constant)
    own += " + extra"
    if name not in LEARNED_KERNELS:
        own += " + row_groups*columns/2"
    of_step = registers_of_step
    divisor = of_step if of_step.startswith("max(") else f"({of_step})"
    return KernelModel(
        name=name,
        owns="block_k" if by_keys else "block_q",
        sizes=sizes,
        smem=smem[0],
        smem_bound=smem[1],
        registers=Formula("registers", f"{own} + {walked}*{of_step}"),
        register_bound=Formula(walked, f"(register_limit - ({own}))/{divisor}"),
        cost_steps=cost_steps,
        register_limit=REGISTER_LIMIT,
        sharing=sharing,
        stages=1,
        warp_counts=WARP_COUNTS,
        row_groups=ROW_GROUPS,
        max_step=MAX_STEP,
        other_warps=0,
        copies_rows=True,
    )


def _models(itemsize: int) -> Iterator[KernelModel]:
    """The backward kernels for operands of this number of bytes per element."""
    by_keys, by_queries = "row_groups*(1 + pending)/score_warps", "row_groups*(1 + pending)"
    yield _kernel(
        "dkdv",
        itemsize,
        (SMEM_DKDV, BLOCK_Q_BY_SMEM),
        (COLUMNS,),
        by_keys,
        _cost_steps(itemsize, MACS, READS_DKDV, "exchanged"),
        SHARING_KEYS,
    )
    # The tile dS K is summed when S^T and dP^T are no longer needed.
    dq_tile = f"({fitted.FUSED_DQ_REGISTERS[itemsize]})/({WARP}*dq_row_warps)"
    yield _kernel(
        "fused",
        itemsize,
        (SMEM_FUSED, BLOCK_Q_BY_SMEM_FUSED),
        (COLUMNS, DQ_COLUMNS),
        f"max({by_keys}, {dq_tile})",
        _cost_steps(itemsize, MACS_FUSED, READS_FUSED, "max(1, exchanged)"),
        SHARING_FUSED,
    )
    smem_dq, cost_dq = (SMEM_DQ, BLOCK_K_BY_SMEM_DQ), _cost_steps(itemsize, MACS, READS_DQ, "")
    yield _kernel("dq", itemsize, smem_dq, (COLUMNS_OF_DQ,), by_queries, cost_dq, SHARING_QUERIES)
    for name in LEARNED_KERNELS:
        yield _kernel(name, itemsize, smem_dq, (NO_COLUMNS,), by_queries, cost_dq, ((1, 1),))


MODELS = {(model.name, itemsize): model for itemsize in (2, 4) for model in _models(itemsize)}
