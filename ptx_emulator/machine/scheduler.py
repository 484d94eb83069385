"""Schedules the cohorts of a wave, and splits them at branches and exits.

The scheduler runs the runnable cohort with the lowest program counter and first merges the cohorts
that are at that instruction. This reconverges loops and branches of any shape.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from flashgen.shared.errors import EmulatorError
from ptx_emulator.checks import unfinished_copies
from ptx_emulator.errors import BarrierDivergence, DeadlockError, StepLimit
from ptx_emulator.isa.segments import Segments
from ptx_emulator.ptx.instructions import is_warp_barrier
from ptx_emulator.ptx.program import Region
from ptx_emulator.state.cohort import (
    Cohort,
    WaitsAtBarrier,
    WaitsForCluster,
    WaitsForPhase,
    WaitsForRegisters,
    WaitsForWarp,
    WaitsForWarpgroup,
    merge,
    splice,
)
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Site, Wave, ranges_text

# Turns of polling, and nothing else, of each cohort until the launch counts as a deadlock.
_MOST_TURNS = 16
# Of FAIR_EVERY steps the cohort that ran longest ago runs the last FAIR_STEPS, so that polling
# starves none: the holder of a lock, which others poll at earlier instructions, gives it back then.
FAIR_EVERY, FAIR_STEPS = 256, 8
MOST_AHEAD = 1 << 12  # steps after which the launch before this one ends, while warps wait for it
_MOST_LINES = 24  # of the report of a deadlock


class Scheduler(Wave):
    """The part of the machine that executes segments, and reports what ends a launch."""

    segments: Segments
    favoured: Cohort | None = None

    # ---- scheduling

    def _run(self, cohort: Cohort) -> None:
        """Executes one segment of a cohort."""
        program, counters, recorder = self.program, self.counters, self.recorder
        check = self.config.check
        masked, profile = cohort.mask is not None, recorder is not None
        segment = self.segments.segment_at(cohort.pc, masked, check, profile)
        self.steps += 1
        if self.steps > self.config.step_limit:
            self._too_many_steps(cohort)
        cohort.age, self.changed = self.steps, False
        mask, rows, others = cohort.mask, cohort.n, len(self.cohorts)
        try:
            if segment.run(self, cohort):
                return
        except EmulatorError:
            raise
        except Exception as problem:
            if hasattr(problem, "add_note"):
                near = program.source_line(segment.start)
                problem.add_note(f"while emulating {program.name} near {near}")
            raise
        spin = program.repeats.spins.get(segment.start)
        cohort.polls |= spin is not None
        stays = spin is not None and program.repeats.spins.get(cohort.pc) == spin
        stays = stays and rows == cohort.n and mask is cohort.mask and others == len(self.cohorts)
        stays = stays and not self.changed
        self.idle_steps = self.idle_steps + 1 if stays else 0  # of nothing but polling
        key = (segment.start, segment.end)
        counters.segments[key] = counters.segments.get(key, 0) + rows
        counters.segment_runs += 1
        if recorder is not None:
            recorder.executed(key, rows, mask)

    def _pick(self) -> Cohort:
        """The cohort to run next, merged with all cohorts at the same instruction."""
        if self.dependent and self.steps % MOST_AHEAD == 0:  # however the others poll
            self.dependent.release()
        while not (runnable := [c for c in self.cohorts if c.waits is None]):
            goes_on = self._deliver() or self._meet_at_warp_barriers()
            if not goes_on and not (self.dependent and self.dependent.release()):
                self._report_deadlock()
        if self.idle_steps > _MOST_TURNS * FAIR_EVERY * len(runnable):
            self.idle_steps = 0
            if not self._deliver() and not (self.dependent and self.dependent.release()):
                self._report_deadlock()
        if self.program.asynchronous or self.program.repeats.spins:
            runnable = self._not_polling(runnable)
            self._deliver_at_random()
        if self.random:
            chosen = self.random.choice(runnable)
            if self.random.random() < 0.5:
                chosen = min(runnable, key=lambda c: c.pc)
        elif len(runnable) > 1 and self.steps % FAIR_EVERY >= FAIR_EVERY - FAIR_STEPS:
            chosen = self._longest_ago(runnable)
        else:
            chosen = min(runnable, key=lambda c: c.pc)
        pc = chosen.pc
        if len(self.cohorts) == 1:
            return chosen
        same = [c for c in self.cohorts if c.pc == pc and c.waits is None]
        # Lanes that wait for the rest of their warp are merged if a part of the rest is here. Other
        # waiting warps are not: they would have to wait again, and the merged cohort with them.
        for cohort in self.cohorts:
            if cohort.pc == pc and isinstance(cohort.waits, WaitsForWarp):
                partners = cohort.waits.partners(cohort.rows)
                if any(np.isin(partners, other.rows).any() for other in same):
                    same.append(cohort)
        if len(same) == 1:
            return chosen
        merged = merge(same, self.program.live_list(pc))
        self.cohorts = [c for c in self.cohorts if c not in same]
        self.cohorts.append(merged)
        return merged

    def _longest_ago(self, runnable: list[Cohort]) -> Cohort:
        """The cohort that ran longest ago when these steps began."""
        begins = self.steps % FAIR_EVERY == FAIR_EVERY - FAIR_STEPS
        if self.favoured is None or begins or not any(c is self.favoured for c in runnable):
            self.favoured = min(runnable, key=lambda c: c.age)
        return self.favoured

    def _not_polling(self, runnable: list[Cohort]) -> list[Cohort]:
        """The cohorts whose last test of an mbarrier or a flag did not fail; all if none.

        Copies arrive when all poll. The loops of some are long: they need not poll all at once.
        """
        busy = [cohort for cohort in runnable if not cohort.polls]
        all_failed = all(cohort.polls or cohort.failed for cohort in runnable)
        for cohort in runnable:
            cohort.polls = False
            cohort.failed &= not all_failed
        if all_failed and not self._deliver() and not busy and self.dependent:
            self.dependent.release()
        return busy or runnable

    def _deliver(self) -> bool:
        """Executes copies into shared memory, and arrivals that wait for copies: all of them, or
        with a seed one of each kind.

        Returns:
            Whether there were any.
        """
        delivered = False
        pairs: Any = ((self.bulk, self.bulk.incoming), (self.copies, self.copies.arrivals))
        for part, pending in pairs:
            delivered |= bool(pending)
            for item in [self.random.choice(pending)] if self.random and pending else list(pending):
                part.execute(item)
        return delivered

    def _meet_at_warp_barriers(self) -> bool:
        """Lets lanes of a warp go on that wait for each other at different bar.warp.sync.

        Returns:
            Whether there were any.
        """
        lanes: dict[tuple[int, bytes], Array] = {}  # by warp and the lanes that it needs
        waiting = []
        for cohort in self.cohorts:
            waits = cohort.waits
            if isinstance(waits, WaitsForWarp) and is_warp_barrier(self.program.code[waits.pc]):
                needed = [lanes_needed.tobytes() for lanes_needed in waits.needed]
                meetings = list(zip(cohort.rows.tolist(), needed, strict=True))
                waiting.append((cohort, meetings))
                for meeting, mask in zip(meetings, cohort.full_mask(), strict=True):
                    lanes[meeting] = lanes.get(meeting, False) | mask
        met = {meeting for meeting, present in lanes.items() if present.tobytes() == meeting[1]}
        for cohort, meetings in waiting if met else ():
            free = np.array([meeting in met for meeting in meetings])
            waits, part = cohort.waits, cohort
            if not free.any():
                continue
            if not free.all():
                part, rest = self.split(cohort, free, cohort.pc, cohort.pc)
                rest.waits = WaitsForWarp(waits.pc, waits.needed[~free])
            part.pc, part.waits = waits.pc + 1, None
            if self.shared_races:
                together = part.with_mask(waits.needed[free], part.pc)
                self.shared_races.synchronise_lanes(together, None)
        return bool(met)

    def _deliver_at_random(self) -> None:
        """With a seed, executes a copy with probability 0.1, and an arrival that copies delay."""
        random = self.random
        pairs: Any = ((self.bulk, self.bulk.flying), (self.copies, self.copies.arrivals))
        for part, pending in pairs if random else ():
            if random and pending and random.random() < 0.1:
                part.execute(random.choice(pending))

    def branch(self, cohort: Cohort, taken: Any, target: int, after: int) -> None:
        """Sends each lane to ``target`` or to ``after``."""
        mask = cohort.mask
        jump, stay = (taken, ~taken) if mask is None else (taken & mask, ~taken & mask)
        if not stay.any():
            cohort.pc = target
            return
        if not jump.any():
            cohort.pc = after
            return
        region = self.program.region(after, target)
        if jump.shape[1] == 1:  # whole warps
            if region is None:
                self.split(cohort, jump[:, 0], target, after)
            else:
                self._run_region(cohort, stay[:, 0], region, after, target)
            return
        jump, stay = (np.broadcast_to(lanes, (cohort.n, 32)) for lanes in (jump, stay))
        if region is not None and not region.warp_wide:
            self._run_region(cohort, np.asarray(stay.any(axis=1)), region, after, target, stay)
            return
        goes, stays = np.asarray(jump.any(axis=1)), np.asarray(stay.any(axis=1))
        mixed = goes & stays
        live = self.program.live_list
        parts = []
        if not goes.all() or not stays.all():
            for keep, pc in ((goes & ~mixed, target), (stays & ~mixed, after)):
                if keep.any():
                    parts.append(cohort.part(keep, live(pc), pc))
        if mixed.any():
            both = cohort
            if not mixed.all():
                both = cohort.part(mixed, sorted({*live(target), *live(after)}), target)
            parts.append(both.with_mask(jump[mixed], target))
            parts.append(both.with_mask(stay[mixed], after))
        self.replace(cohort, parts)

    def _run_region(
        self, cohort: Cohort, keep: Array, region: Region, start: int, end: int, lanes: Any = None
    ) -> None:
        """Runs a short if for some rows (or lanes), instead of splitting the cohort."""
        part = cohort.part(keep, region.inputs, start)
        if lanes is not None:
            lanes = lanes[keep]
            part = part.with_mask(lanes, start)
        while part.pc != end:
            self._run(part)
        splice(cohort, part, keep, region.outputs, lanes)
        cohort.pc = end

    def branch_table(self, cohort: Cohort, index: Any, targets: list[int], pc: int) -> None:
        """brx.idx: one two-way branch after the other."""
        wanted = np.zeros((len(self.row_block), 32), np.int64)
        wanted[cohort.rows] = index
        parts = [cohort]
        for value, target in enumerate(targets):
            undecided = []
            for part in parts:
                before = set(self.cohorts)
                self.branch(part, wanted[part.rows] == value, target, pc)
                new = [c for c in self.cohorts if c is part or c not in before]
                undecided += [c for c in new if c.pc == pc]
            parts = undecided
        if parts:
            what = "brx.idx with an index outside its table"
            way_out = "check the switch that this branch implements"
            self.fail(EmulatorError, what, Site(parts[0], pc), f"{len(targets)} targets", way_out)

    def exit(self, cohort: Cohort, leaving: Any, after: int = -1) -> None:
        """Ends the lanes in ``leaving`` (None: all active ones)."""
        gone = cohort.full_mask()
        if leaving is not None:
            gone = gone & leaving
        if not gone.any():
            cohort.pc = after
            return
        before = self.alive[cohort.rows].any(axis=1)
        self.alive[cohort.rows] &= ~gone
        dead: Array = np.asarray(before & ~self.alive[cohort.rows].any(axis=1))
        if self.wgmma.chains:
            self.wgmma.warps_exit(cohort, dead)
        blocks = self.row_block[cohort.rows[dead]]
        np.subtract.at(self.live_warps, blocks, 1)
        stay = cohort.full_mask() & ~gone
        rows_left: Array = np.asarray(stay.any(axis=1))
        if rows_left.any():
            rest = cohort
            if not rows_left.all():
                rest = cohort.part(rows_left, self.program.live_list(after), after)
            self.replace(cohort, [rest.with_mask(stay[rows_left], after)])
        else:
            self.cohorts.remove(cohort)
        self.wake(WaitsForWarp)
        self.barriers.after_exit(np.unique(blocks))
        ended = np.unique(blocks)
        ended = ended[self.live_warps[ended] == 0]
        if self.cluster_size > 1 and self.shared_races:
            self.shared_races.block_exits(ended)
        if len(ended):
            unfinished_copies.block_exits(self, ended)
        if self.cluster.used:
            self.cluster.check(np.unique(blocks // self.cluster_size))

    def wait_for_warp(self, cohort: Cohort, members: Any, pc: int) -> bool:
        """Whether a warp-wide instruction must wait for lanes at other instructions."""
        assert cohort.mask is not None
        alive = self.alive[cohort.rows]
        needed: Any = alive
        if members is not None:
            bits = (np.asarray(members)[..., None] >> np.arange(32, dtype=np.uint32)) & 1
            wanted = bits.astype(bool) & cohort.mask[:, :, None]  # (n, 32, 32)
            needed = alive & wanted.any(axis=1)
        complete: Any = np.asarray((cohort.mask | ~needed).all(axis=1))
        if complete.all():
            return False
        self.hold(cohort, complete, pc, WaitsForWarp(pc, needed[~complete]), pc)
        return True

    def wait_for_warpgroup(self, cohort: Cohort, pc: int) -> bool:
        """Whether a warpgroup-wide instruction must wait for other warps of its warpgroups."""
        rows = cohort.rows
        if cohort.n % 4 == 0:
            quads = rows.reshape(-1, 4)
            if (quads[:, 3] - quads[:, 0] == 3).all() and not (
                self.row_warp[quads[:, 0]] & 3
            ).any():
                if cohort.mask is None:
                    return False
                self._fail_incomplete(cohort, pc, int(np.argmin(cohort.mask.all(axis=1))))
        first = rows - (self.row_warp[rows] & 3)
        members = first[:, None] + np.arange(4)
        inside = (self.row_warp[first] + 4 <= self.warps)[:, None]
        existing = np.where(inside, members, first[:, None])
        gone = ~inside[:, 0] | ~self.alive[existing].all(axis=(1, 2))
        if gone.any():
            self._fail_incomplete(cohort, pc, int(np.argmax(gone)))
        complete: Array = np.asarray(np.isin(members, rows).all(axis=1))
        self.hold(cohort, complete, pc, WaitsForWarpgroup(pc, np.unique(members[~complete])), pc)
        return True

    def _fail_incomplete(self, cohort: Cohort, pc: int, row: int) -> None:
        warp = int(self.row_warp[cohort.rows[row]])
        low = warp - warp % 4
        a, b, c, d = (
            int(self.alive[cohort.rows[row] - warp + w].sum()) if w < self.warps else 0
            for w in range(low, low + 4)
        )
        what = "an incomplete warpgroup executes a warpgroup-wide instruction"
        numbers = f"warps {low} to {low + 3} have {a}, {b}, {c} and {d} threads left; blocks have "
        numbers += f"{self.threads}"
        way_out = "execute it in all 128 threads of four warps, the first a multiple of 4"
        self.fail(EmulatorError, what, Site(cohort, pc, row), numbers, way_out)

    # ---- errors that concern the whole machine

    def _too_many_steps(self, cohort: Cohort) -> None:
        numbers = f"{self.steps:,} segments executed, limit {self.config.step_limit:,}"
        way_out = "look for an endless loop, or raise step_limit of emulator.launch"
        site = Site(cohort, cohort.pc)
        self.fail(StepLimit, "the launch does not come to an end", site, numbers, way_out)

    def _report_deadlock(self) -> NoReturn:
        """Reports what each cohort waits for, when no cohort can run.

        Raises:
            BarrierDivergence: a part of a warp or warpgroup waits for the rest.
            DeadlockError: otherwise.
        """
        lines = []
        partial = None
        described = {
            WaitsAtBarrier: self.barriers.describe,
            WaitsForCluster: self.cluster.describe,
            WaitsForPhase: self.mbarriers.describe,
            WaitsForRegisters: self.registers.describe,
        }
        for cohort in self.cohorts:
            if type(cohort.waits) in described:
                lines += described[type(cohort.waits)](cohort)
                continue
            lanes = ranges_text(cohort.full_mask()[0])
            alive = ranges_text(self.alive[int(cohort.rows[0])])
            lanes_text = f"{self.warps_text(cohort.rows)}, lanes {lanes} of {alive},"
            if cohort.waits is None:
                pc = self.program.repeats.spins.get(cohort.pc, cohort.pc)
                lines.append(f"{lanes_text} poll at {self.program.describe(pc)}")
                continue
            pc = cohort.waits.pc
            # The first one in program order is inside the branch; the others wait at the point of
            # reconvergence.
            if not self._comes(cohort) and (partial is None or pc < partial.waits.pc):
                partial = cohort
            lines.append(f"{lanes_text} wait at {self.program.describe(pc)}")
        if partial is not None:
            pc, whole = partial.waits.pc, partial.waits.whole
            what = f"only a part of a {whole} reached an instruction that the whole {whole} must "
            where = self.location(int(partial.rows[0]), None, pc)
            way = f"move it out of the divergent branch, or make the branch uniform in the {whole}"
            numbers = "\n".join(lines)
            raise BarrierDivergence(what + "execute", where=where, numbers=numbers, way_out=way)
        # A wait for the rest of a warp is a consequence of what the rest waits for.
        causes = [cohort for cohort in self.cohorts if not isinstance(cohort.waits, WaitsForWarp)]
        polls = [cohort for cohort in causes if cohort.waits is None]
        first = (polls or causes or self.cohorts)[0]
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more like these"]
        what = "deadlock: every warp waits and none can be released"
        pc = self.program.repeats.spins.get(first.pc, first.pc) if polls else first.waits.pc
        where = self.location(int(first.rows[0]), None, pc)
        way = "check that all warps that a barrier counts arrive at it, and that as many bytes are "
        way += "copied as an mbarrier expects"
        if polls:
            way = "check that a thread writes what the loop waits for, at this address, and that "
            way += "it does not wait for this one itself"
        raise DeadlockError(what, where=where, numbers="\n".join(lines), way_out=way)

    def _comes(self, cohort: Cohort) -> bool:
        """Whether the lanes that ``cohort`` waits for wait at an mbarrier or poll themselves."""
        partners = cohort.waits.partners(cohort.rows)
        others = [o for o in self.cohorts if o.waits is None or isinstance(o.waits, WaitsForPhase)]
        return any(np.isin(partners, other.rows).any() for other in others)
