"""Checks of bounds and alignment, which run in every launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator.errors import Misaligned, OutOfBounds
from ptx_emulator.state.cohort import Cohort, active, first_bad, spread
from ptx_emulator.state.wave import Site


def check_window(
    machine: Any,
    cohort: Cohort,
    address: Any,
    lanes: Any,
    size: int,
    pc: int,
    limit: int,
    space: str,
) -> None:
    """Checks bounds and alignment of offsets into a memory of ``limit`` bytes."""
    if lanes is None:
        # The bitwise or of all addresses bounds each of them and has all their low bits.
        both = int(np.bitwise_or.reduce(address, axis=None)) if address.ndim else int(address)
        if 0 <= both <= limit - size and not both & (size - 1):
            return
    bad = (address < 0) | (address > limit - size)
    if (spread(bad, cohort.n) & active(cohort, lanes)).any():
        row, lane = first_bad(cohort, lanes, bad)
        at = int(spread(address, cohort.n)[row, lane])
        what = f"{size}-byte access outside {space} memory"
        numbers = f"offset {at:,} of {limit:,} bytes of {space} memory"
        way_out = "check the index" + ", or pass a larger shared_bytes" * (space == "shared")
        machine.fail(OutOfBounds, what, Site(cohort, pc, row, lane), numbers, way_out)
    check_aligned(machine, cohort, address, lanes, size, pc, space)


def check_aligned(
    machine: Any, cohort: Cohort, address: Any, lanes: Any, size: int, pc: int, space: str
) -> None:
    bad = (address & (size - 1)) != 0
    if not (spread(bad, cohort.n) & active(cohort, lanes)).any():
        return
    row, lane = first_bad(cohort, lanes, bad)
    at = int(spread(address, cohort.n)[row, lane])
    extra = f"; {machine.memory.describe(at)}" if space == "global" else ""
    what = f"misaligned {size}-byte access to {space} memory"
    numbers = f"address {at:#x} is {at & (size - 1)} mod {size}{extra}"
    way_out = f"make the address a multiple of {size} bytes, or use narrower accesses"
    machine.fail(Misaligned, what, Site(cohort, pc, row, lane), numbers, way_out)


def locate(
    machine: Any, cohort: Cohort, address: Any, lanes: Any, size: int, pc: int, write: bool
) -> Any:
    """Checks global addresses; returns the offsets into `GlobalMemory.flat`.

    The result has the shape of ``address`` if ``lanes`` is None, else one entry per active lane.
    """
    memory = machine.memory
    if lanes is None:
        chosen = address
    else:
        chosen = spread(address, cohort.n)[spread(lanes, cohort.n)]
        if not len(chosen):
            memory.touched = []
            return chosen
    low, high = (int(chosen.min()), int(chosen.max())) if chosen.ndim else (int(chosen),) * 2
    place = memory.find(low)
    if place < 0 or high + size > memory.ends[place]:
        starts = np.searchsorted(memory.starts, chosen, "right") - 1
        bad = (starts < 0) | (chosen + size > memory.ends[starts])
        if bad.any():
            _out_of_bounds(machine, cohort, address, lanes, size, pc, write)
        touched = np.unique(starts).tolist()
    else:
        touched = [place]
    memory.touched = touched
    if size > 1 and int(np.bitwise_or.reduce(chosen, axis=None)) & (size - 1):
        check_aligned(machine, cohort, address, lanes, size, pc, "global")
    if write:
        check_writable(machine, "store", Site(cohort, pc), memory.describe(low))
    return chosen - memory.base


def check_writable(machine: Any, what: str, site: Site, numbers: str) -> None:
    """Marks the allocations of the latest access as modified; none may be read-only."""
    for index in machine.memory.touched:
        allocation = machine.memory.allocations[index]
        allocation.dirty = True
        if not allocation.writable:
            machine.fail(
                OutOfBounds,
                f"a {what} to {allocation.label}, whose numpy array is read-only",
                site,
                numbers,
                "pass a writable array, or do not write to it",
            )


def _out_of_bounds(
    machine: Any, cohort: Cohort, address: Any, lanes: Any, size: int, pc: int, write: bool
) -> None:
    memory = machine.memory
    everywhere = spread(address, cohort.n)
    starts = np.searchsorted(memory.starts, everywhere, "right") - 1
    bad = (starts < 0) | (everywhere + size > memory.ends[np.maximum(starts, 0)])
    row, lane = first_bad(cohort, lanes, bad)
    at = int(everywhere[row, lane])
    machine.fail(
        OutOfBounds,
        f"{size}-byte {'store' if write else 'load'} outside every buffer",
        Site(cohort, pc, row, lane),
        f"address {at:#x}: {memory.describe(at)}; "
        f"{int((bad & active(cohort, lanes)).sum())} lanes of this instruction are outside",
        "check the index against the array that was passed",
    )
