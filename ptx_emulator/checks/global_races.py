"""Global memory: races between lanes and warps of a block, and between blocks of the launch.

Within a block, barriers order accesses (see :mod:`clocks`), between blocks only fences with atomics
(:mod:`block_order`), between the lanes of a warp what synchronises them (:mod:`shadow`). Atomics
never race with each other.

Reads of a buffer that has not been written are only stored in a list, because most buffers are
inputs. Of each vector the checker keeps the lane of the last write and of the last read, as its
number plus one; 0 is unknown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ptx_emulator.checks.block_order import BLOCK_SHIFT, LOW, BlockOrder, block_of
from ptx_emulator.checks.clocks import ATOMIC, CLOCK_SHIFT, WARP
from ptx_emulator.checks.copy_sources import CopySource, check_write
from ptx_emulator.checks.shadow import FENCE_AFTER_ATOMIC, SYNCHRONISE_LANES, VOLATILE
from ptx_emulator.checks.warp_reads import WarpReads
from ptx_emulator.errors import RaceError, way_out
from ptx_emulator.state.cohort import SingleThreads
from ptx_emulator.state.memory import Array, sparse_zeros
from ptx_emulator.state.wave import Execution, Site, Wave

_EVERY, _SEVERAL = 33, 34  # all lanes access the vector together; several do, one by one
_WARP = 0xFFFFFFF << BLOCK_SHIFT | WARP  # the bits of a stamp that name the block and the warp
LANES_OF_A_WARP = (
    "lanes of one warp access the same bytes, one of them writes, and nothing synchronises them in "
    "between"
)


class GlobalLanes:
    """The lanes of the last accesses to ``count`` vectors of device memory."""

    def __init__(self, machine: Wave, count: int) -> None:
        self.machine = machine
        self.tracks = "warp_synchronous" not in machine.config.allow
        self.writer, self.reader = (sparse_zeros(count, np.uint8) for _ in range(2))

    def lanes_of_vectors(self, execution: Execution, accesses: int, vectors: int) -> Array:
        """The lane of each vector of an instruction with this many accesses and vectors, flat."""
        cohort = execution.cohort
        if isinstance(cohort, SingleThreads):
            lane = np.repeat(cohort.lane + 1, accesses // cohort.n)
        elif execution.lanes is not None:
            lane = np.nonzero(execution.active)[1] + 1
        elif accesses == 32 * cohort.n:
            lane = np.tile(np.arange(1, 33), cohort.n)
        else:
            lane = np.full(accesses, _EVERY)
        lanes: Array = np.repeat(lane.astype(np.uint8), vectors // max(1, accesses))
        return lanes

    def unordered(
        self, verb: str, vectors: Array, lane: Array, before: Array, stamps: Array, rows: Array
    ) -> Array:
        """Which accesses conflict with an earlier one of another lane of their warps.

        Args:
            verb: "read" after write, "write" after write, or "overtake": write after read.
            before, stamps: of the earlier accesses and of these, see `global_races`.
        """
        races = self.machine.shared_races
        assert races is not None
        same: Array = ((before ^ stamps) & _WARP) == 0
        same &= (before & LOW) >> CLOCK_SHIFT >= self.machine.clocks.synced[rows]
        if not same.any() or not self.tracks:
            return np.zeros(len(same), bool)
        earlier = (self.reader if verb == "overtake" else self.writer).take(vectors)
        same &= (earlier != lane) & (earlier != 0)
        if verb != "read":
            same &= lane != _EVERY
        if verb != "overtake":
            same &= earlier != _EVERY
        for entry in np.flatnonzero(same) if races.partial else ():
            seen = races.partial.get(int(rows[entry]))
            if seen is not None and earlier[entry] < _EVERY:
                clocks = seen[:, int(earlier[entry]) - 1]
                clocks = clocks >= (int(before[entry]) & LOW) >> CLOCK_SHIFT
                own_lane = int(lane[entry])
                same[entry] = not (clocks.all() if own_lane == _EVERY else clocks[own_lane - 1])
        return same

    def note_reads(self, vectors: Array, lane: Array, before: Array, stamps: Array) -> None:
        """Records reads; ``before`` holds the stamps of the last reads of the vectors."""
        old = self.reader.take(vectors)
        again = (old != 0) & (old != lane) & (((before ^ stamps) & (_WARP | LOW)) == 0)
        self.reader[vectors] = lane
        again |= self.reader.take(vectors) != lane
        self.reader[vectors[again]] = _SEVERAL


_MANY_WARPS = 1 << 60  # the reads of each are in `WarpReads`
_MANY_BLOCKS = 1 << 61  # one of those of other blocks is in `GlobalRaces.apart_stamp`
_RACING = 1 << 62  # with ATOMIC volatile, see `PtxProgram.racing`; without: `Accesses.guesses`
_FLYING = (1 << 22) - 1  # the clock of a bulk store that has not been waited for: none is as high
_LOG_BYTES = 128 << 20
_NARROW = "; an access of scope .cta or .cluster is strong within its block or cluster alone"
_PROBLEMS = {
    "read": "a read and a write of {} are not ordered",
    "write": "a write and a write of {} are not ordered",
    "overtake": "a write may overtake a read of {}",
}


class _Access(NamedTuple):
    """One instruction; ``vectors`` to ``rows`` have an entry per vector of the shadow."""

    execution: Execution
    size: int
    vectors: Array
    lane: Array
    stamps: Array
    rows: Array
    strong: bool
    bulk: bool = False

    @property
    def racing(self) -> bool:
        """See `PtxProgram.racing`."""
        return self.strong and self.execution.pc in self.execution.machine.program.racing


class GlobalRaces:
    """Shadow of all device memory of a launch."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        self.shift = machine.program.accesses.global_vector.bit_length() - 1
        self.written: set[int] = set()  # indices of allocations that were written
        self.log: dict[int, list[tuple[Array, Array, int, int]]] = {}
        self.log_bytes = 0
        count = (len(machine.memory.flat.bytes) >> self.shift) + 1
        self.write_stamp = sparse_zeros(count, np.int64)
        self.read_stamp = sparse_zeros(count, np.int64)
        # A read by another block that the one of `read_stamp` does not come after.
        self.apart_stamp = sparse_zeros(count, np.int64)
        self.write_pc = sparse_zeros(count, np.int32)
        self.lanes = GlobalLanes(machine, count)
        self.warp_reads = WarpReads(count, machine.cluster_warps)
        # The last load by .nc of each vector, plus 1; None while there is none.
        self.read_only: Array | None = None
        self.order = BlockOrder(machine)
        # Answers are kept for one access, whose vectors are often alike.
        self.ordered: Callable[[int, int], bool] = self.order.has_ordered

    # ---- entry points; offsets are (n, k), or one per active lane

    def read(
        self, execution: Execution, offset: Any, size: int, noted: bool = True, bulk: bool = False
    ) -> None:
        """Checks reads, and records them if they are ``noted`` here (see `note_copy`)."""
        touched, pc = self.machine.memory.touched, execution.pc
        if self.machine.dependent is not None:
            self.machine.dependent.check(execution, *self._flatten(execution, offset), size, False)
        unwritten = not self.written.intersection(touched)
        if unwritten and not noted:
            return
        rows, flat = self._flatten(execution, offset)
        strong = pc in self.machine.strong
        stamps = self._now(execution, rows, flat, strong)
        if unwritten:
            self._log(touched, flat, stamps, size, pc)
            return
        access = self._access(execution, flat, stamps, rows, size, strong, bulk)
        before = self.write_stamp.take(access.vectors)
        if before.any():
            if pc in self.machine.program.accesses.read_only:
                self._report_read_only(access, before != 0, self.write_pc)
            self._check(access, before, "read")
        if noted:
            self._note_reads(access.vectors, access.stamps, pc, access.rows, access.lane)
            self._accessed(execution)

    def note_copy(self, source: CopySource, rows: Array, flat: Array, clock: Array) -> None:
        """Records that warps ``rows`` (k,) have waited for a cp.async that read at ``flat`` (k,).

        ``clock`` (k,) is an earlier time of each warp at which it counts as complete, or 0.
        """
        touched, size, pc = source.touched, source.size, source.pc
        stamps = self._stamps(rows, False)
        if clock.any():
            age = (self.machine.clocks.clock[rows] - clock) << CLOCK_SHIFT
            stamps = np.where(clock > 0, stamps - age, stamps)
        if not self.written.intersection(touched):
            self._log(touched, flat, stamps, size, pc)
            return
        vectors, stamps, _ = self._vectors(flat, stamps, rows, size)
        self._note_reads(vectors, stamps, pc)

    def _log(self, touched: list[int], flat: Array, stamps: Array, size: int, pc: int) -> None:
        for allocation_index in touched:
            self.log.setdefault(allocation_index, []).append((flat, stamps, size, pc))
        self.log_bytes += flat.nbytes + stamps.nbytes
        if self.log_bytes > _LOG_BYTES:
            for allocation_index in list(self.log):
                self._unlog(allocation_index)
            self.log_bytes = 0

    def write(
        self, execution: Execution, offset: Any, size: int, strong: bool = False, bulk: bool = False
    ) -> None:
        """Checks and records writes; the writes of a ``bulk`` copy end with `complete`."""
        rows, flat = self._flatten(execution, offset)
        if not len(flat):
            return
        if self.machine.dependent is not None:
            self.machine.dependent.check(execution, rows, flat, size, True)
        for allocation_index in self.machine.memory.touched:
            if allocation_index not in self.written:
                self.written.add(allocation_index)
                self._unlog(allocation_index)
        check_write(self.machine, execution.site(), rows, flat, size)
        strong = strong or execution.pc in self.machine.strong
        if strong and self.order.tracks_fences and self.machine.shared_races:
            self.machine.shared_races.strong_access(execution)
        now = self._now(execution, rows, flat, strong)
        access = self._access(execution, flat, now, rows, size, strong, bulk)
        if self.read_only is not None:
            reader = self.read_only.take(access.vectors)
            if reader.any():
                self._report_read_only(access, reader != 0, self.read_only)
        for earlier, verb in ((self.write_stamp, "write"), (self.read_stamp, "overtake")):
            before = earlier.take(access.vectors)
            if before.any():
                self._check(access, before, verb)
        stamps = access.stamps | _FLYING << CLOCK_SHIFT if bulk else access.stamps
        self.write_stamp[access.vectors] = stamps
        self.write_pc[access.vectors] = execution.pc
        self.lanes.writer[access.vectors] = access.lane
        self._accessed(execution)
        left = self.write_stamp.take(access.vectors)
        bad = left != stamps
        if strong:
            bad &= self._out_of_scope(access, left, "write")
        if bad.any():
            self._report(access, bad, left, _PROBLEMS["write"], together=True)

    def complete(self, execution: Execution, offset: Any, size: int) -> None:
        """Records that threads have waited for their bulk stores: the bytes are written now."""
        rows, flat = self._flatten(execution, offset)
        vectors, stamps, _ = self._vectors(flat, self._stamps(rows, False), rows, size)
        before = self.write_stamp.take(vectors)
        same = (block_of(before) == block_of(stamps)) & ((before ^ stamps) & WARP == 0)
        same &= _flying(before)
        self.write_stamp[vectors[same]] = (stamps | before & ATOMIC)[same]

    def refine(self, size: int) -> None:
        """Makes the vectors of the shadow at most ``size`` bytes wide.

        Earlier accesses consist of whole vectors, so that the shadow stays exact.
        """
        parts = (1 << self.shift) // size
        if parts <= 1:
            return
        self.shift = size.bit_length() - 1
        self.warp_reads.refine(parts)
        names = ("write_stamp", "read_stamp", "apart_stamp", "write_pc", "read_only")
        tables = [(self, name) for name in names]
        for owner, name in [*tables, (self.lanes, "writer"), (self.lanes, "reader")]:
            wide = getattr(owner, name)
            if wide is not None:
                some = np.flatnonzero(wide)
                fine = sparse_zeros(len(wide) * parts, wide.dtype)
                fine[(some[:, None] * parts + np.arange(parts)).reshape(-1)] = np.repeat(
                    wide[some], parts
                )
                setattr(owner, name, fine)

    # ---- parts

    def _now(self, execution: Execution, rows: Array, flat: Array, strong: bool) -> Array:
        """The stamps of accesses by warps ``rows`` at ``flat``; strong ones synchronise."""
        if strong:
            self.order.synchronise(rows, flat, execution.pc)
        program = self.machine.program
        return self._stamps(
            rows, strong, execution.pc in (program.racing if strong else program.accesses.guesses)
        )

    def _access(
        self, execution: Execution, flat: Array, stamps: Array, rows: Array, size: int, *how: bool
    ) -> _Access:
        self.ordered = functools.cache(self.order.has_ordered)
        vectors, stamps, rows = self._vectors(flat, stamps, rows, size)
        lane = self.lanes.lanes_of_vectors(execution, len(flat), len(vectors))
        return _Access(execution, size, vectors, lane, stamps, rows, *how)

    def _accessed(self, execution: Execution) -> None:
        """Records that lanes of these warps have accesses that nothing has synchronised."""
        assert self.machine.shared_races is not None
        self.machine.shared_races.accessed[execution.cohort.rows] = True

    def _check(self, access: _Access, before: Array, verb: str) -> None:
        """Checks that accesses are ordered after earlier ones, with the stamps ``before``."""
        excused: Any = False
        flying = _flying(before)
        if (verb == "read" or (verb == "write" and not access.bulk)) and flying.any():
            if access.strong:
                flying &= (before & ATOMIC) == 0
            if flying.any():
                self._report_flying(access, flying, verb)
        if access.strong:
            # Strong accesses need no order, but volatile ones that are no polls.
            excused = (before & ATOMIC) != 0
            if access.racing and verb != "write":
                excused &= (before & _RACING) == 0
            excused &= ~self._out_of_scope(access, before, verb)
            if (excused | (before == 0)).all():
                return
        bad = self._unordered(access, before, excused)
        if bad.any():
            self._report(access, bad, before, _PROBLEMS[verb])
        stamps, rows = access.stamps, access.rows
        unordered = self.lanes.unordered(verb, access.vectors, access.lane, before, stamps, rows)
        bad = unordered & ~excused
        if bad.any():
            self._report(access, bad, before, LANES_OF_A_WARP)
        if access.bulk and verb != "overtake":
            self._check_proxy(access, before, verb)

    def _check_proxy(self, access: _Access, before: Array, verb: str) -> None:
        """Checks that what a bulk copy accesses was written by others, or before a proxy fence."""
        machine, writers = self.machine, self.write_pc.take(access.vectors)
        code = machine.program.code
        stores = [pc for pc in np.unique(writers).tolist() if "bulk" not in code[pc].mods]
        bad: Array = (before != 0) & np.isin(writers, stores)
        if not bad.any():
            return
        warps, clock = machine.clocks.decode(before & LOW)
        clusters, members = machine.row_cluster[access.rows], machine.row_member[access.rows]
        visible = machine.clocks.proxied(clusters, members)
        if visible is not None:
            fenced = np.take_along_axis(visible, warps[:, None], axis=1)[:, 0] >= clock
            bad &= ~fenced | (block_of(before) != block_of(access.stamps))
        for entry in np.flatnonzero(bad & (block_of(before) != block_of(access.stamps))):
            row, stamp = int(access.rows[entry]), int(before[entry])
            bad[entry] = not self.order.has_ordered(row, stamp, proxied=True)
        if bad.any():
            first = int(np.argmax(bad))
            what = f"race in global memory: an asynchronous {verb} of what ordinary stores wrote, "
            what += "without a proxy fence"
            numbers = f"{self._location(int(access.vectors[first]))}; written at "
            numbers += machine.program.describe(int(writers[first]))
            way = "execute fence.proxy.async.global, or fence.proxy.async, after the stores and "
            way += "before the copy, on either side of the barrier between them"
            machine.fail(RaceError, what, self._origin(access, first), numbers, way)

    def _out_of_scope(self, access: _Access, before: Array, verb: str) -> Array:
        """Which accesses are by another block than the earlier ones, and one of the two is strong
        within its own block alone.

        The scope of an earlier read is not kept.
        """
        narrow = self.machine.program.accesses.narrow
        if not narrow:
            return np.zeros(len(before), bool)
        apart: Array = block_of(before) != block_of(access.stamps)
        apart |= (before & _MANY_BLOCKS) != 0
        if access.execution.pc in narrow:
            return apart
        if verb == "overtake":
            return np.zeros_like(apart)
        return apart & np.isin(self.write_pc.take(access.vectors), list(narrow))

    def _flatten(self, execution: Execution, offset: Any) -> tuple[Array, Array]:
        rows = execution.cohort.rows
        if execution.lanes is None:
            width = offset.shape[1] if offset.ndim else 1
            full = np.broadcast_to(offset, (len(rows), width))
            return np.repeat(rows, width), full.reshape(-1)
        row, _ = np.nonzero(execution.active)
        return rows[row], offset

    def _stamps(self, rows: Array, strong: bool, racing: bool = False) -> Array:
        machine = self.machine
        block = machine.cluster_ids[machine.row_cluster[rows]] + 1
        low = self.machine.clocks.clock[rows] << CLOCK_SHIFT | machine.row_member[rows]
        return block << BLOCK_SHIFT | low | (ATOMIC if strong else 0) | (_RACING if racing else 0)

    def _vectors(self, flat: Array, stamps: Array, rows: Array, size: int) -> tuple[Array, ...]:
        many = max(1, size >> self.shift)
        first = flat >> self.shift
        if many == 1:
            return first, stamps, rows
        vectors = (first[:, None] + np.arange(many)).reshape(-1)
        return vectors, np.repeat(stamps, many), np.repeat(rows, many)

    def _unordered(self, access: _Access, before: Array, excused: Any) -> Array:
        """Which earlier accesses are not ordered before these ones; at least one is a write."""
        ordered = self._ordered_in_block(before, access.vectors, access.rows)
        other_block = block_of(before) != block_of(access.stamps)
        several = (before & _MANY_BLOCKS) != 0
        bad = (before != 0) & (other_block | several | ~ordered) & ~excused
        if self.order.tracks_fences and bad.any():
            for entry in np.flatnonzero(bad & (other_block | several)):
                row, vector = access.rows[entry], access.vectors[entry]
                entry_ordered = ordered[entry]
                if other_block[entry]:
                    entry_ordered = self._has_ordered(row, before[entry], vector)
                apart = several[entry] and not self._after_apart(row, vector)
                bad[entry] = apart or not entry_ordered
        return bad  # type: ignore[no-any-return]

    def _ordered_in_block(self, before: Array, vectors: Array, rows: Array) -> Array:
        """Which earlier accesses of the block of a warp happened before the access of the warp."""
        machine, low = self.machine, before & LOW
        clusters, members = machine.row_cluster[rows], machine.row_member[rows]
        ordered = machine.clocks.ordered(clusters, members, low)
        many = (before & _MANY_WARPS) != 0
        if many.any():
            floor = machine.clocks.floor_stamp[rows] >> CLOCK_SHIFT
            ordered = np.where(many, low >> CLOCK_SHIFT < floor, ordered)
            some = np.flatnonzero(many & ~ordered)
            slots, warps = clusters[some], members[some]
            seen = machine.clocks.seen[slots, warps, : machine.cluster_warps]
            blocks = machine.cluster_ids[slots]
            ordered[some] = self.warp_reads.seen(vectors[some], blocks, seen, warps)
        return ordered

    def _has_ordered(self, row: Any, stamp: Any, vector: Any) -> bool:
        """Whether fences and atomics order a write, or reads of a vector, before a warp."""
        row, stamp = int(row), int(stamp)
        if not self.ordered(row, stamp):
            return False
        many = stamp & _MANY_WARPS != 0
        reads = self.warp_reads.stamps(int(vector), int(block_of(stamp))) if many else ()
        return all(self.ordered(row, read) for read in reads)

    def _after_apart(self, row: Any, vector: Any) -> bool:
        """Whether a warp comes after the read in `apart_stamp`."""
        machine, stamp = self.machine, self.apart_stamp[vector]
        slot = machine.row_cluster[row]
        if block_of(stamp) == machine.cluster_ids[slot] + 1:
            return bool(machine.clocks.ordered(slot, machine.row_member[row], stamp & LOW))
        return self._has_ordered(row, stamp, vector)

    def _note_reads(
        self, vectors: Array, stamps: Array, pc: int, rows: Any = None, lane: Any = None
    ) -> None:
        if pc in self.machine.program.accesses.read_only:
            if self.read_only is None:
                self.read_only = sparse_zeros(len(self.write_stamp), np.int32)
            self.read_only[vectors] = pc + 1
        old = self.read_stamp.take(vectors)
        if lane is not None:
            self.lanes.note_reads(vectors, lane, old, stamps)
        self.read_stamp[vectors] = stamps
        stored = self.read_stamp.take(vectors)
        block = block_of(stamps)
        other = (old != 0) & (block_of(old) != block)
        if rows is not None and self.order.tracks_fences:
            for entry in np.flatnonzero(other):
                other[entry] = not self._has_ordered(rows[entry], old[entry], vectors[entry])
        together = block_of(stored) != block
        several = old & _MANY_BLOCKS != 0
        if rows is not None and self.order.tracks_fences:
            for entry in np.flatnonzero(several):
                several[entry] = not self._after_apart(rows[entry], vectors[entry])
        self.apart_stamp[vectors[other]] = old[other]
        self.apart_stamp[vectors[together]] = stamps[together]
        other |= together
        flags = np.where(other | several, _MANY_BLOCKS, 0)
        warps = (old != 0) & (block_of(old) == block) & ~other
        warps &= ((old ^ stamps) & WARP != 0) | (old & _MANY_WARPS != 0)
        if rows is not None and warps.any():
            some = np.flatnonzero(warps)
            warps[some] = ~self._ordered_in_block(old[some], vectors[some], rows[some])
        many = warps | ((stored ^ stamps) & WARP != 0)
        flags |= np.where(many, _MANY_WARPS, 0)
        marked = flags != 0
        if many.any():
            # The newest clock counts: what knows that of all warps knows all of these reads.
            late = warps & ((old & LOW) >> CLOCK_SHIFT > (stamps & LOW) >> CLOCK_SHIFT)
            newest = np.where(late, old & ~(_MANY_WARPS | _MANY_BLOCKS), stamps)
            np.maximum.at(self.read_stamp, vectors[many], newest[many])
            self.lanes.reader[vectors[late]] = 0  # the stamp is that of another warp
        if marked.any():
            np.bitwise_or.at(self.read_stamp, vectors[marked], flags[marked])
        if many.any():
            left = self.read_stamp.take(vectors)  # of one block, where several read together
            many |= left & _MANY_WARPS != 0
            first = warps & (old & _MANY_WARPS == 0)
            for chosen, noted in ((first, old), (many, stamps)):
                chosen &= block_of(noted) == block_of(left)
                self.warp_reads.note(vectors[chosen], noted[chosen])

    def _unlog(self, allocation_index: int) -> None:
        """Moves the listed reads of a buffer into the shadow, before its first write."""
        for flat, stamps, size, pc in self.log.pop(allocation_index, []):
            vectors, wide, _ = self._vectors(flat, stamps, flat, size)
            self._note_reads(vectors, wide, pc)

    def _origin(self, access: _Access, entry: int) -> Site:
        """The thread of one entry of the vectors of an access."""
        vectors_per_access, execution = max(1, access.size >> self.shift), access.execution
        if execution.lanes is None:
            accesses_per_warp = len(access.vectors) // vectors_per_access // execution.cohort.n
            return execution.site(*divmod(entry // vectors_per_access, accesses_per_warp))
        row, lane = np.argwhere(execution.active)[entry // vectors_per_access]
        return execution.site(row, int(lane))

    def _location(self, vector: int) -> str:
        return self.machine.memory.describe((vector << self.shift) + self.machine.memory.base)

    def _report_flying(self, access: _Access, bad: Array, verb: str) -> NoReturn:
        """Raises for a vector of a bulk store that may not have been written yet."""
        first = int(np.argmax(bad))
        vector = int(access.vectors[first])
        copy = self.machine.program.describe(int(self.write_pc[vector]))
        what = f"race in global memory: a {verb} of bytes that a bulk copy out of shared memory "
        what += "may still write"
        numbers = f"{self._location(vector)}; the copy: {copy}"
        way_out = "execute cp.async.bulk.wait_group, without .read, in the thread of the copy, and "
        way_out += "then a barrier with that thread"
        self.machine.fail(RaceError, what, self._origin(access, first), numbers, way_out)

    def _report_read_only(self, access: _Access, bad: Array, others: Array) -> NoReturn:
        """Raises for a vector that one instruction reads by .nc and another one writes."""
        machine, first = self.machine, int(np.argmax(bad))
        vector, reads = int(access.vectors[first]), others is self.write_pc
        other = int(others[vector]) - (not reads)
        what = "a load by .nc (ld.global.nc, __ldg, const __restrict__) of memory that the kernel "
        what += "writes: PTX requires that it is read-only while the kernel runs"
        numbers = f"{self._location(vector)}; {'written' if reads else 'read'} at "
        numbers += machine.program.describe(other)
        way_out = "load it without .nc: no __ldg, and no __restrict__ on pointers to the same "
        way_out += "memory"
        machine.fail(RaceError, what, self._origin(access, first), numbers, way_out)

    def _report(
        self, access: _Access, bad: Array, before: Array, problem: str, together: bool = False
    ) -> NoReturn:
        """Raises for the first vector that ``bad`` marks; ``before`` holds the earlier stamps.

        ``together``: one instruction makes both accesses.
        """
        machine = self.machine
        first = int(np.argmax(bad))
        stamp, vector = int(before[first]), int(access.vectors[first])
        site = self._origin(access, first)
        block = block_of(stamp) - 1
        if stamp & _MANY_BLOCKS:
            accessor = "several blocks"
        elif block != int(machine.cluster_ids[machine.row_cluster[site.cohort.rows[site.row]]]):
            accessor = f"block {block}"
        else:
            accessor = f"another warp of the {'block' if machine.cluster_size == 1 else 'cluster'}"
        numbers = self._location(vector)
        if problem != _PROBLEMS["overtake"]:
            numbers += f"; written at {machine.program.describe(int(self.write_pc[vector]))}"
        way = "write these bytes in one block only, use atomics, or order the accesses (a barrier "
        way += "within a block; another launch, or a fence and an atomic, between blocks)"
        if problem is LANES_OF_A_WARP:
            way = SYNCHRONISE_LANES
        elif self.order.awaits_fence(int(site.cohort.rows[site.row]), stamp):
            way = FENCE_AFTER_ATOMIC
        elif problem == _PROBLEMS["write"]:
            way += machine.forgives_store(site, together)
        if access.racing:
            numbers += VOLATILE
        atomic, narrow = stamp & ATOMIC, machine.program.accesses.narrow
        if access.strong and atomic and narrow and not access.racing:
            numbers += _NARROW
            way = f"give both accesses the scope .gpu or .sys, or {way}"
        way += machine.forgives_guess(site.pc, atomic)
        if access.strong and stamp & _RACING and not atomic:
            way += way_out("compare_and_swap_guess")
        what = f"race in global memory: {problem.format(accessor)}"
        machine.fail(RaceError, what, site, numbers, way)


def _flying(stamps: Array) -> Array:
    """Whether each write is by a bulk copy that has not been waited for."""
    return (stamps & LOW) >> CLOCK_SHIFT == _FLYING  # type: ignore[no-any-return]
