"""Executes a grid: waves of blocks, each a set of cohorts that run segments until nobody is left.

The scheduler runs the runnable cohort with the lowest program counter and first merges the cohorts
that stand there. That makes loops and branches reconverge without any knowledge of their shape.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.barriers import Barriers
from flashgen.emulator.bulk import Bulk
from flashgen.emulator.clusters import ClusterBarrier
from flashgen.emulator.cohort import Cohort, merge, splice
from flashgen.emulator.copies import Copies
from flashgen.emulator.counters import Counters
from flashgen.emulator.mbarriers import Mbarriers
from flashgen.emulator.memory import Flat, GlobalMemory
from flashgen.emulator.program import Program, Region
from flashgen.emulator.races import SharedRaces
from flashgen.emulator.races_global import GlobalRaces
from flashgen.emulator.recorder import Recorder
from flashgen.emulator.report import Reports, WaitsForWarp
from flashgen.emulator.special import special_values
from flashgen.emulator.tma import TensorMap
from flashgen.emulator.warpgroup import RegisterPool
from flashgen.emulator.wgmma import Warpgroups
from flashgen.errors import EmulatorError

Array = npt.NDArray[Any]
LANES = np.arange(32)
WARPS_PER_WAVE = 512
SHARED_BYTES_PER_WAVE = 64 << 20
FAIR_EVERY = 256  # now and then the cohort that waited longest runs: spin loops must not starve


class Machine(Reports):
    """State of one launch, and of the wave of blocks that is running now."""

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        memory: GlobalMemory,
        parameters: bytes,
        shared_bytes: int,
        check: bool,
        order_seed: int | None,
        step_limit: int,
        profile: bool = False,
        maps: Mapping[int, tuple[TensorMap, int]] | None = None,
    ) -> None:
        self.program = program
        self.grid, self.block = grid, block
        self.memory = memory
        self.maps = maps or {}  # by the offset of the parameter: the map, its tensor's address
        self.parameters = np.frombuffer(parameters.ljust(16, b"\0"), np.uint8)
        self.check = check
        self.random = random.Random(order_seed) if order_seed is not None else None
        self.step_limit = step_limit
        self.steps = 0
        self.ticks = 0
        self.threads = block[0] * block[1] * block[2]
        self.warps = -(-self.threads // 32)
        self.dynamic_bytes = shared_bytes
        self.shared_size = program.dynamic_shared + shared_bytes
        self.shared_pitch = -(-max(self.shared_size, 16) // 128) * 128
        self.recorder = Recorder(self) if profile else None
        self.counters = Counters(program, self.recorder)
        self.global_races = GlobalRaces(self) if check else None
        self.divergent_lanes = self.threads % 32 != 0

    # ---- the grid

    def run(self) -> Counters:
        total = self.grid[0] * self.grid[1] * self.grid[2]
        order = list(range(total))
        if self.random:
            self.random.shuffle(order)
        per_wave = max(1, WARPS_PER_WAVE // self.warps)
        per_wave = max(1, min(per_wave, SHARED_BYTES_PER_WAVE // self.shared_pitch))
        with np.errstate(all="ignore"):
            for first in range(0, total, per_wave):
                chosen = order[first : first + per_wave]
                self.wave(np.array(chosen if self.random else sorted(chosen), np.int64))
        return self.counters

    def wave(self, blocks: Array) -> None:
        """Runs some blocks to their end."""
        warps, count = self.warps, len(blocks)
        self.blocks = blocks
        self.row_block = np.repeat(np.arange(count), warps)
        self.row_warp = np.tile(np.arange(warps), count)
        thread = self.row_warp[:, None] * 32 + LANES
        self.alive = thread < self.threads
        self.live_warps = np.full(count, warps)
        self.shared = Flat(count * self.shared_pitch)
        self.local = Flat(count * warps * 32 * self.program.local_bytes)
        self.shared_base_of_row = (self.row_block * self.shared_pitch)[:, None]
        self.cohorts: list[Cohort] = []
        self.barriers = Barriers(self, count)
        self.mbarriers = Mbarriers(self, count)
        self.copies = Copies(self)
        self.bulk = Bulk(self)
        self.shared_races = SharedRaces(self, count) if self.check else None
        self.proxy = self.shared_races.proxy if self.shared_races else None
        self.wgmma = Warpgroups(self)
        self.registers = RegisterPool(self)
        self.cluster = ClusterBarrier(self)
        self.table = special_values(self, thread)
        rows = np.arange(count * warps)
        for part in self._start_groups(rows):
            mask = None if self.alive[part].all() else self.alive[part].copy()
            self.cohorts.append(Cohort(part, 0, list(self.program.initial), mask))
        self._schedule()
        self.bulk.finish()

    def _start_groups(self, rows: Array) -> list[Array]:
        """All warps in one cohort; with a seed, a random partition."""
        if not self.random or len(rows) < 2:
            return [rows]
        groups = np.array([self.random.randrange(3) for _ in rows])
        return [rows[groups == g] for g in range(3) if (groups == g).any()]

    def row_value(self, name: str, C: Cohort) -> Any:
        """A special register for the rows of a cohort."""
        value = self.table[name]
        if value.ndim == 0 or value.shape[0] != len(self.row_block) or C.n == len(value):
            return value
        return value[C.rows]

    def clock(self, kind: str) -> Any:
        self.ticks += 1
        time = self.steps * 100 + self.ticks
        if kind == "u8":
            return np.uint64(time)
        return np.uint32(time >> 32 if kind == "hi" else time & 0xFFFFFFFF)

    # ---- scheduling

    def _schedule(self) -> None:
        while self.cohorts:
            self._run(self._pick())

    def _run(self, c: Cohort) -> None:
        """Executes one segment of a cohort."""
        program, counters, recorder = self.program, self.counters, self.recorder
        found = program.segment(c.pc, c.mask is not None, self.check, recorder is not None)
        self.steps += 1
        if self.steps > self.step_limit:
            self._too_many_steps(c)
        c.age = self.steps
        mask, rows = c.mask, c.n
        try:
            if found.run(self, c):
                return
        except EmulatorError:
            raise
        except Exception as problem:
            if hasattr(problem, "add_note"):
                near = program.source_line(found.start)
                problem.add_note(f"while emulating {program.name} near {near}")
            raise
        key = (found.start, found.end)
        counters.segments[key] = counters.segments.get(key, 0) + rows
        counters.segment_runs += 1
        if recorder is not None:
            recorder.executed(key, rows, mask)

    def _pick(self) -> Cohort:
        """The cohort to run next, merged with all that stand at the same instruction."""
        runnable = [c for c in self.cohorts if c.waits is None]
        while not runnable:
            if not self.bulk.deliver():
                self._stuck()
            runnable = [c for c in self.cohorts if c.waits is None]
        if self.program.asynchronous:
            runnable = self._not_polling(runnable)
            self.bulk.at_random()
        if self.random:
            chosen = self.random.choice(runnable)
            if self.random.random() < 0.5:
                chosen = min(runnable, key=lambda c: c.pc)
        elif len(runnable) > 1 and self.steps % FAIR_EVERY == 0:
            chosen = min(runnable, key=lambda c: c.age)
        else:
            chosen = min(runnable, key=lambda c: c.pc)
        pc = chosen.pc
        if len(self.cohorts) == 1:
            return chosen
        same = [c for c in self.cohorts if c.pc == pc and c.waits is None]
        # Lanes that wait for the rest of their warp go with that. Warps that nobody here belongs to
        # stay: taken along, they would be told to wait again, and with them those that need not.
        for c in self.cohorts:
            waits = c.pc == pc and isinstance(c.waits, WaitsForWarp)
            if waits and any(np.isin(c.waits.partners(c.rows), o.rows).any() for o in same):
                same.append(c)
        if len(same) == 1:
            return chosen
        merged = merge(same, self.program.live_list(pc))
        self.cohorts = [c for c in self.cohorts if c not in same]
        self.cohorts.append(merged)
        return merged

    def _not_polling(self, runnable: list[Cohort]) -> list[Cohort]:
        """Those that do not ask in vain for the end of a phase; all when all do."""
        busy = [c for c in runnable if not c.polls]
        for c in runnable:
            c.polls = False
        if not busy:
            self.bulk.deliver()
        return busy or runnable

    def replace(self, old: Cohort, parts: list[Cohort]) -> None:
        self.cohorts.remove(old)
        self.cohorts += parts

    def split(self, C: Cohort, keep: Array, pc_kept: int, pc_rest: int) -> tuple[Cohort, Cohort]:
        """Two cohorts by row; both selections must be non-empty."""
        live = self.program.live_list
        kept = C.part(keep, live(pc_kept), pc_kept)
        rest = C.part(~keep, live(pc_rest), pc_rest)
        self.replace(C, [kept, rest])
        return kept, rest

    def branch(self, C: Cohort, taken: Any, target: int, after: int) -> None:
        """Sends each lane to ``target`` or to ``after``."""
        mask = C.mask
        if mask is None and (taken.ndim == 0 or taken.shape[1] == 1):
            if taken.all():
                C.pc = target
            elif not taken.any():
                C.pc = after
            else:
                region = self.program.region(after, target)
                if region is None:
                    self.split(C, taken[:, 0], target, after)
                else:
                    self._run_region(C, np.asarray(~taken[:, 0]), region, after, target)
            return
        if mask is None:
            jump, stay = taken, ~taken
        else:
            jump, stay = taken & mask, ~taken & mask
        if not stay.any():
            C.pc = target
            return
        if not jump.any():
            C.pc = after
            return
        if jump.shape[0] != C.n:
            jump = np.broadcast_to(jump, (C.n, 32))
            stay = np.broadcast_to(stay, (C.n, 32))
        region = self.program.region(after, target)
        if region is not None and not region.warp_wide:
            self._run_region(C, np.asarray(stay.any(axis=1)), region, after, target, stay)
            return
        goes, stays = jump.any(axis=1), stay.any(axis=1)
        mixed = goes & stays
        live = self.program.live_list
        parts = []
        if not goes.all() or not stays.all():
            for keep, pc in ((goes & ~mixed, target), (stays & ~mixed, after)):
                if keep.any():
                    parts.append(C.part(keep, live(pc), pc))
        if mixed.any():
            C_mixed, jump_mixed, stay_mixed = C, jump, stay
            if not mixed.all():
                both = sorted(set(live(target)) | set(live(after)))
                C_mixed = C.part(mixed, both, target)
                jump_mixed, stay_mixed = jump[mixed], stay[mixed]
            parts.append(C_mixed.with_mask(jump_mixed, target))
            parts.append(C_mixed.with_mask(stay_mixed, after))
        self.replace(C, parts)

    def _run_region(
        self,
        C: Cohort,
        keep: Array,
        region: Region,
        start: int,
        end: int,
        lanes: Array | None = None,
    ) -> None:
        """Runs a short if for some rows (or lanes) at once, instead of splitting the cohort."""
        part = C.part(keep, region.inputs, start)
        if lanes is not None:
            lanes = lanes[keep]
            part = part.with_mask(lanes, start)
        while part.pc != end:
            self._run(part)
        splice(C, part, keep, region.outputs, lanes)
        C.pc = end

    def branch_table(self, C: Cohort, index: Any, targets: list[int], pc: int) -> None:
        """brx.idx: one two-way branch after the other."""
        wanted = np.zeros((len(self.row_block), 32), np.int64)
        wanted[C.rows] = index
        parts = [C]
        for value, target in enumerate(targets):
            undecided = []
            for part in parts:
                before = set(self.cohorts)
                self.branch(part, wanted[part.rows] == value, target, pc)
                new = [c for c in self.cohorts if c is part or c not in before]
                undecided += [c for c in new if c.pc == pc]
            parts = undecided
        if parts:
            self.fail(
                EmulatorError,
                "brx.idx with an index outside its table",
                parts[0],
                pc,
                numbers=f"{len(targets)} targets",
                way_out="check the switch that this branch implements",
            )

    def exit(self, C: Cohort, leaving: Any, after: int = -1) -> None:
        """Ends the lanes in ``leaving`` (None: all active ones)."""
        mask = C.mask
        if leaving is None:
            gone = np.ones((C.n, 32), bool) if mask is None else mask
        else:
            gone = np.broadcast_to(leaving, (C.n, 32))
            gone = gone & mask if mask is not None else gone
        if not gone.any():
            C.pc = after
            return
        before = self.alive[C.rows].any(axis=1)
        self.alive[C.rows] &= ~gone
        dead = before & ~self.alive[C.rows].any(axis=1)
        blocks = self.row_block[C.rows[dead]]
        np.subtract.at(self.live_warps, blocks, 1)
        stay = ~gone if mask is None else mask & ~gone
        rows_left: Array = np.asarray(stay.any(axis=1))
        if rows_left.any():
            rest = C
            if not rows_left.all():
                rest = C.part(rows_left, self.program.live_list(after), after)
            self.replace(C, [rest.with_mask(stay[rows_left], after)])
        else:
            self.cohorts.remove(C)
        for c in self.cohorts:
            if isinstance(c.waits, WaitsForWarp):
                c.waits = None
        self.barriers.after_exit(np.unique(blocks))
        if self.cluster.used:
            self.cluster.check(np.unique(blocks))

    def wait_for_warp(self, C: Cohort, members: Any, pc: int) -> bool:
        """Whether a warp-wide instruction must wait for lanes that are elsewhere."""
        assert C.mask is not None
        alive = self.alive[C.rows]
        needed: Any = alive
        if members is not None:
            bits = (np.asarray(members)[..., None] >> np.arange(32, dtype=np.uint32)) & 1
            if bits.ndim == 1:
                wanted: Any = np.broadcast_to(bits.astype(bool), (C.n, 32))
            else:
                full = np.broadcast_to(bits.astype(bool), (C.n, 32, 32))
                wanted = (full & C.mask[:, :, None]).any(axis=1)
            needed = alive & wanted
        complete: Any = np.asarray((C.mask | ~needed).all(axis=1))
        if complete.all():
            return False
        if complete.any():
            ready, waiting = self.split(C, complete, pc, pc)
            ready.pc = pc
            needed = needed[~complete]
        else:
            waiting = C
        waiting.waits = WaitsForWarp(pc, needed)
        return True

    def sync_warp(self, C: Cohort) -> None:
        """bar.warp.sync: the cohort has already waited for the lanes."""

    def fence_proxy(self, C: Cohort, lanes: Any) -> None:
        """fence.proxy.async: one lane's fence counts for its warp."""
        if self.proxy is not None:
            some = slice(None) if lanes is None else np.broadcast_to(lanes, (C.n, 32)).any(axis=1)
            self.proxy.fence(C.rows[some])

    def fence(self, C: Cohort, device: bool) -> None:
        """A fence of block or of device scope."""
        if self.global_races and self.program.synchronises:
            assert self.shared_races is not None
            if device:
                self.global_races.fence(C)
            # Last: it ticks the clocks, so that what follows is not taken for published.
            self.shared_races.clocks.fence(C.rows)
