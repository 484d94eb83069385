"""Shared memory: races between warps of a block, and reads of bytes never written.

For each vector (see `shadow`) the checker keeps the stamp of the last write and, per warp, the
clock of the last read. While a cp.async is in flight, no other access to its bytes is allowed.
Order is tracked between warps; `shadow` tracks it between the lanes of a warp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flashgen.shared.errors import EmulatorError
from ptx_emulator.checks import shadow
from ptx_emulator.checks.async_proxy import AsyncProxy
from ptx_emulator.checks.clocks import ATOMIC, CLOCK_SHIFT, WARP, StrongAccess
from ptx_emulator.checks.shadow import SharedAccess, SharedShadow
from ptx_emulator.errors import OutOfBounds, RaceError, UninitialisedRead, way_out
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Execution, Wave

_LOG_LIMIT = 2048
_PC_BITS = 32
_WEAK, _STRONG, _RACING = range(3)  # kinds of reads: strong are atomic or polls, racing volatile


class _Reads(NamedTuple):
    """Reads that have not been entered into the shadow yet."""

    rows: Array
    where: Array
    size: int
    pc: int
    clock: Array
    kind: int


class SharedRaces(SharedShadow):
    """Race checker of the shared memory of a wave."""

    def __init__(self, machine: Wave, blocks: int) -> None:
        super().__init__(machine, blocks)
        kinds = (_WEAK, _STRONG, _RACING) if machine.program.racing else (_WEAK, _STRONG)
        # By kind, the last read of each warp: of each vector the clock and the instruction, and the
        # clock of any.
        self.last_reads: dict[int, Array] = {}
        self.log: list[_Reads] = []
        self._kinds_read: set[int] = set()  # in this wave; most kernels have weak reads alone
        self.last_read = {kind: np.zeros((blocks, self.warps), np.int64) for kind in kinds}
        # Of accesses to other blocks of the cluster: their latest clock, by block and warp.
        self.remote_clock = np.zeros((len(machine.blocks), machine.cluster_warps), np.int64)
        self.remote_pc = np.zeros(self.remote_clock.shape, np.int64)
        asynchronous = machine.program.asynchronous
        self.proxy = AsyncProxy(self, self._against_reads) if asynchronous else None

    def barrier_of_all(self, blocks: Array) -> None:
        """A barrier of all warps of the blocks completed."""
        self.clocks.barrier_of_all(blocks)
        # Reads before such a barrier cannot race with later accesses.
        passed = np.zeros(len(self.last_read[_WEAK]), bool)
        passed[blocks] = True
        for last in self.last_read.values():
            last[blocks] = 0
        row_block = self.machine.row_block
        self.accessed[passed[row_block]] = False
        self.releases = {row: r for row, r in self.releases.items() if not passed[row_block[row]]}
        self.lane_reads = [e for e in self.lane_reads if not passed[row_block[e.access.rows]].all()]
        self.log = [e for e in self.log if not passed[row_block[e.rows]].all()]

    # ---- other blocks of the cluster

    def note_remote(self, rows: Array, blocks: Array, pc: int) -> None:
        """Warps ``rows`` (k,) access shared memory of ``blocks`` (k,)."""
        at = (blocks, self.machine.row_member[rows])
        self.remote_clock[at], self.remote_pc[at] = self.clocks.clock[rows], pc

    def block_exits(self, blocks: Array) -> None:
        """Checks that accesses of other blocks to the memory of these are ordered before."""
        m = self.machine
        for block in blocks.tolist():
            cluster, rank = divmod(block, m.cluster_size)
            own = slice(rank * m.warps, (rank + 1) * m.warps)
            seen = self.clocks.seen[cluster, own, : self.warps].max(axis=0)
            seen[own] = self.remote_clock[block, own]
            late = np.flatnonzero(self.remote_clock[block] > seen)
            if len(late):
                row, pc = cluster * self.warps + int(late[0]), int(self.remote_pc[block, late[0]])
                what = "a block may exit before another block of its cluster accesses its memory"
                where = m.place(row, None, pc)
                numbers = f"the shared memory of rank {rank} of the cluster"
                advice = "let every block wait at a barrier of the cluster before it exits"
                raise OutOfBounds(what, where=where, numbers=numbers, way_out=advice)

    # ---- accesses; ``where`` holds offsets into `Wave.shared` (n, k)

    def read(self, here: Execution, where: Array, size: int) -> None:
        """Checks reads against earlier writes, and records them."""
        self._read(self._access(here, where, size))

    def write(self, here: Execution, where: Array, size: int) -> None:
        """Checks writes against earlier reads and writes, and records them."""
        if here.pc in self.machine.strong and self.machine.program.accesses.synchronises:
            self.strong_access(here)
        self._write(self._access(here, where, size))

    def atomic(self, here: Execution, where: Array, size: int) -> None:
        if self.machine.program.accesses.synchronises:
            self.strong_access(here)
        access = self._access(here, where, size)
        self._read(access)
        self._write(access)

    def start_copy(self, here: Execution, where: Array, size: int) -> None:
        """A cp.async starts: its bytes are in flight."""
        self._write(self._access(here, where, size), shadow.FLIGHT)

    def finish_copy(
        self, rows: Array, where: Array, size: int, lanes: Any, clock: Array | None = None
    ) -> None:
        """A cp.async has been waited for: it becomes a write of its warp.

        ``clock`` (n,) is an earlier time of each warp at which it counts as complete, or 0.
        """
        stamps = self._own_stamps(rows, False)
        if clock is not None and clock.any():
            warp = self.machine.row_member[rows]
            earlier = (clock << CLOCK_SHIFT | warp).astype(np.uint32)
            stamps = np.where(clock > 0, earlier, stamps)
        if lanes is not None:
            place, lane = np.nonzero(lanes)
            stamps, where = stamps[place], where[lanes][:, None]
            self.put(self.writer, where, size, lane.astype(np.uint8))
            rows = rows[place]
        elif where.shape[1] == 32:
            self.put(self.writer, where, size, np.arange(32, dtype=np.uint8)[None, :])
        self.put(self.written, where, size, stamps)
        self.accessed[rows] = True

    def _access(self, here: Execution, where: Array, size: int) -> SharedAccess:
        """An access by whole rows, or by single lanes if some lanes are inactive."""
        cohort, pc = here.cohort, here.pc
        strong = pc in self.machine.strong
        racing = strong and pc in self.machine.program.racing
        if here.lanes is not None:
            row, lane = np.nonzero(here.active)
            chosen = here.spread(where)[row, lane][:, None]
            rows = cohort.rows[row]
            return SharedAccess(cohort, rows, chosen, size, pc, row, lane, strong, racing)
        if where.ndim == 0 or where.shape[0] != cohort.n:
            where = np.broadcast_to(where, (cohort.n, where.shape[1] if where.ndim else 1))
        return SharedAccess(cohort, cohort.rows, where, size, pc, strong=strong, racing=racing)

    def _read(self, a: SharedAccess) -> None:
        if not len(a.rows):
            return
        self._synchronise(a)
        self._against_writes(a, "read")
        m = self.machine
        clock = self.clocks.clock[a.rows]
        kind = _RACING if a.racing else _STRONG if a.strong else _WEAK
        self._kinds_read.add(kind)
        self.last_read[kind][m.row_cluster[a.rows], m.row_member[a.rows]] = clock
        self.log.append(_Reads(a.rows, a.where, a.size, a.pc, clock, kind))
        self.note_lanes_of_read(a, clock)
        if len(self.log) > _LOG_LIMIT:
            self._flush()

    def _write(self, a: SharedAccess, mark: Any = None) -> None:
        if not len(a.rows):
            return
        self._synchronise(a)
        self._against_writes(a, "write")
        self._against_reads(a)
        if self.proxy is not None:
            self.proxy.against_reads(a)
        self.put(self.writer_pc, a.where, a.size, a.pc)
        if mark is not None:
            self.put(self.written, a.where, a.size, mark)
            return
        own = self._own_stamps(a.rows, a.strong)
        self.put(self.written, a.where, a.size, own)
        self.note_lanes_of_write(a)
        if not a.strong:
            left = self.take(self.written, a.where, a.size)
            lost = left != own[:, None]
            if lost.any():
                self._report(a, lost, left, "write", together=True)

    def _synchronise(self, a: SharedAccess) -> None:
        """A strong access acquires and releases."""
        program = self.machine.program
        if not (a.strong and program.accesses.synchronises):
            return
        rows = np.repeat(a.rows, a.where.shape[1])
        self.clocks.synchronise(rows, a.where.reshape(-1), StrongAccess.of(self.machine, a.pc))

    def _own_stamps(self, rows: Array, strong: bool) -> Array:
        warp = self.machine.row_member[rows]
        stamp = self.clocks.clock[rows] << CLOCK_SHIFT | warp | (ATOMIC if strong else 0)
        return stamp.astype(np.uint32)

    # ---- checks

    def _against_writes(self, a: SharedAccess, verb: str) -> None:
        """Checks that accesses are ordered after earlier writes, and that reads have one."""
        stamps = self.take(self.written, a.where, a.size)
        if self.releases:
            self.against_partial_releases(a, stamps)
        fine = stamps < self.clocks.lane_floor[a.rows][:, None]
        if verb == "write" or "uninitialised_rows" in self.machine.config.allow:
            fine |= stamps == shadow.NEVER
        if not fine.all():
            bad = ~(fine | self._ordered(a, stamps, verb))
            if bad.any():
                self._report(a, bad, stamps, verb)
            self.lanes_against_writes(a, stamps, verb)

    def _ordered(self, a: SharedAccess, stamps: Array, verb: str) -> Array:
        """Whether the accesses with these stamps happened before the current ones of the rows."""
        blocks = self.machine.row_cluster[a.rows][:, None]
        warps = self.machine.row_member[a.rows][:, None]
        fine = self.clocks.ordered(blocks, warps, stamps)
        if a.strong:
            fine = fine | self.excused(a, stamps, verb)
        fine &= stamps < shadow.ASYNC
        if self.proxy is not None and (stamps >= shadow.ASYNC).any():
            fine |= self.proxy.known(blocks, warps, stamps)
        return fine

    def _against_reads(self, a: SharedAccess) -> None:
        """Checks that a write is ordered after reads of other warps, unless both are strong."""
        m = self.machine
        blocks, warps = m.row_cluster[a.rows], m.row_member[a.rows]
        known = self.clocks.seen[blocks, warps, : self.warps]
        excused = {_STRONG} if a.racing else {_STRONG, _RACING} if a.strong else set[int]()
        for kind in self._kinds_read - excused:
            unseen = self.last_read[kind][blocks] > known
            unseen[np.arange(len(warps)), warps] = False
            if not unseen.any():
                continue
            self._flush()
            for other in np.flatnonzero(unseen.any(axis=0)):
                reads = self.take(self.last_reads[kind][other], a.where, a.size)
                late = (reads >> _PC_BITS > known[:, other, None]) & (warps != other)[:, None]
                if late.any():
                    pc = int(reads[late][0]) & (1 << _PC_BITS) - 1
                    what = "race in shared memory: a write may overtake a read of another warp"
                    numbers = f"warp {other} reads there: {m.program.describe(pc)}"
                    advice = self.advice + m.forgives_guess(pc, a.strong)
                    site, clock = self.first(a, late)[1], int(reads[late][0]) >> _PC_BITS
                    row = int(site.cohort.rows[site.row])
                    if self.clocks.awaits_fence(row, int(other), clock):
                        advice = shadow.FENCE_AFTER_ATOMIC
                    self.fail(a, late, what, numbers, advice)
        self.lanes_against_reads(a)

    def _flush(self) -> None:
        """Enters the logged reads into the shadow."""
        if not self.last_reads:
            for kind in self.last_read:
                self.last_reads[kind] = np.zeros((self.warps, self.count), np.int64)
        for rows, where, size, pc, clock, kind in self.log:
            flat = self.last_reads[kind].reshape(-1)
            table = (self.machine.row_member[rows] * self.count << self.shift)[:, None]
            self.put(flat, table + where, size, clock << _PC_BITS | pc)
        self.log = []

    # ---- messages

    def _report(
        self, a: SharedAccess, bad: Array, stamps: Array, verb: str, together: bool = False
    ) -> None:
        """Raises for the first access that ``bad`` marks; ``together``: by one instruction."""
        m = self.machine
        vector, site = self.first(a, bad)
        stamp = int(stamps[bad][0])
        kind: type[EmulatorError] = RaceError
        writer = ""
        if stamp == shadow.NEVER:
            kind = UninitialisedRead
            problem = shadow.UNWRITTEN
            advice = shadow.WRITE_FIRST + way_out("uninitialised_rows")
        elif stamp == shadow.FLIGHT:
            writer = shadow.STILL_COPIED
            advice = "wait for it (cp.async.wait_group) and then pass a barrier"
            problem = f"race in shared memory: a {verb} of bytes that a cp.async is still writing"
        elif stamp >= shadow.ASYNC and self.proxy is not None:
            writer = self.proxy.describe(stamp)
            advice = "wait for its mbarrier first, in this warp or in one that it passes a barrier "
            advice += "with"
            if stamp == shadow.MBARRIER:
                advice = "do not access the memory of an mbarrier, or execute mbarrier.inval first"
            problem = f"race in shared memory: a {verb} and an asynchronous write are not ordered"
        else:
            writer = f"{m.member_name(stamp & WARP)} writes there"
            advice = self.advice + m.forgives_guess(site.pc, stamp & ATOMIC)
            row = int(site.cohort.rows[site.row])
            if self.clocks.awaits_fence(row, stamp & WARP, stamp >> CLOCK_SHIFT):
                advice = shadow.FENCE_AFTER_ATOMIC
            if verb == "write":
                advice += m.forgives_store(site, together)
            problem = f"race in shared memory: a {verb} and a write of another warp are not ordered"
        at = (vector << self.shift) % m.shared_pitch
        numbers = f"{a.size}-byte {verb} at shared offset {at}"
        if writer:
            numbers += f"; {writer}: {m.program.describe(int(self.writer_pc[vector]))}"
        numbers += shadow.VOLATILE if a.racing else ""
        m.fail(kind, problem, site, numbers, advice)
