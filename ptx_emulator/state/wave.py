"""The state of a launch and of the running wave of blocks, which all parts of the emulator share.

The machine creates the parts (barriers, checkers, counters, ...), and each part keeps a reference
to this state. This module imports the parts for type checking only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from flashgen.shared.errors import EmulatorError
from ptx_emulator.errors import UninitialisedRead, way_out
from ptx_emulator.ptx.program import PtxProgram
from ptx_emulator.state.cohort import Cohort, SingleThreads, active, spread
from ptx_emulator.state.memory import Array, FlatMemory, GlobalMemory

if TYPE_CHECKING:
    from ptx_emulator.checks.async_proxy import AsyncProxy
    from ptx_emulator.checks.clocks import Clocks
    from ptx_emulator.checks.dependent_launch import DependentLaunch, Footprint
    from ptx_emulator.checks.global_races import GlobalRaces
    from ptx_emulator.checks.member_lanes import MemberLanes
    from ptx_emulator.checks.shared_races import SharedRaces
    from ptx_emulator.counters.recorder import Recorder
    from ptx_emulator.counters.totals import Counters
    from ptx_emulator.machine.barriers import Barriers, ClusterBarrier
    from ptx_emulator.machine.bulk import BulkCopies
    from ptx_emulator.machine.copies import AsyncCopies
    from ptx_emulator.machine.map_bytes import TensorMaps
    from ptx_emulator.machine.mbarriers import Mbarriers
    from ptx_emulator.machine.register_pool import RegisterPool
    from ptx_emulator.machine.wgmma import Warpgroups

ALL_BITS = np.uint64(2**64 - 1)  # the marks of a register that has been written


class Site(NamedTuple):
    """Where an error happened: a row of a cohort at an instruction, and the lane if it is known."""

    cohort: Cohort
    pc: int
    row: int = 0
    lane: int | None = None


class UnwrittenLocal(NamedTuple):
    """A load of local memory that some lanes of warps ``rows`` have not written: which lanes are
    ``missing``, the offset of each, and how many bytes."""

    rows: Array
    missing: Array
    offset: Array
    size: int


class Stored(NamedTuple):
    """The store that is being checked, at offsets (n, 32) in the memory ``view``."""

    execution: Execution
    view: Array
    offsets: Array
    value: Any

    def repeats(self, row: int, lane: int | None, together: bool) -> bool:
        """Whether all lanes that store where this lane does store one value.

        With ``together`` they are compared with each other only, else with the memory, too.
        """
        offsets, chosen = self.offsets, self.execution.active
        if lane is not None:
            chosen = chosen & (offsets == offsets[row, lane])
        values = self.execution.spread(self.value)[chosen]
        if not together:
            stored = self.view.take(offsets[chosen] // self.view.itemsize)
            values = np.append(values, stored.astype(values.dtype))
        return len({value.tobytes() for value in values}) < 2


class Execution(NamedTuple):
    """The execution of instruction ``pc`` by lanes of a cohort.

    ``lanes`` are the active ones, of a shape that broadcasts to (n, 32); None: all.
    """

    machine: Wave
    cohort: Cohort
    lanes: Any
    pc: int

    @property
    def active(self) -> Array:
        """The active lanes (n, 32)."""
        return active(self.cohort, self.lanes)

    def spread(self, value: Any) -> Array:
        """A value of any shape as (n, 32)."""
        return spread(value, self.cohort.n)

    def chosen(self, value: Any) -> Array:
        """A value of all lanes (n, 32), or one entry per active lane."""
        every = spread(value, self.cohort.n)
        return every if self.lanes is None else every[self.spread(self.lanes)]

    def filled(self, values: Array) -> Array:
        """The entries of `chosen` as (n, 32), with zeros in the other lanes."""
        if self.lanes is None:
            return values
        full = np.zeros((self.cohort.n, 32), values.dtype)
        full[self.spread(self.lanes)] = values
        return full

    def any(self, bad: Any) -> bool:
        """Whether a condition holds in an active lane."""
        return bool((self.spread(bad) & self.active).any())

    def site(self, row: Any = 0, lane: int | None = None) -> Site:
        return Site(self.cohort, self.pc, int(row), lane)

    def first(self, bad: Any = True) -> Site:
        """The first active lane for which a condition holds."""
        row, lane = np.argwhere(self.spread(bad) & self.active)[0]
        return self.site(row, int(lane))


class LaunchConfig(NamedTuple):
    """How a kernel is launched; see `ptx_emulator.launch`.

    ``allow`` holds names of `errors.FORGIVEN` that are not reported; ``former`` is what the launch
    before this one leaves, which may still run if this one overlaps it.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    check: bool
    order_seed: int | None
    step_limit: int
    profile: bool
    sums: str
    allow: frozenset[str]
    cluster: tuple[int, int, int]
    watcher: Callable[[Counters], None] | None = None
    overlaps: bool = False
    former: Footprint | None = None


