"""Plans of the kernels without a tile to search for: they read each byte once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.kernels.planner.derivation import line_of
from flashgen.kernels.planner.formulas import Formula, FormulaSequence
from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.models.kernel_model import REGISTER_LIMIT, SMEM_OF_SM
from flashgen.kernels.planner.quantities import Number, Quantities
from flashgen.shared.arch import SMEM_RESERVED, WARP, facts
from flashgen.shared.dtypes import ITEMSIZE
from flashgen.shared.launch_facts import CONVERT_KERNELS
from flashgen.shared.split_choice import MERGE_WARPS_OF_SM, PARTS_IN_FLIGHT, early_parts
from flashgen.spec.language.spec import AttentionSpec

# By kernel: warps, resident blocks and registers. "delta" processes a row by each warp at a time,
# and loads several rows at once; a lane of those that convert sums and of those that append has a
# few vectors in flight; a block of "minmax_table" makes the table of one line of the tensor; the
# registers of "merge" are enough for its loads.
SHAPES = {
    "delta": (4, 8, 64),
    **dict.fromkeys(CONVERT_KERNELS, (4, 8, 64)),
    "merge": (4, 6, 80),
    "append_kv": (4, 8, 40),
    "append_codes": (4, 8, 64),
    "add_rows": (4, 8, 64),
    "minmax_table": (8, 4, 48),
}
DELTA_ROWS = 64

# Read: O and dO, LSE and dLSE. Written: LSE and delta.
ROW_TRAFFIC = Formula("row_bytes", "2*e*d_v + 2*4 + 2*4", "B")
# Of weights that are not summed nothing is read, and zeros alone are written.
NO_ROW_TRAFFIC = Formula("row_bytes", "0", "B")
# With the gradient of a sink: its logit is read, and the sum of each warp's rows is written.
ROW_TRAFFIC_OF_SINK = Formula("row_bytes", "2*e*d_v + 2*4 + 2*4 + logit + 4*warps/block_q", "B")
DELTA_COST = Formula("cost", "row_bytes/hbm_rate", "clk")

# The kernels that convert sums. Read: the sums, whole tiles of them. Written: the gradient.
CONVERT_LOADS = 4
CONVERT_SMEM = Formula("smem", "e*block_q*columns", "B")  # a tile of the gradient
CONVERT_TRAFFIC = Formula("row_bytes", "4*sum_columns + e*columns", "B")

# The kernel that merges partial results. Read: O and LSE of each part. Written: O and LSE.
MERGED_AT_ONCE = 2  # parts whose vectors a lane loads together: one part joins an earlier result
MERGE_LOADS = 2  # each needs the one before: LSE, then O
# Of the results of split keys there are many parts and few rows. A row then has a block for each 32
# columns, and each lane one column with the loads of 32 parts in flight: the parts of an element
# are added one after the other, as a kernel adds them that has all splits of its rows.
ROW_WARPS = Formula("row_warps", "ceil(d_v/32)")
PART_BYTES = 4  # an element of a part is a float32
PART_TRAFFIC = Formula("part_bytes", f"{PART_BYTES}*d_v + 4", "B")
MERGED_TRAFFIC = Formula("row_bytes", "e*d_v + 4", "B")
MERGE_COST = Formula("cost", "part_bytes/hbm_rate", "clk")

MOST_VECTORS_AT_ONCE = 128  # of a row, by the four loads of each of 32 lanes that append it


def plan_delta(
    spec: AttentionSpec, arch: str, path: str, sums_tile: tuple[int, int] | None = None
) -> Plan:
    """The plan of the kernel that computes rowsum(dO * O), which is bound by memory.

    Args:
        path: the code path of the next kernel, which decides whether their launches overlap.
        sums_tile: rows and columns of a tile of the sums of dQ, which the kernel fills with zeros;
            None where there are no sums. The kernel's text does not depend on it.
    """
    vectors = ITEMSIZE[spec.dtype] * (spec.head_dim_v or spec.head_dim) // 16
    quantities: dict[str, Number] = {
        "loads": 2 * 2 * -(-vectors // lanes_of_row(vectors)),  # of 2 rows of O and of dO
        "chained_loads": 1,
    }
    row_traffic = ROW_TRAFFIC if spec.sums_weights else NO_ROW_TRAFFIC
    if spec.sums_sink:
        quantities |= {"logit": ITEMSIZE[spec.sink.dtype], "block_q": DELTA_ROWS}
        row_traffic = ROW_TRAFFIC_OF_SINK
    note = (
        "clk: clocks of an SM per row. Bound by memory: each byte is moved once. The sums of dQ, "
        "where there are any, are filled with zeros besides."
    )
    formulas = (REGISTER_LIMIT, row_traffic, DELTA_COST)
    sizes = {"path": path, "block_q": DELTA_ROWS, "sums_tile": sums_tile}
    return _plan("delta", spec, arch, quantities, formulas, note, **sizes)


def plan_convert(
    spec: AttentionSpec, arch: str, gradient: str, path: str, sums_tile: tuple[int, int]
) -> Plan:
    """The plan of the kernel that makes a gradient from float32 sums, which is bound by memory.

    Args:
        gradient: "dq", "dk" or "dv".
        path: the code path of the kernel that adds to the sums, which decides on their order.
        sums_tile: rows and columns of a tile of the sums.
    """
    rows, columns = sums_tile
    dim = spec.head_dim_v if gradient == "dv" and spec.head_dim_v else spec.head_dim
    quantities: dict[str, Number] = {
        "columns": dim,
        "block_q": rows,
        "sum_columns": columns,
        "M_sm": facts(arch).smem_per_sm,
        "reserved": SMEM_RESERVED,
        "loads": CONVERT_LOADS,
        "chained_loads": 1,
    }
    smem = int(CONVERT_SMEM({"e": ITEMSIZE[spec.dtype], **quantities}))
    _, most, _ = SHAPES[f"convert_{gradient}"]
    quantities["blocks"] = min(most, facts(arch).smem_per_sm // (smem + SMEM_RESERVED))
    formulas = (CONVERT_SMEM, SMEM_OF_SM, REGISTER_LIMIT, CONVERT_TRAFFIC, DELTA_COST)
    note = "clk: clocks of an SM per row. Bound by memory: each byte is moved once."
    block_name = "block_q" if gradient == "dq" else "block_k"
    sizes = {"path": path, block_name: rows, "sums_tile": sums_tile}
    return _plan(f"convert_{gradient}", spec, arch, quantities, formulas, note, **sizes)


def plan_merge(spec: AttentionSpec, arch: str = "sm_80", *, splits: bool = False) -> Plan:
    """The plan of the kernel that merges partial results.

    Args:
        spec: only its head_dim_v and its dtype, the dtype of the merged output, are read.
        splits: whether the parts are splits of keys, many parts of few rows: a thread block then is
            a warp, and each lane has one column of its row.

    Raises:
        PlanError: the architecture is unknown.
    """
    vectors = PART_BYTES * (spec.head_dim_v or spec.head_dim) // 16
    lanes = lanes_of_row(vectors)
    lane_vectors = -(-vectors // lanes)
    quantities: dict[str, Number] = {
        "lanes": lanes,
        "loads": MERGED_AT_ONCE * lane_vectors,
        "chained_loads": MERGE_LOADS,
    }
    formulas: tuple[Formula, ...] = (REGISTER_LIMIT, PART_TRAFFIC, MERGED_TRAFFIC, MERGE_COST)
    note = (
        "clk: clocks of an SM per row of a part. Bound by memory: each byte of a part with keys is "
        "read once."
    )
    if not splits:
        rows = WARP * SHAPES["merge"][0] // lanes
        return _plan("merge", spec, arch, quantities, formulas, note, block_q=rows)
    quantities |= {"d_v": spec.head_dim_v or spec.head_dim, "lanes": WARP}
    in_vectors = PARTS_IN_FLIGHT * PART_BYTES // 16
    quantities |= {"loads": in_vectors, "warps": 1, "blocks": MERGE_WARPS_OF_SM}
    quantities["early_parts"] = early_parts(arch)
    note += " Each lane has a column of a row."
    formulas = (ROW_WARPS, *formulas)
    path = facts(arch).code_path.name  # the path of the forward kernel before it
    return _plan("merge", spec, arch, quantities, formulas, note, path=path, block_q=1)


NOTES = {
    "append_kv": "Bound by memory: each byte of a new row is read once and written once. The call "
    "decides how many lanes share a row.",
    "append_codes": "Each element is read from memory once and each code is written once. For many "
    "rows the instructions, about 40 for an element, take about twice the time of its bytes.",
    "add_rows": "Bound by memory: each row is read once, and sums that have rows are read and "
    "written once. The call decides how many lanes share a row.",
    "minmax_table": "One block per line of the tensor. Bound by memory: each element is read once, "
    "and each level of the table is made from the level below.",
}
"""The kernels of `plan_rows`: what their time depends on."""


def plan_rows(kernel: str, spec: AttentionSpec, arch: str, **fields: Any) -> Plan:
    """The plan of a kernel that writes rows to a paged cache ("append_kv", or "append_codes" of 8
    bits), adds rows to float32 sums in a fixed order or makes a captured tensor's min/max table.

    Args:
        spec: only its dtype, the dtype of the rows, is read; nothing for "append_kv", which copies
            bytes, and "minmax_table".
        fields: `access_bytes` of kernels that append: the bytes that a lane copies at once; for
            codes, 16 where rows are aligned to 16 bytes and codes to 8, else the itemsize.

    Raises:
        PlanError: the architecture is unknown.
    """
    return _plan(kernel, spec, arch, {}, (REGISTER_LIMIT,), NOTES[kernel], **fields)


def lane_bits_of_append(vectors: int) -> int:
    """Logarithm to base 2 of the lanes that copy a row, given its length in vectors."""
    return lanes_of_row(min(vectors, MOST_VECTORS_AT_ONCE)).bit_length() - 1


def _plan(
    kernel: str,
    spec: AttentionSpec,
    arch: str,
    kernel_quantities: Mapping[str, Number],
    formulas: tuple[Formula, ...],
    note: str,
    **fields: Any,
) -> Plan:
    """The plan of a kernel.

    Args:
        kernel_quantities: the quantities that only this kernel has.
        fields: the fields that not every kernel has.
    """
    gpu, (warps, blocks, registers) = facts(arch), SHAPES[kernel]
    quantities: dict[str, Number] = {
        "e": ITEMSIZE[spec.dtype],
        "d_v": spec.head_dim_v or spec.head_dim,
        "R": gpu.registers_per_sm,
        "warps": warps,
        "blocks": blocks,
        "hbm_rate": gpu.hbm_bytes_per_s / (gpu.sms * gpu.clock_hz),
        **kernel_quantities,
    }
    FormulaSequence(*formulas)(quantities)
    shared = f"M_sm {quantities['M_sm']:,} B, " if "M_sm" in quantities else ""
    rates = f"; rates of {gpu.product}; " if "cost" in quantities else ". "
    optional_fields: dict[str, Any] = {"path": "sm_80", "block_q": 0, "block_k": 0} | fields
    return Plan(
        kernel=kernel,
        arch=arch,
        policy="derived",
        dtype=spec.dtype,
        itemsize=int(quantities["e"]),
        head_dim=spec.head_dim,
        head_dim_v=int(quantities["d_v"]),
        smem_bytes=int(quantities.get("smem", 0)),
        warps=int(quantities["warps"]),
        registers=int(quantities["register_limit"]),
        registers_needed=registers,
        blocks_per_sm=int(quantities["blocks"]),
        cost=float(quantities.get("cost", 0.0)),
        sink_bytes=int(quantities.get("logit", 0)),
        has_rows=spec.sums_weights,
        derivation=tuple(line_of(formula, quantities) for formula in formulas),
        notes=(f"{arch}: {shared}R {quantities['R']:,}{rates}{note}",),
        quantities=Quantities(quantities),
        **optional_fields,
    )


def lanes_of_row(vectors: int) -> int:
    """The number of lanes that read one row together, given its length in 16-byte vectors.

    With four lanes or more every access is a run of 64 bytes, and with at most four vectors per
    lane all loads of a row are in flight together. Among the numbers of lanes that satisfy both,
    the function chooses the one that leaves the fewest lanes without a vector, and the largest of
    several equally good ones. A row of more than 2 KiB has all lanes of a warp.
    """
    most = min(vectors, 4 * WARP)
    choices = [n for n in (2, 4, 8, 16, WARP) if min(vectors, 4) <= n and most <= 4 * n]
    return min(choices, key=lambda lanes: (-(-vectors // lanes) * lanes, -lanes))
