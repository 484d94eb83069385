"""Named barriers with thread counts, producers and consumers, and cp.async with its groups."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx_emulator.test_conformance import run, run_ptx

SEEDS = [None, 1, 2, 3]

CUDA = r"""
typedef unsigned u;
#define SMEM(p) ((u)__cvta_generic_to_shared(p))
#define SYNC(id, n) asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : "memory")
#define ARRIVE(id, n) asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(n) : "memory")
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
#define WAIT_ALL asm volatile("cp.async.wait_all;" ::: "memory")
#define COPY(to, from, n) asm volatile( \
    "cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(to), "l"(from), "n"(n) : "memory")
#define COPY16(to, from) \
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory")

extern "C" __global__ void halves(const int* in, int* out) {
    __shared__ int s[128];                       // two teams of two warps that never meet
    int t = threadIdx.x, team = t / 64, at = t % 64;
    for (int turn = 0; turn < 3 + 2 * team; ++turn) {
        s[t] = in[t] + turn;
        SYNC(team + 1, 64);
        out[turn * 128 + t] = s[team * 64 + 63 - at];
        SYNC(team + 1, 64);
    }
}
extern "C" __global__ void pipeline(const int* in, int* out, int steps) {
    __shared__ int ring[2][32];                  // warp 0 fills, warp 1 drains; 1+i full, 3+i empty
    int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        for (int i = 0; i < steps; ++i) {
            if (i >= 2) SYNC(3 + i % 2, 64);
            ring[i % 2][lane] = in[i * 32 + lane] * 3;
            ARRIVE(1 + i % 2, 64);
        }
    } else {
        for (int i = 0; i < steps; ++i) {
            SYNC(1 + i % 2, 64);
            out[i * 32 + lane] = ring[i % 2][31 - lane];
            if (i + 2 < steps) ARRIVE(3 + i % 2, 64);
        }
    }
}
extern "C" __global__ void specialised(const int* in, int* out, int steps) {
    __shared__ int ring[3][64];                  // one producer warp, two consumer warps
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
        for (int i = 0; i < steps; ++i) {
            if (i >= 3) SYNC(4 + i % 3, 96);
            ring[i % 3][lane] = in[i * 64 + lane];
            ring[i % 3][lane + 32] = in[i * 64 + 32 + lane];
            __threadfence_block();
            ARRIVE(1 + i % 3, 96);
        }
    } else {
        int sum = 0;
        for (int i = 0; i < steps; ++i) {
            SYNC(1 + i % 3, 96);
            sum = sum * 5 + ring[i % 3][(warp - 1) * 32 + (lane + i) % 32];
            if (i + 3 < steps) ARRIVE(4 + i % 3, 96);
        }
        out[threadIdx.x - 32] = sum;
    }
}
extern "C" __global__ void counts(const int* in, int* out) {
    int x = in[threadIdx.x];
    out[3 * threadIdx.x] = __syncthreads_count(x > 5);
    out[3 * threadIdx.x + 1] = __syncthreads_and(x != 77);
    out[3 * threadIdx.x + 2] = __syncthreads_or(x == 77);
}
extern "C" __global__ void counts_of_local(const int* in, int* out) {
    int many[4], x = in[threadIdx.x];            // a variable index: it is in local memory
    for (int i = 0; i < 4; ++i) many[i] = x + i;
    out[3 * threadIdx.x] = __syncthreads_count(many[x & 3] > 5);
    out[3 * threadIdx.x + 1] = __syncthreads_and(many[x & 3] != 77);
    out[3 * threadIdx.x + 2] = __syncthreads_or(many[x & 3] == 77);
}
extern "C" __global__ void tree(const float* in, float* out) {
    __shared__ float s[256];
    int t = threadIdx.x;
    s[t] = in[blockIdx.x * 256 + t];
    __syncthreads();
    for (int n = 128; n > 0; n /= 2) {
        if (t < n) s[t] += s[t + n];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = s[0];
}
#define COPIES(NAME, N)                                                                    \
extern "C" __global__ void NAME(const char* in, char* out, int pieces, const int* sizes) { \
    __shared__ __align__(16) char s[64 * N];                                               \
    int t = threadIdx.x;                                                                   \
    for (int i = 0; i < N; ++i) s[t * N + i] = 0x5a;                                       \
    __syncthreads();                                                                       \
    if (t < pieces)                                                                        \
        asm volatile("cp.async." FORM ".shared.global [%0], [%1], " #N ", %2;"             \
            :: "r"(SMEM(s + t * N)), "l"(in + t * N), "r"(sizes[t]) : "memory");           \
    WAIT_ALL; __syncthreads();                                                             \
    for (int i = 0; i < N; ++i) out[t * N + i] = s[(63 - t) * N + i];                      \
}
#define FORM "ca"
COPIES(copy4, 4)
COPIES(copy8, 8)
#undef FORM
#define FORM "cg"
COPIES(copy16, 16)
extern "C" __global__ void plain_forms(const char* in, char* out) {
    __shared__ __align__(16) char s[32][32];
    int t = threadIdx.x;
    u to = SMEM(s[t]);
    const char* from = in + 32 * t;
    COPY(to, from, 4); COPY(to + 4, from + 4, 4); COPY(to + 8, from + 8, 8);
    COPY16(to + 16, from + 16);
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;\n" ::: "memory");
    __syncwarp();
    for (int i = 0; i < 32; ++i) out[32 * t + i] = s[31 - t][i];
}
extern "C" __global__ void groups(const float4* in, float4* out, int steps) {
    __shared__ float4 ring[3][64];               // three stages in flight, one barrier a step
    int t = threadIdx.x;
    for (int i = 0; i < 2; ++i) {
        if (i < steps) COPY16(SMEM(&ring[i][t]), in + 64 * i + t);
        COMMIT;
    }
    for (int i = 0; i < steps; ++i) {
        WAIT(1);
        __syncthreads();
        if (i + 2 < steps) COPY16(SMEM(&ring[(i + 2) % 3][t]), in + 64 * (i + 2) + t);
        COMMIT;
        float4 x = ring[i % 3][(t + 17) % 64];
        out[64 * i + t] = make_float4(x.w, x.z, x.y, x.x);
    }
}
extern "C" __global__ void too_early(const float* in, float* out) {
    __shared__ float s[32];
    int t = threadIdx.x;
    s[t] = -1.f;
    COPY(SMEM(s + t), in + t, 4);
    COMMIT;
    COMMIT;
    WAIT(2);                                     // nothing is complete yet
    out[t] = *(volatile float*)&s[t];
    WAIT(1);                                     // the first group is
    out[32 + t] = *(volatile float*)&s[t];
}
extern "C" __global__ void uncommitted(const float* in, float* out) {
    __shared__ float s[32];
    int t = threadIdx.x;
    s[t] = -1.f;
    COPY(SMEM(s + t), in + t, 4);                // in no group: wait_group does not cover it
    WAIT(0);
    out[t] = *(volatile float*)&s[t];
    WAIT_ALL;
    out[32 + t] = *(volatile float*)&s[t];
}
extern "C" __global__ void syncwarp(const int* in, int* out) {
    __shared__ int s[64];
    int t = threadIdx.x, base = t & 32, x = in[t];
    for (int d = 1; d < 32; d *= 2) {
        s[t] = x;
        __syncwarp();
        if ((t & 31) >= d) x += s[base + (t & 31) - d];
        __syncwarp();
    }
    out[t] = x;
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_named_barriers_keep_two_teams_apart(seed: int | None) -> None:
    values, out = np.arange(128, dtype=np.int32) * 7, np.full(5 * 128, -1, np.int32)
    run(CUDA, "halves", (1,), (128,), values, out, seed=seed)
    mirrored = values.reshape(2, 64)[:, ::-1]
    for turn, row in enumerate(out.reshape(5, 2, 64)):
        assert (row[1] == mirrored[1] + turn).all()
        assert (row[0] == (mirrored[0] + turn if turn < 3 else -1)).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_producer_arrives_and_a_consumer_waits(steps: int, seed: int | None) -> None:
    values = np.random.default_rng(1).integers(0, 999, (steps, 32)).astype(np.int32)
    out = np.zeros_like(values)
    run(CUDA, "pipeline", (1,), (64,), values, out, np.int32(steps), seed=seed)
    assert (out == 3 * values[:, ::-1]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_one_producer_warp_feeds_two_consumer_warps(seed: int | None) -> None:
    steps = 8
    values = np.random.default_rng(2).integers(0, 99, (steps, 2, 32)).astype(np.int32)
    out, want = np.zeros((2, 32), np.int32), np.zeros((2, 32), np.int64)
    run(CUDA, "specialised", (1,), (96,), values, out, np.int32(steps), seed=seed)
    for i in range(steps):
        want = want * 5 + np.roll(values[i], -i, axis=1)
    assert (out == want).all()


def test_barriers_that_combine_what_was_read_from_local_memory() -> None:
    values, out = np.arange(64, dtype=np.int32), np.zeros((64, 3), np.int32)
    run(CUDA, "counts_of_local", (1,), (64,), values, out)
    read = values + (values & 3)
    assert (out == [(read > 5).sum(), (read != 77).all(), (read == 77).any()]).all()


def test_barriers_that_count_and_combine_predicates() -> None:
    values = np.random.default_rng(3).integers(0, 10, 100).astype(np.int32)
    for special in (False, True):
        if special:
            values[40] = 77
        out = np.zeros((100, 3), np.int32)
        run(CUDA, "counts", (1,), (100,), values, out)
        assert (out[:, 0] == (values > 5).sum()).all()
        assert (out[:, 1].astype(bool) == (not special)).all()
        assert (out[:, 2].astype(bool) == special).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tree_reduction(seed: int | None) -> None:
    values = np.random.default_rng(4).integers(-9, 9, (3, 256)).astype(np.float32)
    out = np.zeros(3, np.float32)
    run(CUDA, "tree", (3,), (256,), values, out, seed=seed)
    assert (out == values.sum(axis=1)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_syncwarp_orders_a_warp(seed: int | None) -> None:
    values, out = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    run(CUDA, "syncwarp", (1,), (64,), values, out, seed=seed)
    assert (out.reshape(2, 32) == values.reshape(2, 32).cumsum(axis=1)).all()


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_copies_and_fills_with_zeros(size: int) -> None:
    rng = np.random.default_rng(size)
    data = rng.integers(1, 127, (50, size)).astype(np.int8)  # the last 14 threads copy nothing
    sizes = rng.integers(0, size + 1, 64).astype(np.int32)
    sizes[[0, 1]] = 0, size
    out = np.zeros((64, size), np.int8)
    run(CUDA, f"copy{size}", (1,), (64,), data, out, np.int32(50), sizes)
    want = np.full((64, size), 0x5A, np.int8)
    want[:50] = np.where(np.arange(size) < sizes[:50, None], data, 0)
    assert (out[::-1] == want).all()


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_of_no_bytes_reads_nothing_even_past_the_end(size: int) -> None:
    data, out = np.ones((4, size), np.int8), np.ones((64, size), np.int8)
    sizes = np.where(np.arange(64) < 4, size, 0).astype(np.int32)
    run(CUDA, f"copy{size}", (1,), (64,), data, out, np.int32(64), sizes)
    assert (out[::-1] == (np.arange(64) < 4)[:, None]).all()


def test_cp_async_of_a_partial_row_reads_only_its_bytes() -> None:
    data = np.arange(1, 22, dtype=np.int8)  # 21 bytes: the second piece has five of sixteen
    out = np.zeros((64, 16), np.int8)
    sizes = np.array([16, 5] + [0] * 62, np.int32)
    run(CUDA, "copy16", (1,), (64,), data, out, np.int32(2), sizes)
    assert out[63].tolist() == data[:16].tolist()
    assert out[62].tolist() == [*data[16:].tolist(), *[0] * 11]


def test_cp_async_without_a_source_size() -> None:
    data = np.random.default_rng(5).integers(0, 127, (32, 32)).astype(np.int8)
    out = np.zeros_like(data)
    run(CUDA, "plain_forms", (1,), (32,), data, out)
    assert (out == data[::-1]).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", [1, 2, 3, 9])
def test_three_groups_in_flight_one_barrier_a_step(steps: int, seed: int | None) -> None:
    values = np.random.default_rng(6).normal(size=(steps, 64, 4)).astype(np.float32)
    out = np.zeros_like(values)
    run(CUDA, "groups", (1,), (64,), values, out, np.int32(steps), seed=seed)
    assert (out == np.roll(values, -17, axis=1)[:, :, ::-1]).all()


@pytest.mark.parametrize("kernel", ["too_early", "uncommitted"])
def test_cp_async_data_is_not_there_before_its_wait(kernel: str) -> None:
    values, out = np.arange(32, dtype=np.float32), np.zeros(64, np.float32)
    run(CUDA, kernel, (1,), (32,), values, out, check=False)
    assert (out[:32] == -1).all()
    assert (out[32:] == values).all()


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(
    "form",
    [
        *("bar.sync 0;", "barrier.sync 0;", "barrier.sync.aligned 0;", "bar.cta.sync 0;"),
        *("barrier.cta.sync.aligned 0;", "bar.sync 5, 64;", "barrier.sync %id, %count;"),
        *("bar.red.popc.u32 %count, 1, %p;", "barrier.cta.red.popc.aligned.u32 %count, 1, 64, %p;"),
    ],
)
def test_every_spelling_of_a_barrier_is_a_barrier(form: str, seed: int | None) -> None:
    ptx = f""".visible .entry k(.param .u64 p) {{ .reg .b32 %t, %s, %id, %count; .reg .b64 %p, %q;
        .reg .pred %p1; .shared .align 4 .b8 room[256]; mov.u32 %t, %tid.x; mov.u32 %id, 3;
        mov.u32 %count, 64; setp.lt.u32 %p1, %t, 40; mov.u32 %s, room; mad.lo.u32 %s, %t, 4, %s;
        st.shared.b32 [%s], %t; {form.replace("%p;", "%p1;")} mul.lo.u32 %t, %t, 4;
        mov.u32 %s, room; add.u32 %s, %s, 252; sub.u32 %s, %s, %t; ld.param.u64 %p, [p];
        cvt.u64.u32 %q, %t; add.u64 %p, %p, %q; ld.shared.b32 %t, [%s]; st.global.b32 [%p], %t;
        st.global.b32 [%p+256], %count; ret; }}"""
    out = np.zeros(128, np.uint32)
    run_ptx(ptx, "k", 1, 64, out, order_seed=seed)
    assert (out[:64] == 63 - np.arange(64)).all()
    assert (out[64:] == (40 if "popc" in form else 64)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_come_late_to_a_barrier_still_know_its_operands(seed: int | None) -> None:
    """Some lanes go round a loop first; nothing reads the operands after the barrier."""
    ptx = """.visible .entry k(.param .u64 p) { .reg .b32 %t, %n, %id, %count; .reg .b64 %p, %q;
        .reg .pred %few; mov.u32 %t, %tid.x; and.b32 %n, %t, 21; mov.u32 %id, 3;
        AGAIN: add.u32 %n, %n, 3; setp.lt.u32 %few, %n, 40; @%few bra AGAIN;
        mov.u32 %count, 64; bar.sync %id, %count;
        ld.param.u64 %p, [p]; mul.wide.u32 %q, %t, 4; add.u64 %p, %p, %q;
        st.global.b32 [%p], %n; ret; }"""
    out = np.zeros(64, np.uint32)
    run_ptx(ptx, "k", 1, 64, out, order_seed=seed)
    start = np.arange(64) & 21
    assert (out == start + 3 * -(-(40 - start) // 3)).all()
