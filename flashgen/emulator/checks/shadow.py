"""The shadow of shared memory: the last write of each vector, and the clocks that order writes.

A vector has as many bytes as the narrowest access of the kernel to shared memory, so accesses to
neighbouring bytes never share a vector. A stamp is the clock and the warp of the last write (see
`clocks`); the stamps from `ASYNC` on are numbers of asynchronous writes, and the last three of them
are the constants below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.clocks import ATOMIC, Clocks
from flashgen.emulator.errors import RaceError
from flashgen.emulator.state.cohort import Cohort
from flashgen.emulator.state.wave import Site, Wave
from flashgen.errors import EmulatorError

Array = npt.NDArray[Any]

ASYNC = np.uint32(0xE0000000)
MBARRIER = np.uint32(0xFFFFFFFD)  # an mbarrier object lies in the vector
FLIGHT = np.uint32(0xFFFFFFFE)  # a cp.async that has not been waited for writes the vector
NEVER = np.uint32(0xFFFFFFFF)  # not written since the block started
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
        self.writer_pc = np.zeros(self.count, np.int32)
        self.clocks = Clocks(blocks, self.warps, machine.program.asynchronous, machine.cluster_size)

    def take(self, table: Array, where: Array, size: int) -> Array:
        """The values of a shadow table for each vector of accesses (g, k), (g, vectors)."""
        many = size >> self.shift
        if many <= 1:
            return table.take(where >> self.shift)
        rows: Array = table.reshape(-1, many).take(where >> size.bit_length() - 1, axis=0)
        return rows.reshape(len(where), -1)

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
