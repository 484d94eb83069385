"""Predicted bytes are those that the kernel's loops load and store, row by row."""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_forward
from flashgen.kernels.planner import forward_traffic
from tests.support.plan_problems import plan_of
from tests.support.tiers import slow

SHAPES = [(1, 1, 1, 1, 1), (2, 4, 2, 113, 203), (1, 6, 1, 257, 257), (3, 4, 4, 17, 5)]


def by_rows(plan, batch, heads_q, heads_kv, seq_q, seq_k, visits):
    """The same count, one row at a time."""
    q = k = v = 0
    rows_touched = set()
    for b in range(batch):
        for h in range(heads_q):
            for q_tile in range(-(-seq_q // plan.block_q)):
                tiles = visits(q_tile)
                if tiles:
                    first = q_tile * plan.block_q
                    q += len(range(first, min(first + plan.block_q, seq_q))) * plan.head_dim
                for tile in tiles:
                    for row in range(tile * plan.block_k, (tile + 1) * plan.block_k):
                        if row < seq_k:
                            k += plan.head_dim
                            v += plan.head_dim_v
                            rows_touched.add((b, h // (heads_q // heads_kv), row))
    o = batch * heads_q * seq_q * plan.head_dim_v
    e = plan.itemsize
    least = e * (q + o + len(rows_touched) * (plan.head_dim + plan.head_dim_v))
    return q * e, k * e, v * e, o * e, least + 4 * batch * heads_q * seq_q


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_full_attention_reads_all_keys_for_every_query_tile(shape, dtype):
    plan = plan_of(64, dtype, head_dim_v=40)
    seq_k = shape[4]
    got = forward_traffic(plan, *shape)
    want = by_rows(plan, *shape, lambda q_tile: range(-(-seq_k // plan.block_k)))
    assert (got.q, got.k, got.v, got.o, got.compulsory) == want
    assert got.lse == 4 * shape[0] * shape[1] * shape[3]
    assert got.issued == got.q + got.k + got.v + got.o + got.lse


@pytest.mark.parametrize("shape", SHAPES)
def test_causal_attention_reads_the_keys_up_to_the_diagonal(shape):
    plan = plan_of(64)
    seq_q, seq_k = shape[3:]

    def visits(q_tile):
        last = min((q_tile + 1) * plan.block_q, seq_q, seq_k) - 1
        return range(last // plan.block_k + 1)

    visited = [visits(tile) for tile in range(-(-seq_q // plan.block_q))]
    got = forward_traffic(plan, *shape, visited)
    assert (got.q, got.k, got.v, got.o, got.compulsory) == by_rows(plan, *shape, visits)


@pytest.mark.parametrize("head_dim_v", [slow(32), 16])
def test_the_emulator_counts_exactly_the_predicted_bytes(head_dim_v):
    def causal(b, h, q, k):
        return k <= q

    spec = fg.AttentionSpec(mask_mod=causal, head_dim=32, head_dim_v=head_dim_v)
    shape = (2, 2, 1, 150, 260)
    q, k = torch.randn(2, 2, 150, 32).half(), torch.randn(2, 1, 260, 32).half()
    v = torch.randn(2, 1, 260, head_dim_v).half()
    run = run_forward(spec, q, k, v, backend="emulator", check_memory=False)
    plan = run.plan
    rows = plan.queries_per_tile
    ends = [min((tile + 1) * rows, 150) for tile in range(-(-150 // rows))]
    got = forward_traffic(plan, *shape, [range(-(-end // plan.block_k)) for end in ends])
    assert run.counters.global_read_bytes == got.q + got.k + got.v
    assert run.counters.global_write_bytes == got.o + got.lse


def test_a_query_tile_that_reaches_no_key_loads_nothing():
    plan = plan_of(64)
    rows = 2 * plan.block_q
    half = forward_traffic(plan, 1, 1, 1, rows, rows, [[], [0]])
    assert half.q == plan.block_q * 64 * 2
    assert half.o == rows * 64 * 2
    assert half.scores == plan.block_q * plan.block_k


def test_traffic_falls_with_the_size_of_the_query_tile():
    """K and V are read seq_q / block_q times: the paper's N^2 d^2 / M with block_q ~ M / d."""
    small, large = plan_of(128, sram=24 * 1024), plan_of(128, sram=160 * 1024)
    assert small.block_q < large.block_q
    for each in (small, large):
        rounds = 4096 // each.block_q
        assert forward_traffic(each, 1, 1, 1, 4096, 4096).k == rounds * 4096 * 128 * 2
