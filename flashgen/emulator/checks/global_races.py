"""Global memory: races between warps of a block, and between blocks of the launch.

Within a block, barriers order accesses (see :mod:`clocks`). Between blocks only fences with atomics
do, independently of the order in which the emulator executes the blocks: data written before a
fence that is followed by an atomic is visible to a warp that later performs an atomic on the same
address, and to the warps that pass a barrier with it. Atomics never race with each other.

Reads of a buffer that has not been written are only stored in a list, because most buffers are
inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.clocks import ATOMIC, CLOCK_SHIFT, WARP, Clocks
from flashgen.emulator.checks.copy_sources import CopySource, check_write
from flashgen.emulator.errors import RaceError
from flashgen.emulator.state.cohort import Cohort, spread
from flashgen.emulator.state.forgiven import way_out
from flashgen.emulator.state.memory import sparse_zeros
from flashgen.emulator.state.wave import Site, Wave

Array = npt.NDArray[Any]
# A stamp: block + 1 in bits 32 to 59, clock, atomic flag and warp as in clocks.
_BLOCK = 32
_MANY_WARPS = 1 << 60
_MANY_BLOCKS = 1 << 61
_RACING = 1 << 62  # volatile, see `PtxProgram.racing`
_LOW = (1 << 32) - 1
_LOG_BYTES = 128 << 20
_UNORDERED_READ = "a read and a write of {} are not ordered"
_UNORDERED_WRITE = "a write and a write of {} are not ordered"
_OVERTAKES = "a write may overtake a read of {}"

ClocksByBlock = dict[int, Array]


class _Acquired(NamedTuple):
    """An atomic of a warp, at its clock, that acquired clocks of other blocks."""

    warp: int
    clock: int
    known: ClocksByBlock


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
        self.write_pc = sparse_zeros(count, np.int32)
        # The last load by .nc of each vector, plus 1; None while there is none.
        self.read_only: Array | None = None
        self.tracks_fences = machine.program.accesses.synchronises
        # ClocksByBlock holds, per block, the clocks of its warps up to which accesses are ordered.
        # By block and warp: at the last fence.
        self.fenced: dict[tuple[int, int], ClocksByBlock] = {}
        self.released: dict[int, ClocksByBlock] = {}  # by address: what an acquire obtains
        # What a poll has seen released, by block and warp: the next fence acquires it.
        self.polled: dict[tuple[int, int], ClocksByBlock] = {}
        self.learnt: dict[int, list[_Acquired]] = {}  # by block

    @property
    def clocks(self) -> Clocks:
        """The clocks of the running wave."""
        assert self.machine.shared_races is not None
        return self.machine.shared_races.clocks

    # ---- entry points; offsets are (n, k), or one per active lane

    def read(
        self, cohort: Cohort, offset: Any, size: int, pc: int, lanes: Any, noted: bool = True
    ) -> None:
        """Checks reads, and records them if they are ``noted`` here (see `note_copy`)."""
        rows, flat = self._flatten(cohort, offset, lanes)
        strong = pc in self.machine.program.accesses.strong
        if strong:
            self._synchronise(rows, flat, pc)
        racing = strong and pc in self.machine.program.racing
        stamps = self._stamps(rows, strong, racing)
        touched = self.machine.memory.touched
        if not self.written.intersection(touched):
            if noted:
                self._log(touched, flat, stamps, size, pc)
            return
        access = (Site(cohort, pc), lanes, size)
        vectors, stamps, rows = self._vectors(flat, stamps, rows, size)
        before = self.write_stamp.take(vectors)
        if before.any():
            if pc in self.machine.program.accesses.read_only:
                self._report_read_only(*access, vectors, before != 0, self.write_pc)
            bad = self._unordered(before, stamps, rows, strong, racing)
            if bad.any():
                self._report(*access, vectors, bad, before, _UNORDERED_READ)
        if noted:
            self._note_reads(vectors, stamps, pc)

    def note_copy(self, source: CopySource, rows: Array, flat: Array, clock: Array) -> None:
        """Warps ``rows`` (k,) have waited for a cp.async that read at ``flat`` (k,).

        ``clock`` (k,) is an earlier time of each warp at which it counts as complete, or 0.
        """
        touched, size, pc = source.touched, source.size, source.pc
        stamps = self._stamps(rows, False)
        if clock.any():
            own = (self.clocks.clock[rows] - clock) << CLOCK_SHIFT
            stamps = np.where(clock > 0, stamps - own, stamps)
        if not self.written.intersection(touched):
            self._log(touched, flat, stamps, size, pc)
            return
        vectors, stamps, _ = self._vectors(flat, stamps, rows, size)
        self._note_reads(vectors, stamps, pc)

    def _log(self, touched: list[int], flat: Array, stamps: Array, size: int, pc: int) -> None:
        for place in touched:
            self.log.setdefault(place, []).append((flat, stamps, size, pc))
        self.log_bytes += flat.nbytes + stamps.nbytes
        if self.log_bytes > _LOG_BYTES:
            for place in list(self.log):
                self._unlog(place)
            self.log_bytes = 0

    def write(
        self, cohort: Cohort, offset: Any, size: int, pc: int, lanes: Any, strong: bool = False
    ) -> None:
        rows, flat = self._flatten(cohort, offset, lanes)
        if not len(flat):
            return
        for place in self.machine.memory.touched:
            if place not in self.written:
                self.written.add(place)
                self._unlog(place)
        check_write(self.machine, Site(cohort, pc), flat, size)
        strong = strong or pc in self.machine.program.accesses.strong
        if strong:
            self._synchronise(rows, flat, pc)
        racing = strong and pc in self.machine.program.racing
        stamps = self._stamps(rows, strong, racing)
        vectors, stamps, rows = self._vectors(flat, stamps, rows, size)
        access = (Site(cohort, pc), lanes, size, vectors)
        if self.read_only is not None:
            reader = self.read_only.take(vectors)
            if reader.any():
                self._report_read_only(*access, reader != 0, self.read_only)
        for earlier, problem, also in (
            (self.write_stamp, _UNORDERED_WRITE, False),
            (self.read_stamp, _OVERTAKES, racing),
        ):
            before = earlier.take(vectors)
            if before.any():
                bad = self._unordered(before, stamps, rows, strong, also)
                if bad.any():
                    self._report(*access, bad, before, problem)
        self.write_stamp[vectors] = stamps
        self.write_pc[vectors] = pc
        left = self.write_stamp.take(vectors)
        if not strong and (left != stamps).any():
            self._report(*access, left != stamps, left, _UNORDERED_WRITE)

    def atomic(self, cohort: Cohort, offset: Any, size: int, pc: int, lanes: Any) -> None:
        self.write(cohort, offset, size, pc, lanes, strong=True)

    def fence(self, rows: Array) -> None:
        """A fence of device scope: the next atomic of each warp releases its current clocks."""
        m = self.machine
        for row in rows.tolist():
            slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
            block = int(m.cluster_ids[slot])
            offered = self.polled.pop((block, warp), {})
            if offered.keys() - {block}:
                self._acquire(block, warp, int(self.clocks.clock[row]), offered)
            seen = self.clocks.seen[slot, warp, : m.cluster_warps]
            known: ClocksByBlock = {block: seen.copy()}
            for entry in self.learnt.get(block, ()):
                if seen[entry.warp] >= entry.clock:
                    _join(known, entry.known)
            self.fenced[block, warp] = known

    # ---- parts

    def _flatten(self, cohort: Cohort, offset: Any, lanes: Any) -> tuple[Array, Array]:
        if lanes is None:
            width = offset.shape[1] if offset.ndim else 1
            full = np.broadcast_to(offset, (cohort.n, width))
            return np.repeat(cohort.rows, width), full.reshape(-1)
        row, _ = np.nonzero(spread(lanes, cohort.n))
        return cohort.rows[row], offset

    def _stamps(self, rows: Array, strong: bool, racing: bool = False) -> Array:
        m = self.machine
        block = m.cluster_ids[m.row_cluster[rows]] + 1
        low = self.clocks.clock[rows] << CLOCK_SHIFT | m.row_member[rows]
        return block << _BLOCK | low | (ATOMIC if strong else 0) | (_RACING if racing else 0)

    def _vectors(
        self, flat: Array, stamps: Array, rows: Array, size: int
    ) -> tuple[Array, Array, Array]:
        many = max(1, size >> self.shift)
        first = flat >> self.shift
        if many == 1:
            return first, stamps, rows
        vectors = (first[:, None] + np.arange(many)).reshape(-1)
        return vectors, np.repeat(stamps, many), np.repeat(rows, many)

    def _unordered(
        self, before: Array, stamps: Array, rows: Array, strong: bool, racing: bool
    ) -> Array:
        """Which earlier accesses are not ordered before these ones; at least one is a write.

        Strong accesses need no order, but those that are ``racing`` on both sides do.
        """
        m, clocks = self.machine, self.clocks
        low = before & _LOW
        known = clocks.ordered(m.row_cluster[rows], m.row_member[rows], low)
        many = (before & _MANY_WARPS) != 0
        if many.any():
            known = np.where(
                many, low >> CLOCK_SHIFT < clocks.floor_stamp[rows] >> CLOCK_SHIFT, known
            )
        other_block = _block_of(before) != _block_of(stamps)
        apart = other_block | ((before & _MANY_BLOCKS) != 0)
        bad = (before != 0) & (apart | ~known)
        if strong:
            excused = (before & ATOMIC) != 0
            bad &= ~(excused & ((before & _RACING) == 0) if racing else excused)
        if self.tracks_fences and bad.any():
            for place in np.flatnonzero(bad & apart):
                fenced = self._ordered_across_blocks(int(rows[place]), int(before[place]))
                bad[place] = not fenced or not (other_block[place] or known[place])
        return bad  # type: ignore[no-any-return]

    def _note_reads(self, vectors: Array, stamps: Array, pc: int) -> None:
        if pc in self.machine.program.accesses.read_only:
            if self.read_only is None:
                self.read_only = sparse_zeros(len(self.write_stamp), np.int32)
            self.read_only[vectors] = pc + 1
        old = self.read_stamp.take(vectors)
        self.read_stamp[vectors] = stamps
        now = self.read_stamp.take(vectors)
        block = _block_of(stamps)
        other = ((old != 0) & (_block_of(old) != block)) | (_block_of(now) != block)
        flags = np.where(other | (old & _MANY_BLOCKS != 0), _MANY_BLOCKS, 0)
        same_time = (old & _LOW) >> CLOCK_SHIFT == (stamps & _LOW) >> CLOCK_SHIFT
        warps = (old != 0) & ~other & same_time & ((old ^ stamps) & WARP != 0)
        warps |= (now ^ stamps) & WARP != 0
        flags |= np.where(warps | ((old & _MANY_WARPS != 0) & same_time), _MANY_WARPS, 0)
        marked = flags != 0
        if marked.any():
            np.bitwise_or.at(self.read_stamp, vectors[marked], flags[marked])

    def _unlog(self, place: int) -> None:
        """Moves the listed reads of a buffer into the shadow, before its first write."""
        for flat, stamps, size, pc in self.log.pop(place, []):
            vectors, wide, _ = self._vectors(flat, stamps, flat, size)
            self._note_reads(vectors, wide, pc)

    def _ordered_across_blocks(self, row: int, stamp: int) -> bool:
        """Whether fences and atomics order an access of another block before a warp."""
        m = self.machine
        slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
        other = _block_of(stamp) - 1
        agent, clock = stamp & WARP, (stamp & _LOW) >> CLOCK_SHIFT
        seen = self.clocks.seen[slot, warp]
        for entry in self.learnt.get(int(m.cluster_ids[slot]), ()):
            known = entry.known.get(other)
            if known is not None and known[agent] >= clock and seen[entry.warp] >= entry.clock:
                return True
        return False

    def _synchronise(self, rows: Array, flat: Array, pc: int) -> None:
        """Strong accesses acquire what was released at their address, and release."""
        if not self.tracks_fences:
            return
        m, clocks = self.machine, self.clocks
        if pc in m.program.accesses.releases:
            self.fence(np.unique(rows))
            clocks.fence(np.unique(rows))
        poll = pc in m.program.repeats.polls
        clocks.synchronise(rows, -1 - flat, poll)
        for row, address in zip(rows.tolist(), flat.tolist(), strict=True):
            slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
            block = int(m.cluster_ids[slot])
            offered = self.released.setdefault(address, {})
            if poll:
                _join(self.polled.setdefault((block, warp), {}), offered)
            elif offered.keys() - {block}:
                self._acquire(block, warp, int(clocks.clock[row]), offered)
            if (block, warp) in self.fenced:
                _join(offered, self.fenced[block, warp])

    def _acquire(self, block: int, warp: int, clock: int, offered: ClocksByBlock) -> None:
        entries = self.learnt.setdefault(block, [])
        for entry in reversed(entries):
            same = entry.warp == warp and entry.known.keys() >= offered.keys()
            if same and all((entry.known[b] >= v).all() for b, v in offered.items()):
                return
        entries.append(_Acquired(warp, clock, {b: v.copy() for b, v in offered.items()}))

    def _origin(self, site: Site, lanes: Any, size: int, count: int, which: int) -> tuple[int, int]:
        """Row and lane of one of ``count`` vectors of an access."""
        many = max(1, size >> self.shift)
        if lanes is None:
            return divmod(which // many, count // many // site.cohort.n)
        row, lane = np.argwhere(spread(lanes, site.cohort.n))[which // many]
        return int(row), int(lane)

    def _report_read_only(
        self, site: Site, lanes: Any, size: int, vectors: Array, bad: Array, others: Array
    ) -> NoReturn:
        """Raises for a vector that one instruction reads by .nc and another one writes."""
        m, first = self.machine, int(np.argmax(bad))
        row, lane = self._origin(site, lanes, size, len(vectors), first)
        reads = others is self.write_pc
        other = int(others[vectors[first]]) - (not reads)
        m.fail(
            RaceError,
            "a load by .nc (ld.global.nc, __ldg, const __restrict__) of memory that the kernel "
            "writes: PTX requires that it is read-only while the kernel runs",
            site._replace(row=row, lane=lane),
            m.memory.describe((int(vectors[first]) << self.shift) + m.memory.base)
            + f"; {'written' if reads else 'read'} at {m.program.describe(other)}",
            "load it without .nc: no __ldg, and no __restrict__ on pointers to the same memory",
        )

    def _report(
        self,
        site: Site,
        lanes: Any,
        size: int,
        vectors: Array,
        bad: Array,
        before: Array,
        problem: str,
    ) -> NoReturn:
        """Raises for the first vector that ``bad`` marks; ``before`` holds the earlier stamps."""
        m, cohort = self.machine, site.cohort
        first = int(np.argmax(bad))
        row, lane = self._origin(site, lanes, size, len(vectors), first)
        stamp = int(before[first])
        block = _block_of(stamp) - 1
        if stamp & _MANY_BLOCKS:
            who = "several blocks"
        elif block != int(m.cluster_ids[m.row_cluster[cohort.rows[row]]]):
            who = f"block {block}"
        else:
            who = (
                "another warp of the block"
                if m.cluster_size == 1
                else "another warp of the cluster"
            )
        numbers = m.memory.describe((int(vectors[first]) << self.shift) + m.memory.base)
        if problem != _OVERTAKES:
            numbers += f"; written at {m.program.describe(int(self.write_pc[vectors[first]]))}"
        m.fail(
            RaceError,
            f"race in global memory: {problem.format(who)}",
            site._replace(row=row, lane=lane),
            numbers,
            "write these bytes in one block only, use atomics, or order the accesses "
            "(a barrier within a block; another launch, or a fence and an atomic, between blocks)"
            + (way_out("same_value") if problem == _UNORDERED_WRITE else ""),
        )


def _block_of(stamps: Any) -> Any:
    """The block plus one."""
    return stamps >> _BLOCK & 0xFFFFFFF


def _join(known: ClocksByBlock, more: ClocksByBlock) -> None:
    for block, clocks in more.items():
        before = known.get(block)
        known[block] = clocks.copy() if before is None else np.maximum(before, clocks)
