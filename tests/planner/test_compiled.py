"""The register models against the compiler: no chosen tile spills, none reserves far too much."""

from __future__ import annotations

import itertools

import pytest

import flashgen as fg
from flashgen.kernels.compile import compile
from flashgen.kernels.pipeline import Build, build_backward
from flashgen.kernels.planner import plan_backward
from tests.support.examples import spec_path
from tests.support.plan_problems import DTYPES
from tests.support.tiers import one_in

HEAD_DIMS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
BACKWARD_DIMS = (8, 32, 40, 64, 96, 128, 192, 256)
ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
NAMES = ("causal", "full", "softcap", "dilated_window", "alibi")


def within_its_plan(built: Build) -> None:
    used, plan = built.binary.resources, built.plan
    assert used.clean, f"{used}\n{plan}"
    assert used.registers <= plan.registers
    assert used.max_threads == plan.threads


def forward(name: str, dtype: str, head_dim: int, arch: str, **options: object) -> None:
    """Compiles the planned forward kernel of a spec and compares it with the plan."""
    spec = fg.load(spec_path(name)).replace(dtype=dtype, head_dim=head_dim)
    within_its_plan(fg.build(spec, arch, **options))


def backward(
    name: str, dtype: str, head_dim: int, arch: str, *, again: bool = False, **changes: object
) -> None:
    """The same for the backward kernels of both schemes.

    Args:
        again: it may have chosen a second plan, with spare registers.
    """
    spec = fg.load(spec_path(name)).replace(dtype=dtype, head_dim=head_dim, **changes)
    for deterministic in (False, True):
        chosen = plan_backward(spec, arch, deterministic=deterministic)
        for built in build_backward(spec, arch, deterministic=deterministic):
            within_its_plan(built)
            if not again:
                plan = built.plan
                assert plan == chosen.kernel(plan.kernel), "planned with registers to spare"


@pytest.mark.parametrize("head_dim_v", one_in(4, [216, 200, 208, 224]))
def test_values_wider_than_keys_compile_under_a_layout(head_dim_v):
    layout = fg.BlockSparse(block_q=64, block_k=64)
    spec = fg.AttentionSpec(head_dim=24, head_dim_v=head_dim_v, block_sparse=layout)
    within_its_plan(fg.build(spec, "sm_90a"))


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    one_in(12, itertools.product([64, 8, 40, 96, 128, 256], ["float16", "float32"])),
)
def test_the_planned_tile_does_not_spill(head_dim, dtype):
    forward("causal", dtype, head_dim, "sm_80")
    forward("softcap", dtype, head_dim, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_unequal_head_dims_and_element_access_do_not_spill(dtype):
    forward("causal", dtype, 128, "sm_80", access_bytes=2 if dtype == "float16" else 4)
    spec = fg.load(spec_path("causal")).replace(dtype=dtype, head_dim=192, head_dim_v=128)
    assert fg.build(spec, "sm_86").binary.resources.clean


@pytest.mark.slow
def test_the_paper_s_tile_does_not_spill():
    forward("causal", "float16", 64, "sm_80", policy="paper")
    forward("causal", "float32", 128, "sm_80", policy="paper")


def test_the_model_is_not_far_above_what_the_compiler_needs():
    """A tile whose accumulators alone pass the limit does spill, so the limit is real."""
    plan = fg.plan(fg.load(spec_path("causal")).replace(head_dim=128))
    accumulators = plan.row_groups * (plan.block_k + plan.head_dim_v) // 2
    assert accumulators >= 0.65 * plan.registers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "arch", "changes"),
    [
        ("causal", "float16", 64, "sm_80", {}),
        ("causal", "float16", 64, "sm_80", {"dropout": True}),
        *(("causal", "float16", head_dim, "sm_80", {}) for head_dim in (8, 128, 256)),
        *(("softcap", "bfloat16", head_dim, "sm_90", {}) for head_dim in (32, 96, 192)),
        *(("dilated_window", "float16", head_dim, "sm_86", {}) for head_dim in (32, 96, 192)),
        ("softcap", "float16", 256, "sm_86", {"dropout": True}),
        ("causal", "float32", 64, "sm_80", {}),
        ("causal", "float32", 256, "sm_86", {}),
        ("causal", "float16", 192, "sm_80", {"head_dim_v": 128}),
        ("full", "float16", 40, "sm_80", {"head_dim_v": 64}),
    ],
)
def test_planned_backward_tiles_do_not_spill(name, dtype, head_dim, arch, changes):
    backward(name, dtype, head_dim, arch, **changes)


def test_a_kernel_bound_by_registers_uses_nearly_all_of_them():
    """So that the model is not far more careful than the compiler needs."""
    spec = fg.load(spec_path("causal")).replace(head_dim=64)
    (dkdv,) = [b for b in build_backward(spec, deterministic=True) if b.plan.kernel == "dkdv"]
    assert dkdv.plan.registers_needed >= 0.85 * dkdv.plan.registers
    assert dkdv.binary.resources.registers >= 0.9 * dkdv.plan.registers


def test_kernels_that_stream_need_no_more_registers_than_their_plans_say():
    for dtype in ("float16", "float32"):
        for head_dim in (8, 256):
            spec = fg.load(spec_path("causal")).replace(dtype=dtype, head_dim=head_dim)
            for arch in ("sm_80", "sm_90a"):
                sources = [source for source in fg.emit(spec, arch).backward if source.plan.streams]
                assert sources[0].role == "delta"
                for source in sources:
                    made = compile(
                        source.text, filename=source.filename, kernel=source.name, arch=arch
                    )
                    assert made.resources.clean
                    assert made.resources.registers <= source.plan.registers_needed


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_no_planned_tile_spills(name, dtype, arch):
    for head_dim in HEAD_DIMS:
        forward(name, dtype, head_dim, arch)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [False, True], ids=["kept", "dropped"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", BACKWARD_DIMS)
def test_no_planned_backward_tile_spills(head_dim, dtype, dropout):
    """Architectures alternate."""
    turn = BACKWARD_DIMS.index(head_dim) + DTYPES.index(dtype) + 2 * dropout
    for number, name in enumerate(NAMES[:4]):
        arch = ARCHS[(turn + number) % len(ARCHS)]
        backward(name, dtype, head_dim, arch, again=True, dropout=dropout)
