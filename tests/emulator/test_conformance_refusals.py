"""Unsupported programs and invalid launches raise an error that names the cause."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.emulator import launch
from flashgen.emulator.errors import (
    EmulatorError,
    LaunchArguments,
    PtxSyntaxError,
    StepLimit,
    Trapped,
    UninitialisedRead,
    UnknownInstruction,
)
from tests.emulator.test_conformance import HEADER, compiled, probe, run, run_ptx

WORDS = np.arange(64, dtype=np.uint32)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("frobnicate.s32 %d, %a;", "frobnicate"),
        ("add.sideways.u32 %d, %a, %a;", "add.sideways.u32"),
        ("cvt.rn.satfinite.e4m3x2.f32 %d, %a, %a;", "e4m3x2"),
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


def test_a_modifier_that_would_change_the_result_is_not_ignored() -> None:
    """sm_100 and later have a packed f32x2; a reader of suffixes might take it for f32."""
    with pytest.raises(EmulatorError) as caught:
        probe("add.rn.wrong.f32 %d, %a, %a;", "f4", WORDS.view(np.float32))
    assert "wrong" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("add.u32 %d, %a;", "bra NOWHERE;", "mov.b32 %d, %nobody;", "mov.b32 %d, ;"),
        *("add.u32 %d, %a, %a", "ld.global.b32 %d, [;"),
    ],
)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(EmulatorError):
        probe(text, "u4", WORDS)


PLAIN = """.visible .entry k(.param .u64 p, .param .u32 n) { .reg .b64 %p; .reg .b32 %n;
    ld.param.u64 %p, [p]; ld.param.u32 %n, [n]; st.global.u32 [%p], %n; ret; }"""


@pytest.mark.parametrize(
    ("name", "grid", "block", "args", "shared"),
    [
        ("other", (1, 1, 1), (32, 1, 1), [WORDS, 1], 0),
        ("k", (1, 1, 1), (32, 1, 1), [WORDS], 0),
        ("k", (1, 1, 1), (32, 1, 1), [WORDS, 1, 2], 0),
        ("k", (1, 1, 1), (1025, 1, 1), [WORDS, 1], 0),
        ("k", (1, 1, 1), (32, 64, 1), [WORDS, 1], 0),
        ("k", (0, 1, 1), (32, 1, 1), [WORDS, 1], 0),
        ("k", (1, 1, 1), (0, 1, 1), [WORDS, 1], 0),
        ("k", (1, 70000, 1), (32, 1, 1), [WORDS, 1], 0),
        ("k", (1, 1, 1), (32, 1, 1), [WORDS, WORDS], 0),
        ("k", (1, 1, 1), (32, 1, 1), [WORDS, "text"], 0),
        ("k", (1, 1, 1), (32, 1, 1), [WORDS, 1], -1),
    ],
)
def test_a_launch_that_does_not_fit_the_kernel_is_refused(
    name: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    args: list[object],
    shared: int,
) -> None:
    before = WORDS.copy()
    with pytest.raises(LaunchArguments):
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


def test_a_register_written_by_some_lanes_only_is_noticed_in_the_others() -> None:
    body = """.reg .b32 %some; .reg .pred p; setp.lt.u32 p, %a, 40; @!p bra SKIP;
        mov.b32 %some, 7; SKIP: bar.sync 0; add.u32 %d, %some, %a;"""
    with pytest.raises(UninitialisedRead, match="register"):
        probe(body, "u4", WORDS)


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
        with pytest.raises(StepLimit) as caught:
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
