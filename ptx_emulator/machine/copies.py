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
from ptx_emulator.state.cohort import Cohort, SingleThreads, active, spread
from ptx_emulator.state.memory import ELEMENT, SHIFT, Array
from ptx_emulator.state.wave import Wave


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
        threads: which arrive, (k,); ``barriers``: the mbarrier of each.
        before: copies with lower numbers must be complete first.
        known: clocks of the warps of the threads at the time of issue; None without checkers.
    """

    threads: SingleThreads
    pc: int
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

    def issue(
        self, cohort: Cohort, to: Any, source: Any, lanes: Any, size: int, read: Any, pc: int
    ) -> None:
        """Starts a copy of ``size`` bytes per lane, of which ``read`` come from global memory."""
        m = self.machine
        n = cohort.n
        check_window(m, cohort, to, lanes, size, pc, m.shared_size, "shared")
        offset = spread(to + m.shared_base(cohort), n)
        full_lanes = None if lanes is None else spread(lanes, n)
        if m.recorder is not None:
            m.recorder.shared_access(cohort, to, full_lanes, size, pc)
        if m.shared_races:
            m.shared_races.start_copy(cohort, offset, size, pc, full_lanes)
        data, reads = self._fetch(cohort, source, full_lanes, size, read, pc)
        self.flights.append(
            PendingCopy(
                cohort.rows,
                full_lanes,
                offset,
                data,
                reads,
                self.committed[cohort.rows],
                size,
                self.issued,
                np.zeros(n, np.int64),
            )
        )
        self.issued += 1

    def _fetch(
        self, cohort: Cohort, source: Any, lanes: Array | None, size: int, read: Any, pc: int
    ) -> tuple[Array, CopySource | None]:
        """The data of a copy; bytes after the first ``read`` are zero and are not accessed.

        Also returns what is read, but for the lanes that read a part of ``size``.
        """
        m, n = self.machine, cohort.n
        races = m.global_races is not None
        address = spread(source, n)
        wanted = np.minimum(spread(read, n), size)
        whole = wanted == size
        out: Array = np.zeros((n, 32), ELEMENT[size])
        if whole.all():
            out = load_global(m, cohort, address, lanes, size, pc, False)
            offsets = address - m.memory.base
            return out, CopySource(m.memory.touched, offsets, size, pc) if races else None
        some, source_of = whole & active(cohort, lanes), None
        if some.any():
            out = load_global(m, cohort, address, some, size, pc, False)
            if races:
                offsets = address - m.memory.base
                source_of = CopySource(m.memory.touched, offsets, size, pc, some)
        partial = ~whole & active(cohort, lanes)
        octets = out.view(np.uint8).reshape(n, 32, size)
        for byte in range(size):
            here = partial & (wanted > byte)
            if here.any():
                octets[..., byte] |= load_global(m, cohort, address + byte, here, 1, pc)
        return out, source_of

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

    def arrive(self, cohort: Cohort, address: Any, counted: bool, lanes: Any, pc: int) -> None:
        """cp.async.mbarrier.arrive; ``counted``: mbarrier.init counts this arrival (.noinc)."""
        m = self.machine
        place, lane, numbers, blocks = m.mbarriers.find(cohort, address, lanes, pc)
        if not len(place):
            return
        if not counted:
            np.add.at(m.mbarriers.pending, (numbers, blocks), 1)
        known = None
        if m.shared_races:
            clocks, rows = m.shared_races.clocks, cohort.rows[np.unique(place)]
            known = clocks.of(cohort.rows[place])
            for flight in self.flights:
                first = np.isin(flight.rows, rows) & (flight.clock == 0)
                flight.clock[first] = clocks.clock[flight.rows[first]]
            clocks.tick(rows)
        threads = SingleThreads(cohort, place, lane)
        self.arrivals.append(PendingArrival(threads, pc, numbers, self.issued, known))

    def deliver(self) -> bool:
        """Executes pending arrivals when no cohort can run: all, or with a seed one.

        Returns:
            Whether there were any.
        """
        if not self.arrivals:
            return False
        random = self.machine.random
        for one in list(self.arrivals) if random is None else [random.choice(self.arrivals)]:
            self._deliver(one)
        return True

    def at_random(self) -> None:
        """With a seed, executes a pending arrival with probability 0.1."""
        random = self.machine.random
        if random is not None and self.arrivals and random.random() < 0.1:
            self._deliver(random.choice(self.arrivals))

    def _deliver(self, one: PendingArrival) -> None:
        self.arrivals.remove(one)
        m, threads = self.machine, one.threads
        chosen = np.zeros(self.committed.shape, bool)
        chosen[threads.rows, threads.lane] = True
        self._finish(lambda f: chosen[f.rows] & (f.number < one.before))
        m.mbarriers.arrive_later(threads, one.barriers, one.known, one.pc)
