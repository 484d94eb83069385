"""Predicted bytes of backward kernels are those that their loops load, store and add by rows."""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_backward, run_forward
from flashgen.kernels.planner import backward_traffic, forward_traffic
from tests.support.plan_problems import backward_of, plan_of
from tests.support.tiers import slow

SHAPES = [(1, 1, 1, 1, 1), (2, 4, 2, 113, 203), (1, 6, 1, 257, 257), (3, 4, 4, 17, 5)]


def kernels():
    split = backward_of(64, head_dim_v=40, deterministic=True)
    return {
        each.kernel: each for each in (*split.kernels, backward_of(64, head_dim_v=40).kernels[1])
    }


def causal(plan, seq_q, seq_k):
    """For each tile that a block owns, the tiles of the other side with a pair q >= k."""
    q_tiles, k_tiles = -(-seq_q // plan.block_q), -(-seq_k // plan.block_k)
    last_q = [min((i + 1) * plan.block_q, seq_q) - 1 for i in range(q_tiles)]
    reached = [
        [(i, j) for j in range(k_tiles) if last_q[i] >= j * plan.block_k] for i in range(q_tiles)
    ]
    if not plan.owns_keys:
        return [[j for _, j in row] for row in reached]
    return [[i for i in range(q_tiles) if (i, j) in reached[i]] for j in range(k_tiles)]


def by_rows(plan, batch, heads_q, heads_kv, seq_q, seq_k, walk):
    """Rows that are read of (Q, K), counted one at a time, and tiles that are computed."""
    q = k = tiles = 0
    for _ in range(batch):
        for h in range(heads_q):
            first_of_group = h % (heads_q // heads_kv) == 0
            for own, others in enumerate(walk):
                for other in others:
                    i, j = (other, own) if plan.owns_keys else (own, other)
                    first = other == others[0]
                    tiles += 1
                    for row in range(i * plan.block_q, min((i + 1) * plan.block_q, seq_q)):
                        q += row >= 0 and (plan.owns_keys or first)
                    for row in range(j * plan.block_k, min((j + 1) * plan.block_k, seq_k)):
                        k += row >= 0 and (not plan.owns_keys or (first and first_of_group))
    return q, k, tiles


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["dkdv", "fused", "dq"])
def test_each_kernel_reads_its_own_rows_once_and_the_others_at_each_visit(name, masked, shape):
    plan = kernels()[name]
    batch, heads_q, heads_kv, seq_q, seq_k = shape
    walk = causal(plan, seq_q, seq_k)
    if not masked:
        other = -(-seq_q // plan.block_q) if plan.owns_keys else -(-seq_k // plan.block_k)
        walk = [list(range(other))] * len(walk)
    got = backward_traffic(plan, *shape, walk if masked else None)
    q, k, tiles = by_rows(plan, *shape, walk)
    asking = 4 * plan.column_warps if name == "dq" else 1  # lanes that read the same row's numbers
    assert (got.q, got.do, got.rows_read) == (q * 128, q * 80, q * 8 * asking)
    assert (got.k, got.v) == (k * 128, k * 80)
    assert got.scores == tiles * plan.block_q * plan.block_k
    assert got.added == (tiles * plan.block_q * 64 * 4 if name == "fused" else 0)
    assert got.dq == (batch * heads_q * seq_q * 128 if name == "dq" else 0)
    keys = 0 if name == "dq" else batch * heads_kv * seq_k
    assert (got.dk, got.dv) == (keys * 128, keys * 80)


@pytest.mark.parametrize("deterministic", [slow(False), True])
def test_the_emulator_counts_exactly_the_predicted_bytes(deterministic):
    def mask_mod(b, h, q, k):
        return k <= q

    spec = fg.AttentionSpec(mask_mod=mask_mod, head_dim=32, head_dim_v=16)
    sizes = (2, 2, 1, 150, 260)
    q, k, v = (
        torch.randn(2, h, n, d).half() for h, n, d in ((2, 150, 32), (1, 260, 32), (1, 260, 16))
    )
    forward = run_forward(spec, q, k, v)
    run = run_backward(
        spec,
        *(q, k, v, forward.out, forward.lse, torch.randn(2, 2, 150, 16).half()),
        backend="emulator",
        deterministic=deterministic,
        check_memory=False,
    )
    names = ("delta", "dkdv", "dq") if deterministic else ("delta", "fused", "convert_dq")
    assert tuple(report.kernel.plan.kernel for report in run.reports) == names
    for report in run.reports:
        plan = report.kernel.plan
        walk = None if plan.streams else causal(plan, 150, 260)
        got = backward_traffic(plan, *sizes, walk)
        # An addition to memory reads and writes it.
        assert report.counters.global_read_bytes == got.read + got.added
        assert report.counters.global_write_bytes == got.written + got.added


def test_queries_that_reach_no_key_read_only_lse_and_delta():
    dq = kernels()["dq"]
    rows = 2 * dq.block_q
    both, half = (
        backward_traffic(dq, 1, 1, 1, rows, rows, walk) for walk in ([[0], [0]], [[], [0]])
    )
    assert (half.q, half.do) == (both.q // 2, both.do // 2)
    assert half.rows_read == both.rows_read == rows * 8 * 4 * dq.column_warps


def test_delta_reads_o_and_its_gradient_once():
    delta = kernels()["delta"]
    without, with_it = (backward_traffic(delta, 2, 4, 2, 100, 60, dlse=d) for d in (False, True))
    rows = 2 * 4 * 100
    assert without.read == rows * (2 * 40 * 2 + 4)
    assert with_it.read - without.read == rows * 4
    assert without.written == rows * 8
    assert with_it.read + with_it.written == rows * delta.quantities["row_bytes"]


def test_traffic_of_heads_adds_up():
    for plan in (plan_of(64), *kernels().values()):
        count = forward_traffic if plan.kernel == "forward" else backward_traffic
        one = count(plan, 1, 1, 1, 300, 300)
        assert one + one == count(plan, 1, 2, 2, 300, 300)


def test_a_group_of_heads_reads_keys_once_and_writes_their_gradients_once():
    for name in ("dkdv", "fused"):
        grouped = backward_traffic(kernels()[name], 1, 8, 2, 300, 300)
        single = backward_traffic(kernels()[name], 1, 8, 8, 300, 300)
        assert (4 * grouped.k, 4 * grouped.dk) == (single.k, single.dk)
        assert grouped.q == single.q


def test_visits_of_unequal_heads_of_a_group_are_given_one_head_after_the_other():
    for name in ("dkdv", "fused"):
        plan = kernels()[name]
        keys, queries = 2 * plan.block_k, 3 * plan.block_q
        one, other = [[0], []], [[], [1, 2]]
        both = backward_traffic(plan, 1, 2, 1, queries, keys, [*one, *other])
        alike = [backward_traffic(plan, 1, 2, 1, queries, keys, walk) for walk in (one, other)]
        assert 2 * both.q == alike[0].q + alike[1].q
        assert 2 * both.added == alike[0].added + alike[1].added
        assert 2 * both.scores == alike[0].scores + alike[1].scores
        # Each tile of keys is read for one of the heads, and written once.
        assert both.k == alike[0].k + alike[1].k == keys * plan.head_dim * plan.itemsize
        assert both.dk == alike[0].dk


def test_traffic_of_another_pass_or_of_another_number_of_tiles_is_refused():
    with pytest.raises(ValueError, match="dq is a backward kernel"):
        forward_traffic(kernels()["dq"], 1, 1, 1, 10, 10)
    with pytest.raises(ValueError, match="1 query tiles"):
        forward_traffic(plan_of(64), 1, 1, 1, 1000, 1000, [[0]])
    with pytest.raises(ValueError, match="1 key tiles"):
        backward_traffic(kernels()["dkdv"], 1, 1, 1, 10, 1000, [[0]])
