"""The data of a bulk copy in flight, and the checks before it starts."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.bounds import check_aligned
from flashgen.emulator.counters.recorder import ATOMIC, READ, WRITE
from flashgen.emulator.errors import LaunchArguments, OutOfBounds, UnknownInstruction
from flashgen.emulator.machine.tma import CHUNK_BYTES, WIDEST_BYTES, Boxes, TensorMap, lowest_bit
from flashgen.emulator.state.cohort import SingleThreads
from flashgen.emulator.state.memory import PARAM_WINDOW

Array = npt.NDArray[Any]
_BITS = ("u32", "s32", "b32", "u64", "s64", "b64")
_TYPES = {
    "add": ("f16", "bf16", "f32", "f64", "u32", "s32", "u64"),
    "min": ("f16", "bf16", "u32", "s32", "u64", "s64"),
    "max": ("f16", "bf16", "u32", "s32", "u64", "s64"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": _BITS,
    "or": _BITS,
    "xor": _BITS,
}


class BulkTransfer:
    """The copies that one execution of an instruction started, one per row of ``issued``.

    Offsets refer to units of ``unit`` bytes, in bytes from the start of `Wave.shared` or of
    `GlobalMemory.flat`, (n, k).
    """

    def __init__(
        self,
        issued: SingleThreads,
        pc: int,
        unit: int,
        start: Array,
        shared_offsets: Array,
        global_offsets: Array,
        inside: Array | None,
    ) -> None:
        self.issued, self.pc, self.unit = issued, pc, unit
        self.start = start  # offset of each box in `Wave.shared`, (n,)
        self.shared_offsets, self.global_offsets, self.inside = (
            shared_offsets,
            global_offsets,
            inside,
        )
        # Offsets in global memory in larger units, if the boxes are not cut: their size, (n, k).
        self.wide_unit, self.wide_offsets = unit, global_offsets
        self.size = shared_offsets.shape[1] * unit  # bytes of each copy in shared memory
        # Copies into shared memory: mbarriers (n,), and numbers of the asynchronous writes.
        self.barriers = np.zeros(0, np.int64)
        self.writes: Array | None = None
        # Copies out of it: operation and type of a reduction, groups, agent and time of reads.
        self.operation: tuple[str, str] | None = None
        self.groups = np.zeros(0, np.int64)
        self.column = self.time = 0
        self.waited = np.zeros(issued.n, bool)
        self.done = False

    def part(self, which: Array) -> BulkTransfer:
        """The copies of the threads ``which``; for copies out of shared memory."""
        inside = None if self.inside is None else self.inside[which]
        issued = self.issued.some(which)
        arrays = (self.start[which], self.shared_offsets[which], self.global_offsets[which])
        made = BulkTransfer(issued, self.pc, self.unit, *arrays, inside)
        made.operation, made.groups = self.operation, self.groups[which]
        return made

    def spans(self) -> tuple[Array, int]:
        """Offsets of whole boxes in `Wave.shared` in the largest aligned units, and their size."""
        size = lowest_bit(np.append(self.start, self.size), WIDEST_BYTES)
        return self.start[:, None] + np.arange(self.size // size) * size, size

    def in_shared(self) -> tuple[Array, Array, int]:
        """Copies with units inside the tensor, their offsets in `Wave.shared`, and the unit."""
        if self.inside is None:
            return np.arange(self.issued.n), *self.spans()
        return *self._touched(self.inside, self.shared_offsets), self.unit

    def in_global(self) -> tuple[Array, Array, int]:
        """Copies with units inside the tensor, their offsets in global memory, and the unit."""
        if self.inside is None:
            return np.arange(self.issued.n), self.wide_offsets, self.wide_unit
        return *self._touched(self.inside, self.global_offsets), self.unit

    @staticmethod
    def _touched(inside: Array, offsets: Array) -> tuple[Array, Array]:
        """Copies with units inside, and their offsets; units outside repeat the first inside."""
        some = np.flatnonzero(inside.any(axis=1))
        inside, offsets = inside[some], offsets[some]
        first = offsets[np.arange(len(some)), inside.argmax(axis=1)]
        return some, np.where(inside, offsets, first[:, None])


def map_at(m: Any, issued: SingleThreads, address: int, pc: int) -> tuple[TensorMap, int]:
    """The tensor map at an address, and the device address of its tensor."""
    found = m.maps.get(address - PARAM_WINDOW)
    if found is None:
        known = [f"{PARAM_WINDOW + at:#x}" for at in m.maps]
        refuse(
            m,
            issued,
            pc,
            "no tensor map lies at this address",
            f"address {address:#x}; maps among the parameters: {', '.join(known) or 'none'}",
            "pass an emulator.TensorMap as a __grid_constant__ parameter and use its address",
        )
    place: tuple[TensorMap, int] = found
    return place


def check_shared(m: Any, issued: SingleThreads, at: Array, size: int, align: int, pc: int) -> None:
    bad = (at < 0) | (at + size > m.shared_size)
    if bad.any():
        which = int(np.argmax(bad))
        m.fail(
            OutOfBounds,
            "a bulk copy extends beyond shared memory",
            issued,
            pc,
            row=which,
            numbers=f"{size:,} bytes at offset {int(at[which]):,} of {m.shared_size:,} bytes",
            way_out="check the address and the box, or pass a larger shared_bytes",
        )
    check_aligned(m, issued, at[:, None], None, align, pc, "shared")


def check_box(m: Any, issued: SingleThreads, box: Boxes, before: int, size: int, pc: int) -> None:
    """Checks that boxes of a map that starts before its array lie in the array's bytes."""
    at = box.offsets - before
    bad = (at < 0) | (at + box.unit > size)
    if box.inside is not None:
        bad &= box.inside
    if bad.any():
        which, unit = np.unravel_index(np.argmax(bad), bad.shape)
        m.fail(
            OutOfBounds,
            "a box of a tensor map extends beyond its array",
            issued,
            pc,
            row=int(which),
            numbers=f"{box.unit} bytes at offset {int(at[which, unit]):,} of {size:,} bytes",
            way_out="check the coordinates against the rows of the array",
        )