class Wave:
    """State of one launch, and of the wave of blocks that is running.

    A warp of the wave is called a row: row r belongs to block ``row_block[r]`` of the wave and is
    warp ``row_warp[r]`` of that block.

    Attributes:
        maps: the tensor maps of the launch.
        warps: warps per block; ``threads``: threads per block.
        shared_size: bytes of shared memory per block; ``shared_pitch``: distance of two blocks in
            ``shared``, which holds the shared memory of all blocks of the wave.
        blocks: number of each block of the wave in the grid.
        cluster_size: blocks of a cluster, which follow each other in the wave, in the order of
            their ranks.
        row_cluster, row_member: of each row, its cluster in the wave and its warp in the cluster;
            ``cluster_warps``: warps per cluster.
        cluster_ids: number in the grid of the first block of each cluster of the wave.
        local: local memory of all threads of the wave; ``local_written`` has ones where bits of
            it have been written, and is None without checkers.
        alive: lanes that have not exited (rows, 32).
        live_warps: warps per block with a lane that has not exited.
        random: source of random scheduling decisions; None without an order_seed.
        stored: the store that is being checked, for messages.
        recorder, global_races, shared_races, proxy: None where the launch does not use them.
        clocks: those of ``shared_races``.
        dependent: of a launch that may start before the one before it has ended; else None.
    """

    # Of the launch.
    program: PtxProgram
    config: LaunchConfig
    cluster_size: int
    cluster_warps: int
    memory: GlobalMemory
    maps: TensorMaps
    parameters: Array
    strong: frozenset[int]  # the strong accesses, and those that this launch takes for such
    acquired_by_fences: frozenset[int]  # see `PtxProgram`, without what this launch allows
    random: random.Random | None
    steps: int
    idle_steps: int
    changed: bool  # whether an atomic of the segment that runs has changed memory
    threads: int
    warps: int
    shared_size: int
    shared_pitch: int
    counters: Counters
    recorder: Recorder | None
    global_races: GlobalRaces | None
    dependent: DependentLaunch | None
    # Of the wave.
    blocks: Array
    row_block: Array
    row_warp: Array
    row_cluster: Array
    row_member: Array
    cluster_ids: Array
    alive: Array
    live_warps: Array
    shared: FlatMemory
    local: FlatMemory
    local_written: FlatMemory | None
    unwritten: dict[int, UnwrittenLocal]  # by instruction, of the latest loads
    shared_base_of_row: Array
    cohorts: list[Cohort]
    stored: Stored | None = None
    members: MemberLanes
    barriers: Barriers
    mbarriers: Mbarriers
    copies: AsyncCopies
    bulk: BulkCopies
    wgmma: Warpgroups
    registers: RegisterPool
    cluster: ClusterBarrier
    shared_races: SharedRaces | None
    clocks: Clocks
    proxy: AsyncProxy | None

    # ---- cohorts

    def replace(self, old: Cohort, parts: list[Cohort]) -> None:
        """Runs ``parts`` in place of the cohort ``old``."""
        self.cohorts.remove(old)
        self.cohorts += parts

    def split(
        self, cohort: Cohort, keep: Array, pc_kept: int, pc_rest: int
    ) -> tuple[Cohort, Cohort]:
        """Splits a cohort in two by row; both selections must be non-empty."""
        live = self.program.live_list
        kept = cohort.part(keep, live(pc_kept), pc_kept)
        rest = cohort.part(~keep, live(pc_rest), pc_rest)
        self.replace(cohort, [kept, rest])
        return kept, rest

    def hold(self, cohort: Cohort, ready: Array, pc: int, waits: Any, after: int) -> Cohort | None:
        """The rows that are ``ready`` (n,) go on at ``after``; the others wait at ``pc``.

        Returns:
            The cohort that goes on, if there is one.
        """
        cohort.pc = after
        if ready.all():
            return cohort
        done, waiting = self.split(cohort, ready, after, pc) if ready.any() else (None, cohort)
        waiting.pc, waiting.waits = pc, waits
        return done

    def wake(self, kind: type) -> None:
        """Lets cohorts with this kind of wait run again."""
        for cohort in self.cohorts:
            if isinstance(cohort.waits, kind):
                cohort.waits = None

    def shared_base(self, cohort: Cohort) -> Array:
        """Offset of each row's block in ``shared``, in bytes (n, 1)."""
        base = cohort.shared_base
        if base is None:
            base = cohort.shared_base = self.shared_base_of_row[cohort.rows]
        return base

    # ---- locations and errors

    def require_defined(self, execution: Execution, defined: Any, allowed_by: str = "") -> None:
        """Checks that all bits of a register with these marks (`isa.definedness`) are written in
        all active lanes.

        ``allowed_by``: the name under which a launch allows a register that was never written.

        Raises:
            UninitialisedRead: a lane reads a register that it has not written.
        """
        missing = defined != ALL_BITS
        if not missing.any():
            return
        missing = execution.spread(missing) & execution.active
        if not missing.any():
            return
        site = execution.first(missing)
        self.members.blame_shuffle(site)
        if allowed_by in self.config.allow:
            return
        forgiven = way_out(allowed_by) if allowed_by else ""
        self._blame_local(site, forgiven)
        what = "a register is read that was never written"
        numbers = f"{int(missing.sum())} lanes read a value that no instruction has written"
        advice = "initialise the variable on every path that leads here" + forgiven
        self.fail(UninitialisedRead, what, site, numbers, advice)

    def _blame_local(self, site: Site, forgiven: str) -> None:
        """Raises if the undefined value that a lane uses may come from its local memory."""
        warp = site.cohort.rows[site.row]
        for pc, (rows, missing, offset, size) in reversed(self.unwritten.items()):
            for row in np.flatnonzero(rows == warp).tolist():
                if site.lane is None or not missing[row, site.lane]:
                    continue
                local_offset = int(offset[row, site.lane])
                what = "local memory is read that its thread has never written"
                where = self.location(int(warp), site.lane, pc)
                numbers = f"{size}-byte read at local offset {local_offset}"
                numbers += self.program.local_name(local_offset)
                numbers += f"; the value is used by {self.program.describe(site.pc)}"
                advice = "initialise every element of the array before it is read" + forgiven
                raise UninitialisedRead(what, where=where, numbers=numbers, way_out=advice)

    def forgives_store(self, site: Site, together: bool) -> str:
        """The end of a way out for a store that races with another one of the same value, or ''."""
        if "same_value" in self.config.allow or self.stored is None:
            return ""
        same = self.stored.repeats(site.row, site.lane, together)
        return way_out("same_value") if same else ""

    def forgives_guess(self, reader: int, atomic: Any) -> str:
        """The end of a way out for a load that races with an ``atomic``, or ''."""
        guess = reader in self.program.accesses.guesses and atomic
        return way_out("compare_and_swap_guess") if guess else ""

    def block_name(self, row: int) -> str:
        """The block of a row as its grid coordinates."""
        linear = int(self.blocks[self.row_block[row]])
        gx, gy, _ = self.config.grid
        return f"({linear % gx}, {linear // gx % gy}, {linear // (gx * gy)})"

    def location(self, row: int, lane: int | None, pc: int) -> str:
        """Kernel, block, warp, lane, source line and instruction, for messages."""
        program = self.program
        text = f"kernel {program.name}, block {self.block_name(row)}, warp {self.row_warp[row]}"
        if lane is not None:
            text += f", lane {lane}"
        return f"{text}, {program.describe(pc)}"

    def member_name(self, member: int) -> str:
        """A warp of a cluster for messages, by its number in the cluster."""
        rank, warp = divmod(member, self.warps)
        return f"warp {warp}" + (f" of rank {rank}" if self.cluster_size > 1 else "")

    def warps_text(self, rows: Array) -> str:
        """Warps of the wave for messages: the warps of the first block by number."""
        row = int(rows[0])
        warps = self.row_warp[rows[self.row_block[rows] == self.row_block[row]]]
        present = np.zeros(int(warps.max()) + 1, bool)
        present[warps] = True
        count = len(rows) - len(warps)
        others = f" and {count} of other blocks" if count else ""
        plural = "s" if len(warps) > 1 else ""
        return f"block {self.block_name(row)} warp{plural} {ranges_text(present)}{others}"

    def fail(
        self, kind: type[EmulatorError], what: str, site: Site, numbers: str, way_out: str
    ) -> NoReturn:
        """Raises an error of class ``kind``."""
        cohort, pc, row, lane = site
        if isinstance(cohort, SingleThreads):
            lane = int(cohort.lane[row])
        where = self.location(int(cohort.rows[row]), lane, pc)
        raise kind(what, where=where, numbers=numbers, way_out=way_out)


def ranges_text(mask: Array) -> str:
    """The set positions of a mask as ranges, such as ``0-3 8``."""
    lanes = np.flatnonzero(mask)
    runs = np.split(lanes, np.flatnonzero(np.diff(lanes) > 1) + 1) if len(lanes) else []
    return " ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs) or "none"
