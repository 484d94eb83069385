"""Correct programs that resemble incorrect ones: no checker may report an error, in any order."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx_emulator.test_conformance import agree, probe, run, run_ptx

SEEDS = [None, 1, 2, 3]

CUDA = r"""
typedef unsigned u;
#define T threadIdx.x
#define SMEM(p) ((u)__cvta_generic_to_shared(p))
#define NAMED(id, n) asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : "memory")
#define ARRIVE(id, n) asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(n) : "memory")

extern "C" __global__ void neighbouring_bytes(const char* in, char* out) {
    __shared__ volatile char s[128];
    s[(T * 33) % 128] = in[T];               // each byte has its own writer, warps interleave
    out[(T * 65) % 128] = in[T];
    __syncthreads();
    out[128 + T] = s[T];
}
extern "C" __global__ void halves_of_one_word(const short* in, int* out) {
    __shared__ volatile short s[128];
    s[2 * (T % 64) + T / 64] = in[T];        // the two halves of a word come from different warps
    __syncthreads();
    if (T < 64) out[T] = *(volatile int*)&s[2 * T];
}
extern "C" __global__ void blocks_side_by_side(const char* in, char* out) {
    out[T * gridDim.x + blockIdx.x] = in[T];
}
extern "C" __global__ void double_buffer(const int* in, int* out, int n) {
    __shared__ int s[2][128];
    int sum = 0;
    s[0][T] = in[T];
    for (int i = 0; i < n; ++i) {            // one barrier a step is enough with two buffers
        __syncthreads();
        if (i + 1 < n) s[(i + 1) % 2][T] = in[(i + 1) * 128 + T];
        sum += s[i % 2][127 - T];
    }
    out[T] = sum;
}
extern "C" __global__ void ping_pong(const int* in, int* out, int n) {
    __shared__ int s[32];                    // two warps take turns with one buffer
    int me = T / 32, lane = T % 32;
    for (int i = 0; i < n; ++i) {
        if (me == i % 2) {
            if (i > 0) NAMED(1 + me, 64);
            int x = in[i * 32 + lane] + (i ? s[(lane + 1) % 32] : 0);
            __syncwarp();
            s[lane] = x;
            __syncwarp();
            out[i * 32 + lane] = s[31 - lane];
            __syncwarp();
            if (i + 1 < n) ARRIVE(2 - me, 64);
        }
    }
}
extern "C" __global__ void last_block_sums(const float* in, float* part, int* done, float* out) {
    __shared__ float s[64];
    __shared__ bool last;
    s[T] = in[blockIdx.x * 64 + T];
    for (int d = 32; d; d /= 2) { __syncthreads(); if (T < d) s[T] += s[T + d]; }
    if (T == 0) {
        part[blockIdx.x] = s[0];
        __threadfence();
        last = atomicAdd(done, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (last && T == 0) {
        float sum = 0;
        for (int i = 0; i < gridDim.x; ++i) sum += ((volatile float*)part)[i];
        *out = sum;
    }
}
extern "C" __global__ void warp_reduce_then_block(const float* in, float* out) {
    __shared__ float s[4];
    float x = in[T];
    for (int d = 16; d; d /= 2) x += __shfl_down_sync(0xffffffffu, x, d);
    if (T % 32 == 0) s[T / 32] = x;
    __syncthreads();
    if (T < 32) {
        x = T < 4 ? s[T] : 0.f;
        for (int d = 2; d; d /= 2) x += __shfl_down_sync(0xffffffffu, x, d);
        if (T == 0) *out = x;
    }
}
extern "C" __global__ void transpose(const float* in, float* out, int n) {
    __shared__ float tile[32][33];
    int x = blockIdx.x * 32, y = blockIdx.y * 32;
    for (int r = threadIdx.y; r < 32; r += 8)
        if (y + r < n && x + T < n) tile[r][T] = in[(y + r) * n + x + T];
    __syncthreads();
    for (int r = threadIdx.y; r < 32; r += 8)
        if (x + r < n && y + T < n) out[(x + r) * n + y + T] = tile[T][r];
}
extern "C" __global__ void some_words_never_written(const int* in, int* out) {
    __shared__ int s[256];
    if (T % 3 == 0) s[2 * T] = in[T];
    __syncthreads();
    out[T] = T % 3 == 0 ? s[2 * T] : -1;     // and never read
}
extern "C" __global__ void reused_after_a_barrier(const int* in, int* out) {
    __shared__ int s[128];
    __shared__ short* alias;
    if (T == 0) alias = (short*)s;
    s[T] = in[T];
    __syncthreads();
    int x = s[127 - T];
    __syncthreads();
    alias[T + 128] = x;                      // the same bytes, another type, another owner
    __syncthreads();
    out[T] = alias[255 - T];
}
extern "C" __global__ void read_by_all(const int* in, int* out) {
    __shared__ int s[4];
    if (T == 70) s[2] = in[5];
    __syncthreads();
    out[blockIdx.x * 128 + T] = s[2] + in[0];
}
extern "C" __global__ void cp_async_own_row(const float* in, float* out, int n) {
    __shared__ __align__(16) float s[2][128 * 4];   // every thread reads what it copied: no barrier
    float sum = 0.f;
    for (int i = 0; i <= n; ++i) {
        if (i < n)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                :: "r"(SMEM(&s[i % 2][4 * T])), "l"(in + 512 * i + 4 * T) : "memory");
        asm volatile("cp.async.commit_group;\ncp.async.wait_group 1;" ::: "memory");
        if (i > 0) sum += s[(i - 1) % 2][4 * T] - s[(i - 1) % 2][4 * T + 3];
    }
    out[T] = sum;
}
extern "C" __global__ void shared_counter(int* out, int n) {
    __shared__ int next;
    if (T == 0) next = 0;
    __syncthreads();
    for (int job; (job = atomicAdd(&next, 1)) < n;) out[job] = job * job;
    __syncthreads();
    if (T == 0) out[n] = next;
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_next_to_each_other_are_different_places(seed: int | None) -> None:
    values, out = np.arange(128, dtype=np.int8), np.zeros(256, np.int8)
    run(CUDA, "neighbouring_bytes", (1,), (128,), values, out, seed=seed)
    assert (out[np.arange(128) * 65 % 128] == values).all()
    assert (out[128 + np.arange(128) * 33 % 128] == values).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_two_warps_may_each_write_half_of_a_word(seed: int | None) -> None:
    values, out = np.arange(128, dtype=np.int16), np.zeros(64, np.int32)
    run(CUDA, "halves_of_one_word", (1,), (128,), values, out, seed=seed)
    assert (out == values[:64] + values[64:].astype(np.int32) * 65536).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_may_write_adjacent_bytes(seed: int | None) -> None:
    values, out = np.arange(64, dtype=np.int8), np.zeros((64, 7), np.int8)
    run(CUDA, "blocks_side_by_side", (7,), (64,), values, out, seed=seed)
    assert (out == values[:, None]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_double_buffering_with_one_barrier_a_step(seed: int | None) -> None:
    values = np.random.default_rng(1).integers(0, 99, (7, 128)).astype(np.int32)
    out = np.zeros(128, np.int32)
    run(CUDA, "double_buffer", (1,), (128,), values, out, np.int32(7), seed=seed)
    assert (out == values[:, ::-1].sum(axis=0)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_two_warps_take_turns_by_named_barriers(seed: int | None) -> None:
    values = np.random.default_rng(2).integers(0, 99, (6, 32)).astype(np.int32)
    out, held = np.zeros_like(values), np.zeros(32, np.int64)
    run(CUDA, "ping_pong", (1,), (64,), values, out, np.int32(6), seed=seed)
    for i in range(6):
        held = (np.roll(held, -1) if i else held) + values[i]
        assert (out[i] == held[::-1]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_block_may_read_what_the_others_published(seed: int | None) -> None:
    values = np.random.default_rng(3).integers(-9, 9, (5, 64)).astype(np.float32)
    part, done, out = np.zeros(5, np.float32), np.zeros(1, np.int32), np.zeros(1, np.float32)
    run(CUDA, "last_block_sums", (5,), (64,), values, part, done, out, seed=seed)
    assert out[0] == values.sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reduction_by_shuffles_and_one_barrier(seed: int | None) -> None:
    values = np.random.default_rng(4).integers(-9, 9, 128).astype(np.float32)
    out = np.zeros(1, np.float32)
    run(CUDA, "warp_reduce_then_block", (1,), (128,), values, out, seed=seed)
    assert out[0] == values.sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tiled_transpose_with_ragged_edges(seed: int | None) -> None:
    n = 45
    values, out = np.random.default_rng(5).normal(size=(n, n)).astype(np.float32), np.zeros((n, n))
    out = out.astype(np.float32)
    run(CUDA, "transpose", (2, 2), (32, 8), values, out, np.int32(n), seed=seed)
    assert (out == values.T).all()


def test_words_never_written_are_no_matter_if_never_read() -> None:
    values, out, i = np.arange(128, dtype=np.int32), np.zeros(128, np.int32), np.arange(128)
    run(CUDA, "some_words_never_written", (1,), (128,), values, out)
    assert (out == np.where(i % 3 == 0, i, -1)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_shared_memory_is_used_again_for_something_else(seed: int | None) -> None:
    values, out = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    run(CUDA, "reused_after_a_barrier", (1,), (128,), values, out, seed=seed)
    assert (out == values).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_one_word_is_read_by_everybody(seed: int | None) -> None:
    values, out = np.arange(8, dtype=np.int32) + 1, np.zeros(384, np.int32)
    run(CUDA, "read_by_all", (3,), (128,), values, out, seed=seed)
    assert (out == 7).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_thread_needs_no_barrier_for_what_it_copied_itself(seed: int | None) -> None:
    values = np.random.default_rng(6).integers(0, 99, (4, 128, 4)).astype(np.float32)
    out = np.zeros(128, np.float32)
    run(CUDA, "cp_async_own_row", (1,), (128,), values, out, np.int32(4), seed=seed)
    assert (out == (values[:, :, 0] - values[:, :, 3]).sum(axis=0)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_jobs_handed_out_by_an_atomic_counter(seed: int | None) -> None:
    n = 300
    out = np.zeros(n + 1, np.int32)
    run(CUDA, "shared_counter", (1,), (96,), out, np.int32(n), seed=seed)
    assert (out[:n] == np.arange(n) ** 2).all()
    assert out[n] == n + 96


def test_a_register_written_and_used_under_the_same_guard_is_fine() -> None:
    body = """.reg .pred p; .reg .b32 x; setp.lt.u32 p, %a, 50; mov.b32 %d, 0;
        @p ld.global.b32 x, [%at_a]; @p add.u32 x, x, 1; @!p bra OUT; mov.b32 %d, x; OUT:"""
    values = np.arange(96, dtype=np.uint32)
    agree(probe(body + " add.u32 %d, %d, 0;", "u4", values), np.where(values < 50, values + 1, 0)
          .astype(np.uint32), values)  # fmt: skip


def test_a_read_at_the_very_last_byte_is_inside() -> None:
    ptx = """.visible .entry k(.param .u64 p, .param .u64 q) { .reg .b64 %p, %q; .reg .b32 %v;
        ld.param.u64 %p, [p]; ld.param.u64 %q, [q]; ld.global.u8 %v, [%p+12];
        st.global.u8 [%q+2], %v; ret; }"""
    values, out = np.arange(13, dtype=np.uint8), np.zeros(3, np.uint8)
    run_ptx(ptx, "k", 1, 1, values, out)
    assert out.tolist() == [0, 0, 12]


def test_selp_may_pass_over_a_value_never_written() -> None:
    """Compilers emit this after a loop that may run zero times; only one operand is selected."""
    body = """.reg .pred p; .reg .b32 x, y; setp.lt.u32 p, %a, 50; @!p bra SKIP; add.u32 x, %a, 7;
        SKIP: selp.b32 %d, x, %a, p; setp.ge.u32 p, %a, 50; selp.b32 y, %a, x, p; mov.b32 %e, y;"""
    values = np.arange(96, dtype=np.uint32)
    want = np.where(values < 50, values + 7, values).astype(np.uint32)
    first, second = probe(body, "u4 u4", values)
    agree(first, want, values)
    agree(second, want, values)
