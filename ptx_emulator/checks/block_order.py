"""What fences and atomics order between the blocks of a launch.

Data written before a fence that is followed by an atomic is visible to a warp that later performs
an atomic on the same address, and to the warps that pass a barrier with it, independently of the
order in which the emulator executes the blocks. A barrier may stand between a fence.sc and the
atomic, which then is another thread's (`clocks`). A loop that polls a volatile flag needs a fence
after it, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ptx_emulator.checks.clocks import CLOCK_SHIFT, WARP
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Wave

# A stamp: block + 1 in bits 32 to 59, clock, atomic flag and warp as in clocks.
BLOCK_SHIFT = 32
LOW = (1 << 32) - 1

ClocksByBlock = dict[int, Array]
"""Per block, the clocks of its warps up to which accesses are ordered."""


class _Acquired(NamedTuple):
    """An atomic of a warp, at its clock, that acquired clocks of other blocks."""

    warp: int
    clock: int
    known: ClocksByBlock


class BlockOrder:
    """The order between blocks. A cluster counts as one block, as in `Wave.cluster_ids`."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        self.tracks_fences = machine.program.accesses.synchronises
        # By block and warp: at its last fence, and what its polls saw released since.
        self._fenced: dict[tuple[int, int], ClocksByBlock] = {}
        self._polled: dict[tuple[int, int], ClocksByBlock] = {}
        self._released: dict[int, ClocksByBlock] = {}  # by address: what an acquire obtains
        self._learnt: dict[int, list[_Acquired]] = {}  # by block

    def fence(self, rows: Array) -> None:
        """A fence of device scope: the next atomic of each warp releases its current clocks."""
        m = self.machine
        for row in rows.tolist():
            slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
            block = int(m.cluster_ids[slot])
            offered = self._polled.pop((block, warp), {})
            if offered.keys() - {block}:
                self._acquire(block, warp, int(self.machine.clocks.clock[row]), offered)
            seen = self.machine.clocks.seen[slot, warp, : m.cluster_warps]
            self._fenced[block, warp] = self._known(block, seen)

    def _known(self, block: int, seen: Array) -> ClocksByBlock:
        """What the clocks (warps,) of a block include, with what they have learnt of others."""
        known: ClocksByBlock = {block: seen.copy()}
        for entry in self._learnt.get(block, ()):
            if seen[entry.warp] >= entry.clock:
                _join(known, entry.known)
        return known

    def has_ordered(self, row: int, stamp: int) -> bool:
        """Whether fences and atomics order an access of another block before a warp."""
        m = self.machine
        slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
        other = block_of(stamp) - 1
        agent, clock = stamp & WARP, (stamp & LOW) >> CLOCK_SHIFT
        seen = self.machine.clocks.seen[slot, warp]
        for entry in self._learnt.get(int(m.cluster_ids[slot]), ()):
            known = entry.known.get(other)
            if known is not None and known[agent] >= clock and seen[entry.warp] >= entry.clock:
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
        if pc in m.program.accesses.releases:
            if not narrow:
                self.fence(np.unique(rows))
            clocks.fence(np.unique(rows))
        poll = pc in m.program.acquired_by_fences
        clocks.synchronise(rows, -1 - flat, poll)
        if narrow:
            return
        for row, address in zip(rows.tolist(), flat.tolist(), strict=True):
            slot, warp = int(m.row_cluster[row]), int(m.row_member[row])
            block = int(m.cluster_ids[slot])
            offered = self._released.setdefault(address, {})
            if poll:
                _join(self._polled.setdefault((block, warp), {}), offered)
            elif offered.keys() - {block}:
                self._acquire(block, warp, int(clocks.clock[row]), offered)
            if (block, warp) in self._fenced:
                _join(offered, self._fenced[block, warp])
            others = clocks.before_sequential(row, True)
            if others is not None and others.any():
                _join(offered, self._known(block, others))

    def _acquire(self, block: int, warp: int, clock: int, offered: ClocksByBlock) -> None:
        entries = self._learnt.setdefault(block, [])
        for entry in reversed(entries):
            same = entry.warp == warp and entry.known.keys() >= offered.keys()
            if same and all((entry.known[b] >= v).all() for b, v in offered.items()):
                return
        entries.append(_Acquired(warp, clock, {b: v.copy() for b, v in offered.items()}))


def block_of(stamps: Any) -> Any:
    """The block plus one."""
    return stamps >> BLOCK_SHIFT & 0xFFFFFFF


def _join(known: ClocksByBlock, more: ClocksByBlock) -> None:
    for block, clocks in more.items():
        before = known.get(block)
        known[block] = clocks.copy() if before is None else np.maximum(before, clocks)
