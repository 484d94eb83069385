"""cp.async.mbarrier.arrive: an mbarrier that waits for the copies of the threads that arrive."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import launch
from ptx_emulator.errors import MbarrierMisuse
from tests.ptx_emulator.test_conformance import Array
from tests.ptx_emulator.test_conformance_planted import SEEDS, assert_reported, planted
from tests.support.hopper_ptx import PREAMBLE, hopper_ptx

# Two warps copy tiles of 1024 words into two stages, two other warps write them to `to`.
CUDA = r"""
#define ARGS (const u* in, u* to, int tiles)
__device__ __forceinline__ void copy(u* s, const u* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(SM(s)), "l"(from) : "memory");
}
__device__ __forceinline__ void after_copies(ull* b) {
    asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" :: "r"(SM(b)) : "memory");
}
__device__ __forceinline__ void counted_after_copies(ull* b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
                 :: "r"(SM(b)) : "memory");
}
#define PIPELINE(EXPECTED, PRODUCE, WAIT, RELEASE) \
    __shared__ __align__(16) u s[2][1024]; \
    __shared__ ull full[2], empty[2]; \
    if (T == 0) for (int i = 0; i < 2; ++i) { init(&full[i], EXPECTED); init(&empty[i], 64); } \
    __syncthreads(); \
    if (T < 64) { \
        for (int t = 0; t < tiles; ++t) { \
            if (t >= 2) wait(&empty[t % 2], (t / 2 - 1) & 1); \
            for (int i = 4 * T; i < 1024; i += 256) copy(&s[t % 2][i], in + 1024 * t + i); \
            PRODUCE \
        } \
    } else for (int t = 0; t < tiles; ++t) { \
        WAIT \
        for (int i = T - 64; i < 1024; i += 64) to[1024 * t + i] = s[t % 2][i]; \
        RELEASE \
    }
