"""Records the memory accesses of a profiled launch, by instruction and by block.

Accesses to global memory are counted in 32-byte sectors: the number of sectors that the lanes of a
warp access, and the minimum number into which their distinct bytes fit. Accesses to shared memory
are counted in wavefronts (`ptx_emulator.counters.banks`). The order of the accesses of a block
is recorded for `ptx_emulator.counters.l2`; the order among the warps of a block is the one in
which the emulator executed them.

A cp.async whose source size is smaller than its size is executed, and counted, byte by byte.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_emulator.counters.banks import BANK_BYTES, BANKS, ROW_BYTES, phases, wavefronts
from ptx_emulator.state.cohort import Cohort, spread
from ptx_emulator.state.memory import ELEMENT, SHIFT, Array, FlatMemory
from ptx_emulator.state.wave import Execution, Wave

READ, WRITE, ATOMIC = 0, 1, 2
SECTOR_BYTES = 32
LINE_BYTES = 128
SECTORS = LINE_BYTES // SECTOR_BYTES
_SECTOR_SHIFT, _LINE_SHIFT = 5, 7
_MARK = {size: np.frombuffer(bytes([1] * size), dtype)[0] for size, dtype in ELEMENT.items()}


@dataclass(frozen=True)
class BufferTraffic:
    """Traffic of one allocation. Each triple is of reads, writes and atomics.

    Attributes:
        label: the arguments placed in it, such as "argument 0, field 2".
        issued: bytes requested by lanes.
        sectors: 32-byte sectors accessed, summed over the accesses of warps.
        sectors_least: minimum number of sectors for the same bytes; an access to several
            allocations is counted for the allocation with the lowest address.
        read, written: distinct bytes read and written; bytes of atomics count as both.
    """

    label: str
    issued: tuple[int, int, int]
    sectors: tuple[int, int, int]
    sectors_least: int
    read: int
    written: int


@dataclass(frozen=True)
class AccessTrace:
    """Accesses to global memory in the order of each block, by lines of 128 bytes.

    One entry is one access of a warp to one line.

    Attributes:
        starts: index of the first entry of each block, (blocks + 1,); blocks in the order of their
            numbers, x fastest.
        line: number of the line, int64.
        sectors: the accessed sectors of the line as four bits, uint8.
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
        bytes: bytes of global memory requested by lanes; bytes of an atomic count once.
        sectors, sectors_least: sectors of global memory, and the minimum for the same bytes.
        wavefronts, wavefronts_least: wavefronts of shared memory, and the minimum.
        shared_bytes: bytes that lanes moved to or from shared memory.
    """

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        # What is read after the launch, when the machine is gone.
        self._memory, self._blocks = machine.memory, math.prod(machine.config.grid)
        size = len(machine.program.code)
        arena = len(machine.memory.flat.bytes)
        self._steps = np.zeros(size + 1, np.int64)
        self._idle = np.zeros(size, np.int64)  # lanes that a guard disabled
        self.bytes, self.sectors, self.sectors_least = np.zeros((3, size), np.int64)
        self.shared_bytes, self.wavefronts, self.wavefronts_least = np.zeros((3, size), np.int64)
        # One byte per byte of device memory, not 0 where read and where written. Pages that are
        # never accessed use no memory.
        self._touched = (FlatMemory(arena), FlatMemory(arena))
        buffers = len(machine.memory.allocations)
        self._issued = np.zeros((buffers, 3), np.int64)
        self._buffer_sectors = np.zeros((buffers, 3), np.int64)
        self._buffer_least = np.zeros(buffers, np.int64)
        none = np.zeros(0, np.int64)
        self._entries = [(none, none, none.astype(np.uint8), READ)]

    # ---- while the kernel runs

    def executed(self, stretch: tuple[int, int], warps: int, mask: Array | None) -> None:
        """Counts the lanes that executed the instructions ``stretch`` (start, end)."""
        lanes = 32 * warps if mask is None else int(np.count_nonzero(mask))
        self._steps[stretch[0]] += lanes
        self._steps[stretch[1]] -= lanes

    def guarded(self, cohort: Cohort, guard: Any, pc: int) -> None:
        """Counts the lanes that a guard disabled for one instruction."""
        off = spread(~np.asarray(guard), cohort.n)
        self._idle[pc] += np.count_nonzero(off if cohort.mask is None else off & cohort.mask)

    def shared_access(
        self, execution: Execution, offset: Any, size: int, in_turn: bool = False
    ) -> None:
        """Records an access to shared memory of ``size`` bytes per lane.

        Addresses are offsets into the shared memory of the block.
        """
        offsets = execution.spread(offset)
        active = None if execution.lanes is None else execution.active
        count = offsets.size if active is None else int(np.count_nonzero(active))
        self._shared(execution.pc, size * count, wavefronts(offsets, active, size, in_turn))

    def matrices(self, rows: Array, pc: int) -> None:
        """Records ldmatrix or stmatrix: addresses of 16-byte rows, (warps, 8 per matrix)."""
        self._shared(pc, rows.size * ROW_BYTES, phases((rows // ROW_BYTES).reshape(-1, 8), None))

    def operand(self, size: int, pc: int) -> None:
        """Records the read of a wgmma operand: eight 16-byte rows per wavefront, no conflicts."""
        self._shared(pc, size, (size // LINE_BYTES, size // LINE_BYTES))

    def _shared(self, pc: int, size: int, counts: tuple[int, int]) -> None:
        """Adds bytes of shared memory, their wavefronts, and the minimum."""
        self.shared_bytes[pc] += size
        self.wavefronts[pc] += counts[0]
        self.wavefronts_least[pc] += counts[1]

    def global_access(self, execution: Execution, offset: Any, size: int, kind: int) -> None:
        """Records an access to global memory at the offsets that `locate` returns."""
        full = offset if execution.lanes is None else execution.filled(offset + 1) - 1
        self._global_access(execution, execution.spread(full), np.asarray(offset), size, kind)

    def bulk(
        self,
        execution: Execution,
        offset: Array,
        inside: Array | None,
        size: int,
        shared_bytes: int,
        kind: int,
    ) -> None:
        """Records bulk copies.

        Each wavefront of shared memory is assumed to transfer one word of every bank.

        Args:
            offset: of the units in global memory (copies, units).
            inside: the units that are accessed; None for all.
            size: bytes per unit.
            shared_bytes: bytes of shared memory.
        """
        count = -(-shared_bytes // (BANKS * BANK_BYTES))
        self._shared(execution.pc, shared_bytes, (count, count))
        full = offset if inside is None else np.where(inside, offset, -1)
        chosen = offset if inside is None else offset[inside]
        self._global_access(execution, full, chosen, size, kind)

    def _global_access(
        self, execution: Execution, full: Array, chosen: Array, size: int, kind: int
    ) -> None:
        """Records an access at offsets ``full`` (warps, any number), -1 where there is none."""
        ordered = np.sort(full, axis=1)
        active = ordered >= 0
        requested = size * int(np.count_nonzero(active))
        if not requested:
            return
        for touched in self._touched if kind == ATOMIC else (self._touched[kind],):
            touched.view[size][chosen >> SHIFT[size]] = _MARK[size]
        different = active.copy()
        different[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
        least = -(-size * different.sum(axis=1) // SECTOR_BYTES)
        sector = ordered >> _SECTOR_SHIFT
        first = active.copy()
        first[:, 1:] &= sector[:, 1:] != sector[:, :-1]
        self.bytes[execution.pc] += requested
        self.sectors[execution.pc] += np.count_nonzero(first)
        self.sectors_least[execution.pc] += least.sum()
        self._by_buffer(ordered, active, first, least, size, kind)
        self._keep(execution.cohort, sector, first, kind)

    def _by_buffer(
        self, ordered: Array, active: Array, first: Array, least: Array, size: int, kind: int
    ) -> None:
        memory = self._memory
        if len(memory.touched) == 1:
            only = memory.touched[0]
            self._issued[only, kind] += size * np.count_nonzero(active)
            self._buffer_sectors[only, kind] += np.count_nonzero(first)
            self._buffer_least[only] += least.sum()
            return
        allocation_index = np.searchsorted(memory.starts, ordered + memory.base, "right") - 1
        count = len(memory.starts)
        self._issued[:, kind] += size * np.bincount(allocation_index[active], minlength=count)
        self._buffer_sectors[:, kind] += np.bincount(allocation_index[first], minlength=count)
        some = active.any(axis=1)
        lowest = allocation_index[some, active[some].argmax(axis=1)]
        np.add.at(self._buffer_least, lowest, least[some])

    def _keep(self, cohort: Cohort, sector: Array, first: Array, kind: int) -> None:
        """Adds entries to the trace: the sectors of each warp, grouped by line."""
        machine = self.machine
        block = np.asarray(machine.blocks[machine.row_block[cohort.rows]])
        block = np.broadcast_to(block[:, None], sector.shape)[first]
        chosen = sector[first]
        line = chosen >> (_LINE_SHIFT - _SECTOR_SHIFT)
        warp = np.broadcast_to(np.arange(cohort.n)[:, None], sector.shape)[first]
        begins = np.ones(len(chosen), bool)
        begins[1:] = (line[1:] != line[:-1]) | (warp[1:] != warp[:-1])
        starts = np.flatnonzero(begins)
        bits = np.uint8(1) << (chosen & (SECTORS - 1)).astype(np.uint8)
        masks = np.bitwise_or.reduceat(bits, starts)
        self._entries.append((block[starts].astype(np.int32), line[starts], masks, kind))

    # ---- after the launch

    @property
    def lanes(self) -> Array:
        return np.asarray(np.cumsum(self._steps)[:-1] - self._idle)

    @property
    def buffers(self) -> tuple[BufferTraffic, ...]:
        """Traffic of each allocation, in the order of their addresses on the host."""
        memory = self._memory
        traffic = []
        for allocation_index, allocation in enumerate(memory.allocations):
            start = allocation.start - memory.base
            span = slice(start, start + allocation.size)
            read, written = (int(np.count_nonzero(t.bytes[span])) for t in self._touched)
            issued = tuple(int(n) for n in self._issued[allocation_index])
            sectors = tuple(int(n) for n in self._buffer_sectors[allocation_index])
            least = int(self._buffer_least[allocation_index])
            traffic.append(BufferTraffic(allocation.label, issued, sectors, least, read, written))  # type: ignore[arg-type]
        return tuple(traffic)

    @functools.cached_property
    def trace(self) -> AccessTrace:
        """Every access to global memory, block by block."""
        count = self._blocks
        block = np.concatenate([entry[0] for entry in self._entries])
        order = np.argsort(block, kind="stable")
        line = np.concatenate([entry[1] for entry in self._entries])[order]
        sectors = np.concatenate([entry[2] for entry in self._entries])[order]
        kinds = [np.full(len(entry[0]), entry[3], np.uint8) for entry in self._entries]
        starts = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(block, minlength=count), out=starts[1:])
        return AccessTrace(starts, line, sectors, np.concatenate(kinds)[order])


def count_sectors(execution: Execution, offset: Any) -> int:
    """Distinct 32-byte sectors that each warp touches, summed over warps; see `locate`."""
    n = execution.cohort.n
    if execution.lanes is None:
        if offset.ndim == 0 or offset.shape[1] == 1:
            return n
        sector = offset >> 5
        step = np.diff(sector, axis=1)
        if offset.shape[0] == n and int(step.min()) >= 0:
            return n + int(np.count_nonzero(step))
        sector = execution.spread(sector)
    else:
        sector = execution.filled((offset >> 5) + 1)  # 0 in the other lanes
    sector = np.sort(sector, axis=1)
    changes = int(np.count_nonzero(np.diff(sector, axis=1)))
    return changes + (n if execution.lanes is None else int(np.count_nonzero(sector[:, 0])))
