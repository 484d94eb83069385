"""cp.async: copies from global to shared memory, executed when their thread waits for them.

cp.async.mbarrier.arrive arrives at an mbarrier once all earlier copies of its thread are complete.
Like bulk copies (`bulk`), such arrivals come as late as possible: when no warp can run, or with an
order_seed at random times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_emulator.checks.bounds import check_window
from ptx_emulator.checks.copy_sources import CopySource
from ptx_emulator.isa.memory import load_global
from ptx_emulator.state.cohort import Cohort, SingleThreads, active
from ptx_emulator.state.memory import ELEMENT, SHIFT, Array
from ptx_emulator.state.wave import Execution, Wave


@dataclass(eq=False)
class PendingCopy:
    """The copies issued by one execution of an instruction, while they are in flight.

    Attributes:
        lanes: active lanes (n, 32); None: all.
        to: offsets into `Wave.shared` (n, 32).
        data: (n, 32).
        source: what it reads, until it has been waited for; None without checkers.
        group: number of the group of each thread (n, 32).
        number: of the copy, in the order of issue.
        clock: of each warp when it first executed cp.async.mbarrier.arrive for this copy (n,), 0
            if it has not: the copy is complete by then for all that wait for that mbarrier.
    """

    rows: Array
    lanes: Array | None
    to: Array
    data: Array
    source: CopySource | None
    group: Array
    size: int
    number: int
    clock: Array


@dataclass(eq=False)
class PendingArrival:
    """The arrivals of one execution of cp.async.mbarrier.arrive.

    Attributes:
        threads: which arrive, (k,), single ones; ``barriers``: the mbarrier of each.
        before: copies with lower numbers must be complete first.
        known: clocks of the warps of the threads at the time of issue; None without checkers.
    """

    threads: Execution
    barriers: Array
    before: int
    known: Array | None


class AsyncCopies:
    """All copies of a wave that are in flight; groups are counted per thread, as in PTX."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        self.committed = np.zeros((len(machine.row_block), 32), np.int32)
        self.flights: list[PendingCopy] = []
        self.arrivals: list[PendingArrival] = []
        self.issued = 0

    def issue(self, here: Execution, to: Any, source: Any, size: int, read: Any) -> None:
        """Starts a copy of ``size`` bytes per lane, of which ``read`` come from global memory."""
        m, rows = self.machine, here.cohort.rows
        check_window(here, to, size, m.shared_size, "shared")
        offset = here.spread(to + m.shared_base(here.cohort))
        if here.lanes is not None:
            here = here._replace(lanes=here.active)
        if m.recorder is not None:
            m.recorder.shared_access(here, to, size)
        if m.shared_races:
            m.shared_races.start_copy(here, offset, size)
        data, reads = self._fetch(here, source, size, read)
        group, clock = self.committed[rows], np.zeros(len(rows), np.int64)
        flight = PendingCopy(rows, here.lanes, offset, data, reads, group, size, self.issued, clock)
        self.flights.append(flight)
        self.issued += 1

    def _fetch(
        self, here: Execution, source: Any, size: int, read: Any
    ) -> tuple[Array, CopySource | None]:
        """The data of a copy; bytes after the first ``read`` are zero and are not accessed.

        Also returns what is read, but for the lanes that read a part of ``size``.
        """
        m, address, active = self.machine, here.spread(source), here.active
        wanted = np.minimum(here.spread(read), size)
        whole, reads = wanted == size, None
        out: Array = np.zeros((here.cohort.n, 32), ELEMENT[size])
        some = None if whole.all() else whole & active
        if some is None or some.any():
            loads = here if some is None else here._replace(lanes=some)
            out = load_global(loads, address, size, False)
            if m.global_races is not None:
                reads = CopySource(m.memory.touched, address - m.memory.base, size, here.pc, some)
        octets = out.view(np.uint8).reshape(-1, 32, size)
        for byte in range(size) if some is not None else ():
            part = ~whole & active & (wanted > byte)
            if part.any():
                octets[..., byte] |= load_global(here._replace(lanes=part), address + byte, 1)
        return out, reads

    def commit(self, cohort: Cohort, lanes: Any) -> None:
        """Closes the current group of each thread."""
        self.committed[cohort.rows] += active(cohort, lanes)

    def wait(self, cohort: Cohort, left: int | None, lanes: Any) -> None:
        """Completes all but the ``left`` newest groups of each thread; None: all copies."""
        if not self.flights:
            return
        limit = np.full(self.committed.shape, -1, np.int32)
        here = self.committed[cohort.rows] - (-1 if left is None else left)
        limit[cohort.rows] = np.where(active(cohort, lanes), here, -1)
        self._finish(lambda flight: flight.group < limit[flight.rows])

    def _finish(self, which: Callable[[PendingCopy], Array]) -> None:
        """Completes the copies of the lanes (n, 32) that ``which`` selects."""
        kept = []
        for flight in self.flights:
            done = which(flight)
            if flight.lanes is not None:
                done &= flight.lanes
            if done.all():
                self._complete(flight, None)
            elif not done.any():
                kept.append(flight)
            else:
                self._complete(flight, done)
                rest = ~done if flight.lanes is None else flight.lanes & ~done
                if rest.any():
                    flight.lanes = rest
                    kept.append(flight)
        self.flights = kept

    def _complete(self, flight: PendingCopy, lanes: Array | None) -> None:
        m = self.machine
        index, data = flight.to >> SHIFT[flight.size], flight.data
        if lanes is not None:
            index, data = index[lanes], data[lanes]
        m.counters.shared_write_bytes += data.size * flight.size
        m.shared.view[flight.size][index] = data
        if m.shared_races:
            m.shared_races.finish_copy(flight.rows, flight.to, flight.size, lanes, flight.clock)
        self._note_source(flight, lanes)

    def _note_source(self, flight: PendingCopy, lanes: Array | None) -> None:
        """The source of a copy has been read in these lanes (n, 32); None: in all."""
        source, races = flight.source, self.machine.global_races
        if source is None or races is None:
            return
        if source.lanes is not None:
            lanes = source.lanes if lanes is None else lanes & source.lanes
        if lanes is None:
            rows, clock = np.repeat(flight.rows, 32), np.repeat(flight.clock, 32)
            races.note_copy(source, rows, source.offsets.reshape(-1), clock)
            return
        place, _ = np.nonzero(lanes)
        races.note_copy(source, flight.rows[place], source.offsets[lanes], flight.clock[place])

    def finish(self) -> None:
        """Called when the blocks of the wave have ended: what they read stays read."""
        for flight in self.flights:
            self._note_source(flight, flight.lanes)

    # ---- arrivals at mbarriers

    def arrive(self, here: Execution, address: Any, counted: bool) -> None:
        """cp.async.mbarrier.arrive; ``counted``: mbarrier.init counts this arrival (.noinc)."""
        m, cohort = self.machine, here.cohort
        place, lane, numbers, blocks = m.mbarriers.find(here, address)
        if not len(place):
            return
        if not counted:
            np.add.at(m.mbarriers.pending, (numbers, blocks), 1)
        known = None
        if m.shared_races:
            clocks, rows = m.clocks, cohort.rows[np.unique(place)]
            known = clocks.of(cohort.rows[place])
            for flight in self.flights:
                first = np.isin(flight.rows, rows) & (flight.clock == 0)
                flight.clock[first] = clocks.clock[flight.rows[first]]
            clocks.tick(rows)
        threads = here._replace(cohort=SingleThreads(cohort, place, lane), lanes=None)
        self.arrivals.append(PendingArrival(threads, numbers, self.issued, known))

    def execute(self, one: PendingArrival) -> None:
        """Executes a pending arrival."""
        self.arrivals.remove(one)
        threads = one.threads.cohort
        assert isinstance(threads, SingleThreads)
        chosen = np.zeros(self.committed.shape, bool)
        chosen[threads.rows, threads.lane] = True
        self._finish(lambda f: chosen[f.rows] & (f.number < one.before))
        self.machine.mbarriers.arrive_later(one.threads, one.barriers, one.known)
