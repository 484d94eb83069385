"""Checks of bounds and alignment, which run in every launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator.errors import Misaligned, OutOfBounds
from ptx_emulator.state.wave import Execution, Site, Wave


def check_window(here: Execution, address: Any, size: int, limit: int, space: str) -> None:
    """Checks bounds and alignment of offsets into a memory of ``limit`` bytes."""
    if here.lanes is None:
        # The bitwise or of all addresses bounds each of them and has all their low bits.
        both = int(np.bitwise_or.reduce(address, axis=None)) if address.ndim else int(address)
        if 0 <= both <= limit - size and not both & (size - 1):
            return
    bad = (address < 0) | (address > limit - size)
    if here.any(bad):
        site = here.first(bad)
        at = int(here.spread(address)[site.row, site.lane])
        what = f"{size}-byte access outside {space} memory"
        numbers = f"offset {at:,} of {limit:,} bytes of {space} memory"
        way_out = "check the index" + ", or pass a larger shared_bytes" * (space == "shared")
        here.machine.fail(OutOfBounds, what, site, numbers, way_out)
    check_aligned(here, address, size, space)


def check_aligned(here: Execution, address: Any, size: int, space: str) -> None:
    bad = (address & (size - 1)) != 0
    if not here.any(bad):
        return
    site = here.first(bad)
    at = int(here.spread(address)[site.row, site.lane])
    extra = f"; {here.machine.memory.describe(at)}" if space == "global" else ""
    what = f"misaligned {size}-byte access to {space} memory"
    numbers = f"address {at:#x} is {at & (size - 1)} mod {size}{extra}"
    way_out = f"make the address a multiple of {size} bytes, or use narrower accesses"
    here.machine.fail(Misaligned, what, site, numbers, way_out)


def locate(here: Execution, address: Any, size: int, write: bool) -> Any:
    """Checks global addresses; returns the offsets into `GlobalMemory.flat`.

    The result has the shape of ``address`` if all lanes are active, else one entry per active lane.
    """
    memory = here.machine.memory
    chosen = address if here.lanes is None else here.chosen(address)
    if not chosen.size:
        memory.touched = []
        return chosen
    low, high = (int(chosen.min()), int(chosen.max())) if chosen.ndim else (int(chosen),) * 2
    place = memory.find(low)
    if place < 0 or high + size > memory.ends[place]:
        starts = np.searchsorted(memory.starts, chosen, "right") - 1
        bad = (starts < 0) | (chosen + size > memory.ends[starts])
        if bad.any():
            _out_of_bounds(here, address, size, write)
        memory.touched = np.unique(starts).tolist()
    else:
        memory.touched = [place]
    if size > 1 and int(np.bitwise_or.reduce(chosen, axis=None)) & (size - 1):
        check_aligned(here, address, size, "global")
    if write:
        check_writable(here.machine, "store", here.site(), memory.describe(low))
    return chosen - memory.base


def check_writable(machine: Wave, what: str, site: Site, numbers: str) -> None:
    """Marks the allocations of the latest access as modified; none may be read-only."""
    for index in machine.memory.touched:
        allocation = machine.memory.allocations[index]
        allocation.dirty = True
        if not allocation.writable:
            what = f"a {what} to {allocation.label}, whose numpy array is read-only"
            way_out = "pass a writable array, or do not write to it"
            machine.fail(OutOfBounds, what, site, numbers, way_out)


def _out_of_bounds(here: Execution, address: Any, size: int, write: bool) -> None:
    memory = here.machine.memory
    everywhere = here.spread(address)
    starts = np.searchsorted(memory.starts, everywhere, "right") - 1
    bad = (starts < 0) | (everywhere + size > memory.ends[np.maximum(starts, 0)])
    site, count = here.first(bad), int((bad & here.active).sum())
    at = int(everywhere[site.row, site.lane])
    what = f"{size}-byte {'store' if write else 'load'} outside every buffer"
    text = memory.describe(at)
    numbers = f"address {at:#x}: {text}; {count} lanes of this instruction are outside"
    way_out = "check the index against the array that was passed"
    here.machine.fail(OutOfBounds, what, site, numbers, way_out)
