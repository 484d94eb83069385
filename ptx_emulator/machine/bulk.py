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
        execution: the execution; its cohort consists of single threads, ``issued``.
        box: their bytes in global memory, as offsets into `GlobalMemory.flat`; of copies between
            blocks (``near``) their sources, as offsets into `Wave.shared`.
        start: offset of each box in `Wave.shared`, (n,); ``shared_offsets``: of each unit, (n, k).
        blocks: the block of the wave in whose shared memory each box lies, (n,).
        reduction: operation and type.
        barriers: mbarriers (n,) of copies into shared memory; ``writes``: the numbers of their
            asynchronous writes; ``issue_clocks``: the clocks of the issuing warps (n, columns);
            ``phases``: those of the mbarriers that they completed in.
        source: what copies into shared memory read; None without checkers.
        columns, times: the agents and the times of the reads of copies between blocks (n,).
        groups: number of the group (n,) of copies out of shared memory; ``column``, ``time``: the
            agent and the time of their reads; ``waited``: whether their threads have waited (n,).
    """

    execution: Execution
    box: Boxes
    start: Array
    shared_offsets: Array
    blocks: Array
    reduction: Reduction
    near: bool = False
    barriers: Array | None = None
    writes: Array | None = None
    issue_clocks: Array | None = None
    phases: Array | None = None
    source: CopySource | None = None
    groups: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    column: int = 0
    time: int = 0
    columns: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    times: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    done: bool = False

    def __post_init__(self) -> None:
        assert isinstance(self.execution.cohort, SingleThreads)
        self.issued, self.pc = self.execution.cohort, self.execution.pc
        self.waited = np.zeros(self.issued.n, bool)
        self.size = self.shared_offsets.shape[1] * self.box.unit  # of each copy, in shared memory

    def part(self, which: Array) -> BulkTransfer:
        """The copies of the threads ``which``; for copies out of shared memory."""
        box, execution = self.box, self.execution._replace(cohort=self.issued.select(which))
        inside = None if box.inside is None else box.inside[which]
        offsets, wide = box.offsets[which], box.wide_offsets[which]
        names = ("start", "shared_offsets", "blocks", "groups")
        cut: dict[str, Any] = {name: getattr(self, name)[which] for name in names}
        box = box._replace(offsets=offsets, inside=inside, wide_offsets=wide)
        return replace(self, execution=execution, box=box, **cut)

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
    execution: Execution, tensor: PlacedMap, coordinates: Array, shared: Array, *, load: bool
) -> Boxes:
    """The boxes of a tensor, checked, as offsets into `GlobalMemory.flat`."""
    machine, site, spec, base = execution.machine, execution.site(), tensor.spec, tensor.base
    if spec.swizzle and spec.inner_bytes < spec.swizzle:
        what = "a box narrower than the span of its swizzle, for which PTX documents no layout"
        machine.fail(
            LaunchArguments, what, site, f"{spec.inner_bytes} bytes, span {spec.swizzle}", _FIT
        )
    if tensor.before and load:
        what = "a load by a tensor map that begins before its array"
        way_out = "begin the map at the array: addresses of 64 bits may wrap around"
        machine.fail(OutOfBounds, what, site, f"{tensor.before:,} B before it", way_out)
    first = base - tensor.before
    box = tma.boxes(spec, first, coordinates)
    check_shared(execution, shared, spec.box_bytes, _TENSOR_ALIGN)
    if tensor.before or spec.wraps_around:
        _check_box(execution, box, tensor.before, tensor.bytes)
    machine.memory.touched = [machine.memory.find(base)]
    shift = first - machine.memory.base
    if tensor.fill_nan:
        nans = np.full(tma.CHUNK_BYTES // spec.element_bytes, tma.NAN_BITS[spec.dtype])
        box = box._replace(outside=nans.view(np.uint8))
    return box._replace(offsets=box.offsets + shift, wide_offsets=box.wide_offsets + shift)


def check_shared(execution: Execution, offsets: Array, size: int, align: int) -> None:
    limit = execution.machine.shared_size
    bad = (offsets < 0) | (offsets + size > limit)
    for index in np.flatnonzero(bad)[:1]:
        what = "a bulk copy extends beyond shared memory"
        numbers = f"{size:,} bytes at offset {int(offsets[index]):,} of {limit:,} bytes"
        way_out = "check the address and the box, or pass a larger shared_bytes"
        execution.machine.fail(OutOfBounds, what, execution.site(index), numbers, way_out)
    check_aligned(execution, offsets[:, None], align, "shared")


def _check_box(execution: Execution, box: Boxes, before: int, size: int) -> None:
    """Checks that boxes lie in the bytes of an array that begins ``before`` bytes after the map."""
    offsets = box.offsets - before
    bad = (offsets < 0) | (offsets + box.unit > size)
    if box.inside is not None:
        bad &= box.inside
    if bad.any():
        index, unit = np.unravel_index(np.argmax(bad), bad.shape)
        what = "a box of a tensor map extends beyond its array"
        numbers = f"{box.unit} bytes at offset {int(offsets[index, unit]):,} of {size:,} bytes"
        way_out = "check the coordinates against the rows of the array"
        execution.machine.fail(OutOfBounds, what, execution.site(index), numbers, way_out)


def check_global(execution: Execution, addresses: Array, size: int, write: bool) -> None:
    memory = execution.machine.memory
    allocation_index = np.searchsorted(memory.starts, addresses, "right") - 1
    bad = (allocation_index < 0) | (addresses + size > memory.ends[np.maximum(allocation_index, 0)])
    for index in np.flatnonzero(bad)[:1]:
        what = f"a bulk copy {'to' if write else 'from'} outside every buffer"
        numbers = f"{size:,} bytes at {memory.describe(int(addresses[index]))}"
        way_out = "check the index against the array that was passed"
        execution.machine.fail(OutOfBounds, what, execution.site(index), numbers, way_out)
    check_aligned(execution, addresses[:, None], tma.CHUNK_BYTES, "global")
    memory.touched = np.unique(allocation_index).tolist()


def check_reduction(execution: Execution, operation: str, kind: str) -> None:
    if kind not in _TYPES.get(operation, ()):
        what = f"the emulator does not support the bulk reduction .{operation} of {kind}"
        numbers = f".{operation} takes {', '.join(_TYPES.get(operation, ())) or 'nothing'}"
        way_out = "add it to ptx_emulator/machine/bulk.py"
        execution.machine.fail(errors.UnknownInstruction, what, execution.site(), numbers, way_out)


def count_transfer(transfer: BulkTransfer, into: bool, one_read: int) -> None:
    """Counts a copy, and marks the buffers that it modifies.

    Args:
        one_read: copies of a multicast, which have one read of global memory.
    """
    machine, global_bytes = transfer.execution.machine, transfer.box.bytes // one_read
    counters = machine.counters
    shared_bytes = transfer.size * transfer.issued.n if into else global_bytes
    if transfer.near:
        counters.shared_read_bytes += shared_bytes
        counters.shared_write_bytes += shared_bytes
        if machine.recorder is not None:
            machine.recorder.operand(2 * shared_bytes, transfer.pc)
        return
    if into:
        kind = READ
        counters.global_read_bytes += global_bytes
        counters.global_read_sectors += transfer.box.sectors // one_read
        counters.shared_write_bytes += shared_bytes
    else:
        kind = WRITE if transfer.reduction is None else ATOMIC
        counters.shared_read_bytes += shared_bytes
        counters.global_write_bytes += global_bytes
        counters.global_write_sectors += transfer.box.sectors
        counters.global_read_bytes += 0 if transfer.reduction is None else global_bytes
        check_writable(machine, "bulk copy", transfer.execution.site(), f"{global_bytes:,} bytes")
    if machine.recorder is not None:
        box = transfer.box
        inside = None if box.inside is None else box.inside[::one_read]
        readers = transfer.issued.select(np.arange(0, transfer.issued.n, one_read))
        reading = transfer.execution._replace(cohort=readers)
        machine.recorder.bulk(
            reading, box.offsets[::one_read], inside, box.unit, shared_bytes, kind
        )


_KINDS = {
    **{"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"},
    **{"uint32": "u32", "int32": "s32", "uint64": "u64", "int64": "s64"},
}
_KEPT = 64  # completed copies whose sources are still watched


class _Operands(NamedTuple):
    """The operands of copies by single threads (n,): addresses, and ``others`` of one kind of copy.

    ``blocks`` are the blocks in whose shared memory the copies lie. ``one_read`` is the number of
    neighbouring copies with one read of global memory: the copies of a multicast.
    """

    execution: Execution
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
        self, execution: Execution, shared: Any, map_address: Any, barrier: Any, mask: Any,
        coordinates: tuple[Any, ...], operation: str | None,
    ) -> None:  # fmt: skip
        """Copies or reduces boxes of a tensor map; into shared memory if ``barrier`` is given.

        ``mask`` holds the blocks of a multicast.
        """
        machine = self.machine
        values = (shared, map_address, barrier, mask, *coordinates)
        for operands in self._threads(execution, values, 1):
            some = operands.execution
            tensor = self._map(some.site(), int(operands.device[0]), len(coordinates))
            spec = tensor.spec
            box_coordinates = np.stack(operands.others, axis=1).astype(np.int32).astype(np.int64)
            box = boxes_at(some, tensor, box_coordinates, operands.shared, load=barrier is not None)
            reduction = None
            if operation is not None:
                reduction = (operation, _KINDS.get(spec.dtype, spec.dtype))
                if tma.overlapping(spec):
                    what = "a reduction of a box with repeated elements"
                    machine.fail(LaunchArguments, what, some.site(), repr(spec), _FIT)
            to = tma.shared_offsets(spec, operands.shared, box.unit)
            self._start(operands, box, to, reduction)

    def _map(self, site: Site, address: int, dimensions: int) -> PlacedMap:
        """The tensor map at an address, which must have this number of dimensions."""
        machine = self.machine
        tensor = machine.maps.map_at(site, address)
        if dimensions != len(tensor.spec.dims):
            what = "a tensor copy whose number of dimensions differs from its map"
            numbers = f"{dimensions} coordinates; the map has {len(tensor.spec.dims)}"
            machine.fail(LaunchArguments, what, site, numbers, _FIT)
        return tensor

    def prefetch_tensor(
        self, execution: Execution, map_address: Any, coordinates: tuple[Any, ...]
    ) -> None:
        """Checks the tensor map of a prefetch."""
        chosen = execution.active
        for address in np.unique(execution.spread(map_address)[chosen]).tolist():
            site = execution.first(chosen & (execution.spread(map_address) == address))
            self._map(site, address, len(coordinates))

    def prefetch(self, execution: Execution, device: Any, size: Any) -> None:
        """Checks the address and the size of a prefetch without a tensor map."""
        counts, chosen = execution.spread(size), execution.active
        check_aligned(execution, np.asarray(device), tma.CHUNK_BYTES, "global")
        if (bad := chosen & (counts % tma.CHUNK_BYTES != 0)).any():
            self._refuse_size(execution.first(bad), int(counts[bad][0]))

    def _refuse_size(self, site: Site, count: int) -> NoReturn:
        what = "a bulk copy whose size is not a multiple of 16 bytes"
        self.machine.fail(LaunchArguments, what, site, f"{count} bytes", _FIT)

    def plain(
        self, execution: Execution, shared: Any, device: Any, barrier: Any, mask: Any, size: Any,
        reduction: Reduction,
    ) -> None:  # fmt: skip
        """Copies or reduces ``size`` consecutive bytes without a tensor map; see `tensor`."""
        machine = self.machine
        for operands in self._threads(execution, (shared, device, barrier, mask, size), 4):
            count = int(operands.others[0][0])
            if count % tma.CHUNK_BYTES or count <= 0:
                self._refuse_size(operands.execution.site(), count)
            check_shared(operands.execution, operands.shared, count, tma.CHUNK_BYTES)
            check_global(operands.execution, operands.device, count, barrier is None)
            box = self._run_of(operands.device - machine.memory.base, count)
            steps = np.arange(0, count, tma.CHUNK_BYTES)
            self._start(operands, box, operands.shared[:, None] + steps, reduction)

    def between_blocks(
        self, execution: Execution, shared: Any, source: Any, barrier: Any, size: Any
    ) -> None:
        """Copies ``size`` bytes of the shared memory of the block to that of another block."""
        machine = self.machine
        for operands in self._threads(execution, (shared, source, barrier, None, size), 4):
            count = int(operands.others[0][0])
            if count % tma.CHUNK_BYTES or count <= 0:
                self._refuse_size(operands.execution.site(), count)
            for offsets in (operands.shared, operands.device):
                check_shared(operands.execution, offsets, count, tma.CHUNK_BYTES)
            own_blocks = machine.row_block[operands.execution.cohort.rows]
            box = self._run_of(operands.device + own_blocks * machine.shared_pitch, count)
            steps = np.arange(0, count, tma.CHUNK_BYTES)
            self._start(operands, box, operands.shared[:, None] + steps, None, True)

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

    def _threads(self, execution: Execution, values: Any, by: int) -> Iterator[_Operands]:
        """The active threads with their operands, in groups that agree in operand ``by``.

        The operands are the addresses in shared memory, in global memory and of the mbarrier, the
        mask of a multicast, and others. A thread is repeated for each block of its multicast.
        """
        machine = self.machine
        cohort_row, lane = np.nonzero(execution.active)
        none = np.zeros((execution.cohort.n, 32), np.int64)
        operands = [(none if v is None else execution.spread(v))[cohort_row, lane] for v in values]
        issued = SingleThreads(execution.cohort, cohort_row, lane)
        execution = execution._replace(cohort=issued, lanes=None)
        blocks, copies = machine.row_block[issued.rows], np.ones(len(cohort_row), np.int64)
        if len(cohort_row) and (remote(operands[0]) or remote(operands[2])):
            (blocks, operands[0]), (others, operands[2]) = (
                [part[:, 0] for part in resolved(execution, operands[which][:, None], 1, False)]
                for which in (0, 2)
            )
            if values[2] is not None and (others != blocks).any():
                row = int(np.argmax(others != blocks))
                what = "a bulk copy whose mbarrier lies in another block than its destination"
                ranks = f"blocks {others[row]} and {blocks[row]} of the wave"
                machine.fail(LaunchArguments, what, execution.site(row), ranks, _FIT)
        if values[3] is not None:
            which, blocks = self._multicast(execution, operands[3].astype(np.int64))
            issued, operands = issued.select(which), [value[which] for value in operands]
            copies = np.bincount(which)[which]
        for row in np.flatnonzero(machine.live_warps[blocks] == 0)[:1]:
            fail_exited(execution._replace(cohort=issued).site(row), machine, int(blocks[row]))
        kinds = np.stack([operands[by], copies])
        for kind in np.unique(kinds, axis=1).T:
            chosen = (kinds == kind[:, None]).all(axis=0)
            to, device, barrier, _, *rest = (value[chosen] for value in operands)
            some = execution._replace(cohort=issued.select(chosen))
            signal = None if values[2] is None else barrier
            yield _Operands(some, to, blocks[chosen], device, signal, rest, int(kind[1]))

    def _multicast(self, execution: Execution, mask: Array) -> tuple[Array, Array]:
        """The thread and the block of each copy of a multicast, by the masks of the threads."""
        machine, size = self.machine, self.machine.cluster_size
        wrong = (mask >> size != 0) | (mask == 0)
        if wrong.any():
            what = "a multicast to blocks that the cluster does not have"
            numbers = f"mask {int(mask[wrong][0]):#x}; the cluster has {size} blocks"
            way_out = "set one bit for each rank of the cluster that takes part"
            machine.fail(LaunchArguments, what, execution.site(np.argmax(wrong)), numbers, way_out)
        which, rank = np.nonzero(mask[:, None] >> np.arange(size) & 1)
        return which, machine.row_cluster[execution.cohort.rows[which]] * size + rank

    def _start(
        self, operands: _Operands, box: Boxes, to: Array, reduction: Reduction, near: bool = False
    ) -> None:
        """Starts copies between boxes and shared memory, whose units lie at ``to`` (n, k)."""
        base = operands.blocks * self.machine.shared_pitch
        offsets = operands.shared + base, to + base[:, None]
        transfer = BulkTransfer(operands.execution, box, *offsets, operands.blocks, reduction, near)
        count_transfer(transfer, operands.barrier is not None, operands.one_read)
        if operands.barrier is not None:
            self._start_in(transfer, operands.barrier)
            return
        if reduction is not None:
            check_reduction(operands.execution, *reduction)
        self._start_out(transfer)

    def _start_in(self, transfer: BulkTransfer, barrier: Array) -> None:
        """Starts a copy into shared memory, in flight until the phase of its mbarrier completes."""
        machine = self.machine
        check_window(transfer.execution, barrier[:, None], 8, machine.shared_size, "shared")
        execution, issued, blocks = transfer.execution, transfer.issued, transfer.blocks
        transfer.barriers, _ = machine.mbarriers.look_up(
            execution, np.arange(issued.n), barrier, blocks, issued.lane
        )
        machine.mbarriers.require_fenced(execution.site(), transfer.barriers, blocks)
        if machine.proxy is not None:
            columns = machine.mbarriers.columns[transfer.barriers, blocks % machine.cluster_size]
            access = SharedAccess(issued, issued.rows, *transfer.spans(), transfer.pc)
            transfer.writes = machine.proxy.write(access, columns)
            transfer.phases = np.full(transfer.issued.n, IN_FLIGHT)
        if machine.shared_races is not None:
            transfer.issue_clocks = machine.clocks.copy_of(transfer.issued.rows)
        if transfer.near:
            self._read_near(transfer)
        else:
            self._global_order(transfer, READ)
        self.incoming.append(transfer)

    def _read_near(self, transfer: BulkTransfer) -> None:
        """Records the reads of copies between blocks, which last until their mbarriers complete."""
        machine = self.machine
        if machine.proxy is None or transfer.barriers is None:
            return
        transfer.columns, transfer.times = np.zeros((2, transfer.issued.n), np.int64)
        signals = np.stack([transfer.barriers, transfer.blocks % machine.cluster_size])
        for signal in np.unique(signals, axis=1).T:
            chosen = np.flatnonzero((signals == signal[:, None]).all(axis=0))
            offset, rank = machine.mbarriers.addresses[int(signal[0])], int(signal[1])
            name = f"a bulk copy that the mbarrier at shared offset {offset} of rank {rank} counts"
            column = machine.proxy.agent("copy between blocks", (offset, rank), name)
            offsets = transfer.box.wide_offsets[chosen]
            rows = transfer.issued.rows[chosen]
            access = SharedAccess(
                transfer.issued, rows, offsets, transfer.box.wide_unit, transfer.pc, chosen
            )
            transfer.columns[chosen] = column
            transfer.times[chosen] = machine.proxy.read(access, column)

    def _start_out(self, transfer: BulkTransfer) -> None:
        """Starts a copy out of shared memory, which reads until its group has been waited for."""
        machine, issued = self.machine, transfer.issued
        transfer.groups = self.committed[issued.rows, issued.lane]
        threads = machine.row_member[issued.rows] * 32 + issued.lane
        for thread in np.unique(threads).tolist():
            chosen = threads == thread
            part = transfer if chosen.all() else transfer.part(chosen)
            if machine.proxy is not None:
                part.column = machine.proxy.agent("bulk", thread, f"a bulk copy of thread {thread}")
                some, offsets, size = part.in_shared()
                rows = part.issued.rows[some]
                access = SharedAccess(part.issued, rows, offsets, size, part.pc, some)
                part.time = machine.proxy.read(access, part.column)
            self.outgoing.append(part)
        self._global_order(transfer, WRITE if transfer.reduction is None else ATOMIC)

    def _global_order(self, transfer: BulkTransfer, kind: int) -> None:
        races = self.machine.global_races
        if races is None:
            return
        some, offsets, size = transfer.in_global()
        races.refine(size)
        execution = transfer.execution._replace(cohort=transfer.issued.select(some))
        if len(some) and kind == READ:
            transfer.source = CopySource(
                self.machine.memory.touched, offsets, size, transfer.pc, copy_rows=some
            )
            races.read(execution, offsets, size, bulk=True)
        elif len(some):
            races.write(execution, offsets, size, strong=kind == ATOMIC, bulk=True)
            self.stores.append(transfer)

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
        unwaited = []
        for transfer in self.outgoing:
            issued = transfer.issued
            over = (transfer.groups < limit[issued.rows, issued.lane]) & ~transfer.waited
            if over.any():
                self.execute(transfer)
                transfer.waited |= over
                if self.machine.proxy is not None:
                    rows = np.unique(transfer.issued.rows[over])
                    self.machine.proxy.clocks.order_after(rows, transfer.column, transfer.time)
            if not transfer.waited.all():
                unwaited.append(transfer)
        self.outgoing = unwaited

    def _complete_stores(self, limit: Array) -> None:
        """Completes the stores of groups below ``limit`` (rows, 32)."""
        races, unfinished = self.machine.global_races, []
        for transfer in self.stores:
            over = transfer.groups < limit[transfer.issued.rows, transfer.issued.lane]
            if races is not None and over.any():
                done = transfer.part(over)
                some, offsets, size = done.in_global()
                execution = done.execution._replace(cohort=done.issued.select(some))
                races.complete(execution, offsets, size)
            if not over.all():
                unfinished.append(transfer.part(~over))
        self.stores = unfinished

    # ---- execution

    @property
    def flying(self) -> list[BulkTransfer]:
        return self.incoming + [transfer for transfer in self.outgoing if not transfer.done]

    def execute(self, transfer: BulkTransfer) -> None:
        """Moves the bytes of a copy."""
        if transfer.done:
            return
        transfer.done = True
        machine, unit, inside = self.machine, transfer.box.unit, transfer.box.inside
        shared = machine.shared.view[unit]
        device = shared if transfer.near else machine.memory.flat.view[unit]
        to, source = transfer.shared_offsets >> SHIFT[unit], transfer.box.offsets >> SHIFT[unit]
        if transfer.barriers is not None:
            if inside is None:
                shared[to] = device.take(source)
            else:
                data = device.take(np.where(inside, source, 0))
                data[~inside] = transfer.box.outside[:unit].view(data.dtype)
                shared[to] = data
            self.incoming.remove(transfer)
            blocks = transfer.blocks
            gone = machine.mbarriers.expected[transfer.barriers, blocks] == 0
            if gone.any():
                what = "an mbarrier is invalidated while a bulk copy that signals it is in flight"
                site = transfer.execution.site(np.argmax(gone))
                numbers = f"a copy of {transfer.size:,} bytes"
                machine.fail(MbarrierMisuse, what, site, numbers, "wait for the copy's phase first")
            if transfer.issue_clocks is not None:
                machine.mbarriers.late.delivered(transfer.barriers, blocks, transfer.issue_clocks)
            if len(transfer.columns):
                slots = machine.mbarriers.slots(transfer.barriers, blocks)
                index = machine.row_cluster[transfer.issued.rows], slots, transfer.columns
                np.maximum.at(machine.clocks.published, index, transfer.times)
            phases = machine.mbarriers.deliver(transfer.barriers, blocks, transfer.size)
            if machine.proxy is not None and transfer.writes is not None:
                transfer.phases = phases
                machine.proxy.completed(transfer.writes, phases + 1)
                self.landed.append(transfer)
            return
        for row in range(transfer.issued.n):
            # Sequentially: boxes of different blocks may overlap.
            inside_units: Any = slice(None) if inside is None else inside[row]
            data = shared.take(to[row][inside_units])
            if transfer.reduction is not None:
                operation, kind = transfer.reduction
                if (operation, kind) == ("add", "f32"):
                    operation = FLUSHED_ADD
                dtype = np.dtype("u2" if kind in ("f16", "bf16") else DTYPE[kind])
                old = device.take(source[row][inside_units]).view(dtype)
                data = np.asarray(combine(operation, kind, old, [data.view(dtype)]))
                data = data.astype(dtype, copy=False).view(device.dtype)
            device[source[row][inside_units]] = data

    def finish(self) -> None:
        """Executes the copies that are in flight when the blocks of the wave have ended."""
        unfinished_copies.wave_ends(self.machine)
        for transfer in self.incoming + self.outgoing:
            self.execute(transfer)
