"""Planted races between blocks, or with atomics or fences; the correct twins must run."""

from __future__ import annotations

import pytest

from tests.ptx_emulator.test_conformance_planted import (
    PREAMBLE,
    SEEDS,
    assert_reported,
    planted,
    start,
)

CUDA = (
    PREAMBLE
    + r"""
#define B blockIdx.x
KERNEL(two_blocks_one_address, RaceError, race in global memory: a write and a write of block) {
    if (T == 0) out[FIX(B) BUG(0)] = B + 1;                         // BUG
}
KERNEL(block_reads_what_another_writes) {
    int at = B * 32 + T % 32;
    if (T < 32) out[at] = in[T] BUG(+ ((volatile int*)out)[(at + 32) % 96]); // BUG
}
KERNEL(last_of_many_readers_writes) {
    int x = out[0];                                                 // BUG
    out[1 + B * 40 + T] = x + 1;
    if (B == BUG(2) FIX(99) && T == 0) out[0] = x + 1;              // BUG
}
KERNEL(first_of_many_readers_writes) {
    int x = out[0];                                                 // BUG
    out[1 + B * 40 + T] = x + 1;
    if (B == BUG(0) FIX(99) && T == 0) out[0] = x + 1;              // BUG
}
KERNEL(byte_of_a_neighbours_word) {
    char* p = (char*)out + 4 * B;
    if (T == 0) p[3 BUG(+ 1)] = B + 1;                              // BUG
    else if (T == 1) *(short*)p = 5;                                // BUG
}
KERNEL(vector_store_over_a_neighbour) {
    int* p = out + 4 * B;
    if (T == 0) *(int4*)(p BUG(+ 4 * (B == 0))) = make_int4(1, 2, 3, 4); // BUG
}
KERNEL(atomic_against_a_plain_store) {
    if (T == 0) {
        if (B == 1) FIX(atomicAdd(out, 7)) BUG(out[0] = 7);         // BUG
        else atomicAdd(out, 1);                                     // BUG
    }
}
KERNEL(relaxed_load_of_a_flag_without_a_fence) {
    if (B == 1) {
        if (T < 32) out[T] = in[T];                                 // BUG
        __syncthreads();
        if (T == 0) { __threadfence(); atomicExch(out + 100, 1); }
    } else if (B == 0) {
        if (T == 0) {
            int flag = 0;
            while (!flag) asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];"
                                       : "=r"(flag) : "l"(out + 100) : "memory");
            FIX(__threadfence();)
        }
        __syncthreads();
        if (T < 32) out[32 + T] = out[T];                           // BUG
    }
}
KERNEL(message_without_a_fence) {
    if (B == 1) {
        out[T] = in[T];                                             // BUG
        __syncthreads();
        if (T == 0) { FIX(__threadfence();) atomicExch(out + 100, 1); }
    } else if (B == 0) {
        if (T == 0) while (atomicAdd(out + 100, 0) == 0) {}
        __threadfence();
        __syncthreads();
        out[32 + T] = out[T];                                       // BUG
    }
}
KERNEL(message_written_after_the_flag) {
    if (B == 1) {
        if (T == 0) {
            BUG(__threadfence(); atomicExch(out + 100, 1);)
            out[0] = in[0];                                         // BUG
            FIX(__threadfence(); atomicExch(out + 100, 1);)
        }
    } else if (B == 0 && T == 0) {
        while (atomicAdd(out + 100, 0) == 0) {}
        __threadfence();
        out[32] = out[0];                                           // BUG
    }
}
KERNEL(atomics_of_each_block_at_one_address) {
    atomicAdd_block(out + FIX(B) BUG(0), in[T]);                    // BUG
}
KERNEL(atomics_of_the_block_and_of_the_device) {
    if (B == 1) atomicAdd_block(out FIX(+ 1), 1);                   // BUG
    else atomicAdd(out, 1);                                         // BUG
}
KERNEL(a_flag_released_to_the_own_block) {
    if (B == 1) {
        if (T == 0) {
            out[0] = in[0];
            asm volatile("st.release." FIX("gpu") BUG("cta")
                         ".s32 [%0], 1;" :: "l"(out + 100) : "memory");
        }
    } else if (B == 0 && T == 0) {
        int flag = 0;
        while (!flag) asm volatile("ld.acquire.gpu.s32 %0, [%1];"   // BUG
                                   : "=r"(flag) : "l"(out + 100) : "memory");
        out[32] = out[0];
    }
}
KERNEL(a_flag_acquired_from_the_own_block) {
    if (B == 1) {
        if (T == 0) {
            out[0] = in[0];
            __threadfence(); atomicExch(out + 100, 1);
        }
    } else if (B == 0 && T == 0) {
        int flag = 0;
        while (!flag) asm volatile("ld.acquire." FIX("gpu") BUG("cta") // BUG
                                   ".s32 %0, [%1];" : "=r"(flag) : "l"(out + 100) : "memory");
        out[32] = out[0];
    }
}
KERNEL(a_fence_of_the_cluster_between_clusters) {
    if (B == 1) {
        if (T == 0) {
            out[0] = in[0];                                         // BUG
            FIX(__threadfence();) BUG(asm volatile("fence.acq_rel.cluster;" ::: "memory");)
            atomicExch(out + 100, 1);
        }
    } else if (B == 0 && T == 0) {
        while (atomicAdd(out + 100, 0) == 0) {}
        __threadfence();
        out[32] = out[0];                                           // BUG
    }
}
KERNEL(another_warp_reads_before_its_barrier) {
    if (B == 1) {
        if (T == 0) { out[0] = in[0]; __threadfence(); atomicExch(out + 100, 1); } // BUG
    } else if (B == 0) {
        if (T == 0) { while (atomicAdd(out + 100, 0) == 0) {} __threadfence(); }
        FIX(__syncthreads();)
        if (T == 33) out[32] = out[0];                              // BUG
    }
}
KERNEL(plain_read_and_atomic) {
    __shared__ int s[1];
    if (T == 0) s[0] = 1;
    __syncthreads();
    int x = s[0];                                                   // BUG
    FIX(__syncthreads();)
    if (T == 0) atomicAdd(s, 1);                                    // BUG
    out[1 + B * 40 + T] = x;
}
KERNEL(warp_reads_before_another_writes) {
    int x = out[0];                                                 // BUG
    FIX(__syncthreads();)
    if (T == 63) out[0] = x + 1;                                    // BUG
    out[1 + T] = x;
}
KERNEL(read_between_two_barriers) {
    __shared__ int s[64];
    s[T] = T; __syncthreads();
    int x = s[63 - T];                                              // BUG
    FIX(__syncthreads();)
    if (T < 32) {
        NAMED("sync", 1, 32);
        s[T] = x;                                                   // BUG
    } else out[B * 32 + T - 32] = x + 1;
}
"""
)
# blocks, threads
SHAPES = dict.fromkeys(planted(CUDA), (3, 40)) | {
    "message_without_a_fence": (3, 32),
    "warp_reads_before_another_writes": (1, 64),
    "read_between_two_barriers": (2, 64),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", [*SHAPES])
def test_the_race_is_named_at_its_line(kernel: str, seed: int | None) -> None:
    assert_reported(CUDA, kernel, lambda: start(CUDA, kernel, seed, False, *SHAPES[kernel]))


@pytest.mark.parametrize("kernel", [*SHAPES])
def test_its_correct_twin_runs(kernel: str) -> None:
    for seed in SEEDS:
        assert start(CUDA, kernel, seed, True, *SHAPES[kernel]).any()