#define WAIT_FULL wait(&full[t % 2], t / 2 & 1);
#define FREE arrive(&empty[t % 2]);
KERNEL(counted, RaceError|UninitialisedRead) ARGS {
    PIPELINE(64, FIX(counted_after_copies(&full[t % 2]);) BUG(arrive(&full[t % 2]);), // BUG
             WAIT_FULL, FREE)                                                         // BUG
}
KERNEL(not_counted, RaceError|UninitialisedRead) ARGS {
    PIPELINE(64, FIX(after_copies(&full[t % 2]);) arrive(&full[t % 2]);,              // BUG
             WAIT_FULL, FREE)                                                         // BUG
}
KERNEL(arrives_before_its_copies, RaceError|UninitialisedRead) ARGS {
    __shared__ __align__(16) u s[1024];
    __shared__ ull full;
    if (T == 0) init(&full, 64);
    __syncthreads();
    if (T < 64) {
        BUG(counted_after_copies(&full);)
        for (int i = 4 * T; i < 1024; i += 256) copy(&s[i], in + i);                  // BUG
        FIX(counted_after_copies(&full);)
    } else {
        wait(&full, 0);
        for (int i = T - 64; i < 1024; i += 64) to[i] = s[i];                         // BUG
    }
}
KERNEL(reader_does_not_wait, RaceError|UninitialisedRead) ARGS {
    PIPELINE(64, counted_after_copies(&full[t % 2]);, FIX(WAIT_FULL), FREE)           // BUG
}
KERNEL(release_is_forgotten, DeadlockError) ARGS {
    PIPELINE(64, counted_after_copies(&full[t % 2]);, WAIT_FULL,
             FIX(FREE) BUG(if (T == 64) FREE))
}
KERNEL(producer_also_waits, RaceError|UninitialisedRead) ARGS {
    __shared__ __align__(16) u s[1024];
    __shared__ ull full;
    if (T == 0) init(&full, 64);
    __syncthreads();
    if (T < 64) {
        for (int i = 4 * T; i < 1024; i += 256) copy(&s[i], in + i);                  // BUG
        counted_after_copies(&full);
        asm volatile("cp.async.wait_all;" ::: "memory");
        BUG(s[T + 64] = 0;)                                                           // BUG
    } else {
        wait(&full, 0);
        for (int i = T - 64; i < 1024; i += 64) to[i] = s[i];                         // BUG
    }
}
KERNEL(one_lane_arrives_for_the_copies_of_all) ARGS {
    __shared__ __align__(16) u s[1024];
    __shared__ ull full, waited;
    if (T == 0) { init(&full, FIX(64) BUG(2)); init(&waited, 64); }
    __syncthreads();
    if (T < 64) {
        for (int i = 4 * T; i < 1024; i += 256) copy(&s[i], in + i);                  // BUG
        BUG(if (T % 32 == 0)) counted_after_copies(&full);
        asm volatile("cp.async.wait_all;" ::: "memory");
        arrive(&waited);
    } else {
        wait(&full, 0);
        for (int i = T - 64; i < 1024; i += 64) to[i] = s[i];                         // BUG
        wait(&waited, 0);
    }
}
// Some lanes announce something else, after all of them have arrived for their copies.
KERNEL(announcement_of_some_lanes_says_nothing_of_copies, RaceError|UninitialisedRead) ARGS {
    __shared__ __align__(16) u s[1024];
    __shared__ ull full, told;
    __shared__ bool valid[64];
    if (T == 0) { init(&full, 64); init(&told, 8); }
    __syncthreads();
    if (T < 64) {
        for (int i = 4 * T; i < 1024; i += 256) copy(&s[i], in + i);                  // BUG
        counted_after_copies(&full);
        if (T % 8 == 0) { valid[T] = true; arrive(&told); }
    } else {
        FIX(wait(&full, 0);)
        wait(&told, 0);
        for (int i = T - 64; i < 1024; i += 64) { to[i] = s[i] * valid[i & 56]; s[i] = 0; } // BUG
    }
}
"""
PIPELINES = ("counted", "not_counted", "reader_does_not_wait", "release_is_forgotten")
KERNELS = planted(CUDA)


def run(kernel: str, fixed: bool, seed: int | None) -> tuple[Array, Array]:
    source = np.arange(5 * 1024, dtype=np.uint32)
    target = np.zeros_like(source)
    tiles = 5 if kernel in PIPELINES else 1
    launch(hopper_ptx(CUDA, fixed), kernel, 1, 128, [source, target, tiles], order_seed=seed)
    return source[: 1024 * tiles], target[: 1024 * tiles]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_correct_twin_runs(kernel: str, seed: int | None) -> None:
    source, target = run(kernel, True, seed)
    assert (source == target).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_planted_bug_is_named(kernel: str, seed: int | None) -> None:
    assert_reported(PREAMBLE + CUDA, kernel, lambda: run(kernel, False, seed))


def test_an_arrival_that_init_does_not_count_needs_no_inc() -> None:
    """With .noinc one arrival too many is one that the mbarrier does not expect."""
    source = CUDA.replace("init(&full[i], EXPECTED)", "init(&full[i], 32)")
    data = np.zeros(5 * 1024, np.uint32)
    with pytest.raises(MbarrierMisuse, match="more arrivals"):
        launch(hopper_ptx(source, True), "counted", 1, 128, [data, data.copy(), 1])


def test_the_pending_count_is_that_before_the_arrival() -> None:
    source = r"""
KERNEL(k) (u* to) {
    __shared__ ull room;
    if (T == 0) {
        init(&room, 5);
        for (int i = 0; i < 4; ++i) {
            ull state; u count;
            asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];"
                         : "=l"(state) : "r"(SM(&room)) : "memory");
            asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(count) : "l"(state));
            to[i] = count;
        }
    }
}"""
    out = np.zeros(4, np.uint32)
    launch(hopper_ptx(source), "k", 1, 32, [out])
    assert out.tolist() == [5, 4, 3, 2]
