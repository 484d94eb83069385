"""Vector clocks of the warps of each block: which accesses are ordered by barriers.

Every warp has a clock that advances when it arrives at a barrier. ``seen[b, w, v]`` is the newest
clock of warp v that warp w of block b is ordered after. An access of warp v stamped with clock t
happened before the current access of warp w if and only if t <= seen[b, w, v]. This does not depend
on the order in which the emulator executes the warps (Fidge 1988, Mattern 1989; stamps as in
FastTrack, Flanagan and Freund, 2009).

Kernels with asynchronous copies have more columns. ``seen[b, w, warps + v]`` is the newest clock of
warp v whose writes are visible to asynchronous accesses issued by warp w (fence.proxy.async). They
are followed by one column per asynchronous agent, such as an mbarrier, with the newest time of the
agent that w is ordered after. Synchronisation between warps propagates all columns.

A fence.sc (membar, __threadfence) holds for all threads that are ordered after it, not only for its
own: were a later fence.sc of a reader before it in the order of these fences, then the write of the
flag would come after its own reader. Each scope of such fences has ``warps`` further columns, the
newest clocks before one of them that w is ordered after. So has fence.mbarrier_init, if a barrier
may order initialisations of mbarriers and nothing else (barrier.cluster.arrive.relaxed), and
fence.proxy.async for global memory: most such fences are restricted to shared memory.

The lanes of a warp share its clock; ``synced`` holds the clock from which on accesses of different
lanes are not ordered, see `shadow`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ptx_emulator.ptx.instructions import fact
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Wave

CLOCK_SHIFT = 10  # stamp = clock << 10 | atomic << 9 | warp
ATOMIC = 1 << 9
WARP = ATOMIC - 1
_KEPT_POLLS = 64  # of each warp
_NO_OTHERS = (1 << 21) - 1  # higher than clocks become
NAMED_BARRIERS = 16  # of a block
# Fences with columns: .sc of two scopes, .mbarrier_init, .proxy.async for global memory.
_BLOCK, _DEVICE, _INITIALISED, _PROXIED = range(4)


class StrongAccess(NamedTuple):
    """How a strong access orders others.

    Attributes:
        reads: it acquires what was released at its address: not a store, and not a red.
        polls: it does so only at the next fence of its warp, as relaxed loads and atomics do.
        atomic: it is an atomic with a result.
        releases: it releases by itself, at its address alone; others do after a fence.
    """

    reads: bool
    polls: bool
    atomic: bool
    releases: bool

    @classmethod
    def from_instruction(cls, machine: Wave, pc: int) -> StrongAccess:
        """How the instruction ``pc`` orders others."""
        ins, polls = machine.program.code[pc], pc in machine.acquired_by_fences
        releases = pc in machine.program.accesses.releases
        return cls(fact("result", ins), polls, ins.op == "atom", releases)


class Clocks:
    """Clocks of the blocks of one wave.

    Blocks of a cluster share memory and barriers: a cluster of several counts as one block with the
    warps of all, and each of its ``ranks`` has slots for its named barriers.
    """

    def __init__(self, blocks: int, warps: int, proxy: bool, ranks: int) -> None:
        self.warps = warps
        # Number of columns in use; the arrays may have more.
        self.columns = 2 * warps if proxy else warps
        self.seen = np.zeros((blocks, warps, self.columns), np.int64)
        self._own = np.arange(warps)
        self.seen[:, self._own, self._own] = 1
        self.published = np.zeros((blocks, NAMED_BARRIERS * ranks, self.columns), np.int64)
        self.floor_stamp = np.zeros(blocks * warps, np.uint32)
        self.clock = np.ones(blocks * warps, np.int64)
        self.synced = np.ones(blocks * warps, np.int64)
        # The lower of `floor_stamp` and the first stamp that is not ordered between lanes.
        self.lane_floor = np.zeros(blocks * warps, np.uint32)
        self.fenced: dict[int, Array] = {}
        self.released: dict[tuple[int, int], Array] = {}
        # By warp and whether it is an atomic: what fences acquire of what it has polled up to each
        # clock.
        self._polled: dict[tuple[int, bool], list[tuple[int, Array]]] = {}
        self._first: dict[int, int] = {}  # of the columns of each kind of fence
        self._refresh(np.arange(blocks))

    def new_column(self) -> int:
        """A column for one more asynchronous agent."""
        column = self.columns
        self.columns += 1
        if self.columns > self.seen.shape[2]:
            more = max(16, column)
            self.seen = _widened(self.seen, more)
            self.published = _widened(self.published, more)
            self.fenced = {row: _widened(clocks, more) for row, clocks in self.fenced.items()}
            self.released = {key: _widened(clocks, more) for key, clocks in self.released.items()}
            for polls in self._polled.values():
                polls[:] = [(clock, _widened(clocks, more)) for clock, clocks in polls]
        return column

    def new_slots(self, count: int) -> int:
        """Adds ``count`` slots of published clocks per block; returns the number of the first."""
        blocks, first, columns = self.published.shape
        more = np.zeros((blocks, count, columns), np.int64)
        self.published = np.concatenate([self.published, more], axis=1)
        return first

    def _refresh(self, blocks: Array) -> None:
        """Updates the cached clock of each warp, and the stamp below which all is ordered."""
        seen = self.seen[blocks, :, : self.warps]
        clock = seen[:, self._own, self._own]
        others = seen
        others[:, self._own, self._own] = _NO_OTHERS
        floor = others.min(axis=2)
        rows = blocks[:, None] * self.warps + self._own
        self.clock[rows] = clock
        self.floor_stamp[rows] = (floor + 1) << CLOCK_SHIFT
        self.lane_floor[rows] = np.minimum(floor + 1, self.synced[rows]) << CLOCK_SHIFT

    def barrier_of_all(self, blocks: Array) -> None:
        """A barrier of all warps of the blocks: orders all earlier before all later accesses."""
        newest = self.seen[blocks][:, self._own, self._own].max(axis=1)
        # The other columns are not clocks of warps: all warps get their maximum.
        rest = self.seen[blocks, :, self.warps :].max(axis=1, keepdims=True)
        self.seen[blocks, :, self.warps :] = rest
        self.seen[blocks, :, : self.warps] = newest[:, None, None]
        self.seen[blocks[:, None], self._own, self._own] = newest[:, None] + 1
        self.synced[blocks[:, None] * self.warps + self._own] = newest[:, None] + 1
        self._refresh(blocks)

    def publish(self, rows: Array, slots: Array) -> None:
        """Warps (n,) publish their clocks in slots (n,) of their blocks; their clocks advance."""
        blocks, warps = np.divmod(rows, self.warps)
        np.maximum.at(self.published, (blocks, slots), self.seen[blocks, warps])
        self.tick(np.unique(rows))

    def copy_of(self, rows: Array) -> Array:
        """A copy of the clocks of warps (n, columns)."""
        return np.array(self.seen[np.divmod(rows, self.warps)])

    def publish_earlier(self, rows: Array, slots: Array, clocks: Array) -> None:
        """Publishes earlier clocks of warps (n,), see `copy_of`, in slots (n,) of their blocks."""
        columns = clocks.shape[1]  # agents may have been added since
        np.maximum.at(self.published[:, :, :columns], (rows // self.warps, slots), clocks)

    def publish_fenced(self, rows: Array, slots: Array) -> None:
        """Warps (n,) publish what their fences release, in slots (n,) of their blocks."""
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            published, offered = self.published[row // self.warps, slot], self._offered(row)
            if offered is not None:
                np.maximum(published, offered, out=published)
            if _INITIALISED in self._first:
                columns, clocks = self._columns(_INITIALISED), self.seen[divmod(row, self.warps)]
                published[columns] = np.maximum(published[columns], clocks[columns])

    def acquire(self, rows: Array, slots: Array) -> None:
        """Orders warps (n,) after what was published in slots (n,) of their blocks."""
        blocks, warps = np.divmod(rows, self.warps)
        own_clocks, published = self.seen[blocks, warps, warps], self.published[blocks, slots]
        np.maximum.at(self.seen, (blocks, warps), published)
        self.seen[blocks, warps, warps] = own_clocks
        # What lanes of the warp itself have published precedes what its other lanes do now.
        np.maximum.at(self.synced, rows, published[np.arange(len(rows)), warps] + 1)
        self._refresh(np.unique(blocks))

    def acquire_later(self, rows: Array, slots: Array) -> None:
        """Orders the next fences of warps (n,) after what was published in slots (n,)."""
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            self._note_poll(row, False, self.published[row // self.warps, slot])

    def _note_poll(self, row: int, atomic: bool, offered: Array) -> None:
        polls = self._polled.setdefault((row, atomic), [])
        if polls:
            offered = np.maximum(offered, polls[-1][1])
            if polls[-1][0] == self.clock[row]:
                polls.pop()
        polls.append((int(self.clock[row]), offered.copy()))
        del polls[:-_KEPT_POLLS]

    def acquire_at_barrier(self, rows: Array) -> None:
        """Orders warps at a barrier of their block after what their atomics have found.

        PTX demands a fence between the two. The kernels of NVIDIA's guide in which the last block
        reads what all have written have none.
        """
        for row in rows.tolist() if self._polled else ():
            for _, offered in self._polled.get((row, True), ())[-1:]:
                self._join(row, offered)

    def polled(self, row: int, atomics: Iterable[bool] = (False, True)) -> Iterator[Array]:
        """What the warps that a warp is ordered after have polled by then, by loads or atomics."""
        block, warp = divmod(row, self.warps)
        for (other, atomic), polls in self._polled.items():
            if other // self.warps == block and atomic in atomics:
                until = self.seen[block, warp, other % self.warps]
                yield from [offered for clock, offered in polls if clock <= until][-1:]

    def awaits_fence(self, row: int, warp: int, clock: int) -> bool:
        """Whether a warp lacks only the fence after an atomic to be ordered after an access."""
        return any(offered[warp] >= clock for offered in self.polled(row, (True,)))

    def forgo(self, row: int, before: Array, after: Array) -> None:
        """Resets a warp's clocks to ``before`` an acquire, if they are still as ``after`` it."""
        block, warp = divmod(row, self.warps)
        clocks = self.seen[block, warp]
        others = np.arange(len(after)) != warp
        if (clocks[: len(after)] == after)[others].all() and not clocks[len(after) :].any():
            clocks[: len(before)][others] = before[others]
            self._refresh(np.array([block]))

    def order_after(self, rows: Array, column: int, time: Array | int) -> None:
        """Orders distinct warps (n,) after a time, or times (n,), of an asynchronous agent."""
        blocks, warps = np.divmod(rows, self.warps)
        self.seen[blocks, warps, column] = np.maximum(self.seen[blocks, warps, column], time)

    def tick(self, rows: Array) -> None:
        """Advances the clocks of warps: later accesses are not covered by what they published."""
        blocks, warps = np.divmod(rows, self.warps)
        self.seen[blocks, warps, warps] += 1
        self._refresh(np.unique(blocks))

    def sync_lanes(self, rows: Array) -> None:
        """Records that the lanes of distinct warps have synchronised."""
        self.synced[rows] = self.clock[rows] + 1
        self.tick(rows)

    def fence_proxy(self, rows: Array) -> None:
        """fence.proxy.async: makes all writes visible to these warps visible to the proxy."""
        blocks, warps = np.divmod(rows, self.warps)
        clocks = self.seen[blocks, warps]
        ordinary, proxy = clocks[:, : self.warps], clocks[:, self.warps : 2 * self.warps]
        np.maximum(proxy, ordinary, out=proxy)
        self.seen[blocks, warps] = clocks
        self.tick(rows)

    def fence_sequential(self, rows: Array, device: bool) -> None:
        """A fence.sc of block or of device scope, before `fence`.

        The fence also acquires what other threads have polled, because it also releases for them.
        """
        for row in rows.tolist() if self._polled else ():
            for offered in list(self.polled(row)):
                self._join(row, offered)
        for kind in (_BLOCK, _DEVICE)[: 1 + device]:
            self._note_fence(rows, kind)

    def fence_initialised(self, rows: Array) -> None:
        """A fence.mbarrier_init, or one that has its effect."""
        self._note_fence(rows, _INITIALISED)

    def fence_proxy_global(self, rows: Array) -> None:
        """fence.proxy.async for global memory, see `fence_proxy`."""
        self._note_fence(rows, _PROXIED)
        self.tick(rows)

    def proxied(self, blocks: Any, warps: Any) -> Array | None:
        """The clocks (..., warps) before the proxy fences for global memory that these warps are
        ordered after; None without.
        """
        if _PROXIED not in self._first:
            return None
        return np.array(self.seen[blocks, warps][..., self._columns(_PROXIED)])

    def _note_fence(self, rows: Array, kind: int) -> None:
        if kind not in self._first:
            self._first[kind] = min([self.new_column() for _ in range(self.warps)])
        blocks, warps = np.divmod(rows, self.warps)
        clocks, columns = self.seen[blocks, warps, : self.warps], self._columns(kind)
        self.seen[blocks, warps, columns] = np.maximum(self.seen[blocks, warps, columns], clocks)

    def before_sequential(self, row: int, device: bool) -> Array | None:
        """The clocks (warps,) before each fence.sc that a warp is ordered after; None without."""
        kind = _DEVICE if device else _BLOCK
        if kind not in self._first:
            return None
        return np.array(self.seen[divmod(row, self.warps)][self._columns(kind)])

    def initialised(self, blocks: Array, warps: Array, makers: Array) -> Array:
        """The newest clocks of ``makers`` (n,) after whose mbarrier.init these warps come."""
        newest: Array = self.seen[blocks, warps, makers]
        if _INITIALISED in self._first:
            fenced = self.seen[blocks, warps, self._first[_INITIALISED] + makers]
            newest = np.maximum(newest, fenced)
        return newest

    def _columns(self, kind: int) -> slice:
        return slice(self._first[kind], self._first[kind] + self.warps)

    def fence(self, rows: Array) -> None:
        """A fence: the next strong access of each warp releases its current clocks.

        The later accesses of the warp are ordered after what it has polled before.
        """
        for row in rows.tolist():
            for atomic in (False, True):
                for _, offered in self._polled.get((row, atomic), ())[-1:]:
                    self._join(row, offered)
            self.fenced[row] = self.seen[divmod(row, self.warps)].copy()
        self.tick(rows)

    def _join(self, row: int, offered: Array) -> None:
        block, warp = divmod(row, self.warps)
        clocks = self.seen[block, warp]
        own_clock = clocks[warp]
        self.synced[row] = max(self.synced[row], offered[warp] + 1)
        np.maximum(clocks, offered, out=clocks)
        clocks[warp] = own_clock

    def synchronise(self, rows: Array, addresses: Array, ordering: StrongAccess) -> None:
        """Strong accesses: each acquires what was released at its address, and releases."""
        before = self.seen.copy()
        for row, address in zip(rows.tolist(), addresses.tolist(), strict=True):
            block = row // self.warps
            slot = self.released.get((block, address))
            if slot is not None and ordering.polls:
                self._note_poll(row, ordering.atomic, slot)
            elif slot is not None and ordering.reads:
                self._join(row, slot)
            offered = self.copy_of(np.array(row)) if ordering.releases else self._offered(row)
            if offered is not None:
                joined = offered if slot is None else np.maximum(slot, offered)
                self.released[block, address] = joined
        if (before != self.seen).any():
            self._refresh(np.unique(rows // self.warps))
        if ordering.releases:
            self.tick(np.unique(rows))

    def _offered(self, row: int) -> Array | None:
        """What a strong access of a warp releases; None for nothing."""
        fenced, others = self.fenced.get(row), self.before_sequential(row, False)
        if others is None or not others.any():
            return fenced
        offered = np.zeros(self.seen.shape[2], np.int64)
        offered[: self.warps] = offered[self._columns(0)] = others
        return offered if fenced is None else np.maximum(offered, fenced)

    def decode(self, stamps: Array) -> tuple[Array, Array]:
        """The warp and the clock of each stamp."""
        stamps = stamps.astype(np.int64, copy=False)
        return np.minimum(stamps & WARP, self.warps - 1), stamps >> CLOCK_SHIFT

    def ordered(self, blocks: Array, warps: Array, stamps: Array) -> Array:
        """Whether the accesses with these stamps happened before those of ``warps`` now."""
        agent, clock = self.decode(stamps)
        return (agent == warps) | (clock <= self.seen[blocks, warps, agent])  # type: ignore[no-any-return]


def _widened(values: Array, more: int) -> Array:
    """``values`` with ``more`` further columns of zeros."""
    return np.concatenate([values, np.zeros((*values.shape[:-1], more), values.dtype)], axis=-1)


def room(count: int, *tables: Array) -> list[Array]:
    """The tables, extended to at least ``count`` entries."""
    return [
        t
        if count <= len(t)
        else np.concatenate([t, np.zeros((max(count, len(t)), *t.shape[1:]), t.dtype)])
        for t in tables
    ]
