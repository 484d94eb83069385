"""Bugs of lanes: who takes part in exchanges and matrices of a warp, and local memory.

As in test_conformance_planted, every kernel is correct when compiled with -DFIXED, and lines that
an error may refer to end in // BUG.
"""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.shared.errors import EmulatorError
from ptx_emulator import launch
from tests.ptx_emulator.test_conformance_planted import assert_reported, planted, start_hopper
from tests.support.hopper_ptx import PREAMBLE, hopper_ptx

CUDA = r"""
#define ARGS (const int* in, int* out, int* flag)
#define LANE (T % 32)
#define ALL 0xffffffffu
#define MATRIX(s) "r"(SM(s + T / 32 * 32 + LANE % 8 * 4))
#define LOAD(x, s) asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" \
                                : "=r"(x) : MATRIX(s) : "memory")
#define MMA asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}," \
                         " {%4, %4, %4, %4}, {%4, %4}, {%0, %1, %2, %3};" \
                         : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(in[T]))
KERNEL(source_outside_the_mask, UninitialisedRead,
       outside its member mask or does not execute it) ARGS {
    if (LANE < 16)
        out[T] = __shfl_sync(0xffff, in[T], FIX(LANE ^ 1) BUG(LANE + 12));// BUG
}
KERNEL(one_step_too_far, UninitialisedRead, outside its member mask or does not execute it) ARGS {
    int x = in[T];
    if (LANE < 16)
        for (int d = FIX(8) BUG(16); d; d /= 2)
            x += __shfl_xor_sync(0xffff, x, d);                         // BUG
    out[T] = x;                                                         // BUG
}
KERNEL(the_upper_lanes_of_a_sum, UninitialisedRead,
       outside its member mask or does not execute it) ARGS {
    // Undefined in all lanes but the first: not used.
    int x = in[T];
    if (LANE < 16) {
        for (int d = 8; d; d /= 2)
            x += __shfl_down_sync(0xffff, x, d);                        // BUG
        if (LANE == 0 BUG(|| LANE == 8)) out[T] = x;                    // BUG
    }
}
KERNEL(the_source_has_exited, UninitialisedRead,
       outside its member mask or does not execute it) ARGS {
    if (LANE >= FIX(32) BUG(16)) return;
    out[T] = __shfl_xor_sync(ALL, in[T], 16);                           // BUG
}
KERNEL(the_source_is_not_active, UninitialisedRead,
       outside its member mask or does not execute it) ARGS {
    if (in[T] % 2) {
        unsigned mask = __activemask();
        out[T] = __shfl_sync(mask, in[T], FIX(__ffs(mask) - 1) BUG(1)); // BUG
    }
}
KERNEL(one_lane_has_the_value, UninitialisedRead,
       a register is read that was never written) ARGS {
    // Undefined in the others, which take it from it.
    int x;
    if (LANE == 0) x = in[T];
    out[T] = __shfl_sync(ALL, x, 0 BUG(+ LANE / 16));                   // BUG
}
KERNEL(all_lanes_named_in_a_branch, BarrierDivergence, only a part of a warp reached) ARGS {
    if (LANE < 16)
        out[T] = __shfl_sync(FIX(0xffff) BUG(ALL), in[T], 3);           // BUG
    __syncwarp();
    out[T] += 1;
}
KERNEL(masks_that_differ, BarrierDivergence, with different member masks) ARGS {
    unsigned own = 0xffu << LANE / 8 * 8;
    out[T] = __reduce_add_sync(FIX(own) BUG(LANE % 8 ? own : ALL), in[T]);// BUG
}
KERNEL(match_outside_the_mask, BarrierDivergence, whose member mask does not contain it) ARGS {
    if (LANE < 20)
        out[T] = __match_any_sync(FIX(0xfffff) BUG(0xffff), in[T]);     // BUG
}
KERNEL(the_active_mask_of_before, BarrierDivergence, only a part of a warp reached) ARGS {
    unsigned mask = __activemask();
    if (LANE < 16)
        out[T] = __ballot_sync(FIX(0xffff) BUG(mask), in[T] > 3);       // BUG
    __syncwarp();                                                       // BUG
}
KERNEL(elect_outside_the_mask, BarrierDivergence, whose member mask does not contain it) ARGS {
    u one = 0;
    if (LANE >= 16)
        asm volatile("{ .reg .pred p; elect.sync _|p, %1; selp.b32 %0, 1, 0, p; }"// BUG
                     : "=r"(one) : "r"(FIX(0xffff0000u) BUG(0x0000ffffu)));
    if (one) out[T] = 1;
}
KERNEL(ldmatrix_after_an_exit, BarrierDivergence, a part of a warp executes ldmatrix) ARGS {
    __shared__ __align__(16) int s[128];
    unsigned x;
    s[T] = in[T];
    __syncthreads();
    if (LANE >= FIX(32) BUG(16)) return;
    LOAD(x, s);                                                         // BUG
    out[T] = x;
}
KERNEL(ldmatrix_in_a_branch, BarrierDivergence, a part of a warp executes ldmatrix) ARGS {
    __shared__ __align__(16) int s[128];
    unsigned x = 0;
    s[T] = in[T];
    __syncthreads();
    BUG(if (LANE < 16))
        LOAD(x, s);                                                     // BUG
    out[T] = x;
}
KERNEL(stmatrix_after_an_exit, BarrierDivergence, a part of a warp executes stmatrix) ARGS {
    __shared__ __align__(16) int s[128];
    if (LANE >= FIX(32) BUG(16)) return;
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" // BUG
                 :: MATRIX(s), "r"(in[T]) : "memory");
    __syncwarp(FIX(ALL) BUG(0xffff));
    out[T] = s[T];
}
KERNEL(mma_after_an_exit, BarrierDivergence, a part of a warp executes mma) ARGS {
    float d[4] = {};
    if (LANE >= FIX(32) BUG(16)) return;
    MMA;                                                                // BUG
    out[T] = 1 + d[0] + d[1] + d[2] + d[3];
}
KERNEL(mma_in_a_branch, BarrierDivergence, a part of a warp executes mma) ARGS {
    float d[4] = {};
    BUG(if (LANE < 16))
        MMA;                                                            // BUG
    out[T] = 1 + d[0] + d[1] + d[2] + d[3];
}
KERNEL(mma_on_both_sides, BarrierDivergence, only a part of a warp reached) ARGS {
    float d[4] = {};
    if (FIX(T / 32) BUG(LANE) < 2) {
        MMA;                                                            // BUG
    } else {
        MMA;                                                            // BUG
        d[0] += 1;
    }
    out[T] = 1 + d[0] + d[1] + d[2] + d[3];
}
KERNEL(ldmatrix_under_a_guard, BarrierDivergence, a part of a warp executes ldmatrix) ARGS {
    __shared__ __align__(16) int s[128];
    unsigned x = 1;
    s[T] = in[T];
    __syncthreads();
    asm volatile("{ .reg .pred p; setp.lt.u32 p, %2, 16;"                   // BUG
                 " @p ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1]; }"
                 : "+r"(x) : MATRIX(s), "r"(FIX(T / 64) BUG(LANE)) : "memory");
    out[T] = x;
}
KERNEL(shuffle_under_a_guard, UninitialisedRead,
       outside its member mask or does not execute it) ARGS {
    int x;
    asm volatile("{ .reg .pred p; setp.lt.u32 p, %2, 16; mov.b32 %0, 7;"    // BUG
                 " @p shfl.sync.idx.b32 %0, %1, %3, 31, 0xffff; }"
                 : "=r"(x) : "r"(in[T]), "r"(LANE), "r"(FIX(3) BUG(20)));
    out[T] = x;
}
KERNEL(movmatrix_without_a_lane, BarrierDivergence, a part of a warp executes movmatrix) ARGS {
    unsigned x = in[T];
    if (LANE >= FIX(32) BUG(31)) return;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));// BUG
    out[T] = x;
}
KERNEL(wgmma_by_half_a_warpgroup, EmulatorError, an incomplete warpgroup) ARGS {
    if (T >= FIX(128) BUG(64)) return;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");             // BUG
    out[T] = 1;
}
KERNEL(local_element_never_written, UninitialisedRead,
       local memory is read that its thread has never written) ARGS {
    int a[16];
    for (int i = 0; i < FIX(16) BUG(15); ++i) a[i] = in[i] + T;
    out[T] = a[in[T] / 3 % 16];                                         // BUG
}
__device__ __noinline__ int sum_of(const int* p, int n) {
    int sum = 0;
    for (int i = 0; i < n; ++i)
        sum += p[i];
    return sum;
}
KERNEL(local_through_a_pointer, UninitialisedRead,
       local memory is read that its thread has never written) ARGS {
    int a[16];
    for (int i = 0; i < in[3]; ++i) a[i] = i;
    out[T] = 1 + sum_of(a, in[3] BUG(+ 1));                             // BUG
}
KERNEL(local_as_a_vector, UninitialisedRead,
       local memory is read that its thread has never written) ARGS {
    __align__(16) int a[16];
    for (int i = 0; i < 16; ++i) BUG(if (i != 5)) a[i * in[0] & 15] = i;
    int sum = 0;
    for (int i = 0; i < 4; ++i) {
        int4 x = ((int4*)a)[i + in[T] & 3];                             // BUG
        sum += x.x + x.y + x.z + x.w;
    }
    out[T] = sum;
}
"""


