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
        clock: of the warp of each thread when the thread first executed cp.async.mbarrier.arrive
            for this copy (n, 32), 0 if it has not: the copy is complete by then for all that wait
            for that mbarrier.
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
        issue_clocks: of the warps of the threads at the time of issue; None without checkers.
    """

    threads: Execution
    barriers: Array
    before: int
    issue_clocks: Array | None


class AsyncCopies:
    """All copies of a wave that are in flight; groups are counted per thread, as in PTX."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        self.committed = np.zeros((len(machine.row_block), 32), np.int32)
        self.flights: list[PendingCopy] = []
        self.arrivals: list[PendingArrival] = []
        self.issued = 0

    def issue(self, execution: Execution, to: Any, source: Any, size: int, read: Any) -> None:
        """Starts a copy of ``size`` bytes per lane, of which ``read`` come from global memory."""
        machine, rows = self.machine, execution.cohort.rows
        check_window(execution, to, size, machine.shared_size, "shared")
        offset = execution.spread(to + machine.shared_base(execution.cohort))
        if execution.lanes is not None:
            execution = execution._replace(lanes=execution.active)
        if machine.recorder is not None:
            machine.recorder.shared_access(execution, to, size)
        if machine.shared_races:
            machine.shared_races.start_copy(execution, offset, size)
        data, reads = self._fetch(execution, source, size, read)
        group, clock = self.committed[rows], np.zeros((len(rows), 32), np.int64)
        flight = PendingCopy(
            rows, execution.lanes, offset, data, reads, group, size, self.issued, clock
        )
        self.flights.append(flight)
        self.issued += 1

    def _fetch(
        self, execution: Execution, source: Any, size: int, read: Any
    ) -> tuple[Array, CopySource | None]:
        """The data of a copy; bytes after the first ``read`` are zero and are not accessed.

        Also returns what is read, but for the lanes that read a part of ``size``.
        """
        machine, address, active = self.machine, execution.spread(source), execution.active
        wanted = np.minimum(execution.spread(read), size)
        whole, reads = wanted == size, None
        out: Array = np.zeros((execution.cohort.n, 32), ELEMENT[size])
        some = None if whole.all() else whole & active
        if some is None or some.any():
            loads = execution if some is None else execution._replace(lanes=some)
            out = load_global(loads, address, size, False)
            if machine.global_races is not None:
                reads = CopySource(
                    machine.memory.touched, address - machine.memory.base, size, execution.pc, some
                )
        octets = out.view(np.uint8).reshape(-1, 32, size)
        for byte in range(size) if some is not None else ():
            part = ~whole & active & (wanted > byte)
            if part.any():
                octets[..., byte] |= load_global(execution._replace(lanes=part), address + byte, 1)
        return out, reads

    def commit(self, cohort: Cohort, lanes: Any) -> None:
        """Closes the current group of each thread."""
        self.committed[cohort.rows] += active(cohort, lanes)

    def wait(self, cohort: Cohort, left: int | None, lanes: Any) -> None:
        """Completes all but the ``left`` newest groups of each thread; None: all copies."""
        if not self.flights:
            return
        limit = np.full(self.committed.shape, -1, np.int32)
        group_limit = self.committed[cohort.rows] - (-1 if left is None else left)
        limit[cohort.rows] = np.where(active(cohort, lanes), group_limit, -1)
        self._finish(lambda flight: flight.group < limit[flight.rows])

    def _finish(self, which: Callable[[PendingCopy], Array]) -> None:
        """Completes the copies of the lanes (n, 32) that ``which`` selects."""
        unfinished = []
        for flight in self.flights:
            done = which(flight)
            if flight.lanes is not None:
                done &= flight.lanes
            if done.all():
                self._complete(flight, None)
            elif not done.any():
                unfinished.append(flight)
            else:
                self._complete(flight, done)
                rest = ~done if flight.lanes is None else flight.lanes & ~done
                if rest.any():
                    flight.lanes = rest
                    unfinished.append(flight)
        self.flights = unfinished

    def _complete(self, flight: PendingCopy, lanes: Array | None) -> None:
        machine = self.machine
        index, data = flight.to >> SHIFT[flight.size], flight.data
        if lanes is not None:
            index, data = index[lanes], data[lanes]
        machine.counters.shared_write_bytes += data.size * flight.size
        machine.shared.view[flight.size][index] = data
        if machine.shared_races:
            machine.shared_races.finish_copy(
                flight.rows, flight.to, flight.size, lanes, flight.clock
            )
        self._note_source(flight, lanes)

    def _note_source(self, flight: PendingCopy, lanes: Array | None) -> None:
        """Records that the source of a copy has been read in these lanes (n, 32); None: in all."""
        source, races = flight.source, self.machine.global_races
        if source is None or races is None:
            return
        if source.lanes is not None:
            lanes = source.lanes if lanes is None else lanes & source.lanes
        if lanes is None:
            rows, clock = np.repeat(flight.rows, 32), flight.clock.reshape(-1)
            races.note_copy(source, rows, source.offsets.reshape(-1), clock)
            return
        row_index, _ = np.nonzero(lanes)
        races.note_copy(source, flight.rows[row_index], source.offsets[lanes], flight.clock[lanes])

    def finish(self) -> None:
        """Called when the blocks of the wave have ended: what they read stays read."""
        for flight in self.flights:
            self._note_source(flight, flight.lanes)

    # ---- arrivals at mbarriers

    def arrive(self, execution: Execution, address: Any, counted: bool) -> None:
        """cp.async.mbarrier.arrive; ``counted``: mbarrier.init counts this arrival (.noinc)."""
        machine, cohort = self.machine, execution.cohort
        cohort_row, lane, numbers, blocks = machine.mbarriers.find(execution, address)
        if not len(cohort_row):
            return
        if not counted:
            np.add.at(machine.mbarriers.pending, (numbers, blocks), 1)
        issue_clocks = None
        if machine.shared_races:
            clocks, rows = machine.clocks, cohort.rows[np.unique(cohort_row)]
            issue_clocks = clocks.copy_of(cohort.rows[cohort_row])
            arriving = np.zeros(self.committed.shape, bool)
            arriving[cohort.rows[cohort_row], lane] = True
            for flight in self.flights:
                first = arriving[flight.rows] & (flight.clock == 0)
                np.copyto(flight.clock, clocks.clock[flight.rows][:, None], where=first)
            machine.shared_races.release_lanes(execution)
            clocks.tick(rows)
        threads = execution._replace(cohort=SingleThreads(cohort, cohort_row, lane), lanes=None)
        self.arrivals.append(PendingArrival(threads, numbers, self.issued, issue_clocks))

    def execute(self, arrival: PendingArrival) -> None:
        """Executes a pending arrival."""
        self.arrivals.remove(arrival)
        threads = arrival.threads.cohort
        assert isinstance(threads, SingleThreads)
        chosen = np.zeros(self.committed.shape, bool)
        chosen[threads.rows, threads.lane] = True
        self._finish(lambda f: chosen[f.rows] & (f.number < arrival.before))
        self.machine.mbarriers.arrive_later(arrival.threads, arrival.barriers, arrival.issue_clocks)
