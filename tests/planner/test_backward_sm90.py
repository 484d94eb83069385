"""Plans of Hopper's backward kernels: regions of shared memory, registers, ways to own keys."""

from __future__ import annotations

import pytest

import flashgen as fg
from flashgen.kernels.planner import feasible, plan_backward
from flashgen.kernels.planner.models.panels_sm90 import panels_of_kernel
from tests.support.plan_problems import backward_of, every_hopper_kernel

KIB = 1024
TILES = ("q", "k", "v", "do", "p", "ds")


def test_tiles_begin_where_a_pattern_of_tma_does_and_end_within_a_block_s_memory():
    for each in every_hopper_kernel():
        assert each.smem_bytes <= 227 * KIB
        for name in TILES:
            assert each.smem[name] % KIB == 0, (each.kernel, name)
        for width, panels in panels_of_kernel(
            each.kernel, each.head_dim, each.head_dim_v, each.column_warps
        ):
            assert width in ((16, 32, 64) if each.column_warps == 1 else (64,))
            assert panels * width >= min(each.head_dim, each.head_dim_v)
        assert each.threads == 384
        assert 8 * each.registers + 4 * each.producer_registers <= 2048 // each.blocks_per_sm


def test_the_copying_warps_give_up_what_the_others_take():
    plain = backward_of(128, "float16", "sm_90a").kernel("fused")
    assert (plain.producer_registers, plain.registers) == (24, 240)
    assert (plain.block_q, plain.block_k, plain.stages) == (64, 128, 2)


def test_scores_are_computed_ahead_where_they_have_registers_beside_dq():
    spec = fg.AttentionSpec(head_dim=128)
    tiles = {
        each.block_q: each
        for each in feasible(spec, "sm_90a", kernel="fused")
        if not each.in_passes
    }
    assert {rows: each.scores_ahead for rows, each in tiles.items() if rows >= 48} == {
        48: True, 64: True, 80: False
    }  # fmt: skip
    for head_dim, rows in ((64, 128), (96, 80), (128, 64)):
        chosen = backward_of(head_dim, "float16", "sm_90a").kernel("fused")
        assert (chosen.block_q, chosen.scores_ahead) == (rows, True)
    assert not backward_of(64, "float16", "sm_80").kernel("fused").scores_ahead


def test_where_the_compiler_spills_the_next_plan_has_the_tile_of_kernels_without_scores_ahead():
    spec = fg.AttentionSpec(head_dim=128)
    first = plan_backward(spec, "sm_90a").kernel("fused")
    spare = first.spare_after_spill(0)
    second = plan_backward(spec, "sm_90a", spare_registers={"fused": spare}).kernel("fused")
    assert (second.block_q, second.scores_ahead) == (80, False)
    assert second.producer_registers == first.producer_registers
    third = second.spare_after_spill(spare)
    smaller = plan_backward(spec, "sm_90a", spare_registers={"fused": third}).kernel("fused")
    assert (smaller.block_q, smaller.scores_ahead) == (64, False)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_launches_overlap_inside_a_call_of_hopper_and_each_that_does_waits(
    arch: str, packed: bool, deterministic: bool
):
    bias = fg.Tensor("bias", ("heads",), "float32", grad=True)
    spec = fg.AttentionSpec(
        head_dim=64,
        dtype="float16",
        score_mod=lambda score, b, h, q, k: score + bias[h],
        packed=packed,
        name="learned",
    )
    sources = fg.emit(spec, arch, deterministic=deterministic).backward
    overlaps = [source.plan.overlaps for source in sources]
    starts = [source.plan.starts_next for source in sources]
    on_hopper = arch == "sm_90a"
    assert overlaps == [False, on_hopper, on_hopper, False]  # the last one is for the bias
    assert starts == [on_hopper, on_hopper, False, False]
    for source in sources:
        assert source.text.count("griddepcontrol.wait") == source.plan.overlaps
        assert source.text.count("griddepcontrol.launch_dependents") == source.plan.starts_next
        if packed and source.plan.overlaps:  # in blocks without work, too
            leaves = source.text.index("return;", source.text.index('extern "C" __global__'))
            assert source.text.index("griddepcontrol.wait") < leaves
    assert "griddepcontrol" not in fg.emit(spec, arch).forward.text


def test_kernels_for_learned_tensors_are_planned_on_hoppers_path():
    for each in every_hopper_kernel():
        assert each.path == "sm_90a"
    found = {each.kernel for each in every_hopper_kernel()}
    assert found == {"fused", "dkdv", "dq", "captured", "captured_exact"}


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_both_ways_to_own_keys_are_among_the_feasible_tiles_where_registers_allow(head_dim):
    tiles = feasible(fg.AttentionSpec(head_dim=head_dim), "sm_90a", kernel="fused")
    found = {plan.column_warps for plan in tiles}
    assert found == ({1, 8} if head_dim <= 128 else {8})
