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
        # Slots of the clocks published up to this phase; slot + 1: up to the previous one.
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

    def init(self, here: Execution, address: Any, count: Any) -> None:
        """mbarrier.init: phase 0 begins, with ``count`` arrivals pending."""
        m, cohort = self.machine, here.cohort
        place, lane, at = self._lanes(here, address)
        counts = here.spread(count)[place, lane].astype(np.int64)
        numbers = self._add(at)
        rows = cohort.rows[place]
        blocks = m.row_block[rows]
        alive = np.flatnonzero(self.expected[numbers, blocks] > 0)
        if len(alive):
            first = alive[0]
            state = self.state(int(numbers[first]), int(blocks[first]))
            self._again(here, address, place[alive], lane[alive], state)
        if m.shared_races:
            where = here.spread(address + m.shared_base(cohort))
            m.shared_races.write(here, where, BYTES)
            m.shared_races.put(m.shared_races.written, where[place, lane], BYTES, MBARRIER)
            self.made_by[numbers, blocks] = m.row_member[rows]
            self.made_at[numbers, blocks] = m.clocks.clock[rows]
        bad = (counts < 1) | (counts > MOST)
        for which in np.flatnonzero(bad)[:1]:
            what = "an mbarrier with an impossible number of arrivals"
            numbers_text = f"count {int(counts[which])}; it can be 1 to {MOST:,}"
            way_out = "count the arrivals of one phase"
            m.fail(MbarrierMisuse, what, here.site(place[which]), numbers_text, way_out)
        self.expected[numbers, blocks] = self.pending[numbers, blocks] = counts
        self.tx[numbers, blocks] = self.phase[numbers, blocks] = 0
        self.late.forget(numbers, blocks)
        self.fenced[numbers, blocks] = 0
        self.all_fenced = False

    def _again(self, here: Execution, address: Any, place: Array, lane: Array, state: str) -> None:
        """These lanes of an mbarrier.init find an mbarrier: refused, or as after mbarrier.inval."""
        if "mbarrier_reinit" not in self.machine.config.allow:
            what = "an mbarrier is initialised a second time"
            advice = "initialise it once, or execute mbarrier.inval first"
            advice += way_out("mbarrier_reinit")
            self.machine.fail(MbarrierMisuse, what, here.site(place[0]), state, advice)
        self.at(here, place, here.spread(address)[place, lane], None, lane)
        self._forget(here, address, place, lane)

    def _forget(self, here: Execution, address: Any, place: Array, lane: Array) -> None:
        """The memory of mbarriers becomes ordinary memory that these lanes wrote."""
        m, cohort = self.machine, here.cohort
        if m.shared_races:
            where = here.spread(address + m.shared_base(cohort))[place, lane]
            m.shared_races.finish_copy(cohort.rows[place], where[:, None], BYTES, None)

    def fence_init(self, cohort: Cohort, lanes: Any) -> None:
        """fence.mbarrier_init, or a proxy fence: earlier initialisations become visible."""
        m = self.machine
        if m.shared_races and m.program.accesses.relaxed_barriers:
            m.clocks.fence_initialised(rows_of(cohort, lanes))
        if self.all_fenced or m.shared_races is None:
            return
        rows = rows_of(cohort, lanes)
        blocks, warps = m.row_block[rows], m.row_member[rows]
        maker = self.made_by[:, blocks]
        seen = m.clocks.seen[m.row_cluster[rows], warps, maker]
        known = (maker == warps) | (seen >= self.made_at[:, blocks])
        for place, block in enumerate(blocks.tolist()):
            self.fenced[known[:, place], block] = 1
        self.all_fenced = bool((self.fenced[self.expected > 0] > 0).all())

    def require_fenced(self, site: Site, numbers: Array, blocks: Array) -> None:
        """Checks that the initialisation of mbarriers (k,) is visible to the asynchronous proxy.

        Not reported: a copy of the warp that initialised its mbarrier and has synchronised with
        nothing since.

        Raises:
            FenceError: it is not.
        """
        m = self.machine
        allowed = "mbarrier_init_fence" in m.config.allow
        if self.all_fenced or m.shared_races is None or allowed:
            return
        rows = site.cohort.rows
        clocks = m.clocks
        alone = self.made_by[numbers, blocks] == m.row_member[rows]
        alone &= clocks.synced[rows] <= self.made_at[numbers, blocks]
        self.fenced[numbers[alone], blocks[alone]] = 1
        missing = self.fenced[numbers, blocks] == 0
        for which in np.flatnonzero(missing)[:1]:
            what = "an asynchronous copy signals an mbarrier that no fence followed"
            text = f"mbarrier at shared offset {self.addresses[int(numbers[which])]}; its "
            text += "initialisation need not be visible to the asynchronous proxy"
            advice = "execute fence.mbarrier_init.release.cluster or fence.proxy.async after "
            advice += "mbarrier.init, before the barrier that the issuing thread passes"
            advice += way_out("mbarrier_init_fence")
            m.fail(FenceError, what, site._replace(row=which), text, advice)

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
            m = self.machine
            if m.proxy is not None:
                self._slots = np.append(self._slots, m.clocks.new_slots(2 * m.cluster_size))
                name = f"a bulk copy that the mbarrier at shared offset {address} waits for"
                ranks = range(m.cluster_size)
                of_ranks = [m.proxy.agent("mbarrier", (address, r), name) for r in ranks]
                self.columns = np.append(self.columns, [of_ranks], axis=0)
        found: Array = self._number[addresses // BYTES]
        return found

    def inval(self, here: Execution, address: Any) -> None:
        """mbarrier.inval: its memory becomes ordinary memory.

        Raises:
            RaceError: a warp uses the mbarrier, and nothing orders that before.
        """
        place, lane, numbers, blocks = self.find(here, address)
        if self.uses is not None:
            m, rows = self.machine, here.cohort.rows[place]
            seen = m.clocks.seen[m.row_cluster[rows], m.row_member[rows]]
            late = self.uses[numbers, blocks] > seen[:, : m.cluster_warps]
            late[np.arange(len(rows)), m.row_member[rows]] = False
            for which, other in np.argwhere(late)[:1].tolist():
                what = "race in shared memory: an mbarrier is invalidated while others may use it"
                text = f"shared offset {self.addresses[int(numbers[which])]}; "
                text += f"{m.member_name(other)} arrives or waits there"
                advice = "pass a barrier of the block between the last use and mbarrier.inval"
                m.fail(RaceError, what, here.site(place[which]), text, advice)
            several = self.users[numbers, blocks, m.row_member[rows]] == _SEVERAL
            if several.any() and "warp_synchronous" not in m.config.allow:
                which = int(np.argmax(several))
                what = "race in shared memory: an mbarrier is invalidated while other lanes of the "
                what += "warp may use it"
                text = f"shared offset {self.addresses[int(numbers[which])]}"
                site = here.site(place[which], int(lane[which]))
                m.fail(RaceError, what, site, text, SYNCHRONISE_LANES)
        self.expected[numbers, blocks] = 0
        self._forget(here, address, place, lane)

    def _lanes(self, here: Execution, address: Any) -> tuple[Array, Array, Array]:
        """(row of the cohort, lane, address) of every active lane, in order."""
        check_window(here, np.asarray(address), BYTES, self.machine.shared_size, "shared")
        place, lane = np.nonzero(here.active)
        return place, lane, here.spread(address)[place, lane]

    def find(self, here: Execution, address: Any) -> tuple[Array, ...]:
        """(row of the cohort, lane, barrier, block) of every active lane, in order.

        Raises:
            OutOfBounds, Misaligned: the address is invalid for an mbarrier.
            MbarrierMisuse: no mbarrier has been initialised there.
            RaceError: its initialisation is not ordered before.
        """
        blocks = None
        if remote(address):
            blocks, address = resolved(here, address, BYTES)
        place, lane, where = self._lanes(here, address)
        at = None if blocks is None else blocks[place, lane]
        return place, lane, *self.at(here, place, where, at, lane)

    def at(
        self, here: Execution, place: Array, address: Array, blocks: Array | None, lane: Array
    ) -> tuple[Array, Array]:
        """(barrier, block) of rows ``place`` of a cohort, at addresses (k,) that are in bounds.

        ``blocks`` are others of their clusters than those of the rows, and ``lane`` theirs.
        """
        m, rows = self.machine, here.cohort.rows[place]
        numbers = self._number[address // BYTES]
        blocks = m.row_block[rows] if blocks is None else blocks
        missing = numbers < 0
        if not missing.any():
            missing = self.expected[numbers, blocks] == 0
        for which in np.flatnonzero(missing)[:1]:
            known = ", ".join(map(str, self.addresses)) or "none"
            what = "an mbarrier that is not initialised"
            text = f"shared offset {int(address[which])}; initialised ones: {known}"
            advice = "execute mbarrier.init, and then a barrier that all its users pass"
            m.fail(MbarrierMisuse, what, here.site(place[which]), text, advice)
        if m.shared_races is None:
            return numbers, blocks
        warps, maker = m.row_member[rows], self.made_by[numbers, blocks]
        seen = m.clocks.initialised(m.row_cluster[rows], warps, maker)
        early = (maker != warps) & (seen < self.made_at[numbers, blocks])
        for which in np.flatnonzero(early)[:1]:
            problem = "an mbarrier is used, and its initialisation is not ordered before"
            at, by = self.addresses[int(numbers[which])], int(maker[which])
            text = f"shared offset {at}; warp {by} initialises it"
            advice = "pass a barrier of the block between mbarrier.init and its first use"
            advice += RELAXED if m.program.accesses.relaxed_barriers else ""
            site = here.site(place[which])
            m.fail(RaceError, f"race in shared memory: {problem}", site, text, advice)
        if self.uses is not None:
            users, their = self.users, (numbers, blocks, warps)
            several = (self.uses[their] >= m.clocks.synced[rows]) & (users[their] > 0)
            several &= users[their] != lane + 1
            self.uses[their], users[their] = m.clocks.clock[rows], lane + 1
            several |= users[their] != lane + 1
            np.maximum.at(users, their, np.where(several, _SEVERAL, 0))
            m.shared_races.accessed[rows] = True
        return numbers, blocks

    def slots(self, k: Array, b: Array) -> Array:
        """Slots of the clocks published at mbarriers ``k`` of blocks ``b``; plus 1: see _slots."""
        slots: Array = self._slots[k] + 2 * (b % self.machine.cluster_size)
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

    def describe(self, c: Cohort) -> list[str]:
        """What a waiting cohort waits for: one line per barrier and block."""
        m, waits = self.machine, c.waits
        place, lane = np.nonzero(waits.lanes)
        numbers = waits.barriers[place, lane]
        blocks = m.row_block[c.rows[place]]
        lines = []
        for block, number in sorted(set(zip(blocks.tolist(), numbers.tolist(), strict=True))):
            rows = np.unique(c.rows[place[(blocks == block) & (numbers == number)]])
            warps = ", ".join(map(str, m.row_warp[rows]))
            lines.append(
                f"block {m.block_name(int(rows[0]))} warp{'s' * (len(rows) > 1)} {warps} "
                f"at {self.state(number, block)}; {m.program.describe(waits.pc)}"
            )
        return lines

    # ---- arrivals and bytes

    def arrive(
        self, here: Execution, address: Any, count: Any, modifiers: str = "", expects: Any = None
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
        m = self.machine
        release, drop = "relaxed" not in modifiers, "drop" in modifiers
        place, lane, numbers, blocks = self.find(here, address)
        counts = here.spread(count)[place, lane].astype(np.int64)
        rows = here.cohort.rows[place]
        for which in np.flatnonzero(counts < 1)[:1]:
            what = "an arrival at an mbarrier that counts as none"
            text, advice = f"count {counts[which]}", "branch around it, or give a count from 1 on"
            m.fail(MbarrierMisuse, what, here.site(place[which]), text, advice)
        tx = None if expects is None else here.spread(expects)[place, lane]
        if m.shared_races:
            self.late.arrives[numbers, rows] = True
        if m.shared_races and release:
            m.shared_races.release_lanes(here)
        states = np.empty(len(place), np.int64)
        # Together if no phase can complete in between.
        at, total = self._totals(numbers, blocks, counts)
        together = not drop and bool((total <= self.pending[at]).all())
        for step in _steps(together, len(place)):
            k, b = numbers[step], blocks[step]
            states[step] = self.phase[k, b] | self.pending[k, b] << 32
            if tx is not None:
                self._expect(here, k, b, tx[step].astype(np.int64), place[step])
            if m.shared_races:
                publish = m.clocks.publish if release else m.clocks.publish_fenced
                publish(*_distinct(rows[step], self.slots(k, b)))
            self._demand_room(here, k, b, place[step], self.pending[k, b] < counts[step])
            np.subtract.at(self.pending, (k, b), counts[step])
            if drop:
                self.expected[k, b] -= counts[step]
            if "noComplete" in modifiers and (self.pending[k, b] == 0).any():
                what = "an arrival with .noComplete completes its phase"
                text, advice = self.state(int(k[0]), int(b[0])), "use it only if others follow"
                m.fail(MbarrierMisuse, what, here.site(place[step][0]), text, advice)
            self._complete(k, b)
        state = np.zeros((here.cohort.n, 32), np.uint64)
        state[place, lane] = states
        return state

    def arrive_later(self, here: Execution, k: Array, known: Array | None) -> None:
        """Arrivals of single threads (n,) that cp.async.mbarrier.arrive requested earlier.

        Args:
            known: their clocks at that time; None without checkers.
        """
        m, rows = self.machine, here.cohort.rows
        b = m.row_block[rows]
        if m.shared_races and known is not None:
            m.clocks.publish_known(rows, self.slots(k, b), known)
        np.subtract.at(self.pending, (k, b), 1)
        self._demand_room(here, k, b, np.arange(len(k)), self.pending[k, b] < 0)
        self._complete(k, b)

    def complete_store(self, here: Execution, stored: Any, address: Any, size: int) -> None:
        """complete_tx of the ``size`` bytes that each lane has ``stored`` by st.async."""
        m = self.machine
        place, lane, numbers, blocks = self.find(here, address)
        if not len(place):
            return
        there = resolved(here, stored, size)[0][place, lane]
        for which in np.flatnonzero(there != blocks)[:1]:
            what = "an asynchronous store whose mbarrier lies in another block than its destination"
            text = f"blocks {blocks[which]} and {there[which]} of the wave"
            advice = "give mapa the same rank for both addresses"
            m.fail(MbarrierMisuse, what, here.site(place[which]), text, advice)
        rows = here.cohort.rows[place]
        if m.shared_races:
            m.clocks.publish(*_distinct(rows, self.slots(numbers, blocks)))
        phases = self.deliver(numbers, blocks, size)
        # Lanes have no order: a phase that ends between two of them shows the bytes of neither.
        keys = np.stack((place, numbers, blocks))
        _, first, group = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        for which in np.flatnonzero(phases != phases[first][group.ravel()])[:1]:
            what = "a phase of an mbarrier ends within an st.async of a warp"
            text = self.state(int(numbers[which]), int(blocks[which]))
            advice = "expect the bytes of all lanes"
            m.fail(MbarrierMisuse, what, here.site(place[which]), text, advice)

    def expect(self, here: Execution, address: Any, size: Any) -> None:
        """mbarrier.expect_tx without an arrival; a negative size completes (complete_tx)."""
        place, lane, numbers, blocks = self.find(here, address)
        sizes = here.spread(size)[place, lane].astype(np.int64)
        self._expect(here, numbers, blocks, sizes, place)
        self._complete(numbers, blocks)

    def _expect(self, here: Execution, k: Array, b: Array, size: Array, place: Array) -> None:
        np.add.at(self.tx, (k, b), size)
        bad = np.abs(self.tx[k, b]) > MOST
        for which in np.flatnonzero(bad)[:1]:
            what = "an mbarrier counts more bytes than it can"
            text = f"{int(self.tx[k, b][which]):,} bytes outstanding; at most {MOST:,}"
            advice = "expect the bytes of one phase only, in one place"
            self.machine.fail(MbarrierMisuse, what, here.site(place[which]), text, advice)

    def deliver(self, numbers: Array, blocks: Array, size: int) -> Array:
        """complete_tx of ``size`` by bulk copies, in order; returns the phase of each copy.

        The count may become negative, if bytes arrive before they are expected.
        """
        phases = np.empty(len(numbers), np.int64)
        at, total = self._totals(numbers, blocks, np.full(len(numbers), size))
        # A phase can only complete with its last copy, unless more bytes arrive than it expects.
        together = bool(((self.pending[at] > 0) | (total <= self.tx[at])).all())
        for step in _steps(together, len(numbers)):
            k, b = numbers[step], blocks[step]
            phases[step] = self.phase[k, b]
            np.subtract.at(self.tx, (k, b), size)
            self._complete(k, b)
        return phases

    def _demand_room(self, here: Execution, k: Array, b: Array, place: Array, late: Array) -> None:
        """Fails for the first arrival that its mbarrier does not expect, if there is one."""
        for which in np.flatnonzero(late)[:1]:
            what = "more arrivals at an mbarrier than it expects"
            text = self.state(int(k[which]), int(b[which]))
            advice = "arrive as often as mbarrier.init counts, and wait before the next phase"
            self.machine.fail(MbarrierMisuse, what, here.site(place[which]), text, advice)

    def _totals(
        self, numbers: Array, blocks: Array, amounts: Array
    ) -> tuple[tuple[Array, Array], Array]:
        """The distinct (barriers, blocks), and the sum of the amounts for each."""
        keys, group = np.unique(numbers * self.tx.shape[1] + blocks, return_inverse=True)
        total = np.bincount(group, weights=amounts).astype(np.int64)
        return np.divmod(keys, self.tx.shape[1]), total

    def _complete(self, k: Array, b: Array) -> None:
        """Completes the phases of these barriers that are finished, and releases waiting warps."""
        m = self.machine
        full = (self.pending[k, b] == 0) & (self.tx[k, b] == 0) & (self.expected[k, b] > 0)
        if not full.any():
            return
        k, b = np.divmod(np.unique(k[full] * self.tx.shape[1] + b[full]), self.tx.shape[1])
        self.phase[k, b] += 1
        self.pending[k, b] = self.expected[k, b]
        if m.shared_races:
            published, slots = m.clocks.published, self.slots(k, b)
            group, rank = np.divmod(b, m.cluster_size)
            self.late.check(k, b, published[group, slots])
            columns = self.columns[k, rank]
            # Clocks of earlier phases remain: a completed phase implies the earlier ones.
            published[group, slots + 1] = published[group, slots]
            # Copies of this phase are complete: the time of their agent is the number of phases.
            published[group, slots + 1, columns] = self.phase[k, b]
        ended = np.zeros(self.tx.shape, bool)
        ended[k, b] = True
        for c in m.cohorts:
            if isinstance(c.waits, WaitsForPhase):
                blocks = m.row_block[c.rows][:, None]
                if (ended[c.waits.barriers, blocks] & c.waits.lanes).any():
                    c.waits = None

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

    def ignored(self, here: Execution) -> None:
        """A wait whose result no instruction uses.

        Raises:
            MbarrierMisuse: a lane executes it.
        """
        if not here.active.any():
            return
        what = "the result of a wait for an mbarrier is ignored"
        numbers = "try_wait may return false after a time limit, and test_wait returns at once: "
        numbers += "the phase need not have completed, and nothing is ordered then"
        advice = "repeat it in a loop until it returns true"
        self.machine.fail(MbarrierMisuse, what, here.first(), numbers, advice)

    def order_by(self, cohort: Cohort, begins: tuple[int, ...], ends: tuple[int, ...]) -> None:
        """The order by some waits that have succeeded begins or ends here, see `FailedWaits`.

        It does not end if the warp has synchronised by other means since it began.
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
                    before = clocks.of(rows)[0]
                    clocks.acquire(rows, np.array([slot]))
                    self._ordered[row, wait] = before, clocks.of(rows)[0]

    def wait(
        self, here: Execution, address: Any, phase: Any, parity: bool, blocks: bool, relaxed: bool
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
        m, cohort, pc = self.machine, here.cohort, here.pc
        check_window(here, np.asarray(address), BYTES, m.shared_size, "shared")
        all_lanes = here.lanes is None and cohort.mask is None
        narrow = all_lanes and _width(address) == _width(phase) == 1
        width = 1 if narrow else 32
        waiting_lanes = np.ones((cohort.n, 1), bool) if narrow else here.active
        place, lane = np.nonzero(waiting_lanes)
        if not len(place):
            return np.zeros((cohort.n, width), bool)
        where = np.broadcast_to(address, (cohort.n, width))[place, lane]
        numbers = np.zeros((cohort.n, width), np.int64)
        lanes = np.full(len(lane), _SEVERAL - 1) if narrow else lane
        numbers[place, lane] = self.at(here, place, where, None, lanes)[0]
        now = self.phase[numbers, m.row_block[cohort.rows][:, None]]
        wanted = np.broadcast_to(phase, (cohort.n, width)).astype(np.int64) & 0xFFFFFFFF
        if m.shared_races and parity:
            at = numbers[place, lane]
            self.late.require_in_time(cohort.rows[place], at, wanted[place, lane], pc)
        passed = (now ^ wanted) & 1 != 0 if parity else now != wanted
        done: Array = np.asarray(passed & waiting_lanes)
        for row in cohort.rows.tolist() if pc in m.program.failed_waits.loose else ():
            self._succeeded.pop((row, pc), None)
        # A warp continues if the phase of any of its lanes has completed; the others get false.
        stuck: Array = np.asarray(waiting_lanes.any(axis=1) & ~done.any(axis=1))
        # On a GPU a try_wait may time out; with an order_seed some do.
        gives_up = m.random is not None and m.random.random() < 0.25
        if blocks and stuck.any() and not gives_up:
            m.hold(cohort, ~stuck, pc, WaitsForPhase(pc, numbers[stuck], waiting_lanes[stuck]), pc)
            return None
        cohort.failed = bool(stuck.any())
        if cohort.failed:
            cohort.polls = self._polls(pc)
        if m.shared_races and done.any():
            pairs = np.unique(cohort.rows[np.nonzero(done)[0]] * (1 << 20) + numbers[done])
            slots = self.slots(pairs & MOST, m.row_block[pairs >> 20]) + 1
            if relaxed:
                m.clocks.acquire_later(pairs >> 20, slots)
            elif pc in m.program.failed_waits.loose:
                found = zip((pairs >> 20).tolist(), slots.tolist(), strict=True)
                self._succeeded.update({(row, pc): slot for row, slot in found})
            else:
                m.clocks.acquire(pairs >> 20, slots)
            self.late.note(pairs & MOST, pairs >> 20, pc)
        return done


def _distinct(rows: Array, slots: Array) -> tuple[Array, Array]:
    """The distinct pairs of a row and a slot."""
    pairs = np.unique(rows << 32 | slots)
    return pairs >> 32, pairs & 0xFFFFFFFF


def _steps(together: bool, count: int) -> list[slice]:
    """Everything in one step, or one after the other."""
    return [slice(None)] if together else [slice(i, i + 1) for i in range(count)]


def _width(value: Any) -> int:
    return int(value.shape[1]) if getattr(value, "ndim", 0) else 1
