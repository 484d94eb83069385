"""Bugs of order: volatile memory, read-only loads, sources of copies, arrivals and waits.

As in test_conformance_planted, every kernel is correct when compiled with -DFIXED, and lines that
an error may refer to end in // BUG.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.ptx_emulator.test_conformance_planted import assert_reported, planted, start_hopper
from tests.support.hopper_ptx import PREAMBLE

CUDA = r"""
#define ARGS (const int* in, int* out, int* flag)
#define LANE (T % 32)
#define COPY(to, from) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" \
                                    :: "r"(SM(to)), "l"(from) : "memory")
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
#define NAMED(op, id, n) asm volatile("bar." op " %0, %1;" :: "r"((u)(id)), "n"(n) : "memory")
#define KEEP asm volatile("" ::: "memory")
#define ONCE(kind) \
    u done; \
    asm volatile("{ .reg .pred p; mbarrier." kind ".parity.shared::cta.b64 p, [%1], %2;" \
                 " selp.b32 %0, 1, 0, p; }" : "=r"(done) : "r"(SM(b)), "r"(0) : "memory"); \
    return done;
__device__ __forceinline__ u try_once(ull* b) { ONCE("try_wait") }
__device__ __forceinline__ u test_once(ull* b) { ONCE("test_wait") }
#define TILE \
    __shared__ __align__(128) int s[128]; \
    __shared__ ull full; \
    if (T == 0) { init(&full, 1); fence_init(); } \
    __syncthreads(); \
    if (T == 0) { expect(&full, 256); load_bulk(s, flag, 256, &full); }
