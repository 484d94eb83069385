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
(:meth:`Clocks.order_after`). A write is in flight when it starts (:meth:`AsyncProxy.write`), and
its time is assigned when it completes (:meth:`AsyncProxy.completed`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator.checks import shadow
from ptx_emulator.checks.clocks import WARP, room
from ptx_emulator.checks.shadow import ASYNC, FLIGHT, NEVER, SharedAccess, SharedShadow
from ptx_emulator.errors import UninitialisedRead, way_out
from ptx_emulator.state.memory import Array

IN_FLIGHT = np.int64(1) << 62  # the time of a write that is in flight
_FEW = 16  # most different writers per access that are compared one by one
_RACE = "race in shared memory: "
_FENCE = (
    "execute fence.proxy.async.shared::cta in the writing warp, after its stores and before the "
    "barrier that the issuing thread passes"
)
_FENCE_AFTER_WAIT = (
    "execute fence.proxy.async.shared::cta in a warp that has waited for the mbarrier, before the "
    "barrier that the issuing thread passes"
)


class AsyncProxy:
    """Asynchronous accesses of a wave; uses the shadow of `SharedRaces`."""

    def __init__(
        self, shadow: SharedShadow, against_ordinary_reads: Callable[[SharedAccess], None]
    ) -> None:
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
        # By kind of agent, tables of the time of a read of each vector. Agents of a kind share
        # them, and reads of the same bytes that may be in progress together use different ones.
        self._tables: dict[str, list[Array]] = {}
        self._kind: dict[int, str] = {}
        self._readers = np.zeros(0, np.int64)  # columns of agents that have read
        self._last_read = np.zeros((0, len(shadow.clocks.seen)), np.int64)  # its time, per block
        # Of each asynchronous write: the column of its agent, and its time.
        self._writes = 0
        self._write_column = np.zeros(64, np.int64)
        self._write_time = np.zeros(64, np.int64)

    # ---- agents and order

    def agent(self, kind: str, number: Any, name: str = "") -> int:
        """The column of an agent, the same in all blocks; its name in messages is that of the
        first call, such as "wgmma of warpgroup 0".
        """
        column = self._columns.get((kind, number))
        if column is None:
            column = self._columns[kind, number] = self.clocks.new_column()
            self._names[column] = name or f"{kind} {number}"
            # Bulk stores of different threads rarely read the same bytes.
            self._kind[column] = kind if kind == "bulk" else f"{kind} {number}"
        return column

    # ---- accesses

    def read(self, access: SharedAccess, column: int) -> int:
        """Checks reads by the agent of a column, which start now.

        Returns:
            The time of these reads, for `Clocks.order_after` when they have been waited for.

        Raises:
            UninitialisedRead: bytes that were never written.
            RaceError: a write is not ordered before, or not visible to the proxy.
        """
        if not len(access.offsets):
            return 0  # the boxes lie outside the tensor
        self._against_writes(access, "read")
        self._reads += 1
        time = self._reads
        self._reader, self._reader_pc = room(time + 1, self._reader, self._reader_pc)
        self._reader[time], self._reader_pc[time] = column, access.pc
        self.shadow.put(self._table(access, column), access.offsets, access.size, np.uint32(time))
        if column not in self._readers:
            self._readers = np.append(self._readers, column)
            self._last_read = np.pad(self._last_read, ((0, 1), (0, 0)))
        first = access.rows if access.rows.ndim == 1 else access.rows[:, 0]
        blocks = self.machine.row_cluster[first]
        self._last_read[np.flatnonzero(self._readers == column), blocks] = time
        return time

    def _table(self, access: SharedAccess, column: int) -> Array:
        """The table into which reads by the agent of a column are entered."""
        tables = self._tables.setdefault(self._kind[column], [])
        first = access.rows.reshape(len(access.rows), -1)[:, :1]
        blocks, warps = np.divmod(first, self.shadow.warps)
        for table in tables:
            if self._kind[column] != "bulk":
                return table
            times = self.shadow.take(table, access.offsets, access.size)
            readers = self._reader[times]
            done = times <= self.clocks.seen[blocks, warps, readers]
            if (done | (readers == column)).all():
                return table
        tables.append(np.zeros(self.shadow.count, np.uint32))
        return tables[-1]

    def write(self, access: SharedAccess, column: int | Array) -> Array:
        """Checks writes, which start now and are in flight until `completed`.

        The column of their agents may be one for all writes, or one per write (g,).

        Returns:
            The numbers of these writes (g,), for `completed`.

        Raises:
            RaceError: an earlier access is not ordered before, or a write not visible to the proxy.
        """
        self._against_writes(access, "write")
        self._against_ordinary_reads(access)
        self.against_reads(access)
        count = len(access.offsets)
        numbers = self._writes + np.arange(count)
        self._writes += count
        tables = self._write_column, self._write_time
        self._write_column, self._write_time = room(self._writes, *tables)
        self._write_column[numbers] = column
        self._write_time[numbers] = IN_FLIGHT
        stamps = (numbers + int(ASYNC)).astype(np.uint32)
        shadow = self.shadow
        shadow.put(shadow.written, access.offsets, access.size, stamps)
        shadow.put(shadow.writer_pc, access.offsets, access.size, np.int32(access.pc))
        if len(np.unique(access.rows // shadow.warps)) < count:
            lost = shadow.take(shadow.written, access.offsets, access.size) != stamps[:, None]
            if lost.any():
                what = f"{_RACE}threads start asynchronous writes of the same bytes together"
                way_out = "execute it in one elected thread"
                numbers_text = f"{count} threads execute this instruction"
                shadow.fail(access, lost, what, numbers_text, way_out)
        return numbers

    def completed(self, numbers: Array, times: Array) -> None:
        """Marks writes as completed: they precede what comes after these times of their agent."""
        self._write_time[numbers] = times

    # ---- checks

    def ordered(self, blocks: Array, warps: Array, stamps: Array) -> Array:
        """Whether warps are ordered after the asynchronous writes with these stamps."""
        number = stamps.astype(np.int64) - int(ASYNC)
        real = (number >= 0) & (number < self._writes)
        return real & self.has_completed(blocks, warps, np.where(real, number, 0))

    def has_completed(self, blocks: Array, warps: Array, numbers: Any) -> Array:
        """Whether warps are ordered after the asynchronous writes with these numbers."""
        seen = self.clocks.seen[blocks, warps, self._write_column[numbers]]
        return np.asarray(seen >= self._write_time[numbers])

    def _against_writes(self, access: SharedAccess, verb: str) -> None:
        stamps = self.shadow.take(self.shadow.written, access.offsets, access.size)
        # (g, w, 1): each of w warps must be ordered.
        together = access.rows.reshape(len(access.rows), -1, 1)
        if self._visible(together, _different(stamps)[:, None], verb)[0].all():
            self.shadow.lanes_against_writes(access, stamps, verb)
            return
        fine, unfenced = self._visible(together, stamps[:, None], verb)
        if "cp_async_proxy" in self.machine.config.allow:
            fine |= unfenced & self._by_copies(access, True)[:, None]
            if fine.all():
                return
        index, member, vector = (int(i) for i in np.argwhere(~fine)[0])
        first = np.zeros(stamps.shape, bool)
        first[index, vector] = True
        stamp, only_unfenced = int(stamps[index, vector]), unfenced[index, member, vector]
        self._report_write(access, first, stamp, only_unfenced, verb)

    def _by_copies(self, access: SharedAccess, which: Any) -> Array:
        """The vectors (g, vectors) of ``which`` that a cp.async or an st.async wrote last."""
        code = self.machine.program.code
        writers = self.shadow.take(self.shadow.writer_pc, access.offsets, access.size)
        copies = [pc for pc in np.unique(writers).tolist() if "async" in code[pc].mods]
        return np.asarray(np.isin(writers, copies) & which)

    def _visible(self, rows: Array, stamps: Array, verb: str) -> tuple[Array, Array]:
        """Whether each write with these stamps is visible, and whether it lacks only a fence."""
        blocks, warps = np.divmod(rows, self.shadow.warps)
        agent, clock = self.clocks.decode(stamps)
        seen = self.clocks.seen
        ordinary = stamps < ASYNC
        ordered = ordinary & ((agent == warps) | (clock <= seen[blocks, warps, agent]))
        fenced = clock <= seen[blocks, warps, agent + self.shadow.warps]
        fine = ordered & fenced
        if not ordinary.all():
            fine |= self.ordered(blocks, warps, stamps)
        if verb == "write" or "uninitialised_rows" in self.machine.config.allow:
            fine |= stamps == NEVER
        return fine, ordered & ~fenced

    def against_reads(self, access: SharedAccess) -> None:
        """Checks that writes are ordered after asynchronous reads, also those of their warp."""
        if not self._reads:
            return
        blocks, warps = np.divmod(access.rows, self.shadow.warps)
        seen = self.clocks.seen[blocks, warps]
        unseen = seen[:, self._readers] < self._last_read[:, blocks].T
        if not unseen.any():
            return
        unsafe = self._readers[unseen.any(axis=0)].tolist()
        kinds = dict.fromkeys(self._kind[column] for column in unsafe)
        for table in [table for kind in kinds for table in self._tables[kind]]:
            times = self.shadow.take(table, access.offsets, access.size)
            late = times > np.take_along_axis(seen, self._reader[times], axis=1)
            if late.any():
                time = int(times[late][0])
                reader = self.machine.program.describe(int(self._reader_pc[time]))
                what = f"{_RACE}a write may overtake an asynchronous read"
                numbers = f"{self._names[int(self._reader[time])]} may still read there: {reader}"
                advice = "wait for that read (cp.async.bulk.wait_group.read, wgmma.wait_group), "
                advice += "and pass a barrier with the warp that writes"
                self.shadow.fail(access, late, what, numbers, advice)

    # ---- messages

    def describe(self, stamp: int) -> str:
        """The agent of an asynchronous write, and why the write is not visible yet."""
        number = stamp - int(ASYNC)
        if stamp == FLIGHT:
            return shadow.STILL_COPIED
        if not 0 <= number < self._writes:
            return "an mbarrier lies there"
        name = self._names[int(self._write_column[number])]
        flying = self._write_time[number] == IN_FLIGHT
        state = "which is still in flight" if flying else "whose completion this warp has not seen"
        return f"{name} writes there, {state}"

    def _report_write(
        self, access: SharedAccess, bad: Array, stamp: int, unfenced: bool, verb: str
    ) -> None:
        shared = self.shadow
        if stamp == NEVER:
            advice = shadow.WRITE_FIRST + way_out("uninitialised_rows")
            numbers = "an asynchronous read"
            shared.fail(access, bad, shadow.UNWRITTEN, numbers, advice, UninitialisedRead)
        writer = f"{self.machine.member_name(stamp & WARP)} writes there"
        agent = self.describe(stamp) if stamp >= ASYNC else writer
        problem = f"{_RACE}an asynchronous {verb} and a write are not ordered"
        program = self.machine.program
        writer_pc = int(shared.writer_pc[shared.first(access, bad)[0]])
        if unfenced:
            problem = f"{_RACE}an asynchronous {verb} of what ordinary stores wrote, without a "
            problem += "proxy fence"
            stores_later = program.code[writer_pc].name.startswith("st.async")
            advice = _FENCE_AFTER_WAIT if stores_later else _FENCE
            if self._by_copies(access, bad).any():
                advice += way_out("cp_async_proxy")
        elif stamp >= ASYNC:
            advice = "wait for it first, in the issuing warp or in one that it passes a barrier "
            advice += "with"
        else:
            advice = shared.advice
        shared.fail(access, bad, problem, f"{agent}: {program.describe(writer_pc)}", advice)


def _different(stamps: Array) -> Array:
    """The distinct values of each row, possibly repeated; the rows themselves if they are many."""
    distinct, last = [stamps.min(axis=1)], stamps.max(axis=1)
    while (distinct[-1] < last).any():
        if len(distinct) == _FEW:
            return stamps
        beyond = np.where(stamps > distinct[-1][:, None], stamps, NEVER)
        distinct.append(np.minimum(beyond.min(axis=1), last))
    return np.stack(distinct, axis=1)
