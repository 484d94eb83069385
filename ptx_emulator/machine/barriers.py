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

    def uniform(self, execution: Execution, value: Any) -> Any:
        """A number or a count of a barrier for each warp, as int64; its lanes must agree."""
        values = np.asarray(value).astype(np.int64)
        if values.ndim < 2 or values.shape[1] == 1:
            return values
        lanes, active = execution.spread(values), execution.active
        first_active = np.take_along_axis(lanes, active.argmax(axis=1)[:, None], axis=1)
        differ = active & (lanes != first_active)
        if differ.any():
            site = execution.first(differ)
            what = "lanes of one warp are at a barrier with different numbers or thread counts"
            numbers = f"lane {site.lane} has {lanes[site.row, site.lane]}, an earlier lane "
            numbers += f"{first_active[site.row, 0]}; "
            numbers += "the emulator counts the arrivals of whole warps"
            advice = "choose barriers and counts by the number of the warp, not of the thread"
            self.machine.fail(BarrierDivergence, what, site, numbers, advice)
        return first_active

    def arrive(
        self, execution: Execution, number: Any, count: Any, blocking: bool, votes: Any = None
    ) -> None:
        """Warps arrive at barrier ``number``, which counts ``count`` threads (0: all).

        ``votes`` of bar.red: the predicates, and `WaitsAtBarrier.result`.
        """
        machine, cohort, pc = self.machine, execution.cohort, execution.pc
        wide = (np.broadcast_to(value, (cohort.n, 1))[:, 0] for value in (number, count))
        ids, counts = (values.astype(np.int64) for values in wide)
        self._validate(execution, ids, counts, blocking)
        counts = np.where(counts > 0, counts, -1)
        blocks = machine.row_block[cohort.rows]
        cohort.pc = pc + 1
        if machine.shared_races:
            self._in_turn(execution, blocks, ids)
            machine.clocks.acquire_at_barrier(cohort.rows)
            if machine.global_races:
                machine.global_races.order.acquire_at_barrier(cohort.rows)
        if votes is None and blocking and self._whole_blocks(blocks, ids, counts):
            if machine.shared_races:
                self._order_all(cohort, blocks, ids)
            return
        self._same_action(execution, blocks, ids, votes[1][1] if votes else "")
        np.add.at(self.arrived, (blocks, ids), 32)
        self._same_count(execution, blocks, ids, counts)
        self.expected[blocks, ids] = counts
        self.latest[blocks, ids] = np.stack([cohort.rows, np.full(cohort.n, pc)], axis=1)
        self._demand_room(blocks, ids)
        if machine.shared_races:
            machine.shared_races.synchronise_lanes(cohort, None)
            clocks = machine.clocks
            self.arrivals[blocks, ids, machine.row_member[cohort.rows]] = clocks.clock[cohort.rows]
            clocks.publish(cohort.rows, self._slots(blocks, ids))
        if votes is not None:
            values, lanes = execution.spread(votes[0]), cohort.full_mask()
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
        """Orders the warps of blocks that have passed a barrier together."""
        machine = self.machine
        races = machine.shared_races
        assert races is not None
        if machine.cluster_size == 1:
            races.barrier_of_all(np.unique(blocks))
            return
        slots = self._slots(blocks, ids)
        races.synchronise_lanes(cohort, None)
        machine.clocks.publish(cohort.rows, slots)
        machine.clocks.acquire(cohort.rows, slots)
        machine.clocks.published[machine.row_cluster[cohort.rows], slots] = 0

    def _validate(self, execution: Execution, ids: Array, counts: Array, blocking: bool) -> None:
        bad = (ids < 0) | (ids > 15) | (counts % 32 != 0) | (counts < (0 if blocking else 1))
        for row in np.flatnonzero(bad)[:1]:
            what = "a barrier with a number or thread count that PTX does not allow"
            numbers = f"barrier {ids[row]}, {counts[row]} threads"
            way_out = "numbers are 0 to 15, counts multiples of 32; bar.arrive needs a count"
            self.machine.fail(EmulatorError, what, execution.site(row), numbers, way_out)

    def _whole_blocks(self, blocks: Array, ids: Array, counts: Array) -> bool:
        """Whether all warps of the blocks arrive together at an idle barrier, the common case."""
        machine = self.machine
        if (ids != ids[0]).any() or (counts != counts[0]).any():
            return False
        arriving = np.bincount(blocks, minlength=len(self.arrived))
        present = arriving > 0
        alive = machine.live_warps[present]
        wanted = np.where(counts[0] > 0, counts[0] // 32, alive)
        whole = (arriving[present] == alive) & (alive == wanted)
        return bool(whole.all() and not self.arrived[present, int(ids[0])].any())

    def _same_count(self, execution: Execution, blocks: Array, ids: Array, counts: Array) -> None:
        before = self.expected[blocks, ids]
        first: dict[tuple[int, int], int] = {}
        for row, key in enumerate(zip(blocks.tolist(), ids.tolist(), strict=True)):
            other = int(before[row]) or first.setdefault(key, int(counts[row]))
            if other != counts[row]:
                what = "warps meet at one barrier with different thread counts"
                numbers = f"barrier {ids[row]}: {counts[row]} here, {other} before"
                numbers += " (-1: all threads of the block)"
                advice = "use the same count in every bar.sync and bar.arrive of a barrier"
                self.machine.fail(EmulatorError, what, execution.site(row), numbers, advice)

    def _same_action(self, execution: Execution, blocks: Array, ids: Array, action: str) -> None:
        """Checks that only bar.red with one operation, or none, uses a barrier at a time."""
        before = self.actions[blocks, ids]
        for row in np.flatnonzero((self.arrived[blocks, ids] > 0) & (before != action))[:1]:
            current, other = (f"bar.red.{a}" if a else "bar.sync" for a in (action, before[row]))
            what = "bar.red meets another operation at one barrier, whose result is then undefined"
            numbers = f"barrier {ids[row]}: {current} here, {other} (or bar.arrive) before"
            numbers = numbers if before[row] == "" else numbers.replace(" (or bar.arrive)", "")
            advice = "use one operation with all warps that use the barrier together"
            self.machine.fail(EmulatorError, what, execution.site(row), numbers, advice)
        self.actions[blocks, ids] = action

    def _in_turn(self, execution: Execution, blocks: Array, ids: Array) -> None:
        """Checks that warps have seen the last use of a barrier complete before they use it again.

        Otherwise they may count as arrivals of that use. A use may need two arrivals of a warp,
        such as one of bar.arrive and one of bar.sync: if every arrival behind it has seen it
        complete, no other arrival can stand for one of them.
        """
        machine, before = self.machine, self.completed[blocks, ids]
        rows = execution.cohort.rows
        if not before.any():
            return
        seen = machine.clocks.seen[machine.row_cluster[rows], machine.row_member[rows]]
        late = before > seen[:, : machine.cluster_warps]
        bad = late.any(axis=1)
        if not bad.any():
            return
        row = int(np.argmax(bad))
        last = machine.program.describe(int(self.latest[blocks[row], ids[row], 1]))
        others = [machine.member_name(other) for other in np.flatnonzero(late[row]).tolist()]
        warps = ", ".join(others)
        what = "a warp arrives at a barrier again, and nothing shows it that the last use of the "
        what += "barrier is complete: it may count as an arrival of that use"
        numbers = f"barrier {ids[row]}, used by {warps}: {last}"
        advice = "use another barrier, or wait for the warps that took part (bar.sync) in between"
        machine.fail(RaceError, what, execution.site(row), numbers, advice)

    def _demand_room(self, blocks: Array, ids: Array) -> None:
        """Checks that no more threads have arrived together than a barrier counts."""
        machine = self.machine
        arrived, expected = self.arrived[blocks, ids], self.expected[blocks, ids]
        above = (expected > 0) & (arrived > expected)
        for index in np.flatnonzero(above)[:1]:
            row, pc = self.latest[blocks[index], ids[index]].tolist()
            what = "more threads arrive at a barrier than it counts: which of them it lets pass "
            what += "together depends on their order"
            numbers = f"barrier {ids[index]}: {arrived[index]} of {expected[index]} threads"
            advice = "count all threads that use the barrier together, or use several barriers"
            where = machine.location(row, None, pc)
            raise EmulatorError(what, where=where, numbers=numbers, way_out=advice)

    def finish(self) -> None:
        """Called when the blocks of the wave have ended: every arrival must have been needed.

        Raises:
            DeadlockError: threads have arrived at a barrier that never completed.
        """
        machine = self.machine
        left, allowed = self.arrived > 0, "barrier_left_incomplete" in machine.config.allow
        if not machine.config.check or allowed or not left.any():
            return
        block, barrier = (int(i) for i in np.argwhere(left)[0])
        row, pc = self.latest[block, barrier].tolist()
        what = "a block ends while threads have arrived at a barrier that never completes"
        numbers = f"barrier {barrier}: {self.arrived[block, barrier]} of "
        numbers += f"{self.expected[block, barrier]} threads have arrived"
        advice = "let as many threads arrive (bar.arrive) or wait (bar.sync) as the barrier counts"
        advice += way_out("barrier_left_incomplete")
        where = machine.location(row, None, pc)
        raise DeadlockError(what, where=where, numbers=numbers, way_out=advice)

    def after_exit(self, blocks: Array) -> None:
        """Releases barriers of all threads of a block that waited for exited warps only."""
        if len(blocks) and self.arrived[blocks].any():
            self.complete(blocks)

    def complete(self, blocks: Array) -> None:
        """Releases every barrier of some blocks at which all expected threads have arrived."""
        machine = self.machine
        arrived, expected = self.arrived[blocks], self.expected[blocks]
        target = np.where(expected > 0, expected, machine.live_warps[blocks][:, None] * 32)
        full = (arrived >= target) & (arrived > 0)
        for index, barrier in np.argwhere(full):
            self._release(int(blocks[index]), int(barrier))

    def _release(self, block: int, barrier: int) -> None:
        machine = self.machine
        self.arrived[block, barrier] = 0
        self.expected[block, barrier] = 0
        self.completed[block, barrier] = self.arrivals[block, barrier]
        self.arrivals[block, barrier] = 0
        votes = self.votes.pop((block, barrier), None)
        waiting = []
        for cohort in list(machine.cohorts):
            if not isinstance(cohort.waits, WaitsAtBarrier):
                continue
            free = (machine.row_block[cohort.rows] == block) & (cohort.waits.ids == barrier)
            if free.any():
                waiting.append(self._free(cohort, free, votes))
        if machine.shared_races:
            rows = np.concatenate([c.rows for c in waiting]) if waiting else np.zeros(0, np.int64)
            slot = int(self._slots(np.array([block]), np.array([barrier]))[0])
            # The warps that waited are ordered after all that arrived.
            machine.clocks.acquire(rows, np.full(len(rows), slot))
            machine.clocks.published[block // machine.cluster_size, slot] = 0

    def _free(self, cohort: Cohort, free: Array, votes: list[Array] | None) -> Cohort:
        machine, waits = self.machine, cohort.waits
        released = cohort
        cohort.waits = None
        if not free.all():
            released, rest = machine.split(cohort, free, cohort.pc, cohort.pc)
            rest.waits = WaitsAtBarrier(waits.pc, waits.ids[~free], waits.result)
        if waits.result is not None and votes is not None:
            register, operation, dtype = waits.result
            lanes = np.concatenate(votes)
            value = REDUCTIONS[operation].reduce(lanes.astype(np.int64))
            released.registers[register] = np.dtype(dtype).type(value)
        return released

    def describe(self, cohort: Cohort) -> list[str]:
        """What the warps of a waiting cohort wait for, for the deadlock report."""
        machine, lines = self.machine, []
        for barrier in np.unique(cohort.waits.ids).tolist():
            rows = cohort.rows[cohort.waits.ids == barrier]
            block = int(machine.row_block[rows[0]])
            expected, arrived = (int(t[block, barrier]) for t in (self.expected, self.arrived))
            expected = expected if expected > 0 else int(machine.live_warps[block]) * 32
            state = f"{arrived} of {expected} threads have arrived"
            instruction = machine.program.describe(cohort.waits.pc)
            lines.append(
                f"{machine.warps_text(rows)}, waits at barrier {barrier}: {state}; {instruction}"
            )
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
        machine = self.machine
        cohort.pc = pc + 1
        self.used = True
        self._demand(cohort, pc, False, "arrives twice")
        self.arrived[cohort.rows] += 1
        clusters = np.unique(machine.row_cluster[cohort.rows])
        if machine.shared_races:
            if self.slot < 0:
                self.slot = machine.clocks.new_slots(2)
            slots = np.full(cohort.n, self.slot)
            if relaxed:
                machine.clocks.publish_fenced(cohort.rows, slots)
            else:
                machine.shared_races.synchronise_lanes(cohort, None)
                machine.clocks.publish(cohort.rows, slots)
        self.check(clusters)

    def wait(self, cohort: Cohort, pc: int) -> None:
        """barrier.cluster.wait: blocks until all threads of the cluster have arrived."""
        machine = self.machine
        self._demand(cohort, pc, True, "waits without arriving")
        ready = self.complete[machine.row_cluster[cohort.rows]] >= self.arrived[cohort.rows]
        done = machine.hold(cohort, ready, pc, WaitsForCluster(pc), pc + 1)
        if done is not None:
            self.passed[done.rows] = self.arrived[done.rows]
            if machine.shared_races:
                machine.clocks.acquire(done.rows, np.full(done.n, self.slot + 1))

    def check(self, clusters: Array) -> None:
        """Completes the phases of clusters whose threads have all arrived or exited."""
        machine = self.machine
        for cluster in clusters.tolist():
            rows = self._rows(cluster)
            rows = rows[machine.alive[rows].any(axis=1)]
            if not len(rows) or (self.arrived[rows] <= self.complete[cluster]).any():
                continue
            self.complete[cluster] += 1
            if machine.shared_races:
                published = machine.clocks.published[cluster]
                published[self.slot + 1] = published[self.slot]
                published[self.slot] = 0
            machine.wake(WaitsForCluster)

    def _rows(self, cluster: int) -> Array:
        warps = self.machine.cluster_warps
        return np.arange(cluster * warps, (cluster + 1) * warps)

    def describe(self, cohort: Cohort) -> list[str]:
        """What a waiting cohort waits for, for the deadlock report."""
        machine, pc = self.machine, cohort.waits.pc
        cluster = int(machine.row_cluster[cohort.rows[0]])
        rows = self._rows(cluster)
        missing = machine.alive[rows].any(axis=1) & (self.arrived[rows] <= self.complete[cluster])
        names = " ".join(map(str, np.flatnonzero(missing)))
        warps = machine.warps_text(cohort.rows)
        return [
            f"{warps}, waits at the cluster barrier: of its {len(rows)} warps "
            f"{names} have not arrived; {machine.program.describe(pc)}"
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
