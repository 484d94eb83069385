"""The data of a bulk copy in flight, and the checks before it starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.bounds import check_aligned, check_writable
from flashgen.emulator.checks.copy_sources import CopySource
from flashgen.emulator.counters.recorder import ATOMIC, READ, WRITE
from flashgen.emulator.errors import LaunchArguments, OutOfBounds, UnknownInstruction
from flashgen.emulator.machine.map_bytes import PlacedMap
from flashgen.emulator.machine.tma import CHUNK_BYTES, WIDEST_BYTES, Boxes, boxes, lowest_bit
from flashgen.emulator.state.cohort import SingleThreads
from flashgen.emulator.state.wave import Site, Wave

Array = npt.NDArray[Any]
_TENSOR_ALIGN = 128
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


@dataclass(eq=False)
class BulkTransfer:
    """The copies that one execution of an instruction started, one per row of ``issued``.

    Attributes:
        box: their bytes in global memory, as offsets into `GlobalMemory.flat`.
        start: offset of each box in `Wave.shared`, (n,); ``shared_offsets``: of each unit, (n, k).
        blocks: the block of the wave in whose shared memory each box lies, (n,).
        reduction: operation and type.
        barriers: mbarriers (n,) of copies into shared memory; ``writes``: the numbers of their
            asynchronous writes; ``known``: the clocks of the issuing warps (n, columns).
        source: what copies into shared memory read; None without checkers.
        groups: number of the group (n,) of copies out of shared memory; ``column``, ``time``: the
            agent and the time of their reads; ``waited``: whether their threads have waited (n,).
    """

    issued: SingleThreads
    pc: int
    box: Boxes
    start: Array
    shared_offsets: Array
    blocks: Array
    reduction: tuple[str, str] | None
    barriers: Array | None = None
    writes: Array | None = None
    known: Array | None = None
    source: CopySource | None = None
    groups: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    column: int = 0
    time: int = 0
    done: bool = False

    def __post_init__(self) -> None:
        self.waited = np.zeros(self.issued.n, bool)
        self.size = self.shared_offsets.shape[1] * self.box.unit  # of each copy, in shared memory

    def part(self, which: Array) -> BulkTransfer:
        """The copies of the threads ``which``; for copies out of shared memory."""
        box = self.box
        return replace(
            self,
            issued=self.issued.some(which),
            box=replace(
                box,
                offsets=box.offsets[which],
                inside=None if box.inside is None else box.inside[which],
                wide_offsets=box.wide_offsets[which],
            ),
            start=self.start[which],
            shared_offsets=self.shared_offsets[which],
            blocks=self.blocks[which],
            groups=self.groups[which],
        )

    def spans(self) -> tuple[Array, int]:
        """Offsets of whole boxes in `Wave.shared` in the largest aligned units, and their size."""
        size = lowest_bit(np.append(self.start, self.size), WIDEST_BYTES)
        return self.start[:, None] + np.arange(self.size // size) * size, size

    def in_shared(self) -> tuple[Array, Array, int]:
        """Copies with units inside the tensor, their offsets in `Wave.shared`, and the unit."""
        if self.box.inside is None:
            return np.arange(self.issued.n), *self.spans()
        return *_touched(self.box.inside, self.shared_offsets), self.box.unit

    def in_global(self) -> tuple[Array, Array, int]:
        """Copies with units inside the tensor, their offsets in global memory, and the unit."""
        box = self.box
        if box.inside is None:
            return np.arange(self.issued.n), box.wide_offsets, box.wide_unit
        return *_touched(box.inside, box.offsets), box.unit


def _touched(inside: Array, offsets: Array) -> tuple[Array, Array]:
    """Copies with units inside, and their offsets; units outside repeat the first inside."""
    some = np.flatnonzero(inside.any(axis=1))
    inside, offsets = inside[some], offsets[some]
    first = offsets[np.arange(len(some)), inside.argmax(axis=1)]
    return some, np.where(inside, offsets, first[:, None])


def boxes_at(
    m: Wave, site: Site, tensor: PlacedMap, coordinates: Array, shared: Array, *, load: bool
) -> Boxes:
    """The boxes of a tensor, checked, as offsets into `GlobalMemory.flat`."""
    spec, base = tensor.spec, tensor.base
    if spec.swizzle and spec.inner_bytes < spec.swizzle:
        m.fail(
            LaunchArguments,
            "a box narrower than the span of its swizzle, for which PTX documents no layout",
            site,
            f"{spec.inner_bytes} bytes, span {spec.swizzle}",
            "pass a map and operands that fit the instruction",
        )
    if tensor.before and load:
        m.fail(
            OutOfBounds,
            "a load by a tensor map that begins before its array",
            site,
            f"{tensor.before:,} B before it",
            "begin the map at the array: addresses of 64 bits may wrap around",
        )
    first = base - tensor.before
    box = boxes(spec, first, coordinates)
    check_shared(m, site, shared, spec.box_bytes, _TENSOR_ALIGN)
    if tensor.before or spec.wraps_around:
        _check_box(m, site, box, tensor.before, tensor.bytes)
    m.memory.touched = [m.memory.find(base)]
    shift = first - m.memory.base
    return replace(box, offsets=box.offsets + shift, wide_offsets=box.wide_offsets + shift)


def check_shared(m: Wave, site: Site, at: Array, size: int, align: int) -> None:
    bad = (at < 0) | (at + size > m.shared_size)
    if bad.any():
        which = int(np.argmax(bad))
        m.fail(
            OutOfBounds,
            "a bulk copy extends beyond shared memory",
            site._replace(row=which),
            f"{size:,} bytes at offset {int(at[which]):,} of {m.shared_size:,} bytes",
            "check the address and the box, or pass a larger shared_bytes",
        )
    check_aligned(m, site.cohort, at[:, None], None, align, site.pc, "shared")


def _check_box(m: Wave, site: Site, box: Boxes, before: int, size: int) -> None:
    """Checks that boxes lie in the bytes of an array that begins ``before`` bytes after the map."""
    at = box.offsets - before
    bad = (at < 0) | (at + box.unit > size)
    if box.inside is not None:
        bad &= box.inside
    if bad.any():
        which, unit = np.unravel_index(np.argmax(bad), bad.shape)
        m.fail(
            OutOfBounds,
            "a box of a tensor map extends beyond its array",
            site._replace(row=int(which)),
            f"{box.unit} bytes at offset {int(at[which, unit]):,} of {size:,} bytes",
            "check the coordinates against the rows of the array",
        )


def check_global(m: Wave, site: Site, at: Array, size: int, write: bool) -> None:
    memory = m.memory
    index = np.searchsorted(memory.starts, at, "right") - 1
    bad = (index < 0) | (at + size > memory.ends[np.maximum(index, 0)])
    if bad.any():
        which = int(np.argmax(bad))
        m.fail(
            OutOfBounds,
            f"a bulk copy {'to' if write else 'from'} outside every buffer",
            site._replace(row=which),
            f"{size:,} bytes at {memory.describe(int(at[which]))}",
            "check the index against the array that was passed",
        )
    check_aligned(m, site.cohort, at[:, None], None, CHUNK_BYTES, site.pc, "global")
    memory.touched = np.unique(index).tolist()


def check_reduction(m: Wave, site: Site, operation: str, kind: str) -> None:
    if kind not in _TYPES.get(operation, ()):
        m.fail(
            UnknownInstruction,
            f"the emulator does not support the bulk reduction .{operation} of {kind}",
            site,
            f".{operation} takes {', '.join(_TYPES.get(operation, ())) or 'nothing'}",
            "add it to flashgen/emulator/machine/transfers.py",
        )


def count(m: Wave, t: BulkTransfer, into: bool) -> None:
    """Counts a copy, and marks the buffers that it modifies."""
    counters, taken = m.counters, t.box.bytes
    moved = t.size * t.issued.n if into else taken
    if into:
        kind = READ
        counters.global_read_bytes += taken
        counters.global_read_sectors += t.box.sectors
        counters.shared_write_bytes += moved
    else:
        kind = WRITE if t.reduction is None else ATOMIC
        counters.shared_read_bytes += moved
        counters.global_write_bytes += taken
        counters.global_write_sectors += t.box.sectors
        counters.global_read_bytes += 0 if t.reduction is None else taken
        check_writable(m, "bulk copy", Site(t.issued, t.pc), f"{taken:,} bytes")
    if m.recorder is not None:
        box = t.box
        m.recorder.bulk(t.issued, box.offsets, box.inside, box.unit, moved, t.pc, kind)
