"""Unsupported programs, invalid launches and accesses raise an error that names the cause."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptx_emulator import launch
from ptx_emulator.errors import (
    EmulatorError,
    LaunchArguments,
    Misaligned,
    OutOfBounds,
    PtxSyntaxError,
    StepLimit,
    Trapped,
    UninitialisedRead,
    UnknownInstruction,
)
from tests.ptx_emulator.test_conformance import HEADER, compiled, probe, run, run_ptx
from tests.support.nvrtc_helper import compile_ptx

WORDS = np.arange(64, dtype=np.uint32)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("frobnicate.s32 %d, %a;", "frobnicate"),
        ("add.sideways.u32 %d, %a, %a;", "add.sideways.u32"),
        ("cvt.rn.e4m3x2.f32 %d, %a, %a;", "e4m3x2"),
        ("vadd4.u32.u32.u32 %d, %a, %a, %a;", "vadd4"),
        ("vadd.s32.u32.s32 %d, %a.b1, %a.h1;", "vadd.s32.u32.s32: a part of a register"),
        ("vabsdiff4.s32.s32.s32 %d, %a, %a, %a;", "vabsdiff4.s32.s32.s32: with these operands"),
        ("vabsdiff4.u32.u32.u32.sat %d, %a, %a, %a;", "sat: the modifier .sat"),
        ("vset.u32.u32.ne %d, %a, %a;", "vset"),
        (
            ".reg .b128 q; red.global.v4.f32.add [%at_a], q;",
            "red.global.v4.f32.add: a vector whose length differs from its modifier",
        ),
        (
            ".reg .b128 q; .reg .b64 r; mov.b64 r, 0; mov.b128 q, {r, r}; cvt.u32.u64 %d, q;",
            "cvt.u32.u64: a part of a register of 128 bits",
        ),
        ("multimem.red.global.add.u32 [%at_a], %a;", "multimem"),
        ("mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.xor.popc {%d}, {%a}, {%a}, {%a};", "b1"),
        ("mma.sync.aligned.m8n8k16.row.col.s32.s4.s4.s32 {%d, %d}, {%a}, {%a}, {%a, %a};", "s4"),
        (
            "mma.sp.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%d, %d}, {%a, %a}, {%a, %a}, "
            "{%a, %a}, %a, 0x4;",
            "this selector",
        ),
        (
            "wmma.mma.xor.popc.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32 {%d, %d}, {%a}, {%a}, "
            "{%a, %a};",
            "m8n8k128",
        ),
        (".reg .b64 q; alloca.u64 q, 16; mov.b32 %d, 0;", "alloca"),
        ("setp.weird.u32 p, %a, %a; mov.b32 %d, 0;", "setp.weird.u32"),
        ("ld.global.v3.u32 {%d, %d, %d}, [%at_a];", "v3"),
        ("atom.global.mul.u32 %d, [%at_a], 3;", "atom.global.mul.u32"),
        ("tex.2d.v4.f32.s32 {%d, %d, %d, %d}, [%at_a, {%a, %a}];", "tex"),
    ],
)
def test_an_unknown_instruction_is_named(body: str, name: str) -> None:
    with pytest.raises((UnknownInstruction, PtxSyntaxError)) as caught:
        probe(f".reg .pred p; {body}", "u4", WORDS)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        "shfl.sync.idx.b32 s, %a, %a, 31, -1;",
        "shfl.sync.idx.b32 %d, %a;",
        "bar.warp.sync;",
        "wgmma.wait_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 4294967296;",
        "wgmma.sync.aligned;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16;",
        "or %w, %at_a, -1;",
        "or.b32 %w, %a, %a;",
        "or %d, %a, %a;",
        "mul.ftz.f16 %h, %h;",
        "fma.rn.bf16 %h, %h, %h;",
        "mad.f32x2.wide.sys %d, %a, %a, %a;",
        "mov.b32 {}, %a;",
        "mov.b32 %d, {};",
        "set.bf16x2.bf16x2 %d, %a;",
        "sqrt.rn.s32 %d, 1;",
        "shr.f32 %d, %a, 1;",
        "cvt.rna.tf32.s32 %d, %a;",
        "mbarrier.init.shared.b64 [s];",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [s];",
        "mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32 "
        "{%a, %a, %a, %a}, {%a, %a, %a, %a}, {%a, %a}, {%a, %a, %a, %a};",
    ],
)
def test_an_instruction_with_wrong_operands_is_named_with_its_line(body: str) -> None:
    registers = ".reg .b16 %h; .reg .b128 %w; .shared .align 16 .b8 s[16]; mov.b16 %h, 1; "
    with pytest.raises(UnknownInstruction) as caught:
        probe(registers + "mov.u32 %d, 0;\n" + body, "u4", WORDS)
    assert "PTX line 33" in str(caught.value)
    assert body.split(";")[0] in str(caught.value)


def test_ptx_that_is_no_text_is_refused() -> None:
    with pytest.raises(LaunchArguments, match="ptx is a bytes"):
        launch(b"", "k", 1, 1, [])  # type: ignore[arg-type]


def test_a_modifier_that_would_change_the_result_is_not_ignored() -> None:
    """sm_100 and later have a packed f32x2; a reader of suffixes might take it for f32."""
    with pytest.raises(EmulatorError) as caught:
        probe("add.rn.wrong.f32 %d, %a, %a;", "f4", WORDS.view(np.float32))
    assert "add.rn.wrong.f32: the modifier .wrong" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("add.u32 %d, %a;", "bra NOWHERE;", "mov.b32 %d, %undeclared;", "mov.b32 %d, ;"),
        *("add.u32 %d, %a, %a", "ld.global.b32 %d, [;"),
    ],
)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(EmulatorError):
        probe(text, "u4", WORDS)


PLAIN = """.visible .entry k(.param .u64 p, .param .u32 n) { .reg .b64 %p; .reg .b32 %n;
    ld.param.u64 %p, [p]; ld.param.u32 %n, [n]; st.global.u32 [%p], %n; ret; }"""


@pytest.mark.parametrize(
    "refused", ["", "add.rn.f32x2 %p, %p, %p;", "tcgen05.fence::after_thread_sync;"]
)
def test_a_module_for_sm_100_runs_without_the_instructions_that_came_with_it(refused: str) -> None:
    head = ".version 8.7\n.target sm_100\n.address_size 64\n"
    out = np.zeros(1, np.uint32)
    text = head + PLAIN.replace("ret;", f"{refused} ret;")
    if refused:
        with pytest.raises(UnknownInstruction, match=refused.split(" ")[0].split(":")[0]):
            launch(text, "k", 1, 32, [out, 7], allow=("same_value",))
    else:
        launch(text, "k", 1, 32, [out, 7], allow=("same_value",))
        assert out[0] == 7


def test_textures_may_be_declared_and_are_refused_by_name() -> None:
    head = HEADER + ".global .texref picture;\n.global .samplerref way;\n.global .surfref page;\n"
    kernel = ".visible .entry k() { .reg .b32 %r<4>; BODY ret; }"
    launch(head + kernel.replace("BODY", ""), "k", 1, 32, [])
    fetch = "mov.b32 %r0, 0; tex.1d.v4.u32.s32 {%r0, %r1, %r2, %r3}, [picture, {%r0}];"
    with pytest.raises(UnknownInstruction, match=r"tex\.1d"):
        launch(head + kernel.replace("BODY", fetch), "k", 1, 32, [])


def test_a_function_that_is_not_called_may_have_special_registers_that_are_refused() -> None:
    unused = ".func unused() { .reg .b32 %r; mov.u32 %r, %reserved_smem_offset_cap; ret; }"
    out = np.zeros(1, np.uint32)
    launch(f".version 8.8\n.target sm_90\n.address_size 64\n{unused}\n{PLAIN}", "k", 1, 1, [out, 7])
    assert out[0] == 7


@pytest.mark.parametrize(
    ("name", "grid", "block", "args", "shared", "what"),
    [
        ("other", (1, 1, 1), (32, 1, 1), [WORDS, 1], 0, "no kernel 'other'"),
        ("k", (1, 1, 1), (32, 1, 1), [WORDS], 0, "number of arguments differs"),
        ("k", (1, 1, 1), (32, 1, 1), [WORDS, 1, 2], 0, "number of arguments differs"),
        ("k", (1, 1, 1), (1025, 1, 1), [WORDS, 1], 0, ""),
        ("k", (1, 1, 1), (32, 64, 1), [WORDS, 1], 0, ""),
        ("k", (0, 1, 1), (32, 1, 1), [WORDS, 1], 0, ""),
        ("k", (1, 1, 1), (0, 1, 1), [WORDS, 1], 0, ""),
        ("k", (1, 70000, 1), (32, 1, 1), [WORDS, 1], 0, ""),
        ("k", (1, 1, 1), (32, 1, 1), [WORDS, WORDS], 0, ""),
        ("k", (1, 1, 1), (32, 1, 1), [WORDS, 1.5], 0, "does not fit"),
        ("k", (1, 1, 1), (32, 1, 1), [WORDS, "text"], 0, ""),
        ("k", (1, 1, 1), (32, 1, 1), [WORDS, 1], -1, ""),
        ("k", (1, 1, 1), (32, 1, 1), [WORDS, 1], 232449, "too much shared memory"),
        ("k", (1.5, 1, 1), (32, 1, 1), [WORDS, 1], 0, "one to three positive sizes"),
        ("k", 1.5, (32, 1, 1), [WORDS, 1], 0, "one to three positive sizes"),
        ("k", (1, 1, 1, 1), (32, 1, 1), [WORDS, 1], 0, "one to three positive sizes"),
    ],
)
def test_a_launch_that_does_not_fit_the_kernel_is_refused(
    name: str,
    grid: Any,
    block: tuple[int, int, int],
    args: list[object],
    shared: int,
    what: str,
) -> None:
    before = WORDS.copy()
    with pytest.raises(LaunchArguments, match=what or None):
        launch(HEADER + PLAIN, name, grid, block, args, shared_bytes=shared)
    assert (before == WORDS).all()


def test_a_python_number_takes_the_width_of_its_parameter() -> None:
    out = np.zeros(1, np.uint32)
    run_ptx(PLAIN, "k", 1, 1, out, 0xFFFFFFFF)
    assert out[0] == 0xFFFFFFFF
    run_ptx(PLAIN, "k", 1, 1, out, -2)
    assert out[0] == 0xFFFFFFFE


def test_a_register_never_written_is_noticed() -> None:
    with pytest.raises(UninitialisedRead, match="register"):
        probe(".reg .b32 %ghost; add.u32 %d, %ghost, %a;", "u4", WORDS)


CUDA = r"""
extern "C" __global__ void spin(volatile int* flag) {
    while (*flag == 0) {}                                                      // SPIN
}
extern "C" __global__ void spin_shared() {
    __shared__ volatile int s[1];
    s[0] = 1; __syncthreads();
    for (unsigned i = 0; s[0]; ++i) if (s[0] == 2) break;                      // SPIN
}
extern "C" __global__ void trap(int* p) { if (p[threadIdx.x] == 5) __trap(); } // TRAP
"""


def lines(mark: str) -> list[int]:
    return [i + 1 for i, line in enumerate(CUDA.splitlines()) if line.endswith(f"// {mark}")]


@pytest.mark.parametrize("check", [True, False])
def test_an_endless_loop_ends_at_the_step_limit(check: bool) -> None:
    for kernel, args in (("spin", [np.zeros(1, np.int32)]), ("spin_shared", [])):
        with pytest.raises(StepLimit, match="does not come to an end") as caught:
            launch(compiled(CUDA), kernel, 1, 32, args, check=check, step_limit=2000)
        assert kernel in str(caught.value)
        assert any(f"test.cu:{line}" in str(caught.value) for line in lines("SPIN"))


def test_a_trap_names_its_thread() -> None:
    with pytest.raises(Trapped) as caught:
        run(CUDA, "trap", (1,), (64,), np.arange(64, dtype=np.int32))
    assert "lane" in str(caught.value)
    assert any(f"test.cu:{line}" in str(caught.value) for line in lines("TRAP"))


@pytest.mark.parametrize("opcode", [
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0,%f1,%f2,%f3}, {%r0,%r1,%r2,%r3}, "
    "{%r0,%r1}, {%f0,%f1,%f2,%f3}",
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r1]", "bar.sync 0",
    "shfl.sync.bfly.b32 %r0, %r0, 1, 31, -1", "redux.sync.add.s32 %r0, %r0, -1",
])  # fmt: skip
def test_half_a_warp_cannot_execute_a_warp_wide_instruction(opcode: str) -> None:
    """The other half waits at the barrier at the end: on a GPU this is undefined or hangs."""
    ptx = f""".visible .entry k(.param .u64 p) {{ .reg .b32 %t, %r<4>; .reg .f32 %f<4>;
        .reg .pred %p; .reg .b64 %q; .shared .align 16 .b8 s[128]; mov.u32 %t, %tid.x;
        mov.b32 %r0, 0; mov.u32 %r1, s; mov.b32 %r2, 0; mov.b32 %r3, 0; mov.f32 %f0, 0f00000000;
        mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0; mad.lo.u32 %r2, %t, 4, %r1;
        st.shared.b32 [%r2], %t; bar.sync 0; and.b32 %t, %t, 31; setp.lt.u32 %p, %t, 16;
        @!%p bra JOIN; {opcode}; JOIN: bar.sync 0; ret; }}"""
    with pytest.raises(EmulatorError) as caught:
        run_ptx(ptx, "k", 1, 32, np.zeros(4, np.uint32))
    assert "lane" in str(caught.value) or "warp" in str(caught.value)


def small(body: str, args: list[object], block: int = 64, grid: int = 1, **options: object) -> None:
    """Runs ``k(float* a, float* b, int n)`` with a body."""
    source = 'extern "C" __global__ void k(float* a, float* b, int n) {\n' + body + "\n}"
    launch(compile_ptx(source), "k", grid, block, args, **options)  # type: ignore[arg-type]


def test_bounds_of_shared_memory_are_those_of_the_launch() -> None:
    source = """extern "C" __global__ void k() {
    extern __shared__ int s[];
    s[threadIdx.x] = 1;
    }"""
    launch(compile_ptx(source), "k", 1, 64, [], 256)
    with pytest.raises(OutOfBounds, match="outside shared memory") as caught:
        launch(compile_ptx(source), "k", 1, 64, [], 128)
    assert "of 128 bytes" in caught.value.numbers


def test_misaligned_address_names_the_remainder() -> None:
    body = "*(float4*)(a + 1 + 4 * threadIdx.x) = make_float4(0, 0, 0, 0);"
    with pytest.raises(Misaligned, match="misaligned 16-byte access") as caught:
        small(body, [np.zeros(300, "f4"), np.zeros(64, "f4"), 0])
    assert "is 4 mod 16" in caught.value.numbers


def test_misaligned_view_of_an_array_stays_misaligned() -> None:
    whole = np.zeros(301, "f4")
    offset = 1 if whole.ctypes.data % 16 == 0 else 0
    body = "*(float4*)(a + 4 * threadIdx.x) = make_float4(0, 0, 0, 0);"
    with pytest.raises(Misaligned):
        small(body, [whole[offset : offset + 256], np.zeros(64, "f4"), 0])


def test_read_one_past_the_end_says_how_far() -> None:
    body = "b[threadIdx.x] = a[threadIdx.x + 1];"
    with pytest.raises(OutOfBounds) as caught:
        small(body, [np.zeros(64, "f4"), np.zeros(64, "f4"), 0])
    error = caught.value
    assert "offset 256 of argument 0 (256 bytes)" in error.numbers
    assert "block (0, 0, 0), warp 1, lane 31, test.cu:2: ld.global" in error.where


def test_bounds_are_enforced_with_the_checkers_off() -> None:
    args = [np.zeros(64, "f4"), np.zeros(64, "f4"), 0]
    with pytest.raises(OutOfBounds):
        small("b[threadIdx.x] = a[threadIdx.x - 1];", args, check=False)


def test_undefined_register_that_leaves_the_registers_is_reported() -> None:
    ptx = """.version 8.0
    .target sm_80
    .address_size 64
    .visible .entry k(.param .u64 k_param_0)
    {
    .reg .pred %p<2>; .reg .b32 %r<5>; .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [k_param_0];
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, LIMIT;
    @%p1 mov.u32 %r2, 7;
    add.s32 %r3, %r2, 1;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd2, %rd2, %rd1;
    st.global.u32 [%rd2], %r3;
    ret;
    }"""
    out = np.zeros(32, np.int32)
    launch(ptx.replace("LIMIT", "32"), "k", 1, 32, [out])
    assert (out == 8).all()
    with pytest.raises(UninitialisedRead, match="a register is read") as caught:
        launch(ptx.replace("LIMIT", "31"), "k", 1, 32, [out])
    assert "lane 31" in caught.value.where
    assert "st.global.u32 [%rd2], %r3" in caught.value.where


def test_unknown_opcode_is_named_with_its_line() -> None:
    body = 'asm volatile("{ .reg .b32 t; vadd.s32.s32.s32 t, 1, 2; }");'
    with pytest.raises(UnknownInstruction, match="does not support vadd") as caught:
        small(body, [np.zeros(64, "f4"), np.zeros(64, "f4"), 1])
    assert "test.cu:2" in caught.value.where


def test_store_to_a_read_only_array_is_refused() -> None:
    frozen = np.zeros(64, "f4")
    frozen.flags.writeable = False
    with pytest.raises(EmulatorError, match="read-only"):
        small("a[threadIdx.x] = 1;", [frozen, np.zeros(64, "f4"), 0])
    assert (frozen == 0).all()
