"""Bulk copies and ordinary accesses of global memory: proxy fences, and boxes of single elements.

As in test_conformance_planted, every kernel is correct when compiled with -DFIXED, and
lines that an error may refer to end in // BUG.
"""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import TensorMap, launch
from tests.ptx_emulator.test_conformance import Array
from tests.ptx_emulator.test_conformance_planted import SEEDS, assert_reported, planted
from tests.support.hopper_ptx import PREAMBLE, hopper_ptx

# Two blocks of 32 threads; `data` has 128 numbers, and `boxes` are 4 of them wide.
CUDA = r"""
#define ARGS (unsigned* data, unsigned* out, unsigned* flag, MAP boxes)
#define START \
    __shared__ __align__(128) unsigned s[128]; __shared__ ull full; \
    if (T == 0) { init(&full, 1); fence_init(); } \
    __syncthreads(); \
    (void)s
#define FETCH if (T == 0) { expect(&full, 512); load_bulk(s, data, 512, &full); } wait(&full, 0)
#define OUT for (int i = T; i < 128; i += 32) out[i] = s[i]
#define FILL for (int i = T; i < 128; i += 32) data[i] = i + 1
#define FENCE(what) asm volatile("fence.proxy.async" what ";" ::: "memory")
__device__ __forceinline__ void reduce(void* to, const void* from, u bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;"
                 :: "l"(to), "r"(SM(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_writes() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
KERNEL(stores_before_a_load) ARGS {
    START; if (blockIdx.x) return;
    FILL;                                                                       // BUG
    FIX(FENCE(".global");) __syncthreads();
    FETCH;                                                                      // BUG
    OUT;
}
KERNEL(the_fence_is_for_shared_memory) ARGS {
    START; if (blockIdx.x) return;
    FILL;                                                                       // BUG
    BUG(FENCE(".shared::cta");) FIX(FENCE("");) __syncthreads();
    FETCH;                                                                      // BUG
    OUT;
}
KERNEL(the_fence_comes_before_the_stores) ARGS {
    START; if (blockIdx.x) return;
    BUG(FENCE("");)
    FILL;                                                                       // BUG
    __syncthreads(); FIX(if (T == 0) FENCE("");)
    FETCH;                                                                      // BUG
    OUT;
}
KERNEL(an_atomic_before_a_load) ARGS {
    START; if (blockIdx.x) return;
    for (int i = T; i < 128; i += 32) atomicAdd(data + i, i + 1);               // BUG
    FIX(FENCE(".global");) __syncthreads();
    FETCH;                                                                      // BUG
    OUT;
}
KERNEL(zeros_before_a_reduction) ARGS {
    START; if (blockIdx.x) return;
    for (int i = T; i < 128; i += 32) { s[i] = i + 1; data[i] = 0; }            // BUG
    FENCE(BUG(".shared::cta")); __syncthreads();
    if (T == 0) { reduce(data, s, 512); commit(); wait_writes(); }              // BUG
    __syncthreads(); OUT;
}
KERNEL(another_block_stores) ARGS {
    START;
    if (blockIdx.x == 0) {
        FILL;                                                                   // BUG
        FIX(FENCE("");) __threadfence(); __syncthreads(); if (T == 0) atomicExch(flag, 1);
    } else {
        while (atomicAdd(flag, 0) == 0) {}
        __threadfence(); __syncthreads();
        FETCH;                                                                  // BUG
        OUT;
    }
}
KERNEL(the_block_that_loads_fences) ARGS {
    START;
    if (blockIdx.x == 0) {
        FILL;                                                                   // BUG
        __threadfence(); __syncthreads(); if (T == 0) atomicExch(flag, 1);
    } else {
        BUG(FENCE("");)
        while (atomicAdd(flag, 0) == 0) {}
        __threadfence(); FIX(FENCE(".global");) __syncthreads();
        FETCH;                                                                  // BUG
        OUT;
    }
}
KERNEL(blocks_store_boxes_of_single_elements) ARGS {
    START; for (int i = T; i < 128; i += 32) s[i] = i + 1;
    fence_async(); __syncthreads();
    for (int i = 0; i < 16; ++i)
        if (T == 0)
            store2(&boxes, 1 + 8 * i + FIX(4) BUG(3) * blockIdx.x, 0, s);       // BUG
    if (T == 0) { commit(); wait_writes(); }
    if (!blockIdx.x) OUT;
}
"""
KERNELS = planted(PREAMBLE + CUDA)
# Copies that have been waited for need no fence.
CUDA += r"""
KERNEL(a_copy_stores_before_a_load) ARGS {
    START; if (blockIdx.x) return;
    for (int i = T; i < 128; i += 32) s[i] = i + 1;
    fence_async(); __syncthreads();
    if (T == 0) { store_bulk(data, s, 512); commit(); wait_writes(); }
    __syncthreads(); FETCH; OUT;
}
"""


def run(kernel: str, fixed: bool, seed: int | None) -> Array:
    data, out, flag = (np.zeros(n, np.uint32) for n in (144, 128, 1))
    boxes = TensorMap(data.reshape(1, -1), (4, 1), dtype="uint32")
    ptx = hopper_ptx(CUDA, fixed)
    launch(ptx, kernel, 2, 32, [data, out, flag, boxes], order_seed=seed)
    return out


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_bug_is_named_at_its_line(kernel: str, seed: int | None) -> None:
    error = assert_reported(PREAMBLE + CUDA, kernel, lambda: run(kernel, False, seed))
    wanted = "single_elements" in kernel or "without a proxy fence" in str(error)
    assert wanted, error


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", [*KERNELS, "a_copy_stores_before_a_load"])
def test_its_correct_twin_runs(kernel: str, seed: int | None) -> None:
    assert (run(kernel, True, seed) == np.arange(1, 129)).all()
