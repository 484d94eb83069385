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
        offsets: offsets into `Wave.shared`, (g, k).
        size: bytes at each offset, a power of two up to 128, to which the offsets are aligned.
            Large sizes are checked faster.
        cohort_rows: row of ``cohort`` of each access, (g,); None: each row accesses one offset per
            lane.
        lanes: lane of each access, (g,); None if it is unknown.
        strong: atomic or volatile; ``racing``: see `PtxProgram.racing`.
    """

    cohort: Cohort
    rows: Array
    offsets: Array
    size: int
    pc: int
    cohort_rows: Array | None = None
    lanes: Array | None = None
    strong: bool = False
    racing: bool = False

    def site(self, index: int, offset: int) -> Site:
        """The origin of an access, by the index of the access and of the offset."""
        if self.cohort_rows is None:
            return Site(self.cohort, self.pc, index, offset)
        lane = None if self.lanes is None else int(self.lanes[index])
        return Site(self.cohort, self.pc, int(self.cohort_rows[index]), lane)


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
        lane_clocks: the clock of each lane (32,) up to which it has released, by now and before.
        covered: clock of the warp when all its lanes have synchronised or release; None before.
    """

    first: int
    last: int
    lane_clocks: Array
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
        # The clock of each warp when all of its lanes last released together.
        self.released = np.zeros(len(machine.row_block), np.int64)

    def take(self, table: Array, offsets: Array, size: int) -> Array:
        """The values of a shadow table for each vector of accesses (g, k), (g, vectors)."""
        many = size >> self.shift
        if many <= 1:
            return table.take(offsets >> self.shift)
        rows: Array = table.reshape(-1, many).take(offsets >> size.bit_length() - 1, axis=0)
        return rows.reshape(len(offsets), -1)

    def never_written(self, offsets: Array, size: int) -> Array:
        """Which accesses (g,) are to bytes that nothing has written."""
        never: Array = (self.take(self.written, offsets[:, None], size) == NEVER).any(axis=1)
        return never

    def put(self, table: Array, offsets: Array, size: int, value: Any) -> None:
        """Sets the values of a shadow table to one value, or to one per access (g,) or (g, k)."""
        many = size >> self.shift
        if np.ndim(value) == 1:
            value = value[:, None]
        if many <= 1:
            table[offsets >> self.shift] = value
        else:
            wide = value[..., None] if np.ndim(value) else value
            table.reshape(-1, many)[offsets >> size.bit_length() - 1] = wide

    def excused(self, access: SharedAccess, stamps: Array, verb: str) -> Array:
        """Which writes, with these stamps, a strong access need not be ordered after."""
        strong: Array = (stamps & np.uint32(ATOMIC)) != 0
        if access.racing and verb == "read" and strong.any():
            writers = self.take(self.writer_pc, access.offsets, access.size)
            strong &= ~np.isin(writers, list(self.machine.program.racing))
        return strong

    def fail(
        self,
        access: SharedAccess,
        bad: Array,
        what: str,
        numbers: str,
        way_out: str,
        kind: type[EmulatorError] = RaceError,
    ) -> NoReturn:
        """Raises for the first vector that ``bad`` (g, vectors) marks."""
        vector, site = self.first(access, bad)
        offset = (vector << self.shift) % self.machine.shared_pitch
        numbers += VOLATILE if access.racing else ""
        self.machine.fail(kind, what, site, f"shared offset {offset}; {numbers}", way_out)

    def first(self, access: SharedAccess, bad: Array) -> tuple[int, Site]:
        """The number of the first vector that ``bad`` (g, vectors) marks, and its origin."""
        index, vector = (int(i) for i in np.argwhere(bad)[0])
        offset, part = divmod(vector, max(1, access.size >> self.shift))
        return int(access.offsets[index, offset] >> self.shift) + part, access.site(index, offset)

    @functools.cached_property
    def _mark(self) -> Array:
        """A mark of each vector, 0 between two calls."""
        return np.zeros(self.count, np.int32)

    @property
    def advice(self) -> str:
        """The way out of two accesses of different warps that nothing orders."""
        relaxed = self.machine.program.accesses.relaxed_barriers
        return _BARRIER + (RELAXED if relaxed else "")

    # ---- what synchronises lanes

    def synchronise_lanes(self, cohort: Cohort, members: Any) -> None:
        """Synchronises the lanes of ``members`` (bit masks; None: all) of a cohort."""
        rows = cohort.rows
        some = self.accessed[rows]
        if not some.any():
            return
        whole = np.ones(cohort.n, bool)
        bits = None
        if cohort.mask is not None or members is not None:
            masks = np.uint32(0xFFFFFFFF) if members is None else np.asarray(members)
            if cohort.mask is not None or (masks != np.uint32(0xFFFFFFFF)).any():
                bits = spread(masks, cohort.n)
                # Lanes that have exited do not matter.
                active = cohort.full_mask()
                named = (bits[:, :, None] >> LANES.astype(np.uint32)) & np.uint32(1) != 0
                named &= active[:, None, :]
                alive = self.machine.alive[rows]
                every = (named | ~alive[:, None, :]).all(axis=2)
                whole = (every | ~active).all(axis=1)
        full = rows[whole & some]
        if len(full):
            self.clocks.sync_lanes(full)
            self.accessed[full] = False
            for row in full.tolist() if self.releases else ():
                for release in self.releases.get(row, ()):
                    release.covered = release.covered or int(self.clocks.clock[row])
        for cohort_row in np.flatnonzero(~whole & some).tolist():
            row = int(rows[cohort_row])
            for members_of_lane in np.unique(named[cohort_row][active[cohort_row]], axis=0):
                self._synchronise_some(row, np.flatnonzero(members_of_lane))
            self.clocks.tick(np.array([row]))

    def _synchronise_some(self, row: int, lanes: Array) -> None:
        seen = self.partial.setdefault(row, np.zeros((32, 32), np.int64))
        newest = seen[lanes].max(axis=0)
        newest[lanes] = self.clocks.clock[row]
        seen[lanes] = newest

    def release_lanes(self, arrival: Execution, fenced: bool = False) -> None:
        """Releases the accesses of the lanes of a cohort that arrive at an mbarrier, and no others.

        ``fenced``: a strong access, which releases what precedes the last fence of the warp.
        """
        rows = arrival.cohort.rows
        if not self.tracks_lanes:
            return
        arriving = arrival.cohort.full_mask() & arrival.active
        others = ~arriving.all(axis=1)  # even if they have exited since
        if not fenced:
            together = rows[~others]
            self.released[together] = self.clocks.clock[together]
            for row in together.tolist() if self.releases else ():
                for release in self.releases.get(row, ()):
                    release.covered = release.covered or int(self.clocks.clock[row])
        partial = self.accessed[rows] & arriving.any(axis=1) & others
        for cohort_row in np.flatnonzero(partial).tolist():
            row = int(rows[cohort_row])
            first = int(max(self.clocks.synced[row], self.released[row] + 1))
            last = int(self.clocks.clock[row])
            if fenced:
                fenced_clocks = self.clocks.fenced.get(row)
                last = -1 if fenced_clocks is None else int(fenced_clocks[row % self.warps])
            if last < first:
                continue
            releases = self.releases.setdefault(row, [])
            lane_clocks = np.where(arriving[cohort_row], last, self._lane_clocks(row, last))
            releases.append(_PartialRelease(first, last, lane_clocks))
            del releases[:-_KEPT_RELEASES]

    def _lane_clocks(self, row: int, until: int) -> Array:
        """The clock of each lane (32,) up to which partial releases of a warp release the accesses
        of the lane; ``until``: the clock up to which these releases count.
        """
        clocks = [r.lane_clocks for r in self.releases[row] if r.last <= until]
        newest: Array = np.max([np.zeros(32, np.int64), *clocks], axis=0)
        return newest

    def strong_access(self, execution: Execution) -> None:
        """Calls `release_lanes` for a strong store or atomic, before it releases clocks itself."""
        ordering = StrongAccess.from_instruction(self.machine, execution.pc)
        if ordering.releases or self.clocks.fenced:
            self.release_lanes(execution, fenced=not ordering.releases)

    # ---- checks

    def _uncovered(
        self, access: SharedAccess, row: int
    ) -> Iterator[tuple[_PartialRelease, Array, Array]]:
        """Partial releases of a warp that others come after, but not after all of its lanes.

        Yields:
            A release, the accesses (g,) that come after it, and the clock of each lane (32,) up to
            which they also come after a release by that lane.
        """
        cluster, member = divmod(row, self.warps)
        others = (access.rows // self.warps == cluster) & (access.rows != row)
        seen = self.clocks.seen[cluster, access.rows % self.warps, member]
        for until in np.unique(seen[others]).tolist():
            after = [
                release
                for release in self.releases[row]
                if release.last <= until and (release.covered is None or until < release.covered)
            ]
            if after:
                late, lane_clocks = others & (seen == until), self._lane_clocks(row, until)
                yield from ((release, late, lane_clocks) for release in after)

    def against_partial_releases(self, access: SharedAccess, stamps: Array) -> None:
        """Checks accesses against writes of lanes whose warps arrived without them."""
        if access.rows.ndim > 1:
            return
        agent, clock = self.clocks.decode(stamps)
        writers = self.take(self.writer, access.offsets, access.size)
        written = (stamps < ASYNC) & (writers != EVERY)
        for row in self.releases:
            by_row = written & (agent == row % self.warps)
            releases = self._uncovered(access, row) if by_row.any() else ()
            for release, late, lane_clocks in releases:
                bad = by_row & (clock >= release.first) & (clock <= release.last) & late[:, None]
                bad &= clock > lane_clocks[np.minimum(writers, 31)]
                if bad.any():
                    self._report_release(access, bad, self._writer_pc(access, bad))

    def _reads_not_released(self, access: SharedAccess, reads: _LaneReads) -> None:
        """Checks a write against reads of lanes whose warps arrived without them."""
        before = reads.access
        readers = np.broadcast_to(lanes_of(before), before.offsets.shape)
        for row in self.releases:
            same_warp = before.rows == row
            releases = self._uncovered(access, row) if same_warp.any() else ()
            for release, late, lane_clocks in releases:
                chosen = same_warp & (reads.clock >= release.first) & (reads.clock <= release.last)
                if chosen.any():
                    lanes, offsets = readers[chosen], before.offsets[chosen]
                    missing = reads.clock[chosen][:, None] > lane_clocks[np.minimum(lanes, 31)]
                    missing &= lanes != EVERY
                    self.put(self._mark, offsets, before.size, missing.astype(np.int32))
                    bad = self.take(self._mark, access.offsets, access.size) > 0
                    bad &= late[:, None]
                    self.put(self._mark, offsets, before.size, np.int32(0))
                    if bad.any():
                        self._report_release(access, bad, before.pc)

    def _report_release(self, access: SharedAccess, bad: Array, pc: int) -> NoReturn:
        what = "race in shared memory: some lanes of a warp arrive at an mbarrier, or set a flag, "
        what += "for lanes that they have not synchronised with"
        instruction = self.machine.program.describe(pc)
        numbers = f"another lane of that warp accesses the bytes: {instruction}"
        advice = "execute __syncwarp() (bar.warp.sync) before that"
        self.fail(access, bad, what, numbers, advice + way_out("warp_synchronous"))

    def lanes_against_writes(self, access: SharedAccess, stamps: Array, verb: str) -> None:
        """Checks an access against earlier writes of other lanes of its warp, with these stamps."""
        if access.rows.ndim > 1 or not self.tracks_lanes:
            return
        agent, clock = self.clocks.decode(stamps)
        warps = self.machine.row_member[access.rows][:, None]
        bad = (agent == warps) & (clock >= self.clocks.synced[access.rows][:, None])
        bad &= stamps < ASYNC
        if access.strong:
            bad &= ~self.excused(access, stamps, verb)
        if not bad.any():
            return
        writers = self.take(self.writer, access.offsets, access.size)
        lanes = lanes_of(access, self.shift)
        bad &= (writers != lanes) & (writers != EVERY)
        if verb == "write":
            bad &= lanes != EVERY  # one of the lanes wrote before
        if self.partial and bad.any():
            bad &= ~self._seen(access, bad, writers, clock)
        if bad.any():
            writer, pc = int(writers[bad][0]), self._writer_pc(access, bad)
            text = f"lane {writer} writes there: {self.machine.program.describe(pc)}"
            doing = "write the same bytes" if verb == "write" else "write and read the same bytes"
            advice = SYNCHRONISE_LANES
            advice += self.machine.forgives_guess(access.pc, int(stamps[bad][0]) & ATOMIC)
            self.fail(access, bad, _WHAT.format(doing), text, advice)

    def lanes_against_reads(self, access: SharedAccess) -> None:
        """Checks a write against earlier reads of other lanes of its warp."""
        rows = access.rows
        if rows.ndim > 1 or not self.lane_reads:
            return
        low, high = self._reach(access)
        for reads in self.lane_reads if self.releases else ():
            if reads.low < high and low < reads.high and not _excuses(access, reads.access):
                self._reads_not_released(access, reads)
        # Accesses of other warps are ordered, or not, elsewhere.
        since = np.full(len(self.accessed), _NEVER)
        since[rows] = self.clocks.synced[rows]
        for reads in self.lane_reads:
            if reads.low >= high or low >= reads.high or _excuses(access, reads.access):
                continue
            late = reads.clock >= since[reads.access.rows]
            if late.any():
                self._against_read(access, reads, late)

    def _against_read(self, access: SharedAccess, reads: _LaneReads, late: Array) -> None:
        before = reads.access
        readers = np.broadcast_to(lanes_of(before), before.offsets.shape)
        tags = ((before.rows + 1)[:, None] << 6 | readers) * late[:, None]
        own_lanes = lanes_of(access, self.shift)
        bad = np.zeros(1, bool)
        # Of several lanes that read the same bytes, the last and the first are compared.
        for way in (slice(None), slice(None, None, -1)):
            self.put(self._mark, before.offsets[:, way], before.size, tags[:, way].astype(np.int32))
            marks = self.take(self._mark, access.offsets, access.size)
            same = marks >> 6 == (access.rows + 1)[:, None]
            bad = bad | (same & (marks & 63 != own_lanes) & (own_lanes != EVERY))
        self.put(self._mark, before.offsets, before.size, np.int32(0))
        if self.partial and bad.any():
            lanes = np.minimum(marks & 63, 31)
            clock = np.broadcast_to(self.clocks.clock[access.rows][:, None], bad.shape)
            bad &= ~self._seen(access, bad, lanes, clock - 1)
        if bad.any():
            text = f"a lane reads there before: {self.machine.program.describe(before.pc)}"
            advice = SYNCHRONISE_LANES + self.machine.forgives_guess(before.pc, access.strong)
            self.fail(access, bad, _WHAT.format("read and write the same bytes"), text, advice)

    def _seen(self, access: SharedAccess, bad: Array, lanes: Array, clock: Array) -> Array:
        """Whether lanes that synchronised in part order accesses of ``lanes`` at ``clock``."""
        out = np.zeros(bad.shape, bool)
        own_lanes = np.broadcast_to(lanes_of(access, self.shift), bad.shape)
        for index, vector in np.argwhere(bad):
            seen = self.partial.get(int(access.rows[index]))
            if seen is not None:
                covered = seen[:, lanes[index, vector]] >= clock[index, vector]
                lane = int(own_lanes[index, vector])
                out[index, vector] = covered.all() if lane == EVERY else covered[lane]
        return out

    def _writer_pc(self, access: SharedAccess, bad: Array) -> int:
        return int(self.writer_pc[self.first(access, bad)[0]])

    # ---- records

    def note_lanes_of_write(self, access: SharedAccess) -> None:
        """Records the lanes of a write."""
        if access.rows.ndim == 1:
            self.put(self.writer, access.offsets, access.size, lanes_of(access).astype(np.uint8))
            self.accessed[access.rows] = True

    def note_lanes_of_read(self, access: SharedAccess, clock: Array) -> None:
        """Records a read, at these clocks of its warps."""
        if not self.tracks_lanes:
            return
        self.accessed[access.rows] = True
        self.lane_reads.append(_LaneReads(access, clock, *self._reach(access)))
        if len(self.lane_reads) > _KEPT_READS:
            reads, synced = self.lane_reads, self.clocks.synced
            self.lane_reads = [e for e in reads if (e.clock >= synced[e.access.rows]).any()]
            del self.lane_reads[: -_KEPT_READS // 2]

    def _reach(self, access: SharedAccess) -> tuple[int, int]:
        """The first byte in its block that an access may touch, and the end."""
        first = access.offsets - self.machine.shared_base_of_row[access.rows]
        return int(first.min()), int(first.max()) + access.size


def _excuses(write: SharedAccess, read: SharedAccess) -> bool:
    """Whether a write need not be ordered after a read, because both are strong."""
    return write.strong and read.strong and not (write.racing and read.racing)


def lanes_of(access: SharedAccess, shift: int | None = None) -> Array:
    """The lane of each offset of an access, (g, 1), (1, k) or (1, 1).

    With ``shift``, the logarithm of the bytes per vector, of each vector of the access.
    """
    if isinstance(access.cohort, SingleThreads):
        lane: Array = access.cohort.lane
        return (lane if access.cohort_rows is None else lane[access.cohort_rows])[:, None]
    if access.lanes is not None:
        return access.lanes[:, None]
    count = access.offsets.shape[1]
    if count == 1:
        return np.full((1, 1), EVERY)
    lanes = np.arange(count) % 32
    many = 1 if shift is None else max(1, access.size >> shift)
    return np.repeat(lanes, many)[None, :]
