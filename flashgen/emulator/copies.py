"""cp.async: copies from global to shared memory that land when their thread waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.access import check_window, count_sectors, locate, shared_base, spread
from flashgen.emulator.cohort import Cohort
from flashgen.emulator.memory import ELEMENT, SHIFT
from flashgen.emulator.recorder import READ

if TYPE_CHECKING:
    from flashgen.emulator.machine import Machine

Array = npt.NDArray[Any]


class Flight:
    """Copies issued by one execution of one instruction and not landed yet."""

    __slots__ = ("data", "group", "lanes", "pc", "rows", "size", "to")

    def __init__(
        self, rows: Array, lanes: Array | None, to: Array, data: Array, group: Array, pc: int
    ) -> None:
        self.rows = rows
        self.lanes = lanes  # (n, 32), None: all
        self.to = to  # offsets into the shared arena (n, 32)
        self.data = data  # (n, 32)
        self.group = group  # number of the group of each thread (n, 32)
        self.pc = pc
        self.size = data.dtype.itemsize


class Copies:
    """All copies in flight of a wave; groups are counted per thread, as PTX has it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.committed = np.zeros((len(machine.row_block), 32), np.int32)
        self.flights: list[Flight] = []

    def issue(
        self, C: Cohort, to: Any, source: Any, lanes: Any, size: int, read: Any, pc: int
    ) -> None:
        """Starts a copy of ``size`` bytes per lane, of which ``read`` come from global memory."""
        m = self.machine
        n = C.n
        check_window(m, C, to, lanes, size, pc, m.shared_size, "shared")
        offset = spread(to + shared_base(m, C), n)
        full_lanes = None if lanes is None else spread(lanes, n)
        if m.recorder is not None:
            m.recorder.shared(C, to, full_lanes, size, pc)
        if m.shared_races:
            m.shared_races.depart(C, offset, size, pc, full_lanes)
        data = self._fetch(C, source, full_lanes, size, read, pc)
        group = self.committed[C.rows]
        self.flights.append(Flight(C.rows, full_lanes, offset, data, group, pc))

    def _fetch(
        self, C: Cohort, source: Any, lanes: Array | None, size: int, read: Any, pc: int
    ) -> Array:
        """The data of a copy; bytes beyond ``read`` are zero and are not accessed."""
        n = C.n
        out = np.zeros((n, 32), ELEMENT[size])
        wanted = np.minimum(spread(read, n), size)
        whole = wanted == size
        if whole.all():
            self._read(C, source, lanes, size, out, pc)
            return out
        some = whole if lanes is None else whole & lanes
        if some.any():
            self._read(C, source, some, size, out, pc)
        partial = (wanted > 0) & ~whole
        if lanes is not None:
            partial &= lanes
        if partial.any():
            octets = out.view(np.uint8).reshape(n, 32, size)
            for byte in range(size):
                here = partial & (wanted > byte)
                if here.any():
                    got = np.zeros((n, 32), np.uint8)
                    self._read(C, source + byte, here, 1, got, pc)
                    octets[..., byte][here] = got[here]
        return out

    def _read(
        self, C: Cohort, source: Any, lanes: Array | None, size: int, out: Array, pc: int
    ) -> None:
        m = self.machine
        address = spread(source, C.n)
        offset = locate(m, C, address, lanes, size, pc, False)
        m.counters.global_read_bytes += offset.size * size
        m.counters.global_read_sectors += count_sectors(C, offset, lanes)
        if m.recorder is not None:
            m.recorder.whole(C, offset, lanes, size, pc, READ)
        if m.global_races:
            m.global_races.read(C, offset, size, pc, lanes)
        values = m.memory.flat.view[size].take(offset >> SHIFT[size])
        if lanes is None:
            out[...] = values
        else:
            out[lanes] = values

    def commit(self, C: Cohort, lanes: Any) -> None:
        """Closes the current group of each thread."""
        if lanes is None:
            self.committed[C.rows] += 1
        else:
            self.committed[C.rows] += spread(lanes, C.n)

    def wait(self, C: Cohort, left: int | None, lanes: Any) -> None:
        """Lands all but the ``left`` newest groups of each thread; None: everything."""
        if not self.flights:
            return
        limit = np.full(self.committed.shape, -1, np.int32)
        if left is None:
            here: Any = np.full((C.n, 32), np.iinfo(np.int32).max, np.int32)
        else:
            here = self.committed[C.rows] - np.int32(left)
        if lanes is not None:
            here = np.where(spread(lanes, C.n), here, -1)
        limit[C.rows] = here
        kept = []
        for flight in self.flights:
            done = flight.group < limit[flight.rows]
            if flight.lanes is not None:
                done &= flight.lanes
            if done.all():
                self._land(flight, None)
            elif not done.any():
                kept.append(flight)
            else:
                self._land(flight, done)
                rest = ~done if flight.lanes is None else flight.lanes & ~done
                if rest.any():
                    flight.lanes = rest
                    kept.append(flight)
        self.flights = kept

    def _land(self, flight: Flight, lanes: Array | None) -> None:
        m = self.machine
        index, data = flight.to >> SHIFT[flight.size], flight.data
        if lanes is not None:
            index, data = index[lanes], data[lanes]
        m.counters.shared_write_bytes += data.size * flight.size
        m.shared.view[flight.size][index] = data
        if m.shared_races:
            m.shared_races.land(flight.rows, flight.to, flight.size, lanes)
