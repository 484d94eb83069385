"""Races of asynchronous accesses to shared memory, by bulk copies and wgmma.

These accesses use the asynchronous proxy. They start with an instruction and end at an unknown time
before the wait that covers them. Three errors are possible:

- the access is not ordered after an access of another warp to the same bytes (an ordinary race);
- the bytes were written by an ordinary store without a fence.proxy.async in between;
- another access to the same bytes is not ordered after the end of the asynchronous access.

Asynchronous accesses are executed by *agents*: the copies of one mbarrier, the wgmma of one
warpgroup, the bulk stores of one thread. Each agent has a column in the vector clocks of the warps
(:mod:`clocks`) and its own increasing time: a warp whose column holds t is ordered after all
accesses of the agent up to time t. A wait sets the column, and every synchronisation between warps
propagates it. An access that is not covered by a column counts as still in progress, so the result
of the check does not depend on the order in which the emulator executes warps and copies.

The time of a read is assigned when it starts (:meth:`AsyncProxy.read`), and a wait publishes it
(:meth:`AsyncProxy.finished`). A write is in flight when it starts (:meth:`AsyncProxy.write`), and
its time is assigned when it completes (:meth:`AsyncProxy.completed`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.clocks import CLOCK_SHIFT, room
from flashgen.emulator.checks.shadow import ASYNC, FLIGHT, NEVER, SharedShadow
from flashgen.emulator.errors import RaceError, UninitialisedRead
from flashgen.emulator.state.cohort import Cohort

Array = npt.NDArray[Any]

IN_FLIGHT = np.int64(1) << 62  # the time of a write that is in flight
_WARP = np.uint32(31)
_FEW = 16  # most different writers per access that are compared one by one
_FENCE = (
    "execute fence.proxy.async.shared::cta in the writing warp, after its stores and before the "
    "barrier that the issuing thread passes"
)


class AsyncProxy:
    """Asynchronous accesses of a wave; uses the shadow of `SharedRaces`.

    Rows, places and times are arrays over the accesses of one call, (g,); ``rows`` may be (g, w)
    when w warps execute an access together; each of them must be ordered. Offsets ``where``
    are (g, k), into `Wave.shared`; each refers to ``size`` bytes and is aligned to ``size``.
    """

    def __init__(self, shadow: SharedShadow, against_ordinary_reads: Callable[..., None]) -> None:
        self.shadow = shadow
        self._against_ordinary_reads = against_ordinary_reads
        self.machine = shadow.machine
        self.clocks = shadow.clocks
        self._columns: dict[tuple[Any, ...], int] = {}
        self._names: dict[int, str] = {}
        # Of each asynchronous read: the column of its agent, and the instruction. The index of a
        # read is its time.
        self._reads = 0
        self._reader = np.zeros(64, np.int64)
        self._reader_pc = np.zeros(64, np.int64)
        self._tables: dict[str, Array] = {}  # time of the last read of each vector
        self._table_of: dict[int, str] = {}
        self._readers = np.zeros(0, np.int64)  # columns of agents that have read
        self._last_read = np.zeros(
            (0, len(shadow.clocks.seen)), np.int64
        )  # time of their last read, per block
        # Of each asynchronous write: the column of its agent, and its time.
        self._writes = 0
        self._write_column = np.zeros(64, np.int64)
        self._write_time = np.zeros(64, np.int64)

    # ---- agents and order

    def agent(self, kind: str, number: int, name: str = "") -> int:
        """The column of an agent, which is the same in all blocks; created at the first call.

        Args:
            kind: the kind of agent, such as "warpgroup".
            number: its number in the block.
            name: its name in messages, such as "wgmma of warpgroup 0".
        """
        column = self._columns.get((kind, number))
        if column is None:
            column = self._columns[kind, number] = self.clocks.new_column()
            self._names[column] = name or f"{kind} {number}"
            # Bulk stores of different threads rarely read the same bytes: they share a table.
            self._table_of[column] = kind if kind == "bulk" else f"{kind} {number}"
        return column

    def fence(self, rows: Array) -> None:
        """fence.proxy.async by warps (n,)."""
        self.clocks.fence_proxy(rows)

    # ---- accesses

    def read(
        self,
        cohort: Cohort,
        rows: Array,
        column: int,
        where: Array,
        pc: int,
        size: int = 16,
        places: Array | None = None,
    ) -> int:
        """Checks reads by one agent, which start now.

        Args:
            cohort: the cohort that executes, for messages.
            rows: warps of the wave that execute each access, (g,) or (g, w).
            column: from `agent`.
            where: offsets into `Wave.shared`, (g, k).
            pc: the instruction.
            size: bytes at each offset, a power of two up to 128, to which the offsets are aligned.
                Large sizes are checked faster.
            places: row of ``cohort`` of each access, (g,); by default 0, 1, 2, ...

        Returns:
            The time of these reads, for `finished`.

        Raises:
            UninitialisedRead: bytes that were never written.
            RaceError: a write is not ordered before, or not visible to the proxy.
        """
        if not len(where):
            return 0  # the boxes lie outside the tensor
        self._against_writes(cohort, rows, where, size, pc, places, "read")
        self._reads += 1
        time = self._reads
        self._reader, self._reader_pc = room(time + 1, self._reader, self._reader_pc)
        self._reader[time], self._reader_pc[time] = column, pc
        table = self._tables.get(self._table_of[column])
        if table is None:
            table = self._tables[self._table_of[column]] = np.zeros(self.shadow.count, np.uint32)
        self.shadow.put(table, where, size, np.uint32(time))
        if column not in self._readers:
            self._readers = np.append(self._readers, column)
            self._last_read = np.pad(self._last_read, ((0, 1), (0, 0)))
        first = rows if rows.ndim == 1 else rows[:, 0]
        blocks = self.machine.row_block[first]
        self._last_read[np.flatnonzero(self._readers == column), blocks] = time
        return time

    def finished(self, rows: Array, column: int, time: int) -> None:
        """Warps (n,) have waited for the reads of an agent up to ``time``."""
        self.clocks.order_after(rows, column, np.full(len(rows), time, np.int64))

    def write(
        self,
        cohort: Cohort,
        rows: Array,
        column: int | Array,
        where: Array,
        pc: int,
        size: int = 16,
        places: Array | None = None,
    ) -> Array:
        """Checks writes by one agent, which start now and are in flight until `completed`.

        The column may be one for all writes, or one per write (g,).

        Returns:
            The numbers of these writes (g,), for `completed`.

        Raises:
            RaceError: an earlier access is not ordered before, or a write not visible to the proxy.
        """
        self._against_writes(cohort, rows, where, size, pc, places, "write")
        self._against_ordinary_reads(cohort, rows, where, size, pc, places)
        self.against_reads(cohort, rows, where, size, pc, places)
        count = len(where)
        numbers = self._writes + np.arange(count)
        self._writes += count
        self._write_column, self._write_time = room(
            self._writes, self._write_column, self._write_time
        )
        self._write_column[numbers] = column
        self._write_time[numbers] = IN_FLIGHT
        stamps = (numbers + int(ASYNC)).astype(np.uint32)
        self.shadow.put(self.shadow.written, where, size, stamps)
        self.shadow.put(self.shadow.writer_pc, where, size, np.int32(pc))
        if len(np.unique(rows // self.shadow.warps)) < count:
            lost = self.shadow.take(self.shadow.written, where, size) != stamps[:, None]
            if lost.any():
                place, which = (int(i) for i in np.argwhere(lost)[0])
                self._fail(
                    cohort,
                    place if places is None else int(places[place]),
                    self.shadow.vector_at(where, size, place, which),
                    pc,
                    "threads start asynchronous writes of the same bytes together",
                    f"{count} threads execute this instruction",
                    "execute it in one elected thread",
                )
        return numbers

    def completed(self, numbers: Array, times: Array) -> None:
        """Writes have completed: they precede what is ordered after these times of their agent."""
        self._write_time[numbers] = times

    # ---- checks

    def known(self, blocks: Array, warps: Array, stamps: Array) -> Array:
        """Whether warps are ordered after the asynchronous writes with these stamps."""
        number = stamps.astype(np.int64) - int(ASYNC)
        real = (number >= 0) & (number < self._writes)
        number = np.where(real, number, 0)
        seen = self.clocks.seen[blocks, warps, self._write_column[number]]
        return real & (seen >= self._write_time[number])

    def _against_writes(
        self,
        cohort: Cohort,
        rows: Array,
        where: Array,
        size: int,
        pc: int,
        places: Array | None,
        verb: str,
    ) -> None:
        stamps = self.shadow.take(self.shadow.written, where, size)
        writers = _different(stamps)
        together = rows.reshape(len(rows), -1, 1)  # (g, w, 1): each of w warps must be ordered
        if self._visible(together, writers[:, None], verb)[0].all():
            return
        fine, unfenced = self._visible(together, stamps[:, None], verb)
        place, member, which = (int(i) for i in np.argwhere(~fine)[0])
        self._report_write(
            cohort,
            place if places is None else int(places[place]),
            self.shadow.vector_at(where, size, place, which),
            bool(unfenced[place, member, which]),
            int(stamps[place, which]),
            pc,
            verb,
        )

    def _visible(self, rows: Array, stamps: Array, verb: str) -> tuple[Array, Array]:
        """(correct, ordered but not fenced) for writes with these stamps."""
        blocks, warps = np.divmod(rows, self.shadow.warps)
        agent = np.minimum((stamps & _WARP).astype(np.int64), self.shadow.warps - 1)
        clock = (stamps >> np.uint32(CLOCK_SHIFT)).astype(np.int64)
        seen = self.clocks.seen
        ordinary = stamps < ASYNC
        ordered = ordinary & ((agent == warps) | (clock <= seen[blocks, warps, agent]))
        fenced = clock <= seen[blocks, warps, agent + self.shadow.warps]
        fine = ordered & fenced
        if not ordinary.all():
            fine |= self.known(blocks, warps, stamps)
        if verb == "write":
            fine |= stamps == NEVER
        return fine, ordered & ~fenced

    def against_reads(
        self,
        cohort: Cohort,
        rows: Array,
        where: Array,
        size: int,
        pc: int,
        places: Array | None = None,
    ) -> None:
        """Checks that writes (g, k) by ``rows`` are ordered after asynchronous reads.

        Asynchronous reads issued by the same warp are included.
        """
        if not self._reads:
            return
        blocks, warps = np.divmod(rows, self.shadow.warps)
        seen = self.clocks.seen[blocks, warps]
        unseen = seen[:, self._readers] < self._last_read[:, blocks].T
        if not unseen.any():
            return
        unsafe = self._readers[unseen.any(axis=0)].tolist()
        for name in dict.fromkeys(self._table_of[column] for column in unsafe):
            times = self.shadow.take(self._tables[name], where, size)
            columns = self._reader[times]
            late = times > np.take_along_axis(seen, columns, axis=1)
            if late.any():
                place, which = (int(i) for i in np.argwhere(late)[0])
                time = int(times[place, which])
                reader = self.machine.program.describe(int(self._reader_pc[time]))
                self._fail(
                    cohort,
                    place if places is None else int(places[place]),
                    self.shadow.vector_at(where, size, place, which),
                    pc,
                    "a write may overtake an asynchronous read",
                    f"{self._names[int(self._reader[time])]} may still read there: {reader}",
                    "wait for that read (cp.async.bulk.wait_group.read, wgmma.wait_group), "
                    "and pass a barrier with the warp that writes",
                )

    # ---- messages

    def describe(self, stamp: int) -> str:
        """The agent of an asynchronous write, and why the write is not visible yet."""
        number = stamp - int(ASYNC)
        if stamp == FLIGHT:
            return "a cp.async that has not been waited for writes there"
        if not 0 <= number < self._writes:
            return "an mbarrier lies there"
        name = self._names[int(self._write_column[number])]
        flying = self._write_time[number] == IN_FLIGHT
        state = "which is still in flight" if flying else "whose completion this warp has not seen"
        return f"{name} writes there, {state}"

    def _report_write(
        self, cohort: Cohort, row: int, vector: int, unfenced: bool, stamp: int, pc: int, verb: str
    ) -> None:
        writer = self.machine.program.describe(int(self.shadow.writer_pc[vector]))
        if stamp == NEVER:
            self._fail(
                cohort,
                row,
                vector,
                pc,
                "shared memory is read that was never written",
                "an asynchronous read",
                "write it first, and check the address and the bytes that were copied",
                UninitialisedRead,
            )
        if unfenced:
            self._fail(
                cohort,
                row,
                vector,
                pc,
                f"an asynchronous {verb} of what ordinary stores wrote, without a proxy fence",
                f"warp {stamp & 31} writes there: {writer}",
                _FENCE,
            )
        if stamp >= ASYNC:
            numbers = f"{self.describe(stamp)}: {writer}"
            way_out = (
                "wait for it first, in the issuing warp or in one that it passes a barrier with"
            )
        else:
            numbers = f"warp {stamp & 31} writes there: {writer}"
            way_out = "separate the two accesses by a barrier that both warps pass"
        problem = f"an asynchronous {verb} and a write are not ordered"
        self._fail(cohort, row, vector, pc, problem, numbers, way_out)

    def _fail(
        self,
        cohort: Cohort,
        row: int,
        vector: int,
        pc: int,
        problem: str,
        numbers: str,
        way_out: str,
        kind: type[RaceError] | type[UninitialisedRead] = RaceError,
    ) -> None:
        at = (vector << self.shadow.shift) % self.machine.shared_pitch
        what = problem if kind is UninitialisedRead else f"race in shared memory: {problem}"
        self.machine.fail(
            kind,
            what,
            cohort,
            pc,
            row=row,
            numbers=f"shared offset {at}; {numbers}",
            way_out=way_out,
        )


def _different(stamps: Array) -> Array:
    """The distinct values of each row, possibly repeated; the rows themselves if they are many."""
    found, last = [stamps.min(axis=1)], stamps.max(axis=1)
    while (found[-1] < last).any():
        if len(found) == _FEW:
            return stamps
        beyond = np.where(stamps > found[-1][:, None], stamps, NEVER)
        found.append(np.minimum(beyond.min(axis=1), last))
    return np.stack(found, axis=1)
