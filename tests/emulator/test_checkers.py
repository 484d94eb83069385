"""What the emulator's checkers and its launch say of small kernels with a bug.

The test_conformance_planted_* files have the bugs of each kind, at their lines.
"""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.emulator import (
    LaunchArguments,
    Misaligned,
    OutOfBounds,
    StepLimit,
    Trapped,
    UninitialisedRead,
    UnknownInstruction,
    launch,
)
from flashgen.errors import EmulatorError
from tests.support.nvrtc_helper import compile_ptx


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


def test_neighbouring_bytes_of_two_warps_are_no_race() -> None:
    source = """extern "C" __global__ void k(int* b) {
    __shared__ unsigned char s[64];
    s[(threadIdx.x & 31) * 2 + threadIdx.x / 32] = threadIdx.x;
    __syncthreads();
    b[threadIdx.x] = s[threadIdx.x];
    }"""
    out = np.zeros(64, np.int32)
    launch(compile_ptx(source), "k", 1, 64, [out])
    assert sorted(out) == list(range(64))


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


def test_endless_loop_hits_the_step_limit() -> None:
    source = 'extern "C" __global__ void k(volatile int* a) { while (a[0] == 0) {} }'
    with pytest.raises(StepLimit, match="does not come to an end"):
        launch(compile_ptx(source), "k", 1, 32, [np.zeros(4, np.int32)], step_limit=500)


def test_trap_and_assert_stop_the_launch() -> None:
    args = [np.zeros(64, "f4"), np.zeros(64, "f4"), 1]
    with pytest.raises(Trapped, match="trap"):
        small('if (n == 1) asm volatile("trap;");', args)
    small('if (n == 1) asm volatile("trap;");', [*args[:2], 0])


def test_unknown_opcode_is_named_with_its_line() -> None:
    body = 'asm volatile("{ .reg .b32 t; vadd.s32.s32.s32 t, 1, 2; }");'
    with pytest.raises(UnknownInstruction, match="does not support vadd") as caught:
        small(body, [np.zeros(64, "f4"), np.zeros(64, "f4"), 1])
    assert "test.cu:2" in caught.value.where


def test_unknown_modifier_is_refused() -> None:
    ptx = """.version 8.0
    .target sm_80
    .address_size 64
    .visible .entry k() { .reg .f32 %f<3>; add.rn.frob.f32 %f1, %f2, %f2; ret; }"""
    with pytest.raises(UnknownInstruction, match=r"add\.rn\.frob\.f32: the modifier \.frob"):
        launch(ptx, "k", 1, 32, [])


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    ptx = compile_ptx('extern "C" __global__ void k(float* a, int n) { a[n] = 0; }')
    with pytest.raises(LaunchArguments, match="number of arguments differs"):
        launch(ptx, "k", 1, 32, [np.zeros(4, "f4")])
    with pytest.raises(LaunchArguments, match="does not fit"):
        launch(ptx, "k", 1, 32, [np.zeros(4, "f4"), 1.5])
    with pytest.raises(LaunchArguments, match="no kernel 'j'"):
        launch(ptx, "j", 1, 32, [])
    with pytest.raises(OutOfBounds):
        launch(ptx, "k", 1, 32, [None, 0])


def test_store_to_a_read_only_array_is_refused() -> None:
    frozen = np.zeros(64, "f4")
    frozen.flags.writeable = False
    with pytest.raises(EmulatorError, match="read-only"):
        small("a[threadIdx.x] = 1;", [frozen, np.zeros(64, "f4"), 0])
    assert (frozen == 0).all()
