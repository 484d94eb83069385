"""The bytes that a launch of a key-owning backward kernel misses in L2, by the order of its blocks.

The model runs the blocks in the order of their numbers, one in each free slot, all at one rate.
At each step a block reads a tile of Q and of dO and adds to one of dQ's sums; L2 holds the tiles
that were accessed last. What one SM reads otherwise, K and V, passes through once.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.traffic import SUM_BYTES, LaunchSizes, Visited, walks_of_head

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
