"""The misses in L2 by the order of blocks, with the rules by which calls are launched.

The model of a key-owning backward kernel runs the blocks in the order of their numbers, one in each
free slot, all at one rate. At each step a block reads a tile of Q and of dO and adds to one of dQ's
sums; L2 holds the tiles that were accessed last. What one SM reads otherwise, K and V, passes
through once.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

import flashgen as fg
from flashgen.kernels.planner import Plan, plan_backward
from flashgen.kernels.planner.traffic import SUM_BYTES, LaunchSizes, Visited, walks_of_head
from tests.support.examples import spec_path
from tests.support.tiers import slow

START = 0.8
"""Steps that a block waits for its first tiles."""

JITTER = 0.04
"""The most by which a step is longer than another: no two blocks run in exact step."""


class L2Misses(NamedTuple):
    """Bytes of tiles that blocks access, and of those that are not in L2 then."""

    accessed: int
    missed: int


def blocks_in_order(
    plan: Plan, sizes: LaunchSizes, visited: Visited | None
) -> Iterator[Sequence[tuple[int, int]]]:
    """For each block in the order of launches, the query heads and tiles that it walks."""
    walks = walks_of_head(plan, sizes, visited)
    parts, part_heads = plan.parts_of_group(*sizes)
    bits = plan.head_bits(*sizes[1:], part_heads)
    columns, rows, entries = plan.grid(*sizes, head_bits=bits, parts=parts)
    tiles, group = columns >> bits, sizes.heads_q // sizes.heads_kv
    longest_first = sorted(range(tiles), key=lambda tile: -len(walks[tile]))
    for entry in range(entries):
        for row in range(rows):
            for number in range(columns):
                head = row << bits | number & (1 << bits) - 1
                kv, part = divmod(head, parts)
                first = kv * group + part * part_heads
                last = min(first + part_heads, (kv + 1) * group)
                walk = walks[longest_first[number >> bits]]
                yield [(entry * sizes.heads_q + h, x) for h in range(first, last) for x in walk]


def l2_misses(plan: Plan, sizes: LaunchSizes, visited: Visited | None, l2_bytes: float) -> L2Misses:
    """The misses of a launch in an L2 of this size.

    Args:
        visited: the query tiles of each key tile, the same for all heads; None for all tiles.
    """
    row = plan.block_q * plan.itemsize
    tile_bytes = [row * plan.head_dim, row * plan.head_dim_v]
    if plan.sums_tile is not None:
        tile_bytes.append(SUM_BYTES * plan.sums_tile[0] * plan.sums_tile[1])
    held: OrderedDict[tuple[int, int, int], int] = OrderedDict()
    used = accessed = missed = 0
    waiting = blocks_in_order(plan, sizes, visited)
    running = [(0.0, slot) for slot in range(plan.machine.sms * plan.blocks_per_sm)]
    steps: list[Iterator[tuple[int, int]]] = [iter(()) for _ in running]
    turn = 0
    while running:
        time, slot = heapq.heappop(running)
        step = next(steps[slot], None)
        if step is None:
            block = next(waiting, None)
            if block is not None:
                steps[slot] = iter(block)
                heapq.heappush(running, (time + START, slot))
            continue
        for kind, size in enumerate(tile_bytes):
            accessed += size
            key = (kind, *step)
            if key in held:
                held.move_to_end(key)
                continue
            missed += size
            held[key] = size
            used += size
            while used > l2_bytes:
                used -= held.popitem(last=False)[1]
        turn = (turn * 1103515245 + 12345) % 2**31  # the same in every run
        heapq.heappush(running, (time + 1 + JITTER * turn / 2**31, slot))
    return L2Misses(accessed, missed)


GIB = 2**30
L2 = 40 * 2**20  # of 50 MiB: the rest is for K, V and results


def fused(*, in_parts: bool) -> Plan:
    spec = fg.load(spec_path("causal")).replace(head_dim=128, head_dim_v=128, dtype="bfloat16")
    plan = plan_backward(spec, "sm_90a").kernel("fused")
    return replace(plan, in_parts=in_parts)


def causal_misses(sizes: LaunchSizes, *, in_parts: bool = True) -> L2Misses:
    plan = fused(in_parts=in_parts)
    tiles = -(-sizes.seq_q // plan.block_q)
    starts = range(0, sizes.seq_k, plan.block_k)
    visited = [range(start // plan.block_q, tiles) for start in starts]
    return l2_misses(plan, sizes, visited, L2)


@pytest.mark.parametrize(
    ("sizes", "whole", "parts"),
    [
        (LaunchSizes(1, 64, 8, 4096, 4096), 1.5, 0.3),
        slow(LaunchSizes(1, 64, 8, 8192, 8192), 9.0, 0.6),
        slow(LaunchSizes(1, 16, 2, 16384, 16384), 8.0, 0.5),
        slow(LaunchSizes(2, 64, 8, 4096, 4096), 4.0, 0.6),
        slow(LaunchSizes(1, 40, 8, 8192, 8192), 3.0, 0.4),
    ],
)
def test_parts_of_groups_keep_their_tiles_in_l2(
    sizes: LaunchSizes, whole: float, parts: float
) -> None:
    before, after = causal_misses(sizes, in_parts=False), causal_misses(sizes)
    print(sizes, before.missed / GIB, after.missed / GIB, after.accessed / GIB)
    assert before.accessed == after.accessed
    assert before.missed > whole * GIB
    assert after.missed <= parts * GIB


def test_each_head_and_tile_is_walked_once_by_the_blocks_of_its_keys() -> None:
    sizes = LaunchSizes(2, 40, 8, 8192, 8192)
    plan = fused(in_parts=True)
    blocks = list(blocks_in_order(plan, sizes, None))
    keys, tiles = -(-sizes.seq_k // plan.block_k), -(-sizes.seq_q // plan.block_q)
    assert len(blocks) == 2 * 8 * 3 * keys  # parts of 2, 2 and 1 heads
    counts: dict[int, int] = {}
    for block in blocks:
        for head in {head for head, _ in block}:
            counts[head] = counts.get(head, 0) + len(block) // len({h for h, _ in block})
    assert counts == dict.fromkeys(range(80), keys * tiles)
