"""What fences and atomics order between the blocks of a launch.

Data written before a fence that is followed by an atomic is visible to a warp that later performs
an atomic on the same address, and to the warps that pass a barrier with it, independently of the
order in which the emulator executes the blocks. A barrier may stand between a fence.sc and the
atomic, which then is another thread's (`clocks`). A loop that polls a volatile flag needs a fence
after it, too.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from ptx_emulator.checks.clocks import CLOCK_SHIFT, WARP, StrongAccess
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Wave

# A stamp: block + 1 in bits 32 to 59, clock, atomic flag and warp as in clocks.
BLOCK_SHIFT = 32
_KEPT_POLLS = 16  # of each warp
LOW = (1 << 32) - 1
_CLOCK = attrgetter("clock")

ClocksByBlock = dict[int, Array]
"""Per block b, the clocks of its warps up to which accesses are ordered; with the key ~b those up
to which writes are visible to the asynchronous proxy. The arrays never change: a launch shares them
between as many of these as there are blocks, and copies would cost their square."""


class _Learnt(NamedTuple):
    """What a warp had acquired of other blocks at its clock, by then and before."""

    clock: int
    known: ClocksByBlock


class BlockOrder:
    """The order between blocks. A cluster counts as one block, as in `Wave.cluster_ids`."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        self.tracks_fences = machine.program.accesses.synchronises
        # By block and warp: at its last fence, and what it has polled up to each clock, by loads or
        # atomics.
        self._fenced: dict[tuple[int, int], ClocksByBlock] = {}
        self._polled: dict[int, dict[tuple[int, bool], list[tuple[int, ClocksByBlock]]]] = {}
        self._released: dict[int, ClocksByBlock] = {}  # by address: what an acquire obtains
        self._learnt: dict[int, dict[int, list[_Learnt]]] = {}  # by block and warp

    def fence(self, rows: Array, sequential: bool = False) -> None:
        """A fence of device scope: the next atomic of each warp releases its current clocks.

        It acquires what its warp has polled, and a ``sequential`` one what those before it have.
        """
        m = self.machine
        for row in rows.tolist():
            slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
            block = int(m.cluster_ids[slot])
            offered: ClocksByBlock = {}
            for other, known in self._polls(row):
                if sequential or other == warp:
                    _join(offered, known)
            if offered.keys() - {block, ~block}:
                self._acquire(row, offered)
            seen = self.machine.clocks.seen[slot, warp, : m.cluster_warps]
            self._fenced[block, warp] = self._known(row, seen)

    def _polls(
        self, row: int, atomics: tuple[bool, ...] = (False, True)
    ) -> Iterator[tuple[int, ClocksByBlock]]:
        """The warps that a warp is ordered after, and what they have polled by then."""
        m = self.machine
        slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
        polls_of = self._polled.get(int(m.cluster_ids[slot]), {})
        for (other, atomic), polls in polls_of.items():
            until = m.clocks.seen[slot, warp, other]
            for _, known in [p for p in polls if p[0] <= until and atomic in atomics][-1:]:
                yield other, known

    def acquire_at_barrier(self, rows: Array) -> None:
        """What atomics of warps have found happened before a barrier of their block, as for
        `Clocks.acquire_at_barrier`."""
        m = self.machine
        for row in rows.tolist() if self._polled else ():
            warp, block = int(m.row_member[row]), int(m.cluster_ids[int(m.row_cluster[row])])
            for _, known in self._polled.get(block, {}).get((warp, True), ())[-1:]:
                if known.keys() - {block, ~block}:
                    self._acquire(row, known)

    def awaits_fence(self, row: int, stamp: int) -> bool:
        """Whether a warp only lacks the fence after an atomic to come after an access."""
        m = self.machine
        agent, clock = stamp & WARP, (stamp & LOW) >> CLOCK_SHIFT
        other = block_of(stamp) - 1
        if other == int(m.cluster_ids[int(m.row_cluster[row])]):
            return m.clocks.awaits_fence(row, agent, clock)
        polls = (known.get(other) for _, known in self._polls(row, (True,)))
        return any(known is not None and known[agent] >= clock for known in polls)

    def _note_poll(self, row: int, atomic: bool, offered: ClocksByBlock) -> None:
        m = self.machine
        block = int(m.cluster_ids[int(m.row_cluster[row])])
        of_block = self._polled.setdefault(block, {})
        polls = of_block.setdefault((int(m.row_member[row]), atomic), [])
        clock, known = int(m.clocks.clock[row]), dict(offered)
        if polls:
            _join(known, polls[-1][1])
            if polls[-1][0] == clock:
                polls.pop()
        polls.append((clock, known))
        del polls[:-_KEPT_POLLS]

    def fence_proxy(self, rows: Array) -> None:
        """A proxy fence for global memory: what each warp has learnt of other blocks is visible."""
        m = self.machine
        for row in rows.tolist() if self._learnt else ():
            slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
            block = int(m.cluster_ids[slot])
            known = self._known(row, m.clocks.seen[slot, warp, : m.cluster_warps])
            others = {~other: clocks for other, clocks in known.items() if other >= 0}
            if others.keys() - {~block}:
                self._acquire(row, others)

    def _known(self, row: int, seen: Array) -> ClocksByBlock:
        """What the clocks (warps,) of the block of a warp, or earlier ones, include, with what they
        have learnt of others.
        """
        m = self.machine
        slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
        block = int(m.cluster_ids[slot])
        known: ClocksByBlock = {block: seen.copy()}
        visible = m.clocks.proxied(slot, warp)
        if visible is not None:
            known[~block] = np.minimum(visible, seen)
        for learnt in self._learnt_by(block, seen):
            _join(known, learnt)
        return known

    def _learnt_by(self, block: int, seen: Array) -> Iterator[ClocksByBlock]:
        """What each warp of a block, up to these clocks, has acquired of other blocks."""
        for warp, entries in self._learnt.get(block, {}).items():
            place = bisect.bisect_right(entries, seen[warp], key=_CLOCK)
            if place:
                yield entries[place - 1].known

    def has_ordered(self, row: int, stamp: int, proxied: bool = False) -> bool:
        """Whether fences and atomics order an access of another block before a warp; ``proxied``:
        before its asynchronous accesses, by a proxy fence.
        """
        m = self.machine
        slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
        other = block_of(stamp) - 1
        agent, clock = stamp & WARP, (stamp & LOW) >> CLOCK_SHIFT
        seen = self.machine.clocks.seen[slot, warp]
        for learnt in self._learnt_by(int(m.cluster_ids[slot]), seen):
            known = learnt.get(~other if proxied else other)
            if known is not None and known[agent] >= clock:
                return True
        return False

    def synchronise(self, rows: Array, flat: Array, pc: int) -> None:
        """Strong accesses acquire what was released at their address, and release.

        Those of a scope that is narrower than the device do so within their block alone.
        """
        if not self.tracks_fences:
            return
        m, clocks = self.machine, self.machine.clocks
        narrow = pc in m.program.accesses.narrow
        how, given = StrongAccess.of(m, pc), self._fenced
        if how.releases:
            given = {}
            for row in np.unique(rows).tolist():
                slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
                seen = clocks.seen[slot, warp, : m.cluster_warps]
                given[int(m.cluster_ids[slot]), warp] = self._known(row, seen)
        clocks.synchronise(rows, -1 - flat, how)
        if narrow:
            return
        for row, address in zip(rows.tolist(), flat.tolist(), strict=True):
            slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
            block = int(m.cluster_ids[slot])
            offered = self._released.setdefault(address, {})
            if how.polls:
                self._note_poll(row, how.atomic, offered)
            elif how.reads and offered.keys() - {block, ~block}:
                self._acquire(row, offered)
            if (block, warp) in given:
                _join(offered, given[block, warp])
            others = clocks.before_sequential(row, True)
            if others is not None and others.any():
                _join(offered, self._known(row, others))

    def _acquire(self, row: int, offered: ClocksByBlock) -> None:
        """A warp acquires clocks, unless it is ordered after a warp that has acquired them."""
        m = self.machine
        slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
        block, clock = int(m.cluster_ids[slot]), int(m.clocks.clock[row])
        for before in self._learnt_by(block, m.clocks.seen[slot, warp]):
            if before.keys() >= offered.keys() and all(
                before[b] is v or (before[b] >= v).all() for b, v in offered.items()
            ):
                return
        entries = self._learnt.setdefault(block, {}).setdefault(warp, [])
        known = dict(entries[-1].known) if entries else {}
        _join(known, offered)
        entries.append(_Learnt(clock, known))


def block_of(stamps: Any) -> Any:
    """The block plus one."""
    return stamps >> BLOCK_SHIFT & 0xFFFFFFF


def _join(known: ClocksByBlock, more: ClocksByBlock) -> None:
    for block, clocks in more.items():
        before = known.get(block, clocks)
        known[block] = clocks if before is clocks else np.maximum(before, clocks)
