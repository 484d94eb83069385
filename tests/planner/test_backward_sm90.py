"""Plans of Hopper's backward kernels: arithmetic, bounds, refusals, regions of shared memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

import flashgen as fg
from flashgen.planner import Plan, feasible, plan_backward
from flashgen.planner.formulas import evaluate
from flashgen.planner.models.panels_sm90 import panels_of_kernel
from flashgen.planner.search import excesses, larger
from tests.support.plan_problems import UNEQUAL, backward_of, learned, problem_behind

KIB = 1024
DIMS = [*((d, d) for d in range(8, 257, 24)), *UNEQUAL]
TILES = ("smem_q", "smem_k", "smem_v", "smem_do", "smem_p", "smem_ds")


@functools.cache
def every_kernel() -> tuple[Plan, ...]:
    return tuple(kernels())


def kernels() -> Iterator[Plan]:
    for head_dim, head_dim_v in DIMS:
        for deterministic in (False, True):
            yield from backward_of(
                *(head_dim, "float16", "sm_90a"),
                head_dim_v=head_dim_v,
                deterministic=deterministic,
            ).kernels[1:]
            spec = learned(head_dim, head_dim_v)
            yield plan_backward(spec, "sm_90a", deterministic=deterministic).kernels[-1]


def test_every_printed_line_is_its_own_arithmetic():
    for each in every_kernel():
        for line in each.derivation:
            assert evaluate(line.substituted) == pytest.approx(line.value, rel=2e-3), line
            if line.limit is not None:
                assert line.value <= line.limit
            if line.relation == "<=":
                assert line.name == ("block_q" if each.owns_keys else "block_k")
                assert getattr(each, line.name) <= line.value


def test_every_refusal_of_a_larger_tile_is_true():
    for each in every_kernel():
        problem, tile = problem_behind(each)
        for refusal, (_, bigger) in zip(each.refused, larger(problem, tile), strict=True):
            if refusal.quantity == "cost":
                assert refusal.needs >= each.cost == refusal.limit
            else:
                broken = next(excesses(problem, bigger))
                assert (refusal.quantity, refusal.needs) == (broken.quantity, broken.needs)
                assert refusal.needs > refusal.limit


def test_tiles_begin_where_a_pattern_of_tma_does_and_end_within_a_block_s_memory():
    for each in every_kernel():
        assert each.smem_bytes <= 227 * KIB
        for name in TILES:
            assert getattr(each, name) % KIB == 0, (each.kernel, name)
        for width, panels in panels_of_kernel(
            each.kernel, each.head_dim, each.head_dim_v, each.column_warps
        ):
            assert width in (16, 32, 64)
            assert panels % each.column_warps == 0
        assert each.threads == 384
        assert 8 * each.registers + 4 * each.producer_registers <= 2048 // each.blocks_per_sm


def test_the_copying_warps_give_up_what_the_others_take():
    plain = backward_of(128, "float16", "sm_90a").kernel("fused")
    assert (plain.producer_registers, plain.registers) == (24, 240)
    assert (plain.block_q, plain.block_k, plain.stages) == (80, 128, 2)


def test_kernels_for_learned_tensors_are_planned_on_hoppers_path():
    for each in every_kernel():
        assert each.path == "sm_90a"
    found = {each.kernel for each in every_kernel()}
    assert found == {"fused", "dkdv", "dq", "captured", "captured_exact"}


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_both_ways_to_own_keys_are_among_the_feasible_tiles_where_registers_allow(head_dim):
    tiles = feasible(fg.AttentionSpec(head_dim=head_dim), "sm_90a", kernel="fused")
    found = {plan.column_warps for plan in tiles}
    assert found == ({1, 2} if head_dim <= 128 else {2})


def test_lines_fit_the_banner_of_an_emitted_file():
    for each in every_kernel():
        for line in each.explain().splitlines():
            assert len(f"// {line}") <= 100
