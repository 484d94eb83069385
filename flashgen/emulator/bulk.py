"""Bulk copies and reductions between global and shared memory: with tensor maps and without.

A copy is executed when somebody must see it done: one into shared memory when no warp can run any
more, one out of it when its thread waits for its group. Until then it is in flight and shared
memory keeps what it had, so that a wait that is missing changes results. With an order_seed copies
are executed at random times.

Order in global memory is checked as if the warp that starts a copy made it there and then; that a
proxy fence is missing there goes unnoticed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from flashgen.emulator import transfers
from flashgen.emulator.access import check_window, spread
from flashgen.emulator.atomics import combine
from flashgen.emulator.cohort import Cohort, Issued
from flashgen.emulator.dtypes import DTYPE
from flashgen.emulator.errors import MbarrierMisuse, RaceError
from flashgen.emulator.memory import SHIFT
from flashgen.emulator.recorder import ATOMIC, READ, WRITE
from flashgen.emulator.tma import CHUNK, WIDEST, TensorMap, boxes, lowest_bit, overlapping, places
from flashgen.emulator.transfers import Transfer

if TYPE_CHECKING:
    from flashgen.emulator.machine import Machine

Array = npt.NDArray[Any]
_TENSOR_ALIGN = 128
_KINDS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
_INTEGERS = {"uint32": "u32", "int32": "s32", "uint64": "u64", "int64": "s64"}


class Bulk:
    """All bulk copies of a wave that are in flight; groups are counted per thread."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.incoming: list[Transfer] = []
        self.outgoing: list[Transfer] = []
        self.committed = np.zeros((len(machine.row_block), 32), np.int64)

    # ---- what instructions start

    def tensor(
        self,
        C: Cohort,
        lanes: Any,
        pc: int,
        shared: Any,
        map_at: Any,
        coordinates: tuple[Any, ...],
        barrier: Any,
        operation: str | None,
    ) -> None:
        """Copies or reduces a box; into shared memory when there is a ``barrier``."""
        m = self.machine
        for issued, at in self._threads(C, lanes, (shared, map_at, barrier, *coordinates)):
            where = np.stack(at[3:], axis=1).astype(np.int32).astype(np.int64)
            for address in np.unique(at[1]).tolist():
                chosen = at[1] == address
                some = issued.some(chosen)
                tensor, base = transfers.map_at(m, some, address, pc)
                if len(coordinates) != len(tensor.spec.dims):
                    transfers.refuse(
                        m,
                        some,
                        pc,
                        "a tensor copy with another number of dimensions than its map",
                        f"{len(coordinates)} coordinates; the map has {len(tensor.spec.dims)}",
                    )
                self._box(
                    some,
                    pc,
                    tensor,
                    base,
                    where[chosen],
                    at[0][chosen],
                    None if barrier is None else at[2][chosen],
                    operation,
                )

    def _box(
        self,
        issued: Issued,
        pc: int,
        tensor: TensorMap,
        base: int,
        coordinates: Array,
        shared: Array,
        barrier: Array | None,
        operation: str | None,
    ) -> None:
        m, spec = self.machine, tensor.spec
        if spec.swizzle and spec.inner_bytes < spec.swizzle:
            transfers.refuse(
                m,
                issued,
                pc,
                "a box that is narrower than the span of its swizzle: its layout is not documented",
                f"{spec.inner_bytes} bytes, span {spec.swizzle}",
            )
        first = base - spec.before
        box = boxes(spec, first, coordinates)
        transfers.check_shared(m, issued, shared, spec.box_bytes, _TENSOR_ALIGN, pc)
        if spec.before:
            transfers.check_box(m, issued, box, spec.before, tensor.bytes, pc)
        block = m.shared_base_of_row[issued.rows]
        to = places(spec, shared, box.unit) + block
        whole = box.offsets + (first - m.memory.base)
        transfer = Transfer(issued, pc, box.unit, shared + block[:, 0], to, whole, box.inside)
        if box.runs is not None:
            transfer.run, transfer.runs = box.run, box.runs + (first - m.memory.base)
        m.memory.touched = [m.memory.find(base)]
        transfers.count(
            m, transfer, box.bytes, box.sectors, barrier is not None, operation is not None
        )
        if barrier is not None:
            self._start_in(transfer, barrier)
            return
        if operation is not None:
            kind = {**_KINDS, **_INTEGERS}.get(spec.dtype, spec.dtype)
            if overlapping(spec):
                transfers.refuse(
                    m, issued, pc, "a reduction of a box with repeated elements", repr(spec)
                )
            transfer.operation = (operation, transfers.reducible(m, issued, pc, operation, kind))
        self._start_out(transfer)

    def plain(
        self,
        C: Cohort,
        lanes: Any,
        pc: int,
        shared: Any,
        whole: Any,
        size: Any,
        barrier: Any,
        operation: tuple[str, str] | None,
    ) -> None:
        """Copies or reduces ``size`` consecutive bytes."""
        m = self.machine
        for issued, at in self._threads(C, lanes, (shared, whole, barrier, size)):
            for count in np.unique(at[3]).tolist():
                chosen = at[3] == count
                some = issued.some(chosen)
                if count % CHUNK or count <= 0:
                    transfers.refuse(
                        m, some, pc, "a bulk copy of no multiple of 16 bytes", f"{count} bytes"
                    )
                transfers.check_shared(m, some, at[0][chosen], count, CHUNK, pc)
                transfers.check_global(m, some, at[1][chosen], count, pc, barrier is None)
                steps = np.arange(count // CHUNK) * CHUNK
                start = at[0][chosen] + m.shared_base_of_row[some.rows, 0]
                first = at[1][chosen] - m.memory.base
                source = first[:, None] + steps
                transfer = Transfer(some, pc, CHUNK, start, start[:, None] + steps, source, None)
                transfer.run = lowest_bit(np.append(first, count), WIDEST)
                transfer.runs = first[:, None] + np.arange(count // transfer.run) * transfer.run
                sectors = int(((source[:, -1] + 15 >> 5) - (source[:, 0] >> 5) + 1).sum())
                into = barrier is not None
                transfers.count(m, transfer, count * some.n, sectors, into, operation is not None)
                if barrier is not None:
                    self._start_in(transfer, at[2][chosen])
                    continue
                if operation is not None:
                    transfer.operation = (
                        operation[0],
                        transfers.reducible(m, some, pc, operation[0], operation[1]),
                    )
                self._start_out(transfer)

    def _threads(self, C: Cohort, lanes: Any, values: Any) -> list[tuple[Issued, list[Array]]]:
        """The active threads of a cohort with their operands (n,); nothing when there are none."""
        active = np.ones((C.n, 32), bool) if C.mask is None else C.mask
        if lanes is not None:
            active = spread(lanes, C.n)
        place, lane = np.nonzero(active)
        if not len(place):
            return []
        found = [
            np.zeros(len(place), np.int64) if v is None else spread(v, C.n)[place, lane]
            for v in values
        ]
        return [(Issued(C, place, lane), found)]

    def _start_in(self, t: Transfer, barrier: Array) -> None:
        """A copy into shared memory starts: it is in flight until its mbarrier says otherwise."""
        m = self.machine
        check_window(m, t.issued, barrier[:, None], None, 8, t.pc, m.shared_size, "shared")
        t.barriers, _ = m.mbarriers.at(t.issued, np.arange(t.issued.n), barrier, t.pc)
        if m.proxy is not None:
            columns = np.array(m.mbarriers.columns)[t.barriers]
            where, size = t.spans()
            t.writes = m.proxy.write(t.issued, t.issued.rows, columns, where, t.pc, size)
        self._global_order(t, READ)
        self.incoming.append(t)

    def _start_out(self, t: Transfer) -> None:
        """A copy out of shared memory starts: it reads until its group has been waited for."""
        m, issued = self.machine, t.issued
        t.groups = self.committed[issued.rows, issued.lane]
        threads = m.row_warp[issued.rows] * 32 + issued.lane
        for thread in np.unique(threads).tolist():
            chosen = threads == thread
            part = t if chosen.all() else t.part(chosen)
            if m.proxy is not None:
                name = f"a bulk copy of thread {thread}"
                part.column = m.proxy.agent("bulk", thread, name)
                some, where, size = part.in_shared()
                rows = part.issued.rows[some]
                part.time = m.proxy.read(part.issued, rows, part.column, where, part.pc, size, some)
            self.outgoing.append(part)
        self._global_order(t, WRITE if t.operation is None else ATOMIC)

    def _global_order(self, t: Transfer, kind: int) -> None:
        races = self.machine.global_races
        if races is None or t.unit < CHUNK:
            return  # a chunk of the shadow may hold bytes of two boxes
        some, whole, size = t.in_global()
        if len(some):
            access = (races.read, races.write, races.atomic)[kind]
            access(t.issued.some(some), whole, size, t.pc, None)

    # ---- groups

    def commit(self, C: Cohort, lanes: Any) -> None:
        """cp.async.bulk.commit_group."""
        active = True if lanes is None else spread(lanes, C.n)
        self.committed[C.rows] += active if C.mask is None else active & C.mask

    def wait(self, C: Cohort, left: int, lanes: Any) -> None:
        """cp.async.bulk.wait_group: all but the ``left`` newest groups of each thread are done."""
        if not self.outgoing:
            return
        active = spread(True if lanes is None else lanes, C.n)
        if C.mask is not None:
            active = active & C.mask
        limit = np.full(self.committed.shape, -1, np.int64)
        limit[C.rows] = np.where(active, self.committed[C.rows] - left, -1)
        kept = []
        for t in self.outgoing:
            over = (t.groups < limit[t.issued.rows, t.issued.lane]) & ~t.waited
            if over.any():
                self.execute(t)
                t.waited |= over
                if self.machine.proxy is not None:
                    self.machine.proxy.finished(np.unique(t.issued.rows[over]), t.column, t.time)
            if not t.waited.all():
                kept.append(t)
        self.outgoing = kept

    # ---- execution

    def deliver(self) -> bool:
        """Nobody can run: copies arrive, all or (with a seed) one; False when there are none."""
        if not self.incoming:
            return False
        if self.machine.random is not None:
            self.execute(self.machine.random.choice(self.incoming))
        else:
            for t in list(self.incoming):
                self.execute(t)
        return True

    def at_random(self) -> None:
        """With a seed, now and then a copy is executed while warps still run."""
        random = self.machine.random
        flying = self.incoming + [t for t in self.outgoing if not t.done]
        if random is not None and flying and random.random() < 0.1:
            self.execute(random.choice(flying))

    def execute(self, t: Transfer) -> None:
        """Moves the bytes."""
        if t.done:
            return
        t.done = True
        m = self.machine
        shared, whole = m.shared.view[t.unit], m.memory.flat.view[t.unit]
        to, source = t.shared >> SHIFT[t.unit], t.whole >> SHIFT[t.unit]
        if len(t.barriers):
            if t.inside is None:
                shared[to] = whole.take(source)
            else:
                data = whole.take(np.where(t.inside, source, 0))
                data[~t.inside] = 0
                shared[to] = data
            self.incoming.remove(t)
            blocks = m.row_block[t.issued.rows]
            gone = m.mbarriers.expected[t.barriers, blocks] == 0
            if gone.any():
                m.fail(
                    MbarrierMisuse,
                    "an mbarrier is invalidated while a bulk copy is under way to it",
                    t.issued,
                    t.pc,
                    row=int(np.argmax(gone)),
                    numbers=f"a copy of {t.size:,} bytes",
                    way_out="wait for the phase of the copy first",
                )
            phases = m.mbarriers.deliver(t.barriers, blocks, np.full(len(blocks), t.size))
            if m.proxy is not None and t.writes is not None:
                m.proxy.landed(t.writes, phases + 1)
            return
        for row in range(t.issued.n):
            # One after the other: boxes of different blocks may overlap.
            here: Any = slice(None) if t.inside is None else t.inside[row]
            data = shared.take(to[row][here])
            if t.operation is not None:
                operation, kind = t.operation
                dtype = np.dtype("u2" if kind in ("f16", "bf16") else DTYPE[kind])
                old = whole.take(source[row][here]).view(dtype)
                data = np.asarray(combine(operation, kind, old, [data.view(dtype)]))
                data = data.astype(dtype, copy=False).view(whole.dtype)
            whole[source[row][here]] = data

    def finish(self) -> None:
        """The blocks of the wave have ended; nothing of theirs may still be under way.

        Raises:
            RaceError: a copy still reads or writes the shared memory of a block that has ended.
        """
        if self.machine.check:
            for t in self.incoming:
                self._unfinished(t, 0, "into", "wait for its mbarrier before the block ends")
            for t in self.outgoing:
                row = int(np.argmin(t.waited))
                self._unfinished(t, row, "out of", "execute cp.async.bulk.wait_group.read first")
        for t in self.incoming + self.outgoing:
            self.execute(t)

    def _unfinished(self, t: Transfer, row: int, way: str, way_out: str) -> NoReturn:
        self.machine.fail(
            RaceError,
            "a block ends while one of its bulk copies may be under way",
            t.issued,
            t.pc,
            row=row,
            numbers=f"a copy of {t.size:,} bytes {way} shared memory that nobody has waited for",
            way_out=way_out,
        )
