"""Bulk copies and reductions between global and shared memory, with and without tensor maps, and
copies between blocks of a cluster.

A copy is executed as late as possible: a copy into shared memory when no warp can run, a copy out
of shared memory when its thread waits for its group. Until then it is in flight and the destination
is unchanged, so that a missing wait changes the results. With an order_seed, copies are executed at
random times.

For races in global memory a copy into shared memory counts as a read by the issuing warp at the
time of issue, and one out of shared memory as a write from then until its thread waits for it
without .read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ptx_emulator import errors
from ptx_emulator.checks import unfinished_copies
from ptx_emulator.checks.async_proxy import IN_FLIGHT
from ptx_emulator.checks.bounds import check_aligned, check_window, check_writable
from ptx_emulator.checks.copy_sources import CopySource
from ptx_emulator.checks.shadow import SharedAccess
from ptx_emulator.counters.recorder import ATOMIC, READ, WRITE
from ptx_emulator.errors import LaunchArguments, MbarrierMisuse, OutOfBounds
from ptx_emulator.isa.atomics import FLUSHED_ADD, combine
from ptx_emulator.isa.cluster import fail_exited, remote, resolved
from ptx_emulator.machine import tma
from ptx_emulator.machine.map_bytes import PlacedMap
from ptx_emulator.machine.tma import Boxes
from ptx_emulator.ptx.register_types import DTYPE
from ptx_emulator.state.cohort import Cohort, SingleThreads, active
from ptx_emulator.state.memory import SHIFT, Array
from ptx_emulator.state.wave import Execution, Site, Wave

Reduction = tuple[str, str] | None
"""The operation and the type of a reduction; None for a copy."""
_TENSOR_ALIGN = 128
_FIT = "pass a map and operands that fit the instruction"
_BITS = ("u32", "s32", "b32", "u64", "s64", "b64")
_TYPES = {
    "add": ("f16", "bf16", "f32", "f64", "u32", "s32", "u64"),
    **dict.fromkeys(("min", "max"), ("f16", "bf16", "u32", "s32", "u64", "s64")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), _BITS),
}


@dataclass(eq=False)
class BulkTransfer:
    """The copies that one execution of an instruction started, one per thread.

    Attributes:
        here: the execution; its cohort consists of single threads, ``issued``.
        box: their bytes in global memory, as offsets into `GlobalMemory.flat`; of copies between
            blocks (``near``) their sources, as offsets into `Wave.shared`.
        start: offset of each box in `Wave.shared`, (n,); ``shared_offsets``: of each unit, (n, k).
        blocks: the block of the wave in whose shared memory each box lies, (n,).
        reduction: operation and type.
        barriers: mbarriers (n,) of copies into shared memory; ``writes``: the numbers of their
            asynchronous writes; ``known``: the clocks of the issuing warps (n, columns);
            ``phases``: those of the mbarriers that they completed in.
        source: what copies into shared memory read; None without checkers.
        columns, times: the agents and the times of the reads of copies between blocks (n,).
        groups: number of the group (n,) of copies out of shared memory; ``column``, ``time``: the
            agent and the time of their reads; ``waited``: whether their threads have waited (n,).
    """

    here: Execution
    box: Boxes
    start: Array
    shared_offsets: Array
    blocks: Array
    reduction: Reduction
    near: bool = False
    barriers: Array | None = None
    writes: Array | None = None
    known: Array | None = None
    phases: Array | None = None
    source: CopySource | None = None
    groups: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    column: int = 0
    time: int = 0
    columns: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    times: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    done: bool = False

    def __post_init__(self) -> None:
        assert isinstance(self.here.cohort, SingleThreads)
        self.issued, self.pc = self.here.cohort, self.here.pc
        self.waited = np.zeros(self.issued.n, bool)
        self.size = self.shared_offsets.shape[1] * self.box.unit  # of each copy, in shared memory

    def part(self, which: Array) -> BulkTransfer:
        """The copies of the threads ``which``; for copies out of shared memory."""
        box, here = self.box, self.here._replace(cohort=self.issued.some(which))
        inside = None if box.inside is None else box.inside[which]
        offsets, wide = box.offsets[which], box.wide_offsets[which]
        names = ("start", "shared_offsets", "blocks", "groups")
        cut: dict[str, Any] = {name: getattr(self, name)[which] for name in names}
        box = box._replace(offsets=offsets, inside=inside, wide_offsets=wide)
        return replace(self, here=here, box=box, **cut)

    def spans(self) -> tuple[Array, int]:
        """Offsets of whole boxes in `Wave.shared` in the largest aligned units, and their size."""
        size = tma.lowest_bit(np.append(self.start, self.size), tma.WIDEST_BYTES)
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
    here: Execution, tensor: PlacedMap, coordinates: Array, shared: Array, *, load: bool
) -> Boxes:
    """The boxes of a tensor, checked, as offsets into `GlobalMemory.flat`."""
    m, site, spec, base = here.machine, here.site(), tensor.spec, tensor.base
    if spec.swizzle and spec.inner_bytes < spec.swizzle:
        what = "a box narrower than the span of its swizzle, for which PTX documents no layout"
        m.fail(LaunchArguments, what, site, f"{spec.inner_bytes} bytes, span {spec.swizzle}", _FIT)
    if tensor.before and load:
        what = "a load by a tensor map that begins before its array"
        way_out = "begin the map at the array: addresses of 64 bits may wrap around"
        m.fail(OutOfBounds, what, site, f"{tensor.before:,} B before it", way_out)
    first = base - tensor.before
    box = tma.boxes(spec, first, coordinates)
    check_shared(here, shared, spec.box_bytes, _TENSOR_ALIGN)
    if tensor.before or spec.wraps_around:
        _check_box(here, box, tensor.before, tensor.bytes)
    m.memory.touched = [m.memory.find(base)]
    shift = first - m.memory.base
    return box._replace(offsets=box.offsets + shift, wide_offsets=box.wide_offsets + shift)


def check_shared(here: Execution, at: Array, size: int, align: int) -> None:
    limit = here.machine.shared_size
    bad = (at < 0) | (at + size > limit)
    for which in np.flatnonzero(bad)[:1]:
        what = "a bulk copy extends beyond shared memory"
        numbers = f"{size:,} bytes at offset {int(at[which]):,} of {limit:,} bytes"
        way_out = "check the address and the box, or pass a larger shared_bytes"
        here.machine.fail(OutOfBounds, what, here.site(which), numbers, way_out)
    check_aligned(here, at[:, None], align, "shared")


def _check_box(here: Execution, box: Boxes, before: int, size: int) -> None:
    """Checks that boxes lie in the bytes of an array that begins ``before`` bytes after the map."""
    at = box.offsets - before
    bad = (at < 0) | (at + box.unit > size)
    if box.inside is not None:
        bad &= box.inside
    if bad.any():
        which, unit = np.unravel_index(np.argmax(bad), bad.shape)
        what = "a box of a tensor map extends beyond its array"
        numbers = f"{box.unit} bytes at offset {int(at[which, unit]):,} of {size:,} bytes"
        way_out = "check the coordinates against the rows of the array"
        here.machine.fail(OutOfBounds, what, here.site(which), numbers, way_out)


def check_global(here: Execution, at: Array, size: int, write: bool) -> None:
    memory = here.machine.memory
    index = np.searchsorted(memory.starts, at, "right") - 1
    bad = (index < 0) | (at + size > memory.ends[np.maximum(index, 0)])
    for which in np.flatnonzero(bad)[:1]:
        what = f"a bulk copy {'to' if write else 'from'} outside every buffer"
        numbers = f"{size:,} bytes at {memory.describe(int(at[which]))}"
        way_out = "check the index against the array that was passed"
        here.machine.fail(OutOfBounds, what, here.site(which), numbers, way_out)
    check_aligned(here, at[:, None], tma.CHUNK_BYTES, "global")
    memory.touched = np.unique(index).tolist()


def check_reduction(here: Execution, operation: str, kind: str) -> None:
    if kind not in _TYPES.get(operation, ()):
        what = f"the emulator does not support the bulk reduction .{operation} of {kind}"
        numbers = f".{operation} takes {', '.join(_TYPES.get(operation, ())) or 'nothing'}"
        way_out = "add it to ptx_emulator/machine/bulk.py"
        here.machine.fail(errors.UnknownInstruction, what, here.site(), numbers, way_out)


def count_transfer(t: BulkTransfer, into: bool, one_read: int) -> None:
    """Counts a copy, and marks the buffers that it modifies.

    Args:
        one_read: copies of a multicast, which have one read of global memory.
    """
    m, taken = t.here.machine, t.box.bytes // one_read
    counters = m.counters
    moved = t.size * t.issued.n if into else taken
    if t.near:
        counters.shared_read_bytes += moved
        counters.shared_write_bytes += moved
        if m.recorder is not None:
            m.recorder.operand(2 * moved, t.pc)
        return
    if into:
        kind = READ
        counters.global_read_bytes += taken
        counters.global_read_sectors += t.box.sectors // one_read
        counters.shared_write_bytes += moved
    else:
        kind = WRITE if t.reduction is None else ATOMIC
        counters.shared_read_bytes += moved
        counters.global_write_bytes += taken
        counters.global_write_sectors += t.box.sectors
        counters.global_read_bytes += 0 if t.reduction is None else taken
        check_writable(m, "bulk copy", t.here.site(), f"{taken:,} bytes")
    if m.recorder is not None:
        box = t.box
        inside = None if box.inside is None else box.inside[::one_read]
        reading = t.here._replace(cohort=t.issued.some(np.arange(0, t.issued.n, one_read)))
        m.recorder.bulk(reading, box.offsets[::one_read], inside, box.unit, moved, kind)


_KINDS = {
    **{"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"},
    **{"uint32": "u32", "int32": "s32", "uint64": "u64", "int64": "s64"},
}
_KEPT = 64  # completed copies whose sources are still watched


class _Operands(NamedTuple):
    """The operands of copies by single threads (n,): addresses, and those of one kind of copy.

    ``blocks`` are the blocks in whose shared memory the copies lie. So many neighbouring ones have
    ``one_read`` of global memory: those of a multicast.
    """

    here: Execution
    shared: Array
    blocks: Array
    device: Array
    barrier: Array | None
    others: list[Array]
    one_read: int


class BulkCopies:
    """All bulk copies of a wave that are in flight; groups are counted per thread."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        self.incoming: list[BulkTransfer] = []
        self.outgoing: list[BulkTransfer] = []
        # The latest copies into shared memory that have completed.
        self.landed: deque[BulkTransfer] = deque(maxlen=_KEPT)
        # Those out of shared memory whose threads have not waited for them but by .read.
        self.stores: list[BulkTransfer] = []
        self.committed = np.zeros((len(machine.row_block), 32), np.int64)

    # ---- what instructions start

    def tensor(
        self, here: Execution, shared: Any, map_at: Any, barrier: Any, mask: Any,
        coordinates: tuple[Any, ...], operation: str | None,
    ) -> None:  # fmt: skip
        """Copies or reduces boxes of a tensor map; into shared memory if ``barrier`` is given.

        ``mask`` holds the blocks of a multicast.
        """
        m = self.machine
        for of in self._threads(here, (shared, map_at, barrier, mask, *coordinates), 1):
            some = of.here
            tensor = self._map(some.site(), int(of.device[0]), len(coordinates))
            spec = tensor.spec
            where = np.stack(of.others, axis=1).astype(np.int32).astype(np.int64)
            box = boxes_at(some, tensor, where, of.shared, load=barrier is not None)
            reduction = None
            if operation is not None:
                reduction = (operation, _KINDS.get(spec.dtype, spec.dtype))
                if tma.overlapping(spec):
                    what = "a reduction of a box with repeated elements"
                    m.fail(LaunchArguments, what, some.site(), repr(spec), _FIT)
            self._start(of, box, tma.places(spec, of.shared, box.unit), reduction)

    def _map(self, site: Site, address: int, dimensions: int) -> PlacedMap:
        """The tensor map at an address, which must have this number of dimensions."""
        m = self.machine
        tensor = m.maps.at(site, address)
        if dimensions != len(tensor.spec.dims):
            what = "a tensor copy whose number of dimensions differs from its map"
            numbers = f"{dimensions} coordinates; the map has {len(tensor.spec.dims)}"
            m.fail(LaunchArguments, what, site, numbers, _FIT)
        return tensor

    def prefetch_tensor(self, here: Execution, map_at: Any, coordinates: tuple[Any, ...]) -> None:
        """Checks the tensor map of a prefetch."""
        chosen = here.active
        for address in np.unique(here.spread(map_at)[chosen]).tolist():
            site = here.first(chosen & (here.spread(map_at) == address))
            self._map(site, address, len(coordinates))

    def prefetch(self, here: Execution, device: Any, size: Any) -> None:
        """Checks the address and the size of a prefetch without a tensor map."""
        counts, chosen = here.spread(size), here.active
        check_aligned(here, np.asarray(device), tma.CHUNK_BYTES, "global")
        if (bad := chosen & (counts % tma.CHUNK_BYTES != 0)).any():
            self._refuse_size(here.first(bad), int(counts[bad][0]))

    def _refuse_size(self, site: Site, count: int) -> NoReturn:
        what = "a bulk copy whose size is not a multiple of 16 bytes"
        self.machine.fail(LaunchArguments, what, site, f"{count} bytes", _FIT)

    def plain(
        self, here: Execution, shared: Any, device: Any, barrier: Any, mask: Any, size: Any,
        reduction: Reduction,
    ) -> None:  # fmt: skip
        """Copies or reduces ``size`` consecutive bytes without a tensor map; see `tensor`."""
        m = self.machine
        for of in self._threads(here, (shared, device, barrier, mask, size), 4):
            count = int(of.others[0][0])
            if count % tma.CHUNK_BYTES or count <= 0:
                self._refuse_size(of.here.site(), count)
            check_shared(of.here, of.shared, count, tma.CHUNK_BYTES)
            check_global(of.here, of.device, count, barrier is None)
            box = self._run_of(of.device - m.memory.base, count)
            steps = np.arange(0, count, tma.CHUNK_BYTES)
            self._start(of, box, of.shared[:, None] + steps, reduction)

    def between_blocks(
        self, here: Execution, shared: Any, source: Any, barrier: Any, size: Any
    ) -> None:
        """Copies ``size`` bytes of the shared memory of the block to that of another block."""
        m = self.machine
        for of in self._threads(here, (shared, source, barrier, None, size), 4):
            count = int(of.others[0][0])
            if count % tma.CHUNK_BYTES or count <= 0:
                self._refuse_size(of.here.site(), count)
            for at in (of.shared, of.device):
                check_shared(of.here, at, count, tma.CHUNK_BYTES)
            own = m.row_block[of.here.cohort.rows]
            box = self._run_of(of.device + own * m.shared_pitch, count)
            self._start(
                of, box, of.shared[:, None] + np.arange(0, count, tma.CHUNK_BYTES), None, True
            )

    def _run_of(self, first: Array, count: int) -> Boxes:
        """``count`` consecutive bytes from offsets ``first`` (n,) on."""
        wide = tma.lowest_bit(np.append(first, count), tma.WIDEST_BYTES)
        return Boxes(
            unit=tma.CHUNK_BYTES,
            offsets=first[:, None] + np.arange(0, count, tma.CHUNK_BYTES),
            inside=None,
            wide_unit=wide,
            wide_offsets=first[:, None] + np.arange(0, count, wide),
            bytes=count * len(first),
            sectors=int(((first + count - 1 >> 5) - (first >> 5) + 1).sum()),
        )

    def _threads(self, here: Execution, values: Any, by: int) -> Iterator[_Operands]:
        """The active threads with their operands, in groups that agree in operand ``by``.

        The operands are the addresses in shared memory, in global memory and of the mbarrier, the
        mask of a multicast, and others. A thread is repeated for each block of its multicast.
        """
        m = self.machine
        place, lane = np.nonzero(here.active)
        none = np.zeros((here.cohort.n, 32), np.int64)
        found = [(none if v is None else here.spread(v))[place, lane] for v in values]
        issued = SingleThreads(here.cohort, place, lane)
        here = here._replace(cohort=issued, lanes=None)
        blocks, copies = m.row_block[issued.rows], np.ones(len(place), np.int64)
        if len(place) and (remote(found[0]) or remote(found[2])):
            (blocks, found[0]), (others, found[2]) = (
                [part[:, 0] for part in resolved(here, found[which][:, None], 1, False)]
                for which in (0, 2)
            )
            if values[2] is not None and (others != blocks).any():
                row = int(np.argmax(others != blocks))
                what = "a bulk copy whose mbarrier lies in another block than its destination"
                ranks = f"blocks {others[row]} and {blocks[row]} of the wave"
                m.fail(LaunchArguments, what, here.site(row), ranks, _FIT)
        if values[3] is not None:
            which, blocks = self._multicast(here, found[3].astype(np.int64))
            issued, found = issued.some(which), [given[which] for given in found]
            copies = np.bincount(which)[which]
        for row in np.flatnonzero(m.live_warps[blocks] == 0)[:1]:
            fail_exited(here._replace(cohort=issued).site(row), m, int(blocks[row]))
        kinds = np.stack([found[by], copies])
        for one in np.unique(kinds, axis=1).T:
            chosen = (kinds == one[:, None]).all(axis=0)
            to, device, barrier, _, *rest = (given[chosen] for given in found)
            some = here._replace(cohort=issued.some(chosen))
            signal = None if values[2] is None else barrier
            yield _Operands(some, to, blocks[chosen], device, signal, rest, int(one[1]))

    def _multicast(self, here: Execution, mask: Array) -> tuple[Array, Array]:
        """The thread and the block of each copy of a multicast, by the masks of the threads."""
        m, size = self.machine, self.machine.cluster_size
        wrong = (mask >> size != 0) | (mask == 0)
        if wrong.any():
            what = "a multicast to blocks that the cluster does not have"
            numbers = f"mask {int(mask[wrong][0]):#x}; the cluster has {size} blocks"
            way_out = "set one bit for each rank of the cluster that takes part"
            m.fail(LaunchArguments, what, here.site(np.argmax(wrong)), numbers, way_out)
        which, rank = np.nonzero(mask[:, None] >> np.arange(size) & 1)
        return which, m.row_cluster[here.cohort.rows[which]] * size + rank

    def _start(
        self, of: _Operands, box: Boxes, to: Array, reduction: Reduction, near: bool = False
    ) -> None:
        """Starts copies between boxes and shared memory, whose units lie at ``to`` (n, k)."""
        base = of.blocks * self.machine.shared_pitch
        places = of.shared + base, to + base[:, None]
        t = BulkTransfer(of.here, box, *places, of.blocks, reduction, near)
        count_transfer(t, of.barrier is not None, of.one_read)
        if of.barrier is not None:
            self._start_in(t, of.barrier)
            return
        if reduction is not None:
            check_reduction(of.here, *reduction)
        self._start_out(t)

    def _start_in(self, t: BulkTransfer, barrier: Array) -> None:
        """Starts a copy into shared memory, in flight until the phase of its mbarrier completes."""
        m = self.machine
        check_window(t.here, barrier[:, None], 8, m.shared_size, "shared")
        t.barriers, _ = m.mbarriers.at(
            t.here, np.arange(t.issued.n), barrier, t.blocks, t.issued.lane
        )
        m.mbarriers.require_fenced(t.here.site(), t.barriers, t.blocks)
        if m.proxy is not None:
            columns = m.mbarriers.columns[t.barriers, t.blocks % m.cluster_size]
            access = SharedAccess(t.issued, t.issued.rows, *t.spans(), t.pc)
            t.writes = m.proxy.write(access, columns)
            t.phases = np.full(t.issued.n, IN_FLIGHT)
        if m.shared_races is not None:
            t.known = m.clocks.of(t.issued.rows)
        if t.near:
            self._read_near(t)
        else:
            self._global_order(t, READ)
        self.incoming.append(t)

    def _read_near(self, t: BulkTransfer) -> None:
        """Copies between blocks read their sources until their mbarriers complete."""
        m = self.machine
        if m.proxy is None or t.barriers is None:
            return
        t.columns, t.times = np.zeros((2, t.issued.n), np.int64)
        signals = np.stack([t.barriers, t.blocks % m.cluster_size])
        for signal in np.unique(signals, axis=1).T:
            chosen = np.flatnonzero((signals == signal[:, None]).all(axis=0))
            at, rank = m.mbarriers.addresses[int(signal[0])], int(signal[1])
            name = f"a bulk copy that the mbarrier at shared offset {at} of rank {rank} counts"
            column = m.proxy.agent("copy between blocks", (at, rank), name)
            where = t.box.wide_offsets[chosen]
            rows = t.issued.rows[chosen]
            access = SharedAccess(t.issued, rows, where, t.box.wide_unit, t.pc, chosen)
            t.columns[chosen], t.times[chosen] = column, m.proxy.read(access, column)

    def _start_out(self, t: BulkTransfer) -> None:
        """Starts a copy out of shared memory, which reads until its group has been waited for."""
        m, issued = self.machine, t.issued
        t.groups = self.committed[issued.rows, issued.lane]
        threads = m.row_member[issued.rows] * 32 + issued.lane
        for thread in np.unique(threads).tolist():
            chosen = threads == thread
            part = t if chosen.all() else t.part(chosen)
            if m.proxy is not None:
                part.column = m.proxy.agent("bulk", thread, f"a bulk copy of thread {thread}")
                some, where, size = part.in_shared()
                rows = part.issued.rows[some]
                access = SharedAccess(part.issued, rows, where, size, part.pc, some)
                part.time = m.proxy.read(access, part.column)
            self.outgoing.append(part)
        self._global_order(t, WRITE if t.reduction is None else ATOMIC)

    def _global_order(self, t: BulkTransfer, kind: int) -> None:
        races = self.machine.global_races
        if races is None:
            return
        some, offsets, size = t.in_global()
        races.refine(size)
        here = t.here._replace(cohort=t.issued.some(some))
        if len(some) and kind == READ:
            t.source = CopySource(self.machine.memory.touched, offsets, size, t.pc, places=some)
            races.read(here, offsets, size, bulk=True)
        elif len(some):
            races.write(here, offsets, size, strong=kind == ATOMIC, bulk=True)
            self.stores.append(t)

    # ---- groups

    def commit(self, cohort: Cohort, lanes: Any) -> None:
        """cp.async.bulk.commit_group."""
        self.committed[cohort.rows] += active(cohort, lanes)

    def wait(self, cohort: Cohort, left: int, lanes: Any, reads: bool = False) -> None:
        """cp.async.bulk.wait_group: completes all but the ``left`` newest groups of each thread.

        Args:
            reads: with .read, only what the copies read.
        """
        if not (self.outgoing or self.stores):
            return
        limit = np.full(self.committed.shape, -1, np.int64)
        limit[cohort.rows] = np.where(active(cohort, lanes), self.committed[cohort.rows] - left, -1)
        if not reads:
            self._complete_stores(limit)
        kept = []
        for t in self.outgoing:
            over = (t.groups < limit[t.issued.rows, t.issued.lane]) & ~t.waited
            if over.any():
                self.execute(t)
                t.waited |= over
                if self.machine.proxy is not None:
                    rows = np.unique(t.issued.rows[over])
                    self.machine.proxy.clocks.order_after(rows, t.column, t.time)
            if not t.waited.all():
                kept.append(t)
        self.outgoing = kept

    def _complete_stores(self, limit: Array) -> None:
        """Completes the stores of groups below ``limit`` (rows, 32)."""
        races, kept = self.machine.global_races, []
        for t in self.stores:
            over = t.groups < limit[t.issued.rows, t.issued.lane]
            if races is not None and over.any():
                done = t.part(over)
                some, offsets, size = done.in_global()
                races.complete(done.here._replace(cohort=done.issued.some(some)), offsets, size)
            if not over.all():
                kept.append(t.part(~over))
        self.stores = kept

    # ---- execution

    @property
    def flying(self) -> list[BulkTransfer]:
        return self.incoming + [t for t in self.outgoing if not t.done]

    def execute(self, t: BulkTransfer) -> None:
        """Moves the bytes of a copy."""
        if t.done:
            return
        t.done = True
        m, unit, inside = self.machine, t.box.unit, t.box.inside
        shared = m.shared.view[unit]
        device = shared if t.near else m.memory.flat.view[unit]
        to, source = t.shared_offsets >> SHIFT[unit], t.box.offsets >> SHIFT[unit]
        if t.barriers is not None:
            if inside is None:
                shared[to] = device.take(source)
            else:
                data = device.take(np.where(inside, source, 0))
                data[~inside] = 0
                shared[to] = data
            self.incoming.remove(t)
            blocks = t.blocks
            gone = m.mbarriers.expected[t.barriers, blocks] == 0
            if gone.any():
                what = "an mbarrier is invalidated while a bulk copy that signals it is in flight"
                numbers, advice = f"a copy of {t.size:,} bytes", "wait for the copy's phase first"
                m.fail(MbarrierMisuse, what, t.here.site(np.argmax(gone)), numbers, advice)
            if t.known is not None:
                m.mbarriers.late.delivered(t.barriers, blocks, t.known)
            if len(t.columns):
                slots = m.mbarriers.slots(t.barriers, blocks)
                places = m.row_cluster[t.issued.rows], slots, t.columns
                np.maximum.at(m.clocks.published, places, t.times)
            phases = m.mbarriers.deliver(t.barriers, blocks, t.size)
            if m.proxy is not None and t.writes is not None:
                t.phases = phases
                m.proxy.completed(t.writes, phases + 1)
                self.landed.append(t)
            return
        for row in range(t.issued.n):
            # Sequentially: boxes of different blocks may overlap.
            here: Any = slice(None) if inside is None else inside[row]
            data = shared.take(to[row][here])
            if t.reduction is not None:
                operation, kind = t.reduction
                if (operation, kind) == ("add", "f32"):
                    operation = FLUSHED_ADD
                dtype = np.dtype("u2" if kind in ("f16", "bf16") else DTYPE[kind])
                old = device.take(source[row][here]).view(dtype)
                data = np.asarray(combine(operation, kind, old, [data.view(dtype)]))
                data = data.astype(dtype, copy=False).view(device.dtype)
            device[source[row][here]] = data

    def finish(self) -> None:
        """Executes the copies that are in flight when the blocks of the wave have ended."""
        unfinished_copies.wave_ends(self.machine)
        for t in self.incoming + self.outgoing:
            self.execute(t)
