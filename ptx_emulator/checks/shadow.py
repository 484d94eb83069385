"""The shadow of shared memory: the last write of each vector, and races between lanes of a warp.

A vector has as many bytes as the narrowest access of the kernel to shared memory, so accesses to
neighbouring bytes never share a vector. A stamp is the clock and the warp of the last write (see
`clocks`); the stamps from `ASYNC` on are numbers of asynchronous writes, and the last three of them
are the constants below.

The lanes of a warp need not execute together (independent thread scheduling, since sm_70), and PTX
orders their accesses only by what synchronises them: bar.warp.sync, a barrier, or an exchange such
as shfl.sync, for which hardware does so although the manual does not guarantee it. So do elect,
wgmma and setmaxnreg, which whole warps or warpgroups execute together. ldmatrix and mma are no such
instructions.

A warp's clock advances when its lanes synchronise, and `Clocks.synced` holds its value then:
earlier accesses are ordered before all later ones of the warp. For an access since then, the lane
decides. Lanes that synchronise without the rest of their warp have vector clocks of their own
(`partial`). An access of all lanes to one address is an access of every lane.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from flashgen.shared.errors import EmulatorError
from ptx_emulator.checks.clocks import ATOMIC, Clocks, StrongAccess
from ptx_emulator.errors import RaceError, way_out
from ptx_emulator.state.cohort import LANES, Cohort, SingleThreads, spread
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Execution, Site, Wave

ASYNC = np.uint32(0xE0000000)
MBARRIER = np.uint32(0xFFFFFFFD)  # an mbarrier object lies in the vector
FLIGHT = np.uint32(0xFFFFFFFE)  # a cp.async that has not been waited for writes the vector
NEVER = np.uint32(0xFFFFFFFF)  # not written since the block started
# What findings in shared memory say, whether ordinary or asynchronous accesses make them.
UNWRITTEN = "shared memory is read that was never written"
WRITE_FIRST = "write it first, and check the address and the bytes that were copied"
STILL_COPIED = "a cp.async that has not been waited for writes there"
_BARRIER = "separate the two accesses by a barrier that both warps pass"
RELAXED = "; barrier.cluster.arrive.relaxed orders only what a fence before it releases"
VOLATILE = "; volatile orders nothing without a fence or a barrier, but for a loop that polls"


@dataclass(eq=False)
class SharedAccess:
    """The accesses of one instruction to shared memory, each by one warp or by one thread.

    Attributes:
        cohort: the cohort that executes the instruction ``pc``, for messages.
        rows: the warp of each access, (g,); (g, w) if w warps execute an access together.
        where: offsets into `Wave.shared`, (g, k).
        size: bytes at each offset, a power of two up to 128, to which the offsets are aligned.
            Large sizes are checked faster.
        places: row of ``cohort`` of each access, (g,); None: each row accesses one offset per lane.
        lanes: lane of each access, (g,); None if it is unknown.
        strong: atomic or volatile; ``racing``: see `PtxProgram.racing`.
    """

    cohort: Cohort
    rows: Array
    where: Array
    size: int
    pc: int
    places: Array | None = None
    lanes: Array | None = None
    strong: bool = False
    racing: bool = False

    def site(self, place: int, offset: int) -> Site:
        """The origin of an access, by the index of the access and of the offset."""
        if self.places is None:
            return Site(self.cohort, self.pc, place, offset)
        lane = None if self.lanes is None else int(self.lanes[place])
        return Site(self.cohort, self.pc, int(self.places[place]), lane)


EVERY = 32  # the lane of an access by all lanes
_NEVER = np.int64(1) << 60  # later than any clock
_KEPT_RELEASES = 8  # latest partial releases of each warp that are kept
_KEPT_READS = 256  # most reads that later writes are compared with
_WHAT = "race in shared memory: lanes of one warp {}, and nothing synchronises them in between"
FENCE_AFTER_ATOMIC = (
    "execute a fence (__threadfence) after the atomic that found what others have published, and "
    "before the access, or give the atomic .acquire" + way_out("atomic_without_fence")
)
SYNCHRONISE_LANES = "execute __syncwarp() (bar.warp.sync) between the two accesses" + way_out(
    "warp_synchronous"
)


class _LaneReads(NamedTuple):
    """Reads of one instruction, to be compared with later writes of other lanes."""

    access: SharedAccess
    clock: Array
    low: int
    high: int


@dataclass(eq=False)
class _PartialRelease:
    """A release by some lanes of a warp, while others had accesses that nothing synchronised.

    Attributes:
        first, last: clocks of the accesses of the warp that only these lanes release.
        own: the clock of each lane (32,) up to which it has released, by now and before.
        covered: clock of the warp when all its lanes have synchronised or release; None before.
    """

    first: int
    last: int
    own: Array
    covered: int | None = None


class SharedShadow:
    """Shadow of the shared memory of all blocks of a wave, whose clusters have ``blocks`` clocks.

    Attributes:
        shift: logarithm to base 2 of the bytes per vector.
        count: number of vectors.
        written: stamp of the last write of each vector.
        writer_pc: instruction of the last write of each vector.
    """

    def __init__(self, machine: Wave, blocks: int) -> None:
        self.machine = machine
        self.shift = machine.program.accesses.shared_vector.bit_length() - 1
        self.warps = machine.cluster_warps
        self.count = len(machine.blocks) * machine.shared_pitch >> self.shift
        self.written = np.full(self.count, NEVER, np.uint32)
        reserved = machine.program.reserved
        zeroed = slice(reserved.start >> self.shift, reserved.stop >> self.shift)
        self.written.reshape(len(machine.blocks), -1)[:, zeroed] = 0  # before all clocks
        self.writer_pc = np.zeros(self.count, np.int32)
        self.clocks = Clocks(blocks, self.warps, machine.program.asynchronous, machine.cluster_size)
        self.tracks_lanes = "warp_synchronous" not in machine.config.allow
        self.writer = np.full(self.count, EVERY, np.uint8)  # lane of the last write
        self.accessed = np.zeros(len(machine.row_block), bool)  # since the lanes synchronised
        self.partial: dict[int, Array] = {}  # row -> clocks of lanes that each lane has seen
        self.lane_reads: list[_LaneReads] = []
        self.releases: dict[int, list[_PartialRelease]] = {}  # by warp

    def take(self, table: Array, where: Array, size: int) -> Array:
        """The values of a shadow table for each vector of accesses (g, k), (g, vectors)."""
        many = size >> self.shift
        if many <= 1:
            return table.take(where >> self.shift)
        rows: Array = table.reshape(-1, many).take(where >> size.bit_length() - 1, axis=0)
        return rows.reshape(len(where), -1)

    def never_written(self, where: Array, size: int) -> Array:
        """Which accesses (g,) are to bytes that nothing has written."""
        never: Array = (self.take(self.written, where[:, None], size) == NEVER).any(axis=1)
        return never

    def put(self, table: Array, where: Array, size: int, value: Any) -> None:
        """Sets the values of a shadow table to one value, or to one per access (g,) or (g, k)."""
        many = size >> self.shift
        if np.ndim(value) == 1:
            value = value[:, None]
        if many <= 1:
            table[where >> self.shift] = value
        else:
            wide = value[..., None] if np.ndim(value) else value
            table.reshape(-1, many)[where >> size.bit_length() - 1] = wide

    def excused(self, a: SharedAccess, stamps: Array, verb: str) -> Array:
        """Which writes, with these stamps, a strong access need not be ordered after."""
        strong: Array = (stamps & np.uint32(ATOMIC)) != 0
        if a.racing and verb == "read" and strong.any():
            writers = self.take(self.writer_pc, a.where, a.size)
            strong &= ~np.isin(writers, list(self.machine.program.racing))
        return strong

    def fail(
        self,
        a: SharedAccess,
        bad: Array,
        what: str,
        numbers: str,
        way_out: str,
        kind: type[EmulatorError] = RaceError,
    ) -> NoReturn:
        """Raises for the first vector that ``bad`` (g, vectors) marks."""
        vector, site = self.first(a, bad)
        at = (vector << self.shift) % self.machine.shared_pitch
        numbers += VOLATILE if a.racing else ""
        self.machine.fail(kind, what, site, f"shared offset {at}; {numbers}", way_out)

    def first(self, a: SharedAccess, bad: Array) -> tuple[int, Site]:
        """The number of the first vector that ``bad`` (g, vectors) marks, and its origin."""
        place, which = (int(i) for i in np.argwhere(bad)[0])
        offset, part = divmod(which, max(1, a.size >> self.shift))
        return int(a.where[place, offset] >> self.shift) + part, a.site(place, offset)

    @functools.cached_property
    def _mark(self) -> Array:
        """Of each vector a mark, 0 between two calls."""
        return np.zeros(self.count, np.int32)

    @property
    def advice(self) -> str:
        """The way out of two accesses of different warps that nothing orders."""
        relaxed = self.machine.program.accesses.relaxed_barriers
        return _BARRIER + (RELAXED if relaxed else "")

    # ---- what synchronises lanes

    def synchronise_lanes(self, cohort: Cohort, members: Any) -> None:
        """The lanes of ``members`` (bit masks; None: all) of a cohort synchronise."""
        rows = cohort.rows
        some = self.accessed[rows]
        if not some.any():
            return
        whole = np.ones(cohort.n, bool)
        bits = None
        if cohort.mask is not None or members is not None:
            given = np.uint32(0xFFFFFFFF) if members is None else np.asarray(members)
            if cohort.mask is not None or (given != np.uint32(0xFFFFFFFF)).any():
                bits = spread(given, cohort.n)
                # Lanes that have exited do not matter.
                here = cohort.full_mask()
                named = (bits[:, :, None] >> LANES.astype(np.uint32)) & np.uint32(1) != 0
                named &= here[:, None, :]
                alive = self.machine.alive[rows]
                every = (named | ~alive[:, None, :]).all(axis=2)
                whole = (every | ~here).all(axis=1)
        full = rows[whole & some]
        if len(full):
            self.clocks.sync_lanes(full)
            self.accessed[full] = False
            for row in full.tolist() if self.releases else ():
                for one in self.releases.get(row, ()):
                    one.covered = one.covered or int(self.clocks.clock[row])
        for place in np.flatnonzero(~whole & some).tolist():
            row = int(rows[place])
            for members_of in np.unique(named[place][here[place]], axis=0):
                self._synchronise_some(row, np.flatnonzero(members_of))
            self.clocks.tick(np.array([row]))

    def _synchronise_some(self, row: int, lanes: Array) -> None:
        seen = self.partial.setdefault(row, np.zeros((32, 32), np.int64))
        joined = seen[lanes].max(axis=0)
        joined[lanes] = self.clocks.clock[row]
        seen[lanes] = joined

    def release_lanes(self, arrival: Execution, fenced: bool = False) -> None:
        """Lanes of a cohort arrive at an mbarrier: they release their own accesses alone.

        ``fenced``: a strong access of theirs releases what precedes the last fence of its warp.
        """
        rows = arrival.cohort.rows
        if not self.tracks_lanes or not self.accessed[rows].any():
            return
        here = arrival.cohort.full_mask() & arrival.active
        others = ~here.all(axis=1)  # even if they have exited since
        for row in rows[~others].tolist() if self.releases and not fenced else ():
            for one in self.releases.get(row, ()):
                one.covered = one.covered or int(self.clocks.clock[row])
        for place in np.flatnonzero(self.accessed[rows] & here.any(axis=1) & others).tolist():
            row = int(rows[place])
            first, last = int(self.clocks.synced[row]), int(self.clocks.clock[row])
            if fenced:
                known = self.clocks.fenced.get(row)
                last = -1 if known is None else int(known[row % self.warps])
            if last < first:
                continue
            found = self.releases.setdefault(row, [])
            own = np.where(here[place], last, self._own(row, last))
            found.append(_PartialRelease(first, last, own))
            del found[:-_KEPT_RELEASES]

    def _own(self, row: int, until: int) -> Array:
        """The clock of each lane (32,) up to which partial releases of a warp, themselves up to a
        clock, release what the lane has accessed.
        """
        none = np.zeros(32, np.int64)
        return np.max([none, *(r.own for r in self.releases[row] if r.last <= until)], axis=0)  # type: ignore[no-any-return]

    def strong_access(self, here: Execution) -> None:
        """A strong store or atomic, before it releases, see `release_lanes`."""
        how = StrongAccess.of(self.machine, here.pc)
        if how.releases or self.clocks.fenced:
            self.release_lanes(here, fenced=not how.releases)

    # ---- checks

    def _uncovered(
        self, a: SharedAccess, row: int
    ) -> Iterator[tuple[_PartialRelease, Array, Array]]:
        """Partial releases of a warp that others come after, but not after all of its lanes.

        Yields:
            The release, which accesses (g,) come so, and the clock of each lane (32,) up to which
            they come after a release by that lane, too.
        """
        cluster, member = divmod(row, self.warps)
        others = (a.rows // self.warps == cluster) & (a.rows != row)
        seen = self.clocks.seen[cluster, a.rows % self.warps, member]
        for until in np.unique(seen[others]).tolist():
            after = [
                one
                for one in self.releases[row]
                if one.last <= until and (one.covered is None or until < one.covered)
            ]
            if after:
                at, own = others & (seen == until), self._own(row, until)
                yield from ((one, at, own) for one in after)

    def against_partial_releases(self, a: SharedAccess, stamps: Array) -> None:
        """Checks accesses against writes of lanes whose warps arrived without them."""
        if a.rows.ndim > 1:
            return
        agent, clock = self.clocks.decode(stamps)
        writers = self.take(self.writer, a.where, a.size)
        written = (stamps < ASYNC) & (writers != EVERY)
        for row in self.releases:
            its = written & (agent == row % self.warps)
            for one, late, own in self._uncovered(a, row) if its.any() else ():
                bad = its & (clock >= one.first) & (clock <= one.last) & late[:, None]
                bad &= clock > own[np.minimum(writers, 31)]
                if bad.any():
                    self._report_release(a, bad, self._writer_pc(a, bad))

    def _reads_not_released(self, a: SharedAccess, reads: _LaneReads) -> None:
        """Checks a write against reads of lanes whose warps arrived without them."""
        before = reads.access
        readers = np.broadcast_to(lanes_of(before), before.where.shape)
        for row in self.releases:
            mine = before.rows == row
            for one, late, own in self._uncovered(a, row) if mine.any() else ():
                of = mine & (reads.clock >= one.first) & (reads.clock <= one.last)
                if of.any():
                    missing = reads.clock[of][:, None] > own[np.minimum(readers[of], 31)]
                    missing &= readers[of] != EVERY
                    self.put(self._mark, before.where[of], before.size, missing.astype(np.int32))
                    bad = self.take(self._mark, a.where, a.size) > 0
                    bad &= late[:, None]
                    self.put(self._mark, before.where[of], before.size, np.int32(0))
                    if bad.any():
                        self._report_release(a, bad, before.pc)

    def _report_release(self, a: SharedAccess, bad: Array, pc: int) -> NoReturn:
        what = "race in shared memory: some lanes of a warp arrive at an mbarrier, or set a flag, "
        what += "for lanes that they have not synchronised with"
        access = self.machine.program.describe(pc)
        numbers = f"another lane of that warp accesses the bytes: {access}"
        advice = "execute __syncwarp() (bar.warp.sync) before that"
        self.fail(a, bad, what, numbers, advice + way_out("warp_synchronous"))

    def lanes_against_writes(self, a: SharedAccess, stamps: Array, verb: str) -> None:
        """Checks an access against earlier writes of other lanes of its warp, with these stamps."""
        if a.rows.ndim > 1 or not self.tracks_lanes:
            return
        agent, clock = self.clocks.decode(stamps)
        warps = self.machine.row_member[a.rows][:, None]
        bad = (agent == warps) & (clock >= self.clocks.synced[a.rows][:, None])
        bad &= stamps < ASYNC
        if a.strong:
            bad &= ~self.excused(a, stamps, verb)
        if not bad.any():
            return
        writers = self.take(self.writer, a.where, a.size)
        lanes = lanes_of(a, self.shift)
        bad &= (writers != lanes) & (writers != EVERY)
        if verb == "write":
            bad &= lanes != EVERY  # one of the lanes wrote before
        if self.partial and bad.any():
            bad &= ~self._seen(a, bad, writers, clock)
        if bad.any():
            writer, pc = int(writers[bad][0]), self._writer_pc(a, bad)
            text = f"lane {writer} writes there: {self.machine.program.describe(pc)}"
            doing = "write the same bytes" if verb == "write" else "write and read the same bytes"
            advice = SYNCHRONISE_LANES
            advice += self.machine.forgives_guess(a.pc, int(stamps[bad][0]) & ATOMIC)
            self.fail(a, bad, _WHAT.format(doing), text, advice)

    def lanes_against_reads(self, a: SharedAccess) -> None:
        """Checks a write against earlier reads of other lanes of its warp."""
        rows = a.rows
        if rows.ndim > 1 or not self.lane_reads:
            return
        low, high = self._reach(a)
        for reads in self.lane_reads if self.releases else ():
            if reads.low < high and low < reads.high and not _excuses(a, reads.access):
                self._reads_not_released(a, reads)
        # Accesses of other warps are ordered, or not, elsewhere.
        since = np.full(len(self.accessed), _NEVER)
        since[rows] = self.clocks.synced[rows]
        for reads in self.lane_reads:
            if reads.low >= high or low >= reads.high or _excuses(a, reads.access):
                continue
            late = reads.clock >= since[reads.access.rows]
            if late.any():
                self._against_read(a, reads, late)

    def _against_read(self, a: SharedAccess, reads: _LaneReads, late: Array) -> None:
        before = reads.access
        readers = np.broadcast_to(lanes_of(before), before.where.shape)
        tags = ((before.rows + 1)[:, None] << 6 | readers) * late[:, None]
        mine = lanes_of(a, self.shift)
        bad = np.zeros(1, bool)
        # Of several lanes that read the same bytes, the last and the first are compared.
        for way in (slice(None), slice(None, None, -1)):
            self.put(self._mark, before.where[:, way], before.size, tags[:, way].astype(np.int32))
            found = self.take(self._mark, a.where, a.size)
            same = found >> 6 == (a.rows + 1)[:, None]
            bad = bad | (same & (found & 63 != mine) & (mine != EVERY))
        self.put(self._mark, before.where, before.size, np.int32(0))
        if self.partial and bad.any():
            lanes = np.minimum(found & 63, 31)
            clock = np.broadcast_to(self.clocks.clock[a.rows][:, None], bad.shape)
            bad &= ~self._seen(a, bad, lanes, clock - 1)
        if bad.any():
            text = f"a lane reads there before: {self.machine.program.describe(before.pc)}"
            advice = SYNCHRONISE_LANES + self.machine.forgives_guess(before.pc, a.strong)
            self.fail(a, bad, _WHAT.format("read and write the same bytes"), text, advice)

    def _seen(self, a: SharedAccess, bad: Array, lanes: Array, clock: Array) -> Array:
        """Whether lanes that synchronised in part order accesses of ``lanes`` at ``clock``."""
        out = np.zeros(bad.shape, bool)
        mine = np.broadcast_to(lanes_of(a, self.shift), bad.shape)
        for place, which in np.argwhere(bad):
            seen = self.partial.get(int(a.rows[place]))
            if seen is not None:
                by = seen[:, lanes[place, which]] >= clock[place, which]
                lane = int(mine[place, which])
                out[place, which] = by.all() if lane == EVERY else by[lane]
        return out

    def _writer_pc(self, a: SharedAccess, bad: Array) -> int:
        return int(self.writer_pc[self.first(a, bad)[0]])

    # ---- records

    def note_lanes_of_write(self, a: SharedAccess) -> None:
        """Records the lanes of a write."""
        if a.rows.ndim == 1:
            self.put(self.writer, a.where, a.size, lanes_of(a).astype(np.uint8))
            self.accessed[a.rows] = True

    def note_lanes_of_read(self, a: SharedAccess, clock: Array) -> None:
        """Records a read, at these clocks of its warps."""
        if not self.tracks_lanes:
            return
        self.accessed[a.rows] = True
        self.lane_reads.append(_LaneReads(a, clock, *self._reach(a)))
        if len(self.lane_reads) > _KEPT_READS:
            reads, synced = self.lane_reads, self.clocks.synced
            self.lane_reads = [e for e in reads if (e.clock >= synced[e.access.rows]).any()]
            del self.lane_reads[: -_KEPT_READS // 2]

    def _reach(self, a: SharedAccess) -> tuple[int, int]:
        """The first byte in its block that an access may touch, and the end."""
        first = a.where - self.machine.shared_base_of_row[a.rows]
        return int(first.min()), int(first.max()) + a.size


def _excuses(write: SharedAccess, read: SharedAccess) -> bool:
    """Whether a write need not be ordered after a read, because both are strong."""
    return write.strong and read.strong and not (write.racing and read.racing)


def lanes_of(a: SharedAccess, shift: int | None = None) -> Array:
    """The lane of each offset of an access, (g, 1), (1, k) or (1, 1).

    With ``shift``, the logarithm of the bytes per vector, of each vector of the access.
    """
    if isinstance(a.cohort, SingleThreads):
        lane: Array = a.cohort.lane if a.places is None else a.cohort.lane[a.places]
        return lane[:, None]
    if a.lanes is not None:
        return a.lanes[:, None]
    count = a.where.shape[1]
    if count == 1:
        return np.full((1, 1), EVERY)
    lanes = np.arange(count) % 32
    many = 1 if shift is None else max(1, a.size >> shift)
    return np.repeat(lanes, many)[None, :]
