"""The register model of the backward kernels against the compiler: no chosen tile spills."""

from __future__ import annotations

import pytest

import flashgen as fg
from flashgen.compile import compile
from flashgen.pipeline import build_backward
from flashgen.planner import plan_backward
from tests.support.paths import ROOT
from tests.support.tiers import one_in, slow

SPECS = ROOT / "specs"
HEAD_DIMS = (8, 32, 40, 64, 96, 128, 192, 256)
DTYPES = ("float16", "bfloat16", "float32")
ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
NAMES = ("causal", "full", "softcap", "dilated_window")


def check(
    name: str, dtype: str, head_dim: int, arch: str, *, again: bool = False, **changes: object
) -> None:
    """Compiles the planned kernels of both schemes and compares them with their plans.

    Args:
        again: it may have chosen a second plan, with spare registers.
    """
    spec = fg.load(SPECS / f"{name}.py").replace(dtype=dtype, head_dim=head_dim, **changes)
    for deterministic in (False, True):
        chosen = plan_backward(spec, arch, deterministic=deterministic)
        for built in build_backward(spec, arch, deterministic=deterministic):
            used, plan = built.binary.resources, built.plan
            assert used.clean, f"{used}\n{plan}"
            if not again:
                assert plan == chosen.kernel(plan.kernel), "planned with registers to spare"
            assert used.registers <= plan.registers
            assert used.max_threads == plan.threads


@pytest.mark.parametrize("head_dim", one_in(4, [64, 8, 128, 256]))
def test_planned_tiles_of_16_bits_do_not_spill(head_dim):
    check("causal", "float16", head_dim, "sm_80")


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", one_in(3, [32, 96, 192], first=1))
def test_planned_tiles_with_a_score_or_a_mask_of_its_own_do_not_spill(head_dim):
    check("softcap", "bfloat16", head_dim, "sm_90")
    check("dilated_window", "float16", head_dim, "sm_86")


@pytest.mark.parametrize(
    ("name", "head_dim", "arch"), [("causal", 64, "sm_80"), slow("softcap", 256, "sm_86")]
)
def test_planned_tiles_with_dropout_do_not_spill(name, head_dim, arch):
    check(name, "float16", head_dim, arch, dropout=True)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "arch"), [(64, "sm_80"), (256, "sm_86")])
def test_planned_tiles_of_float32_do_not_spill(head_dim, arch):
    check("causal", "float32", head_dim, arch)


@pytest.mark.slow
def test_planned_tiles_of_unequal_head_dims_do_not_spill():
    check("causal", "float16", 192, "sm_80", head_dim_v=128)
    check("full", "float16", 40, "sm_80", head_dim_v=64)


def test_a_kernel_bound_by_registers_uses_nearly_all_of_them():
    """So that the model is not far more careful than the compiler needs."""
    spec = fg.load(SPECS / "causal.py").replace(head_dim=64)
    (dkdv,) = [b for b in build_backward(spec, deterministic=True) if b.plan.kernel == "dkdv"]
    assert dkdv.plan.registers_needed >= 0.85 * dkdv.plan.registers
    assert dkdv.binary.resources.registers >= 0.9 * dkdv.plan.registers


def test_the_delta_kernel_needs_no_more_registers_than_its_plan_says():
    for dtype in ("float16", "float32"):
        for head_dim in (8, 256):
            spec = fg.load(SPECS / "causal.py").replace(dtype=dtype, head_dim=head_dim)
            delta = fg.emit(spec).backward[0]
            assert delta.plan.kernel == "delta"
            made = compile(delta.text, filename=delta.filename, kernel=delta.name, arch="sm_80")
            assert made.resources.clean
            assert made.resources.registers <= delta.plan.registers_needed


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [False, True], ids=["kept", "dropped"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_planned_tile_spills(head_dim, dtype, dropout):
    """Architectures alternate."""
    turn = HEAD_DIMS.index(head_dim) + DTYPES.index(dtype) + 2 * dropout
    for number, name in enumerate(NAMES):
        arch = ARCHS[(turn + number) % len(ARCHS)]
        check(name, dtype, head_dim, arch, again=True, dropout=dropout)
