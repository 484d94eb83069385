"""Kernels whose blocks meet, count and lock, and whose warps and lanes release in turn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptx_emulator import launch
from ptx_emulator.checks import block_order, global_races, warp_reads
from ptx_emulator.machine import scheduler
from tests.ptx_emulator.test_conformance import run
from tests.support.nvrtc_helper import compile_ptx

SEEDS = [None, 1, 2, 3]

GRID_BARRIER = """
extern "C" __device__ int envreg = 1;  // a name like any other
extern "C" __global__ void meet(int* mail, int* out) {
    unsigned high, low;
    asm("mov.u32 %0, %%envreg1;" : "=r"(high));
    asm("mov.u32 %0, %%envreg2;" : "=r"(low));
    unsigned* count = (unsigned*)((unsigned long long)high << 32 | low) + 1;
    mail[blockIdx.x * 64 + threadIdx.x] = blockIdx.x + envreg;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned seen;
        asm volatile("red.add.release.gpu.u32 [%0], 1;" :: "l"(count) : "memory");
        do asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(count) : "memory");
        while (seen < gridDim.x);
    }
    __syncthreads();
    int next = (blockIdx.x + 1) % gridDim.x * 64 + 63 - threadIdx.x;
    out[blockIdx.x * 64 + threadIdx.x] = mail[next];
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_grid_has_a_workspace_in_which_its_blocks_meet(seed: int | None) -> None:
    """As in cooperative launches, of which cooperative_groups::grid_group::sync makes use."""
    mail, out = np.zeros(256, np.int32), np.zeros(256, np.int32)
    run(GRID_BARRIER, "meet", (4,), (64,), mail, out, seed=seed)
    assert (out.reshape(4, 64) == [[2], [3], [4], [1]]).all()


LOCK_OF_BLOCKS = """
extern "C" __global__ void count(int* lock, int* sum) {
    __shared__ int taken;
    do {
        __syncthreads();
        if (threadIdx.x == 0)
            asm volatile("atom.acq_rel.gpu.cas.b32 %0, [%1], 0, 1;"
                         : "=r"(taken) : "l"(lock) : "memory");
        __syncthreads();
    } while (taken);
    int before = *sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        *sum = before + 1;
        asm volatile("{ .reg .b32 x; atom.acq_rel.gpu.exch.b32 x, [%0], 0; }"
                     :: "l"(lock) : "memory");
    }
}
"""


def test_whole_blocks_that_poll_for_a_lock_let_its_holder_run() -> None:
    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
    done = launch(compile_ptx(LOCK_OF_BLOCKS), "count", 8, 128, [lock, total])
    assert total[0] == 8
    assert done.segment_runs < 8 * 2 * scheduler.FAIR_EVERY  # a holder has a turn or two


LAST_BLOCK = """
extern "C" __global__ void add(int* parts, int* sum, unsigned* count) {
    __shared__ bool last;
    parts[blockIdx.x * blockDim.x + threadIdx.x] = 1;
    __threadfence(); __syncthreads();
    if (threadIdx.x == 0) { last = atomicAdd(count, 1) == gridDim.x - 1; __threadfence(); }
    __syncthreads();
    __threadfence();
    for (int i = threadIdx.x; last && i < gridDim.x * blockDim.x; i += blockDim.x)
        atomicAdd(sum, parts[i]);
}
"""


