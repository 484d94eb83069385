"""Bugs planted in locks, flags and counts that blocks and warps exchange by atomics.

As in `test_conformance_planted`, every kernel is correct with -DFIXED.
"""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import launch, severity
from tests.ptx_emulator.test_conformance import Array
from tests.ptx_emulator.test_conformance_planted import SEEDS, assert_reported, planted
from tests.support.hopper_ptx import PREAMBLE, hopper_ptx

# Two blocks of 64 threads.
CUDA = r"""
#define ARGS (u* data, u* out, u* flag)
#define ATOM(name, text) \
    __device__ __forceinline__ u name(u* p, u a) { \
        u r; \
        asm volatile("atom." text ".b32 %0, [%1], %2;" : "=r"(r) : "l"(p), "r"(a) : "memory"); \
        return r; \
    }
#define CAS(name, order) \
    __device__ __forceinline__ u name(u* p, u a, u b) { \
        u r; \
        asm volatile("atom." order ".gpu.global.cas.b32 %0, [%1], %2, %3;" \
                     : "=r"(r) : "l"(p), "r"(a), "r"(b) : "memory"); \
        return r; \
    }
ATOM(swap, "relaxed.gpu.global.exch")
ATOM(swap_release, "release.gpu.global.exch")
CAS(cas, "relaxed")
CAS(cas_acquire, "acquire")
__device__ __forceinline__ void set(u* p, u a) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" :: "l"(p), "r"(a) : "memory");
}
__device__ __forceinline__ void set_release(u* p, u a) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" :: "l"(p), "r"(a) : "memory");
}
__device__ __forceinline__ u get_acquire(u* p) {
    u r;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
    return r;
}
KERNEL(lock_without_a_fence) ARGS {
    if (T) return;
    while (cas(flag, 0, 1)) {}
    FIX(__threadfence();)
    data[0] += 1;                                                               // BUG
    __threadfence(); swap(flag, 0);
}
KERNEL(unlock_without_a_fence) ARGS {
    if (T) return;
    while (cas(flag, 0, 1)) {}
    __threadfence();
    data[0] += 1;                                                               // BUG
    FIX(__threadfence();) swap(flag, 0);
}
KERNEL(a_lock_of_several_warps_of_each_block) ARGS {
    if (T % 32) return;
    while (cas(flag, 0, 1)) {}
    __threadfence();
    data[0] += T == 0;                                                          // BUG
    FIX(__threadfence();) swap(flag, 0);
}
KERNEL(lock_that_does_not_acquire) ARGS {
    if (T) return;
    while (BUG(cas) FIX(cas_acquire)(flag, 0, 1)) {}
    data[0] += 1;                                                               // BUG
    swap_release(flag, 0);
}
KERNEL(unlock_that_does_not_release) ARGS {
    if (T) return;
    while (cas_acquire(flag, 0, 1)) {}
    data[0] += 1;                                                               // BUG
    BUG(swap) FIX(swap_release)(flag, 0);
}
KERNEL(a_flag_that_is_swapped) ARGS {
    if (T) return;
    if (blockIdx.x == 0) { data[0] = 1; set_release(flag, 1); return; }         // BUG
    while (!swap(flag, 0)) {}
    FIX(__threadfence();)
    data[0] *= 2;                                                               // BUG
}
KERNEL(a_release_at_another_address) ARGS {
    if (T) return;
    if (blockIdx.x == 0) {
        data[0] = 1;                                                            // BUG
        set_release(flag + BUG(1) FIX(0), 1); set(flag, 1); return;
    }
    while (!get_acquire(flag)) {}
    data[0] *= 2;                                                               // BUG
}
KERNEL(a_store_acquires_nothing) ARGS {
    if (T) return;
    if (blockIdx.x == 0) { data[0] = 1; __threadfence(); atomicAdd(flag, 1); return; } // BUG
    FIX(while (!get_acquire(flag)) {})
    set(flag, 2); atomicAdd(flag + 1, 1);
    data[0] *= 2;                                                               // BUG
}
KERNEL(an_addition_without_a_result_acquires_nothing) ARGS {
    if (T) return;
    if (blockIdx.x == 0) { data[0] = 1; __threadfence(); atomicAdd(flag, 1); return; } // BUG
    FIX(while (!get_acquire(flag)) {})
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" :: "l"(flag) : "memory");
    __threadfence();
    data[0] *= 2;                                                               // BUG
}
KERNEL(the_last_block_reads_what_no_fence_published) ARGS {
    // With the fence, as in NVIDIA's guide: the barrier stands for a fence after the atomic.
    __shared__ bool last;
    out[64 + 64 * blockIdx.x + T] = 1;                                          // BUG
    FIX(__threadfence();)
    __syncthreads();
    if (T == 0) last = atomicAdd(flag, 1) == 1;
    __syncthreads();
    if (!last || T) return;
    data[0] = 0;
    for (int i = 0; i < 2; ++i) data[0] += out[64 + 64 * i];                    // BUG
}
KERNEL(a_flag_that_one_lane_sets_for_others, RaceError, some lanes of a warp arrive) ARGS {
    __shared__ u s[32], done;
    if (T == 0) done = 0;
    __syncthreads();
    if (T < 32) {
        s[T] = T;                                                               // BUG
        FIX(__syncwarp();)
        if (T == 0) { __threadfence_block(); atomicExch(&done, 1); }
        return;
    }
    if (T == 32) while (!atomicAdd(&done, 0)) {}
    __threadfence_block();
    __syncwarp();
    out[T + 64 * blockIdx.x] = s[63 - T];                                       // BUG
    if (T == 32 && blockIdx.x == 0) data[0] = 2;
}
KERNEL(a_flag_released_by_one_lane_for_others, RaceError, some lanes of a warp arrive) ARGS {
    __shared__ u s[32];
    if (T < 32) {
        s[T] = T;                                                               // BUG
        FIX(__syncwarp();)
        if (T == 0) set_release(flag + blockIdx.x, 1);
        return;
    }
    if (T == 32) while (!get_acquire(flag + blockIdx.x)) {}
    __syncwarp();
    out[T + 64 * blockIdx.x] = s[63 - T];                                       // BUG
    if (T == 32 && blockIdx.x == 0) data[0] = 2;
}
KERNEL(a_flag_of_one_lane_and_a_count_of_all, RaceError, some lanes of a warp arrive) ARGS {
    __shared__ u s[32];
    u* mine = flag + 2 * blockIdx.x;
    if (T < 32) {
        s[T] = T;                                                               // BUG
        if (T == 0) set_release(mine, 1);
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(mine + 1) : "memory");
        return;
    }
    if (T == 32) while (get_acquire(mine + BUG(0) FIX(1)) != BUG(1) FIX(32)) {}
    __syncwarp();
    out[T + 64 * blockIdx.x] = s[63 - T];                                       // BUG
    if (T == 32 && blockIdx.x == 0) data[0] = 2;
}
#define TWO_WARPS_READ \
    if (T == 0) data[0] = 1; \
    __syncthreads(); \
    out[T] = data[0]; \
    FIX(__syncthreads();) \
    if (T == 32) { __threadfence(); swap(flag, 1); }
KERNEL(a_flag_of_one_of_two_warps_that_read) ARGS {
    if (blockIdx.x == 0) {
        TWO_WARPS_READ
    } else if (T == 0) {
        while (!get_acquire(flag)) {}
        data[0] = 2;                                                            // BUG
    }
}
KERNEL(a_read_after_a_flag_of_one_of_two_warps_that_read) ARGS {
    if (blockIdx.x == 0) {
        TWO_WARPS_READ
    } else if (T == 0) {
        while (!get_acquire(flag)) {}
        out[64] = data[0];
        data[0] = 2;                                                            // BUG
    }
}
KERNEL(lock_in_shared_memory) ARGS {
    __shared__ u lock, sum;
    if (T == 0) lock = sum = 0;
    __syncthreads();
    if (T % 32 == 0) {
        while (atomicCAS(&lock, 0, 1)) {}
        FIX(__threadfence_block();)
        sum += 1;                                                               // BUG
        __threadfence_block(); atomicExch(&lock, 0);
    }
    __syncthreads();
    if (T == 0 && blockIdx.x == 0) data[0] = sum;
}
KERNEL(a_lock_is_not_freed, DeadlockError) ARGS {
    if (T) return;
    while (cas_acquire(flag, 0, 1)) __nanosleep(20);                            // BUG
    data[0] += 1;
    FIX(swap_release(flag, 0);)
}
"""
KERNELS = planted(PREAMBLE + CUDA)


def run(kernel: str, fixed: bool, seed: int | None) -> Array:
    data, out, flag = (np.zeros(n, np.uint32) for n in (1, 192, 4))
    launch(hopper_ptx(CUDA, fixed), kernel, 2, 64, [data, out, flag], order_seed=seed)
    return data


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_bug_is_named_at_its_line(kernel: str, seed: int | None) -> None:
    error = assert_reported(PREAMBLE + CUDA, kernel, lambda: run(kernel, False, seed))
    forgiven = kernel in (
        *("lock_without_a_fence", "lock_that_does_not_acquire", "a_flag_that_is_swapped"),
        *("lock_in_shared_memory", "a_flag_of_one_lane_and_a_count_of_all"),
        *("a_flag_that_one_lane_sets_for_others", "a_flag_released_by_one_lane_for_others"),
    )
    assert severity(error) == ("by-the-letter" if forgiven else "error")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_its_correct_twin_runs(kernel: str, seed: int | None) -> None:
    assert (run(kernel, True, seed) == 2).all()
