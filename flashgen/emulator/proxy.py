"""Asynchronous reads and writes of shared memory: what bulk copies and wgmma do behind the warps.

They go through the asynchronous proxy, begin when an instruction starts them, and end at some time
that only a wait tells. Three things can be wrong with one:

- it touches what another warp does without being ordered after it (a race, as for any access);
- it touches what an ordinary store wrote, and no fence.proxy.async lies between the two;
- somebody touches the same bytes without being ordered after its end.

Who executes is an *agent*: one mbarrier's copies, one warpgroup's wgmma, one thread's bulk stores.
Each has a column in the clocks of the warps (:mod:`clocks`) and a time of its own that goes up: a
warp whose column holds t is ordered after all accesses of the agent up to its time t. Waiting sets
the column, and whatever orders warps passes it on. An access whose time nobody can know is still
going on, so the order in which the emulator ran things does not matter.

Reads take their time when they start (:meth:`AsyncProxy.read`), and a wait makes it known
(:meth:`AsyncProxy.finished`). Writes start in flight (:meth:`AsyncProxy.write`) and get their time
when they land (:meth:`AsyncProxy.landed`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.clocks import CLOCK_SHIFT, room
from flashgen.emulator.cohort import Cohort
from flashgen.emulator.errors import RaceError, UninitialisedRead

if TYPE_CHECKING:
    from flashgen.emulator.races import SharedRaces

Array = npt.NDArray[Any]

# Stamps of the shadow from ASYNC on are numbers of asynchronous writes; the last ones have names.
ASYNC = np.uint32(0xE0000000)
MBARRIER = np.uint32(0xFFFFFFFD)
FLIGHT = np.uint32(0xFFFFFFFE)
NEVER = np.uint32(0xFFFFFFFF)
IN_FLIGHT = np.int64(1) << 62  # the time of a write that has not landed
_WARP = np.uint32(31)
_FEW = 16  # writers of one operand
_FENCE = (
    "let the warp that wrote execute fence.proxy.async.shared::cta after its stores and before the "
    "barrier that the issuing thread passes"
)


class AsyncProxy:
    """Asynchronous accesses of a wave; its shadow is that of :class:`races.SharedRaces`.

    Rows, places and times are arrays over the accesses of one call, (g,); ``rows`` may be (g, w)
    when w warps make an access together, and then each of them must be ordered. Offsets ``where``
    are (g, k), into the arena of shared memory (`E.shared_base_of_row` plus the block's address),
    each of ``size`` bytes and aligned to them.
    """

    def __init__(self, races: SharedRaces) -> None:
        self.races = races
        self.machine = races.machine
        self.clocks = races.clocks
        self._columns: dict[tuple[Any, ...], int] = {}
        self._names: dict[int, str] = {}
        # Every asynchronous read: its agent's column, and the instruction; its number is its time.
        self._reads = 0
        self._reader = np.zeros(64, np.int64)
        self._reader_pc = np.zeros(64, np.int64)
        self._tables: dict[str, Array] = {}  # the last read of each granule
        self._table_of: dict[int, str] = {}
        self._readers = np.zeros(0, np.int64)  # columns of agents that have read
        self._last_read = np.zeros((0, len(races.clocks.seen)), np.int64)  # theirs, per block
        # Every asynchronous write: its agent's column, its time, and what started it.
        self._writes = 0
        self._write_column = np.zeros(64, np.int64)
        self._write_time = np.zeros(64, np.int64)

    # ---- agents and order

    def agent(self, kind: str, number: int, name: str = "") -> int:
        """The column of an agent, the same in all blocks; a new one when it is new.

        Args:
            kind: what it is, such as "warpgroup".
            number: which of the block.
            name: what it does, for messages, such as "wgmma of warpgroup 0".
        """
        column = self._columns.get((kind, number))
        if column is None:
            column = self._columns[kind, number] = self.clocks.new_column()
            self._names[column] = name or f"{kind} {number}"
            # Bulk stores of different threads hardly read the same bytes: they share a table.
            self._table_of[column] = kind if kind == "bulk" else f"{kind} {number}"
        return column

    def fence(self, rows: Array) -> None:
        """Warps (n,) execute fence.proxy.async."""
        self.clocks.fence_proxy(rows)

    # ---- accesses

    def read(
        self,
        C: Cohort,
        rows: Array,
        column: int,
        where: Array,
        pc: int,
        size: int = 16,
        places: Array | None = None,
    ) -> int:
        """Reads by one agent start.

        Args:
            C: for messages: the cohort that executes, of which ``places`` are the rows.
            rows: warps of the wave that make each access, (g,) or (g, w).
            column: from `agent`.
            where: offsets into the arena, (g, k).
            pc: the instruction.
            size: bytes at each, a power of two up to 128, to which the offsets are aligned. Large
                ones are checked faster.
            places: row of ``C`` of each access, (g,); the rows in their order by default.

        Returns:
            The time of these reads, for `finished`.

        Raises:
            UninitialisedRead: bytes that nobody has written.
            RaceError: a write that is not ordered before, or not visible to the proxy.
        """
        if not len(where):
            return 0  # all of it lies outside the tensor
        self._against_writes(C, rows, where, size, pc, places, "read")
        self._reads += 1
        time = self._reads
        self._reader, self._reader_pc = room(time + 1, self._reader, self._reader_pc)
        self._reader[time], self._reader_pc[time] = column, pc
        table = self._tables.get(self._table_of[column])
        if table is None:
            table = self._tables[self._table_of[column]] = np.zeros(self.races.count, np.uint32)
        self._put(table, where, size, np.uint32(time))
        if column not in self._readers:
            self._readers = np.append(self._readers, column)
            self._last_read = np.pad(self._last_read, ((0, 1), (0, 0)))
        first = rows if rows.ndim == 1 else rows[:, 0]
        blocks = self.machine.row_block[first]
        self._last_read[np.flatnonzero(self._readers == column), blocks] = time
        return time

    def finished(self, rows: Array, column: int, time: int) -> None:
        """Warps (n,) have waited for an agent's reads up to a time."""
        self.clocks.learn(rows, column, np.full(len(rows), time, np.int64))

    def write(
        self,
        C: Cohort,
        rows: Array,
        column: int | Array,
        where: Array,
        pc: int,
        size: int = 16,
        places: Array | None = None,
    ) -> Array:
        """Writes by one agent start: until they have landed and a wait says so, nobody may look.

        The column may be one for all, or one for each write (g,).

        Returns:
            The numbers of these writes (g,), for `landed`.

        Raises:
            RaceError: an earlier access is not ordered before, or a write not visible to the proxy.
        """
        self._against_writes(C, rows, where, size, pc, places, "write")
        self.races.before_async_write(C, rows, where, size, pc, places)
        self.against_reads(C, rows, where, size, pc, places)
        count = len(where)
        numbers = self._writes + np.arange(count)
        self._writes += count
        self._write_column, self._write_time = room(
            self._writes, self._write_column, self._write_time
        )
        self._write_column[numbers] = column
        self._write_time[numbers] = IN_FLIGHT
        stamps = (numbers + int(ASYNC)).astype(np.uint32)
        self._put(self.races.written, where, size, stamps)
        self._put(self.races.writer_pc, where, size, np.int32(pc))
        if len(np.unique(rows // self.races.warps)) < count:
            lost = self._take(self.races.written, where, size) != stamps[:, None]
            if lost.any():
                place, which = (int(i) for i in np.argwhere(lost)[0])
                self._fail(
                    C,
                    place if places is None else int(places[place]),
                    self._granule(where, size, place, which),
                    pc,
                    "threads start asynchronous writes of the same bytes together",
                    f"{count} threads execute this instruction",
                    "let one elected thread execute it",
                )
        return numbers

    def landed(self, numbers: Array, times: Array) -> None:
        """Writes have landed: who is ordered after these times of their agent sees them."""
        self._write_time[numbers] = times

    # ---- checks

    def _take(self, table: Array, where: Array, size: int) -> Array:
        """What a table of the shadow has for each granule, (g, granules)."""
        many = size >> self.races.shift
        if many <= 1:
            return table.take(where >> self.races.shift)
        rows: Array = table.reshape(-1, many).take(where // size, axis=0)
        return rows.reshape(len(where), -1)

    def _put(self, table: Array, where: Array, size: int, value: Any) -> None:
        """Sets it to one value, or to one for each access (g,)."""
        many = size >> self.races.shift
        if many <= 1:
            table[where >> self.races.shift] = value[:, None] if np.ndim(value) else value
        else:
            table.reshape(-1, many)[where // size] = (
                value[:, None, None] if np.ndim(value) else value
            )

    def _granule(self, where: Array, size: int, place: int, which: int) -> int:
        """The number of the granule that `_take` has at a place."""
        access, part = divmod(which, max(1, size >> self.races.shift))
        return int(where[place, access] >> self.races.shift) + part

    def known(self, blocks: Array, warps: Array, stamps: Array) -> Array:
        """Whether warps are ordered after writes with these stamps, where they are asynchronous."""
        number = stamps.astype(np.int64) - int(ASYNC)
        real = (number >= 0) & (number < self._writes)
        number = np.where(real, number, 0)
        seen = self.clocks.seen[blocks, warps, self._write_column[number]]
        return real & (seen >= self._write_time[number])

    def _against_writes(
        self,
        C: Cohort,
        rows: Array,
        where: Array,
        size: int,
        pc: int,
        places: Array | None,
        verb: str,
    ) -> None:
        stamps = self._take(self.races.written, where, size)
        writers = _different(stamps)
        together = rows.reshape(len(rows), -1, 1)  # (g, w, 1): each of w warps must see all
        if self._visible(together, writers[:, None], verb)[0].all():
            return
        fine, unfenced = self._visible(together, stamps[:, None], verb)
        place, member, which = (int(i) for i in np.argwhere(~fine)[0])
        self._report_write(
            C,
            place if places is None else int(places[place]),
            self._granule(where, size, place, which),
            bool(unfenced[place, member, which]),
            int(stamps[place, which]),
            pc,
            verb,
        )

    def _visible(self, rows: Array, stamps: Array, verb: str) -> tuple[Array, Array]:
        """(fine, ordered but without a fence) for writes with these stamps."""
        blocks, warps = np.divmod(rows, self.races.warps)
        agent = np.minimum((stamps & _WARP).astype(np.int64), self.races.warps - 1)
        clock = (stamps >> np.uint32(CLOCK_SHIFT)).astype(np.int64)
        seen = self.clocks.seen
        ordinary = stamps < ASYNC
        ordered = ordinary & ((agent == warps) | (clock <= seen[blocks, warps, agent]))
        fenced = clock <= seen[blocks, warps, agent + self.races.warps]
        fine = ordered & fenced
        if not ordinary.all():
            fine |= self.known(blocks, warps, stamps)
        if verb == "write":
            fine |= stamps == NEVER
        return fine, ordered & ~fenced

    def against_reads(
        self,
        C: Cohort,
        rows: Array,
        where: Array,
        size: int,
        pc: int,
        places: Array | None = None,
    ) -> None:
        """Writes (g, k) by ``rows`` must not overtake asynchronous reads, their own included."""
        if not self._reads:
            return
        blocks, warps = np.divmod(rows, self.races.warps)
        seen = self.clocks.seen[blocks, warps]
        unseen = seen[:, self._readers] < self._last_read[:, blocks].T
        if not unseen.any():
            return
        unsafe = self._readers[unseen.any(axis=0)].tolist()
        for name in dict.fromkeys(self._table_of[column] for column in unsafe):
            times = self._take(self._tables[name], where, size)
            columns = self._reader[times]
            late = times > np.take_along_axis(seen, columns, axis=1)
            if late.any():
                place, which = (int(i) for i in np.argwhere(late)[0])
                time = int(times[place, which])
                reader = self.machine.program.describe(int(self._reader_pc[time]))
                self._fail(
                    C,
                    place if places is None else int(places[place]),
                    self._granule(where, size, place, which),
                    pc,
                    "a write may overtake an asynchronous read",
                    f"{self._names[int(self._reader[time])]} may still read there: {reader}",
                    "wait until that has read (cp.async.bulk.wait_group.read, wgmma.wait_group), "
                    "and let a barrier say so to the warp that writes",
                )

    # ---- messages

    def describe(self, stamp: int) -> str:
        """Who made an asynchronous write, and why nobody may look yet."""
        number = stamp - int(ASYNC)
        if stamp == FLIGHT:
            return "a cp.async that nobody has waited for writes there"
        if not 0 <= number < self._writes:
            return "an mbarrier lies there"
        name = self._names[int(self._write_column[number])]
        flying = self._write_time[number] == IN_FLIGHT
        state = "which is still in flight" if flying else "whose completion this warp has not seen"
        return f"{name} writes there, {state}"

    def _report_write(
        self, C: Cohort, row: int, granule: int, unfenced: bool, stamp: int, pc: int, verb: str
    ) -> None:
        writer = self.machine.program.describe(int(self.races.writer_pc[granule]))
        if stamp == NEVER:
            self._fail(
                C,
                row,
                granule,
                pc,
                "shared memory is read that was never written",
                "an asynchronous read",
                "write it first, and check the address and the bytes that were copied",
                UninitialisedRead,
            )
        if unfenced:
            self._fail(
                C,
                row,
                granule,
                pc,
                f"an asynchronous {verb} of what ordinary stores wrote, without a proxy fence",
                f"warp {stamp & 31} writes there: {writer}",
                _FENCE,
            )
        if stamp >= ASYNC:
            numbers = f"{self.describe(stamp)}: {writer}"
            way_out = "wait for that first, in the warp that starts this or in one that it meets"
        else:
            numbers = f"warp {stamp & 31} writes there: {writer}"
            way_out = "separate the two by a barrier that both warps pass"
        problem = f"an asynchronous {verb} and a write are not ordered"
        self._fail(C, row, granule, pc, problem, numbers, way_out)

    def _fail(
        self,
        C: Cohort,
        row: int,
        granule: int,
        pc: int,
        problem: str,
        numbers: str,
        way_out: str,
        kind: type[RaceError] | type[UninitialisedRead] = RaceError,
    ) -> None:
        at = (granule << self.races.shift) % self.machine.shared_pitch
        what = problem if kind is UninitialisedRead else f"race in shared memory: {problem}"
        self.machine.fail(
            kind, what, C, pc, row=row, numbers=f"shared offset {at}; {numbers}", way_out=way_out
        )


def _different(stamps: Array) -> Array:
    """The different values of each row, of which there mostly are few; some more than once."""
    found, last = [stamps.min(axis=1)], stamps.max(axis=1)
    while (found[-1] < last).any():
        if len(found) == _FEW:
            return stamps
        beyond = np.where(stamps > found[-1][:, None], stamps, NEVER)
        found.append(np.minimum(beyond.min(axis=1), last))
    return np.stack(found, axis=1)
