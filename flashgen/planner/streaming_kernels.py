"""Plans of the kernels without a tile to search for: they read each byte once."""

from __future__ import annotations

from dataclasses import replace

from flashgen.arch import SMEM_RESERVED, WARP, Arch
from flashgen.dtypes import ITEMSIZE
from flashgen.language.spec import AttentionSpec
from flashgen.planner.derivation import line_of
from flashgen.planner.formulas import Formula, FormulaSequence
from flashgen.planner.kernel_plan import Plan
from flashgen.planner.models.kernel_model import REGISTER_LIMIT, SMEM_OF_SM
from flashgen.planner.quantities import Number, Quantities

# The delta kernel: each warp processes one row at a time. With this number of threads enough loads
# are in flight.
DELTA_WARPS = 4
DELTA_ROWS = 64
DELTA_BLOCKS = 8
DELTA_REGISTERS = 64  # enough to load several rows at once

# Read: O and dO, LSE and dLSE. Written: LSE and delta.
ROW_TRAFFIC = Formula("row_bytes", "2*e*d_v + 2*4 + 2*4", "B")
# With the gradient of a sink: its logit is read, and the sum of each warp's rows is written.
ROW_TRAFFIC_OF_SINK = Formula("row_bytes", "2*e*d_v + 2*4 + 2*4 + logit + 4*warps/block_q", "B")
DELTA_COST = Formula("cost", "row_bytes/hbm_rate", "clk")

# The kernel that converts the sums of dQ. Read: the sums, whole tiles of them. Written: dQ.
CONVERT_WARPS = 4
CONVERT_BLOCKS = 8
CONVERT_REGISTERS = 64
CONVERT_LOADS = 4
CONVERT_SMEM = Formula("smem", "e*block_q*d_qk", "B")  # a tile of dQ
CONVERT_TRAFFIC = Formula("row_bytes", "4*sum_columns + e*d_qk", "B")

# The kernel that merges partial results. Read: O and LSE of each part. Written: those of all.
MERGE_WARPS = 4
MERGE_WARPS_OF_SM = 24
MERGE_BLOCKS = 8  # at most
MERGED_AT_ONCE = 2  # parts whose vectors a lane loads together: one part joins an earlier result
MERGE_LOADS = 8  # vectors that a lane loads together, of several parts, where there are many
MERGE_REGISTERS = 80  # enough for these loads
# Of the results of split keys there are many parts and few rows, which then have a block each, and
# its groups of lanes share the parts. 256 lanes with 8 loads each have 32 KiB in flight, more than
# an SM can read from L2 in the time of one load: 35 B in each of 650 clocks are 22 KiB. With few
# lanes to a row, more groups would only lengthen the sum over the groups.
LANE_GROUPS = Formula("groups", "min(16, 8*32/lanes)")
GROUP_SMEM = Formula("smem", "groups*(4*d_v + 2*4)", "B")  # O, the largest LSE, the normaliser
PART_BYTES = 4  # an element of a part is a float32
PART_TRAFFIC = Formula("part_bytes", f"{PART_BYTES}*d_v + 4", "B")
MERGED_TRAFFIC = Formula("row_bytes", "e*d_v + 4", "B")
MERGE_COST = Formula("cost", "part_bytes/hbm_rate", "clk")

# The kernel that appends to a paged cache: a lane has a few vectors in flight.
APPEND_WARPS = 4
APPEND_BLOCKS = 8
APPEND_REGISTERS = 40
MOST_VECTORS_AT_ONCE = 128  # of a row, by the four loads of each of 32 lanes

# The kernel for min/max tables: a block makes the table of one line of the tensor.
MINMAX_WARPS = 8
MINMAX_BLOCKS = 4
MINMAX_REGISTERS = 48


