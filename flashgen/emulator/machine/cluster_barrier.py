"""barrier.cluster, whose arrive and wait are two instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.state.cohort import Cohort, WaitsForCluster
from flashgen.emulator.state.wave import Site, Wave
from flashgen.errors import EmulatorError

Array = npt.NDArray[Any]


class ClusterBarrier:
    """The barrier of each cluster of a wave; phases are numbered from 1."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        rows = len(machine.row_block)
        self.arrived = np.zeros(rows, np.int64)  # newest phase in which each warp has arrived
        self.passed = np.zeros(rows, np.int64)  # newest phase that each warp has waited for
        self.used = False
        self.complete = np.zeros(len(machine.cluster_ids), np.int64)
        self.slot = -1  # slot of the clocks published in this phase; slot + 1: in the previous one

    def arrive(self, cohort: Cohort, pc: int) -> None:
        """barrier.cluster.arrive: never blocks."""
        m = self.machine
        cohort.pc = pc + 1
        self.used = True
        self._demand(cohort, pc, False, "arrives twice")
        self.arrived[cohort.rows] += 1
        clusters = np.unique(m.row_cluster[cohort.rows])
        if m.shared_races:
            if self.slot < 0:
                self.slot = m.shared_races.clocks.new_slots(2)
            m.shared_races.synchronise_lanes(cohort, None)
            m.shared_races.clocks.publish(cohort.rows, np.full(cohort.n, self.slot))
        self.check(clusters)

    def wait(self, cohort: Cohort, pc: int) -> None:
        """barrier.cluster.wait: blocks until all threads of the cluster have arrived."""
        m = self.machine
        cohort.pc = pc + 1
        self._demand(cohort, pc, True, "waits without arriving")
        ready = self.complete[m.row_cluster[cohort.rows]] >= self.arrived[cohort.rows]
        done, waiting = (cohort, None) if ready.all() else (None, cohort)
        if ready.any() and not ready.all():
            done, waiting = m.split(cohort, ready, pc + 1, pc)
        if waiting is not None:
            waiting.pc = pc
            waiting.waits = WaitsForCluster(pc)
        if done is not None:
            self.passed[done.rows] = self.arrived[done.rows]
            if m.shared_races:
                m.shared_races.clocks.acquire(done.rows, np.full(done.n, self.slot + 1))

    def check(self, clusters: Array) -> None:
        """Completes the phases of clusters whose threads have all arrived or exited."""
        m = self.machine
        for cluster in clusters.tolist():
            rows = self._rows(cluster)
            rows = rows[m.alive[rows].any(axis=1)]
            if not len(rows) or (self.arrived[rows] <= self.complete[cluster]).any():
                continue
            self.complete[cluster] += 1
            if m.shared_races:
                published = m.shared_races.clocks.published[cluster]
                published[self.slot + 1] = published[self.slot]
                published[self.slot] = 0
            for c in m.cohorts:
                if isinstance(c.waits, WaitsForCluster):
                    c.waits = None

    def _rows(self, cluster: int) -> Array:
        warps = self.machine.cluster_warps
        return np.arange(cluster * warps, (cluster + 1) * warps)

    def describe(self, c: Cohort) -> list[str]:
        """What a waiting cohort waits for, for the deadlock report."""
        m, pc = self.machine, c.waits.pc
        cluster = int(m.row_cluster[c.rows[0]])
        rows = self._rows(cluster)
        missing = m.alive[rows].any(axis=1) & (self.arrived[rows] <= self.complete[cluster])
        names = " ".join(map(str, np.flatnonzero(missing)))
        return [
            f"{m.warps_text(c.rows)}, waits at the cluster barrier: of its {len(rows)} warps "
            f"{names} have not arrived; {m.program.describe(pc)}"
        ]

    def _demand(self, cohort: Cohort, pc: int, inside: bool, problem: str) -> None:
        """Checks that warps are, or are not, between an arrive and its wait."""
        fine = (self.arrived[cohort.rows] > self.passed[cohort.rows]) == inside
        if fine.all():
            return
        row = int(np.argmin(fine))
        self.machine.fail(
            EmulatorError,
            f"a warp {problem} at the cluster barrier",
            Site(cohort, pc, row),
            f"it has arrived {self.arrived[cohort.rows[row]]} times and waited "
            f"{self.passed[cohort.rows[row]]} times",
            "follow every barrier.cluster.arrive by one barrier.cluster.wait",
        )
