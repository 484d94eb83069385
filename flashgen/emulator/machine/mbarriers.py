"""mbarriers: objects in shared memory that count arrivals and bytes, phase by phase.

A phase completes when the number of arrivals given to mbarrier.init have arrived and all expected
bytes (expect_tx) have been delivered by bulk copies (complete_tx); then the next phase begins. A
try_wait blocks its warps until the phase is complete. On hardware it may time out, so kernels have
to try again; in the emulator it does not, so a phase that cannot complete is a deadlock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.bounds import check_window
from flashgen.emulator.checks.shadow import MBARRIER
from flashgen.emulator.errors import MbarrierMisuse, RaceError
from flashgen.emulator.state.cohort import Cohort, WaitsForPhase, active, spread
from flashgen.emulator.state.wave import Site, Wave

Array = npt.NDArray[Any]
BYTES = 8
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
        # Slots of the clocks published up to this phase; slot + 1: up to the previous one.
        self._slots: list[int] = []
        self.columns: list[int] = []

    # ---- init and inval

    def init(self, cohort: Cohort, address: Any, count: Any, lanes: Any, pc: int) -> None:
        """mbarrier.init: phase 0 begins, with ``count`` arrivals pending."""
        m = self.machine
        place, lane, at = self._lanes(cohort, address, lanes, pc)
        counts = spread(count, cohort.n)[place, lane].astype(np.int64)
        numbers = self._add(at)
        rows = cohort.rows[place]
        blocks = m.row_block[rows]
        if m.shared_races:
            where = spread(address + m.shared_base(cohort), cohort.n)
            m.shared_races.write(cohort, where, BYTES, pc, lanes)
            m.shared_races.put(m.shared_races.written, where[place, lane], BYTES, MBARRIER)
            self.made_by[numbers, blocks] = m.row_warp[rows]
            self.made_at[numbers, blocks] = m.shared_races.clocks.clock[rows]
        alive = self.expected[numbers, blocks] > 0
        if alive.any():
            which = int(np.argmax(alive))
            m.fail(
                MbarrierMisuse,
                "an mbarrier is initialised a second time",
                Site(cohort, pc, int(place[which])),
                self.state(int(numbers[which]), int(blocks[which])),
                "initialise it once, or execute mbarrier.inval first",
            )
        bad = (counts < 1) | (counts > MOST)
        if bad.any():
            which = int(np.argmax(bad))
            m.fail(
                MbarrierMisuse,
                "an mbarrier with an impossible number of arrivals",
                Site(cohort, pc, int(place[which])),
                f"count {int(counts[which])}; it can be 1 to {MOST:,}",
                "count the arrivals of one phase",
            )
        self.expected[numbers, blocks] = self.pending[numbers, blocks] = counts
        self.tx[numbers, blocks] = self.phase[numbers, blocks] = 0

    def _add(self, addresses: Array) -> Array:
        """Numbers of the barriers at the given addresses; unknown addresses get a new number."""
        for address in np.unique(addresses).tolist():
            if self._number[address // BYTES] >= 0:
                continue
            self._number[address // BYTES] = len(self.addresses)
            self.addresses.append(address)
            for name in ("expected", "pending", "tx", "phase", "made_by", "made_at"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 1), (0, 0))))
            races = self.machine.shared_races
            if races is not None and races.proxy is not None:
                self._slots.append(races.clocks.new_slots(2))
                name = f"a bulk copy that the mbarrier at shared offset {address} waits for"
                self.columns.append(races.proxy.agent("mbarrier", address, name))
        found: Array = self._number[addresses // BYTES]
        return found

    def inval(self, cohort: Cohort, address: Any, lanes: Any, pc: int) -> None:
        """mbarrier.inval: its memory becomes ordinary memory."""
        m = self.machine
        place, lane, numbers, blocks = self.find(cohort, address, lanes, pc)
        self.expected[numbers, blocks] = 0
        if m.shared_races:
            where = spread(address + m.shared_base(cohort), cohort.n)[place, lane]
            m.shared_races.finish_copy(cohort.rows[place], where[:, None], BYTES, None)

    def _lanes(
        self, cohort: Cohort, address: Any, lanes: Any, pc: int
    ) -> tuple[Array, Array, Array]:
        """(row of the cohort, lane, address) of every active lane, in order."""
        m = self.machine
        check_window(m, cohort, np.asarray(address), lanes, BYTES, pc, m.shared_size, "shared")
        place, lane = np.nonzero(active(cohort, lanes))
        return place, lane, spread(address, cohort.n)[place, lane]

    def find(self, cohort: Cohort, address: Any, lanes: Any, pc: int) -> tuple[Array, ...]:
        """(row of the cohort, lane, barrier, block) of every active lane, in order.

        Raises:
            OutOfBounds, Misaligned: the address is invalid for an mbarrier.
            MbarrierMisuse: no mbarrier has been initialised there.
            RaceError: its initialisation is not ordered before.
        """
        place, lane, where = self._lanes(cohort, address, lanes, pc)
        return place, lane, *self.at(cohort, place, where, pc)

    def at(self, cohort: Cohort, place: Array, address: Array, pc: int) -> tuple[Array, Array]:
        """(barrier, block) of rows ``place`` of a cohort, at addresses (k,) that are in bounds."""
        m = self.machine
        numbers = self._number[address // BYTES]
        blocks = m.row_block[cohort.rows[place]]
        missing = numbers < 0
        if not missing.any():
            missing = self.expected[numbers, blocks] == 0
        if missing.any():
            which = int(np.argmax(missing))
            m.fail(
                MbarrierMisuse,
                "an mbarrier that is not initialised",
                Site(cohort, pc, int(place[which])),
                f"shared offset {int(address[which])}; initialised ones: "
                + (", ".join(map(str, self.addresses)) or "none"),
                "execute mbarrier.init, and then a barrier that all its users pass",
            )
        if m.shared_races is None:
            return numbers, blocks
        rows = cohort.rows[place]
        warps, maker = m.row_warp[rows], self.made_by[numbers, blocks]
        seen = m.shared_races.clocks.seen[blocks, warps, maker]
        early = (maker != warps) & (seen < self.made_at[numbers, blocks])
        if early.any():
            which = int(np.argmax(early))
            m.fail(
                RaceError,
                "race in shared memory: an mbarrier is used, and its initialisation is not ordered "
                "before",
                Site(cohort, pc, int(place[which])),
                f"shared offset {self.addresses[int(numbers[which])]}; warp "
                f"{int(maker[which])} initialises it",
                "pass a barrier of the block between mbarrier.init and its first use",
            )
        return numbers, blocks

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
            The state of each lane, (n, 32): the phase that it arrived at.
        """
        m = self.machine
        release, drop = "relaxed" not in modifiers, "drop" in modifiers
        place, lane, numbers, blocks = self.find(cohort, address, lanes, pc)
        counts = spread(count, cohort.n)[place, lane].astype(np.int64)
        rows = cohort.rows[place]
        tx = None if expects is None else spread(expects, cohort.n)[place, lane]
        phases = np.empty(len(place), np.int64)
        # Together if no phase can complete in between.
        at, total = self._totals(numbers, blocks, counts)
        together = not drop and bool((total <= self.pending[at]).all())
        for step in _steps(together, len(place)):
            k, b = numbers[step], blocks[step]
            phases[step] = self.phase[k, b]
            if tx is not None:
                self._expect(cohort, k, b, tx[step].astype(np.int64), place[step], pc)
            if m.shared_races and release:
                pairs = np.unique(rows[step] * (1 << 20) + k)
                slots = np.array(self._slots)[pairs & MOST]
                m.shared_races.clocks.publish(pairs >> 20, slots)
            late = self.pending[k, b] < counts[step]
            if late.any():
                which = int(np.argmax(late))
                m.fail(
                    MbarrierMisuse,
                    "more arrivals at an mbarrier than it expects",
                    Site(cohort, pc, int(place[step][which])),
                    self.state(int(k[which]), int(b[which])),
                    "arrive as often as mbarrier.init counts, and wait before the next phase",
                )
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
        state[place, lane] = phases
        return state

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
            published, slots = m.shared_races.clocks.published, np.array(self._slots)[k]
            columns = np.array(self.columns)[k]
            # Clocks of earlier phases remain: a completed phase implies the earlier ones.
            published[b, slots + 1] = published[b, slots]
            # Copies of this phase are complete: the time of their agent is the number of phases.
            published[b, slots + 1, columns] = self.phase[k, b]
        ended = np.zeros(self.tx.shape, bool)
        ended[k, b] = True
        for c in m.cohorts:
            if isinstance(c.waits, WaitsForPhase):
                blocks = m.row_block[c.rows][:, None]
                if (ended[c.waits.barriers, blocks] & c.waits.lanes).any():
                    c.waits = None

    # ---- waiting

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
        wanted = np.broadcast_to(phase, (cohort.n, width)).astype(np.int64)
        done: Array = (
            np.asarray(((now ^ wanted) & 1 != 0) if parity else now != wanted) & waiting_lanes
        )
        # A warp continues if the phase of any of its lanes has completed; the others get false.
        stuck: Array = np.asarray(waiting_lanes.any(axis=1) & ~done.any(axis=1))
        if blocks and stuck.any():
            waiting = cohort if stuck.all() else m.split(cohort, ~stuck, pc, pc)[1]
            waiting.waits = WaitsForPhase(pc, numbers[stuck], waiting_lanes[stuck])
            return None
        if stuck.any():
            cohort.polls = True
        if m.shared_races and done.any():
            pairs = np.unique(cohort.rows[np.nonzero(done)[0]] * (1 << 20) + numbers[done])
            slots = np.array(self._slots)[pairs & MOST] + 1
            m.shared_races.clocks.acquire(pairs >> 20, slots)
        return done

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


def _steps(together: bool, count: int) -> list[slice]:
    """Everything in one step, or one after the other."""
    return [slice(None)] if together else [slice(i, i + 1) for i in range(count)]


def _width(value: Any) -> int:
    return int(value.shape[1]) if getattr(value, "ndim", 0) else 1
