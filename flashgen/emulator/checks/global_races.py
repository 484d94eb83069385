"""Global memory: races between warps of a block, and between blocks of the launch.

Within a block, barriers order accesses (see :mod:`clocks`). Between blocks only fences with atomics
do, independently of the order in which the emulator executes the blocks: data written before a
fence that is followed by an atomic is visible to a warp that later performs an atomic on the same
address, and to the warps that pass a barrier with it. Atomics never race with each other.

Reads of a buffer that has not been written are only stored in a list, because most buffers are
inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.clocks import ATOMIC, CLOCK_SHIFT
from flashgen.emulator.errors import RaceError
from flashgen.emulator.state.cohort import Cohort
from flashgen.emulator.state.wave import Wave

Array = npt.NDArray[Any]
# A stamp: block + 1 in bits 32 to 59, clock, atomic flag and warp as in clocks.
_BLOCK = 32
_MANY_WARPS = 1 << 60
_MANY_BLOCKS = 1 << 61
_LOW = (1 << 32) - 1
_LOG_BYTES = 128 << 20


ClocksByBlock = dict[int, Array]


class _Acquired(NamedTuple):
    """An atomic of a warp, at its clock, that acquired clocks of other blocks."""

    warp: int
    clock: int
    known: ClocksByBlock


class _GlobalAccess(NamedTuple):
    """One execution of an instruction, for messages."""

    cohort: Cohort
    lanes: Any
    size: int
    pc: int


class GlobalRaces:
    """Shadow of all device memory of a launch."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        self.shift = machine.program.global_vector.bit_length() - 1
        self.written: set[int] = set()  # indices of allocations that were written
        self.log: dict[int, list[tuple[Array, Array, int, int]]] = {}
        self.log_bytes = 0
        self.ready = False
        self.tracks_fences = machine.program.synchronises
        # ClocksByBlock holds, per block, the clocks of its warps up to which accesses are ordered.
        self.fenced: dict[
            tuple[int, int], ClocksByBlock
        ] = {}  # by block and warp: at the last fence
        self.released: dict[int, ClocksByBlock] = {}  # by address: what an acquire obtains
        self.learnt: dict[int, list[_Acquired]] = {}  # by block

    def _prepare(self) -> None:
        count = (len(self.machine.memory.flat.bytes) >> self.shift) + 1
        self.write_stamp = np.zeros(count, np.int64)
        self.read_stamp = np.zeros(count, np.int64)
        self.write_pc = np.zeros(count, np.int32)
        self.ready = True

    # ---- entry points; offsets are (n, k), or one per active lane

    def read(self, cohort: Cohort, offset: Any, size: int, pc: int, lanes: Any) -> None:
        rows, flat = self._flatten(cohort, offset, lanes)
        strong = pc in self.machine.program.strong
        if strong:
            self._synchronise(rows, flat, pc)
        stamps = self._stamps(rows, strong)
        touched = self.machine.memory.touched
        if not self.written.intersection(touched):
            for place in touched:
                self.log.setdefault(place, []).append((flat, stamps, size, pc))
            self.log_bytes += flat.nbytes + stamps.nbytes
            if self.log_bytes > _LOG_BYTES:
                self._spill()
            return
        vectors, stamps, rows = self._vectors(flat, stamps, rows, size)
        before = self.write_stamp.take(vectors)
        if before.any():
            bad = self._conflicts(before, stamps, rows, vectors, strong)
            if bad.any():
                self._report(_GlobalAccess(cohort, lanes, size, pc), vectors, bad, before, "read")
        self._note_reads(vectors, stamps)

    def write(self, cohort: Cohort, offset: Any, size: int, pc: int, lanes: Any) -> None:
        self._write(cohort, offset, size, pc, lanes, pc in self.machine.program.strong)

    def atomic(self, cohort: Cohort, offset: Any, size: int, pc: int, lanes: Any) -> None:
        self._write(cohort, offset, size, pc, lanes, True)

    def fence(self, cohort: Cohort) -> None:
        """A fence of device scope: the next atomic of each warp releases its current clocks."""
        self._fence(cohort.rows)

    def _fence(self, rows: Array) -> None:
        m = self.machine
        assert m.shared_races is not None
        for row in rows.tolist():
            slot, warp = int(m.row_block[row]), int(m.row_warp[row])
            block = int(m.blocks[slot])
            seen = m.shared_races.clocks.seen[slot, warp, : m.warps]
            known: ClocksByBlock = {block: seen.copy()}
            for entry in self.learnt.get(block, ()):
                if seen[entry.warp] >= entry.clock:
                    _join(known, entry.known)
            self.fenced[block, warp] = known

    # ---- parts

    def _flatten(self, cohort: Cohort, offset: Any, lanes: Any) -> tuple[Array, Array]:
        if lanes is None:
            offset = np.asarray(offset)
            width = offset.shape[1] if offset.ndim else 1
            full = np.broadcast_to(offset, (cohort.n, width))
            return np.repeat(cohort.rows, width), full.reshape(-1)
        row, _ = np.nonzero(np.broadcast_to(lanes, (cohort.n, 32)))
        return cohort.rows[row], offset

    def _stamps(self, rows: Array, strong: bool) -> Array:
        m = self.machine
        assert m.shared_races is not None
        block = m.blocks[m.row_block[rows]] + 1
        low = m.shared_races.clocks.clock[rows] << CLOCK_SHIFT | m.row_warp[rows]
        return block << _BLOCK | low | (ATOMIC if strong else 0)

    def _vectors(
        self, flat: Array, stamps: Array, rows: Array, size: int
    ) -> tuple[Array, Array, Array]:
        many = max(1, size >> self.shift)
        first = flat >> self.shift
        if many == 1:
            return first, stamps, rows
        vectors = (first[:, None] + np.arange(many)).reshape(-1)
        return vectors, np.repeat(stamps, many), np.repeat(rows, many)

    def _conflicts(
        self, before: Array, stamps: Array, rows: Array, vectors: Array, strong: bool
    ) -> Array:
        """Which earlier writes are not ordered before these accesses."""
        m = self.machine
        assert m.shared_races is not None
        other_block = (before >> _BLOCK) != (stamps >> _BLOCK)
        agent = before & 31
        clock = (before & _LOW) >> CLOCK_SHIFT
        seen = m.shared_races.clocks
        inside = np.minimum(agent, m.warps - 1)
        known = seen.ordered(m.row_block[rows], m.row_warp[rows], clock, inside)
        bad = (before != 0) & (other_block | ~known)
        if strong:
            bad &= (before & ATOMIC) == 0
        if self.tracks_fences and bad.any():
            for place in np.flatnonzero(bad & other_block):
                bad[place] = not self._ordered_across_blocks(int(rows[place]), int(before[place]))
        return bad  # type: ignore[no-any-return]

    def _write(
        self, cohort: Cohort, offset: Any, size: int, pc: int, lanes: Any, strong: bool
    ) -> None:
        access = _GlobalAccess(cohort, lanes, size, pc)
        rows, flat = self._flatten(cohort, offset, lanes)
        if not len(flat):
            return
        if not self.ready:
            self._prepare()
        for place in self.machine.memory.touched:
            if place not in self.written:
                self.written.add(place)
                self._unlog(place)
        if strong:
            self._synchronise(rows, flat, pc)
        stamps = self._stamps(rows, strong)
        vectors, stamps, rows = self._vectors(flat, stamps, rows, size)
        before = self.write_stamp.take(vectors)
        if before.any():
            bad = self._conflicts(before, stamps, rows, vectors, strong)
            if bad.any():
                self._report(access, vectors, bad, before, "write")
        reads = self.read_stamp.take(vectors)
        if reads.any():
            bad = self._overtakes(reads, stamps, rows, strong)
            if bad.any():
                self._report(access, vectors, bad, reads, "write", after_read=True)
        self.write_stamp[vectors] = stamps
        self.write_pc[vectors] = pc
        left = self.write_stamp.take(vectors)
        if not strong and (left != stamps).any():
            self._report(access, vectors, left != stamps, left, "write")

    def _overtakes(self, reads: Array, stamps: Array, rows: Array, strong: bool) -> Array:
        """Which earlier reads are not ordered before these writes."""
        m = self.machine
        assert m.shared_races is not None
        other_block = ((reads ^ stamps) >> _BLOCK & 0xFFFFFFF) != 0
        clocks = m.shared_races.clocks
        clock = (reads & _LOW) >> CLOCK_SHIFT
        agent = np.minimum(reads & 31, m.warps - 1)
        known = clocks.ordered(m.row_block[rows], m.row_warp[rows], clock, agent)
        floor = clocks.floor_stamp[rows].astype(np.int64) >> CLOCK_SHIFT
        many = (reads & _MANY_WARPS) != 0
        known = np.where(many, clock < floor, known)
        apart = other_block | ((reads & _MANY_BLOCKS) != 0)
        if self.tracks_fences:
            for place in np.flatnonzero(apart & (reads != 0)):
                apart[place] = not self._ordered_across_blocks(int(rows[place]), int(reads[place]))
        bad = (reads != 0) & (apart | (~other_block & ~known))
        if strong:
            bad &= (reads & ATOMIC) == 0
        return bad  # type: ignore[no-any-return]

    def _note_reads(self, vectors: Array, stamps: Array) -> None:
        old = self.read_stamp.take(vectors)
        self.read_stamp[vectors] = stamps
        now = self.read_stamp.take(vectors)
        block = stamps >> _BLOCK
        other = ((old != 0) & ((old >> _BLOCK & 0xFFFFFFF) != block)) | (now >> _BLOCK != block)
        flags = np.where(other | (old & _MANY_BLOCKS != 0), _MANY_BLOCKS, 0)
        same_time = (old & _LOW) >> CLOCK_SHIFT == (stamps & _LOW) >> CLOCK_SHIFT
        warps = (old != 0) & ~other & same_time & ((old ^ stamps) & 31 != 0)
        warps |= (now ^ stamps) & 31 != 0
        flags |= np.where(warps | ((old & _MANY_WARPS != 0) & same_time), _MANY_WARPS, 0)
        marked = flags != 0
        if marked.any():
            where = vectors[marked]
            np.bitwise_or.at(self.read_stamp, where, flags[marked])

    def _unlog(self, place: int) -> None:
        """Moves the listed reads of a buffer into the shadow, before its first write."""
        no_rows = np.zeros(0, np.int64)
        for flat, stamps, size, _ in self.log.pop(place, []):
            many = max(1, size >> self.shift)
            rows = no_rows if many == 1 else np.zeros(len(flat), np.int64)
            vectors, wide, _ = self._vectors(flat, stamps, rows, size)
            self._note_reads(vectors, wide)

    def _spill(self) -> None:
        if not self.ready:
            self._prepare()
        for place in list(self.log):
            self._unlog(place)
        self.log_bytes = 0

    def _ordered_across_blocks(self, row: int, stamp: int) -> bool:
        """Whether fences and atomics order an access of another block before a warp."""
        m = self.machine
        assert m.shared_races is not None
        slot, warp = int(m.row_block[row]), int(m.row_warp[row])
        other = (stamp >> _BLOCK & 0xFFFFFFF) - 1
        agent, clock = stamp & 31, (stamp & _LOW) >> CLOCK_SHIFT
        seen = m.shared_races.clocks.seen[slot, warp]
        for entry in self.learnt.get(int(m.blocks[slot]), ()):
            known = entry.known.get(other)
            if known is not None and known[agent] >= clock and seen[entry.warp] >= entry.clock:
                return True
        return False

    def _synchronise(self, rows: Array, flat: Array, pc: int) -> None:
        """Strong accesses acquire what was released at their address, and release."""
        if not self.tracks_fences:
            return
        m = self.machine
        assert m.shared_races is not None
        clocks = m.shared_races.clocks
        if pc in m.program.releases:
            self._fence(np.unique(rows))
            clocks.fence(np.unique(rows))
        clocks.synchronise(rows, -1 - flat)
        for row, address in zip(rows.tolist(), flat.tolist(), strict=True):
            slot, warp = int(m.row_block[row]), int(m.row_warp[row])
            block = int(m.blocks[slot])
            offered = self.released.setdefault(address, {})
            if offered.keys() - {block}:
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

    def _report(
        self,
        a: _GlobalAccess,
        vectors: Array,
        bad: Array,
        before: Array,
        verb: str,
        after_read: bool = False,
    ) -> None:
        """Raises for the first vector that ``bad`` marks; ``before`` holds the earlier stamps."""
        cohort, lanes, size, pc = a
        m, program = self.machine, self.machine.program
        first = int(np.argmax(bad))
        entry = first // max(1, size >> self.shift)
        if lanes is None:
            width = len(vectors) // max(1, size >> self.shift) // cohort.n
            row, lane = divmod(entry, width)
        else:
            places = np.nonzero(np.broadcast_to(lanes, (cohort.n, 32)))
            row, lane = int(places[0][entry]), int(places[1][entry])
        stamp = int(before[first])
        block = (stamp >> _BLOCK & 0xFFFFFFF) - 1
        address = (int(vectors[first]) << self.shift) + m.memory.base
        mine = int(m.blocks[m.row_block[cohort.rows[row]]])
        several = "several blocks" if stamp & _MANY_BLOCKS else f"block {block}"
        who = several if block != mine or stamp & _MANY_BLOCKS else "another warp of the block"
        if after_read:
            what = f"a write may overtake a read of {who}"
            other = ""
        else:
            what = f"a {verb} and a write of {who} are not ordered"
            source = int(self.write_pc[vectors[first]])
            other = f"; written at {program.describe(source)}"
        m.fail(
            RaceError,
            f"race in global memory: {what}",
            cohort,
            pc,
            row=row,
            lane=lane,
            numbers=f"{m.memory.describe(address)}{other}",
            way_out="write these bytes in one block only, use atomics, or order the accesses "
            "(a barrier within a block; another launch, or a fence and an atomic, between blocks)",
        )


def _join(known: ClocksByBlock, more: ClocksByBlock) -> None:
    for block, clocks in more.items():
        before = known.get(block)
        known[block] = clocks.copy() if before is None else np.maximum(before, clocks)
