"""The cost models of the backward kernels on the sm_90a path: TMA and wgmma.

Algorithm 4 of FlashAttention with the warp roles of FlashAttention-3 (Shah et al., 2024, appendix
B.2): one producer warpgroup copies, two consumer warpgroups compute, 64 rows of a product each.

dkdv and fused: a thread block owns ``block_k`` keys, whose K and V stay in shared memory, and walks
the query tiles of ``block_q`` rows. Scores are computed transposed, so that P^T and dS^T are used
as operands directly from registers. Either each warpgroup owns 64 of 128 keys with all columns of
dK and dV (column_warps 1), or both own the same 64 keys (column_warps 2): then each computes the
scores of half of the queries and half of the columns of dK and dV, and P and dS pass through shared
memory. fused also computes dQ^T = K^T dS^T of each step, in blocks of 64 columns of dQ, and adds it
in global memory.

dq: a block owns 128 queries and walks the keys in steps of ``block_k``.

captured and captured_exact: the loop of dq without the product for dQ. They sum the gradients of
learned tensors.

Buffers: Q and dO (in dq, captured and captured_exact: K and V) have two each where they fit, else
one.
"""

from __future__ import annotations

from flashgen.arch import SCHEDULERS, SMEM_BYTES_PER_CLOCK, WARP
from flashgen.planner.formulas import Formula
from flashgen.planner.models import fitted_sm90 as fitted
from flashgen.planner.models.forward_sm90 import (
    BUSY,
    CONSUMER,
    DEPTH,
    DEPTH_V,
    LAUNCHED,
    PRODUCER,
    PRODUCER_WARPS,
)
from flashgen.planner.models.kernel_model import (
    ATOMICS,
    BUSIEST,
    BUSIEST_FUSED,
    ISSUE,
    KEY_KERNELS,
    LEARNED_KERNELS,
    SPECIAL,
    KernelModel,
)
from flashgen.planner.models.panels_sm90 import DEPTH_STEP, GROUP_ROWS

QUERY_KERNELS = ("dq", *LEARNED_KERNELS)
WARPS = 8  # consumer warps: two warpgroups
MAX_STEP = 128
SCORE_BUFFERS = 2  # of dS, and of P: one is read while the other is written
TILE_BYTES = 16  # per stage: the step's tile number, which the producer passes on
ALIGNED = 1024  # bytes: alignment of a swizzle pattern of 128 bytes
# Producer warps that search for the tiles of the walk, and those of them that evaluate whether a
# tile is full. Where a block owns keys, two of the three load LSE and delta and pass on the tile.
WALKING_WARPS = dict.fromkeys(KEY_KERNELS, (3, 2)) | dict.fromkeys(QUERY_KERNELS, (1, 1))

# ---- what a tile needs ---------------------------------------------------------------------------

KEYS_DEPTH = Formula("depth", f"{GROUP_ROWS}*ceil(d_qk/{GROUP_ROWS})")
KEYS_DEPTH_V = Formula(
    "depth_v", f"{DEPTH_STEP}*column_warps*ceil(d_v/({DEPTH_STEP}*column_warps))"
)
# Columns of dK and dV of a warpgroup: all of them for its own keys, or half of them, padded so that
# they can be halved.
COLUMNS = Formula(
    "columns", "(2 - column_warps)*(d_qk + d_v) + (column_warps - 1)*(depth + depth_v)/2"
)
COLUMNS_OF_DQ = Formula("columns", "d_qk")
NO_COLUMNS = Formula("columns", "0")  # of the kernels for learned tensors
DQ_COLUMNS = Formula("dq_columns", "depth")
# The warpgroups divide the blocks of 64 columns of dQ where their number is even, else its queries.
DQ_GROUPS = Formula("dq_groups", f"1 + depth/{GROUP_ROWS} - 2*floor(depth/{2 * GROUP_ROWS})")

