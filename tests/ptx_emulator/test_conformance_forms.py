"""Instructions that PTX does not have: they are refused by name, and nothing is guessed for them.

NVIDIA's assembler refuses all of them as well.
"""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import launch
from ptx_emulator.errors import UnknownInstruction
from ptx_emulator.isa import forms
from ptx_emulator.ptx.instructions import OPCODES

BEFORE = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) {
  .reg .b16 %h<5>; .reg .b32 %r<5>; .reg .f32 %f<5>; .reg .b64 %rd<5>; .reg .f64 %fd<5>;
  .reg .pred %p<5>; .shared .align 16 .b8 tile[64];
  ld.param.u64 %rd0, [p]; mov.b16 %h1, 1; mov.b16 %h2, 1; mov.b16 %h3, 1; mov.u32 %r1, 3;
  mov.u32 %r2, 5; mov.u32 %r3, 7; mov.u64 %rd1, 3; mov.u64 %rd2, 5; mov.f32 %f1, 0f3F800000;
  mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f64 %fd1, 0d3FF0000000000000; mov.f64 %fd2, %fd1;
  setp.eq.u32 %p1, %r1, 3;
"""
ILLEGAL = """
mul.s32 %r4, %r1, %r2; mul.lo.b32 %r4, %r1, %r2; mul24.s32 %r4, %r1, %r2; mul.lo.f32 %f4, %f1, %f2
mad.s32 %r4, %r1, %r2, %r3; madc.s32 %r4, %r1, %r2, %r3; mad.f32 %f4, %f1, %f2, %f3
mad.rn.f16 %h4, %h1, %h2, %h3; fma.f32 %f4, %f1, %f2, %f3; fma.f16 %h4, %h1, %h2, %h3
fma.lo.s32 %r4, %r1, %r2, %r3; fma.rn.sat.relu.f16 %h4, %h1, %h2, %h3; div.f32 %f4, %f1, %f2
fma.rn.sat.bf16 %h4, %h1, %h2, %h3; div.approx.f64 %fd4, %fd1, %fd2; div.rn.f16 %h4, %h1, %h2
add.sat.u32 %r4, %r1, %r2; add.b32 %r4, %r1, %r2; add.ftz.f64 %fd4, %fd1, %fd2
add.relu.f16 %h4, %h1, %h2; min.sat.f32 %f4, %f1, %f2; min.NaN.f64 %fd4, %fd1, %fd2
max.rn.f32 %f4, %f1, %f2; min.b32 %r4, %r1, %r2; max.s8 %r4, %r1, %r2; rem.f32 %f4, %f1, %f2
neg.u32 %r4, %r1; abs.u32 %r4, %r1; neg.ftz.bf16 %h4, %h1; neg.sat.f16 %h4, %h1
rcp.approx.f64 %fd4, %fd1; rcp.approx.rn.f32 %f4, %f1; sqrt.approx.f64 %fd4, %fd1
rsqrt.rn.f32 %f4, %f1; sin.rn.f32 %f4, %f1; ex2.rn.f32 %f4, %f1; lg2.rn.f32 %f4, %f1
tanh.approx.ftz.f32 %f4, %f1; ex2.f16 %h4, %h1; ex2.approx.bf16 %h4, %h1; tanh.f16 %h4, %h1
copysign.s32 %r4, %r1, %r2; and.u32 %r4, %r1, %r2; and.f32 %f4, %f1, %f2; not.u32 %r4, %r1
shl.s32 %r4, %r1, %r2; shf.l.b32 %r4, %r1, %r2, %r3; shf.wrap.b32 %r4, %r1, %r2, %r3
szext.u32 %r4, %r1, %r2; bmsk.b32 %r4, %r1, %r2; popc.u32 %r4, %r1; brev.b16 %h4, %h1
bfind.b32 %r4, %r1; bfe.b32 %r4, %r1, %r2, %r3; prmt.u32 %r4, %r1, %r2, %r3
lop3.u32 %r4, %r1, %r2, %r3, 0x80; fns.u32 %r4, %r1, %r2, %r3; dp4a.b32.b32 %r4, %r1, %r2, %r3
setp.lo.s32 %p2, %r1, %r2; setp.lo.f32 %p2, %f1, %f2; setp.lt.b32 %p2, %r1, %r2
setp.lt.ftz.s32 %p2, %r1, %r2; slct.b32.u32 %r4, %r1, %r2, %r3; testp.finite.s32 %p2, %r1
add.u32 %r4, %r1, %r2, %r3; mul.lo.u32 %r4, %r1, %r2, %r3; lop3.b32 %r4, %r1, %r2, 0x80
bar.red.u32 %r4, 0, %p1; bar.red.popc.pred %p2, 0, %p1; bar.red.and.u32 %r4, 0, %p1
bar.arrive 1; bar.warp %r1; barrier.cluster.arrive.acquire; redux.add.u32 %r4, %r1, -1
match.sync.b32 %r4, %r1, -1; vote.sync.ballot %r4, %p1, -1; shfl.sync.idx %r4, %r1, 0, 31, -1
shfl.sync.idx.b64 %rd4, %rd1, 0, 31, -1; activemask %r4; fence; fence.acq_rel; fence.sc; membar
ld.acquire.global.u32 %r4, [%rd0]; ld.relaxed.global.u32 %r4, [%rd0]
st.release.global.u32 [%rd0], %r1; st.acquire.gpu.global.u32 [%rd0], %r1
ld.release.gpu.global.u32 %r4, [%rd0]; ld.volatile.global.nc.u32 %r4, [%rd0]
st.global.nc.u32 [%rd0], %r1; atom.global.add.b32 %r4, [%rd0], %r1
atom.global.add.s64 %rd4, [%rd0], %rd1; atom.global.min.f32 %f4, [%rd0], %f1
atom.global.inc.s32 %r4, [%rd0], %r1; atom.global.and.u32 %r4, [%rd0], %r1
atom.global.exch.u32 %r4, [%rd0], %r1; atom.global.cas.b32 %r4, [%rd0], %r1
atom.global.add.f16 %h4, [%rd0], %h1; atom.global.add.noftz.f32 %f4, [%rd0], %f1
red.global.exch.b32 [%rd0], %r1
red.global.add.u32 [%rd0], %r1, %r2; mov.b32
wmma.load.a.sync.aligned.row.m16n16k16.f16.v4 %r1, [%rd0]
nanosleep 10; cvt.f32.s32 %f4, %r1; cvt.f32.f64 %f4, %fd1
cvt.rn.f64.f32 %fd4, %f1; cvt.f16.f32 %h4, %f1; cvt.rn.f32.f16 %f4, %h1; cvt.rn.u32.u64 %r4, %rd1
cvt.rni.f32.s32 %f4, %r1; cvt.rna.f16.f32 %h4, %f1; cvt.s32.f32 %r4, %f1; cvt.tf32.f32 %r4, %f1
cvt.ftz.u32.u64 %r4, %rd1; cvt.rzi.relu.s32.f32 %r4, %f1; cvt.rni.f64.f32 %fd4, %f1
cvt.rn.sat.bf16.f32 %h4, %f1; mbarrier.arrive.noComplete.b64 %rd4, [tile]
mbarrier.arrive.shared::cluster.b64 %rd4, [tile]; mbarrier.try_wait.parity.b64 %p2, [tile], 2
mbarrier.test_wait.shared::cluster.b64 %p2, [tile], %rd1
mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f4,%f1,%f2}, {%r1,%r2}, {%r3}, {%f1,%f2,%f3,%f1}
mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f4,%f1,%f2,%f3}, {%r1,%r2}, {%r3}, {%f1,%f2,%f3}
mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%r4,%r1}, {%r1,%r2}, {%r3}, {%r1,%r2,%r3,%r1}
mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%r4,%r1,%r2,%r3}, {%r1,%r2}, {%r3}, {%r1,%r2,%r3}
mma.sync.aligned.m16n8k16.row.col.u32.s8.s8.u32 {%r1,%r1,%r1,%r1}, {%r1,%r2}, {%r3}, {%r1,%r1,%r1,0}
mma.sync.aligned.m16n8k16.row.col.f32.s8.s8.f32 {%f1,%f1,%f1,%f1}, {%r1,%r2}, {%r3}, {%f1,%f1,%f1,0}
"""


def test_instructions_that_ptx_does_not_have_are_refused_by_name() -> None:
    lines = [line.strip() for text in ILLEGAL.strip().splitlines() for line in text.split(";")]
    for line in lines:
        with pytest.raises(UnknownInstruction) as error:
            launch(f"{BEFORE} {line}; ret; }}", "k", 1, 32, [np.zeros(8)])
        assert line.split()[0] in str(error.value), line


@pytest.mark.parametrize(
    ("opcode", "modifiers", "operands"),
    [
        ("mul", ("wide", "u16"), 3),
        ("add", ("rn", "ftz", "sat", "f32"), 3),
        ("add", ("f32", "rn"), 3),  # in any order
        ("min", ("ftz", "NaN", "xorsign", "abs", "f16x2"), 3),
        ("setp", ("lt", "and", "ftz", "f32"), 4),
        ("dp4a", ("u32", "s32"), 4),
        ("atom", ("global", "relaxed", "gpu", "L2::cache_hint", "add", "f32"), 4),
        ("red", ("global", "v2", "f16x2", "add", "noftz"), 2),
        ("barrier", ("cta", "red", "aligned", "popc", "u32"), 4),
        ("frobnicate", ("u32",), 1),  # not in the table
    ],
)
def test_forms_that_ptx_has_pass(opcode: str, modifiers: tuple[str, ...], operands: int) -> None:
    assert forms.problem(opcode, modifiers, operands) == ""


def test_a_refusal_says_what_is_wrong() -> None:
    assert forms.problem("add", ("rn", "odd", "f32"), 3) == "the modifier .odd"
    assert "missing" in forms.problem("mul", ("s32",), 3)
    assert forms.problem("add", ("u32",), 4) == "another number of operands"


def test_a_mistake_in_an_emitter_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise KeyError("a mistake")

    monkeypatch.setitem(OPCODES, "add", OPCODES["add"]._replace(emit=wrong))
    with pytest.raises(KeyError, match="a mistake"):
        launch(f"{BEFORE} add.u32 %r4, %r1, %r2; ret; }}", "k", 1, 32, [np.zeros(8)])
