"""Bugs that hardware often hides: lanes that are not synchronised, waits that are not loops, phases
that overtake a waiter, an mbarrier that the asynchronous proxy may not see.

As in test_conformance_planted, every kernel is correct when compiled with -DFIXED, and lines that
an error may refer to end in // BUG.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ptx_emulator import TensorMap, launch
from ptx_emulator.errors import RaceError
from tests.ptx_emulator.test_conformance import Array
from tests.ptx_emulator.test_conformance_planted import SEEDS, assert_reported, planted
from tests.support.hopper_ptx import PREAMBLE, hopper_ptx

CUDA = r"""
#define ARGS (const int* in, int* out)
#define LANE (T % 32)
KERNEL(neighbour_without_syncwarp, RaceError, lanes of one warp) ARGS {
    __shared__ int s[128];
    s[T] = in[T];                                                   // BUG
    FIX(__syncwarp();)
    out[T] = s[T ^ 1];                                              // BUG
}
KERNEL(neighbour_in_a_branch, RaceError, lanes of one warp) ARGS {
    __shared__ int s[128];
    if (LANE < 16) {
        s[T] = in[T];                                               // BUG
        FIX(__syncwarp(0xffff);)
        out[T] = s[T ^ 1];                                          // BUG
    }
}
KERNEL(only_half_of_the_lanes_synchronise, RaceError, lanes of one warp) ARGS {
    __shared__ int s[128];
    s[T] = in[T];                                                   // BUG
    FIX(__syncwarp();) BUG(if (LANE < 16) __syncwarp(0xffff); else __syncwarp(0xffff0000);)
    out[T] = s[T ^ 16];                                             // BUG
}
KERNEL(overwritten_before_others_have_read, RaceError, lanes of one warp) ARGS {
    __shared__ int s[128];
    s[T] = in[T];
    __syncwarp();
    int x = s[T ^ 1];                                               // BUG
    FIX(__syncwarp();)
    s[T] = 2 * x;                                                   // BUG
    __syncwarp();
    out[T] = s[T];
}
KERNEL(one_lane_writes_for_all, RaceError, lanes of one warp) ARGS {
    __shared__ int s[4];
    if (T < 4) s[T] = 0;
    __syncthreads();
    if (LANE == 0) s[T / 32] = in[T];                               // BUG
    FIX(__syncwarp();)
    out[T] = s[T / 32];                                             // BUG
}
KERNEL(one_lane_collects, RaceError, lanes of one warp) ARGS {
    __shared__ int s[128];
    s[T] = in[T];                                                   // BUG
    FIX(__syncwarp();)
    if (LANE == 0) { out[T] = 0; for (int i = 0; i < 32; ++i) out[T] += s[T + i]; } // BUG
}
KERNEL(reduction_in_a_warp, RaceError, lanes of one warp) ARGS {
    __shared__ int s[128];
    s[T] = in[T];
    __syncwarp();
    for (int d = 16; d; d /= 2) {
        if (LANE < d) s[T] += s[T + d];                             // BUG
        FIX(__syncwarp();)
    }
    __syncwarp();
    out[T] = s[T - LANE];
}
KERNEL(matrix_of_other_lanes, RaceError, lanes of one warp) ARGS {
    __shared__ __align__(16) int s[128];
    unsigned x;
    s[T] = in[T];                                                   // BUG
    FIX(__syncwarp();)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"  // BUG
                 : "=r"(x) : "r"(SM(s + T / 32 * 32 + LANE % 8 * 4)) : "memory");
    out[T] = x;
}
KERNEL(copies_of_other_lanes, RaceError, lanes of one warp) ARGS {
    __shared__ __align__(16) int s[128];
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(SM(s + T)), "l"(in + T)); // BUG
    asm volatile("cp.async.wait_all;" ::: "memory");
    FIX(__syncwarp();)
    out[T] = s[T ^ 1];                                              // BUG
}
KERNEL(bulk_store_of_other_lanes, RaceError, lanes of one warp) ARGS {
    __shared__ __align__(128) int s[32];
    if (T < 32) {
        s[T] = in[T];                                               // BUG
        fence_async();
        FIX(__syncwarp();)
        if (T == 0) { store_bulk(out, s, 128); commit(); wait_read<0>(); }  // BUG
    }
}
KERNEL(vote_outside_the_mask, BarrierDivergence) ARGS {
    out[T] = __ballot_sync(FIX(0xffffffff) BUG(0x0000ffff), in[T] > 3);     // BUG
}
KERNEL(shuffle_outside_the_mask, BarrierDivergence) ARGS {
    if (LANE < FIX(16) BUG(17)) out[T] = __shfl_xor_sync(0xffff, in[T], 1); // BUG
}
KERNEL(reduction_outside_the_mask, BarrierDivergence) ARGS {
    unsigned mask = FIX(0xffffffff) BUG(1u << LANE / 2);
    out[T] = __reduce_add_sync(mask, in[T]);                        // BUG
}
KERNEL(barrier_of_a_warp_outside_the_mask, BarrierDivergence) ARGS {
    __syncwarp(FIX(0xffffffff) BUG(0x7fffffff));                    // BUG
    out[T] = in[T];
}
__device__ __forceinline__ u try_once(ull* b, u parity) {
    u done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                 " selp.b32 %0, 1, 0, p; }" : "=r"(done) : "r"(SM(b)), "r"(parity) : "memory");
    return done;
}
KERNEL(a_wait_that_may_give_up, MbarrierMisuse) ARGS {
    __shared__ __align__(16) int s[128];
    __shared__ ull full[16];
    if (T == 0) { for (int i = 0; i < 16; ++i) init(&full[i], 1); fence_init(); }
    __syncthreads();
    for (int i = 0; i < 16; ++i) {
        if (T == 0) { expect(&full[i], 512); load_bulk(s, in, 512, &full[i]); }
        FIX(while (!try_once(&full[i], 0)) {}) BUG(try_once(&full[i], 0);)  // BUG
        out[T] = s[T];
        __syncthreads();
    }
}
KERNEL(no_fence_after_init, FenceError, mbarrier_init_fence) ARGS {
    __shared__ __align__(16) int s[128];
    __shared__ ull full;
    if (T == 0) { init(&full, 1); FIX(fence_init();) }
    __syncthreads();
    if (T == 0) { expect(&full, 512); load_bulk(s, in, 512, &full); }  // BUG
    wait(&full, 0);
    out[T] = s[T];
}
KERNEL(fence_before_init, FenceError, mbarrier_init_fence) ARGS {
    __shared__ __align__(16) int s[128];
    __shared__ ull full;
    if (T == 0) { BUG(fence_async();) init(&full, 1); FIX(fence_async();) }
    __syncthreads();
    if (T == 64) { expect(&full, 512); load_bulk(s, in, 512, &full); }  // BUG
    wait(&full, 0);
    out[T] = s[T];
}
KERNEL(a_producer_that_nothing_holds_back, RaceError, finds the same parity) ARGS {
    __shared__ ull turn, seen;
    if (T == 0) { init(&turn, 1); init(&seen, 1); }
    __syncthreads();
    if (T == 0) for (int i = 0; i < 5; ++i) {
        arrive(&turn);
        FIX(wait(&seen, i & 1);)
    }
    if (T == 32) for (int i = 0; i < 5; ++i) {
        wait(&turn, i & 1);                                         // BUG
        out[i] = i + 1;
        arrive(&seen);
    }
}
KERNEL(one_warp_releases_for_two, RaceError, finds the same parity) ARGS {
    __shared__ ull full, empty;
    if (T == 0) { init(&full, 1); init(&empty, FIX(2) BUG(1)); }
    __syncthreads();
    if (T == 0) for (int i = 0; i < 6; ++i) {
        if (i) wait(&empty, (i - 1) & 1);
        arrive(&full);
    }
    if (T == 32 || T == 64) for (int i = 0; i < 6; ++i) {
        wait(&full, i & 1);                                         // BUG
        out[T + i] = i + 1;
        if (T == 32 FIX(|| true)) arrive(&empty);
    }
}
KERNEL(one_lane_releases_what_all_have_read, RaceError, some lanes of a warp arrive) ARGS {
    __shared__ __align__(16) int s[32];
    __shared__ ull full, empty;
    if (T == 0) { init(&full, 1); init(&empty, 1); fence_init(); }
    __syncthreads();
    if (T == 0) for (int i = 0; i < 4; ++i) {
        if (i) wait(&empty, (i - 1) & 1);
        expect(&full, 128); load_bulk(s, in + 32 * i, 128, &full);      // BUG
    }
    if (T >= 32 && T < 64) for (int i = 0; i < 4; ++i) {
        wait(&full, i & 1);
        out[32 * i + LANE] = s[31 - LANE];                          // BUG
        FIX(__syncwarp();)
        if (T == 32) arrive(&empty);
    }
}
KERNEL(one_lane_announces_what_all_have_written, RaceError, some lanes of a warp arrive) ARGS {
    __shared__ int s[32];
    __shared__ ull full;
    if (T == 0) init(&full, 1);
    __syncthreads();
    if (T < 32) {
        s[T] = in[T];                                               // BUG
        FIX(__syncwarp();)
        if (T == 0) arrive(&full);
    } else {
        wait(&full, 0);
        out[T] = s[31 - LANE];                                      // BUG
    }
}
"""
KERNELS = planted(CUDA)


def run(kernel: str, fixed: bool, seed: int | None, allow: tuple[str, ...] = ()) -> Array:
    values, out = np.arange(128, dtype=np.int32) * 3 + 1, np.zeros(128, np.int32)
    launch(hopper_ptx(CUDA, fixed), kernel, 1, 128, [values, out], order_seed=seed, allow=allow)
    return out


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_planted_bug_is_named(kernel: str) -> None:
    for seed in SEEDS:
        assert_reported(PREAMBLE + CUDA, kernel, partial(run, kernel, False, seed))


@pytest.mark.parametrize("kernel", KERNELS)
def test_its_correct_twin_runs(kernel: str) -> None:
    for seed in (*SEEDS, 3, 4):
        assert run(kernel, True, seed).any()


WARP_SYNCHRONOUS = [name for name, (_, said) in KERNELS.items() if said == "lanes of one warp"]


@pytest.mark.parametrize("kernel", WARP_SYNCHRONOUS)
def test_lanes_that_execute_together_are_allowed_by_name(kernel: str) -> None:
    with pytest.raises(RaceError, match="warp_synchronous"):
        run(kernel, False, None)
    assert run(kernel, False, None, ("warp_synchronous",)).any()


def test_an_mbarrier_without_a_fence_is_allowed_by_name() -> None:
    out = run("no_fence_after_init", False, None, ("mbarrier_init_fence",))
    assert (out == np.arange(128) * 3 + 1).all()


CLEAN = r"""
#define ARGS (const int* in, int* out)
KERNEL(each_lane_its_own) ARGS {            // neither syncwarp nor barrier is needed
    __shared__ int s[128];
    s[T] = in[T];
    s[T] += 1;
    out[T] = s[T];
}
KERNEL(an_exchange_synchronises) ARGS {
    __shared__ int s[128];
    s[T] = in[T];
    int any = __any_sync(0xffffffff, in[T] > 0);
    out[T] = s[T ^ 1] + any;
}
KERNEL(tiles_of_eight_lanes) ARGS {
    __shared__ int s[128];
    unsigned mask = 0xffu << (T % 32 / 8 * 8);
    for (int d = 4; d; d /= 2) {
        s[T] = in[T];
        __syncwarp(mask);
        out[T] = s[T ^ d];
        __syncwarp(mask);
    }
}
KERNEL(half_a_warp_has_left) ARGS {
    __shared__ int s[128];
    if (T % 32 >= 16) { out[T] = 1; return; }
    s[T] = in[T];
    __syncwarp(0xffff);
    out[T] = s[T ^ 1];
}
KERNEL(all_lanes_store_one_value) ARGS {
    __shared__ int s[4];
    s[T / 32] = T / 32 + 1;
    out[T] = s[T / 32];
}
KERNEL(atomics_of_lanes) ARGS {
    __shared__ int sum;
    if (T == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, in[T]);
    __syncthreads();
    out[T] = sum;
}
KERNEL(through_an_mbarrier) ARGS {          // lane 1 waits for what lane 0 of its warp announces
    __shared__ int s[1];
    __shared__ ull full;
    if (T == 0) init(&full, 1);
    __syncthreads();
    if (T == 0) { s[0] = in[0]; arrive(&full); }
    if (T == 1) { wait(&full, 0); out[0] = s[0]; }
    __syncthreads();
    out[T] += 1;
}
"""


@pytest.mark.parametrize("kernel", planted(CLEAN))
def test_what_orders_lanes_is_accepted(kernel: str) -> None:
    values = np.arange(128, dtype=np.int32)
    for seed in (*SEEDS, 3):
        out = np.zeros(128, np.int32)
        launch(hopper_ptx(CLEAN), kernel, 1, 128, [values, out], order_seed=seed)
        assert out.any()


def test_the_map_of_a_copy_whose_mbarrier_is_fenced_by_its_reader() -> None:
    """A fence in another warp counts if that warp is ordered after the initialisation."""
    source = r"""
KERNEL(k) (MAP map, int* out) {
    __shared__ __align__(128) int s[32];
    __shared__ ull full;
    if (T == 0) init(&full, 1);
    __syncthreads();
    if (T == 32) { fence_async(); expect(&full, 128); load1(s, &map, 0, &full); }
    wait(&full, 0);
    if (T < 32) out[T] = s[T];
}"""
    values, out = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    launch(hopper_ptx(source), "k", 1, 64, [TensorMap(values, (32,)), out])
    assert (out == values).all()
