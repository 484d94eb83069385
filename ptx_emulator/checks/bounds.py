"""Checks of bounds and alignment, which run in every launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator.errors import Misaligned, OutOfBounds
from ptx_emulator.state.wave import Execution, Site, Wave


def check_window(execution: Execution, address: Any, size: int, limit: int, space: str) -> None:
    """Checks bounds and alignment of offsets into a memory of ``limit`` bytes."""
    if execution.lanes is None:
        # The bitwise or of all addresses bounds each of them and has all their low bits.
        both = int(np.bitwise_or.reduce(address, axis=None)) if address.ndim else int(address)
        if 0 <= both <= limit - size and not both & (size - 1):
            return
    bad = (address < 0) | (address > limit - size)
    if execution.any(bad):
        site = execution.first(bad)
        bad_offset = int(execution.spread(address)[site.row, site.lane])
        what = f"{size}-byte access outside {space} memory"
        numbers = f"offset {bad_offset:,} of {limit:,} bytes of {space} memory"
        way_out = "check the index" + ", or pass a larger shared_bytes" * (space == "shared")
        execution.machine.fail(OutOfBounds, what, site, numbers, way_out)
    check_aligned(execution, address, size, space)


def check_aligned(execution: Execution, address: Any, size: int, space: str) -> None:
    bad = (address & (size - 1)) != 0
    if not execution.any(bad):
        return
    site = execution.first(bad)
    bad_address = int(execution.spread(address)[site.row, site.lane])
    extra = f"; {execution.machine.memory.describe(bad_address)}" if space == "global" else ""
    what = f"misaligned {size}-byte access to {space} memory"
    numbers = f"address {bad_address:#x} is {bad_address & (size - 1)} mod {size}{extra}"
    way_out = f"make the address a multiple of {size} bytes, or use narrower accesses"
    execution.machine.fail(Misaligned, what, site, numbers, way_out)


def locate(execution: Execution, address: Any, size: int, write: bool) -> Any:
    """Checks global addresses; returns the offsets into `GlobalMemory.flat`.

    The result has the shape of ``address`` if all lanes are active, else one entry per active lane.
    """
    memory = execution.machine.memory
    chosen = address if execution.lanes is None else execution.chosen(address)
    if not chosen.size:
        memory.touched = []
        return chosen
    low, high = (int(chosen.min()), int(chosen.max())) if chosen.ndim else (int(chosen),) * 2
    allocation_index = memory.find(low)
    if allocation_index < 0 or high + size > memory.ends[allocation_index]:
        starts = np.searchsorted(memory.starts, chosen, "right") - 1
        bad = (starts < 0) | (chosen + size > memory.ends[starts])
        if bad.any():
            _out_of_bounds(execution, address, size, write)
        memory.touched = np.unique(starts).tolist()
    else:
        memory.touched = [allocation_index]
    if size > 1 and int(np.bitwise_or.reduce(chosen, axis=None)) & (size - 1):
        check_aligned(execution, address, size, "global")
    if write:
        check_writable(execution.machine, "store", execution.site(), memory.describe(low))
    return chosen - memory.base


def check_writable(machine: Wave, access: str, site: Site, numbers: str) -> None:
    """Marks the allocations of the latest access as modified; none may be read-only."""
    for index in machine.memory.touched:
        allocation = machine.memory.allocations[index]
        allocation.dirty = True
        if not allocation.writable:
            what = f"a {access} to {allocation.label}, whose numpy array is read-only"
            way_out = "pass a writable array, or do not write to it"
            machine.fail(OutOfBounds, what, site, numbers, way_out)


def _out_of_bounds(execution: Execution, address: Any, size: int, write: bool) -> None:
    memory = execution.machine.memory
    everywhere = execution.spread(address)
    starts = np.searchsorted(memory.starts, everywhere, "right") - 1
    bad = (starts < 0) | (everywhere + size > memory.ends[np.maximum(starts, 0)])
    site, count = execution.first(bad), int((bad & execution.active).sum())
    bad_address = int(everywhere[site.row, site.lane])
    what = f"{size}-byte {'store' if write else 'load'} outside every buffer"
    text = memory.describe(bad_address)
    numbers = f"address {bad_address:#x}: {text}; {count} lanes of this instruction are outside"
    way_out = "check the index against the array that was passed"
    execution.machine.fail(OutOfBounds, what, site, numbers, way_out)