def test_what_one_warp_has_acquired_its_block_keeps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block knows all that came before it: to keep that in every warp takes a large grid's
    memory, and its time.
    """
    kept: list[int] = []
    learnt = block_order._Learnt

    def keep(clock: int, *what: Any) -> Any:
        kept.append(clock)
        return learnt(clock, *what)

    monkeypatch.setattr(block_order, "_Learnt", keep)
    parts, total = np.zeros(8 * 128, np.int32), np.zeros(1, np.int32)
    run(LAST_BLOCK, "add", (8,), (128,), parts, total, np.zeros(1, np.uint32), seed=None)
    assert total[0] == 8 * 128
    assert len(kept) == 7


IN_TURN = r"""
#define T threadIdx.x
extern "C" __global__ void flags(const int* in, int* out, int* flag) {
    __shared__ int s[32];
    if (T < 32) {
        for (int i = 0; i < 32; ++i)
            if (i == T) {
                s[T] = in[T];
                asm volatile("st.release.gpu.global.b32 [%0], 1;" :: "l"(flag + T) : "memory");
            }
    } else {
        int set;
        do asm volatile("ld.acquire.gpu.global.b32 %0, [%1];"
                        : "=r"(set) : "l"(flag + T - 32) : "memory"); while (!set);
        out[T - 32] = s[T - 32];
    }
}
extern "C" __global__ void arrivals(const int* in, int* out) {
    __shared__ int s[32];
    __shared__ unsigned long long all;
    unsigned at = __cvta_generic_to_shared(&all);
    if (T == 0) asm volatile("mbarrier.init.shared.b64 [%0], 32;" :: "r"(at) : "memory");
    __syncthreads();
    if (T < 32) {
        for (int i = 0; i < 32; ++i)
            if (i == T) {
                s[T] = in[T];
                asm volatile("{ .reg .b64 x; mbarrier.arrive.shared.b64 x, [%0]; }"
                             :: "r"(at) : "memory");
            }
    } else {
        asm volatile("{ .reg .pred p; W: mbarrier.test_wait.parity.shared.b64 p, [%0], 0;"
                     " @!p bra W; }" :: "r"(at) : "memory");
        out[T - 32] = s[63 - T];
    }
}
extern "C" __global__ void stages(const int* in, int* out) {
    __shared__ int s[32];
    __shared__ unsigned long long full[32];
    unsigned at = __cvta_generic_to_shared(full + T % 32);
    if (T < 32) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at) : "memory");
    __syncthreads();
    at = __cvta_generic_to_shared(full);
    for (int i = 0; i < 32; ++i, at += 8)
        if (T == 0) {
            s[i] = in[i];
            asm volatile("{ .reg .b64 x; mbarrier.arrive.shared.b64 x, [%0]; }"
                         :: "r"(at) : "memory");
        } else if (T >= 32) {
            asm volatile("{ .reg .pred p; W: mbarrier.test_wait.parity.shared.b64 p, [%0], 0;"
                         " @!p bra W; }" :: "r"(at) : "memory");
            if (T == 32) out[i] = s[i];
        }
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_of_a_warp_may_release_what_they_have_written_in_turn(seed: int | None) -> None:
    want, out = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    run(IN_TURN, "flags", (1,), (64,), want, out, np.zeros(32, np.int32), seed=seed)
    assert (out == want).all()
    run(IN_TURN, "arrivals", (1,), (64,), want, out, seed=seed)
    assert (out == want[::-1]).all()
    run(IN_TURN, "stages", (1,), (64,), want, out, seed=seed)
    assert (out == want).all()


WARPS_APART = """
extern "C" __global__ void sums(float* table, float* out, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) table[i] = i;
    __syncthreads();
    float sum = 0;
    for (int warp = 0; warp <= threadIdx.x / 32; ++warp)
        for (int i = threadIdx.x % 32; i < n; i += 32) sum += table[i];
    out[threadIdx.x] = sum;
}
"""


def test_what_warps_read_again_and_again_is_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps that read one table, each in its own time, cost what they read and not its square."""
    tables: list[warp_reads.WarpReads] = []

    class Kept(warp_reads.WarpReads):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            tables.append(self)

    monkeypatch.setattr(global_races, "WarpReads", Kept)
    out = np.zeros(128, np.float32)
    run(WARPS_APART, "sums", (1,), (128,), np.zeros(512, np.float32), out, np.int32(512))
    assert tables[0].rows == 1 + 512


GRIDS_MEET = """
__device__ __forceinline__ void meet(unsigned* count, unsigned goal) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(count, 1);
        while (*(volatile unsigned*)count < goal) {}
        __threadfence();
    }
    __syncthreads();
}
extern "C" __global__ void add(float* data, float* out, unsigned* count, int other) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *data = 1;
    meet(count, gridDim.x);
    for (int i = 0; i < 5 * (blockIdx.x == other); ++i) __syncthreads();  // longer clocks
    float before = *data;
    meet(count, 2 * gridDim.x);
    if (blockIdx.x == 1 && threadIdx.x == 0) *data += 2;
    meet(count, 3 * gridDim.x);
    out[blockIdx.x * blockDim.x + threadIdx.x] = before + *data;
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_may_add_to_what_all_have_read_before_they_met(seed: int | None) -> None:
    for other in range(3):
        data, out, count = (np.zeros(n, np.float32) for n in (1, 3 * 64, 1))
        run(GRIDS_MEET, "add", (3,), (64,), data, out, count, np.int32(other), seed=seed)
        assert (out == 4).all()


def test_reads_of_several_warps_stay_those_of_all_parts_of_a_vector() -> None:
    reads = warp_reads.WarpReads(4, 2)
    stamps = np.array([5 << 32 | 7 << 10 | warp for warp in range(2)])
    reads.note(np.array([2, 2]), stamps)
    reads.refine(2)
    reads.note(np.array([4]), stamps[:1] + (1 << 10))
    assert [reads.stamps(vector, 5) for vector in range(8)] == [
        *([], [], [], []),
        [stamps[0] + (1 << 10), stamps[1]],
        [stamps[0], stamps[1]],
        *([], []),
    ]
