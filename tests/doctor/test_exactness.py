"""Which instructions leave the bits of a result open."""

from __future__ import annotations

import pytest

from flashgen.kernels.pipeline import build, build_minmax_tables
from flashgen.tools.doctor.exactness import open_instructions
from flashgen.tools.doctor.problems import named


@pytest.mark.parametrize(
    "statement",
    [
        "ex2.approx.ftz.f32 %f1, %f2;",
        "@%p1 lg2.approx.f32 %f1, %f2;",
        "div.full.f32 %f1, %f2, %f3;",
        "tanh.approx.f32 %f1, %f2;",
        "add.f32 %f1, %f2, %f3;",
        "sub.ftz.f32 %f1, %f2, %f3;",
        "mul.f64 %d1, %d2, %d3;",
        "{ mul.bf16x2 %r1, %r2, %r3; }",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};",
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f1}, {%r1}, {%r2}, {%f1};",
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 0;",
        "red.global.add.f32 [%rd1], %f1;",
        "@!%p2 atom.global.add.noftz.f16x2 %r1, [%rd1], %r2;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], 64;",
    ],
)
def test_an_instruction_that_leaves_bits_open_is_found(statement: str) -> None:
    found = open_instructions(f"\t{statement}\n")
    assert sum(found.values()) == 1
    assert next(iter(found)) in statement


@pytest.mark.parametrize(
    "statement",
    [
        "add.rn.f32 %f1, %f2, %f3;",
        "mul.rz.ftz.f32 %f1, %f2, %f3;",
        "fma.rn.f32 %f1, %f2, %f3, %f4;",
        "div.rn.f32 %f1, %f2, %f3;",
        "cvt.rn.f16x2.f32 %r1, %f1, %f2;",
        "max.f32 %f1, %f2, %f3;",
        "neg.f32 %f1, %f2;",
        "add.s32 %r1, %r2, %r3;",
        "mul.wide.s32 %rd1, %r2, 4;",
        "atom.global.add.u32 %r1, [%rd1], 1;",
        "red.global.max.f32 [%rd1], %f1;",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1}, {%r2}, {%r3}, {%r1};",
        "wgmma.fence.sync.aligned;",
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%rd1], [%r1];",
        "ld.global.f32 %f1, [%rd1];",
        "// add.f32 in a comment",
        ".reg .f32 %f<3>;",
    ],
)
def test_an_instruction_whose_bits_are_determined_is_not(statement: str) -> None:
    assert not open_instructions(f"\t{statement}\n")


def test_a_min_max_table_has_determined_bits_and_a_softmax_has_not() -> None:
    spec = named("documents, float16, d 64").spec()
    (table,) = build_minmax_tables(spec)
    assert not open_instructions(table.ptx)
    found = open_instructions(build(spec).ptx)
    assert any(name.startswith("ex2.approx") for name in found)
    assert any(name.startswith("mma.") for name in found)
    found = open_instructions(build(spec).ptx, "sm_86")
    assert any(name.startswith("ex2.approx") for name in found)
    assert not any(name.startswith("mma.") for name in found)


MMA = "mma.sync.aligned.m16n8k16.row.col.{}.{}.{}.{}"
WGMMA = "wgmma.mma_async.sync.aligned.m64n64k{}.f32.{}.{}"
WMMA = "wmma.mma.sync.aligned.row.col.m16n16k16"
SMALL = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32"


@pytest.mark.parametrize(
    ("instruction", "target", "gpu", "same"),
    [
        (MMA.format("f32", "f16", "f16", "f32"), "sm_80", "sm_80", True),
        (MMA.format("f32", "bf16", "bf16", "f32"), "sm_80", "sm_89", True),
        (MMA.format("f16", "f16", "f16", "f16"), "sm_80", "sm_86", True),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "sm_80", "sm_80", True),
        (MMA.format("f32", "f16", "f16", "f32"), "sm_90", "sm_100", True),
        (WGMMA.format(16, "bf16", "bf16"), "sm_90a", "sm_90", True),
        (WGMMA.format(8, "tf32", "tf32"), "sm_90a", "sm_90", True),
        (f"{WMMA}.f32.f32", "sm_90", "sm_90", True),
        (f"{WMMA}.f32.bf16.bf16.f32", "sm_90", "sm_90", True),
        (SMALL, "sm_89", "sm_89", True),
        (SMALL, "sm_90", "sm_90", True),
        # Blocks of 8 products on sm_80, of 16 on sm_90.
        (MMA.format("f32", "f16", "f16", "f32"), "sm_80", "sm_90", False),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "sm_80", "sm_100", False),
        # No model is known.
        (SMALL, "sm_100", "sm_100", False),
        (MMA.format("f32", "f16", "f16", "f32"), "sm_75", "sm_75", False),
        ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", "sm_80", "sm_80", False),
        (MMA.format("f16", "f16", "f16", "f32"), "sm_80", "sm_80", False),
        ("mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32", "sm_80", "sm_80", False),
        (f"{WMMA}.f32.f32.satfinite", "sm_80", "sm_80", False),
    ],
)
def test_sums_of_tensor_cores_are_determined_where_the_emulator_adds_as_the_gpu(
    instruction: str, target: str, gpu: str, same: bool
) -> None:
    operands = "{%f1}, {%r1}, {%r2}, {%f1};"
    ptx = f"//\n.version 8.6\n.target {target}\n\t{instruction} {operands}\n"
    assert sum(open_instructions(ptx).values()) == 1
    assert sum(open_instructions(ptx, gpu).values()) == (0 if same else 1)
