"""Shared memory: races between warps of a block, and reads of bytes never written.

For each vector (see `shadow`) the checker keeps the stamp of the last write and, per warp, the
clock of the last read. While a cp.async is in flight, no other access to its bytes is allowed.
Order is tracked between warps; the accesses of the lanes of one warp are assumed to be ordered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.async_proxy import AsyncProxy
from flashgen.emulator.checks.clocks import ATOMIC, CLOCK_SHIFT
from flashgen.emulator.checks.shadow import ASYNC, FLIGHT, MBARRIER, NEVER, SharedShadow
from flashgen.emulator.errors import RaceError, UninitialisedRead
from flashgen.emulator.state.cohort import Cohort
from flashgen.emulator.state.wave import Wave
from flashgen.errors import EmulatorError

Array = npt.NDArray[Any]
_WARP = np.uint32(31)
_LOG_LIMIT = 2048
_BARRIER = "separate the two accesses by a barrier that both warps pass"


class _Reads(NamedTuple):
    """Reads that have not been entered into the shadow yet."""

    rows: Array
    where: Array
    size: int
    clock: Array
    pc: int
    strong: bool


class SharedRaces(SharedShadow):
    """Race checker of the shared memory of a wave."""

    def __init__(self, machine: Wave, blocks: int) -> None:
        super().__init__(machine, blocks)
        # Clock of the last weak and of the last strong (atomic, volatile) read, per warp.
        self.read_clock: dict[bool, Array] = {}
        self.log: list[_Reads] = []
        self.last_read = {s: np.zeros((blocks, self.warps), np.int64) for s in (False, True)}
        self.proxy = None
        if machine.program.asynchronous:
            self.proxy = AsyncProxy(self, self.before_async_write)

    # ---- order

    def barrier(self, blocks: Array, released: Array | None, barrier: int | None) -> None:
        """A barrier completed: for whole blocks, or for the ``released`` warps of one block."""
        if released is None:
            self.clocks.barrier_of_all(blocks)
            # Reads before such a barrier cannot race with later accesses.
            passed = np.zeros(len(self.last_read[False]), bool)
            passed[blocks] = True
            for last in self.last_read.values():
                last[blocks] = 0
            m = self.machine
            self.log = [e for e in self.log if not passed[m.row_block[e.rows]].all()]
        elif barrier is not None:
            self.clocks.release(int(blocks[0]), barrier, released)

    def arrive(self, rows: Array, barriers: Array) -> None:
        m = self.machine
        self.clocks.arrive(m.row_block[rows], m.row_warp[rows], barriers)

    # ---- accesses; ``where`` holds offsets into `Wave.shared` (n, k)

    def read(self, cohort: Cohort, where: Array, size: int, pc: int, lanes: Any) -> None:
        """Checks reads against earlier writes, and records them."""
        self._read(_Access(cohort, where, size, pc, lanes), self._strong(pc))

    def _synchronise(self, a: _Access) -> None:
        program = self.machine.program
        if not program.synchronises or not len(a.rows):
            return
        if a.pc in program.releases:
            self.clocks.fence(np.unique(a.rows))
        width = a.where.shape[1]
        self.clocks.synchronise(np.repeat(a.rows, width), a.where.reshape(-1))

    def _read(self, a: _Access, strong: bool) -> None:
        if not len(a.rows):
            return
        if strong:
            self._synchronise(a)
        stamps = self._stamps(a)
        fine = stamps < self._per_row(a, self.clocks.floor_stamp, stamps)
        if not fine.all():
            bad = ~(fine | self._ordered(a, stamps, strong))
            if bad.any():
                self._report(a, bad, stamps, "read")
        m = self.machine
        clock = self.clocks.clock[a.rows]
        self.last_read[strong][m.row_block[a.rows], m.row_warp[a.rows]] = clock
        self.log.append(_Reads(a.rows, a.where, a.size, clock, a.pc, strong))
        if len(self.log) > _LOG_LIMIT:
            self._flush()

    def write(self, cohort: Cohort, where: Array, size: int, pc: int, lanes: Any) -> None:
        """Checks writes against earlier reads and writes, and records them."""
        self._write(_Access(cohort, where, size, pc, lanes), None, self._strong(pc))

    def atomic(self, cohort: Cohort, where: Array, size: int, pc: int, lanes: Any) -> None:
        access = _Access(cohort, where, size, pc, lanes)
        self._read(access, True)
        self._write(access, None, True)

    def start_copy(self, cohort: Cohort, where: Array, size: int, pc: int, lanes: Any) -> None:
        """A cp.async starts: its bytes are in flight."""
        self._write(_Access(cohort, where, size, pc, lanes), FLIGHT, False)

    def finish_copy(self, rows: Array, where: Array, size: int, lanes: Array | None) -> None:
        """A cp.async has been waited for: it becomes a write of its warp."""
        vectors = self._vectors(where, size)
        stamp = self._own_stamps(rows, False)
        stamps = np.broadcast_to(
            stamp.reshape((len(rows),) + (1,) * (vectors.ndim - 1)), vectors.shape
        )
        if lanes is not None:
            vectors, stamps = vectors[lanes], stamps[lanes]
        self.written[vectors] = stamps

    def place_mbarrier(self, where: Array, size: int) -> None:
        """Marks the bytes of an mbarrier; ordinary accesses to them are errors."""
        self.written[self._vectors(where, size)] = MBARRIER

    def _write(self, a: _Access, mark: Any, strong: bool) -> None:
        if not len(a.rows):
            return
        if strong:
            self._synchronise(a)
        stamps = self._stamps(a)
        fine = (stamps < self._per_row(a, self.clocks.floor_stamp, stamps)) | (stamps == NEVER)
        if not fine.all():
            bad = ~(fine | self._ordered(a, stamps, strong))
            if bad.any():
                self._report(a, bad, stamps, "write")
        self._against_reads(a, strong)
        if self.proxy is not None:
            places = None if a.places is None else a.places[0]
            self.proxy.against_reads(a.cohort, a.rows, a.where, a.size, a.pc, places)
        vectors = self._vectors(a.where, a.size)
        self.writer_pc[vectors] = a.pc
        if mark is not None:
            self.written[vectors] = mark
            return
        own = self._own_stamps(a.rows, strong).reshape((-1,) + (1,) * (vectors.ndim - 1))
        self.written[vectors] = np.broadcast_to(own, vectors.shape)
        left = self.written.take(vectors)
        if not strong and (left != own).any():
            self._report(a, left != own, left, "write")

    def _vectors(self, where: Array, size: int) -> Array:
        """Numbers of the vectors of each access, with a last axis when there are several."""
        first = where >> self.shift
        many = size >> self.shift
        return first if many <= 1 else first[..., None] + np.arange(many)

    def _stamps(self, a: _Access) -> Array:
        many = a.size >> self.shift
        first = a.where >> self.shift
        if many <= 1:
            return self.written.take(first)
        # Accesses are aligned to their size: a row of a 2-D view is one access.
        return self.written.reshape(-1, many).take(first // many, axis=0)

    def _per_row(self, a: _Access, values: Array, like: Array) -> Array:
        return values[a.rows].reshape((-1,) + (1,) * (like.ndim - 1))

    def _own_stamps(self, rows: Array, strong: bool) -> Array:
        warp = self.machine.row_warp[rows]
        stamp = self.clocks.clock[rows] << CLOCK_SHIFT | warp | (ATOMIC if strong else 0)
        return stamp.astype(np.uint32)

    def _ordered(self, a: _Access, stamps: Array, strong: bool) -> Array:
        """Whether the accesses with these stamps happened before the current ones of the rows."""
        blocks = self._per_row(a, self.machine.row_block, stamps)
        warps = self._per_row(a, self.machine.row_warp, stamps)
        agent = np.minimum((stamps & _WARP).astype(np.int64), self.warps - 1)
        clock = (stamps >> np.uint32(CLOCK_SHIFT)).astype(np.int64)
        fine = self.clocks.ordered(blocks, warps, clock, agent)
        if strong:
            fine = fine | ((stamps & np.uint32(ATOMIC)) != 0)
        fine &= stamps < ASYNC
        if self.proxy is not None and (stamps >= ASYNC).any():
            fine |= self.proxy.known(blocks, warps, stamps)
        return fine

    def _strong(self, pc: int) -> bool:
        return pc in self.machine.program.strong

    def _against_reads(self, a: _Access, strong: bool) -> None:
        """Checks that a write is ordered after reads of other warps, unless both are strong."""
        for kind in (False,) if strong else (False, True):
            self._against(a, kind)

    def before_async_write(
        self, cohort: Cohort, rows: Array, where: Array, size: int, pc: int, places: Array | None
    ) -> None:
        """Checks that asynchronous writes (g, k) by ``rows`` are ordered after ordinary reads."""
        self._against_reads(_Access(cohort, where, size, pc, None, rows, places), False)

    def _against(self, a: _Access, kind: bool) -> None:
        m = self.machine
        blocks, warps = m.row_block[a.rows], m.row_warp[a.rows]
        known = self.clocks.seen[blocks, warps, : self.warps]
        unseen = self.last_read[kind][blocks] > known
        unseen[np.arange(len(warps)), warps] = False
        if not unseen.any():
            return
        self._flush()
        vectors = self._vectors(a.where, a.size)
        extra = (1,) * (vectors.ndim - 1)
        for other in np.flatnonzero(unseen.any(axis=0)):
            clock = self.read_clock[kind][other].take(vectors)
            known = self.clocks.seen[blocks, warps, other]
            late = clock > known.reshape((-1, *extra))
            late &= (warps != other).reshape((-1, *extra))
            if late.any():
                place = tuple(int(i) for i in np.argwhere(late)[0])
                row, lane = a.origin(place)
                at = int(vectors[place]) << self.shift
                pc = int(self.reader_pc[vectors[place]])
                reader = m.program.describe(pc)
                m.fail(
                    RaceError,
                    "race in shared memory: a write may overtake a read of another warp",
                    a.cohort,
                    a.pc,
                    row=row,
                    lane=lane,
                    numbers=f"shared offset {at % m.shared_pitch}; "
                    f"warp {other} reads there: {reader}",
                    way_out=_BARRIER,
                )

    def _flush(self) -> None:
        """Enters the logged reads into the shadow."""
        if not self.read_clock:
            for kind in (False, True):
                self.read_clock[kind] = np.zeros((self.warps, self.count), np.uint32)
            self.reader_pc = np.zeros(self.count, np.int32)
        m = self.machine
        for entry in self.log:
            flat = self.read_clock[entry.strong].reshape(-1)
            vectors = self._vectors(entry.where, entry.size)
            extra = (1,) * (vectors.ndim - 1)
            base = (m.row_warp[entry.rows] * self.count).reshape((-1, *extra))
            flat[vectors + base] = entry.clock.reshape((-1, *extra))
            self.reader_pc[vectors] = entry.pc
        self.log = []

    # ---- messages

    def _report(self, a: _Access, bad: Array, stamps: Array, verb: str) -> None:
        """Raises for the first access that ``bad`` marks."""
        m, program = self.machine, self.machine.program
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        row, lane = a.origin(place)
        at = int(a.where[place[:2]]) + (place[2] * self.vector if len(place) > 2 else 0)
        stamp = int(stamps[place])
        what = f"{a.size}-byte {verb} at shared offset {at % m.shared_pitch}"
        other = int(self.writer_pc[at >> self.shift])
        source = program.describe(other)
        kind: type[EmulatorError] = RaceError
        if stamp == NEVER:
            kind = UninitialisedRead
            problem = "shared memory is read that was never written"
            way_out = "write it first, and check the address and the bytes that were copied"
        elif stamp == FLIGHT:
            what += f"; a cp.async that has not been waited for writes there: {source}"
            way_out = "wait for it (cp.async.wait_group) and then pass a barrier"
            problem = f"race in shared memory: a {verb} of bytes that a cp.async is still writing"
        elif stamp >= ASYNC and self.proxy is not None:
            what += f"; {self.proxy.describe(stamp)}: {source}"
            way_out = (
                "wait for its mbarrier first, in this warp or in one that it passes a barrier with"
            )
            if stamp == MBARRIER:
                way_out = "do not access the memory of an mbarrier, or execute mbarrier.inval first"
            problem = f"race in shared memory: a {verb} and an asynchronous write are not ordered"
        else:
            what += f"; warp {stamp & 31} writes there: {source}"
            way_out = _BARRIER
            problem = f"race in shared memory: a {verb} and a write of another warp are not ordered"
        m.fail(kind, problem, a.cohort, a.pc, row=row, lane=lane, numbers=what, way_out=way_out)


class _Access:
    """An access by whole rows (n, k), or by single lanes (m, 1) if some lanes are inactive."""

    def __init__(
        self,
        cohort: Cohort,
        where: Array,
        size: int,
        pc: int,
        lanes: Any,
        rows: Array | None = None,
        places: Array | None = None,
    ) -> None:
        self.cohort, self.size, self.pc = cohort, size, pc
        self.places: tuple[Array, Array | None] | None
        if rows is not None:
            # Single threads of the cohort, each with many addresses: (g, k).
            self.rows, self.where = rows, where
            self.places = (np.arange(len(rows)) if places is None else places, None)
            return
        if where.ndim == 0 or where.shape[0] != cohort.n:
            where = np.broadcast_to(where, (cohort.n, where.shape[1] if where.ndim else 1))
        if lanes is None:
            self.rows, self.where, self.places = cohort.rows, where, None
        else:
            row, lane = np.nonzero(np.broadcast_to(lanes, (cohort.n, 32)))
            self.rows = cohort.rows[row]
            self.where = np.broadcast_to(where, (cohort.n, 32))[row, lane][:, None]
            self.places = (row, lane)

    def origin(self, place: tuple[int, ...]) -> tuple[int, int | None]:
        """The row of the cohort and the lane of an element."""
        if self.places is None:
            return place[0], place[1]
        row, lane = self.places
        return int(row[place[0]]), None if lane is None else int(lane[place[0]])
