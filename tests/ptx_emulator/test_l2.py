"""The model of the L2 cache, against traffic computed by hand and against a direct simulation."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from flashgen.shared.errors import EmulatorError
from ptx_emulator.counters.l2 import L2Traffic, interleaved, simulate
from ptx_emulator.counters.recorder import ATOMIC, READ, WRITE, AccessTrace

LINE, SECTOR = 128, 32
R, W, A = READ, WRITE, ATOMIC


def trace_of(*blocks: list[tuple[Any, ...]]) -> AccessTrace:
    """Of blocks, each a list of (kind, line) or (kind, line, sectors)."""
    entries = [(*entry, 0b1111)[:3] for block in blocks for entry in block]
    kind, line, sectors = (np.array([e[i] for e in entries], np.int64) for i in range(3))
    starts = np.cumsum([0, *map(len, blocks)])
    return AccessTrace(starts, line, sectors.astype("u1"), kind.astype("u1"))


def moved(traffic: L2Traffic) -> tuple[int, int, int]:
    """Sectors fetched, sectors written back, lines evicted."""
    return traffic.from_hbm // SECTOR, traffic.to_hbm // SECTOR, traffic.evictions


def test_what_fits_is_fetched_once() -> None:
    traffic = simulate(trace_of([(R, 5), (R, 9), (R, 5), (R, 9)]), 2 * LINE, 1)
    assert moved(traffic) == (8, 0, 0)
    assert traffic.requested == 16 * SECTOR


def test_sectors_of_a_line_are_fetched_when_they_are_asked_for() -> None:
    traffic = simulate(trace_of([(R, 5, 0b0001), (R, 5, 0b0011), (R, 5, 0b1000)]), 4 * LINE, 1)
    assert moved(traffic) == (3, 0, 0)
    assert traffic.requested == 4 * SECTOR


def test_the_line_used_longest_ago_makes_room() -> None:
    # Two lines: 1 2 1 3 throws 2 out, so that 1 is still there and 2 comes again, for 1.
    assert moved(
        simulate(trace_of([(R, 1), (R, 2), (R, 1), (R, 3), (R, 1), (R, 2)]), 2 * LINE, 1)
    ) == (4 * 4, 0, 2)


def test_a_walk_round_one_line_more_than_fits_always_misses() -> None:
    walk = [(R, line) for _ in range(5) for line in range(4)]
    assert moved(simulate(trace_of(walk), 3 * LINE, 1)) == (20 * 4, 0, 17)
    assert moved(simulate(trace_of(walk), 4 * LINE, 1)) == (4 * 4, 0, 0)


def test_writes_fetch_nothing_and_come_back_when_they_leave_or_at_the_end() -> None:
    traffic = simulate(trace_of([(W, 1), (W, 1), (R, 1)]), 2 * LINE, 1)
    assert moved(traffic) == (0, 4, 0)
    assert traffic.left == 4 * SECTOR
    # 1 is written, leaves for 2 and 3, and is written anew.
    traffic = simulate(trace_of([(W, 1, 0b0011), (R, 2), (R, 3), (W, 1, 0b0001)]), 2 * LINE, 1)
    assert moved(traffic) == (8, 3, 2)
    assert traffic.left == SECTOR
    assert traffic.hbm == 11 * SECTOR


def test_a_read_of_written_sectors_fetches_only_the_others() -> None:
    for capacity in (LINE, 8 * LINE):
        assert moved(simulate(trace_of([(W, 1, 0b0001), (R, 1)]), capacity, 1)) == (3, 1, 0)


def test_atomics_fetch_and_write_back() -> None:
    assert moved(simulate(trace_of([(A, 1), (A, 1)]), 2 * LINE, 1)) == (4, 4, 0)
    assert moved(simulate(trace_of([(W, 1), (A, 1), (R, 2)]), LINE, 1)) == (4, 4, 1)


def test_resident_blocks_take_turns_and_the_next_starts_where_one_has_ended() -> None:
    starts = np.cumsum([0, 2, 4, 1, 0, 2])
    # Turns: block 0 in 0-1, block 1 in 0-3; block 2 follows 0 in turn 2; 4 follows 2 from turn 3.
    assert interleaved(starts, 2).tolist() == [0, 2, 1, 3, 6, 4, 7, 5, 8]
    assert interleaved(starts, 1).tolist() == list(range(9))
    assert interleaved(starts, 99).tolist() == [0, 2, 6, 7, 1, 3, 8, 4, 5]


def test_blocks_that_run_together_share_what_they_fetch() -> None:
    blocks = [[(R, line) for line in range(64)] for _ in range(4)]
    together, alone = (simulate(trace_of(*blocks), 8 * LINE, n) for n in (4, 1))
    assert together.from_hbm == 64 * LINE
    assert alone.from_hbm == 4 * 64 * LINE


def test_no_room_and_no_block_are_refused() -> None:
    for capacity, resident in ((LINE - 1, 1), (LINE, 0)):
        with pytest.raises(EmulatorError, match="smaller than one line"):
            simulate(trace_of([(R, 1)]), capacity, resident)


def test_nothing_accessed_is_nothing_moved() -> None:
    assert moved(simulate(trace_of([], []), LINE, 1)) == (0, 0, 0)


def plainly(trace: AccessTrace, lines: int, resident: int) -> tuple[int, int, int]:
    """The same cache, one sector of one access after the other, with lists."""
    queues = [
        list(range(trace.starts[b], trace.starts[b + 1])) for b in range(len(trace.starts) - 1)
    ]
    waiting, running = queues[resident:], queues[:resident]
    there: list[int] = []  # last used last
    state: dict[int, tuple[set[int], set[int]]] = {}
    fetched = written = evicted = 0
    while any(running) or waiting:
        for place in range(len(running)):
            while not running[place] and waiting:
                running[place] = waiting.pop(0)
        for queue in running:
            if not queue:
                continue
            at = queue.pop(0)
            line, kind = int(trace.line[at]), int(trace.kind[at])
            if line in there:
                there.remove(line)
            elif len(there) == lines:
                evicted += 1
                written += len(state.pop(there.pop(0))[1])
            there.append(line)
            valid, dirty = state.setdefault(line, (set(), set()))
            for sector in range(4):
                if not trace.sectors[at] >> sector & 1:
                    continue
                fetched += kind != WRITE and sector not in valid
                valid.add(sector)
                if kind != READ:
                    dirty.add(sector)
    return fetched, written + sum(len(dirty) for _, dirty in state.values()), evicted


@pytest.mark.parametrize("seed", range(8))
def test_the_fast_way_is_the_plain_way(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 60, 7)
    size = int(lengths.sum())
    trace = AccessTrace(
        np.cumsum([0, *lengths]),
        rng.integers(0, 24, size),
        rng.integers(1, 16, size).astype("u1"),
        rng.choice([R, R, W, A], size).astype("u1"),
    )
    for lines in (1, 5, 17, 23, 24, 100):
        for resident in (1, 3, 7):
            assert moved(simulate(trace, lines * LINE, resident)) == plainly(trace, lines, resident)


@pytest.mark.slow
def test_ten_million_accesses_take_seconds() -> None:
    rng = np.random.default_rng(0)
    size, blocks = 10**7, 1000
    trace = AccessTrace(
        np.arange(blocks + 1) * (size // blocks),
        rng.integers(0, 10**6, size),
        np.full(size, 15, np.uint8),
        rng.choice([R, R, R, W], size).astype("u1"),
    )
    begin = time.perf_counter()
    traffic = simulate(trace, 40 << 20, 216)
    assert time.perf_counter() - begin < 120
    assert traffic.evictions > 10**6
