"""The mbarriers of a wave: where they lie, their counts, and their initialisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.bounds import check_window
from flashgen.emulator.checks.late_waits import LateWaits
from flashgen.emulator.checks.shadow import MBARRIER
from flashgen.emulator.errors import FenceError, MbarrierMisuse, RaceError
from flashgen.emulator.isa.cluster import remote, resolved
from flashgen.emulator.state.cohort import Cohort, active, spread
from flashgen.emulator.state.forgiven import way_out
from flashgen.emulator.state.wave import Site, Wave

Array = npt.NDArray[Any]
BYTES = 8
MOST = (1 << 20) - 1  # limit of arrivals, and of outstanding bytes of either sign


class MbarrierTable:
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

    def init(self, cohort: Cohort, address: Any, count: Any, lanes: Any, pc: int) -> None:
        """mbarrier.init: phase 0 begins, with ``count`` arrivals pending."""
        m = self.machine
        place, lane, at = self._lanes(cohort, address, lanes, pc)
        counts = spread(count, cohort.n)[place, lane].astype(np.int64)
        numbers = self._add(at)
        rows = cohort.rows[place]
        blocks = m.row_block[rows]
        alive = self.expected[numbers, blocks] > 0
        if alive.any():
            self._again(cohort, address, place, lane, numbers, blocks, pc)
        if m.shared_races:
            where = spread(address + m.shared_base(cohort), cohort.n)
            m.shared_races.write(cohort, where, BYTES, pc, lanes)
            m.shared_races.put(m.shared_races.written, where[place, lane], BYTES, MBARRIER)
            self.made_by[numbers, blocks] = m.row_member[rows]
            self.made_at[numbers, blocks] = m.shared_races.clocks.clock[rows]
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
        self.late.forget(numbers, blocks)
        self.fenced[numbers, blocks] = 0
        self.all_fenced = False

    def _again(
        self,
        cohort: Cohort,
        address: Any,
        place: Array,
        lane: Array,
        numbers: Array,
        blocks: Array,
        pc: int,
    ) -> None:
        """An mbarrier.init of which some find an mbarrier already: refused, or as after inval."""
        m = self.machine
        which = np.flatnonzero(self.expected[numbers, blocks] > 0)
        if "mbarrier_reinit" not in m.allow:
            first = int(which[0])
            m.fail(
                MbarrierMisuse,
                "an mbarrier is initialised a second time",
                Site(cohort, pc, int(place[first])),
                self.state(int(numbers[first]), int(blocks[first])),
                "initialise it once, or execute mbarrier.inval first" + way_out("mbarrier_reinit"),
            )
        self.at(cohort, place[which], np.array(self.addresses)[numbers[which]], pc)
        self._forget(cohort, address, place[which], lane[which])

    def _forget(self, cohort: Cohort, address: Any, place: Array, lane: Array) -> None:
        """The memory of mbarriers becomes ordinary memory that these lanes wrote."""
        m = self.machine
        if m.shared_races:
            where = spread(address + m.shared_base(cohort), cohort.n)[place, lane]
            m.shared_races.finish_copy(cohort.rows[place], where[:, None], BYTES, None)

    def fence_init(self, cohort: Cohort, lanes: Any) -> None:
        """fence.mbarrier_init, or a proxy fence: earlier initialisations become visible."""
        m = self.machine
        if self.all_fenced or m.shared_races is None:
            return
        rows = cohort.rows[active(cohort, lanes).any(axis=1)]
        blocks, warps = m.row_block[rows], m.row_member[rows]
        maker = self.made_by[:, blocks]
        seen = m.shared_races.clocks.seen[m.row_cluster[rows], warps, maker]
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
        if self.all_fenced or m.shared_races is None or "mbarrier_init_fence" in m.allow:
            return
        rows = site.cohort.rows
        clocks = m.shared_races.clocks
        alone = self.made_by[numbers, blocks] == m.row_member[rows]
        alone &= clocks.synced[rows] <= self.made_at[numbers, blocks]
        self.fenced[numbers[alone], blocks[alone]] = 1
        missing = self.fenced[numbers, blocks] == 0
        if missing.any():
            which = int(np.argmax(missing))
            m.fail(
                FenceError,
                "an asynchronous copy signals an mbarrier that no fence followed",
                site._replace(row=which),
                f"mbarrier at shared offset {self.addresses[int(numbers[which])]}; its "
                "initialisation need not be visible to the asynchronous proxy",
                "execute fence.mbarrier_init.release.cluster or fence.proxy.async after "
                "mbarrier.init, before the barrier that the issuing thread passes"
                + way_out("mbarrier_init_fence"),
            )

    def _add(self, addresses: Array) -> Array:
        """Numbers of the barriers at the given addresses; unknown addresses get a new number."""
        for address in np.unique(addresses).tolist():
            if self._number[address // BYTES] >= 0:
                continue
            self._number[address // BYTES] = len(self.addresses)
            self.addresses.append(address)
            for name in ("expected", "pending", "tx", "phase", "made_by", "made_at", "fenced"):
                setattr(self, name, np.pad(getattr(self, name), ((0, 1), (0, 0))))
            self.late.add()
            races = self.machine.shared_races
            if races is not None and races.proxy is not None:
                slot = races.clocks.new_slots(2 * self.machine.cluster_size)
                self._slots = np.append(self._slots, slot)
                name = f"a bulk copy that the mbarrier at shared offset {address} waits for"
                ranks = range(self.machine.cluster_size)
                of_ranks = [races.proxy.agent("mbarrier", (address, r), name) for r in ranks]
                self.columns = np.append(self.columns, [of_ranks], axis=0)
        found: Array = self._number[addresses // BYTES]
        return found

    def inval(self, cohort: Cohort, address: Any, lanes: Any, pc: int) -> None:
        """mbarrier.inval: its memory becomes ordinary memory."""
        place, lane, numbers, blocks = self.find(cohort, address, lanes, pc)
        self.expected[numbers, blocks] = 0
        self._forget(cohort, address, place, lane)

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
        blocks = None
        if remote(address):
            blocks, address = resolved(self.machine, cohort, address, lanes, BYTES, pc)
        place, lane, where = self._lanes(cohort, address, lanes, pc)
        at = None if blocks is None else blocks[place, lane]
        return place, lane, *self.at(cohort, place, where, pc, at)

    def at(
        self, cohort: Cohort, place: Array, address: Array, pc: int, blocks: Array | None = None
    ) -> tuple[Array, Array]:
        """(barrier, block) of rows ``place`` of a cohort, at addresses (k,) that are in bounds.

        ``blocks`` are those of the rows, or others of their clusters.
        """
        m = self.machine
        numbers = self._number[address // BYTES]
        blocks = m.row_block[cohort.rows[place]] if blocks is None else blocks
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
        warps, maker = m.row_member[rows], self.made_by[numbers, blocks]
        seen = m.shared_races.clocks.seen[m.row_cluster[rows], warps, maker]
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