def plan_delta(spec: AttentionSpec, arch: Arch, sums_tile: tuple[int, int] | None = None) -> Plan:
    """The plan of the kernel that computes rowsum(dO * O), which is bound by memory.

    Args:
        sums_tile: rows and columns of a tile of the sums of dQ, which the kernel fills with zeros;
            None where there are no sums. The kernel's text does not depend on it.
    """
    d_v = spec.head_dim_v or spec.head_dim
    vectors = ITEMSIZE[spec.dtype] * d_v // 16
    at: dict[str, Number] = {
        "e": ITEMSIZE[spec.dtype],
        "d_v": d_v,
        "R": arch.registers_per_sm,
        "warps": DELTA_WARPS,
        "blocks": DELTA_BLOCKS,
        "loads": 2 * 2 * -(-vectors // lanes_of_row(vectors)),  # of 2 rows of O and of dO
        "chained_loads": 1,
        "hbm_rate": arch.hbm_bytes_per_s / (arch.sms * arch.clock_hz),
    }
    row_traffic = ROW_TRAFFIC
    if spec.sink is not None and spec.sink.grad:
        at |= {"logit": ITEMSIZE[spec.sink.dtype], "block_q": DELTA_ROWS}
        row_traffic = ROW_TRAFFIC_OF_SINK
    formulas = (REGISTER_LIMIT, row_traffic, DELTA_COST)
    note = (
        f"{arch.name}: R {arch.registers_per_sm:,}; rates of {arch.product}; clk: clocks of "
        f"an SM per row. Bound by memory: each byte is moved once. The sums of dQ, where there are "
        f"any, are filled with zeros besides."
    )
    plan = _plan("delta", spec, arch, at, formulas, DELTA_REGISTERS, note)
    return replace(plan, block_q=DELTA_ROWS, sums_tile=sums_tile)


def plan_convert_dq(spec: AttentionSpec, arch: Arch, path: str, sums_tile: tuple[int, int]) -> Plan:
    """The plan of the kernel that makes dQ from its float32 sums, which is bound by memory.

    Args:
        path: the code path of the kernel that adds to the sums, which decides on their order.
        sums_tile: rows and columns of a tile of the sums.
    """
    block_q, columns = sums_tile
    at: dict[str, Number] = {
        "e": ITEMSIZE[spec.dtype],
        "d_qk": spec.head_dim,
        "block_q": block_q,
        "sum_columns": columns,
        "R": arch.registers_per_sm,
        "M_sm": arch.smem_per_sm,
        "reserved": SMEM_RESERVED,
        "warps": CONVERT_WARPS,
        "loads": CONVERT_LOADS,
        "chained_loads": 1,
        "hbm_rate": arch.hbm_bytes_per_s / (arch.sms * arch.clock_hz),
    }
    smem = CONVERT_SMEM(at)
    at["blocks"] = min(CONVERT_BLOCKS, int(arch.smem_per_sm // (smem + SMEM_RESERVED)))
    formulas = (CONVERT_SMEM, SMEM_OF_SM, REGISTER_LIMIT, CONVERT_TRAFFIC, DELTA_COST)
    note = (
        f"{arch.name}: M_sm {arch.smem_per_sm:,} B, R {arch.registers_per_sm:,}; rates of "
        f"{arch.product}; clk: clocks of an SM per row. Bound by memory: each byte is moved once."
    )
    plan = _plan("convert_dq", spec, arch, at, formulas, CONVERT_REGISTERS, note)
    return replace(
        plan, path=path, block_q=block_q, smem_bytes=int(at["smem"]), sums_tile=sums_tile
    )


def plan_merge(spec: AttentionSpec, arch: Arch, *, splits: bool = False) -> Plan:
    """The plan of the kernel that merges partial results into an output of the spec's dtype.

    Args:
        splits: whether the parts are those of split keys, many of few rows.
    """
    d_v = spec.head_dim_v or spec.head_dim
    vectors = PART_BYTES * d_v // 16
    lanes = lanes_of_row(vectors)
    at_once = MERGED_AT_ONCE
    if splits:  # a power of two, as the number of lanes is
        at_once = min(lanes, 1 << (MERGE_LOADS // -(-vectors // lanes)).bit_length() - 1)
    at: dict[str, Number] = {
        "e": ITEMSIZE[spec.dtype],
        "d_v": d_v,
        "R": arch.registers_per_sm,
        "lanes": lanes,
        "groups": 1,
        "loads": at_once * -(-vectors // lanes),
        "chained_loads": 2,  # of LSE, then of O
        "hbm_rate": arch.hbm_bytes_per_s / (arch.sms * arch.clock_hz),
    }
    if splits:
        at["groups"] = int(LANE_GROUPS(at))
    at["warps"] = int(at["groups"]) * lanes // WARP if splits else MERGE_WARPS
    at["blocks"] = min(MERGE_BLOCKS, MERGE_WARPS_OF_SM // int(at["warps"]))
    formulas: tuple[Formula, ...] = (REGISTER_LIMIT, PART_TRAFFIC, MERGED_TRAFFIC, MERGE_COST)
    note = (
        f"{arch.name}: R {arch.registers_per_sm:,}; rates of {arch.product}; clk: clocks of "
        f"an SM per row of a part. Bound by memory: each byte of a part with keys is read once."
    )
    if splits:
        formulas = (LANE_GROUPS, GROUP_SMEM, *formulas)
        note += " Groups of lanes share the parts of a row."
    plan = _plan("merge", spec, arch, at, formulas, MERGE_REGISTERS, note)
    if splits:
        return replace(plan, block_q=1, smem_bytes=int(at["smem"]))
    return replace(plan, block_q=plan.threads // lanes)


def plan_append_kv(spec: AttentionSpec, arch: Arch, access_bytes: int) -> Plan:
    """The plan of the kernel that copies new keys and values to the pages of a cache."""
    at: dict[str, Number] = {
        "R": arch.registers_per_sm,
        "warps": APPEND_WARPS,
        "blocks": APPEND_BLOCKS,
    }
    note = (
        f"{arch.name}: R {arch.registers_per_sm:,}. Bound by memory: each byte of a new row is "
        f"read once and written once. The call decides how many lanes share a row."
    )
    plan = _plan("append_kv", spec, arch, at, (REGISTER_LIMIT,), APPEND_REGISTERS, note)
    return replace(plan, access_bytes=access_bytes)


def lane_bits_of_append(vectors: int) -> int:
    """Logarithm to base 2 of the lanes that copy a row, given its length in vectors."""
    return lanes_of_row(min(vectors, MOST_VECTORS_AT_ONCE)).bit_length() - 1


def plan_minmax_table(spec: AttentionSpec, arch: Arch) -> Plan:
    """The plan of the kernel that makes a captured tensor's min/max table."""
    at: dict[str, Number] = {
        "R": arch.registers_per_sm,
        "warps": MINMAX_WARPS,
        "blocks": MINMAX_BLOCKS,
    }
    note = (
        f"{arch.name}: R {arch.registers_per_sm:,}. One block per line of the tensor. Bound by "
        f"memory: each element is read once, and each level of the table is made from the level "
        f"below."
    )
    return _plan("minmax_table", spec, arch, at, (REGISTER_LIMIT,), MINMAX_REGISTERS, note)


def _plan(
    kernel: str,
    spec: AttentionSpec,
    arch: Arch,
    at: dict[str, Number],
    formulas: tuple[Formula, ...],
    registers: int,
    note: str,
) -> Plan:
    FormulaSequence(*formulas)(at)
    return Plan(
        kernel=kernel,
        arch=arch.name,
        path="sm_80",
        policy="derived",
        dtype=spec.dtype,
        itemsize=ITEMSIZE[spec.dtype],
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v or spec.head_dim,
        block_q=0,
        block_k=0,
        warps=int(at["warps"]),
        registers=int(at["register_limit"]),
        registers_needed=registers,
        blocks_per_sm=int(at["blocks"]),
        cost=float(at.get("cost", 0.0)),
        sink_bytes=int(at.get("logit", 0)),
        derivation=tuple(line_of(formula, at) for formula in formulas),
        notes=(note,),
        quantities=Quantities(at),
    )


def lanes_of_row(vectors: int) -> int:
    """The number of lanes that read one row together, given its length in 16-byte vectors.

    With four lanes or more every access is a run of 64 bytes, and with at most four vectors per
    lane all loads of a row are in flight together. Among the numbers of lanes that satisfy both,
    the function chooses the one that leaves the fewest lanes without a vector, and the largest of
    several equally good ones.
    """
    choices = [n for n in (2, 4, 8, 16, 32) if min(vectors, 4) <= n and vectors <= 4 * n]
    return min(choices, key=lambda lanes: (-(-vectors // lanes) * lanes, -lanes))
