"""The mbarriers of a wave: where they lie, their counts, and their initialisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.bounds import check_window
from flashgen.emulator.checks.shadow import MBARRIER
from flashgen.emulator.errors import MbarrierMisuse, RaceError
from flashgen.emulator.state.cohort import Cohort, active, spread
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