@pytest.mark.parametrize("kernel", planted(CUDA))
def test_a_planted_bug_is_named(kernel: str) -> None:
    assert_reported(PREAMBLE + CUDA, kernel, lambda: start_hopper(CUDA, kernel, fixed=False))


@pytest.mark.parametrize("kernel", planted(CUDA))
def test_its_correct_twin_runs(kernel: str) -> None:
    for seed in (None, 1):
        assert start_hopper(CUDA, kernel, True, seed).any()


@pytest.mark.parametrize("seed", [None, 1])
def test_a_block_of_half_a_warp_sums_into_its_first_lane(seed: int | None) -> None:
    source = r"""
KERNEL(k) (const int* in, int* out) {
    int x = in[T];
    for (int d = 8; d; d /= 2)
        x += __shfl_down_sync(0xffffffff, x, d);
    FIX(if (T == 0)) out[T] = x;
}"""
    values, out = np.arange(16, dtype=np.int32), np.zeros(16, np.int32)
    launch(hopper_ptx(source, fixed=True), "k", 1, 16, [values, out], order_seed=seed)
    assert out[0] == values.sum()
    with pytest.raises(EmulatorError, match="does not execute it"):
        launch(hopper_ptx(source), "k", 1, 16, [values, out], order_seed=seed)
