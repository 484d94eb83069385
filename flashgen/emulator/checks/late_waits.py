"""Waits for a phase of an mbarrier that may come two phases late.

A wait by parity distinguishes a phase from the next one, but not from the one after that: a warp
that comes after the next phase has completed as well finds the parity that it started with, and
waits for a phase that may never complete. So something must order every wait before the end of the
next phase, and this checker requires it, however late the warps of this launch came: when a phase
completes, the vector clocks (`clocks`) that its arrivals published must cover the waits for the
phase before.

The four warps of a warpgroup execute wgmma together, so the arrival of one of them after a wgmma
shows that the others have waited, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.errors import RaceError
from flashgen.emulator.state.wave import Wave

Array = npt.NDArray[Any]
_NEVER = -9  # of a phase: the warp has not waited for this mbarrier
_UNSEEN = np.int64(1) << 60


class LateWaits:
    """The latest wait of each warp of a wave for each mbarrier; tables are (barriers, warps)."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        rows = len(machine.row_block)
        self.phase = np.zeros((0, rows), np.int64)
        self.clock, self.pc = self.phase.copy(), self.phase.copy()
        # Whether the wait passed over phases of the same parity.
        self.skipped = np.zeros((0, rows), bool)
        # Clocks of the four warps of the warpgroup at its first wgmma after the wait.
        self.group_clock = np.zeros((0, rows, 4), np.int64)
        # Clocks of the threads that started copies, when they did: (barriers, blocks, warps).
        self.issuers = np.zeros((0, len(machine.blocks), machine.cluster_warps), np.int64)
        self._open = np.zeros(rows, bool)  # warps that have waited since their last wgmma

    def add(self) -> None:
        """Adds a row for one more mbarrier."""
        rows = len(self._open)
        self.phase = np.concatenate([self.phase, np.full((1, rows), _NEVER)])
        none = np.zeros((1, rows), np.int64)
        self.clock, self.pc = (np.concatenate([t, none]) for t in (self.clock, self.pc))
        self.skipped = np.concatenate([self.skipped, none.astype(bool)])
        more = np.zeros((1, *self.issuers.shape[1:]), np.int64)
        self.issuers = np.concatenate([self.issuers, more])
        unseen = np.full((1, rows, 4), _UNSEEN)
        self.group_clock = np.concatenate([self.group_clock, unseen])

    def forget(self, k: Array, b: Array) -> None:
        """These mbarriers are initialised again."""
        rows = b[:, None] * self.machine.warps + np.arange(self.machine.warps)
        self.phase[k[:, None], rows] = _NEVER
        self.skipped[k[:, None], rows] = False

    def note(self, k: Array, rows: Array, pc: int) -> None:
        """Records that warps ``rows`` have seen the latest phases of mbarriers ``k`` complete."""
        m = self.machine
        assert m.shared_races is not None
        phase = m.mbarriers.phase[k, m.row_block[rows]] - 1
        last = np.maximum(self.phase[k, rows], -1)
        self.skipped[k, rows] = (phase - last > 1) & ((phase - last) % 2 == 1)
        self.phase[k, rows], self.pc[k, rows] = phase, pc
        self.clock[k, rows] = m.shared_races.clocks.clock[rows]
        self.group_clock[k, rows] = _UNSEEN
        self._open[rows] = True

    def wgmma(self, rows: Array) -> None:
        """Whole warpgroups execute a wgmma."""
        if not self._open[rows].any():
            return
        self._open[rows] = False
        races = self.machine.shared_races
        assert races is not None
        clocks = np.repeat(races.clocks.clock[rows].reshape(-1, 4), 4, axis=0)
        table = self.group_clock[:, rows]
        self.group_clock[:, rows] = np.where(table == _UNSEEN, clocks, table)

    def delivered(self, k: Array, b: Array, known: Array) -> None:
        """Copies for these mbarriers are complete; their threads had the clocks ``known``."""
        np.maximum.at(self.issuers, (k, b), known[:, : self.machine.cluster_warps])

    def check(self, k: Array, b: Array, published: Array) -> None:
        """Checks the waits for the phases before those that have just completed.

        Args:
            k, b: mbarriers and blocks.
            published: clocks of the warps that arrived in them (n, columns).

        Raises:
            RaceError: nothing orders a wait before the end of the next phase.
        """
        m = self.machine
        warps = np.arange(m.warps)
        at = (k[:, None], b[:, None] * m.warps + warps)
        before = self.phase[at] == m.mbarriers.phase[k, b][:, None] - 2
        published = np.maximum(published[:, : m.cluster_warps], self.issuers[k, b])
        each = np.arange(len(k))[:, None]
        first = (b % m.cluster_size * m.warps)[:, None]
        late = before & (published[each, first + warps] < self.clock[at])
        if not late.any():
            return
        members = np.minimum(warps[:, None] // 4 * 4 + np.arange(4), m.warps - 1)
        known = published[each[:, :, None], first[:, :, None] + members]
        late &= ~(known >= self.group_clock[at]).any(axis=2)
        if not late.any():
            return
        place, warp = (int(i) for i in np.argwhere(late)[0])
        number, row = int(k[place]), int(b[place]) * m.warps + warp
        phase = int(self.phase[number, row])
        raise RaceError(
            "an mbarrier may be two phases ahead of a warp that waits for it: the warp finds the "
            "same parity again",
            where=m.place(row, None, int(self.pc[number, row])),
            numbers=f"mbarrier at shared offset {m.mbarriers.addresses[number]}: this warp waits "
            f"for phase {phase}, and nothing orders its wait before the end of phase {phase + 1}",
            way_out="let the warp that waits arrive, at this or another barrier, before the next "
            "phase can complete: one warp's arrival does not show that others have waited",
        )

    def found(self, number: int, block: int, rows: Array) -> str:
        """An addition to the description of a wait that does not end, or ''."""
        late = int(self.machine.mbarriers.phase[number, block]) - self.phase[number, rows] - 1
        late = (late >= 2) & (late % 2 == 0) & (self.phase[number, rows] != _NEVER)
        if (late | self.skipped[number, rows]).any():
            return ", two or more phases late: the warp finds the parity that it had before"
        return ""
