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
        self.shift = machine.program.global_vector.bit_length() - 1
        self.written: set[int] = set()  # indices of allocations that were written
        self.log: dict[int, list[tuple[Array, Array, int, int]]] = {}
        self.log_bytes = 0
        count = (len(machine.memory.flat.bytes) >> self.shift) + 1
        self.write_stamp = sparse_zeros(count, np.int64)
        self.read_stamp = sparse_zeros(count, np.int64)
        self.write_pc = sparse_zeros(count, np.int32)
        self.tracks_fences = machine.program.synchronises
        # ClocksByBlock holds, per block, the clocks of its warps up to which accesses are ordered.
        # By block and warp: at the last fence.
        self.fenced: dict[tuple[int, int], ClocksByBlock] = {}
        self.released: dict[int, ClocksByBlock] = {}  # by address: what an acquire obtains
        self.learnt: dict[int, list[_Acquired]] = {}  # by block

    @property
    def clocks(self) -> Clocks:
        """The clocks of the running wave."""
        assert self.machine.shared_races is not None
        return self.machine.shared_races.clocks

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
                for place in list(self.log):
                    self._unlog(place)
                self.log_bytes = 0
            return
        vectors, stamps, rows = self._vectors(flat, stamps, rows, size)
        before = self.write_stamp.take(vectors)
        if before.any():
            bad = self._unordered(before, stamps, rows, strong)
            if bad.any():
                self._report(Site(cohort, pc), lanes, size, vectors, bad, before, _UNORDERED_READ)
        self._note_reads(vectors, stamps)

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
        strong = strong or pc in self.machine.program.strong
        if strong:
            self._synchronise(rows, flat, pc)
        stamps = self._stamps(rows, strong)
        vectors, stamps, rows = self._vectors(flat, stamps, rows, size)
        access = (Site(cohort, pc), lanes, size, vectors)
        for earlier, problem in (
            (self.write_stamp, _UNORDERED_WRITE),
            (self.read_stamp, _OVERTAKES),
        ):
            before = earlier.take(vectors)
            if before.any():
                bad = self._unordered(before, stamps, rows, strong)
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

    def _stamps(self, rows: Array, strong: bool) -> Array:
        m = self.machine
        block = m.cluster_ids[m.row_cluster[rows]] + 1
        low = self.clocks.clock[rows] << CLOCK_SHIFT | m.row_member[rows]
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

    def _unordered(self, before: Array, stamps: Array, rows: Array, strong: bool) -> Array:
        """Which earlier accesses are not ordered before these ones; at least one is a write."""
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
            bad &= (before & ATOMIC) == 0
        if self.tracks_fences and bad.any():
            for place in np.flatnonzero(bad & apart):
                fenced = self._ordered_across_blocks(int(rows[place]), int(before[place]))
                bad[place] = not fenced or not (other_block[place] or known[place])
        return bad  # type: ignore[no-any-return]

    def _note_reads(self, vectors: Array, stamps: Array) -> None:
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
        for flat, stamps, size, _ in self.log.pop(place, []):
            vectors, wide, _ = self._vectors(flat, stamps, flat, size)
            self._note_reads(vectors, wide)

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
        if pc in m.program.releases:
            self.fence(np.unique(rows))
            clocks.fence(np.unique(rows))
        clocks.synchronise(rows, -1 - flat)
        for row, address in zip(rows.tolist(), flat.tolist(), strict=True):
            slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
            block = int(m.cluster_ids[slot])
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
        many = max(1, size >> self.shift)
        if lanes is None:
            row, lane = divmod(first // many, len(vectors) // many // cohort.n)
        else:
            row, lane = (int(i) for i in np.argwhere(spread(lanes, cohort.n))[first // many])
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
