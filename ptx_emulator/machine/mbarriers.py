"""mbarriers: objects in shared memory that count arrivals and bytes, phase by phase.

A phase completes when the number of arrivals given to mbarrier.init have arrived and all expected
bytes (expect_tx) have been delivered by bulk copies (complete_tx); then the next phase begins. A
loop that does nothing but try_wait or test_wait blocks its warps until the phase is complete, so a
phase that cannot complete is a deadlock. On hardware a try_wait may time out, so a kernel has to
try again: where it does not, or does something else meanwhile (`ptx.repeats`), none blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator.checks.bounds import check_window
from ptx_emulator.checks.late_waits import LateWaits
from ptx_emulator.checks.shadow import MBARRIER, RELAXED, SYNCHRONISE_LANES
from ptx_emulator.errors import FenceError, MbarrierMisuse, RaceError, way_out
from ptx_emulator.isa.cluster import remote, resolved
from ptx_emulator.state.cohort import Cohort, WaitsForPhase, rows_of
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Execution, Site, Wave

BYTES = 8
_SEVERAL = 33
_FEW_TURNS = 64
MOST = (1 << 20) - 1  # limit of arrivals, and of outstanding bytes of either sign


class Mbarriers:
    """The mbarriers of a wave, numbered by address in the same way for all blocks.

    ``expected``, ``pending``, ``tx`` and ``phase`` are (barriers, blocks); a barrier that expects
    no arrivals is not initialised.
    """

    def __init__(self, machine: Wave, blocks: int) -> None:
        self.machine = machine
        self.addresses: list[int] = []
        self._number = np.full(machine.shared_pitch // BYTES, -1, np.int64)
        none = np.zeros((0, blocks), np.int64)
        self.expected, self.pending, self.tx, self.phase = (none.copy() for _ in range(4))
        # Warp of mbarrier.init, and its clock.
        self.made_by, self.made_at = none.copy(), none.copy()
        # Whether the initialisation is visible to the asynchronous proxy.
        self.fenced = none.copy()
        # Clocks of the warps when they last used each mbarrier, and the lane plus 1, or `_SEVERAL`
        # that nothing has synchronised since; None where nothing asks for them.
        self.uses: Array | None = None
        self.users = none
        if machine.config.check and any("inval" in ins.mods for ins in machine.program.code):
            self.uses, self.users = np.zeros((2, 0, blocks, machine.cluster_warps), np.int64)
        self.late = LateWaits(machine)
        # Slots of the clocks published up to this phase; slot + 1 and + 2: up to the last complete
        # one, and up to the one before.
        self._slots = np.zeros(0, np.int64)
        self.all_fenced = True
        self._failed: dict[int, int] = {}  # by wait: how often it failed
        # By warp and wait of `FailedWaits.loose`: the slot of its last success, and the clocks
        # before and after it ordered the warp.
        self._succeeded: dict[tuple[int, int], int] = {}
        self._ordered: dict[tuple[int, int], tuple[Array, Array]] = {}
        # The columns of the clocks for each mbarrier of each rank: how many phases are complete.
        self.columns = np.zeros((0, machine.cluster_size), np.int64)

    # ---- init and inval

    def init(self, execution: Execution, address: Any, count: Any) -> None:
        """mbarrier.init: phase 0 begins, with ``count`` arrivals pending."""
        machine, cohort = self.machine, execution.cohort
        cohort_row, lane, addresses = self._lanes(execution, address)
        counts = execution.spread(count)[cohort_row, lane].astype(np.int64)
        numbers = self._add(addresses)
        rows = cohort.rows[cohort_row]
        blocks = machine.row_block[rows]
        alive = np.flatnonzero(self.expected[numbers, blocks] > 0)
        if len(alive):
            first = alive[0]
            state = self.state(int(numbers[first]), int(blocks[first]))
            self._initialise_again(execution, address, cohort_row[alive], lane[alive], state)
        if machine.shared_races:
            offsets = execution.spread(address + machine.shared_base(cohort))
            machine.shared_races.write(execution, offsets, BYTES)
            written = machine.shared_races.written
            machine.shared_races.put(written, offsets[cohort_row, lane], BYTES, MBARRIER)
            self.made_by[numbers, blocks] = machine.row_member[rows]
            self.made_at[numbers, blocks] = machine.clocks.clock[rows]
        bad = (counts < 1) | (counts > MOST)
        for index in np.flatnonzero(bad)[:1]:
            what = "an mbarrier with an impossible number of arrivals"
            numbers_text = f"count {int(counts[index])}; it can be 1 to {MOST:,}"
            way_out = "count the arrivals of one phase"
            site = execution.site(cohort_row[index])
            machine.fail(MbarrierMisuse, what, site, numbers_text, way_out)
        self.expected[numbers, blocks] = self.pending[numbers, blocks] = counts
        self.tx[numbers, blocks] = self.phase[numbers, blocks] = 0
        self.late.forget(numbers, blocks)
        self.fenced[numbers, blocks] = 0
        self.all_fenced = False

    def _initialise_again(
        self, execution: Execution, address: Any, cohort_row: Array, lane: Array, state: str
    ) -> None:
        """Refuses an mbarrier.init where an mbarrier lies, or treats it as after mbarrier.inval."""
        if "mbarrier_reinit" not in self.machine.config.allow:
            what = "an mbarrier is initialised a second time"
            advice = "initialise it once, or execute mbarrier.inval first"
            advice += way_out("mbarrier_reinit")
            self.machine.fail(MbarrierMisuse, what, execution.site(cohort_row[0]), state, advice)
        self.look_up(execution, cohort_row, execution.spread(address)[cohort_row, lane], None, lane)
        self._forget(execution, address, cohort_row, lane)

    def _forget(self, execution: Execution, address: Any, cohort_row: Array, lane: Array) -> None:
        """Makes the memory of mbarriers ordinary memory that these lanes wrote."""
        machine, cohort = self.machine, execution.cohort
        if machine.shared_races:
            offsets = execution.spread(address + machine.shared_base(cohort))[cohort_row, lane]
            machine.shared_races.finish_copy(cohort.rows[cohort_row], offsets[:, None], BYTES, None)

    def fence_init(self, cohort: Cohort, lanes: Any) -> None:
        """fence.mbarrier_init, or a proxy fence: earlier initialisations become visible."""
        machine = self.machine
        if machine.shared_races and machine.program.accesses.relaxed_barriers:
            machine.clocks.fence_initialised(rows_of(cohort, lanes))
        if self.all_fenced or machine.shared_races is None:
            return
        rows = rows_of(cohort, lanes)
        blocks, warps = machine.row_block[rows], machine.row_member[rows]
        maker = self.made_by[:, blocks]
        seen = machine.clocks.seen[machine.row_cluster[rows], warps, maker]
        visible = (maker == warps) | (seen >= self.made_at[:, blocks])
        for index, block in enumerate(blocks.tolist()):
            self.fenced[visible[:, index], block] = 1
        self.all_fenced = bool((self.fenced[self.expected > 0] > 0).all())

    def require_fenced(self, site: Site, numbers: Array, blocks: Array) -> None:
        """Checks that the initialisation of mbarriers (k,) is visible to the asynchronous proxy.

        Not reported: a copy of the warp that initialised its mbarrier and has synchronised with
        nothing since.

        Raises:
            FenceError: it is not.
        """
        machine = self.machine
        allowed = "mbarrier_init_fence" in machine.config.allow
        if self.all_fenced or machine.shared_races is None or allowed:
            return
        rows = site.cohort.rows
        clocks = machine.clocks
        alone = self.made_by[numbers, blocks] == machine.row_member[rows]
        alone &= clocks.synced[rows] <= self.made_at[numbers, blocks]
        self.fenced[numbers[alone], blocks[alone]] = 1
        missing = self.fenced[numbers, blocks] == 0
        for index in np.flatnonzero(missing)[:1]:
            what = "an asynchronous copy signals an mbarrier that no fence followed"
            text = f"mbarrier at shared offset {self.addresses[int(numbers[index])]}; its "
            text += "initialisation need not be visible to the asynchronous proxy"
            advice = "execute fence.mbarrier_init.release.cluster or fence.proxy.async after "
            advice += "mbarrier.init, before the barrier that the issuing thread passes"
            advice += way_out("mbarrier_init_fence")
            machine.fail(FenceError, what, site._replace(row=index), text, advice)

    def _add(self, addresses: Array) -> Array:
        """Numbers of the barriers at the given addresses; unknown addresses get a new number."""
        for address in np.unique(addresses).tolist():
            if self._number[address // BYTES] >= 0:
                continue
            self._number[address // BYTES] = len(self.addresses)
            self.addresses.append(address)
            for name in ("expected", "pending", "tx", "phase", "made_by", "made_at", "fenced"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 1), (0, 0))))
            if self.uses is not None:
                more = ((0, 1), (0, 0), (0, 0))
                self.uses, self.users = np.pad(self.uses, more), np.pad(self.users, more)
            self.late.add()
            machine = self.machine
            if machine.proxy is not None:
                slots = machine.clocks.new_slots(3 * machine.cluster_size)
                self._slots = np.append(self._slots, slots)
                name = f"a bulk copy that the mbarrier at shared offset {address} waits for"
                ranks = range(machine.cluster_size)
                columns = [machine.proxy.agent("mbarrier", (address, r), name) for r in ranks]
                self.columns = np.append(self.columns, [columns], axis=0)
        numbers: Array = self._number[addresses // BYTES]
        return numbers

    def inval(self, execution: Execution, address: Any) -> None:
        """mbarrier.inval: its memory becomes ordinary memory.

        Raises:
            RaceError: a warp uses the mbarrier, and nothing orders that before.
        """
        cohort_row, lane, numbers, blocks = self.find(execution, address)
        if self.uses is not None:
            machine, rows = self.machine, execution.cohort.rows[cohort_row]
            seen = machine.clocks.seen[machine.row_cluster[rows], machine.row_member[rows]]
            late = self.uses[numbers, blocks] > seen[:, : machine.cluster_warps]
            late[np.arange(len(rows)), machine.row_member[rows]] = False
            for index, other in np.argwhere(late)[:1].tolist():
                what = "race in shared memory: an mbarrier is invalidated while others may use it"
                text = f"shared offset {self.addresses[int(numbers[index])]}; "
                text += f"{machine.member_name(other)} arrives or waits there"
                advice = "pass a barrier of the block between the last use and mbarrier.inval"
                machine.fail(RaceError, what, execution.site(cohort_row[index]), text, advice)
            several = self.users[numbers, blocks, machine.row_member[rows]] == _SEVERAL
            if several.any() and "warp_synchronous" not in machine.config.allow:
                index = int(np.argmax(several))
                what = "race in shared memory: an mbarrier is invalidated while other lanes of the "
                what += "warp may use it"
                text = f"shared offset {self.addresses[int(numbers[index])]}"
                site = execution.site(cohort_row[index], int(lane[index]))
                machine.fail(RaceError, what, site, text, SYNCHRONISE_LANES)
        self.expected[numbers, blocks] = 0
        self._forget(execution, address, cohort_row, lane)

    def _lanes(self, execution: Execution, address: Any) -> tuple[Array, Array, Array]:
        """(row of the cohort, lane, address) of every active lane, in order."""
        check_window(execution, np.asarray(address), BYTES, self.machine.shared_size, "shared")
        cohort_row, lane = np.nonzero(execution.active)
        return cohort_row, lane, execution.spread(address)[cohort_row, lane]

    def find(self, execution: Execution, address: Any) -> tuple[Array, ...]:
        """(row of the cohort, lane, barrier, block) of every active lane, in order.

        Raises:
            OutOfBounds, Misaligned: the address is invalid for an mbarrier.
            MbarrierMisuse: no mbarrier has been initialised there.
            RaceError: its initialisation is not ordered before.
        """
        blocks = None
        if remote(address):
            blocks, address = resolved(execution, address, BYTES)
        cohort_row, lane, addresses = self._lanes(execution, address)
        lane_blocks = None if blocks is None else blocks[cohort_row, lane]
        return cohort_row, lane, *self.look_up(execution, cohort_row, addresses, lane_blocks, lane)

    def look_up(
        self,
        execution: Execution,
        cohort_row: Array,
        address: Array,
        blocks: Array | None,
        lane: Array,
    ) -> tuple[Array, Array]:
        """(barrier, block) of some rows of a cohort, at addresses (k,) that are in bounds.

        ``cohort_row`` and ``lane`` (k,) are those of the threads, and ``blocks`` (k,) those of the
        mbarriers; None: the blocks of the rows.
        """
        machine, rows = self.machine, execution.cohort.rows[cohort_row]
        numbers = self._number[address // BYTES]
        blocks = machine.row_block[rows] if blocks is None else blocks
        missing = numbers < 0
        if not missing.any():
            missing = self.expected[numbers, blocks] == 0
        for index in np.flatnonzero(missing)[:1]:
            initialised = ", ".join(map(str, self.addresses)) or "none"
            what = "an mbarrier that is not initialised"
            text = f"shared offset {int(address[index])}; initialised ones: {initialised}"
            advice = "execute mbarrier.init, and then a barrier that all its users pass"
            machine.fail(MbarrierMisuse, what, execution.site(cohort_row[index]), text, advice)
        if machine.shared_races is None:
            return numbers, blocks
        warps, maker = machine.row_member[rows], self.made_by[numbers, blocks]
        seen = machine.clocks.initialised(machine.row_cluster[rows], warps, maker)
        early = (maker != warps) & (seen < self.made_at[numbers, blocks])
        for index in np.flatnonzero(early)[:1]:
            problem = "an mbarrier is used, and its initialisation is not ordered before"
            offset, by = self.addresses[int(numbers[index])], int(maker[index])
            text = f"shared offset {offset}; warp {by} initialises it"
            advice = "pass a barrier of the block between mbarrier.init and its first use"
            advice += RELAXED if machine.program.accesses.relaxed_barriers else ""
            site = execution.site(cohort_row[index])
            machine.fail(RaceError, f"race in shared memory: {problem}", site, text, advice)
        if self.uses is not None:
            users, keys = self.users, (numbers, blocks, warps)
            several = (self.uses[keys] >= machine.clocks.synced[rows]) & (users[keys] > 0)
            several &= users[keys] != lane + 1
            self.uses[keys], users[keys] = machine.clocks.clock[rows], lane + 1
            several |= users[keys] != lane + 1
            np.maximum.at(users, keys, np.where(several, _SEVERAL, 0))
            machine.shared_races.accessed[rows] = True
        return numbers, blocks

    def slots(self, numbers: Array, blocks: Array) -> Array:
        """Slots of the clocks published at mbarriers of blocks; plus 1 and 2: see `_slots`."""
        slots: Array = self._slots[numbers] + 3 * (blocks % self.machine.cluster_size)
        return slots

    # ---- messages

    def state(self, number: int, block: int) -> str:
        """Describes the state of an mbarrier."""
        return (
            f"mbarrier at shared offset {self.addresses[number]}, phase "
            f"{int(self.phase[number, block])}: {int(self.pending[number, block])} of "
            f"{int(self.expected[number, block])} arrivals pending, "
            f"{int(self.tx[number, block])} bytes outstanding"
        )

    def describe(self, cohort: Cohort) -> list[str]:
        """What a waiting cohort waits for: one line per barrier and block."""
        machine, waits = self.machine, cohort.waits
        cohort_row, lane = np.nonzero(waits.lanes)
        numbers = waits.barriers[cohort_row, lane]
        blocks = machine.row_block[cohort.rows[cohort_row]]
        lines = []
        for block, number in sorted(set(zip(blocks.tolist(), numbers.tolist(), strict=True))):
            rows = np.unique(cohort.rows[cohort_row[(blocks == block) & (numbers == number)]])
            warps = ", ".join(map(str, machine.row_warp[rows]))
            lines.append(
                f"block {machine.block_name(int(rows[0]))} warp{'s' * (len(rows) > 1)} {warps} "
                f"at {self.state(number, block)}; {machine.program.describe(waits.pc)}"
            )
        return lines

    # ---- arrivals and bytes

    def arrive(
        self,
        execution: Execution,
        address: Any,
        count: Any,
        modifiers: str = "",
        expects: Any = None,
    ) -> Array:
        """mbarrier.arrive and arrive_drop: ``count`` arrivals by each lane.

        Args:
            modifiers: words: "relaxed": what the last fence releases is published, and no access
                after it; "drop": later phases
                expect ``count`` arrivals fewer; "noComplete": the phase must not complete.
            expects: bytes per lane to expect before the arrival.

        Returns:
            The state of each lane, (n, 32): the phase that it arrived at, and in the upper 32
            bits the arrivals that were pending before.
        """
        machine = self.machine
        release, drop = "relaxed" not in modifiers, "drop" in modifiers
        cohort_row, lane, numbers, blocks = self.find(execution, address)
        counts = execution.spread(count)[cohort_row, lane].astype(np.int64)
        rows = execution.cohort.rows[cohort_row]
        for index in np.flatnonzero(counts < 1)[:1]:
            what = "an arrival at an mbarrier that counts as none"
            text, advice = f"count {counts[index]}", "branch around it, or give a count from 1 on"
            machine.fail(MbarrierMisuse, what, execution.site(cohort_row[index]), text, advice)
        tx = None if expects is None else execution.spread(expects)[cohort_row, lane]
        if machine.shared_races:
            self.late.arrives[numbers, rows] = True
        if machine.shared_races and release:
            machine.shared_races.release_lanes(execution)
        states = np.empty(len(cohort_row), np.int64)
        # Together if no phase can complete in between.
        distinct, total = self._totals(numbers, blocks, counts)
        together = not drop and bool((total <= self.pending[distinct]).all())
        for step in _steps(together, len(cohort_row)):
            barriers = numbers[step], blocks[step]
            states[step] = self.phase[barriers] | self.pending[barriers] << 32
            if tx is not None:
                self._expect(execution, *barriers, tx[step].astype(np.int64), cohort_row[step])
            if machine.shared_races:
                publish = machine.clocks.publish if release else machine.clocks.publish_fenced
                publish(*_distinct(rows[step], self.slots(*barriers)))
                if not release:
                    self.late.hide(*barriers)
            late = self.pending[barriers] < counts[step]
            self._demand_room(execution, *barriers, cohort_row[step], late)
            np.subtract.at(self.pending, barriers, counts[step])
            if drop:
                self.expected[barriers] -= counts[step]
            if "noComplete" in modifiers and (self.pending[barriers] == 0).any():
                what = "an arrival with .noComplete completes its phase"
                text = self.state(*(int(part[0]) for part in barriers))
                advice = "use it only if others follow"
                site = execution.site(cohort_row[step][0])
                machine.fail(MbarrierMisuse, what, site, text, advice)
            self._complete(*barriers)
        state = np.zeros((execution.cohort.n, 32), np.uint64)
        state[cohort_row, lane] = states
        return state

    def arrive_later(
        self, execution: Execution, numbers: Array, issue_clocks: Array | None
    ) -> None:
        """Arrivals of single threads (n,) that cp.async.mbarrier.arrive requested earlier.

        Args:
            issue_clocks: their clocks at that time; None without checkers.
        """
        machine, rows = self.machine, execution.cohort.rows
        blocks = machine.row_block[rows]
        if machine.shared_races and issue_clocks is not None:
            machine.clocks.publish_earlier(rows, self.slots(numbers, blocks), issue_clocks)
        np.subtract.at(self.pending, (numbers, blocks), 1)
        late = self.pending[numbers, blocks] < 0
        self._demand_room(execution, numbers, blocks, np.arange(len(numbers)), late)
        self._complete(numbers, blocks)

    def complete_store(self, execution: Execution, stored: Any, address: Any, size: int) -> None:
        """complete_tx of the ``size`` bytes that each lane has ``stored`` by st.async."""
        machine = self.machine
        cohort_row, lane, numbers, blocks = self.find(execution, address)
        if not len(cohort_row):
            return
        stored_blocks = resolved(execution, stored, size)[0][cohort_row, lane]
        for index in np.flatnonzero(stored_blocks != blocks)[:1]:
            what = "an asynchronous store whose mbarrier lies in another block than its destination"
            text = f"blocks {blocks[index]} and {stored_blocks[index]} of the wave"
            advice = "give mapa the same rank for both addresses"
            machine.fail(MbarrierMisuse, what, execution.site(cohort_row[index]), text, advice)
        rows = execution.cohort.rows[cohort_row]
        if machine.shared_races:
            machine.clocks.publish(*_distinct(rows, self.slots(numbers, blocks)))
        phases = self.deliver(numbers, blocks, size)
        # Lanes have no order: a phase that ends between two of them shows the bytes of neither.
        keys = np.stack((cohort_row, numbers, blocks))
        _, first, group = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        for index in np.flatnonzero(phases != phases[first][group.ravel()])[:1]:
            what = "a phase of an mbarrier ends within an st.async of a warp"
            text = self.state(int(numbers[index]), int(blocks[index]))
            advice = "expect the bytes of all lanes"
            machine.fail(MbarrierMisuse, what, execution.site(cohort_row[index]), text, advice)

    def expect(self, execution: Execution, address: Any, size: Any) -> None:
        """mbarrier.expect_tx without an arrival; a negative size completes (complete_tx)."""
        cohort_row, lane, numbers, blocks = self.find(execution, address)
        sizes = execution.spread(size)[cohort_row, lane].astype(np.int64)
        self._expect(execution, numbers, blocks, sizes, cohort_row)
        self._complete(numbers, blocks)

    def _expect(
        self, execution: Execution, numbers: Array, blocks: Array, sizes: Array, cohort_row: Array
    ) -> None:
        np.add.at(self.tx, (numbers, blocks), sizes)
        self.late.hide(numbers, blocks)
        bad = np.abs(self.tx[numbers, blocks]) > MOST
        for index in np.flatnonzero(bad)[:1]:
            what = "an mbarrier counts more bytes than it can"
            text = f"{int(self.tx[numbers, blocks][index]):,} bytes outstanding; at most {MOST:,}"
            advice = "expect the bytes of one phase only, in one place"
            self.machine.fail(MbarrierMisuse, what, execution.site(cohort_row[index]), text, advice)

    def deliver(self, numbers: Array, blocks: Array, size: int) -> Array:
        """complete_tx of ``size`` by bulk copies, in order; returns the phase of each copy.

        The count may become negative, if bytes arrive before they are expected.
        """
        phases = np.empty(len(numbers), np.int64)
        distinct, total = self._totals(numbers, blocks, np.full(len(numbers), size))
        # A phase can only complete with its last copy, unless more bytes arrive than it expects.
        together = bool(((self.pending[distinct] > 0) | (total <= self.tx[distinct])).all())
        for step in _steps(together, len(numbers)):
            barriers = numbers[step], blocks[step]
            phases[step] = self.phase[barriers]
            np.subtract.at(self.tx, barriers, size)
            self.late.hide(*barriers)
            self._complete(*barriers)
        return phases

    def _demand_room(
        self, execution: Execution, numbers: Array, blocks: Array, cohort_row: Array, late: Array
    ) -> None:
        """Fails for the first arrival that its mbarrier does not expect, if there is one."""
        for index in np.flatnonzero(late)[:1]:
            what = "more arrivals at an mbarrier than it expects"
            text = self.state(int(numbers[index]), int(blocks[index]))
            advice = "arrive as often as mbarrier.init counts, and wait before the next phase"
            self.machine.fail(MbarrierMisuse, what, execution.site(cohort_row[index]), text, advice)

    def _totals(
        self, numbers: Array, blocks: Array, amounts: Array
    ) -> tuple[tuple[Array, Array], Array]:
        """The distinct (barriers, blocks), and the sum of the amounts for each."""
        keys, group = np.unique(numbers * self.tx.shape[1] + blocks, return_inverse=True)
        total = np.bincount(group, weights=amounts).astype(np.int64)
        return np.divmod(keys, self.tx.shape[1]), total

    def _complete(self, numbers: Array, blocks: Array) -> None:
        """Completes the phases of these barriers that are finished, and releases waiting warps."""
        machine = self.machine
        full = (self.pending[numbers, blocks] == 0) & (self.tx[numbers, blocks] == 0)
        full &= self.expected[numbers, blocks] > 0
        if not full.any():
            return
        width = self.tx.shape[1]
        numbers, blocks = np.divmod(np.unique(numbers[full] * width + blocks[full]), width)
        self.phase[numbers, blocks] += 1
        self.pending[numbers, blocks] = self.expected[numbers, blocks]
        if machine.shared_races:
            published, slots = machine.clocks.published, self.slots(numbers, blocks)
            group, rank = np.divmod(blocks, machine.cluster_size)
            self.late.check(numbers, blocks, published[group, slots])
            columns = self.columns[numbers, rank]
            # Clocks of earlier phases remain: a completed phase implies the earlier ones.
            published[group, slots + 2] = published[group, slots + 1]
            published[group, slots + 1] = published[group, slots]
            # Copies of this phase are complete: the time of their agent is the number of phases.
            published[group, slots + 1, columns] = self.phase[numbers, blocks]
        ended = np.zeros(self.tx.shape, bool)
        ended[numbers, blocks] = True
        for cohort in machine.cohorts:
            if isinstance(cohort.waits, WaitsForPhase):
                row_blocks = machine.row_block[cohort.rows][:, None]
                if (ended[cohort.waits.barriers, row_blocks] & cohort.waits.lanes).any():
                    cohort.waits = None

    # ---- waiting

    def _polls(self, pc: int) -> bool:
        """Whether a warp whose wait failed lets others go first: if it will wait again.

        A loop that ends after a few failures as well does not, so that it comes to its end.
        """
        repeats = self.machine.program.repeats
        if pc in repeats.endless or pc not in repeats.counted:
            return pc in repeats.endless
        self._failed[pc] = self._failed.get(pc, 0) + 1
        return self._failed[pc] > _FEW_TURNS

    def ignored(self, execution: Execution) -> None:
        """Reports a wait whose result no instruction uses.

        Raises:
            MbarrierMisuse: a lane executes it.
        """
        if not execution.active.any():
            return
        what = "the result of a wait for an mbarrier is ignored"
        numbers = "try_wait may return false after a time limit, and test_wait returns at once: "
        numbers += "the phase need not have completed, and nothing is ordered then"
        advice = "repeat it in a loop until it returns true"
        self.machine.fail(MbarrierMisuse, what, execution.first(), numbers, advice)

    def order_by(self, cohort: Cohort, begins: tuple[int, ...], ends: tuple[int, ...]) -> None:
        """Begins or ends the order by waits that have succeeded, see `FailedWaits`.

        The order does not end if the warp has synchronised by other means since it began.
        """
        clocks = self.machine.clocks
        for row in cohort.rows.tolist():
            for wait in ends:
                before, after = self._ordered.pop((row, wait), (None, None))
                if before is not None and after is not None:
                    clocks.forgo(row, before, after)
            for wait in begins:
                slot = self._succeeded.pop((row, wait), None)
                if slot is not None:
                    rows = np.array([row])
                    before = clocks.copy_of(rows)[0]
                    clocks.acquire(rows, np.array([slot]))
                    self._ordered[row, wait] = before, clocks.copy_of(rows)[0]

    def wait(
        self,
        execution: Execution,
        address: Any,
        phase: Any,
        parity: bool,
        blocks: bool,
        relaxed: bool,
    ) -> Array | None:
        """test_wait and try_wait: whether a phase has completed.

        Args:
            phase: its parity, or the state that an arrival returned.
            blocks: whether warps for which it has not completed wait.
            relaxed: what the phase orders comes before the next fence of a warp, not the wait.

        Returns:
            A predicate (n, 1) or (n, 32); None if some warps of the cohort have to wait. The
            cohort is then split, and the other warps execute the instruction again.
        """
        machine, cohort, pc = self.machine, execution.cohort, execution.pc
        check_window(execution, np.asarray(address), BYTES, machine.shared_size, "shared")
        all_lanes = execution.lanes is None and cohort.mask is None
        narrow = all_lanes and _width(address) == _width(phase) == 1
        width = 1 if narrow else 32
        waiting_lanes = np.ones((cohort.n, 1), bool) if narrow else execution.active
        cohort_row, lane = np.nonzero(waiting_lanes)
        if not len(cohort_row):
            return np.zeros((cohort.n, width), bool)
        addresses = np.broadcast_to(address, (cohort.n, width))[cohort_row, lane]
        numbers = np.zeros((cohort.n, width), np.int64)
        lanes = np.full(len(lane), _SEVERAL - 1) if narrow else lane
        numbers[cohort_row, lane] = self.look_up(execution, cohort_row, addresses, None, lanes)[0]
        phases = self.phase[numbers, machine.row_block[cohort.rows][:, None]]
        wanted = np.broadcast_to(phase, (cohort.n, width)).astype(np.int64) & 0xFFFFFFFF
        if machine.shared_races and parity:
            rows, lane_numbers = cohort.rows[cohort_row], numbers[cohort_row, lane]
            self.late.require_in_time(rows, lane_numbers, wanted[cohort_row, lane], pc)
        passed = (phases ^ wanted) & 1 != 0 if parity else phases != wanted
        done: Array = np.asarray(passed & waiting_lanes)
        for row in cohort.rows.tolist() if pc in machine.program.failed_waits.loose else ():
            self._succeeded.pop((row, pc), None)
        # A warp continues if the phase of any of its lanes has completed; the others get false.
        stuck: Array = np.asarray(waiting_lanes.any(axis=1) & ~done.any(axis=1))
        # On a GPU a try_wait may time out; with an order_seed some do.
        gives_up = machine.random is not None and machine.random.random() < 0.25
        if blocks and stuck.any() and not gives_up:
            waits = WaitsForPhase(pc, numbers[stuck], waiting_lanes[stuck])
            machine.hold(cohort, ~stuck, pc, waits, pc)
            return None
        cohort.failed = bool(stuck.any())
        if cohort.failed:
            cohort.polls = self._polls(pc)
        if machine.shared_races and done.any():
            pairs = np.unique(cohort.rows[np.nonzero(done)[0]] * (1 << 20) + numbers[done])
            slots = self.slots(pairs & MOST, machine.row_block[pairs >> 20]) + 1
            if relaxed:
                machine.clocks.acquire_later(pairs >> 20, slots)
            elif pc in machine.program.failed_waits.loose:
                successes = zip((pairs >> 20).tolist(), slots.tolist(), strict=True)
                self._succeeded.update({(row, pc): slot for row, slot in successes})
            else:
                machine.clocks.acquire(pairs >> 20, slots)
            self.late.note(pairs & MOST, pairs >> 20, pc)
        return done


def _distinct(rows: Array, slots: Array) -> tuple[Array, Array]:
    """The distinct pairs of a row and a slot."""
    pairs = np.unique(rows << 32 | slots)
    return pairs >> 32, pairs & 0xFFFFFFFF


def _steps(together: bool, count: int) -> list[slice]:
    """Slices of ``count`` entries: all together, or one after the other."""
    return [slice(None)] if together else [slice(i, i + 1) for i in range(count)]


def _width(value: Any) -> int:
    return int(value.shape[1]) if getattr(value, "ndim", 0) else 1
