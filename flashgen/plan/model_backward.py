"""What a tile of a backward kernel needs and what it costs, as formulas.

Algorithm 4 of FlashAttention (Dao et al., 2022), with the scores recomputed from Q, K and LSE.

dkdv and fused: a block owns ``block_k`` keys, whose K and V stay in shared memory, and walks the
query tiles of ``block_q`` rows, for every query head that shares these keys. Q has two buffers,
since it is used first and last in a step; dO has one; LSE and delta of the rows (8 bytes) have two.
Each warp owns 16 * row_groups keys, and a share of the columns of dK and dV, which stay in
registers with S^T and dP^T. Warps that own the same keys either share the scores, each computing
those of some queries and passing P and dS through shared memory, or compute them all (score_warps
1), and then P^T and dS^T are operands where they lie. fused also adds the tile dS K to dQ in global
memory: dS passes through shared memory, and all warps share the tile's rows and columns.

dq: a block owns ``block_q`` queries, whose Q and dO stay in shared memory, and walks the keys in
steps of ``block_k``. K has two buffers, V one. Warps that own the same queries each compute all
their scores and have a share of the columns of dQ.

captured: the loop of dq, without the product for dQ: it adds up the gradients of learned tensors.

The number of buffers is part of each kernel: ``stages`` means nothing here. The results are staged
over what the block owns, and need no more space than that.
"""

from __future__ import annotations

import math

from flashgen.arch import SCHEDULERS, SMEM_BYTES_PER_CLOCK, SPECIAL_PER_CLOCK, WARP
from flashgen.plan.formulas import Formula
from flashgen.plan.model import COST, ISSUE, MMA_ROWS, OCCUPIED, OVERLAP, KernelModel

ROW_BYTES = 8  # LSE and delta of a query, as a float2

# Barriers per step: before its tiles are read, and after dO (in dq: V) has been. Where warps share
# scores there is one more, between writing and reading P and dS.
SYNCS = 2

# Pairs (column_warps, score_warps). Computing all scores in each warp costs more, but needs neither
# tiles for P and dS nor queries for two: it is for head dims whose smallest tile just fits.
SHARING_KEYS = ((1, 1), (2, 2), (4, 4), (2, 1), (4, 1))
SHARING_FUSED = ((1, 1), (2, 2), (4, 4))
SHARING_QUERIES = ((1, 1), (2, 1))


