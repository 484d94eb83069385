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
    offsets: Array
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
        """Orders the warps of blocks after a barrier of all of them."""
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
        """Records that warps ``rows`` (k,) access shared memory of ``blocks`` (k,)."""
        index = (blocks, self.machine.row_member[rows])
        self.remote_clock[index], self.remote_pc[index] = self.clocks.clock[rows], pc

    def block_exits(self, blocks: Array) -> None:
        """Checks that accesses of other blocks to the memory of these precede their exits."""
        machine = self.machine
        for block in blocks.tolist():
            cluster, rank = divmod(block, machine.cluster_size)
            own_warps = slice(rank * machine.warps, (rank + 1) * machine.warps)
            seen = self.clocks.seen[cluster, own_warps, : self.warps].max(axis=0)
            seen[own_warps] = self.remote_clock[block, own_warps]
            late = np.flatnonzero(self.remote_clock[block] > seen)
            if len(late):
                row, pc = cluster * self.warps + int(late[0]), int(self.remote_pc[block, late[0]])
                what = "a block may exit before another block of its cluster accesses its memory"
                where = machine.location(row, None, pc)
                numbers = f"the shared memory of rank {rank} of the cluster"
                advice = "let every block wait at a barrier of the cluster before it exits"
                raise OutOfBounds(what, where=where, numbers=numbers, way_out=advice)

    # ---- accesses; ``offsets`` holds offsets into `Wave.shared` (n, k)

    def read(self, execution: Execution, offsets: Array, size: int) -> None:
        """Checks reads against earlier writes, and records them."""
        self._read(self._access(execution, offsets, size))

    def write(self, execution: Execution, offsets: Array, size: int) -> None:
        """Checks writes against earlier reads and writes, and records them."""
        if execution.pc in self.machine.strong and self.machine.program.accesses.synchronises:
            self.strong_access(execution)
        self._write(self._access(execution, offsets, size))

    def atomic(self, execution: Execution, offsets: Array, size: int) -> None:
        if self.machine.program.accesses.synchronises:
            self.strong_access(execution)
        access = self._access(execution, offsets, size)
        self._read(access)
        self._write(access)

    def start_copy(self, execution: Execution, offsets: Array, size: int) -> None:
        """Records the start of a cp.async: its bytes are in flight."""
        self._write(self._access(execution, offsets, size), shadow.FLIGHT)

    def finish_copy(
        self, rows: Array, offsets: Array, size: int, lanes: Any, clock: Array | None = None
    ) -> None:
        """Records that a cp.async has been waited for: it becomes a write of its warp.

        ``clock`` (n, 32) is an earlier time of each lane at which it counts as complete, or 0.
        """
        stamps = np.broadcast_to(self._own_stamps(rows, False)[:, None], offsets.shape)
        if clock is not None and clock.any():
            warp = self.machine.row_member[rows][:, None]
            earlier = (clock << CLOCK_SHIFT | warp).astype(np.uint32)
            stamps = np.where(clock > 0, earlier, stamps)
        if lanes is not None:
            row_index, lane = np.nonzero(lanes)
            stamps, offsets = stamps[lanes], offsets[lanes][:, None]
            self.put(self.writer, offsets, size, lane.astype(np.uint8))
            rows = rows[row_index]
        elif offsets.shape[1] == 32:
            self.put(self.writer, offsets, size, np.arange(32, dtype=np.uint8)[None, :])
        self.put(self.written, offsets, size, stamps)
        self.accessed[rows] = True

    def _access(self, execution: Execution, offsets: Array, size: int) -> SharedAccess:
        """An access by whole rows, or by single lanes if some lanes are inactive."""
        cohort, pc = execution.cohort, execution.pc
        strong = pc in self.machine.strong
        racing = strong and pc in self.machine.program.racing
        if execution.lanes is not None:
            row, lane = np.nonzero(execution.active)
            chosen = execution.spread(offsets)[row, lane][:, None]
            rows = cohort.rows[row]
            return SharedAccess(cohort, rows, chosen, size, pc, row, lane, strong, racing)
        if offsets.ndim == 0 or offsets.shape[0] != cohort.n:
            offsets = np.broadcast_to(offsets, (cohort.n, offsets.shape[1] if offsets.ndim else 1))
        return SharedAccess(cohort, cohort.rows, offsets, size, pc, strong=strong, racing=racing)

    def _read(self, access: SharedAccess) -> None:
        if not len(access.rows):
            return
        self._synchronise(access)
        self._against_writes(access, "read")
        machine = self.machine
        clock = self.clocks.clock[access.rows]
        kind = _RACING if access.racing else _STRONG if access.strong else _WEAK
        self._kinds_read.add(kind)
        members = machine.row_cluster[access.rows], machine.row_member[access.rows]
        self.last_read[kind][members] = clock
        self.log.append(_Reads(access.rows, access.offsets, access.size, access.pc, clock, kind))
        self.note_lanes_of_read(access, clock)
        if len(self.log) > _LOG_LIMIT:
            self._flush()

    def _write(self, access: SharedAccess, mark: Any = None) -> None:
        if not len(access.rows):
            return
        self._synchronise(access)
        self._against_writes(access, "write")
        self._against_reads(access)
        if self.proxy is not None:
            self.proxy.against_reads(access)
        self.put(self.writer_pc, access.offsets, access.size, access.pc)
        if mark is not None:
            self.put(self.written, access.offsets, access.size, mark)
            return
        own_stamps = self._own_stamps(access.rows, access.strong)
        self.put(self.written, access.offsets, access.size, own_stamps)
        self.note_lanes_of_write(access)
        if not access.strong:
            left = self.take(self.written, access.offsets, access.size)
            lost = left != own_stamps[:, None]
            if lost.any():
                self._report(access, lost, left, "write", together=True)

    def _synchronise(self, access: SharedAccess) -> None:
        """Lets a strong access acquire and release."""
        program = self.machine.program
        if not (access.strong and program.accesses.synchronises):
            return
        rows = np.repeat(access.rows, access.offsets.shape[1])
        ordering = StrongAccess.from_instruction(self.machine, access.pc)
        self.clocks.synchronise(rows, access.offsets.reshape(-1), ordering)

    def _own_stamps(self, rows: Array, strong: bool) -> Array:
        warp = self.machine.row_member[rows]
        stamp = self.clocks.clock[rows] << CLOCK_SHIFT | warp | (ATOMIC if strong else 0)
        return stamp.astype(np.uint32)

    # ---- checks

    def _against_writes(self, access: SharedAccess, verb: str) -> None:
        """Checks that accesses are ordered after earlier writes, and that reads have one."""
        stamps = self.take(self.written, access.offsets, access.size)
        if self.releases:
            self.against_partial_releases(access, stamps)
        fine = stamps < self.clocks.lane_floor[access.rows][:, None]
        if verb == "write" or "uninitialised_rows" in self.machine.config.allow:
            fine |= stamps == shadow.NEVER
        if not fine.all():
            bad = ~(fine | self._ordered(access, stamps, verb))
            if bad.any():
                self._report(access, bad, stamps, verb)
            self.lanes_against_writes(access, stamps, verb)

    def _ordered(self, access: SharedAccess, stamps: Array, verb: str) -> Array:
        """Whether the accesses with these stamps happened before the current ones of the rows."""
        blocks = self.machine.row_cluster[access.rows][:, None]
        warps = self.machine.row_member[access.rows][:, None]
        fine = self.clocks.ordered(blocks, warps, stamps)
        if access.strong:
            fine = fine | self.excused(access, stamps, verb)
        fine &= stamps < shadow.ASYNC
        if self.proxy is not None and (stamps >= shadow.ASYNC).any():
            fine |= self.proxy.ordered(blocks, warps, stamps)
        return fine

    def _against_reads(self, access: SharedAccess) -> None:
        """Checks that a write is ordered after reads of other warps, unless both are strong."""
        machine = self.machine
        blocks, warps = machine.row_cluster[access.rows], machine.row_member[access.rows]
        seen = self.clocks.seen[blocks, warps, : self.warps]
        excused = (
            {_STRONG} if access.racing else {_STRONG, _RACING} if access.strong else set[int]()
        )
        for kind in self._kinds_read - excused:
            unseen = self.last_read[kind][blocks] > seen
            unseen[np.arange(len(warps)), warps] = False
            if not unseen.any():
                continue
            self._flush()
            for other in np.flatnonzero(unseen.any(axis=0)):
                reads = self.take(self.last_reads[kind][other], access.offsets, access.size)
                late = (reads >> _PC_BITS > seen[:, other, None]) & (warps != other)[:, None]
                if late.any():
                    pc = int(reads[late][0]) & (1 << _PC_BITS) - 1
                    what = "race in shared memory: a write may overtake a read of another warp"
                    numbers = f"warp {other} reads there: {machine.program.describe(pc)}"
                    advice = self.advice + machine.forgives_guess(pc, access.strong)
                    site, clock = self.first(access, late)[1], int(reads[late][0]) >> _PC_BITS
                    row = int(site.cohort.rows[site.row])
                    if self.clocks.awaits_fence(row, int(other), clock):
                        advice = shadow.FENCE_AFTER_ATOMIC
                    self.fail(access, late, what, numbers, advice)
        self.lanes_against_reads(access)

    def _flush(self) -> None:
        """Enters the logged reads into the shadow."""
        if not self.last_reads:
            for kind in self.last_read:
                self.last_reads[kind] = np.zeros((self.warps, self.count), np.int64)
        for rows, offsets, size, pc, clock, kind in self.log:
            flat = self.last_reads[kind].reshape(-1)
            table = (self.machine.row_member[rows] * self.count << self.shift)[:, None]
            self.put(flat, table + offsets, size, clock << _PC_BITS | pc)
        self.log = []

    # ---- messages

    def _report(
        self, access: SharedAccess, bad: Array, stamps: Array, verb: str, together: bool = False
    ) -> None:
        """Raises for the first access that ``bad`` marks; ``together``: by one instruction."""
        machine = self.machine
        vector, site = self.first(access, bad)
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
            writer = f"{machine.member_name(stamp & WARP)} writes there"
            advice = self.advice + machine.forgives_guess(site.pc, stamp & ATOMIC)
            row = int(site.cohort.rows[site.row])
            if self.clocks.awaits_fence(row, stamp & WARP, stamp >> CLOCK_SHIFT):
                advice = shadow.FENCE_AFTER_ATOMIC
            if verb == "write":
                advice += machine.forgives_store(site, together)
            problem = f"race in shared memory: a {verb} and a write of another warp are not ordered"
        offset = (vector << self.shift) % machine.shared_pitch
        numbers = f"{access.size}-byte {verb} at shared offset {offset}"
        if writer:
            numbers += f"; {writer}: {machine.program.describe(int(self.writer_pc[vector]))}"
        numbers += shadow.VOLATILE if access.racing else ""
        machine.fail(kind, problem, site, numbers, advice)
