"""The register model against the compiler: no chosen tile spills, none reserves far too much."""

from __future__ import annotations

import itertools

import pytest

import flashgen as fg
from tests.support.paths import ROOT
from tests.support.tiers import one_in

SPECS = ROOT / "specs"
HEAD_DIMS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)

NAMES = ("causal", "full", "softcap", "dilated_window", "alibi")


def check(name: str, dtype: str, head_dim: int, arch: str, **options: object) -> None:
    """Compiles the planned kernel of a spec and compares it with the plan."""
    spec = fg.load(SPECS / f"{name}.py").replace(dtype=dtype, head_dim=head_dim)
    built = fg.build(spec, arch, **options)
    used, plan = built.binary.resources, built.plan
    assert used.clean, f"{used}\n{plan}"
    assert used.registers <= plan.registers
    assert used.max_threads == plan.threads


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    one_in(12, itertools.product([64, 8, 40, 96, 128, 256], ["float16", "float32"])),
)
def test_the_planned_tile_does_not_spill(head_dim, dtype):
    check("causal", dtype, head_dim, "sm_80")
    check("softcap", dtype, head_dim, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_unequal_head_dims_and_element_access_do_not_spill(dtype):
    check("causal", dtype, 128, "sm_80", access_bytes=2 if dtype == "float16" else 4)
    spec = fg.load(SPECS / "causal.py").replace(dtype=dtype, head_dim=192, head_dim_v=128)
    assert fg.build(spec, "sm_86").binary.resources.clean


@pytest.mark.slow
def test_the_paper_s_tile_does_not_spill():
    check("causal", "float16", 64, "sm_80", policy="paper")
    check("causal", "float32", 128, "sm_80", policy="paper")


def test_the_model_is_not_far_above_what_the_compiler_needs():
    """A tile whose accumulators alone pass the limit does spill, so the limit is real."""
    spec = fg.load(SPECS / "causal.py").replace(head_dim=128)
    plan = fg.plan(spec)
    accumulators = plan.row_groups * (plan.block_k + plan.head_dim_v) // 2
    assert accumulators >= 0.65 * plan.registers


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_no_planned_tile_spills(name, dtype, arch):
    for head_dim in HEAD_DIMS:
        check(name, dtype, head_dim, arch)
