"""The misses in L2 by the order of blocks, with the rules by which calls are launched."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flashgen as fg
from flashgen.kernels.planner import Plan, plan_backward
from flashgen.kernels.planner.traffic import LaunchSizes
from tests.support.examples import spec_path
from tests.support.l2_misses import L2Misses, blocks_in_order, l2_misses
from tests.support.tiers import slow

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
