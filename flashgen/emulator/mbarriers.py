"""mbarriers: objects in shared memory that count arrivals and bytes, phase by phase.

A phase is complete when as many arrivals have come as `mbarrier.init` said and all bytes that were
expected (expect_tx) have been delivered by bulk copies (complete_tx); then the next begins. A
try_wait blocks its warps until the phase is complete. It may give up on hardware, and a kernel must
then try again; here it never does, so that a phase that cannot end is a deadlock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from flashgen.emulator.access import check_window, shared_base, spread
from flashgen.emulator.cohort import Cohort
from flashgen.emulator.errors import MbarrierMisuse, RaceError

if TYPE_CHECKING:
    from flashgen.emulator.machine import Machine

Array = npt.NDArray[Any]
BYTES = 8
MOST = (1 << 20) - 1  # arrivals, and bytes outstanding in either direction


class WaitsForPhase:
    """Rows that wait for mbarriers; ``barriers`` and ``lanes`` are (n, 1) or (n, 32)."""

    def __init__(self, pc: int, barriers: Array, lanes: Array) -> None:
        self.pc = pc
        self.barriers = barriers
        self.lanes = lanes


class Mbarriers:
    """The mbarriers of a wave. One number stands for an address, in all blocks alike.

    ``expected``, ``pending``, ``tx`` and ``phase`` are (barriers, blocks); a barrier that expects
    no arrivals is not initialised.
    """

    def __init__(self, machine: Machine, blocks: int) -> None:
        self.machine = machine
        self.addresses: list[int] = []
        self._number = np.full(machine.shared_pitch // BYTES, -1, np.int64)
        none = np.zeros((0, blocks), np.int64)
        self.expected, self.pending, self.tx, self.phase = (none.copy() for _ in range(4))
        self.made_by, self.made_at = none.copy(), none.copy()  # the warp of the init, its clock
        self._slots: list[int] = []  # clocks published up to this phase; the next: to the last
        self.columns: list[int] = []

    # ---- init and inval

    def init(self, C: Cohort, address: Any, count: Any, lanes: Any, pc: int) -> None:
        """mbarrier.init: phase 0 begins, with ``count`` arrivals pending."""
        m = self.machine
        check_window(m, C, np.asarray(address), lanes, BYTES, pc, m.shared_size, "shared")
        place, lane = np.nonzero(_active(C, lanes))
        at = spread(address, C.n)[place, lane]
        counts = spread(count, C.n)[place, lane].astype(np.int64)
        numbers = self._add(at)
        blocks = m.row_block[C.rows[place]]
        if m.shared_races:
            where = spread(address + shared_base(m, C), C.n)
            m.shared_races.write(C, where, BYTES, pc, lanes)
            m.shared_races.seal(where[place, lane], BYTES)
            rows = C.rows[place]
            self.made_by[numbers, blocks] = m.row_warp[rows]
            self.made_at[numbers, blocks] = m.shared_races.clocks.clock[rows]
        alive = self.expected[numbers, blocks] > 0
        if alive.any():
            self._misuse(
                C,
                pc,
                int(place[np.argmax(alive)]),
                "an mbarrier is initialised a second time",
                self.state(int(numbers[np.argmax(alive)]), int(blocks[np.argmax(alive)])),
                "initialise it once, or execute mbarrier.inval first",
            )
        bad = (counts < 1) | (counts > MOST)
        if bad.any():
            self._misuse(
                C,
                pc,
                int(place[np.argmax(bad)]),
                "an mbarrier with an impossible number of arrivals",
                f"count {int(counts[np.argmax(bad)])}; it can be 1 to {MOST:,}",
                "count the arrivals of one phase",
            )
        self.expected[numbers, blocks] = self.pending[numbers, blocks] = counts
        self.tx[numbers, blocks] = self.phase[numbers, blocks] = 0

    def _add(self, addresses: Array) -> Array:
        """Numbers of the barriers at some addresses, new ones included."""
        for address in np.unique(addresses).tolist():
            if self._number[address // BYTES] >= 0:
                continue
            self._number[address // BYTES] = len(self.addresses)
            self.addresses.append(address)
            for name in ("expected", "pending", "tx", "phase", "made_by", "made_at"):
                table = getattr(self, name)
                more = np.zeros((1, table.shape[1]), np.int64)
                setattr(self, name, np.concatenate([table, more]))
            races = self.machine.shared_races
            if races is not None and races.proxy is not None:
                self._slots.append(races.clocks.new_slots(2))
                name = f"a bulk copy that the mbarrier at shared offset {address} waits for"
                self.columns.append(races.proxy.agent("mbarrier", address, name))
        found: Array = self._number[addresses // BYTES]
        return found

    def inval(self, C: Cohort, address: Any, lanes: Any, pc: int) -> None:
        """mbarrier.inval: its memory is ordinary again."""
        m = self.machine
        place, lane, numbers, blocks = self.find(C, address, lanes, pc)
        self.expected[numbers, blocks] = 0
        if m.shared_races:
            where = spread(address + shared_base(m, C), C.n)[place, lane]
            m.shared_races.land(C.rows[place], where[:, None], BYTES, None)

    def find(self, C: Cohort, address: Any, lanes: Any, pc: int) -> tuple[Array, ...]:
        """(row of the cohort, lane, barrier, block) of every active lane, in their order.

        Raises:
            OutOfBounds, Misaligned: it cannot be an mbarrier's address.
            MbarrierMisuse: no mbarrier has been initialised there.
            RaceError: one has, but its initialisation is not ordered before.
        """
        m = self.machine
        check_window(m, C, np.asarray(address), lanes, BYTES, pc, m.shared_size, "shared")
        place, lane = np.nonzero(_active(C, lanes))
        numbers, blocks = self.at(C, place, spread(address, C.n)[place, lane], pc)
        return place, lane, numbers, blocks

    def at(self, C: Cohort, place: Array, address: Array, pc: int) -> tuple[Array, Array]:
        """(barrier, block) of rows ``place`` of a cohort, at addresses (k,) that are in bounds."""
        m = self.machine
        numbers = self._number[address // BYTES]
        blocks = m.row_block[C.rows[place]]
        missing = numbers < 0
        if not missing.any():
            missing = self.expected[numbers, blocks] == 0
        if missing.any():
            which = int(np.argmax(missing))
            self._misuse(
                C,
                pc,
                int(place[which]),
                "an mbarrier that is not initialised",
                f"shared offset {int(address[which])}; initialised ones: "
                + (", ".join(map(str, self.addresses)) or "none"),
                "execute mbarrier.init, and then a barrier that all its users pass",
            )
        if m.shared_races is None:
            return numbers, blocks
        rows = C.rows[place]
        warps, maker = m.row_warp[rows], self.made_by[numbers, blocks]
        seen = m.shared_races.clocks.seen[blocks, warps, maker]
        early = (maker != warps) & (seen < self.made_at[numbers, blocks])
        if early.any():
            which = int(np.argmax(early))
            m.fail(
                RaceError,
                "race in shared memory: an mbarrier is used, and its initialisation is not ordered "
                "before",
                C,
                pc,
                row=int(place[which]),
                numbers=f"shared offset {self.addresses[int(numbers[which])]}; warp "
                f"{int(maker[which])} initialises it",
                way_out="pass a barrier of the block between mbarrier.init and its first use",
            )
        return numbers, blocks

    # ---- arrivals and bytes

    def arrive(
        self,
        C: Cohort,
        address: Any,
        count: Any,
        lanes: Any,
        pc: int,
        *,
        expects: Any = None,
        release: bool = True,
        drop: bool = False,
        complete: bool = True,
    ) -> Array:
        """mbarrier.arrive and arrive_drop: ``count`` arrivals by each lane.

        Args:
            expects: bytes to expect first, by each lane.
            release: what went before is published.
            drop: later phases expect so many arrivals fewer.
            complete: it may complete its phase.

        Returns:
            The state of each lane, (n, 32): the phase that it arrived at.
        """
        m = self.machine
        place, lane, numbers, blocks = self.find(C, address, lanes, pc)
        counts = spread(count, C.n)[place, lane].astype(np.int64)
        rows = C.rows[place]
        tx = None if expects is None else spread(expects, C.n)[place, lane]
        phases = np.empty(len(place), np.int64)
        # Together, when no phase can end in between; else one after the other.
        width = max(1, self.expected.shape[1])
        keys, group = np.unique(numbers * width + blocks, return_inverse=True)
        total = np.bincount(group, weights=counts, minlength=len(keys)).astype(np.int64)
        together = (total <= self.pending[keys // width, keys % width]).all() and not drop
        steps = [slice(None)] if together else [slice(i, i + 1) for i in range(len(place))]
        for step in steps:
            k, b = numbers[step], blocks[step]
            phases[step] = self.phase[k, b]
            if tx is not None:
                self._expect(C, k, b, tx[step].astype(np.int64), place[step], pc)
            if m.shared_races and release:
                pairs = np.unique(rows[step] * (1 << 20) + k)
                slots = np.array(self._slots)[pairs & MOST]
                m.shared_races.clocks.publish(pairs >> 20, slots)
            late = self.pending[k, b] < counts[step]
            if late.any():
                which = int(np.argmax(late))
                self._misuse(
                    C,
                    pc,
                    int(place[step][which]),
                    "more arrivals at an mbarrier than it expects",
                    self.state(int(k[which]), int(b[which])),
                    "let as many arrive as mbarrier.init counts, and wait before the next phase",
                )
            np.subtract.at(self.pending, (k, b), counts[step])
            if drop:
                self.expected[k, b] -= counts[step]
            if not complete and (self.pending[k, b] == 0).any():
                self._misuse(
                    C,
                    pc,
                    int(place[step][0]),
                    "an arrival with .noComplete completes its phase",
                    self.state(int(k[0]), int(b[0])),
                    "use it only where other arrivals are to come",
                )
            self._complete(k, b)
        state = np.zeros((C.n, 32), np.uint64)
        state[place, lane] = phases
        return state

    def expect(self, C: Cohort, address: Any, size: Any, lanes: Any, pc: int) -> None:
        """mbarrier.expect_tx without an arrival; a negative size completes (complete_tx)."""
        place, lane, numbers, blocks = self.find(C, address, lanes, pc)
        sizes = spread(size, C.n)[place, lane].astype(np.int64)
        self._expect(C, numbers, blocks, sizes, place, pc)
        self._complete(numbers, blocks)

    def _expect(self, C: Cohort, k: Array, b: Array, size: Array, place: Array, pc: int) -> None:
        np.add.at(self.tx, (k, b), size)
        bad = np.abs(self.tx[k, b]) > MOST
        if bad.any():
            which = int(np.argmax(bad))
            self._misuse(
                C,
                pc,
                int(place[which]),
                "an mbarrier counts more bytes than it can",
                f"{int(self.tx[k, b][which]):,} bytes outstanding; at most {MOST:,}",
                "expect the bytes of one phase only, in one place",
            )

    def deliver(self, numbers: Array, blocks: Array, sizes: Array) -> Array:
        """complete_tx by bulk copies, one after the other; returns the phase that each fell into.

        The count may go below zero: bytes may come before they are expected.
        """
        phases = np.empty(len(numbers), np.int64)
        keys, group = np.unique(numbers * self.tx.shape[1] + blocks, return_inverse=True)
        total = np.bincount(group, weights=sizes, minlength=len(keys)).astype(np.int64)
        at = np.divmod(keys, self.tx.shape[1])
        # A phase can only end with its last copy, unless there are more bytes than it waits for.
        together = ((self.pending[at] > 0) | (total <= self.tx[at])).all()
        steps = [slice(None)] if together else [slice(i, i + 1) for i in range(len(numbers))]
        for step in steps:
            k, b = numbers[step], blocks[step]
            phases[step] = self.phase[k, b]
            np.subtract.at(self.tx, (k, b), sizes[step])
            self._complete(k, b)
        return phases

    def _complete(self, k: Array, b: Array) -> None:
        """Ends the phase of every one of these barriers that is complete, and wakes who waits."""
        m = self.machine
        full = (self.pending[k, b] == 0) & (self.tx[k, b] == 0) & (self.expected[k, b] > 0)
        if not full.any():
            return
        pairs = np.unique(k[full] * self.tx.shape[1] + b[full])
        k, b = pairs // self.tx.shape[1], pairs % self.tx.shape[1]
        self.phase[k, b] += 1
        self.pending[k, b] = self.expected[k, b]
        if m.shared_races:
            published, slots = m.shared_races.clocks.published, np.array(self._slots)[k]
            columns = np.array(self.columns)[k]
            # Earlier phases stay in it: one that has ended implies them.
            published[b, slots + 1] = published[b, slots]
            # Copies into this phase have landed: their agent's time is the number of phases.
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
        self, C: Cohort, address: Any, phase: Any, lanes: Any, pc: int, parity: bool, blocks: bool
    ) -> Array | None:
        """test_wait, and try_wait where ``blocks``: whether a phase has completed.

        Args:
            phase: its parity, or the state that an arrival returned.

        Returns:
            A predicate (n, 1) or (n, 32); None when the warps were told to wait, or only some of
            them were: then the instruction runs again for those that need not.
        """
        m = self.machine
        check_window(m, C, np.asarray(address), lanes, BYTES, pc, m.shared_size, "shared")
        narrow = lanes is None and C.mask is None and _width(address) == _width(phase) == 1
        width = 1 if narrow else 32
        active = np.ones((C.n, 1), bool) if narrow else _active(C, lanes)
        place, lane = np.nonzero(active)
        if not len(place):
            return np.zeros((C.n, width), bool)
        here = np.broadcast_to(address, (C.n, width))[place, lane]
        numbers = np.zeros((C.n, width), np.int64)
        numbers[place, lane] = self.at(C, place, here, pc)[0]
        now = self.phase[numbers, m.row_block[C.rows][:, None]]
        wanted = np.broadcast_to(phase, (C.n, width)).astype(np.int64)
        done: Array = np.asarray(((now ^ wanted) & 1 != 0) if parity else now != wanted) & active
        # A warp that has a lane to go on goes on; its others are told to try again.
        stuck: Array = np.asarray(active.any(axis=1) & ~done.any(axis=1))
        if blocks and stuck.any():
            waiting = C if stuck.all() else m.split(C, ~stuck, pc, pc)[1]
            waiting.waits = WaitsForPhase(pc, numbers[stuck], active[stuck])
            return None
        if stuck.any():
            C.polls = True
        if m.shared_races and done.any():
            pairs = np.unique(C.rows[np.nonzero(done)[0]] * (1 << 20) + numbers[done])
            slots = np.array(self._slots)[pairs & MOST] + 1
            m.shared_races.clocks.acquire(pairs >> 20, slots)
        return done

    # ---- messages

    def state(self, number: int, block: int) -> str:
        """An mbarrier in words."""
        return (
            f"mbarrier at shared offset {self.addresses[number]}, phase "
            f"{int(self.phase[number, block])}: {int(self.pending[number, block])} of "
            f"{int(self.expected[number, block])} arrivals pending, "
            f"{int(self.tx[number, block])} bytes outstanding"
        )

    def describe(self, c: Cohort) -> list[str]:
        """Who of a waiting cohort waits for what: one line for each barrier of a block."""
        m, waits = self.machine, c.waits
        place, lane = np.nonzero(waits.lanes)
        numbers = waits.barriers[place, lane]
        blocks = m.row_block[c.rows[place]]
        lines = []
        for block, number in sorted(set(zip(blocks.tolist(), numbers.tolist(), strict=True))):
            rows = np.unique(c.rows[place[(blocks == block) & (numbers == number)]])
            warps = ", ".join(str(w) for w in m.row_warp[rows])
            lines.append(
                f"block {m.block_name(int(rows[0]))} warp{'s' * (len(rows) > 1)} {warps} "
                f"at {self.state(number, block)}; "
                f"{m.program.describe(waits.pc)}"
            )
        return lines

    def _misuse(
        self, C: Cohort, pc: int, row: int, what: str, numbers: str, way_out: str
    ) -> NoReturn:
        self.machine.fail(MbarrierMisuse, what, C, pc, row=row, numbers=numbers, way_out=way_out)


def _active(C: Cohort, lanes: Any) -> Array:
    return spread(True if lanes is None else lanes, C.n)


def _width(value: Any) -> int:
    return int(value.shape[1]) if getattr(value, "ndim", 0) else 1
