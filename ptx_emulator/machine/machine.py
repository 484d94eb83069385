"""Executes a grid: waves of blocks, whose cohorts run segments until all have exited."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from ptx_emulator.checks.dependent_launch import DependentLaunch, Footprint
from ptx_emulator.checks.global_races import GlobalRaces
from ptx_emulator.checks.member_lanes import MemberLanes
from ptx_emulator.checks.shared_races import SharedRaces
from ptx_emulator.counters.recorder import Recorder
from ptx_emulator.counters.totals import Counters
from ptx_emulator.isa.segments import Segments
from ptx_emulator.isa.special_registers import special_values
from ptx_emulator.machine.arguments import DeviceArguments
from ptx_emulator.machine.barriers import Barriers, ClusterBarrier
from ptx_emulator.machine.bulk import BulkCopies
from ptx_emulator.machine.copies import AsyncCopies
from ptx_emulator.machine.map_bytes import TensorMaps
from ptx_emulator.machine.mbarriers import Mbarriers
from ptx_emulator.machine.register_pool import RegisterPool
from ptx_emulator.machine.scheduler import Scheduler
from ptx_emulator.machine.wgmma import Warpgroups
from ptx_emulator.state.cohort import LANES, Cohort, rows_of
from ptx_emulator.state.memory import Array, FlatMemory
from ptx_emulator.state.wave import LaunchConfig

WARPS_PER_WAVE = 512
SHARED_BYTES_PER_WAVE = 64 << 20


def blocks_by_cluster(grid: tuple[int, int, int], cluster: tuple[int, int, int]) -> Array:
    """Numbers of the blocks of each cluster in the order of their ranks, (clusters, blocks)."""
    sizes = [value for pair in zip(grid[::-1], cluster[::-1], strict=True) for value in pair]
    z, cz, y, cy, x, cx = sizes
    blocks = np.arange(math.prod(grid)).reshape(z // cz, cz, y // cy, cy, x // cx, cx)
    return blocks.transpose(0, 2, 4, 1, 3, 5).reshape(-1, math.prod(cluster))


class Machine(Scheduler):
    """Creates the state of a launch and of each wave of blocks, and runs the waves."""

    def __init__(
        self, segments: Segments, config: LaunchConfig, arguments: DeviceArguments
    ) -> None:
        program = segments.program
        self.segments, self.program, self.config = segments, program, config
        self.cluster_size = math.prod(config.cluster)
        self.memory = arguments.memory
        self.maps = TensorMaps(self, arguments.maps, arguments.started)
        self.parameters = np.frombuffer(arguments.parameters.ljust(16, b"\0"), np.uint8)
        seed = config.order_seed
        self.random = random.Random(seed) if seed is not None else None
        self.steps = 0
        self.idle_steps = 0
        self.changed = False
        self.ticks = 0
        self.threads = math.prod(config.block)
        self.warps = -(-self.threads // 32)
        self.cluster_warps = self.warps * self.cluster_size
        self.shared_size = program.dynamic_shared + config.shared_bytes
        self.shared_pitch = -(-max(self.shared_size, 16) // 128) * 128
        self.recorder = Recorder(self) if config.profile else None
        self.counters = Counters(program, self.recorder)
        self.strong = program.accesses.strong
        if "compare_and_swap_guess" in config.allow:
            self.strong |= program.accesses.guesses
        self.acquired_by_fences = program.acquired_by_fences
        if "atomic_without_fence" in config.allow:
            self.acquired_by_fences -= {p for p in self.strong if program.code[p].op == "atom"}
        self.global_races = GlobalRaces(self) if config.check else None
        self.dependent = DependentLaunch(self, config.former) if config.overlaps else None

    # ---- the grid

    def run(self) -> Counters:
        clusters = blocks_by_cluster(self.config.grid, self.config.cluster)
        order = list(range(len(clusters)))
        if self.random:
            self.random.shuffle(order)
        most = min(WARPS_PER_WAVE // self.warps, SHARED_BYTES_PER_WAVE // self.shared_pitch)
        per_wave = max(1, most // self.cluster_size)
        with np.errstate(all="ignore"):
            for first in range(0, len(order), per_wave):
                self.wave(clusters[order[first : first + per_wave]].reshape(-1))
        if self.dependent:
            self.dependent.finish()
        return self.counters

    def footprint(self) -> Footprint | None:
        """The accesses of this launch, which has run, for a launch that overlaps it; None if this
        launch lets no other start before its end."""
        if not self.program.starts_dependents:
            return None
        return Footprint(self, self.dependent.leaves if self.dependent else None)

    def wave(self, blocks: Array) -> None:
        """Runs some blocks to their end."""
        warps, count = self.warps, len(blocks)
        self.blocks = blocks
        self.row_block = np.repeat(np.arange(count), warps)
        self.row_warp = np.tile(np.arange(warps), count)
        self.row_cluster = self.row_block // self.cluster_size
        self.row_member = np.arange(count * warps) % self.cluster_warps
        self.cluster_ids = blocks[:: self.cluster_size]
        thread = self.row_warp[:, None] * 32 + LANES
        self.alive = thread < self.threads
        self.live_warps = np.full(count, warps)
        self.shared = FlatMemory(count * self.shared_pitch)
        if "uninitialised_rows" in self.config.allow:
            self.shared.bytes[:] = 0xFF
            self.shared.bytes.reshape(count, -1)[:, self.program.reserved] = 0
        self.local = FlatMemory(count * warps * 32 * self.program.local_bytes)
        self.local_written = None
        self.unwritten = {}
        self.shared_base_of_row = (self.row_block * self.shared_pitch)[:, None]
        self.cohorts: list[Cohort] = []
        self.members = MemberLanes(self)
        self.barriers = Barriers(self, count)
        self.mbarriers = Mbarriers(self, count)
        self.copies = AsyncCopies(self)
        self.bulk = BulkCopies(self)
        self.shared_races = self.proxy = None
        if self.config.check:
            self.local_written = FlatMemory(len(self.local.bytes), sparse=True)
            self.shared_races = races = SharedRaces(self, count // self.cluster_size)
            self.clocks, self.proxy = races.clocks, races.proxy
        self.wgmma = Warpgroups(self)
        self.registers = RegisterPool(self)
        self.cluster = ClusterBarrier(self)
        self.table = special_values(self, thread)
        if self.dependent:
            self.dependent.begin_wave()
        for part in self._initial_cohorts(np.arange(count * warps)):
            mask = None if self.alive[part].all() else self.alive[part].copy()
            self.cohorts.append(Cohort(part, 0, list(self.program.initial), mask))
        while self.cohorts:
            self._run(self._pick())
            if self.config.watcher is not None:
                self.config.watcher(self.counters)
        self.barriers.finish()
        self.copies.finish()
        self.bulk.finish()

    def _initial_cohorts(self, rows: Array) -> list[Array]:
        """The initial cohorts: all warps in one, or with a seed a random partition."""
        if not self.random or len(rows) < 2:
            return [rows]
        groups = np.array([self.random.randrange(3) for _ in rows])
        return [rows[groups == g] for g in range(3) if (groups == g).any()]

    def row_value(self, name: str, cohort: Cohort) -> Any:
        """The value of a special register for the rows of a cohort."""
        value = self.table[name]
        if value.ndim == 0 or value.shape[0] != len(self.row_block) or cohort.n == len(value):
            return value
        return value[cohort.rows]

    def clock(self, kind: str) -> Any:
        self.ticks += 1
        time = self.steps * 100 + self.ticks
        if kind == "u8":
            return np.uint64(time)
        return np.uint32(time >> 32 if kind == "hi" else time & 0xFFFFFFFF)

    def fence_proxy(self, cohort: Cohort, lanes: Any, space: str) -> None:
        """fence.proxy.async for one state space, or all; by one lane, it is valid for its warp."""
        if self.proxy is None:
            return
        rows = rows_of(cohort, lanes)
        if space != "shared" and self.global_races:
            self.global_races.order.fence_proxy(rows)
            self.clocks.fence_proxy_global(rows)
        if space != "global":
            self.mbarriers.fence_init(cohort, lanes)
            self.clocks.fence_proxy(rows)

    def fence(self, cohort: Cohort, device: bool, sequential: bool = False) -> None:
        """A fence of block or of device scope; ``sequential``: fence.sc."""
        if self.global_races and self.program.accesses.synchronises:
            if sequential:
                self.clocks.fence_sequential(cohort.rows, device)
            if device:
                self.global_races.order.fence(cohort.rows, sequential)
            # Last, because it advances the clocks: later accesses are not published.
            self.clocks.fence(cohort.rows)
