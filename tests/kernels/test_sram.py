"""The same spec planned for other sizes of shared memory gives other kernels, which all pass."""

from __future__ import annotations

import itertools

import pytest

import flashgen as fg
from flashgen.kernels.planner import Plan
from flashgen.shared.arch import facts
from tests.support.judged import plain

KIB = 1024
SIZES = (48, 99, 163, 227)  # KiB: without opt-in; sm_86 and sm_89; sm_80; sm_90
ARCH_OF = {48: "sm_80", 99: "sm_80", 163: "sm_80", 227: "sm_90"}
CONSUMER = ("sm_86", "sm_89")  # 99 KiB


def causal(head_dim: int, dtype: str) -> fg.AttentionSpec:
    return fg.AttentionSpec(
        mask_mod=lambda b, h, q, k: k <= q, head_dim=head_dim, dtype=dtype, name="causal"
    )


def shape_of(plan: Plan) -> tuple[int, ...]:
    tile = plan.block_q, plan.block_k, plan.warps, plan.column_warps, plan.score_warps
    return *tile, plan.blocks_per_sm  # which the launch bounds of the kernel state


@pytest.mark.slow
def test_four_sizes_of_sram_give_four_forward_kernels_that_pass():
    spec, found = causal(128, "float32"), {}
    for size in SIZES:
        call = plain(spec, 90, 110, arch=ARCH_OF[size], sram=size * KIB)
        run = call.judged_forward()
        assert run.plan.smem_bytes <= size * KIB
        found[shape_of(run.plan)] = run.source.text
    assert len(found) == len(set(found.values())) == len(SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_four_sizes_of_sram_give_four_backward_passes_that_pass(deterministic):
    spec, found = causal(128, "float32"), set()
    for size in SIZES:
        call = plain(spec, 60, 50, arch=ARCH_OF[size], sram=size * KIB)
        run = call.judged_backward(deterministic=deterministic)
        plans = [report.kernel.plan for report in run.reports]
        assert all(plan.smem_bytes <= size * KIB for plan in plans)
        found.add(tuple((plan.kernel, *shape_of(plan)) for plan in plans))
    assert len(found) == len(SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 192, 256])
@pytest.mark.parametrize("size", [48, 99])
def test_a_small_sram_also_works_for_other_head_dims(head_dim, size):
    spec = causal(head_dim, "bfloat16")
    plain(spec, 130, 150, sram=size * KIB).judged_forward()
    plain(spec, 90, 70, sram=size * KIB).judged_backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "head_dim", "deterministic"),
    list(itertools.product(CONSUMER, [192, 256], [False, True])),
)
def test_large_head_dims_fit_in_99_kib_forward_and_backward(head_dim, arch, deterministic):
    assert facts(arch).smem_per_block == 99 * KIB
    call = plain(causal(head_dim, "float16"), 70, 90, arch=arch)
    assert call.judged_forward().arch == arch
    run = call.judged_backward(deterministic=deterministic)
    assert all(report.kernel.plan.smem_bytes <= 99 * KIB for report in run.reports)
    assert not any(report.kernel.binary.resources.spill_store_bytes for report in run.reports)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", CONSUMER)
@pytest.mark.parametrize("head_dim", [192, 256])
def test_large_head_dims_fit_in_99_kib_in_every_dtype(head_dim, arch, dtype):
    call = plain(causal(head_dim, dtype), 70, 90, arch=arch)
    call.judged_forward()
    call.judged_backward()