def check_global(m: Any, issued: SingleThreads, at: Array, size: int, pc: int, write: bool) -> None:
    memory = m.memory
    index = np.searchsorted(memory.starts, at, "right") - 1
    bad = (index < 0) | (at + size > memory.ends[np.maximum(index, 0)])
    if bad.any():
        which = int(np.argmax(bad))
        m.fail(
            OutOfBounds,
            f"a bulk copy {'to' if write else 'from'} outside every buffer",
            issued,
            pc,
            row=which,
            numbers=f"{size:,} bytes at {memory.describe(int(at[which]))}",
            way_out="check the index against the array that was passed",
        )
    check_aligned(m, issued, at[:, None], None, CHUNK_BYTES, pc, "global")
    memory.touched = np.unique(index).tolist()


def count(m: Any, t: BulkTransfer, taken: int, sectors: int, into: bool, reduces: bool) -> None:
    """Counts a copy, and marks the buffers that it modifies."""
    counters = m.counters
    moved = t.size * t.issued.n if into else taken
    if into:
        counters.global_read_bytes += taken
        counters.global_read_sectors += sectors
        counters.shared_write_bytes += moved
    else:
        counters.shared_read_bytes += moved
        counters.global_write_bytes += taken
        counters.global_write_sectors += sectors
        counters.global_read_bytes += taken if reduces else 0
        for place in m.memory.touched:
            allocation = m.memory.allocations[place]
            allocation.dirty = True
            if not allocation.writable:
                m.fail(
                    OutOfBounds,
                    f"a bulk copy to {allocation.label}, whose numpy array is read-only",
                    t.issued,
                    t.pc,
                    numbers=f"{taken:,} bytes",
                    way_out="pass a writable array, or do not write to it",
                )
    if m.recorder is not None:
        kind = READ if into else ATOMIC if reduces else WRITE
        m.recorder.bulk(t.issued, t.global_offsets, t.inside, t.unit, moved, t.pc, kind)


def reducible(m: Any, issued: SingleThreads, pc: int, operation: str, kind: str) -> str:
    """The element type of a reduction.

    Raises:
        UnknownInstruction: the operation does not support it.
    """
    if kind not in _TYPES.get(operation, ()):
        raise UnknownInstruction(
            f"the emulator does not support the bulk reduction .{operation} of {kind}",
            where=m.place(int(issued.rows[0]), int(issued.lane[0]), pc),
            numbers=f".{operation} takes {', '.join(_TYPES.get(operation, ())) or 'nothing'}",
            way_out="add it to flashgen/emulator/machine/transfers.py",
        )
    return kind


def refuse(
    m: Any,
    issued: SingleThreads,
    pc: int,
    what: str,
    numbers: str,
    way_out: str = "pass a map and operands that fit the instruction",
) -> NoReturn:
    where = m.place(int(issued.rows[0]), int(issued.lane[0]), pc)
    raise LaunchArguments(what, where=where, numbers=numbers, way_out=way_out)
