"""cp.async: copies from global to shared memory, executed when their thread waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.bounds import check_window
from flashgen.emulator.isa.semantics.memory import load_global
from flashgen.emulator.state.cohort import Cohort, active, spread
from flashgen.emulator.state.memory import ELEMENT, SHIFT
from flashgen.emulator.state.wave import Wave

Array = npt.NDArray[Any]


@dataclass(eq=False)
class PendingCopy:
    """The copies issued by one execution of an instruction, while they are in flight.

    Attributes:
        lanes: active lanes (n, 32); None: all.
        to: offsets into `Wave.shared` (n, 32).
        data: (n, 32).
        group: number of the group of each thread (n, 32).
    """

    rows: Array
    lanes: Array | None
    to: Array
    data: Array
    group: Array
    size: int


class AsyncCopies:
    """All copies of a wave that are in flight; groups are counted per thread, as in PTX."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        self.committed = np.zeros((len(machine.row_block), 32), np.int32)
        self.flights: list[PendingCopy] = []

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
        data = self._fetch(cohort, source, full_lanes, size, read, pc)
        group = self.committed[cohort.rows]
        self.flights.append(PendingCopy(cohort.rows, full_lanes, offset, data, group, size))

    def _fetch(
        self, cohort: Cohort, source: Any, lanes: Array | None, size: int, read: Any, pc: int
    ) -> Array:
        """The data of a copy; bytes after the first ``read`` are zero and are not accessed."""
        m, n = self.machine, cohort.n
        address = spread(source, n)
        wanted = np.minimum(spread(read, n), size)
        whole = wanted == size
        out: Array = np.zeros((n, 32), ELEMENT[size])
        if whole.all():
            out = load_global(m, cohort, address, lanes, size, pc)
            return out
        some = whole & active(cohort, lanes)
        if some.any():
            out = load_global(m, cohort, address, some, size, pc)
        partial = ~whole & active(cohort, lanes)
        octets = out.view(np.uint8).reshape(n, 32, size)
        for byte in range(size):
            here = partial & (wanted > byte)
            if here.any():
                octets[..., byte] |= load_global(m, cohort, address + byte, here, 1, pc)
        return out

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
        kept = []
        for flight in self.flights:
            done = flight.group < limit[flight.rows]
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
            m.shared_races.finish_copy(flight.rows, flight.to, flight.size, lanes)
