"""Special registers: the expressions that read them, their dtypes, and their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.state.wave import Wave

Array = npt.NDArray[Any]

SPECIAL: dict[str, tuple[str, str]] = {}
_CLUSTER = ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
for _axis in "xyz":
    for _name in ("tid", "ntid", "ctaid", "nctaid", *_CLUSTER):
        SPECIAL[f"{_name}.{_axis}"] = (f"E.row_value('{_name}.{_axis}', C)", "u4")
for _name in [
    "laneid",
    "warpid",
    "nwarpid",
    "smid",
    "nsmid",
    "gridid",
    "lanemask_eq",
    "lanemask_lt",
    "lanemask_le",
    "lanemask_gt",
    "lanemask_ge",
    "dynamic_smem_size",
    "total_smem_size",
    "cluster_ctarank",
    "cluster_nctarank",
]:
    SPECIAL[_name] = (f"E.row_value('{_name}', C)", "u4")
SPECIAL["clock"] = ("E.clock('u4')", "u4")
SPECIAL["clock_hi"] = ("E.clock('hi')", "u4")
SPECIAL["clock64"] = ("E.clock('u8')", "u8")
SPECIAL["globaltimer"] = ("E.clock('u8')", "u8")
SPECIAL["globaltimer_lo"] = ("E.clock('u4')", "u4")
SPECIAL["globaltimer_hi"] = ("E.clock('hi')", "u4")


def special_values(machine: Wave, thread: Array) -> dict[str, Any]:
    """Values of the special registers of a wave: scalars, one per warp, or one per thread.

    Args:
        machine: its blocks are those of the wave.
        thread: number of each thread in its block (warps, 32).
    """

    def unsigned(value: Any) -> Any:
        return np.asarray(value).astype(np.uint32)[()]

    bx, by, _ = machine.block
    gx, gy, gz = machine.grid
    block = machine.blocks[machine.row_block][:, None]
    table: dict[str, Any] = {}
    for axis, size in zip("xyz", machine.block, strict=True):
        table[f"ntid.{axis}"] = unsigned(size)
    for axis, size in zip("xyz", machine.grid, strict=True):
        table[f"nctaid.{axis}"] = unsigned(size)
    values = (thread % bx, thread // bx % by, thread // (bx * by))
    for axis, size, value in zip("xyz", machine.block, values, strict=True):
        table[f"tid.{axis}"] = unsigned(value) if size > 1 else unsigned(0)
    values = (block % gx, block // gx % gy, block // (gx * gy))
    for axis, size, value in zip("xyz", (gx, gy, gz), values, strict=True):
        table[f"ctaid.{axis}"] = unsigned(value) if size > 1 else unsigned(0)
    # Each cluster has one block.
    for axis in "xyz":
        table[f"clusterid.{axis}"] = table[f"ctaid.{axis}"]
        table[f"nclusterid.{axis}"] = table[f"nctaid.{axis}"]
        table[f"cluster_ctaid.{axis}"] = unsigned(0)
        table[f"cluster_nctaid.{axis}"] = unsigned(1)
    table["cluster_ctarank"] = unsigned(0)
    table["cluster_nctarank"] = unsigned(1)
    lane = np.arange(32)[None, :].astype(np.uint64)
    one, full = np.uint64(1), np.uint64(0xFFFFFFFF)
    table["laneid"] = unsigned(lane)
    table["lanemask_eq"] = unsigned(one << lane)
    table["lanemask_lt"] = unsigned((one << lane) - one)
    table["lanemask_le"] = unsigned((one << (lane + one)) - one)
    table["lanemask_gt"] = unsigned(full ^ ((one << (lane + one)) - one))
    table["lanemask_ge"] = unsigned(full ^ ((one << lane) - one))
    table["warpid"] = unsigned(machine.row_warp[:, None])
    table["nwarpid"] = unsigned(machine.warps)
    table["smid"] = unsigned(block % 108)
    table["nsmid"] = unsigned(108)
    table["gridid"] = unsigned(1)
    table["dynamic_smem_size"] = unsigned(machine.dynamic_bytes)
    table["total_smem_size"] = unsigned(machine.shared_size)
    return table
