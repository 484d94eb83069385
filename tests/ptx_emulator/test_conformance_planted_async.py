"""Bugs planted in kernels with mbarriers and bulk copies: each is reported, for any order of warps.

As in test_conformance_planted, every kernel is correct when compiled with -DFIXED, and
lines that an error may refer to end in // BUG.
"""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import TensorMap, launch
from ptx_emulator.errors import DeadlockError
from tests.ptx_emulator.test_conformance import Array
from tests.ptx_emulator.test_conformance_planted import SEEDS, assert_reported, planted
from tests.support.hopper_ptx import PREAMBLE, hopper_ptx
from tests.support.tiers import one_in

ROWS, COLUMNS = 256, 64
TILE = 32 * COLUMNS * 2  # bytes of a box of 32 rows of float16

# Kernels copy tiles of their input; `in` and `out` are maps of boxes of 32 rows.
CUDA = r"""
#define wait_write() asm volatile("cp.async.bulk.wait_group 0;" ::: "memory")
#define ARGS (MAP in, MAP out, const unsigned short* raw, unsigned short* to, int tiles)
#define TILE 4096
#define START \
    extern __shared__ __align__(1024) unsigned short s[]; \
    __shared__ ull full[2], empty[2]; \
    const bool first = T == 0; \
    (void)s
#define START_FULL START; if (first) { init(&full[0], 1); fence_init(); } __syncthreads()
KERNEL(missing_wait) ARGS {
    START_FULL;
    if (first) {
        expect(&full[0], TILE);
        load2(s, &in, 0, 0, &full[0]);                                          // BUG
    }
    FIX(wait(&full[0], 0);)
    for (int i = T; i < TILE / 2; i += blockDim.x) to[i] = s[i];                // BUG
    BUG(wait(&full[0], 0);)
}
KERNEL(only_the_producer_waits) ARGS {
    START_FULL;
    if (first) {
        expect(&full[0], TILE);
        load2(s, &in, 0, 0, &full[0]);                                          // BUG
        wait(&full[0], 0);
    }
    FIX(__syncthreads();)
    for (int i = T; i < TILE / 2; i += blockDim.x) to[i] = s[i];                // BUG
}
KERNEL(missing_proxy_fence) ARGS {
    START;
    for (int i = T; i < TILE / 2; i += blockDim.x) s[i] = raw[i];               // BUG
    FIX(fence_async();)
    __syncthreads();
    if (first) { store2(&out, 0, 0, s); commit(); wait_read<0>(); }             // BUG
}
KERNEL(proxy_fence_before_the_stores) ARGS {
    START;
    BUG(fence_async();)
    for (int i = T; i < TILE / 2; i += blockDim.x) s[i] = raw[i];               // BUG
    FIX(fence_async();)
    __syncthreads();
    if (first) { store2(&out, 0, 0, s); commit(); wait_read<0>(); }             // BUG
}
KERNEL(store_without_barrier) ARGS {
    START;
    for (int i = T; i < TILE / 2; i += blockDim.x) s[i] = raw[i];               // BUG
    fence_async();
    FIX(__syncthreads();)
    if (first) { store2(&out, 0, 0, s); commit(); wait_read<0>(); }             // BUG
}
KERNEL(generic_writes_before_a_load) ARGS {
    START;
    if (first) { init(&full[0], 1); fence_init(); }
    for (int i = T; i < TILE / 2; i += blockDim.x) s[i] = 0;                    // BUG
    FIX(fence_async();)
    __syncthreads();
    if (first) { expect(&full[0], TILE); load2(s, &in, 0, 0, &full[0]); }       // BUG
    wait(&full[0], 0);
    for (int i = T; i < TILE / 2; i += blockDim.x) to[i] = s[i];
}
KERNEL(wrong_phase, DeadlockError, phase 3: 1 of 1 arrivals pending, 0 bytes outstanding) ARGS {
    START_FULL;
    for (int t = 0; t < tiles; ++t) {
        if (first) { expect(&full[0], TILE); load2(s, &in, 0, 32 * t, &full[0]); }
        wait(&full[0], t & 1);
        BUG(if (t == 2) wait(&full[0], 1);)
        for (int i = T; i < TILE / 2; i += blockDim.x) to[t * TILE / 2 + i] = s[i];
        __syncthreads();
    }
}
KERNEL(parity_never_flips) ARGS {
    START_FULL;
    for (int t = 0; t < tiles; ++t) {
        if (first) { expect(&full[0], TILE); load2(s, &in, 0, 32 * t, &full[0]); } // BUG
        wait(&full[0], FIX(t & 1) BUG(0));
        for (int i = T; i < TILE / 2; i += blockDim.x) to[t * TILE / 2 + i] = s[i]; // BUG
        __syncthreads();
    }
}
KERNEL(expects_too_much, DeadlockError,
       phase 0: 0 of 1 arrivals pending, 16 bytes outstanding) ARGS {
    START_FULL;
    if (first) { expect(&full[0], TILE BUG(+ 16)); load2(s, &in, 0, 0, &full[0]); }
    wait(&full[0], 0);                                                          // WAITS
    for (int i = T; i < TILE / 2; i += blockDim.x) to[i] = s[i];
}
KERNEL(expects_too_little, DeadlockError,
       phase 0: 0 of 1 arrivals pending, -16 bytes outstanding) ARGS {
    START_FULL;
    if (first) { expect(&full[0], TILE BUG(- 16)); load2(s, &in, 0, 0, &full[0]); }
    wait(&full[0], 0);                                                          // WAITS
    for (int i = T; i < TILE / 2; i += blockDim.x) to[i] = s[i];
}
KERNEL(count_one_too_many, DeadlockError, phase 0: 1 of 97 arrivals pending) ARGS {
    START;
    if (first) { init(&full[0], blockDim.x BUG(+ 1)); }
    __syncthreads();
    to[T] = 1;
    arrive(&full[0]);
    wait(&full[0], 0);                                                          // WAITS
}
KERNEL(count_one_too_few) ARGS {
    START;
    if (first) { init(&full[0], blockDim.x / 32 BUG(- 1)); }
    __syncthreads();
    ((u*)s)[T] = T;                                                             // BUG
    __syncwarp();
    if (T % 32 == 0) arrive(&full[0]);
    wait(&full[0], 0);
    to[T] = ((u*)s)[blockDim.x - 1 - T];                                        // BUG
}
KERNEL(no_init_fence_or_barrier, RaceError|MbarrierMisuse) ARGS {
    START;
    if (first) { init(&full[0], blockDim.x); }                                  // BUG
    FIX(__syncthreads();)
    arrive(&full[0]);                                                           // BUG
    wait(&full[0], 0);
}
#define PIPELINE(FULL_WAIT, EMPTY_WAIT, RELEASE) \
    if (T == 0) { \
        for (int i = 0; i < 2; ++i) { init(&full[i], 1); init(&empty[i], 2); } \
        fence_init(); \
    } \
    __syncthreads(); \
    if (T >= 64) { \
        if (T == 64) for (int t = 0; t < tiles; ++t) { \
            unsigned short* stage = s + t % 2 * TILE / 2; \
            EMPTY_WAIT \
            expect(&full[t % 2], TILE); \
            load2(stage, &in, 0, 32 * t, &full[t % 2]); \
        } \
    } else { \
        for (int t = 0; t < tiles; ++t) { \
            unsigned short* stage = s + t % 2 * TILE / 2; \
            FULL_WAIT \
            for (int i = T; i < TILE / 2; i += 64) to[t * TILE / 2 + i] = stage[i]; \
            RELEASE \
        } \
    }
#define WAIT_FULL wait(&full[t % 2], t / 2 & 1);
#define WAIT_EMPTY if (t >= 2) wait(&empty[t % 2], (t / 2 - 1) & 1);
#define ARRIVE __syncwarp(); if (T % 32 == 0) arrive(&empty[t % 2]);
KERNEL(producer_skips_the_empty_wait, RaceError|MbarrierMisuse) ARGS {
    START;
    PIPELINE(WAIT_FULL, FIX(WAIT_EMPTY), ARRIVE)                                // BUG
}
KERNEL(consumer_skips_the_full_wait, RaceError|UninitialisedRead) ARGS {
    START;
    PIPELINE(FIX(WAIT_FULL), WAIT_EMPTY, ARRIVE)                                // BUG
}
KERNEL(consumer_releases_too_early) ARGS {
    START;
    PIPELINE(WAIT_FULL BUG(ARRIVE), WAIT_EMPTY, FIX(ARRIVE))                    // BUG
}
KERNEL(producer_waits_for_the_wrong_parity, RaceError|MbarrierMisuse) ARGS {
    START;
    PIPELINE(WAIT_FULL, FIX(WAIT_EMPTY)                                         // BUG
             BUG(if (t >= 2) wait(&empty[t % 2], t / 2 & 1);), ARRIVE)          // BUG
}
KERNEL(one_consumer_never_releases, DeadlockError,
       1 of 2 arrivals pending, 0 bytes outstanding) ARGS {
    START;
    PIPELINE(WAIT_FULL, WAIT_EMPTY, FIX(ARRIVE) BUG(if (T == 0) arrive(&empty[t % 2]);)) // WAITS
}
KERNEL(store_overwritten_before_it_has_read) ARGS {
    START;
    for (int t = 0; t < tiles; ++t) {
        for (int i = T; i < TILE / 2; i += blockDim.x) s[i] = raw[t * TILE / 2 + i]; // BUG
        fence_async();
        __syncthreads();
        if (first) {
            store2(&out, 0, 32 * t, s); commit();                               // BUG
            FIX(wait_read<0>();) BUG(wait_read<1>();)
        }
        __syncthreads();
    }
    if (first) wait_read<0>();
}
KERNEL(store_read_known_to_its_thread_only) ARGS {
    START;
    for (int t = 0; t < 2; ++t) {
        for (int i = T; i < TILE / 2; i += blockDim.x) s[i] = raw[t * TILE / 2 + i]; // BUG
        fence_async();
        __syncthreads();
        if (first) { store2(&out, 0, 32 * t, s); commit(); wait_read<0>(); }    // BUG
        FIX(__syncthreads();)
    }
}
KERNEL(store_that_another_thread_stores_too) ARGS {
    START;
    for (int i = T; i < TILE / 2; i += blockDim.x) s[i] = raw[i];
    fence_async();
    __syncthreads();
    if (first) { store2(&out, 0, 0, s); commit(); }                             // BUG
    __syncthreads();
    if (T == 32) { store2(&out, 0, 32, s); commit(); wait_read<0>(); }
    FIX(if (first) wait_read<0>();)
    __syncthreads();
    for (int i = T; i < TILE / 2; i += blockDim.x) s[i] = raw[i];               // BUG
    BUG(if (first) wait_read<0>();)
}
KERNEL(load_over_a_store_that_still_reads) ARGS {
    START;
    if (first) {
        init(&full[0], 1);
        for (int t = 0; t < tiles; ++t) {
            expect(&full[0], TILE);
            load2(s, &in, 0, 32 * t, &full[0]);                                 // BUG
            wait(&full[0], t & 1);
            store2(&out, 0, 32 * t, s); commit();                               // BUG
            FIX(wait_read<0>();)
        }
        wait_read<0>();
    }
}
KERNEL(load_over_what_a_warp_still_reads) ARGS {
    START_FULL;
    for (int t = 0; t < tiles; ++t) {
        if (first) { expect(&full[0], TILE); load2(s, &in, 0, 32 * t, &full[0]); } // BUG
        wait(&full[0], t & 1);
        for (int i = T; i < TILE / 2; i += blockDim.x) to[t * TILE / 2 + i] = s[i]; // BUG
        FIX(__syncthreads();)
    }
}
KERNEL(fenced_by_a_warp_that_has_not_seen_the_stores) ARGS {
    START;
    if (first) { init(&full[0], blockDim.x - 32); fence_init(); }
    __syncthreads();
    if (T >= 32) {                              // two warps write, one stores what they wrote
        for (int i = T - 32; i < TILE / 2; i += blockDim.x - 32) s[i] = raw[i]; // BUG
        arrive(&full[0]);
    } else {
        BUG(fence_async();)
        wait(&full[0], 0);
        FIX(fence_async();)
        if (first) { store2(&out, 0, 0, s); commit(); wait_read<0>(); }         // BUG
    }
}
KERNEL(ends_before_its_store_has_read) ARGS {
    START;
    for (int i = T; i < TILE / 2; i += blockDim.x) s[i] = raw[i];
    fence_async();
    __syncthreads();
    if (first) { store2(&out, 0, 0, s); commit(); FIX(wait_read<0>();) }        // BUG
}
KERNEL(ends_before_its_load_has_come) ARGS {
    START;
    if (first) {
        init(&full[0], 1); expect(&full[0], TILE);
        load2(s, &in, 0, 0, &full[0]);                                          // BUG
        FIX(wait(&full[0], 0);)
    }
}
KERNEL(box_outside_shared_memory, OutOfBounds) ARGS {
    START;
    if (first) {
        init(&full[0], 1); expect(&full[0], TILE);
        load2(s + FIX(0) BUG(3 * TILE / 2 + 64), &in, 0, 0, &full[0]);          // BUG
        wait(&full[0], 0);
    }
}
KERNEL(box_misaligned, Misaligned) ARGS {
    START;
    if (first) {
        init(&full[0], 1); expect(&full[0], TILE);
        load2(s + FIX(64) BUG(32), &in, 0, 0, &full[0]);                        // BUG
        wait(&full[0], 0);
    }
}
KERNEL(bulk_copy_past_the_end, OutOfBounds) ARGS {
    START;
    if (first) {
        init(&full[0], 1); expect(&full[0], TILE);
        load_bulk(s, raw + 7 * TILE / 2 BUG(+ 8), TILE, &full[0]);              // BUG
        wait(&full[0], 0);
    }
}
KERNEL(store_of_unwritten_memory, UninitialisedRead) ARGS {
    START;
    for (int i = T; i < TILE / 2; i += blockDim.x) FIX() BUG(if (i < 2000)) s[i] = raw[i];
    fence_async();
    __syncthreads();
    if (first) { store2(&out, 0, 0, s); commit(); wait_read<0>(); }             // BUG
}
KERNEL(barrier_never_initialised, MbarrierMisuse) ARGS {
    START;
    if (first) { FIX(init(&full[0], 1);) expect(&full[0], TILE); }              // BUG
    if (first) { load2(s, &in, 0, 0, &full[0]); wait(&full[0], 0); }
}
KERNEL(barrier_initialised_twice, MbarrierMisuse|RaceError) ARGS {
    START;
    if (first) { init(&full[0], 1); BUG(init(&full[0], 1);) }                   // BUG
}
KERNEL(barrier_overwritten) ARGS {
    START;
    if (first) { init(&full[0], 1); }
    __syncthreads();
    if (T == 32) { FIX(full[1]) BUG(full[0]) = 3; }                             // BUG
    if (first) { arrive(&full[0]); wait(&full[0], 0); }
}
KERNEL(barrier_invalidated_too_early, MbarrierMisuse|RaceError) ARGS {
    START;
    if (first) {
        for (int i = 0; i < 2; ++i) {
            init(&full[i], 1); expect(&full[i], TILE);
            load2(s + i * TILE / 2, &in, 0, 0, &full[i]);                       // BUG
        }
        FIX(wait(&full[0], 0);)
        asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(SM(&full[0])) : "memory");
        wait(&full[1], 0);
    }
}
KERNEL(store_of_a_copy_in_flight) ARGS {
    START;
    if (T < 32) {
        for (int i = 8 * T; i < TILE / 2; i += 256)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"            // BUG
                         :: "r"(SM(s + i)), "l"(raw + i) : "memory");
        FIX(asm volatile("cp.async.wait_all;" ::: "memory");)
        fence_async();
        __syncwarp();
        if (first) { store2(&out, 0, 0, s); commit(); wait_read<0>(); }         // BUG
    }
}
KERNEL(store_read_back_after_its_reads_alone) ARGS {
    START;
    for (int i = T; i < 64; i += blockDim.x) s[i] = raw[i];
    fence_async();
    __syncthreads();
    if (first) {
        store_bulk(to, s, 128);                                                 // BUG
        commit();
        FIX(wait_write();) BUG(wait_read<0>();)
        to[64] = to[63];                                                        // BUG
        FIX(if (false)) wait_read<0>();
    }
}
KERNEL(store_read_by_a_warp_before_the_wait) ARGS {
    START;
    for (int i = T; i < 64; i += blockDim.x) s[i] = raw[i];
    fence_async();
    __syncthreads();
    if (first) { store_bulk(to, s, 128); commit(); FIX(wait_write();) }         // BUG
    __syncthreads();
    BUG(if (first) wait_write();)
    if (T >= 32) to[64 + T] = to[63];                                           // BUG
}
KERNEL(store_written_by_a_warp_before_the_wait) ARGS {
    START;
    for (int i = T; i < 64; i += blockDim.x) s[i] = raw[i];
    fence_async();
    __syncthreads();
    if (first) { store_bulk(to, s, 128); commit(); FIX(wait_write();) }         // BUG
    __syncthreads();
    if (T == 32) to[3] = 1;                                                     // BUG
    BUG(if (first) wait_write();)
}
KERNEL(too_many_arrivals, MbarrierMisuse) ARGS {
    START;
    if (first) {
        init(&full[0], 1);
        expect(&full[0], TILE);
        BUG(arrive(&full[0]);)                                                  // BUG
        load2(s, &in, 0, 0, &full[0]);
        wait(&full[0], 0);
    }
}
KERNEL(more_bytes_than_it_counts, MbarrierMisuse) ARGS {
    START;
    if (first) {
        init(&full[0], 2);
        for (int i = 0; i < FIX(1) BUG(2); ++i) {
            asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" // BUG
                         :: "r"(SM(&full[0])), "r"(1 << 19));
        }
    }
}
// The first warp waits for the second phase of empty[0]. That the first is over, it knows from the
// arrival at empty[1], which the other warp executes in between.
KERNEL(nothing_shows_that_the_first_phase_is_over) ARGS {
    START;
    if (first) { init(&empty[0], 1); init(&empty[1], 1); }
    __syncthreads();
    if (T == 32) {
        arrive(&empty[0]); arrive(&empty[1]);
        s[0] = raw[0];
        arrive(&empty[0]);
    } else if (first) {
        FIX(wait(&empty[1], 0);)
        wait(&empty[0], 1);                                                     // BUG
        to[0] = s[0];                                                           // BUG
    }
}
KERNEL(one_phase_more_than_is_shown) ARGS {
    START;
    if (first) { init(&empty[0], 1); init(&empty[1], 1); }
    __syncthreads();
    if (T == 32) {
        arrive(&empty[0]); arrive(&empty[1]);
        arrive(&empty[0]);
        BUG(arrive(&empty[0]);)                                                 // BUG
    } else if (first) {
        wait(&empty[1], 0);
        wait(&empty[0], 1);                                                     // BUG
    }
}
KERNEL(every_lane_copies) ARGS {
    START;
    if (first) { init(&full[0], 1); fence_init(); expect(&full[0], TILE); }
    __syncthreads();
    if (T < FIX(1) BUG(32)) load2(s, &in, 0, 0, &full[0]);                      // BUG
    wait(&full[0], 0);
}
"""
KERNELS = planted(CUDA)