# In the order of the formulas below: K and V, or Q and dO, which the block owns; the stages of the
# other two; exchanged tiles of P and dS, and the outgoing dQ tile; per stage LSE, delta and the
# step's tile number; barriers.
_BARRIERS = "8*(1 + 4*stages)"
_OWNED = "e*block_k*(depth + depth_v)"
_ROWS = f"stages*(query_bytes*block_q + {TILE_BYTES})"


def _smem(scores: str, sums: str) -> tuple[Formula, Formula, Formula]:
    """Stages, shared memory of a block that owns keys, and the same solved for the step.

    Args:
        scores: number of tiles of P and dS, which have two buffers each.
        sums: bytes of dQ per query.
    """
    kept = f"{SCORE_BUFFERS}*e*{scores}*block_k{sums}"
    stages = Formula(
        "stages",
        f"max(1, min(2, floor((min(M, M_sm/blocks - reserved) - 8 - {_OWNED} - block_q*({kept}))"
        f"/(block_q*(e*(depth + depth_v) + query_bytes) + {TILE_BYTES} + 32))))",
    )
    smem = Formula(
        "smem",
        f"{_OWNED} + {ALIGNED}*ceil(stages*block_q*e*depth_v/{ALIGNED})"
        f" + block_q*(stages*e*depth + {kept}) + {_ROWS} + {_BARRIERS}",
        "B",
    )
    bound = Formula(
        "block_q",
        f"(min(M, M_sm/blocks - reserved) - {_OWNED} - {TILE_BYTES}*stages - {_BARRIERS})"
        f"/(stages*(e*(depth + depth_v) + query_bytes) + {kept})",
    )
    return stages, smem, bound


STAGES_DKDV, SMEM_DKDV, BLOCK_Q_BY_SMEM = _smem("exchanged", "")
STAGES_FUSED, SMEM_FUSED, BLOCK_Q_BY_SMEM_FUSED = _smem("max(1, exchanged)", " + 4*depth")

_DQ_OWNED = "e*block_q*(depth + depth_v)"
STAGES_DQ = Formula(
    "stages",
    f"max(1, min(2, floor((min(M, M_sm/blocks - reserved) - 8 - {_DQ_OWNED})"
    f"/(block_k*e*(depth + depth_v) + {TILE_BYTES} + 32))))",
)
SMEM_DQ = Formula(
    "smem",
    f"{_DQ_OWNED} + stages*(block_k*e*(depth + depth_v) + {TILE_BYTES}) + {_BARRIERS}",
    "B",
)
BLOCK_K_BY_SMEM = Formula(
    "block_k",
    f"(min(M, M_sm/blocks - reserved) - {_DQ_OWNED} - {TILE_BYTES}*stages - {_BARRIERS})"
    "/(stages*e*(depth + depth_v))",
)

# Accumulators of the gradients and addresses; then S and dP of the step, with the values that are
# pending while they are rounded.
_OWN = (
    f"{fitted.BACKWARD_REGISTERS} + max(0, columns - {fitted.WIDE_COLUMNS})"
    f"/{fitted.WIDE_COLUMNS_PER_REGISTER} + extra + columns/2"
)
_SCORES = "(1 + pending)/score_warps"
REGISTERS = Formula("registers", f"{_OWN} + block_q*{_SCORES}")
BLOCK_Q_BY_REGISTERS = Formula("block_q", f"(register_limit - ({_OWN}))/({_SCORES})")
REGISTERS_DQ = Formula("registers", f"{_OWN} + block_k*(1 + pending)")
BLOCK_K_BY_REGISTERS = Formula("block_k", f"(register_limit - ({_OWN}))/(1 + pending)")
_OWN_OF_LEARNED = f"{fitted.LEARNED_REGISTERS} + extra"
REGISTERS_LEARNED = Formula("registers", f"{_OWN_OF_LEARNED} + block_k*(1 + pending)")
BLOCK_K_BY_REGISTERS_LEARNED = Formula(
    "block_k", f"(register_limit - ({_OWN_OF_LEARNED}))/(1 + pending)"
)

