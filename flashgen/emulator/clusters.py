"""barrier.cluster of a cluster of one block: arriving and waiting are two instructions.

A cluster of more blocks is refused at the launch, so the cluster's threads are those of the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.cohort import Cohort
from flashgen.errors import EmulatorError

if TYPE_CHECKING:
    from flashgen.emulator.machine import Machine

Array = npt.NDArray[Any]


class WaitsForCluster:
    """Rows that wait for the phase of the cluster's barrier in which they arrived."""

    def __init__(self, pc: int) -> None:
        self.pc = pc


class ClusterBarrier:
    """The cluster's barrier of each block of a wave; phases are numbered from 1."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        rows = len(machine.row_block)
        self.arrived = np.zeros(rows, np.int64)  # newest phase in which each warp has arrived
        self.passed = np.zeros(rows, np.int64)  # newest phase that each has waited for
        self.used = False
        self.complete = np.zeros(len(machine.blocks), np.int64)
        self.slot = -1  # of the clocks published in this phase; the next: in the last one

    def arrive(self, C: Cohort, pc: int) -> None:
        """barrier.cluster.arrive: never blocks."""
        m = self.machine
        C.pc = pc + 1
        self.used = True
        self._demand(C, pc, self.arrived[C.rows] == self.passed[C.rows], "arrives twice")
        self.arrived[C.rows] += 1
        blocks = np.unique(m.row_block[C.rows])
        if m.shared_races:
            if self.slot < 0:
                self.slot = m.shared_races.clocks.new_slots(2)
            m.shared_races.clocks.publish(C.rows, np.full(C.n, self.slot))
        self.check(blocks)

    def wait(self, C: Cohort, pc: int) -> None:
        """barrier.cluster.wait: blocks until all threads of the block have arrived."""
        m = self.machine
        C.pc = pc + 1
        self._demand(C, pc, self.arrived[C.rows] > self.passed[C.rows], "waits without arriving")
        ready = self.complete[m.row_block[C.rows]] >= self.arrived[C.rows]
        done, waiting = (C, None) if ready.all() else (None, C)
        if ready.any() and not ready.all():
            done, waiting = m.split(C, ready, pc + 1, pc)
        if waiting is not None:
            waiting.pc = pc
            waiting.waits = WaitsForCluster(pc)
        if done is not None:
            self.passed[done.rows] = self.arrived[done.rows]
            if m.shared_races:
                m.shared_races.clocks.acquire(done.rows, np.full(done.n, self.slot + 1))

    def check(self, blocks: Array) -> None:
        """Completes the phases of blocks whose threads have all arrived or exited."""
        m = self.machine
        for block in blocks.tolist():
            rows = np.arange(block * m.warps, (block + 1) * m.warps)
            rows = rows[m.alive[rows].any(axis=1)]
            if not len(rows) or (self.arrived[rows] <= self.complete[block]).any():
                continue
            self.complete[block] += 1
            if m.shared_races:
                published = m.shared_races.clocks.published[block]
                published[self.slot + 1] = published[self.slot]
                published[self.slot] = 0
            for c in m.cohorts:
                if isinstance(c.waits, WaitsForCluster):
                    c.waits = None

    def describe(self, c: Cohort) -> str:
        """What a waiting cohort waits for, for the deadlock report."""
        m, pc = self.machine, c.waits.pc
        block = int(m.row_block[c.rows[0]])
        rows = np.arange(block * m.warps, (block + 1) * m.warps)
        missing = m.alive[rows].any(axis=1) & (self.arrived[rows] <= self.complete[block])
        names = " ".join(map(str, np.flatnonzero(missing)))
        return (
            f"waits at the cluster's barrier: of its {m.warps} warps {names} have not arrived; "
            f"{m.program.describe(pc)}"
        )

    def _demand(self, C: Cohort, pc: int, fine: Array, problem: str) -> None:
        if fine.all():
            return
        row = int(np.argmin(fine))
        self.machine.fail(
            EmulatorError,
            f"a warp {problem} at the cluster's barrier",
            C,
            pc,
            row=row,
            numbers=f"it has arrived {self.arrived[C.rows[row]]} times and waited "
            f"{self.passed[C.rows[row]]} times",
            way_out="follow every barrier.cluster.arrive by one barrier.cluster.wait",
        )