# What the correct twin leaves: rows of the tensor that its stores reach, or of the raw output.
STORED = {
    "store_of_a_copy_in_flight": 32,
    "load_over_a_store_that_still_reads": 256,
    "fenced_by_a_warp_that_has_not_seen_the_stores": 32,
    "missing_proxy_fence": 32,
    "proxy_fence_before_the_stores": 32,
    "store_without_barrier": 32,
    "store_overwritten_before_it_has_read": 256,
    "store_read_known_to_its_thread_only": 64,
    "ends_before_its_store_has_read": 32,
    "store_of_unwritten_memory": 32,
}
WRITTEN = {
    **dict.fromkeys(
        ["load_over_what_a_warp_still_reads", "wrong_phase", "parity_never_flips",
         "producer_skips_the_empty_wait", "consumer_skips_the_full_wait",
         "consumer_releases_too_early", "producer_waits_for_the_wrong_parity",
         "one_consumer_never_releases"],
        256,
    ),
    **dict.fromkeys(
        ["missing_wait", "only_the_producer_waits", "generic_writes_before_a_load",
         "expects_too_much", "expects_too_little"],
        32,
    ),
}  # fmt: skip


def run(kernel: str, fixed: bool, seed: int | None) -> list[Array]:
    """The input, what lies behind the output map, and the raw output."""
    source = np.arange(ROWS * COLUMNS, dtype=np.uint16).reshape(ROWS, COLUMNS)
    target = np.zeros_like(source)
    raw = np.zeros_like(source)
    maps = [TensorMap(a, (COLUMNS, 32), dtype="float16") for a in (source, target)]
    ptx = hopper_ptx(CUDA, fixed)
    launch(ptx, kernel, 1, 96, [*maps, source, raw, 8], shared_bytes=3 * TILE, order_seed=seed)
    return [source, target, raw]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_planted_bug_is_named(kernel: str, seed: int | None) -> None:
    error = assert_reported(PREAMBLE + CUDA, kernel, lambda: run(kernel, False, seed))
    if isinstance(error, DeadlockError):
        assert "block (0, 0, 0) warp" in str(error)
        assert "try_wait" in str(error)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", one_in(3, [*KERNELS]))
def test_the_correct_twin_runs(kernel: str, seed: int | None) -> None:
    source, target, raw = run(kernel, True, seed)
    for array, rows in ((target, STORED.get(kernel, 0)), (raw, WRITTEN.get(kernel, 0))):
        assert (array[:rows] == source[:rows]).all()
        assert rows == 0 or not array[rows:].any()
