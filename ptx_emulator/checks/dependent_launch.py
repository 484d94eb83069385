"""Programmatic dependent launch: a launch that may start before the one before it has ended.

The second launch starts as early as it may: nothing that the first one wrote is visible until warps
of the second wait for it (griddepcontrol.wait) and no other warp can run. What it reads or writes
before is checked against all accesses of the first launch, of which any may still come: memory of a
launch that lets others start (griddepcontrol.launch_dependents) is kept as a `Footprint`. A launch
that lets its own dependents start before it has waited leaves the launch before it running, too.

A wait is valid for its warp, and for all that is ordered after it by the barriers of the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from ptx_emulator.checks.clocks import CLOCK_SHIFT
from ptx_emulator.errors import RaceError
from ptx_emulator.state.cohort import Cohort, WaitsForLaunch
from ptx_emulator.state.memory import Array, GlobalMemory, sparse_zeros
from ptx_emulator.state.wave import Execution, Wave

_WAIT = "griddepcontrol.wait"


def _buffers(memory: GlobalMemory) -> tuple[Array, Array, Array]:
    """First address and end on the host, and offset in the memory, of buffers of host arrays."""
    buffers = [a for a in memory.allocations if a.host is not None and a.size]
    rows = [(a.host.ctypes.data, a.size, a.start - memory.base) for a in buffers]  # type: ignore
    first, size, offset = np.array(sorted(rows), np.int64).reshape(-1, 3).T
    return first, first + size, offset


class Footprint:
    """The accesses of a launch to device memory, which a dependent launch may overtake.

    Attributes:
        kernel: the name of its kernel.
        earlier: a launch before it that may still run, too.
        replaced: the bytes that it has overwritten, with their addresses on the host.
    """

    def __init__(self, machine: Wave, earlier: Footprint | None) -> None:
        """Called before the results are copied to the host."""
        memory, races = machine.memory, machine.global_races
        self.kernel, self.earlier = machine.program.name, earlier
        self.replaced = [
            (a.host.ctypes.data, a.host.copy())
            for a in memory.allocations
            if a.host is not None and a.dirty
        ]
        self._first, self._end, self._offset = _buffers(memory)
        self._shift = races.shift if races else 0
        self._written = races.write_stamp if races else None
        self._read = races.read_stamp if races else None
        self._log = races.log if races else {}
        self._logged: Array | None = None

    def accessed(self, address: Array, size: int, write: bool) -> Array:
        """Which of these accesses, at host addresses (k,), conflict with one of the launch."""
        conflicts = np.zeros(len(address), bool)
        if not len(self._first):
            return conflicts
        buffer_index = np.searchsorted(self._first, address, "right") - 1
        inside = (buffer_index >= 0) & (address < self._end[buffer_index])
        if self._written is None or self._read is None or not inside.any():
            return conflicts
        buffer_index = buffer_index[inside]
        start = address[inside] - self._first[buffer_index] + self._offset[buffer_index]
        hit = np.zeros(len(start), bool)
        for byte in (*range(0, size, 1 << self._shift), size - 1):
            vectors = (start + byte) >> self._shift
            hit |= self._written.take(vectors) != 0
            if write:
                hit |= (self._read.take(vectors) != 0) | self._listed().take(vectors)
        conflicts[inside] = hit
        return conflicts

    def _listed(self) -> Array:
        """Whether a vector is in the lists of reads of buffers that were not written."""
        if self._logged is None:
            assert self._read is not None
            self._logged = sparse_zeros(len(self._read), bool)
            for flat, _, size, _ in (read for reads in self._log.values() for read in reads):
                for byte in range(0, size, 1 << self._shift):
                    self._logged[(flat + byte) >> self._shift] = True
        return self._logged


class DependentLaunch:
    """A launch that may start before the launches ``former`` have ended.

    Attributes:
        former: the launch before; None where it has let nothing start before its end.
        leaves: that launch, if this one lets others start before it has waited; else None.
    """

    def __init__(self, machine: Wave, former: Footprint | None) -> None:
        self.machine, self.former = machine, former
        self.leaves: Footprint | None = None
        self._waited = False
        self._ended = False
        self._hidden: list[tuple[Array, Array, Array]] = []  # of a buffer: places, bytes
        first, end, offset = self._buffers = _buffers(machine.memory)
        for launch in self._formers():
            for address, old in launch.replaced:
                for buffer_index in range(len(first)):
                    low = max(address, int(first[buffer_index]))
                    high = min(address + len(old), int(end[buffer_index]))
                    if low < high:
                        start = int(offset[buffer_index]) + low - int(first[buffer_index])
                        current = machine.memory.flat.bytes[start : start + high - low]
                        before = old[low - address : high - address]
                        changed = np.flatnonzero(current != before)
                        self._hidden.append((current, changed, current[changed]))
                        current[changed] = before[changed]

    def _formers(self) -> Iterator[Footprint]:
        launch = self.former
        while launch is not None:
            yield launch
            launch = launch.earlier

    def begin_wave(self) -> None:
        """Called before the blocks of a wave start."""
        self._since = np.zeros(len(self.machine.row_block), np.int64)  # stamps of waits, by warp

    def wait(self, execution: Execution) -> bool:
        """griddepcontrol.wait. Returns whether the cohort has to wait and to execute it again."""
        if not execution.active.any():
            return False
        if not self._ended:
            execution.cohort.waits = WaitsForLaunch(execution.pc)
            return True
        machine, rows = self.machine, execution.cohort.rows[execution.active.any(axis=1)]
        self._waited = True
        if machine.shared_races is not None:
            new = rows[self._since[rows] == 0]
            self._since[new] = machine.clocks.clock[new] << CLOCK_SHIFT | machine.row_member[new]
        return False

    def start_dependents(self, cohort: Cohort) -> None:
        """griddepcontrol.launch_dependents."""
        if self.machine.shared_races is None or not self._follows_wait(cohort.rows).all():
            self.leaves = self.former

    def release(self) -> bool:
        """Called when no warp can run: the former launches end. Returns whether a warp waits."""
        machine = self.machine
        if self._ended or not any(isinstance(c.waits, WaitsForLaunch) for c in machine.cohorts):
            return False
        self._ended = True
        for current, changed, new in reversed(self._hidden):
            current[changed] = new
        machine.wake(WaitsForLaunch)
        return True

    def check(
        self, execution: Execution, rows: Array, offset: Array, size: int, write: bool
    ) -> None:
        """Checks accesses by warps ``rows`` (k,) at ``offset`` (k,) in device memory.

        Raises:
            RaceError: a former launch may still write there, or read what is written.
        """
        machine, (first, _, buffer_offsets) = self.machine, self._buffers
        if self.former is None:
            return
        by_nc = not write and execution.pc in machine.program.accesses.read_only
        early = ~self._follows_wait(rows)
        if not (by_nc or early.any()):
            return
        order = np.argsort(buffer_offsets)
        following = np.searchsorted(buffer_offsets[order], offset, "right")
        buffer_index = order[np.maximum(following - 1, 0)]
        address = offset - buffer_offsets[buffer_index] + first[buffer_index]
        for launch in self._formers():
            bad = launch.accessed(address, size, write) & (early | by_nc)
            if bad.any():
                self._report(execution, bad, offset, launch, write)

    def _follows_wait(self, rows: Array) -> Array:
        """Which warps (k,) have waited, or are ordered after a wait of their cluster."""
        machine, waited = self.machine, self._since[rows] > 0
        for row in np.unique(rows[~waited]) if self._waited else ():
            warps = machine.cluster_warps
            members = np.arange(warps) + machine.row_cluster[row] * warps
            waits = self._since[members]
            waits = waits[waits > 0]
            cluster = np.full(len(waits), machine.row_cluster[row])
            member = np.full(len(waits), machine.row_member[row])
            ordered = waits[machine.clocks.ordered(cluster, member, waits)]
            if len(ordered):
                self._since[row] = ordered[0]
        return self._since[rows] > 0

    def _report(
        self, execution: Execution, bad: Array, offset: Array, launch: Footprint, write: bool
    ) -> NoReturn:
        machine, first = self.machine, int(np.argmax(bad))
        if execution.lanes is None:
            site = execution.site(*divmod(first, len(bad) // execution.cohort.n))
        else:
            row, lane = np.argwhere(execution.active)[first]
            site = execution.site(row, int(lane))
        verb = "write of what the launch before may still access"
        if not write:
            verb = "read of what the launch before may still write"
        location = machine.memory.describe(int(offset[first]) + machine.memory.base)
        numbers = f"{location}, accessed by {launch.kernel}"
        way_out = f"execute {_WAIT} before, in this warp or before a barrier that orders the two"
        if not write and execution.pc in machine.program.accesses.read_only:
            verb += ", by a load that is valid for memory that nothing writes (ld.global.nc, __ldg)"
            way_out = f"load it without .nc, after {_WAIT}"
        machine.fail(RaceError, f"race in global memory: a {verb}", site, numbers, way_out)

    def finish(self) -> None:
        """Called at the end of the launch.

        Raises:
            RaceError: no warp has waited: what follows this launch may overtake the one before it.
        """
        if self._waited or self.former is None:
            return
        what = "a launch that may start before the one before it has ended never waits for it"
        numbers = f"no thread of {len(self._since):,} warps executed {_WAIT}"
        way_out = f"execute {_WAIT} in every block, or launch it without overlaps=True"
        where = f"kernel {self.machine.program.name}"
        raise RaceError(what, where=where, numbers=numbers, way_out=way_out)