# ---- what it costs: clocks per score element of one SM with its resident blocks ------------------

# The depth of S and dP is padded to multiples of 16; the columns of dQ to multiples of 64.
_SCORES_DEPTH = f"{DEPTH_STEP}*ceil(d_qk/{DEPTH_STEP}) + {DEPTH_STEP}*ceil(d_v/{DEPTH_STEP})"
MACS = Formula("macs", f"{_SCORES_DEPTH} + column_warps*columns")
MACS_FUSED = Formula("macs", f"{_SCORES_DEPTH} + column_warps*columns + dq_columns")

# For a product with both operands in shared memory, a warpgroup reads its 64 rows of A, and B once
# for them. In the order of the terms: S and dP; dV and dK; P and dS, where they are exchanged; dQ.
_READS = (
    f"e*((depth + depth_v)*(score_warps/block_q + 1/{GROUP_ROWS})"
    f" + column_warps*columns/{GROUP_ROWS} + 2*exchanged)"
)
READS_DKDV = Formula("reads", _READS, "B")
READS_FUSED = Formula("reads", f"{_READS} + e*dq_columns*(dq_groups/block_q + 1/{GROUP_ROWS})", "B")
READS_DQ = Formula(
    "reads", f"e*((depth + depth_v)*(1/block_k + 1/{GROUP_ROWS}) + columns/{GROUP_ROWS})", "B"
)


def _shared(owned: str, stored: str) -> Formula:
    """The reads, what TMA writes, and ``stored`` bytes of P, dS and dQ."""
    return Formula(
        "shared", f"(reads + e*(depth + depth_v)/{owned}{stored})/{SMEM_BYTES_PER_CLOCK}", "clk"
    )


SHARED_DKDV = _shared("block_k", " + e*exchanged")
SHARED_FUSED = _shared("block_k", " + e*max(1, exchanged) + 8*dq_columns/block_k")
SHARED_DQ = _shared("block_q", "")
TENSOR = Formula("tensor", "macs/tensor_rate", "clk")
# A warpgroup alone waits for its products, then computes P and dS; TMA is ahead of both.
ALONE = Formula("alone", f"max(tensor, shared) + special + rest/{SCHEDULERS * WARP}", "clk")
# The products of one warpgroup overlap the arithmetic of the other half of the time: in each step
# both wait for the tiles that they exchange or share.
OVERLAP = Formula("overlap", "blocks*(warps + 4)/8")
# Buffers that are handed over in a step.
HANDOVERS = {"dkdv": 3, "fused": 3, "dq": 3} | dict.fromkeys(LEARNED_KERNELS, 2)
COST = Formula("cost", "busiest + (alone - busiest)/max(1, overlap) + barriers + waits", "clk")


