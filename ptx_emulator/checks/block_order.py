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
    by_block: ClocksByBlock


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

        The fence acquires what its warp has polled; a ``sequential`` fence also what the warps
        have polled that its warp is ordered after.
        """
        machine = self.machine
        for row in rows.tolist():
            slot, warp = int(machine.row_cluster[row]), int(machine.row_member[row])
            block = int(machine.cluster_ids[slot])
            offered: ClocksByBlock = {}
            for other, by_block in self._polls(row):
                if sequential or other == warp:
                    _join(offered, by_block)
            if offered.keys() - {block, ~block}:
                self._acquire(row, offered)
            seen = self.machine.clocks.seen[slot, warp, : machine.cluster_warps]
            self._fenced[block, warp] = self._clocks_by_block(row, seen)

    def _polls(
        self, row: int, atomics: tuple[bool, ...] = (False, True)
    ) -> Iterator[tuple[int, ClocksByBlock]]:
        """The warps that a warp is ordered after, and what they have polled by then."""
        machine = self.machine
        slot, warp = int(machine.row_cluster[row]), int(machine.row_member[row])
        block_polls = self._polled.get(int(machine.cluster_ids[slot]), {})
        for (other, atomic), polls in block_polls.items():
            until = machine.clocks.seen[slot, warp, other]
            for _, by_block in [p for p in polls if p[0] <= until and atomic in atomics][-1:]:
                yield other, by_block

    def acquire_at_barrier(self, rows: Array) -> None:
        """Orders warps at a barrier of their block after what their atomics have found, as
        `Clocks.acquire_at_barrier` does."""
        machine = self.machine
        for row in rows.tolist() if self._polled else ():
            slot, warp = int(machine.row_cluster[row]), int(machine.row_member[row])
            block = int(machine.cluster_ids[slot])
            for _, by_block in self._polled.get(block, {}).get((warp, True), ())[-1:]:
                if by_block.keys() - {block, ~block}:
                    self._acquire(row, by_block)

    def awaits_fence(self, row: int, stamp: int) -> bool:
        """Whether a warp only lacks the fence after an atomic to come after an access."""
        machine = self.machine
        agent, clock = stamp & WARP, (stamp & LOW) >> CLOCK_SHIFT
        other = block_of(stamp) - 1
        if other == int(machine.cluster_ids[int(machine.row_cluster[row])]):
            return machine.clocks.awaits_fence(row, agent, clock)
        polled = (by_block.get(other) for _, by_block in self._polls(row, (True,)))
        return any(clocks is not None and clocks[agent] >= clock for clocks in polled)

    def _note_poll(self, row: int, atomic: bool, offered: ClocksByBlock) -> None:
        machine = self.machine
        block = int(machine.cluster_ids[int(machine.row_cluster[row])])
        block_polls = self._polled.setdefault(block, {})
        polls = block_polls.setdefault((int(machine.row_member[row]), atomic), [])
        clock, by_block = int(machine.clocks.clock[row]), dict(offered)
        if polls:
            _join(by_block, polls[-1][1])
            if polls[-1][0] == clock:
                polls.pop()
        polls.append((clock, by_block))
        del polls[:-_KEPT_POLLS]

    def fence_proxy(self, rows: Array) -> None:
        """A proxy fence for global memory: what each warp has learnt of other blocks is visible."""
        machine = self.machine
        for row in rows.tolist() if self._learnt else ():
            slot, warp = int(machine.row_cluster[row]), int(machine.row_member[row])
            block = int(machine.cluster_ids[slot])
            seen = machine.clocks.seen[slot, warp, : machine.cluster_warps]
            by_block = self._clocks_by_block(row, seen)
            others = {~other: clocks for other, clocks in by_block.items() if other >= 0}
            if others.keys() - {~block}:
                self._acquire(row, others)

    def _clocks_by_block(self, row: int, seen: Array) -> ClocksByBlock:
        """Clocks (warps,) of the block of a warp, current or earlier ones, with the clocks of other
        blocks that its warps had acquired by then.
        """
        machine = self.machine
        slot, warp = int(machine.row_cluster[row]), int(machine.row_member[row])
        block = int(machine.cluster_ids[slot])
        by_block: ClocksByBlock = {block: seen.copy()}
        visible = machine.clocks.proxied(slot, warp)
        if visible is not None:
            by_block[~block] = np.minimum(visible, seen)
        for learnt in self._learnt_by(block, seen):
            _join(by_block, learnt)
        return by_block

    def _learnt_by(self, block: int, seen: Array) -> Iterator[ClocksByBlock]:
        """What each warp of a block, up to these clocks, has acquired of other blocks."""
        for warp, entries in self._learnt.get(block, {}).items():
            count = bisect.bisect_right(entries, seen[warp], key=_CLOCK)
            if count:
                yield entries[count - 1].by_block

    def has_ordered(self, row: int, stamp: int, proxied: bool = False) -> bool:
        """Whether fences and atomics order an access of another block before a warp; ``proxied``:
        before its asynchronous accesses, by a proxy fence.
        """
        machine = self.machine
        slot, warp = int(machine.row_cluster[row]), int(machine.row_member[row])
        other = block_of(stamp) - 1
        agent, clock = stamp & WARP, (stamp & LOW) >> CLOCK_SHIFT
        seen = self.machine.clocks.seen[slot, warp]
        for by_block in self._learnt_by(int(machine.cluster_ids[slot]), seen):
            clocks = by_block.get(~other if proxied else other)
            if clocks is not None and clocks[agent] >= clock:
                return True
        return False

    def synchronise(self, rows: Array, flat: Array, pc: int) -> None:
        """Strong accesses acquire what was released at their address, and release.

        Strong accesses of a scope narrower than the device do so within their block alone.
        """
        if not self.tracks_fences:
            return
        machine, clocks = self.machine, self.machine.clocks
        narrow = pc in machine.program.accesses.narrow
        ordering, released = StrongAccess.from_instruction(machine, pc), self._fenced
        if ordering.releases:
            released = {}
            for row in np.unique(rows).tolist():
                slot, warp = int(machine.row_cluster[row]), int(machine.row_member[row])
                seen = clocks.seen[slot, warp, : machine.cluster_warps]
                released[int(machine.cluster_ids[slot]), warp] = self._clocks_by_block(row, seen)
        clocks.synchronise(rows, -1 - flat, ordering)
        if narrow:
            return
        for row, address in zip(rows.tolist(), flat.tolist(), strict=True):
            slot, warp = int(machine.row_cluster[row]), int(machine.row_member[row])
            block = int(machine.cluster_ids[slot])
            offered = self._released.setdefault(address, {})
            if ordering.polls:
                self._note_poll(row, ordering.atomic, offered)
            elif ordering.reads and offered.keys() - {block, ~block}:
                self._acquire(row, offered)
            if (block, warp) in released:
                _join(offered, released[block, warp])
            others = clocks.before_sequential(row, True)
            if others is not None and others.any():
                _join(offered, self._clocks_by_block(row, others))

    def _acquire(self, row: int, offered: ClocksByBlock) -> None:
        """A warp acquires clocks, unless it is ordered after a warp that has acquired them."""
        machine = self.machine
        slot, warp = int(machine.row_cluster[row]), int(machine.row_member[row])
        block, clock = int(machine.cluster_ids[slot]), int(machine.clocks.clock[row])
        for before in self._learnt_by(block, machine.clocks.seen[slot, warp]):
            if before.keys() >= offered.keys() and all(
                before[b] is v or (before[b] >= v).all() for b, v in offered.items()
            ):
                return
        entries = self._learnt.setdefault(block, {}).setdefault(warp, [])
        by_block = dict(entries[-1].by_block) if entries else {}
        _join(by_block, offered)
        entries.append(_Learnt(clock, by_block))


def block_of(stamps: Any) -> Any:
    """The number of the block in each stamp, plus one."""
    return stamps >> BLOCK_SHIFT & 0xFFFFFFF


def _join(by_block: ClocksByBlock, more: ClocksByBlock) -> None:
    for block, clocks in more.items():
        before = by_block.get(block, clocks)
        by_block[block] = clocks if before is clocks else np.maximum(before, clocks)
