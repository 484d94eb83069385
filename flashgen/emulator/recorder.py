"""What a profiled launch records of its accesses, instruction by instruction and block by block.

Global memory is counted in sectors of 32 bytes: an access of a warp takes as many as its lanes
touch, and could take as few as its different bytes fill. Shared memory is counted in wavefronts:
`flashgen.emulator.banks`. Accesses of the same block keep their order, for `flashgen.emulator.l2`;
between warps of a block it is the order in which the emulator happened to run them.

A cp.async that reads some of its bytes counts as one access for each of them, as it is executed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.banks import BANK_BYTES, BANKS, ROW_BYTES, phases, wavefronts
from flashgen.emulator.cohort import Cohort
from flashgen.emulator.memory import ELEMENT, SHIFT, Flat

Array = npt.NDArray[Any]

READ, WRITE, ATOMIC = 0, 1, 2
SECTOR_BYTES = 32
LINE_BYTES = 128
SECTORS = LINE_BYTES // SECTOR_BYTES
_SECTOR_SHIFT, _LINE_SHIFT = 5, 7
_MARK = {size: np.frombuffer(bytes([1] * size), dtype)[0] for size, dtype in ELEMENT.items()}


@dataclass(frozen=True)
class Buffer:
    """Traffic of one allocation. Each triple is of reads, writes and atomics.

    Attributes:
        label: the arguments that lie in it, such as "argument 0, field 2".
        issued: bytes that lanes asked for.
        sectors: that the accesses of warps touched.
        sectors_least: the fewest that these could take; an access to several allocations counts
            for that of its lowest address.
        read, written: different bytes; those of atomics are both.
    """

    label: str
    issued: tuple[int, int, int]
    sectors: tuple[int, int, int]
    sectors_least: int
    read: int
    written: int


@dataclass(frozen=True)
class Trace:
    """Accesses to global memory in the order of each block, by lines of 128 bytes.

    One entry is what one access of a warp touched of one line.

    Attributes:
        starts: where each block's entries begin, (blocks + 1,); blocks by number, x fastest.
        line: number of the line, int64.
        sectors: which of its four sectors, one bit each, uint8.
        kind: READ, WRITE or ATOMIC, uint8.
    """

    starts: Array
    line: Array
    sectors: Array
    kind: Array


class Recorder:
    """Arrays by instruction, filled while the kernel runs.

    Attributes:
        lanes: active lanes, summed over the executions of warps.
        bytes: of global memory that lanes asked for; those of an atomic once.
        sectors, sectors_least: of global memory, and the fewest that these bytes could take.
        wavefronts, wavefronts_least: of shared memory, and the fewest possible.
        shared_bytes: that lanes moved to or from shared memory.
    """

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        size = len(machine.program.code)
        arena = len(machine.memory.flat.bytes)
        self._steps = np.zeros(size + 1, np.int64)
        self._idle = np.zeros(size, np.int64)  # lanes that a guard switched off
        self.bytes = np.zeros(size, np.int64)
        self.sectors = np.zeros(size, np.int64)
        self.sectors_least = np.zeros(size, np.int64)
        self.shared_bytes = np.zeros(size, np.int64)
        self.wavefronts = np.zeros(size, np.int64)
        self.wavefronts_least = np.zeros(size, np.int64)
        # Every byte of device memory: not 0 where it was touched. Untouched pages take no space.
        self._touched = (Flat(arena), Flat(arena))
        buffers = len(machine.memory.allocations)
        self._issued = np.zeros((buffers, 3), np.int64)
        self._buffer_sectors = np.zeros((buffers, 3), np.int64)
        self._buffer_least = np.zeros(buffers, np.int64)
        self._entries: list[tuple[Array, Array, Array, int]] = []
        self._trace: Trace | None = None

    # ---- while the kernel runs

    def executed(self, stretch: tuple[int, int], warps: int, mask: Array | None) -> None:
        """Warps have executed the instructions of a stretch (start, end)."""
        lanes = 32 * warps if mask is None else int(np.count_nonzero(mask))
        self._steps[stretch[0]] += lanes
        self._steps[stretch[1]] -= lanes

    def guarded(self, C: Cohort, guard: Any, pc: int) -> None:
        """An instruction is executed by the lanes whose guard holds."""
        off = np.broadcast_to(~np.asarray(guard), (C.n, 32))
        self._idle[pc] += np.count_nonzero(off if C.mask is None else off & C.mask)

    def shared(
        self, C: Cohort, address: Any, lanes: Any, size: int, pc: int, in_turn: bool = False
    ) -> None:
        """An access of ``size`` bytes per lane; addresses are offsets into the block's memory."""
        where = np.broadcast_to(address, (C.n, 32))
        active = None if lanes is None else np.broadcast_to(lanes, (C.n, 32))
        taken, least = wavefronts(where, active, size, in_turn)
        self.wavefronts[pc] += taken
        self.wavefronts_least[pc] += least
        self.shared_bytes[pc] += size * (32 * C.n if active is None else np.count_nonzero(active))

    def matrices(self, rows: Array, pc: int) -> None:
        """ldmatrix: the addresses of rows of 16 bytes, (warps, 8 for each matrix)."""
        taken, least = phases((rows // ROW_BYTES).reshape(-1, 8), None)
        self.wavefronts[pc] += taken
        self.wavefronts_least[pc] += least
        self.shared_bytes[pc] += rows.size * ROW_BYTES

    def operand(self, size: int, pc: int) -> None:
        """wgmma reads ``size`` bytes: eight rows of 16 bytes at a time, which never conflict."""
        taken = size // LINE_BYTES
        self.wavefronts[pc] += taken
        self.wavefronts_least[pc] += taken
        self.shared_bytes[pc] += size

    def whole(self, C: Cohort, offset: Any, lanes: Any, size: int, pc: int, kind: int) -> None:
        """An access to global memory at offsets into the arena.

        Args:
            offset: of a shape that broadcasts to (warps, 32); with ``lanes``, one per active lane.
        """
        full = np.broadcast_to(offset, (C.n, 32)) if lanes is None else np.full((C.n, 32), -1)
        if lanes is not None:
            full[np.broadcast_to(lanes, (C.n, 32))] = offset
        self._whole(C, full, np.asarray(offset), size, pc, kind)

    def bulk(
        self,
        C: Cohort,
        offset: Array,
        inside: Array | None,
        size: int,
        moved: int,
        pc: int,
        kind: int,
    ) -> None:
        """A bulk copy: units of global memory (copies, units), and the bytes of shared memory.

        Shared memory is taken to give or take a row of all its banks in each wavefront.
        """
        self.shared_bytes[pc] += moved
        self.wavefronts[pc] += -(-moved // (BANKS * BANK_BYTES))
        self.wavefronts_least[pc] += -(-moved // (BANKS * BANK_BYTES))
        if inside is None:
            self._whole(C, offset, offset, size, pc, kind)
        else:
            self._whole(C, np.where(inside, offset, -1), offset[inside], size, pc, kind)

    def _whole(self, C: Cohort, full: Array, chosen: Array, size: int, pc: int, kind: int) -> None:
        """An access at offsets ``full`` (warps, any number), -1 where there is none."""
        ordered = np.sort(full, axis=1)
        active = ordered >= 0
        asked = size * int(np.count_nonzero(active))
        if not asked:
            return
        self._mark(chosen, size, kind)
        different = active.copy()
        different[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
        least = -(-size * different.sum(axis=1) // SECTOR_BYTES)
        sector = ordered >> _SECTOR_SHIFT
        first = active.copy()
        first[:, 1:] &= sector[:, 1:] != sector[:, :-1]
        self.bytes[pc] += asked
        self.sectors[pc] += np.count_nonzero(first)
        self.sectors_least[pc] += least.sum()
        self._by_buffer(ordered, active, first, least, size, kind)
        self._keep(C, sector, first, kind)

    def _mark(self, offset: Array, size: int, kind: int) -> None:
        for touched in self._touched if kind == ATOMIC else (self._touched[kind],):
            touched.view[size][offset >> SHIFT[size]] = _MARK[size]

    def _by_buffer(
        self, ordered: Array, active: Array, first: Array, least: Array, size: int, kind: int
    ) -> None:
        memory = self.machine.memory
        if len(memory.touched) == 1:
            place = memory.touched[0]
            self._issued[place, kind] += size * np.count_nonzero(active)
            self._buffer_sectors[place, kind] += np.count_nonzero(first)
            self._buffer_least[place] += least.sum()
            return
        place = np.searchsorted(memory.starts, ordered + memory.base, "right") - 1
        count = len(memory.starts)
        self._issued[:, kind] += size * np.bincount(place[active], minlength=count)
        self._buffer_sectors[:, kind] += np.bincount(place[first], minlength=count)
        some = active.any(axis=1)
        lowest = place[some, active[some].argmax(axis=1)]
        np.add.at(self._buffer_least, lowest, least[some])

    def _keep(self, C: Cohort, sector: Array, first: Array, kind: int) -> None:
        """Entries of the trace: the sectors of each warp, joined by lines."""
        machine = self.machine
        block = np.asarray(machine.blocks[machine.row_block[C.rows]])
        block = np.broadcast_to(block[:, None], sector.shape)[first]
        chosen = sector[first]
        line = chosen >> (_LINE_SHIFT - _SECTOR_SHIFT)
        warp = np.broadcast_to(np.arange(C.n)[:, None], sector.shape)[first]
        begins = np.ones(len(chosen), bool)
        begins[1:] = (line[1:] != line[:-1]) | (warp[1:] != warp[:-1])
        starts = np.flatnonzero(begins)
        bits = np.uint8(1) << (chosen & (SECTORS - 1)).astype(np.uint8)
        masks = np.bitwise_or.reduceat(bits, starts)
        self._entries.append((block[starts].astype(np.int32), line[starts], masks, kind))
        self._trace = None

    # ---- afterwards

    @property
    def lanes(self) -> Array:
        total: Array = np.cumsum(self._steps)[:-1] - self._idle
        return total

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Traffic of each allocation, in the order of their addresses on the host."""
        memory = self.machine.memory
        found = []
        for place, allocation in enumerate(memory.allocations):
            start = allocation.start - memory.base
            span = slice(start, start + allocation.size)
            read, written = (int(np.count_nonzero(t.bytes[span])) for t in self._touched)
            issued = tuple(int(n) for n in self._issued[place])
            sectors = tuple(int(n) for n in self._buffer_sectors[place])
            least = int(self._buffer_least[place])
            found.append(Buffer(allocation.label, issued, sectors, least, read, written))  # type: ignore[arg-type]
        return tuple(found)

    @property
    def trace(self) -> Trace:
        """Every access to global memory, block by block."""
        if self._trace is None:
            self._trace = self._sorted()
        return self._trace

    def _sorted(self) -> Trace:
        grid = self.machine.grid
        count = grid[0] * grid[1] * grid[2]
        if not self._entries:
            none = np.zeros(0, np.int64)
            return Trace(np.zeros(count + 1, np.int64), none, none.astype("u1"), none.astype("u1"))
        block = np.concatenate([entry[0] for entry in self._entries])
        order = np.argsort(block, kind="stable")
        line = np.concatenate([entry[1] for entry in self._entries])[order]
        sectors = np.concatenate([entry[2] for entry in self._entries])[order]
        kinds = [np.full(len(entry[0]), entry[3], np.uint8) for entry in self._entries]
        starts = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(block, minlength=count), out=starts[1:])
        return Trace(starts, line, sectors, np.concatenate(kinds)[order])
