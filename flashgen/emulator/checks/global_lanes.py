"""Global memory: races between the lanes of one warp; see `warp_lanes` for what orders lanes.

Of each vector the checker keeps the lane of the last write and of the last read, as its number plus
one; 0 is unknown. Reads of a buffer that has not been written are not kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.block_order import BLOCK_SHIFT, LOW
from flashgen.emulator.checks.clocks import CLOCK_SHIFT, WARP
from flashgen.emulator.state.cohort import Cohort, SingleThreads, spread
from flashgen.emulator.state.memory import sparse_zeros
from flashgen.emulator.state.wave import Wave

Array = npt.NDArray[Any]
_EVERY, _SEVERAL = 33, 34  # all lanes access the vector together; several do, one by one
_WARP = 0xFFFFFFF << BLOCK_SHIFT | WARP  # the bits of a stamp that name the block and the warp
LANES_OF_A_WARP = (
    "lanes of one warp access the same bytes, one of them writes, and nothing synchronises them in "
    "between"
)


class GlobalLanes:
    """The lanes of the last accesses to ``count`` vectors of device memory."""

    def __init__(self, machine: Wave, count: int) -> None:
        self.machine = machine
        self.tracks = "warp_synchronous" not in machine.allow
        self.writer, self.reader = (sparse_zeros(count, np.uint8) for _ in range(2))

    def of(self, cohort: Cohort, accesses: int, lanes: Any, vectors: int) -> Array:
        """The lane of each vector of an instruction with this many accesses and vectors, flat."""
        if isinstance(cohort, SingleThreads):
            lane = np.repeat(cohort.lane + 1, accesses // cohort.n)
        elif lanes is not None:
            lane = np.nonzero(spread(lanes, cohort.n))[1] + 1
        elif accesses == 32 * cohort.n:
            lane = np.tile(np.arange(1, 33), cohort.n)
        else:
            lane = np.full(accesses, _EVERY)
        found: Array = np.repeat(lane.astype(np.uint8), vectors // max(1, accesses))
        return found

    def unordered(
        self, verb: str, vectors: Array, lane: Array, before: Array, stamps: Array, rows: Array
    ) -> Array:
        """Which accesses conflict with an earlier one of another lane of their warps.

        Args:
            verb: "read" after write, "write" after write, or "overtake": write after read.
            before, stamps: of the earlier accesses and of these, see `global_races`.
        """
        races = self.machine.shared_races
        assert races is not None
        same: Array = ((before ^ stamps) & _WARP) == 0
        same &= (before & LOW) >> CLOCK_SHIFT >= races.clocks.synced[rows]
        if not same.any() or not self.tracks:
            return np.zeros(len(same), bool)
        earlier = (self.reader if verb == "overtake" else self.writer).take(vectors)
        same &= (earlier != lane) & (earlier != 0)
        if verb != "read":
            same &= lane != _EVERY
        if verb != "overtake":
            same &= earlier != _EVERY
        for place in np.flatnonzero(same) if races.partial else ():
            seen = races.partial.get(int(rows[place]))
            if seen is not None and earlier[place] < _EVERY:
                known = seen[:, int(earlier[place]) - 1]
                known = known >= (int(before[place]) & LOW) >> CLOCK_SHIFT
                mine = int(lane[place])
                same[place] = not (known.all() if mine == _EVERY else known[mine - 1])
        return same

    def note_reads(self, vectors: Array, lane: Array, before: Array, stamps: Array) -> None:
        """Records reads; ``before`` holds the stamps of the last reads of the vectors."""
        old = self.reader.take(vectors)
        again = (old != 0) & (old != lane) & (((before ^ stamps) & (_WARP | LOW)) == 0)
        self.reader[vectors] = lane
        again |= self.reader.take(vectors) != lane
        self.reader[vectors[again]] = _SEVERAL

    def note_writes(self, vectors: Array, lane: Array) -> None:
        """Records writes."""
        self.writer[vectors] = lane
