"""A model of the L2 cache: the bytes that a launch moves between L2 and HBM.

The cache is fully associative. It holds lines of 128 bytes; each of the four 32-byte sectors of a
line is valid or not, and clean or dirty. The least recently used line is evicted (LRU). A read
fetches the sectors that are not valid. A write makes its sectors valid and dirty and fetches
nothing: the bytes of a sector that it does not write are assumed to be written before the line is
evicted (the hardware keeps a byte mask). An atomic fetches invalid sectors and makes them dirty.
Dirty sectors are written to HBM when their line is evicted (write-back) or at the end: the cache
starts empty and ends flushed.

The blocks of a grid start in the order of their numbers; ``resident`` blocks run at the same time.
The resident blocks advance in round-robin order by one entry of the trace each (one access of a
warp to one line), and when a block finishes, the next one starts in its place. L1 is not modelled:
the emitted kernels copy with cp.async.cg, which bypasses L1.

Not modelled: cache sets, address hashing, the two partitions of an A100's L2, and other kernels.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from ptx_emulator.counters import recorder
from ptx_emulator.errors import LaunchArguments
from ptx_emulator.state.memory import Array

_BITS = np.array([bin(mask).count("1") for mask in range(1 << recorder.SECTORS)])
_DIRTY = recorder.SECTORS  # a line's state: four bits of valid sectors, then four of dirty ones


@dataclass(frozen=True)
class L2Traffic:
    """Traffic between the warps and L2, and between L2 and HBM.

    Attributes:
        capacity: bytes of the cache.
        resident: blocks that run at the same time.
        requested: bytes of the sectors of all reads, writes and atomics of warps.
        from_hbm, to_hbm: bytes fetched and written back.
        left: the part of ``to_hbm`` that was written back at the end.
        evictions: number of evicted lines.
    """

    capacity: int
    resident: int
    requested: int
    from_hbm: int
    to_hbm: int
    left: int
    evictions: int

    @property
    def hbm(self) -> int:
        return self.from_hbm + self.to_hbm


def simulate(trace: recorder.AccessTrace, capacity: int, resident: int) -> L2Traffic:
    """Simulates a cache of ``capacity`` bytes for the accesses of a launch.

    Args:
        trace: from `Recorder.trace`.
        resident: blocks that run at the same time.

    Raises:
        LaunchArguments: the cache is smaller than a line, or no block is resident.
    """
    if capacity < recorder.LINE_BYTES or resident < 1:
        what = "a cache smaller than one line, or no resident block"
        where = "ptx_emulator.counters.l2.simulate"
        least = f"a line is {recorder.LINE_BYTES} B"
        numbers = f"capacity {capacity:,} B, {resident:,} resident blocks; {least}"
        way_out = "pass the L2 size of an architecture, and its SMs times the blocks per SM"
        raise LaunchArguments(what, where=where, numbers=numbers, way_out=way_out)
    order = interleaved(trace.starts, resident)
    line, sectors, kind = trace.line[order], trace.sectors[order], trace.kind[order]
    requested = int(_BITS[sectors].sum()) * recorder.SECTOR_BYTES
    lines = capacity // recorder.LINE_BYTES
    _, line = np.unique(line, return_inverse=True)
    if not len(line) or int(line.max()) < lines:
        fetched, left = _all_fit(line, sectors, kind)
        written, evictions = left, 0
    else:
        fetched, written, left, evictions = _evicting(line, sectors, kind, lines)
    sector_bytes = recorder.SECTOR_BYTES
    traffic = (requested, fetched * sector_bytes, written * sector_bytes, left * sector_bytes)
    return L2Traffic(capacity, resident, *traffic, evictions)


def interleaved(starts: Array, resident: int) -> Array:
    """The order in which the entries of all blocks are executed, (entries,)."""
    lengths = np.diff(starts)
    first = np.zeros(len(lengths), np.int64)
    slot = np.zeros(len(lengths), np.int64)
    free = [(0, free_slot) for free_slot in range(resident)]  # (turn, slot) of the next block
    for number, length in enumerate(lengths.tolist()):
        turn, free_slot = free[0]
        first[number], slot[number] = turn, free_slot
        heapq.heapreplace(free, (turn + length, free_slot))
    block = np.repeat(np.arange(len(lengths)), lengths)
    turns = first[block] + np.arange(len(block)) - starts[block]
    return np.argsort(turns * resident + slot[block], kind="stable")


def _all_fit(line: Array, sectors: Array, kind: Array) -> tuple[int, int]:
    """Sectors fetched and sectors dirty at the end, if no line is evicted."""
    fetched = dirty = 0
    for bit in range(recorder.SECTORS):
        uses = (sectors >> bit & 1).astype(bool)
        _, first = np.unique(line[uses], return_index=True)
        fetched += int(np.count_nonzero(kind[uses][first] != recorder.WRITE))
        dirty += len(np.unique(line[uses & (kind != recorder.READ)]))
    return fetched, dirty


def _evicting(line: Array, sectors: Array, kind: Array, lines: int) -> tuple[int, int, int, int]:
    """Sectors fetched, sectors written, the part of them written at the end, and evicted lines."""
    # Consecutive accesses of one kind to one line are one step: the line stays valid between.
    begins = np.ones(len(line), bool)
    begins[1:] = (line[1:] != line[:-1]) | (kind[1:] != kind[:-1])
    starts = np.flatnonzero(begins)
    masks = np.bitwise_or.reduceat(sectors, starts)
    cache: OrderedDict[int, int] = OrderedDict()
    ones = _BITS.tolist()
    fetched = written = evictions = 0
    runs = zip(line[starts].tolist(), masks.tolist(), kind[starts].tolist(), strict=True)
    for number, mask, access_kind in runs:
        state = cache.get(number)
        if state is None:
            state = 0
            if len(cache) == lines:
                _, old = cache.popitem(last=False)
                written += ones[old >> _DIRTY]
                evictions += 1
        else:
            cache.move_to_end(number)
        if access_kind != recorder.WRITE:
            fetched += ones[mask & ~state]
        if access_kind != recorder.READ:
            state |= mask << _DIRTY
        cache[number] = state | mask
    left = sum(ones[state >> _DIRTY] for state in cache.values())
    return fetched, written + left, left, evictions