KERNEL(volatile_between_lanes, RaceError, lanes of one warp write and read) ARGS {
    __shared__ volatile int s[128];
    s[T] = in[T];                                                       // BUG
    __threadfence_block();
    FIX(__syncwarp();)
    out[T] = s[T ^ 1];                                                  // BUG
}
KERNEL(volatile_between_warps, RaceError, volatile orders nothing) ARGS {
    __shared__ volatile int s[128];
    s[T] = in[T];                                                       // BUG
    FIX(__syncthreads();)
    out[T] = s[127 - T];                                                // BUG
}
KERNEL(volatile_read_then_overwritten, RaceError, volatile orders nothing) ARGS {
    __shared__ volatile int s[128];
    s[T] = in[T];
    __syncthreads();
    int x = s[127 - T];                                                 // BUG
    FIX(__syncthreads();)
    s[T] = x;                                                           // BUG
    __syncthreads();
    out[T] = s[T];
}
KERNEL(volatile_in_a_warp_reduction, RaceError, volatile orders nothing) ARGS {
    __shared__ volatile int s[128];
    s[T] = in[T];
    __syncthreads();
    for (int d = 16; d; d /= 2) {
        int x = s[T] + s[T ^ d];                                        // BUG
        FIX(__syncwarp();)
        s[T] = x;                                                       // BUG
        FIX(__syncwarp();)
    }
    out[T] = s[T];
}
KERNEL(volatile_flag_without_fences, RaceError, volatile orders nothing) ARGS {
    __shared__ volatile int data, ready;
    if (T == 0) ready = 0;
    __syncthreads();
    if (T == 0) {
        data = in[5];                                                   // BUG
        FIX(__threadfence_block();)
        ready = 1;
    }
    if (T == 64) {
        while (!ready) {}
        FIX(__threadfence_block();)
        out[0] = data;                                                  // BUG
    }
}
KERNEL(volatile_flag_without_the_readers_fence, RaceError, volatile orders nothing) ARGS {
    __shared__ volatile int data, ready;
    if (T == 0) ready = 0;
    __syncthreads();
    if (T == 0) {
        data = in[5];                                                   // BUG
        __threadfence_block();
        ready = 1;
    }
    if (T == 64) {
        while (!ready) asm volatile("nanosleep.u32 20;");
        FIX(__threadfence_block();)
        out[0] = data;                                                  // BUG
    }
}
KERNEL(volatile_between_blocks, RaceError, volatile orders nothing) ARGS {
    volatile int* mail = flag;
    if (blockIdx.x == 0 && T == 0) {
        mail[5] = in[7];                                                // BUG
        FIX(__threadfence();)
        mail[0] = 3;
    }
    if (blockIdx.x == 1 && T == 0) {
        while (mail[0] != 3) {}
        FIX(__threadfence();)
        out[0] = mail[5];                                               // BUG
    }
}
KERNEL(volatile_under_a_lock_of_blocks, RaceError, volatile orders nothing) ARGS {
    volatile int* sum = flag + 1;
    if (T == 0) {
        while (atomicCAS(flag, 0, 1)) {}
        FIX(__threadfence();)
        *sum = *sum + 1;                                                // BUG
        FIX(__threadfence();)
        atomicExch(flag, 0);
    }
    out[T + 128 * blockIdx.x] = 1;
}
KERNEL(volatile_global_between_lanes, RaceError, lanes of one warp access the same bytes) ARGS {
    volatile int* mail = out + 128;
    mail[T] = in[T];                                                    // BUG
    FIX(__syncwarp();)
    out[T] = mail[T ^ 1];                                               // BUG
}
KERNEL(global_between_lanes, RaceError, lanes of one warp access the same bytes) ARGS {
    int* mail = out + 128;
    mail[T] = in[T];                                                    // BUG
    FIX(__syncwarp();) KEEP;
    out[T] = mail[T ^ 1];                                               // BUG
}
KERNEL(global_read_by_a_lane_then_overwritten, RaceError,
       lanes of one warp access the same bytes) ARGS {
    int* mail = out + 128;
    mail[T] = in[T];                                                    // BUG
    __syncwarp();
    int x = mail[T ^ 1];
    FIX(__syncwarp();) KEEP;
    mail[T] = x + 1;                                                    // BUG
}
KERNEL(an_atomic_and_a_weak_read, RaceError, a read and a write of another warp) ARGS {
    atomicAdd(flag + T / 32, 1);                                        // BUG
    FIX(__syncthreads();) KEEP;
    out[T] = flag[3 - T / 32] + 1;                                      // BUG
}
KERNEL(nc_of_what_was_written, RaceError, a load by .nc) ARGS {
    out[T] = in[T];                                                     // BUG
    __syncthreads();
    out[T + 128] = FIX(out[T ^ 1]) BUG(__ldg(out + (T ^ 1)));           // BUG
}
KERNEL(nc_of_what_is_written_later, RaceError, a load by .nc) ARGS {
    const int* same = in[0] == 1 ? out : flag;
    int x = FIX(same[T]) BUG(__ldg(same + T));                          // BUG
    out[T] = x + 1;                                                     // BUG
}
KERNEL(nc_of_what_another_block_writes, RaceError, a load by .nc) ARGS {
    if (blockIdx.x == 0 && T < 64)
        flag[T] = 5;                                                    // BUG
    if (blockIdx.x == 1)
        out[T] = __ldg(FIX(in) BUG(flag) + 32);                         // BUG
}
KERNEL(source_of_a_copy_overwritten, RaceError,
       the source of an asynchronous copy is overwritten) ARGS {
    __shared__ int s[128];
    COPY(s + T, flag + T % 64);                                         // BUG
    COMMIT;
    FIX(WAIT(0); __syncthreads();)
    if (T < 64)
        flag[T] = 1;                                                    // BUG
    WAIT(0);
    out[T] = s[T] + 1;
}
KERNEL(source_of_a_copy_overwritten_by_another_warp, RaceError,
       the source of an asynchronous copy is overwritten) ARGS {
    __shared__ int s[128];
    if (T < 64)
        COPY(s + T, flag + T);                                          // BUG
    COMMIT;
    FIX(WAIT(0);)
    __syncthreads();
    if (T >= 64)
        flag[T - 64] = 1;                                               // BUG
    WAIT(0);
    out[T] = T < 64 ? s[T] + 1 : 1;
}
KERNEL(source_of_a_copy_waited_for_without_a_barrier, RaceError, a write may overtake a read) ARGS {
    __shared__ int s[128];
    if (T < 64) COPY(s + T, flag + T);
    COMMIT;
    WAIT(0);
    FIX(__syncthreads();)
    if (T >= 64)
        flag[T - 64] = 1;                                               // BUG
    out[T] = T < 64 ? s[T] + 1 : 1;
}
KERNEL(source_of_another_group, RaceError, the source of an asynchronous copy is overwritten) ARGS {
    __shared__ int s[256];
    COPY(s + T, flag + T % 64);                                         // BUG
    COMMIT;
    COPY(s + 128 + T, in + T);
    COMMIT;
    WAIT(FIX(1) BUG(2));
    __syncthreads();
    if (T < 64)
        atomicAdd(flag + T, 1);                                         // BUG
    WAIT(0);
    out[T] = s[T] + 1;
}
KERNEL(source_of_a_bulk_copy_overwritten, RaceError,
       the source of an asynchronous copy is overwritten) ARGS {
    TILE                                                                // BUG
    FIX(wait(&full, 0);)
    __syncthreads();
    if (T == 64)
        flag[3] = 1;                                                    // BUG
    wait(&full, 0);
    out[T] = T < 64 ? s[T] + 1 : 1;
}
KERNEL(source_of_a_bulk_store_overwritten, RaceError,
       a write may overtake an asynchronous read) ARGS {
    __shared__ __align__(128) int s[128];
    s[T] = in[T];
    fence_async();
    __syncthreads();
    if (T == 0) { store_bulk(out, s, 512); commit(); FIX(wait_read<0>();) }  // BUG
    __syncthreads();
    s[T] = 1;                                                           // BUG
    if (T == 0) wait_read<0>();
}
KERNEL(arrivals_that_nothing_completes, DeadlockError, at a barrier that never completes) ARGS {
    if (T / 32 == 0)
        NAMED("arrive", 1, 64);                                         // BUG
    FIX(if (T / 32 == 1) NAMED("sync", 1, 64);)
    out[T] = 1;
}
KERNEL(arrivals_at_two_barriers, DeadlockError, at a barrier that never completes) ARGS {
    if (T / 32 < 2)
        NAMED("arrive", FIX(1) BUG(1 + T / 32), 64);                    // BUG
    out[T] = 1;
}
KERNEL(more_threads_than_a_barrier_counts, EmulatorError,
       more threads arrive at a barrier than it counts) ARGS {
    if (T / 32 < FIX(2) BUG(3))
        NAMED("sync", 1, 64);                                           // BUG
    out[T] = 1;
}
KERNEL(an_arrival_for_the_next_turn, RaceError, arrives at a barrier again) ARGS {
    __shared__ int s[64];
    if (T / 32 == 0) {
        s[T] = in[T];
        NAMED("arrive", 1, 64);                                         // BUG
        FIX(NAMED("sync", 2, 64);)
        s[T + 32] = in[T + 32];
        NAMED("arrive", 1, 64);                                         // BUG
    }
    if (T / 32 == 1) {
        NAMED("sync", 1, 64);
        FIX(NAMED("arrive", 2, 64);)
        out[T] = s[LANE];
        NAMED("sync", 1, 64);
        out[T + 1] = s[LANE + 32];
    }
}
KERNEL(a_count_without_the_second_arrival_of_a_warp, RaceError, arrives at a barrier again) ARGS {
    if (T / 32 < 2)
        NAMED("arrive", 1, FIX(96) BUG(64));                            // BUG
    if (T / 32 == 1)
        NAMED("sync", 1, FIX(96) BUG(64));                              // BUG
    out[T] = 1;
}
KERNEL(warps_that_count_differently, EmulatorError, different thread counts) ARGS {
    int count = T / 32 == 1 ? FIX(128) BUG(64) : 128;
    asm volatile("bar.sync 1, %0;" :: "r"(count) : "memory");           // BUG
    out[T] = 1;
}
KERNEL(a_barrier_of_two_teams, RaceError, arrives at a barrier again) ARGS {
    __shared__ int s[128];
    s[T] = in[T];
    if (T < 64) {
        NAMED("sync", 1, 64);                                           // BUG
        out[T] = s[63 - T];
    } else {
        NAMED("sync", FIX(2) BUG(1), 64);                               // BUG
        out[T] = s[191 - T];
    }
}
KERNEL(the_barrier_of_all_for_some, RaceError, arrives at a barrier again) ARGS {
    if (T < 64)
        NAMED("sync", FIX(1) BUG(0), 64);                               // BUG
    __syncthreads();                                                    // BUG
    out[T] = 1;
}
KERNEL(a_try_that_is_ignored, MbarrierMisuse,
       the result of a wait for an mbarrier is ignored) ARGS {
    TILE
    FIX(wait(&full, 0);)
    BUG(try_once(&full);)                                               // BUG
    out[T] = T < 64 ? s[T] + 1 : 1;
}
KERNEL(a_test_that_is_ignored, MbarrierMisuse,
       the result of a wait for an mbarrier is ignored) ARGS {
    TILE
    FIX(while (!test_once(&full)) {})
    BUG(test_once(&full);)                                              // BUG
    out[T] = T < 64 ? s[T] + 1 : 1;
}
KERNEL(a_vote_that_is_ignored, MbarrierMisuse,
       the result of a wait for an mbarrier is ignored) ARGS {
    TILE
    FIX(while (!__all_sync(~0u, try_once(&full))) {})
    BUG(__all_sync(~0u, try_once(&full));)                              // BUG
    out[T] = T < 64 ? s[T] + 1 : 1;
}
KERNEL(a_try_that_is_only_noted, RaceError, a read and an asynchronous write are not ordered) ARGS {
    TILE                                                                // BUG
    FIX(wait(&full, 0);)
    BUG(out[T + 256] = try_once(&full);)
    out[T] = T < 64 ? s[T] + 1 : 1;                                     // BUG
}
KERNEL(a_test_that_orders_a_part, RaceError,
       a read and an asynchronous write are not ordered) ARGS {
    TILE                                                                // BUG
    int x = 0;
    if (test_once(&full)) x = s[T & 63] & 1;
    FIX(wait(&full, 0);)
    out[T] = x + (T < 64 ? s[T] + 1 : 1);                               // BUG
}
KERNEL(a_test_that_only_chooses_a_value, RaceError,
       a read and an asynchronous write are not ordered) ARGS {
    TILE                                                                // BUG
    FIX(wait(&full, 0);)
    int x = test_once(&full) ? in[T] : in[T + 1];
    out[T] = x + (T < 64 ? s[T] + 1 : 1);                               // BUG
}
KERNEL(phases_that_pass_before_the_first_wait, RaceError,
       the warp finds the same parity again) ARGS {
    __shared__ ull turn, seen;
    if (T == 0) { init(&turn, 1); init(&seen, 1); }
    __syncthreads();
    if (T == 0) for (int i = 0; i < 3; ++i) {
        arrive(&turn);
        FIX(if (i == 0) wait(&seen, 0);)
    }
    if (T == 32) {
        wait(&turn, 0);                                                 // BUG
        out[T] = 1;
        FIX(arrive(&seen);)
    }
}
KERNEL(a_try_before_the_wait, RaceError, a read and an asynchronous write are not ordered) ARGS {
    TILE                                                                // BUG
    u done = try_once(&full);
    int x = in[T];
    FIX(if (!done) wait(&full, 0);) BUG(if (!done) x = 0;)
    out[T] = x + (T < 64 ? s[T] + 1 : 1);                               // BUG
}
KERNEL(three_tries, RaceError, a read and an asynchronous write are not ordered) ARGS {
    TILE                                                                // BUG
    FIX(wait(&full, 0);) BUG(for (int i = 0; i < 3; ++i) if (try_once(&full)) break;)
    out[T] = T < 64 ? s[T] + 1 : 1;                                     // BUG
}
KERNEL(a_move_under_a_guard_ends_the_tries, RaceError,
       a read and an asynchronous write are not ordered) ARGS {
    TILE                                                                // BUG
    asm volatile("{ .reg .pred P, Q; .reg .u32 R; setp.eq.u32 Q, %1, -7; AGAIN:"
                 " mbarrier.try_wait.parity.shared::cta.b64 P, [%0], 0; selp.u32 R, 1, 0, P;"
                 BUG(" @Q mov.u32 R, 1;") " setp.ne.u32 P, R, 0; @!P bra AGAIN; }"
                 :: "r"(SM(&full)), "r"(in[T]) : "memory");
    out[T] = T < 64 ? s[T] + 1 : 1;                                     // BUG
}
KERNEL(tries_that_are_counted, RaceError, a read and an asynchronous write are not ordered) ARGS {
    TILE                                                                // BUG
    u fails, last, tries = 0;
    do {
        last = tries;
        fails = !try_once(&full);
        tries = last + fails;                       // the compiler keeps both in registers
    } while (fails BUG(&& last < 900));
    out[T] = T < 64 ? s[T] + 1 : tries + 1;                             // BUG
}
"""


@pytest.mark.parametrize("kernel", planted(CUDA))
def test_a_planted_bug_is_named(kernel: str) -> None:
    assert_reported(PREAMBLE + CUDA, kernel, lambda: start_hopper(CUDA, kernel, fixed=False))


@pytest.mark.parametrize("kernel", planted(CUDA))
def test_its_correct_twin_runs(kernel: str) -> None:
    for seed in (None, 1):
        assert start_hopper(CUDA, kernel, True, seed).any()


@pytest.mark.parametrize(
    "kernel",
    [
        "a_try_that_is_only_noted",
        "a_test_that_orders_a_part",
        "a_test_that_only_chooses_a_value",
        "a_try_before_the_wait",
        "three_tries",
        "tries_that_are_counted",
        "phases_that_pass_before_the_first_wait",
        "a_count_without_the_second_arrival_of_a_warp",
    ],
)
def test_it_is_found_in_every_order(kernel: str) -> None:
    for seed in range(24):
        assert_reported(PREAMBLE + CUDA, kernel, partial(start_hopper, CUDA, kernel, False, seed))
        assert start_hopper(CUDA, kernel, True, seed).any()
