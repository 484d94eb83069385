"""Special registers: the expressions that read them, their dtypes, and their values."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Wave

SPECIAL: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("clock", "globaltimer_lo"), ("E.clock('u4')", "u4")),
    **dict.fromkeys(("clock_hi", "globaltimer_hi"), ("E.clock('hi')", "u4")),
    **dict.fromkeys(("clock64", "globaltimer"), ("E.clock('u8')", "u8")),
}
_LAUNCH = ("tid", "ntid", "ctaid", "nctaid")
_CLUSTER = ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
_WARP = ("laneid", "warpid", "nwarpid", "smid", "nsmid", "gridid")
_SIZES = (
    *("dynamic_smem_size", "total_smem_size", "aggr_smem_size"),
    *("cluster_ctarank", "cluster_nctarank"),
)
# Since sm_80: the unit in which shared memory is allocated, and what the system reserves of it.
_UNIT_BYTES, _RESERVED_BYTES = 128, 1024
for _name in (
    *(f"{name}.{axis}" for name in _LAUNCH + _CLUSTER for axis in "xyz"),
    *(f"lanemask_{which}" for which in ("eq", "lt", "le", "gt", "ge")),
    *_WARP,
    *_SIZES,
):
    SPECIAL[_name] = (f"E.row_value('{_name}', C)", "u4")
SPECIAL["is_explicit_cluster"] = ("E.row_value('is_explicit_cluster', C)", "b1")


def special_values(machine: Wave, thread: Array) -> dict[str, Any]:
    """Values of the special registers of a wave: scalars, one per warp, or one per thread.

    Args:
        machine: its blocks are those of the wave.
        thread: number of each thread in its block (warps, 32).
    """

    def unsigned(value: Any) -> Any:
        return np.asarray(value).astype(np.uint32)[()]

    lane = np.arange(32)[None, :].astype(np.uint64)
    config, one, full = machine.config, np.uint64(1), np.uint64(0xFFFFFFFF)
    block = machine.blocks[machine.row_block][:, None]
    reserved = machine.program.reserved
    used = machine.shared_size - (reserved.stop - reserved.start)
    allocated = -(-used // _UNIT_BYTES) * _UNIT_BYTES
    table = {
        "laneid": unsigned(lane),
        "lanemask_eq": unsigned(one << lane),
        "lanemask_lt": unsigned((one << lane) - one),
        "lanemask_le": unsigned((one << (lane + one)) - one),
        "lanemask_gt": unsigned(full ^ ((one << (lane + one)) - one)),
        "lanemask_ge": unsigned(full ^ ((one << lane) - one)),
        "warpid": unsigned(machine.row_warp[:, None]),
        "nwarpid": unsigned(machine.warps),
        "smid": unsigned(block % 108),
        "nsmid": unsigned(108),
        "gridid": unsigned(1),
        "dynamic_smem_size": unsigned(config.shared_bytes),
        "total_smem_size": unsigned(allocated),
        "aggr_smem_size": unsigned(allocated + _RESERVED_BYTES),
    }
    for name, number, sizes in (("tid", thread, config.block), ("ctaid", block, config.grid)):
        x, y, _ = sizes
        values = (number % x, number // x % y, number // (x * y))
        for axis, size, value in zip("xyz", sizes, values, strict=True):
            table[f"n{name}.{axis}"] = unsigned(size)
            table[f"{name}.{axis}"] = unsigned(value) if size > 1 else unsigned(0)
    rank = machine.row_block[:, None] % machine.cluster_size
    table["cluster_ctarank"] = unsigned(rank)
    table["cluster_nctarank"] = unsigned(machine.cluster_size)
    table["is_explicit_cluster"] = np.bool_(machine.cluster_size > 1)
    inner = 1
    for axis, size in zip("xyz", config.cluster, strict=True):
        table[f"clusterid.{axis}"] = table[f"ctaid.{axis}"] // np.uint32(size)
        table[f"nclusterid.{axis}"] = table[f"nctaid.{axis}"] // np.uint32(size)
        table[f"cluster_ctaid.{axis}"] = unsigned(rank // inner % size)
        table[f"cluster_nctaid.{axis}"] = unsigned(size)
        inner *= size
    return table
