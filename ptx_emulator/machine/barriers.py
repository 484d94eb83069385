"""The sixteen named barriers of a block, and barrier.cluster, whose arrive and wait are two."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.shared.errors import EmulatorError
from ptx_emulator.checks.clocks import NAMED_BARRIERS
from ptx_emulator.errors import BarrierDivergence, DeadlockError, RaceError, way_out
from ptx_emulator.state.cohort import Cohort, WaitsAtBarrier, WaitsForCluster
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Execution, Site, Wave

REDUCTIONS = {"and": np.logical_and, "or": np.logical_or, "popc": np.add}


class Barriers:
    """Barriers of the blocks of a wave."""

    def __init__(self, machine: Wave, blocks: int) -> None:
        self.machine = machine
        self.arrived = np.zeros((blocks, 16), np.int64)  # threads
        self.expected = np.zeros((blocks, 16), np.int64)  # 0: all threads of the block
        self.actions = np.full((blocks, 16), "", object)  # of bar.red: the operation
        self.latest = np.zeros((blocks, 16, 2), np.int64)  # the last arrival: warp, instruction
        # Clocks of the warps when they arrived: since the last completion, and before it.
        self.arrivals = np.zeros((blocks, 16, machine.cluster_warps), np.int64)
        self.completed = np.zeros_like(self.arrivals)
        self.votes: dict[tuple[int, int], list[Array]] = {}

    def uniform(self, here: Execution, value: Any) -> Any:
        """A number or a count of a barrier for each warp, as int64; its lanes must agree."""
        given = np.asarray(value).astype(np.int64)
        if given.ndim < 2 or given.shape[1] == 1:
            return given
        lanes, active = here.spread(given), here.active
        one = np.take_along_axis(lanes, active.argmax(axis=1)[:, None], axis=1)
        differ = active & (lanes != one)
        if differ.any():
            site = here.first(differ)
            what = "lanes of one warp are at a barrier with different numbers or thread counts"
            numbers = f"lane {site.lane} has {lanes[site.row, site.lane]}, an earlier lane "
            numbers += f"{one[site.row, 0]}; the emulator counts the arrivals of whole warps"
            advice = "choose barriers and counts by the number of the warp, not of the thread"
            self.machine.fail(BarrierDivergence, what, site, numbers, advice)
        return one

    def arrive(
        self, here: Execution, number: Any, count: Any, blocking: bool, votes: Any = None
    ) -> None:
        """Warps arrive at barrier ``number``, which counts ``count`` threads (0: all).

        ``votes`` of bar.red: the predicates, and `WaitsAtBarrier.result`.
        """
        m, cohort, pc = self.machine, here.cohort, here.pc
        wide = (np.broadcast_to(value, (cohort.n, 1))[:, 0] for value in (number, count))
        ids, counts = (values.astype(np.int64) for values in wide)
        self._validate(here, ids, counts, blocking)
        counts = np.where(counts > 0, counts, -1)
        blocks = m.row_block[cohort.rows]
        cohort.pc = pc + 1
        if m.shared_races:
            self._in_turn(here, blocks, ids)
            m.clocks.acquire_at_barrier(cohort.rows)
            if m.global_races:
                m.global_races.order.acquire_at_barrier(cohort.rows)
        if votes is None and blocking and self._whole_blocks(blocks, ids, counts):
            if m.shared_races:
                self._order_all(cohort, blocks, ids)
            return
        self._same_action(here, blocks, ids, votes[1][1] if votes else "")
        np.add.at(self.arrived, (blocks, ids), 32)
        self._same_count(here, blocks, ids, counts)
        self.expected[blocks, ids] = counts
        self.latest[blocks, ids] = np.stack([cohort.rows, np.full(cohort.n, pc)], axis=1)
        self._demand_room(blocks, ids)
        if m.shared_races:
            m.shared_races.synchronise_lanes(cohort, None)
            clocks = m.clocks
            self.arrivals[blocks, ids, m.row_member[cohort.rows]] = clocks.clock[cohort.rows]
            clocks.publish(cohort.rows, self._slots(blocks, ids))
        if votes is not None:
            values, lanes = here.spread(votes[0]), cohort.full_mask()
            for row in range(cohort.n):
                entry = self.votes.setdefault((int(blocks[row]), int(ids[row])), [])
                entry.append(values[row][lanes[row]])
        if blocking:
            cohort.waits = WaitsAtBarrier(pc, ids, votes and votes[1])
        self.complete(np.unique(blocks))

    def _slots(self, blocks: Array, ids: Array) -> Array:
        """The slots of the clocks for barriers of blocks: each rank of a cluster has its own."""
        return blocks % self.machine.cluster_size * NAMED_BARRIERS + ids

    def _order_all(self, cohort: Cohort, blocks: Array, ids: Array) -> None:
        """All warps of some blocks have passed a barrier together."""
        m = self.machine
        races = m.shared_races
        assert races is not None
        if m.cluster_size == 1:
            races.barrier_of_all(np.unique(blocks))
            return
        slots = self._slots(blocks, ids)
        races.synchronise_lanes(cohort, None)
        m.clocks.publish(cohort.rows, slots)
        m.clocks.acquire(cohort.rows, slots)
        m.clocks.published[m.row_cluster[cohort.rows], slots] = 0

    def _validate(self, here: Execution, ids: Array, counts: Array, blocking: bool) -> None:
        bad = (ids < 0) | (ids > 15) | (counts % 32 != 0) | (counts < (0 if blocking else 1))
        for row in np.flatnonzero(bad)[:1]:
            what = "a barrier with a number or thread count that PTX does not allow"
            numbers = f"barrier {ids[row]}, {counts[row]} threads"
            way_out = "numbers are 0 to 15, counts multiples of 32; bar.arrive needs a count"
            self.machine.fail(EmulatorError, what, here.site(row), numbers, way_out)

    def _whole_blocks(self, blocks: Array, ids: Array, counts: Array) -> bool:
        """Whether all warps of the blocks arrive together at an idle barrier, the common case."""
        m = self.machine
        if (ids != ids[0]).any() or (counts != counts[0]).any():
            return False
        here = np.bincount(blocks, minlength=len(self.arrived))
        present = here > 0
        alive = m.live_warps[present]
        wanted = np.where(counts[0] > 0, counts[0] // 32, alive)
        whole = (here[present] == alive) & (alive == wanted)
        return bool(whole.all() and not self.arrived[present, int(ids[0])].any())

    def _same_count(self, here: Execution, blocks: Array, ids: Array, counts: Array) -> None:
        before = self.expected[blocks, ids]
        first: dict[tuple[int, int], int] = {}
        for row, key in enumerate(zip(blocks.tolist(), ids.tolist(), strict=True)):
            other = int(before[row]) or first.setdefault(key, int(counts[row]))
            if other != counts[row]:
                what = "warps meet at one barrier with different thread counts"
                numbers = f"barrier {ids[row]}: {counts[row]} here, {other} before"
                numbers += " (-1: all threads of the block)"
                advice = "use the same count in every bar.sync and bar.arrive of a barrier"
                self.machine.fail(EmulatorError, what, here.site(row), numbers, advice)

    def _same_action(self, here: Execution, blocks: Array, ids: Array, action: str) -> None:
        """Checks that only bar.red with one operation, or none, uses a barrier at a time."""
        before = self.actions[blocks, ids]
        for row in np.flatnonzero((self.arrived[blocks, ids] > 0) & (before != action))[:1]:
            mine, other = (f"bar.red.{a}" if a else "bar.sync" for a in (action, before[row]))
            what = "bar.red meets another operation at one barrier, whose result is then undefined"
            numbers = f"barrier {ids[row]}: {mine} here, {other} (or bar.arrive) before"
            numbers = numbers if before[row] == "" else numbers.replace(" (or bar.arrive)", "")
            advice = "use one operation with all warps that use the barrier together"
            self.machine.fail(EmulatorError, what, here.site(row), numbers, advice)
        self.actions[blocks, ids] = action

    def _in_turn(self, here: Execution, blocks: Array, ids: Array) -> None:
        """Checks that warps have seen the last use of a barrier complete before they use it again.

        Otherwise they may count as arrivals of that use. A use may need two arrivals of a warp,
        such as one of bar.arrive and one of bar.sync: if every arrival behind it has seen it
        complete, no other arrival can stand for one of them.
        """
        m, before = self.machine, self.completed[blocks, ids]
        rows = here.cohort.rows
        if not before.any():
            return
        seen = m.clocks.seen[m.row_cluster[rows], m.row_member[rows]]
        late = before > seen[:, : m.cluster_warps]
        bad = late.any(axis=1)
        if not bad.any():
            return
        row = int(np.argmax(bad))
        last = m.program.describe(int(self.latest[blocks[row], ids[row], 1]))
        others = [m.member_name(other) for other in np.flatnonzero(late[row]).tolist()]
        who = ", ".join(others)
        what = "a warp arrives at a barrier again, and nothing shows it that the last use of the "
        what += "barrier is complete: it may count as an arrival of that use"
        numbers = f"barrier {ids[row]}, used by {who}: {last}"
        advice = "use another barrier, or wait for the warps that took part (bar.sync) in between"
        m.fail(RaceError, what, here.site(row), numbers, advice)

    def _demand_room(self, blocks: Array, ids: Array) -> None:
        """Checks that no more threads have arrived together than a barrier counts."""
        m, arrived, expected = self.machine, self.arrived[blocks, ids], self.expected[blocks, ids]
        above = (expected > 0) & (arrived > expected)
        for which in np.flatnonzero(above)[:1]:
            row, pc = self.latest[blocks[which], ids[which]].tolist()
            what = "more threads arrive at a barrier than it counts: which of them it lets pass "
            what += "together depends on their order"
            numbers = f"barrier {ids[which]}: {arrived[which]} of {expected[which]} threads"
            advice = "count all threads that use the barrier together, or use several barriers"
            raise EmulatorError(what, where=m.place(row, None, pc), numbers=numbers, way_out=advice)

    def finish(self) -> None:
        """Called when the blocks of the wave have ended: every arrival must have been needed.

        Raises:
            DeadlockError: threads have arrived at a barrier that never completed.
        """
        m = self.machine
        left, allowed = self.arrived > 0, "barrier_left_incomplete" in m.config.allow
        if not m.config.check or allowed or not left.any():
            return
        block, barrier = (int(i) for i in np.argwhere(left)[0])
        row, pc = self.latest[block, barrier].tolist()
        what = "a block ends while threads have arrived at a barrier that never completes"
        numbers = f"barrier {barrier}: {self.arrived[block, barrier]} of "
        numbers += f"{self.expected[block, barrier]} threads have arrived"
        advice = "let as many threads arrive (bar.arrive) or wait (bar.sync) as the barrier counts"
        advice += way_out("barrier_left_incomplete")
        raise DeadlockError(what, where=m.place(row, None, pc), numbers=numbers, way_out=advice)

    def after_exit(self, blocks: Array) -> None:
        """Releases barriers of all threads of a block that waited for exited warps only."""
        if len(blocks) and self.arrived[blocks].any():
            self.complete(blocks)

    def complete(self, blocks: Array) -> None:
        """Releases every barrier of some blocks at which all expected threads have arrived."""
        m = self.machine
        arrived, expected = self.arrived[blocks], self.expected[blocks]
        target = np.where(expected > 0, expected, m.live_warps[blocks][:, None] * 32)
        full = (arrived >= target) & (arrived > 0)
        for place, barrier in np.argwhere(full):
            self._release(int(blocks[place]), int(barrier))

    def _release(self, block: int, barrier: int) -> None:
        m = self.machine
        self.arrived[block, barrier] = 0
        self.expected[block, barrier] = 0
        self.completed[block, barrier] = self.arrivals[block, barrier]
        self.arrivals[block, barrier] = 0
        votes = self.votes.pop((block, barrier), None)
        waiting = []
        for c in list(m.cohorts):
            if not isinstance(c.waits, WaitsAtBarrier):
                continue
            free = (m.row_block[c.rows] == block) & (c.waits.ids == barrier)
            if free.any():
                waiting.append(self._free(c, free, votes))
        if m.shared_races:
            rows = np.concatenate([c.rows for c in waiting]) if waiting else np.zeros(0, np.int64)
            slot = int(self._slots(np.array([block]), np.array([barrier]))[0])
            # The warps that waited are ordered after all that arrived.
            m.clocks.acquire(rows, np.full(len(rows), slot))
            m.clocks.published[block // m.cluster_size, slot] = 0

    def _free(self, c: Cohort, free: Array, votes: list[Array] | None) -> Cohort:
        m, waits = self.machine, c.waits
        released = c
        c.waits = None
        if not free.all():
            released, rest = m.split(c, free, c.pc, c.pc)
            rest.waits = WaitsAtBarrier(waits.pc, waits.ids[~free], waits.result)
        if waits.result is not None and votes is not None:
            register, operation, dtype = waits.result
            lanes = np.concatenate(votes)
            value = REDUCTIONS[operation].reduce(lanes.astype(np.int64))
            released.registers[register] = np.dtype(dtype).type(value)
        return released

    def describe(self, c: Cohort) -> list[str]:
        """What the warps of a waiting cohort wait for, for the deadlock report."""
        m, lines = self.machine, []
        for barrier in np.unique(c.waits.ids).tolist():
            rows = c.rows[c.waits.ids == barrier]
            block = int(m.row_block[rows[0]])
            expected, arrived = (int(t[block, barrier]) for t in (self.expected, self.arrived))
            expected = expected if expected > 0 else int(m.live_warps[block]) * 32
            state = f"{arrived} of {expected} threads have arrived"
            at = m.program.describe(c.waits.pc)
            lines.append(f"{m.warps_text(rows)}, waits at barrier {barrier}: {state}; {at}")
        return lines


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

    def arrive(self, cohort: Cohort, pc: int, relaxed: bool = False) -> None:
        """barrier.cluster.arrive: never blocks.

        ``relaxed`` publishes what the last fence of each warp releases, and no access after it.
        """
        m = self.machine
        cohort.pc = pc + 1
        self.used = True
        self._demand(cohort, pc, False, "arrives twice")
        self.arrived[cohort.rows] += 1
        clusters = np.unique(m.row_cluster[cohort.rows])
        if m.shared_races:
            if self.slot < 0:
                self.slot = m.clocks.new_slots(2)
            slots = np.full(cohort.n, self.slot)
            if relaxed:
                m.clocks.publish_fenced(cohort.rows, slots)
            else:
                m.shared_races.synchronise_lanes(cohort, None)
                m.clocks.publish(cohort.rows, slots)
        self.check(clusters)

    def wait(self, cohort: Cohort, pc: int) -> None:
        """barrier.cluster.wait: blocks until all threads of the cluster have arrived."""
        m = self.machine
        self._demand(cohort, pc, True, "waits without arriving")
        ready = self.complete[m.row_cluster[cohort.rows]] >= self.arrived[cohort.rows]
        done = m.hold(cohort, ready, pc, WaitsForCluster(pc), pc + 1)
        if done is not None:
            self.passed[done.rows] = self.arrived[done.rows]
            if m.shared_races:
                m.clocks.acquire(done.rows, np.full(done.n, self.slot + 1))

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
                published = m.clocks.published[cluster]
                published[self.slot + 1] = published[self.slot]
                published[self.slot] = 0
            m.wake(WaitsForCluster)

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
        what = f"a warp {problem} at the cluster barrier"
        numbers = f"it has arrived {self.arrived[cohort.rows[row]]} times and waited "
        numbers += f"{self.passed[cohort.rows[row]]} times"
        advice = "follow every barrier.cluster.arrive by one barrier.cluster.wait"
        self.machine.fail(EmulatorError, what, Site(cohort, pc, row), numbers, advice)