def dq_row_warps(block_q: int, warps: int, d_qk: int) -> int:
    """Warps of "fused" among which the row groups of a dQ tile go evenly; others share columns.

    The split that computes the fewest columns beyond d_qk, and of those the one that reads the
    least of K and dS from shared memory.
    """

    def work(rows: int) -> tuple[float, float, int]:
        columns = 16 * math.ceil(d_qk * rows / (16 * warps))
        return columns / rows, columns / block_q + 1 / rows, rows

    most = math.gcd(block_q // MMA_ROWS, warps)
    return min((rows for rows in range(1, most + 1) if most % rows == 0), key=work)


# ---- what a tile needs ---------------------------------------------------------------------------

COLUMNS = Formula("columns", "16*(ceil(d_qk/(16*column_warps)) + ceil(d_v/(16*column_warps)))")
COLUMNS_OF_DQ = Formula("columns", "16*ceil(d_qk/(16*column_warps))")
DQ_COLUMNS = Formula("dq_columns", "16*ceil(d_qk*dq_row_warps/(16*warps))")


def _smem(owned: str, walked: str, twice: str, rows: str, tiles: str) -> tuple[Formula, Formula]:
    """Shared memory of a block, and that solved for the walked block size.

    Args:
        twice: head dim of the walked operand that has two buffers.
        rows: bytes per walked row besides those, tiles: of P and dS.
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

# Scores and dP are recomputed for every product that needs them; their columns are padded where
# they do not go evenly among the warps.
_MACS = "(d_qk + d_v)*repeats + column_warps*columns"
MACS = Formula("macs", _MACS)
MACS_FUSED = Formula("macs", f"{_MACS} + warps*dq_columns/dq_row_warps")

# A operands: each warp reads what it owns once per step. B operands: each warp reads the step's
# rows, for its 16 * row_groups own. P and dS: written once, read by each warp that shares them.
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
# Additions to dQ go on while the warps compute: they are a pace of their own, and no wait.
ATOMICS = Formula("atomics", "4*d_qk/block_k/atomic_rate", "clk")
BUSIEST = Formula("busiest", "max(tensor, shared, l2, special, issue)", "clk")
BUSIEST_FUSED = Formula("busiest", "max(tensor, shared, l2, atomics, special, issue)", "clk")
ALONE = Formula("alone", f"l2 + max(tensor, shared) + special + rest/{SCHEDULERS * WARP}", "clk")
BARRIERS = Formula("barriers", "syncs*300/(block_q*block_k*blocks)", "clk")

PRODUCTS = {
    2: Formula("products", "macs/64 + reads/16"),
    4: Formula("products", "6*macs/32 + 10.5*reads/4"),
}


def _cost_steps(itemsize: int, macs: Formula, reads: Formula, tiles: str) -> tuple[Formula, ...]:
    """The steps to the cost of one kernel.

    Args:
        tiles: of P and dS that warps write to shared memory; "" in dq.
    """
    fused, by_keys = macs is MACS_FUSED, bool(tiles)
    owned, walked = ("block_k", "block_q") if by_keys else ("block_q", "block_k")
    # Per score: exp2, the differences and products around it, and rounding or splitting of what
    # becomes an operand. Per step, so that a warp's scores share it: addresses, loads of LSE and
    # delta, barriers. Each tile of P or dS is addressed in each step, too.
    base = {(2, True): "5", (4, True): "32 - 10*exchanged", (2, False): "4.3", (4, False): "19.5"}
    share = f"column_warps/(row_groups*{walked})"
    rest = (
        f"repeats*({base[itemsize, by_keys]} + score_ops + dropout_ops)"
        f" + {170 if by_keys else 110}*{share} + e*(d_qk + d_v)/(access*{owned})"
    )
    rest += f" + {tiles}*(1 + 50*{share})" if tiles else ""
    rest += " + 2.5*d_qk/block_k" if fused else ""
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


def _own(fixed: str) -> str:
    """Registers that do not depend on the step: the gradients' sums, and ``fixed``."""
    return f"{fixed} + extra + row_groups*columns/2"


def _dkdv(itemsize: int, fixed: str) -> KernelModel:
    scores = "row_groups*(1 + pending)/score_warps"
    return KernelModel(
        name="dkdv",
        owns="block_k",
        sizes=(COLUMNS,),
        smem=SMEM_DKDV,
        smem_bound=BLOCK_Q_BY_SMEM,
        registers=Formula("registers", f"{_own(fixed)} + block_q*{scores}"),
        register_bound=Formula("block_q", f"(register_limit - ({_own(fixed)}))/({scores})"),
        cost_steps=_cost_steps(itemsize, MACS, READS_DKDV, "exchanged"),
        sharing=SHARING_KEYS,
    )


def _fused(itemsize: int, fixed: str, dq_columns: str) -> KernelModel:
    # The tile dS K is summed when S^T and dP^T are no longer needed.
    most = f"max(row_groups*(1 + pending)/score_warps, ({dq_columns})/({WARP}*dq_row_warps))"
    return KernelModel(
        name="fused",
        owns="block_k",
        sizes=(COLUMNS, DQ_COLUMNS),
        smem=SMEM_FUSED,
        smem_bound=BLOCK_Q_BY_SMEM_FUSED,
        registers=Formula("registers", f"{_own(fixed)} + block_q*{most}"),
        register_bound=Formula("block_q", f"(register_limit - ({_own(fixed)}))/{most}"),
        cost_steps=_cost_steps(itemsize, MACS_FUSED, READS_FUSED, "max(1, exchanged)"),
        sharing=SHARING_FUSED,
    )


def _dq(itemsize: int, fixed: str) -> KernelModel:
    scores = "row_groups*(1 + pending)"
    return KernelModel(
        name="dq",
        owns="block_q",
        sizes=(COLUMNS_OF_DQ,),
        smem=SMEM_DQ,
        smem_bound=BLOCK_K_BY_SMEM_DQ,
        registers=Formula("registers", f"{_own(fixed)} + block_k*{scores}"),
        register_bound=Formula("block_k", f"(register_limit - ({_own(fixed)}))/({scores})"),
        cost_steps=_cost_steps(itemsize, MACS, READS_DQ, ""),
        sharing=SHARING_QUERIES,
    )


def _captured(name: str, itemsize: int, fixed: str) -> KernelModel:
    own, scores = f"{fixed} + extra", "row_groups*(1 + pending)"
    return KernelModel(
        name=name,
        owns="block_q",
        sizes=(Formula("columns", "0"),),
        smem=SMEM_DQ,
        smem_bound=BLOCK_K_BY_SMEM_DQ,
        registers=Formula("registers", f"{own} + block_k*{scores}"),
        register_bound=Formula("block_k", f"(register_limit - ({own}))/({scores})"),
        cost_steps=_cost_steps(itemsize, MACS, READS_DQ, ""),
    )


OF_CAPTURED = ("captured", "captured_exact")
"""The kernels for gradients of learned tensors."""

MODELS = {
    ("dkdv", 2): _dkdv(2, "56"),
    ("dkdv", 4): _dkdv(4, "80"),
    ("fused", 2): _fused(2, "66", "dq_columns*9/8"),
    ("fused", 4): _fused(4, "80", "2*dq_columns + 24"),
    ("dq", 2): _dq(2, "52 + 4*row_groups"),
    ("dq", 4): _dq(4, "68 + 8*row_groups"),
    ("captured", 2): _captured("captured", 2, "60 + 4*row_groups"),
    ("captured", 4): _captured("captured", 4, "80 + 8*row_groups"),
    ("captured_exact", 2): _captured("captured_exact", 2, "60 + 4*row_groups"),
    ("captured_exact", 4): _captured("captured_exact", 4, "80 + 8*row_groups"),
}
