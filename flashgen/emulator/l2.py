"""A model of the L2 cache: what a launch would move between it and HBM.

The cache is fully associative and holds lines of 128 bytes, of which each of the four sectors of 32
bytes is there or not, and clean or dirty. The line that was used longest ago makes room for a new
one (LRU). A read fetches the sectors that are missing. A write makes its sectors dirty and fetches
nothing: bytes that it does not write are taken to be written by others before the line leaves (the
hardware keeps a mask of bytes). An atomic fetches what is missing and makes it dirty. Dirty
sectors are written to HBM when their line leaves (write-back), and those that are left at the end
then: the cache starts empty and ends flushed.

The blocks of a grid start in the order of their numbers, as many as are resident together. These
take turns, one entry of the trace each (what one access of a warp touches of one line), and the
next block starts in the turn after one has finished. There is no cache before L2: the emitted
kernels copy with cp.async.cg, which passes L1 by.

Not modelled: sets, hashing of addresses, the two halves of an A100's L2, and what else runs.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.errors import LaunchArguments
from flashgen.emulator.recorder import LINE_BYTES, READ, SECTOR_BYTES, SECTORS, WRITE, Trace

Array = npt.NDArray[Any]

_BITS = np.array([bin(mask).count("1") for mask in range(1 << SECTORS)])
_DIRTY = SECTORS  # a line's state: four bits of what is there, and above them four of what is dirty


@dataclass(frozen=True)
class L2Traffic:
    """What passes L2 and what it passes on.

    Attributes:
        capacity, resident: bytes of the cache, blocks that run together.
        asked: bytes of the sectors that warps ask L2 for, by reads, writes and atomics.
        from_hbm, to_hbm: bytes fetched and written back.
        left: of these, dirty at the end.
        evictions: lines that had to leave.
    """

    capacity: int
    resident: int
    asked: int
    from_hbm: int
    to_hbm: int
    left: int
    evictions: int

    @property
    def hbm(self) -> int:
        return self.from_hbm + self.to_hbm


def simulate(trace: Trace, capacity: int, resident: int) -> L2Traffic:
    """Runs the accesses of a launch through a cache of ``capacity`` bytes.

    Args:
        trace: of `Recorder`.
        resident: blocks that run at the same time.

    Raises:
        LaunchArguments: the cache has no room for a line, or no block runs.
    """
    if capacity < LINE_BYTES or resident < 1:
        raise LaunchArguments(
            "a cache holds a line at least, and a block at least runs",
            where="flashgen.emulator.l2.simulate",
            numbers=f"capacity {capacity:,} B, {resident:,} resident blocks; a line is "
            f"{LINE_BYTES} B",
            way_out="the L2 size of an architecture, and its SMs times the blocks of each",
        )
    order = interleaved(trace.starts, resident)
    line, sectors, kind = trace.line[order], trace.sectors[order], trace.kind[order]
    asked = int(_BITS[sectors].sum()) * SECTOR_BYTES
    lines = capacity // LINE_BYTES
    _, line = np.unique(line, return_inverse=True)
    if not len(line) or int(line.max()) < lines:
        fetched, left = _all_fit(line, sectors, kind)
        written, evictions = left, 0
    else:
        fetched, written, left, evictions = _evicting(line, sectors, kind, lines)
    each = SECTOR_BYTES
    return L2Traffic(
        capacity, resident, asked, fetched * each, written * each, left * each, evictions
    )


def interleaved(starts: Array, resident: int) -> Array:
    """The order in which the entries of all blocks are executed, (entries,)."""
    lengths = np.diff(starts)
    first = np.zeros(len(lengths), np.int64)
    slot = np.zeros(len(lengths), np.int64)
    free = [(0, place) for place in range(resident)]  # (turn, place) that a block can take next
    for number, length in enumerate(lengths.tolist()):
        turn, place = free[0]
        first[number], slot[number] = turn, place
        heapq.heapreplace(free, (turn + length, place))
    block = np.repeat(np.arange(len(lengths)), lengths)
    turns = first[block] + np.arange(len(block)) - starts[block]
    return np.argsort(turns * resident + slot[block], kind="stable")


def _all_fit(line: Array, sectors: Array, kind: Array) -> tuple[int, int]:
    """Sectors fetched and sectors dirty at the end, when no line has to leave."""
    fetched = dirty = 0
    for bit in range(SECTORS):
        uses = (sectors >> bit & 1).astype(bool)
        _, first = np.unique(line[uses], return_index=True)
        fetched += int(np.count_nonzero(kind[uses][first] != WRITE))
        dirty += len(np.unique(line[uses & (kind != READ)]))
    return fetched, dirty


def _evicting(line: Array, sectors: Array, kind: Array, lines: int) -> tuple[int, int, int, int]:
    """Sectors fetched, written, of these dirty at the end, and lines that left."""
    # Accesses of one kind to one line, one after the other, are one step: the line stays.
    begins = np.ones(len(line), bool)
    begins[1:] = (line[1:] != line[:-1]) | (kind[1:] != kind[:-1])
    starts = np.flatnonzero(begins)
    masks = np.bitwise_or.reduceat(sectors, starts)
    cache: OrderedDict[int, int] = OrderedDict()
    ones = _BITS.tolist()
    fetched = written = evictions = 0
    runs = zip(line[starts].tolist(), masks.tolist(), kind[starts].tolist(), strict=True)
    for number, mask, how in runs:
        state = cache.get(number)
        if state is None:
            state = 0
            if len(cache) == lines:
                _, old = cache.popitem(last=False)
                written += ones[old >> _DIRTY]
                evictions += 1
        else:
            cache.move_to_end(number)
        if how != WRITE:
            fetched += ones[mask & ~state]
        if how != READ:
            state |= mask << _DIRTY
        cache[number] = state | mask
    left = sum(ones[state >> _DIRTY] for state in cache.values())
    return fetched, written + left, left, evictions
