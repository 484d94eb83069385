"""mbarriers: objects in shared memory that count arrivals and bytes, phase by phase.

A phase completes when the number of arrivals given to mbarrier.init have arrived and all expected
bytes (expect_tx) have been delivered by bulk copies (complete_tx); then the next phase begins. A
try_wait in a loop blocks its warps until the phase is complete, so a phase that cannot complete is
a deadlock. On hardware it may time out, so a kernel has to try again: where nothing repeats a
try_wait until it succeeds (`ptx.repeats`), it does not block, as test_wait.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.bounds import check_window
from flashgen.emulator.errors import MbarrierMisuse
from flashgen.emulator.machine.mbarrier_table import BYTES, MOST, MbarrierTable
from flashgen.emulator.state.cohort import (
    Cohort,
    SingleThreads,
    WaitsForPhase,
    active,
    first_bad,
    spread,
)
from flashgen.emulator.state.wave import Site

Array = npt.NDArray[Any]
_FEW_TURNS = 64


class Mbarriers(MbarrierTable):
    """Arrivals at mbarriers, deliveries of bytes, and waits."""

    # ---- arrivals and bytes

    def arrive(
        self,
        cohort: Cohort,
        address: Any,
        count: Any,
        lanes: Any,
        pc: int,
        expects: Any = None,
        modifiers: tuple[str, ...] = (),
    ) -> Array:
        """mbarrier.arrive and arrive_drop: ``count`` arrivals by each lane.

        Args:
            expects: bytes per lane to expect before the arrival.
            modifiers: "relaxed": earlier accesses are not published; "drop": later phases expect
                ``count`` arrivals fewer; "noComplete": the phase must not complete.

        Returns:
            The state of each lane, (n, 32): the phase that it arrived at, and in the upper 32
            bits the arrivals that were pending before.
        """
        m = self.machine
        release, drop = "relaxed" not in modifiers, "drop" in modifiers
        place, lane, numbers, blocks = self.find(cohort, address, lanes, pc)
        counts = spread(count, cohort.n)[place, lane].astype(np.int64)
        rows = cohort.rows[place]
        tx = None if expects is None else spread(expects, cohort.n)[place, lane]
        if m.shared_races:
            self.late.arrives[numbers, rows] = True
        if m.shared_races and release:
            m.shared_races.release_lanes(cohort, lanes)
        states = np.empty(len(place), np.int64)
        # Together if no phase can complete in between.
        at, total = self._totals(numbers, blocks, counts)
        together = not drop and bool((total <= self.pending[at]).all())
        for step in _steps(together, len(place)):
            k, b = numbers[step], blocks[step]
            states[step] = self.phase[k, b] | self.pending[k, b] << 32
            if tx is not None:
                self._expect(cohort, k, b, tx[step].astype(np.int64), place[step], pc)
            if m.shared_races and release:
                m.shared_races.clocks.publish(*_distinct(rows[step], self.slots(k, b)))
            self._demand_room(cohort, k, b, place[step], self.pending[k, b] < counts[step], pc)
            np.subtract.at(self.pending, (k, b), counts[step])
            if drop:
                self.expected[k, b] -= counts[step]
            if "noComplete" in modifiers and (self.pending[k, b] == 0).any():
                m.fail(
                    MbarrierMisuse,
                    "an arrival with .noComplete completes its phase",
                    Site(cohort, pc, int(place[step][0])),
                    self.state(int(k[0]), int(b[0])),
                    "use it only if other arrivals follow",
                )
            self._complete(k, b)
        state = np.zeros((cohort.n, 32), np.uint64)
        state[place, lane] = states
        return state

    def arrive_later(self, threads: SingleThreads, k: Array, known: Array | None, pc: int) -> None:
        """Single arrivals of threads (n,) that cp.async.mbarrier.arrive requested earlier.

        Args:
            known: their clocks at that time; None without checkers.
        """
        m = self.machine
        b = m.row_block[threads.rows]
        if m.shared_races and known is not None:
            m.shared_races.clocks.publish_known(threads.rows, self.slots(k, b), known)
        np.subtract.at(self.pending, (k, b), 1)
        self._demand_room(threads, k, b, np.arange(len(k)), self.pending[k, b] < 0, pc)
        self._complete(k, b)

    def complete_store(self, cohort: Cohort, address: Any, size: int, lanes: Any, pc: int) -> None:
        """complete_tx of the ``size`` bytes that each lane has stored by st.async."""
        m = self.machine
        place, _, numbers, blocks = self.find(cohort, address, lanes, pc)
        if not len(place):
            return
        rows = cohort.rows[place]
        if m.shared_races:
            m.shared_races.clocks.publish(*_distinct(rows, self.slots(numbers, blocks)))
        self.deliver(numbers, blocks, size)

    def expect(self, cohort: Cohort, address: Any, size: Any, lanes: Any, pc: int) -> None:
        """mbarrier.expect_tx without an arrival; a negative size completes (complete_tx)."""
        place, lane, numbers, blocks = self.find(cohort, address, lanes, pc)
        sizes = spread(size, cohort.n)[place, lane].astype(np.int64)
        self._expect(cohort, numbers, blocks, sizes, place, pc)
        self._complete(numbers, blocks)

    def _expect(
        self, cohort: Cohort, k: Array, b: Array, size: Array, place: Array, pc: int
    ) -> None:
        np.add.at(self.tx, (k, b), size)
        bad = np.abs(self.tx[k, b]) > MOST
        if bad.any():
            which = int(np.argmax(bad))
            self.machine.fail(
                MbarrierMisuse,
                "an mbarrier counts more bytes than it can",
                Site(cohort, pc, int(place[which])),
                f"{int(self.tx[k, b][which]):,} bytes outstanding; at most {MOST:,}",
                "expect the bytes of one phase only, in one place",
            )

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

    def _demand_room(
        self, cohort: Cohort, k: Array, b: Array, place: Array, late: Array, pc: int
    ) -> None:
        """Fails for the first arrival that its mbarrier does not expect, if there is one."""
        if not late.any():
            return
        which = int(np.argmax(late))
        self.machine.fail(
            MbarrierMisuse,
            "more arrivals at an mbarrier than it expects",
            Site(cohort, pc, int(place[which])),
            self.state(int(k[which]), int(b[which])),
            "arrive as often as mbarrier.init counts, and wait before the next phase",
        )

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
            published, slots = m.shared_races.clocks.published, self.slots(k, b)
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

    def ignored(self, cohort: Cohort, lanes: Any, pc: int) -> None:
        """A wait whose result no instruction uses.

        Raises:
            MbarrierMisuse: a lane executes it.
        """
        if not active(cohort, lanes).any():
            return
        row, lane = first_bad(cohort, lanes, True)
        self.machine.fail(
            MbarrierMisuse,
            "the result of a wait for an mbarrier is ignored",
            Site(cohort, pc, row, lane),
            "try_wait may return false after a time limit, and test_wait returns at once: the "
            "phase need not have completed, and nothing is ordered then",
            "repeat it in a loop until it returns true",
        )

    def order_by(self, cohort: Cohort, begins: tuple[int, ...], ends: tuple[int, ...]) -> None:
        """The order by some waits that have succeeded begins or ends here, see `FailedWaits`.

        It does not end if the warp has synchronised by other means since it began.
        """
        races = self.machine.shared_races
        assert races is not None
        for row in cohort.rows.tolist():
            for wait in ends:
                before, after = self._ordered.pop((row, wait), (None, None))
                if before is not None and after is not None:
                    races.clocks.forgo(row, before, after)
            for wait in begins:
                slot = self._succeeded.pop((row, wait), None)
                if slot is not None:
                    rows = np.array([row])
                    before = races.clocks.of(rows)[0]
                    races.clocks.acquire(rows, np.array([slot]))
                    self._ordered[row, wait] = before, races.clocks.of(rows)[0]

    def wait(
        self,
        cohort: Cohort,
        address: Any,
        phase: Any,
        lanes: Any,
        pc: int,
        parity: bool,
        blocks: bool,
    ) -> Array | None:
        """test_wait, or try_wait if ``blocks``: whether a phase has completed.

        Args:
            phase: its parity, or the state that an arrival returned.

        Returns:
            A predicate (n, 1) or (n, 32); None if some warps of the cohort have to wait. The
            cohort is then split, and the other warps execute the instruction again.
        """
        m = self.machine
        check_window(m, cohort, np.asarray(address), lanes, BYTES, pc, m.shared_size, "shared")
        narrow = lanes is None and cohort.mask is None and _width(address) == _width(phase) == 1
        width = 1 if narrow else 32
        waiting_lanes = np.ones((cohort.n, 1), bool) if narrow else active(cohort, lanes)
        place, lane = np.nonzero(waiting_lanes)
        if not len(place):
            return np.zeros((cohort.n, width), bool)
        here = np.broadcast_to(address, (cohort.n, width))[place, lane]
        numbers = np.zeros((cohort.n, width), np.int64)
        numbers[place, lane] = self.at(cohort, place, here, pc)[0]
        now = self.phase[numbers, m.row_block[cohort.rows][:, None]]
        wanted = np.broadcast_to(phase, (cohort.n, width)).astype(np.int64) & 0xFFFFFFFF
        if m.shared_races and parity:
            here = numbers[place, lane]
            self.late.require_in_time(cohort.rows[place], here, wanted[place, lane], pc)
        done: Array = (
            np.asarray(((now ^ wanted) & 1 != 0) if parity else now != wanted) & waiting_lanes
        )
        for row in cohort.rows.tolist() if pc in m.program.failed_waits.loose else ():
            self._succeeded.pop((row, pc), None)
        # A warp continues if the phase of any of its lanes has completed; the others get false.
        stuck: Array = np.asarray(waiting_lanes.any(axis=1) & ~done.any(axis=1))
        # On a GPU a try_wait may time out; with an order_seed some do.
        gives_up = m.random is not None and m.random.random() < 0.25
        if blocks and stuck.any() and not gives_up:
            waiting = cohort if stuck.all() else m.split(cohort, ~stuck, pc, pc)[1]
            waiting.waits = WaitsForPhase(pc, numbers[stuck], waiting_lanes[stuck])
            return None
        if stuck.any():
            cohort.polls = self._polls(pc)
        if m.shared_races and done.any():
            pairs = np.unique(cohort.rows[np.nonzero(done)[0]] * (1 << 20) + numbers[done])
            slots = self.slots(pairs & MOST, m.row_block[pairs >> 20]) + 1
            if pc in m.program.failed_waits.loose:
                at = zip((pairs >> 20).tolist(), slots.tolist(), strict=True)
                self._succeeded.update({(row, pc): slot for row, slot in at})
            else:
                m.shared_races.clocks.acquire(pairs >> 20, slots)
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
