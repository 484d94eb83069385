"""Waits for a phase of an mbarrier that may come two phases late.

A wait by parity distinguishes a phase from the next one, but not from the one after that: a warp
that comes after the next phase has completed as well finds the parity that it started with, and
waits for a phase that may never complete. So something must order every wait before the end of the
next phase, and this checker requires it in whatever order the warps of this launch came: when a
phase completes, the vector clocks (`clocks`) that its arrivals published must cover the waits for
the phase before; and when a warp waits, for the first time too, no phase may have completed but
those that it is ordered after, the one that it waits for, and none after that.

The four warps of a warpgroup execute wgmma together, so the arrival of one of them after a wgmma
shows that the others have waited, too.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from ptx_emulator.errors import RaceError
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Wave

_NEVER = -9  # of a phase: the warp has not waited for this mbarrier
_UNSEEN = np.int64(1) << 60


class LateWaits:
    """The latest wait of each warp of a wave for each mbarrier; tables are (barriers, warps)."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        rows = len(machine.row_block)
        self.phase = np.zeros((0, rows), np.int64)
        self.clock, self.pc = self.phase.copy(), self.phase.copy()
        # Whether the warp has arrived at the mbarrier itself.
        self.arrives = np.zeros((0, rows), bool)
        # Clocks of the four warps of the warpgroup at its first wgmma after the wait.
        self.group_clock = np.zeros((0, rows, 4), np.int64)
        # Clocks of the threads that started copies, when they did: (barriers, blocks, warps).
        self.issuers = np.zeros((0, len(machine.blocks), machine.cluster_warps), np.int64)
        # Bit 0: the end of this phase does not follow from its arrivals; bits 1 and 2: nor did the
        # ends of the last two (barriers, blocks).
        self.hidden = np.zeros((0, len(machine.blocks)), np.int64)
        self._open = np.zeros(rows, bool)  # warps that have waited since their last wgmma

    def add(self) -> None:
        """Adds a row for one more mbarrier."""
        first = {"phase": _NEVER, "clock": 0, "pc": 0, "arrives": False, "issuers": 0, "hidden": 0}
        for name, value in (*first.items(), ("group_clock", _UNSEEN)):
            table = getattr(self, name)
            row = np.full((1, *table.shape[1:]), value, table.dtype)
            setattr(self, name, np.concatenate([table, row]))

    def forget(self, numbers: Array, blocks: Array) -> None:
        """Forgets the waits for mbarriers that are initialised again."""
        rows = blocks[:, None] * self.machine.warps + np.arange(self.machine.warps)
        self.phase[numbers[:, None], rows] = _NEVER
        self.hidden[numbers, blocks] = 0

    def hide(self, numbers: Array, blocks: Array) -> None:
        """Records that a warp which knows of all arrivals of this phase need not know of its end.

        That is so if bytes are counted as well, and if an arrival is relaxed.
        """
        self.hidden[numbers, blocks] |= 1

    def note(self, numbers: Array, rows: Array, pc: int) -> None:
        """Records that warps have seen the latest phases of mbarriers complete."""
        machine = self.machine
        phase = machine.mbarriers.phase[numbers, machine.row_block[rows]] - 1
        self.phase[numbers, rows], self.pc[numbers, rows] = phase, pc
        self.clock[numbers, rows] = machine.clocks.clock[rows]
        self.group_clock[numbers, rows] = _UNSEEN
        self._open[rows] = True

    def wgmma(self, rows: Array) -> None:
        """Records that whole warpgroups execute a wgmma."""
        if not self._open[rows].any():
            return
        self._open[rows] = False
        clocks = np.repeat(self.machine.clocks.clock[rows].reshape(-1, 4), 4, axis=0)
        table = self.group_clock[:, rows]
        self.group_clock[:, rows] = np.where(table == _UNSEEN, clocks, table)

    def delivered(self, numbers: Array, blocks: Array, issue_clocks: Array) -> None:
        """Records that copies are complete, and the clocks of their threads at the start."""
        clocks = issue_clocks[:, : self.machine.cluster_warps]
        np.maximum.at(self.issuers, (numbers, blocks), clocks)

    def check(self, numbers: Array, blocks: Array, published: Array) -> None:
        """Checks the waits for the phases before those that have just completed.

        Args:
            numbers, blocks: of the mbarriers.
            published: clocks of the warps that arrived in them (n, columns).

        Raises:
            RaceError: nothing orders a wait before the end of the next phase.
        """
        machine = self.machine
        self.hidden[numbers, blocks] <<= 1
        warps = np.arange(machine.warps)
        index = (numbers[:, None], blocks[:, None] * machine.warps + warps)
        before = self.phase[index] == machine.mbarriers.phase[numbers, blocks][:, None] - 2
        published = np.maximum(published[:, : machine.cluster_warps], self.issuers[numbers, blocks])
        entries = np.arange(len(numbers))[:, None]
        first = (blocks % machine.cluster_size * machine.warps)[:, None]
        late = before & (published[entries, first + warps] < self.clock[index])
        if not late.any():
            return
        members = np.minimum(warps[:, None] // 4 * 4 + np.arange(4), machine.warps - 1)
        clocks = published[entries[:, :, None], first[:, :, None] + members]
        late &= ~(clocks >= self.group_clock[index]).any(axis=2)
        if not late.any():
            return
        entry, warp = (int(i) for i in np.argwhere(late)[0])
        number, row = int(numbers[entry]), int(blocks[entry]) * machine.warps + warp
        self._report(row, number, int(self.phase[number, row]), int(self.pc[number, row]))

    def require_in_time(self, rows: Array, numbers: Array, parity: Array, pc: int) -> None:
        """Checks waits (n,) of warps for mbarriers by parity, whether they succeed or not.

        A warp that is ordered after the end of some phases waits for the next one, or for the one
        before that: the parity says for which. Warps that arrive at an mbarrier themselves may know
        more than that, and are not checked here.

        Raises:
            RaceError: a later phase has completed, which this warp need not have seen.
        """
        machine = self.machine
        blocks = machine.row_block[rows]
        columns = machine.mbarriers.columns[numbers, blocks % machine.cluster_size]
        clusters, members = machine.row_cluster[rows], machine.row_member[rows]
        seen_phases = machine.clocks.seen[clusters, members, columns]
        # A relaxed wait orders nothing, and yet the warp knows of the phase.
        seen_phases = np.maximum(seen_phases, self.phase[numbers, rows] + 1)
        phases, unchecked = machine.mbarriers.phase[numbers, blocks], self.arrives[numbers, rows]
        for index in np.flatnonzero((_meant(seen_phases, parity) < phases - 1) & ~unchecked):
            row, number = int(rows[index]), int(numbers[index])
            known = max(int(seen_phases[index]), self._shown(row, number))
            phase = int(_meant(known, parity[index]))
            if phase < phases[index] - 1:
                self._report(row, number, phase, pc)

    def _shown(self, row: int, number: int) -> int:
        """How many phases of an mbarrier have ended by arrivals that a warp is ordered after.

        It need not have waited there for that: a wait for what the arriving warps do next shows it
        as well.
        """
        machine = self.machine
        block, clocks = int(machine.row_block[row]), machine.clocks
        cluster, rank = divmod(block, machine.cluster_size)
        seen = clocks.seen[cluster, machine.row_member[row]]
        slot = machine.mbarriers.slots(np.array(number), np.array(block))
        phases = int(machine.mbarriers.phase[number, block])
        for back in range(min(phases, 2)):
            missing = clocks.published[cluster, slot + 1 + back] > seen
            missing[machine.mbarriers.columns[number, rank]] = False  # the end of the phase itself
            if not missing.any() and not self.hidden[number, block] >> (1 + back) & 1:
                return phases - back
        return 0

    def _report(self, row: int, number: int, phase: int, pc: int) -> NoReturn:
        machine = self.machine
        what = "an mbarrier may be two phases ahead of a warp that waits for it: the warp finds "
        what += "the same parity again"
        offset = machine.mbarriers.addresses[number]
        numbers = f"mbarrier at shared offset {offset}: this warp waits for "
        numbers += f"phase {phase}, and nothing orders its wait before the end of phase {phase + 1}"
        way_out = "let the warp that waits arrive, at this or another barrier, before the next "
        way_out += "phase can complete: one warp's arrival does not show that others have waited"
        where = machine.location(row, None, pc)
        raise RaceError(what, where=where, numbers=numbers, way_out=way_out)


def _meant(seen_phases: Any, parity: Any) -> Any:
    """The phase for which a warp waits that is ordered after the end of ``seen_phases`` phases."""
    return seen_phases - ((seen_phases ^ parity) & 1)
