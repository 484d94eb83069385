"""Each checker of the emulator detects its kind of bug and reports the source line."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.emulator import (
    BarrierDivergence,
    DeadlockError,
    LaunchArguments,
    Misaligned,
    OutOfBounds,
    RaceError,
    StepLimit,
    Trapped,
    UninitialisedRead,
    UnknownInstruction,
    launch,
)
from flashgen.errors import EmulatorError
from tests.support.emulator_kernels import FLASH_FORWARD
from tests.support.nvrtc_helper import compile_ptx


def run_flash(source: str, n: int = 192, **options: object) -> np.ndarray:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 64)).astype(np.float16) for _ in range(3))
    o, lse = np.zeros_like(q), np.zeros((1, n), np.float32)
    ptx = compile_ptx(source)
    tiles = -(-n // 64)
    launch(ptx, "flash", (tiles, 1), 128, [q, k, v, o, lse, n, 0.125], 40960, **options)
    return o


def line_of(source: str, text: str) -> int:
    return source[: source.index(text)].count("\n") + 1


def planted(old: str, new: str, count: int = 1) -> str:
    assert FLASH_FORWARD.count(old) >= 1
    return FLASH_FORWARD.replace(old, new, count)


def fails(kind: type[EmulatorError], source: str, *words: str, n: int = 192) -> EmulatorError:
    with pytest.raises(kind) as caught:
        run_flash(source, n)
    text = str(caught.value)
    assert "kernel flash, block (" in text
    assert "test.cu:" in text
    for word in words:
        assert word in text, text
    return caught.value


def small(body: str, args: list[object], block: int = 64, grid: int = 1, **options: object) -> None:
    """Runs ``k(float* a, float* b, int n)`` with a body."""
    source = 'extern "C" __global__ void k(float* a, float* b, int n) {\n' + body + "\n}"
    launch(compile_ptx(source), "k", grid, block, args, **options)  # type: ignore[arg-type]


# ---- planted in the real kernel


def test_the_kernel_without_a_planted_bug_passes_every_checker() -> None:
    for seed in (None, 1, 2):
        assert np.isfinite(run_flash(FLASH_FORWARD, order_seed=seed)).all()


def test_removed_syncthreads_is_a_race() -> None:
    source = planted("__syncthreads();", "")
    error = fails(RaceError, source, "not ordered", "cp.async")
    assert error.way_out.startswith("separate the two accesses by a barrier")


def test_missing_cp_async_wait_is_a_read_of_bytes_in_flight() -> None:
    source = planted('asm volatile("cp.async.wait_group 0;");', "")
    error = fails(RaceError, source, "still writing", "cp.async.cg.shared.global")
    assert "ldmatrix" in error.where


def test_prefetch_into_the_stage_being_read_is_a_race() -> None:
    source = planted("sk + (stage ^ 8192), k", "sk + stage, k")
    fails(RaceError, source, "shared memory")


def test_index_one_past_the_end_is_out_of_bounds_and_names_the_argument() -> None:
    source = planted("if (row < n) {", "if (row <= n) {")
    error = fails(OutOfBounds, source, "argument", "bytes)", n=160)
    assert "store outside every buffer" in error.what
    assert "lane" in error.where


def test_missing_row_test_of_a_load_is_out_of_bounds() -> None:
    source = planted("bool inside = row0 + row < rows;", "bool inside = true;")
    error = fails(OutOfBounds, source, "load outside every buffer", n=100)
    assert f"test.cu:{line_of(source, 'asm volatile(')}" in error.where


def test_barrier_in_a_divergent_branch_is_reported() -> None:
    source = planted("__syncthreads();", "if (lane < 16) __syncthreads();")
    error = fails(BarrierDivergence, source, "lanes 0-15")
    assert f"test.cu:{line_of(source, '__syncthreads')}" in error.where


def test_barrier_that_one_warp_never_reaches_is_a_deadlock() -> None:
    source = planted("__syncthreads();", 'asm volatile("bar.sync 1, 160;");')
    error = fails(DeadlockError, source, "waits at barrier 1: 128 of 160 threads")
    assert f"test.cu:{line_of(source, 'bar.sync 1')}" in error.where


def test_tile_that_was_never_loaded_is_an_uninitialised_read() -> None:
    source = planted("load_tile(sq, q, q0, n, tid);", "")
    fails(UninitialisedRead, source, "shared memory is read that was never written", "ldmatrix")


def test_too_little_shared_memory_is_out_of_bounds() -> None:
    ptx = compile_ptx(FLASH_FORWARD)
    q = np.zeros((1, 64, 64), np.float16)
    args = [q, q.copy(), q.copy(), q.copy(), np.zeros((1, 64), np.float32), 64, 1.0]
    with pytest.raises(OutOfBounds, match="outside shared memory") as caught:
        launch(ptx, "flash", (1, 1), 128, args, 16384)
    assert "of 16,384 bytes" in caught.value.numbers


# ---- small kernels


def test_write_write_race_within_one_instruction() -> None:
    body = "__shared__ float s[4]; s[threadIdx.x & 3] = a[threadIdx.x]; b[threadIdx.x] = s[0];"
    with pytest.raises(RaceError, match="a write and a write of another warp"):
        small(body, [np.zeros(64, "f4"), np.zeros(64, "f4"), 0])


def test_write_after_read_race_whatever_the_order_of_execution() -> None:
    body = """
    __shared__ float s[64];
    s[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    float x = s[63 - threadIdx.x];
    %s
    s[threadIdx.x] = 2 * x;
    b[threadIdx.x] = x;"""
    for seed in (None, 1, 2, 3):
        with pytest.raises(RaceError):
            small(body % "", [np.ones(64, "f4"), np.zeros(64, "f4"), 0], order_seed=seed)
        small(body % "__syncthreads();", [np.ones(64, "f4"), np.zeros(64, "f4"), 0])


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


def test_named_barrier_orders_only_its_members() -> None:
    source = """extern "C" __global__ void k(int* b) {
    __shared__ int s[32];
    int w = threadIdx.x / 32, l = threadIdx.x & 31;
    if (w == 0) { s[l] = l; asm volatile("bar.arrive 1, 64;" ::: "memory"); }
    if (w == 1) { asm volatile("bar.sync 1, 64;" ::: "memory"); b[l] = s[l]; }
    if (w == 2 && %s) b[l + 32] = s[l];
    }"""
    out = np.zeros(64, np.int32)
    for seed in (None, 1, 2, 3):
        launch(compile_ptx(source % 0), "k", 1, 96, [out], order_seed=seed)
        assert list(out[:32]) == list(range(32))
    with pytest.raises((RaceError, UninitialisedRead)):
        launch(compile_ptx(source % 1), "k", 1, 96, [out])


def test_two_blocks_writing_the_same_bytes_is_a_race() -> None:
    body = "a[threadIdx.x] = blockIdx.x;"
    with pytest.raises(RaceError, match="race in global memory: a write and a write of block"):
        small(body, [np.zeros(64, "f4"), np.zeros(64, "f4"), 0], grid=2)
    body = "atomicAdd(a + threadIdx.x, 1.0f);"
    a = np.zeros(64, "f4")
    small(body, [a, np.zeros(64, "f4"), 0], grid=3)
    assert (a == 3).all()


def test_block_reading_what_another_block_writes_is_a_race_in_both_orders() -> None:
    body = (
        "int i = blockIdx.x; if (i == %d) a[threadIdx.x] = 1; else b[threadIdx.x] = a[threadIdx.x];"
    )
    for writer in (0, 1):
        for seed in (None, 1, 2):
            args = [np.zeros(64, "f4"), np.zeros(64, "f4"), 0]
            with pytest.raises(RaceError, match="global memory"):
                small(body % writer, args, grid=2, order_seed=seed)


def test_fence_and_atomic_order_blocks() -> None:
    source = """
    __device__ unsigned int count;
    extern "C" __global__ void k(float* part, float* out) {
      __shared__ bool last;
      if (threadIdx.x == 0) {
        part[blockIdx.x] = blockIdx.x + 1;
        %s
        last = atomicAdd(&count, 1) == gridDim.x - 1;
      }
      __syncthreads();
      if (last && threadIdx.x == 0) {
        float sum = 0;
        for (int i = 0; i < gridDim.x; ++i) sum += ((volatile float*)part)[i];
        *out = sum;
      }
    }"""
    part, out = np.zeros(8, "f4"), np.zeros(1, "f4")
    launch(compile_ptx(source % "__threadfence();"), "k", 8, 64, [part, out])
    assert out[0] == 36
    with pytest.raises(RaceError):
        launch(compile_ptx(source % ""), "k", 8, 64, [part, out])


def test_global_race_between_warps_of_a_block() -> None:
    body = "a[threadIdx.x] = 1; %s b[threadIdx.x] = a[63 - threadIdx.x];"
    with pytest.raises(RaceError, match="another warp of the block"):
        small(body % "", [np.zeros(64, "f4"), np.zeros(64, "f4"), 0])
    small(body % "__syncthreads();", [np.zeros(64, "f4"), np.zeros(64, "f4"), 0])


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