def _cost_steps(kernel: str) -> tuple[Formula, ...]:
    """The formulas of the cost of one kernel."""
    by_keys, fused = kernel in KEY_KERNELS, kernel == "fused"
    owned, walked = ("block_k", "block_q") if by_keys else ("block_q", "block_k")
    per_score = fitted.BY_KEYS_INSTRUCTIONS if by_keys else fitted.BY_QUERIES_INSTRUCTIONS
    rest = f"{per_score} + score_ops + dropout_ops"
    rest += " + exchanged/2" if by_keys else ""  # a store of 16 bits each for P and dS
    rest += " + 1/2 + dq_columns/block_k" if fused else ""  # the same for dS, and sums of dQ
    per_step = fitted.BACKWARD_STEP_INSTRUCTIONS
    per_wgmma = fitted.BACKWARD_WGMMA_INSTRUCTIONS
    # With one buffer, a step waits for its Q (where a block owns queries: for its K) to arrive.
    clocks = f"{HANDOVERS[kernel]}*{fitted.HANDOVER_CLOCKS}"
    clocks += f" + (2 - stages)*{fitted.COPY_LATENCY_CLOCKS}"
    return (
        MACS_FUSED if fused else MACS,
        {"dkdv": READS_DKDV, "fused": READS_FUSED}.get(kernel, READS_DQ),
        # A step has walked*64/score_warps scores of a warpgroup, that is walked/2/score_warps of
        # each of its 128 threads.
        Formula(
            "products",
            f"({per_step} + {per_wgmma}*macs/{DEPTH_STEP})*score_warps/({walked}/2)",
        ),
        Formula("rest", rest),
        TENSOR,
        {"dkdv": SHARED_DKDV, "fused": SHARED_FUSED}.get(kernel, SHARED_DQ),
        Formula("l2", f"e*(d_qk + d_v)/{owned}/l2_rate", "clk"),
        *((ATOMICS,) if fused else ()),
        SPECIAL,
        ISSUE,
        BUSIEST_FUSED if fused else BUSIEST,
        ALONE,
        OVERLAP,
        Formula("barriers", f"({clocks})/(block_q*block_k*blocks)", "clk"),
        Formula("waits", f"(2 - stages)*e*d_qk/{owned}/l2_rate", "clk"),
        COST,
        BUSY,
    )


def _kernel(
    name: str,
    sizes: tuple[Formula, ...],
    smem: tuple[Formula, Formula],
    registers: tuple[Formula, Formula],
    sharing: tuple[tuple[int, int], ...] = ((1, 1),),
) -> KernelModel:
    """The model of one kernel; shared memory and registers each with the bound solved from it."""
    return KernelModel(
        name=name,
        owns="block_k" if name in KEY_KERNELS else "block_q",
        sizes=(*sizes, LAUNCHED, PRODUCER),
        smem=smem[0],
        smem_bound=smem[1],
        registers=registers[0],
        register_bound=registers[1],
        cost_steps=_cost_steps(name),
        register_limit=CONSUMER,
        sharing=sharing,
        stages=2,
        warp_counts=(WARPS,),
        row_groups=(1,),
        max_step=MAX_STEP,
        other_warps=PRODUCER_WARPS,
        copies_rows=False,
    )


_BY_KEYS = (KEYS_DEPTH, KEYS_DEPTH_V, COLUMNS)
_DKDV = (*_BY_KEYS, STAGES_DKDV)
_FUSED = (*_BY_KEYS, DQ_COLUMNS, DQ_GROUPS, STAGES_FUSED)
_DQ = (DEPTH, DEPTH_V, COLUMNS_OF_DQ, STAGES_DQ)
_LEARNED = (DEPTH, DEPTH_V, NO_COLUMNS, STAGES_DQ)
_REGISTERS = (REGISTERS, BLOCK_Q_BY_REGISTERS)
_REGISTERS_LEARNED = (REGISTERS_LEARNED, BLOCK_K_BY_REGISTERS_LEARNED)
_SMEM_FUSED, _SMEM_DQ = (SMEM_FUSED, BLOCK_Q_BY_SMEM_FUSED), (SMEM_DQ, BLOCK_K_BY_SMEM)
_SHARING = ((1, 1), (2, 2))

MODELS = {
    (model.name, 2): model
    for model in (
        _kernel("dkdv", _DKDV, (SMEM_DKDV, BLOCK_Q_BY_SMEM), _REGISTERS, _SHARING),
        _kernel("fused", _FUSED, _SMEM_FUSED, _REGISTERS, _SHARING),
        _kernel("dq", _DQ, _SMEM_DQ, (REGISTERS_DQ, BLOCK_K_BY_REGISTERS)),
        *(_kernel(name, _LEARNED, _SMEM_DQ, _REGISTERS_LEARNED) for name in LEARNED_KERNELS),
    )
}
