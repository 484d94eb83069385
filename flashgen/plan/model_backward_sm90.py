"""What a tile of a backward kernel needs and what it costs on the sm_90a path: TMA and wgmma.

Algorithm 4 of FlashAttention with the roles of FlashAttention-3 (Shah et al., 2024, appendix B.2):
one warpgroup copies, two compute, 64 rows of a product each.

dkdv and fused: a block owns ``block_k`` keys, whose K and V stay in shared memory, and walks the
query tiles of ``block_q`` rows. Scores are computed transposed, so that P^T and dS^T are operands
where they lie. Either each warpgroup owns 64 keys of 128 with all columns of dK and dV
(column_warps 1), or both own the same 64 keys: then each computes the scores of half of the
queries, and half of the columns of dK and dV, and P and dS pass through shared memory (column_warps
2). fused also makes dQ^T = K^T dS^T of each step, in blocks of 64 columns of dQ, and adds it in
global memory.

dq: a block owns 128 queries and walks the keys in steps of ``block_k``.

captured: the loop of dq, without the product for dQ: it adds up the gradients of learned tensors.

The buffers: Q and dO (in dq and captured: K and V) have two each where they fit, else one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashgen.arch import SCHEDULERS, SMEM_BYTES_PER_CLOCK, WARP
from flashgen.plan.formulas import Formula, Number
from flashgen.plan.model import ISSUE, SPECIAL, KernelModel
from flashgen.plan.model_backward import OF_CAPTURED
from flashgen.plan.model_sm90 import (
    BUSY,
    CONSUMER,
    DEPTH,
    DEPTH_STEP,
    DEPTH_V,
    GROUP_ROWS,
    LAUNCHED,
    PANELS,
    PRODUCER,
    PRODUCER_WARPS,
    panels_of,
)

if TYPE_CHECKING:
    from flashgen.plan.value import Plan

BY_QUERIES = ("dq", *OF_CAPTURED)  # the kernels whose blocks own queries
WARPS = 8  # that compute: two warpgroups
BUFFERS = 2  # of dS, and of P: one is read while the other is written
TILE_BYTES = 16  # which tile of the walk it is
# Warps that find the tiles of the walk, and those of them that ask whether a tile is full: where a
# block owns keys, two bring LSE and delta and tell the others.
WALKING_WARPS = {"dkdv": (3, 2), "fused": (3, 2), "dq": (1, 1)} | dict.fromkeys(OF_CAPTURED, (1, 1))
ALIGNED = 1024  # bytes: where a pattern of 128 bytes begins


def panels_of_keys(d_qk: int, d_v: int, column_warps: int) -> tuple[tuple[int, int], ...]:
    """Columns of a panel and panels, of Q and K, and of V and dO, where a block owns keys.

    dQ^T takes K in blocks of 64 columns. Where warpgroups share the columns, each takes whole
    panels.
    """
    dims = (
        GROUP_ROWS * -(-d_qk // GROUP_ROWS),
        DEPTH_STEP * column_warps * -(-d_v // (DEPTH_STEP * column_warps)),
    )
    found = []
    for dim in dims:
        width = next(width for width in PANELS if dim % (width * column_warps) == 0)
        found.append((width, dim // width))
    return tuple(found)


def panels_of_kernel(
    kernel: str, d_qk: int, d_v: int, column_warps: int
) -> tuple[tuple[int, int], ...]:
    """Columns of a panel and panels, of Q and K, and of V and dO, in a kernel of this path."""
    if kernel in ("dkdv", "fused"):
        return panels_of_keys(d_qk, d_v, column_warps)
    return panels_of(d_qk), panels_of(d_v)


def queries_of_sums(plan: Plan) -> int:
    """Of a tile of dQ, those whose sums a warpgroup adds side by side in "fused"."""
    blocks = -(-plan.head_dim // GROUP_ROWS)
    return plan.block_q // 2 if blocks % 2 else plan.block_q


# ---- what a tile needs ---------------------------------------------------------------------------

KEYS_DEPTH = Formula("depth", f"{GROUP_ROWS}*ceil(d_qk/{GROUP_ROWS})")
KEYS_DEPTH_V = Formula(
    "depth_v", f"{DEPTH_STEP}*column_warps*ceil(d_v/({DEPTH_STEP}*column_warps))"
)
# Of dK and dV in a warpgroup: all of its own keys, or half, padded with those that halves need.
COLUMNS = Formula(
    "columns", "(2 - column_warps)*(d_qk + d_v) + (column_warps - 1)*(depth + depth_v)/2"
)
COLUMNS_OF_DQ = Formula("columns", "d_qk")
NO_COLUMNS = Formula("columns", "0")  # of "captured"
DQ_COLUMNS = Formula("dq_columns", "depth")
# Its blocks of 64 columns are shared by the warpgroups where they can be divided by 2, else its
# queries are.
DQ_GROUPS = Formula("dq_groups", f"1 + depth/{GROUP_ROWS} - 2*floor(depth/{2 * GROUP_ROWS})")

# K and V, or Q and dO; a step of the others; what is exchanged, and dQ on its way out; then per
# buffer LSE, delta and the step's place in the walk, and barriers.
_BARRIERS = "8*(1 + 4*stages)"
_OWNED = "e*block_k*(depth + depth_v)"
_ROWS = f"stages*(query_bytes*block_q + {TILE_BYTES})"


def _smem(scores: str, sums: str) -> tuple[Formula, Formula, Formula]:
    """Buffers, shared memory of a block where it owns keys, and that solved for the step.

    Args:
        scores: tiles of P and dS that have two buffers; sums: bytes of dQ per query.
    """
    kept = f"{BUFFERS}*e*{scores}*block_k{sums}"
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

# The sums, and addresses; S and dP of the step, and what is on its way while they are rounded.
# Measured, as `registers_sm90` is.
_OWN = "20 + max(0, columns - 256)/10 + extra + columns/2"
_SCORES = "(1 + pending)/score_warps"
REGISTERS = Formula("registers", f"{_OWN} + block_q*{_SCORES}")
BLOCK_Q_BY_REGISTERS = Formula("block_q", f"(register_limit - ({_OWN}))/({_SCORES})")
REGISTERS_DQ = Formula("registers", f"{_OWN} + block_k*(1 + pending)")
BLOCK_K_BY_REGISTERS = Formula("block_k", f"(register_limit - ({_OWN}))/(1 + pending)")
_OWN_OF_CAPTURED = "46 + extra"
REGISTERS_CAPTURED = Formula("registers", f"{_OWN_OF_CAPTURED} + block_k*(1 + pending)")
BLOCK_K_BY_REGISTERS_CAPTURED = Formula(
    "block_k", f"(register_limit - ({_OWN_OF_CAPTURED}))/(1 + pending)"
)

# ---- what it costs: clocks per score element of one SM with its resident blocks ------------------

# The depth of S and dP goes in steps of 16; the columns of dQ in blocks of 64.
_SCORES_DEPTH = f"{DEPTH_STEP}*ceil(d_qk/{DEPTH_STEP}) + {DEPTH_STEP}*ceil(d_v/{DEPTH_STEP})"
MACS = Formula("macs", f"{_SCORES_DEPTH} + column_warps*columns")
MACS_FUSED = Formula("macs", f"{_SCORES_DEPTH} + column_warps*columns + dq_columns")

# Of a product that both operands of come from shared memory, a warpgroup reads its 64 rows of A,
# and B for them. S and dP; dV and dK, with P and dS only where they are exchanged; dQ.
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
    """Besides reads: what TMA writes, and ``stored`` bytes of P, dS and dQ."""
    return Formula(
        "shared", f"(reads + e*(depth + depth_v)/{owned}{stored})/{SMEM_BYTES_PER_CLOCK}", "clk"
    )


SHARED_DKDV = _shared("block_k", " + e*exchanged")
SHARED_FUSED = _shared("block_k", " + e*max(1, exchanged) + 8*dq_columns/block_k")
SHARED_DQ = _shared("block_q", "")
TENSOR = Formula("tensor", "macs/tensor_rate", "clk")
ATOMICS = Formula("atomics", "4*d_qk/block_k/atomic_rate", "clk")
BUSIEST = Formula("busiest", "max(tensor, shared, l2, special, issue)", "clk")
BUSIEST_FUSED = Formula("busiest", "max(tensor, shared, l2, atomics, special, issue)", "clk")
# A warpgroup alone waits for its products, then computes P and dS; TMA is ahead of both.
ALONE = Formula("alone", f"max(tensor, shared) + special + rest/{SCHEDULERS * WARP}", "clk")
# Products of the one warpgroup go on behind the arithmetic of the other, half of the time: they
# meet in each step, at what they exchange or wait for together.
OVERLAP = Formula("overlap", "blocks*(warps + 4)/8")
# At each of so many hand-overs a step the products stand still for about 150 clocks. With one
# buffer a step also waits until its Q (where a block owns queries: K) has come, after 600 clocks on
# the way.
HAND_OVERS = {"dkdv": 3, "fused": 3, "dq": 3} | dict.fromkeys(OF_CAPTURED, 2)
COST = Formula("cost", "busiest + (alone - busiest)/max(1, overlap) + barriers + waits", "clk")


def _cost_steps(kernel: str) -> tuple[Formula, ...]:
    """The steps to the cost, instructions counted in the machine code of compiled kernels."""
    by_keys, fused = kernel not in BY_QUERIES, kernel == "fused"
    owned, walked = ("block_k", "block_q") if by_keys else ("block_q", "block_k")
    # Per score an exponential, a difference or a sum's beginning, two products, two roundings.
    rest = f"{4.5 if by_keys else 4.8} + score_ops + dropout_ops"
    rest += " + exchanged/2" if by_keys else ""
    rest += " + 1/2 + dq_columns/block_k" if fused else ""
    return (
        MACS_FUSED if fused else MACS,
        {"dkdv": READS_DKDV, "fused": READS_FUSED}.get(kernel, READS_DQ),
        # Per thread and step, which has walked*64*score_warps/128 scores of each of them.
        Formula("products", f"(60 + 3*macs/{DEPTH_STEP})*score_warps/({walked}/2)"),
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
        Formula(
            "barriers",
            f"({HAND_OVERS[kernel]}*150 + (2 - stages)*600)/(block_q*block_k*blocks)",
            "clk",
        ),
        Formula("waits", f"(2 - stages)*e*d_qk/{owned}/l2_rate", "clk"),
        COST,
        BUSY,
    )


def _kernel(
    name: str,
    owns: str,
    sizes: tuple[Formula, ...],
    smem: tuple[Formula, Formula],
    registers: tuple[Formula, Formula],
    sharing: tuple[tuple[int, int], ...],
) -> KernelModel:
    return KernelModel(
        name=name,
        owns=owns,
        sizes=(*sizes, LAUNCHED, PRODUCER),
        smem=smem[0],
        smem_bound=smem[1],
        registers=registers[0],
        register_bound=registers[1],
        register_limit=CONSUMER,
        cost_steps=_cost_steps(name),
        sharing=sharing,
        stages=2,
        warp_counts=(WARPS,),
        other_warps=PRODUCER_WARPS,
        row_groups=(1,),
        copies_rows=False,
    )


_BY_KEYS = (KEYS_DEPTH, KEYS_DEPTH_V, COLUMNS)
_REGISTERS = (REGISTERS, BLOCK_Q_BY_REGISTERS)
MODELS = {
    ("dkdv", 2): _kernel(
        "dkdv",
        "block_k",
        (*_BY_KEYS, STAGES_DKDV),
        (SMEM_DKDV, BLOCK_Q_BY_SMEM),
        _REGISTERS,
        ((1, 1), (2, 2)),
    ),
    ("fused", 2): _kernel(
        "fused",
        "block_k",
        (*_BY_KEYS, DQ_COLUMNS, DQ_GROUPS, STAGES_FUSED),
        (SMEM_FUSED, BLOCK_Q_BY_SMEM_FUSED),
        _REGISTERS,
        ((1, 1), (2, 2)),
    ),
    ("dq", 2): _kernel(
        "dq",
        "block_q",
        (DEPTH, DEPTH_V, COLUMNS_OF_DQ, STAGES_DQ),
        (SMEM_DQ, BLOCK_K_BY_SMEM),
        (REGISTERS_DQ, BLOCK_K_BY_REGISTERS),
        ((1, 1),),
    ),
    **{
        (name, 2): _kernel(
            name,
            "block_q",
            (DEPTH, DEPTH_V, NO_COLUMNS, STAGES_DQ),
            (SMEM_DQ, BLOCK_K_BY_SMEM),
            (REGISTERS_CAPTURED, BLOCK_K_BY_REGISTERS_CAPTURED),
            ((1, 1),),
        )
        for name in OF_CAPTURED
    },
}


def regions(kernel: str, at: Mapping[str, Number]) -> dict[str, int]:
    """Byte offsets of the tiles of a kernel; those that it does not have are not there.

    Args:
        at: sizes of the chosen tile, "smem" among them.
    """
    size = {name: int(value) for name, value in at.items() if isinstance(value, int)}
    e, stages, depth, depth_v = size["e"], size["stages"], size["depth"], size["depth_v"]
    block_q, block_k = size["block_q"], size["block_k"]
    queries, keys = e * block_q, e * block_k
    if kernel in BY_QUERIES:
        sizes = {
            "smem_q": queries * depth,
            "smem_do": queries * depth_v,
            "smem_k": stages * keys * depth,
            "smem_v": stages * keys * depth_v,
            "smem_rows": TILE_BYTES * stages,
        }
    else:
        exchanged = size["exchanged"]
        scores = BUFFERS * block_q * keys
        sizes = {
            "smem_k": keys * depth,
            "smem_v": keys * depth_v,
            "smem_q": stages * queries * depth,
            "smem_do": ALIGNED * -(-stages * queries * depth_v // ALIGNED),
            "smem_p": scores if exchanged else 0,
            "smem_ds": scores if exchanged or kernel == "fused" else 0,
            "smem_dq": 4 * block_q * depth if kernel == "fused" else 0,
            "smem_rows": stages * (block_q * size["query_bytes"] + TILE_BYTES),
        }
    found, end = {}, 0
    for name, bytes_ in sizes.items():
        if bytes_:
            found[name] = end
            end += bytes_
    assert end + 8 * (1 + 4 * stages) == at["smem"], "the regions are what the model counts"
    found.pop("smem_dq", None)  # it begins where dS ends
    return found
