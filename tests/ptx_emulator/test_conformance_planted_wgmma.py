"""Bugs planted around wgmma: each must be reported at its line, for any order of warps.

As in `test_conformance_planted`, every kernel is correct with -DFIXED.
"""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import launch
from ptx_emulator.errors import DeadlockError
from tests.ptx_emulator.test_conformance_planted import SEEDS, assert_reported, planted
from tests.support.nvrtc_helper import compile_ptx
from tests.support.wgmma_kernels import HEAD

# A (64, 16) at s, B (8, 16) at s + 128, both f16, K-major and without a swizzle.
PREAMBLE = (
    HEAD
    + r"""
#define KERNEL(name, ...) \
  extern "C" __global__ void __launch_bounds__(384) name(const uint4* in, float* out, int n)
#define T threadIdx.x
#define WHERE(p, lead) ((u64)(SMEM(p) >> 4) | (u64)(lead / 16) << 16 | (u64)(128 / 16) << 32)
#define MMA(d, a, b) asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0; }" \
  : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b) : "memory")
#define MMA_FROM(d, a, b) asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, " \
  "1, 1, 0; }" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), \
  "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]) : "l"(b) : "memory")
#define SETUP \
  __shared__ __align__(1024) uint4 s[256]; float d[4] = {0, 0, 0, 0}; \
  u64 A = WHERE(s, 1024), B = WHERE(s + 128, 128); fill(s, in, 4096); \
  PROXY_FENCE; __syncthreads(); keep(d)
#define STORE out[T] = d[0] + d[1] + d[2] + d[3]
"""
)
CUDA = (
    PREAMBLE
    + r"""
KERNEL(sums_read_in_flight, InFlight) {
  SETUP; FENCE; MMA(d, A, B); COMMIT;
  FIX(WAIT(0);)
  STORE;                                                            // BUG
  WAIT(0);
}
KERNEL(sums_changed_in_flight, InFlight) {
  SETUP; FENCE; MMA(d, A, B); COMMIT;
  FIX(WAIT(0); keep(d);)
  d[1] *= 0.5f;                                                     // BUG
  BUG(keep(d); WAIT(0);)
  STORE;
}
KERNEL(fragments_changed_in_flight, InFlight) {
  SETUP; u32 a[4] = {T, T, T, T};
  for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[i]) :: "memory");
  FENCE; MMA_FROM(d, a, B); COMMIT;
  FIX(WAIT(0);)
  asm volatile("add.u32 %0, %0, 1;" : "+r"(a[2]) :: "memory");      // BUG
  WAIT(0); keep(d); STORE; out[T] += (float)a[2];
}
KERNEL(no_wait_at_all, InFlight) {
  SETUP; FENCE; MMA(d, A, B); COMMIT; FIX(WAIT(0);) keep(d);
  STORE;                                                            // BUG
}
KERNEL(group_never_committed, InFlight) {
  SETUP; FENCE; MMA(d, A, B); FIX(COMMIT;) WAIT(0); keep(d);
  STORE;                                                            // BUG
}
KERNEL(waits_for_the_older_group_only, InFlight) {
  SETUP; float e[4] = {0, 0, 0, 0}; keep(e);
  FENCE; MMA(e, A, B); COMMIT; MMA(d, A, B); COMMIT; WAIT(FIX(0) BUG(1)); keep(e); keep(d);
  STORE;                                                            // BUG
  out[T] += e[0]; WAIT(0);
}
KERNEL(waits_in_the_next_turn_only, InFlight) {
  SETUP;
  for (int i = 0; i < n; ++i) {
    FENCE; MMA(d, A, B); COMMIT;
    FIX(WAIT(0);) BUG(if (i != 3) WAIT(0);) keep(d);
    if (i == 3) STORE;                                              // BUG
    WAIT(0); keep(d);
  }
}
KERNEL(ends_without_a_wait, InFlight, no wgmma.wait_group covers it) {
  SETUP; FENCE;
  MMA(d, A, B);                                                     // BUG
  COMMIT; FIX(WAIT(0); keep(d);)
  out[T] = 1;
}
KERNEL(ends_after_a_wait_for_the_older_group, InFlight, no wgmma.wait_group covers it) {
  SETUP; float e[4] = {0, 0, 0, 0}; keep(e);
  FENCE; MMA(e, A, B); COMMIT;
  MMA(d, A, B);                                                     // BUG
  COMMIT; WAIT(FIX(0) BUG(1)); keep(e);
  out[T] = e[0] + 1;
}
KERNEL(ends_without_a_commit, InFlight, no wgmma.commit_group covers it) {
  SETUP; FENCE;
  MMA(d, A, B);                                                     // BUG
  FIX(COMMIT;) WAIT(0); FIX(keep(d);)
  out[T] = 1;
}
KERNEL(no_fence_at_all, FenceError) {
  SETUP; FIX(FENCE;)
  MMA(d, A, B);                                                     // BUG
  COMMIT; WAIT(0); keep(d); STORE;
}
KERNEL(fence_before_the_last_change, FenceError) {
  SETUP; BUG(FENCE;)
  asm volatile("mul.f32 %0, %0, 0f40000000;" : "+f"(d[2]) :: "memory"); // BUG
  FIX(FENCE;)
  MMA(d, A, B); COMMIT; WAIT(0); keep(d); STORE;
}
KERNEL(fence_missing_in_one_turn, FenceError) {
  SETUP;
  for (int i = 0; i < n; ++i) {
    asm volatile("mul.f32 %0, %0, 0f40000000;" : "+f"(d[2]) :: "memory"); // BUG
    FIX(FENCE;) BUG(if (i != 5) FENCE;)
    MMA(d, A, B); COMMIT; WAIT(0); keep(d);
  }
  STORE;
}
KERNEL(paths_that_nobody_takes, InFlight) {
  // Fences and waits are missing on paths that the launch never takes: nothing is wrong.
  SETUP;
  for (int i = 0; i < n; ++i) {
    asm volatile("mul.f32 %0, %0, 0f40000000;" : "+f"(d[2]) :: "memory"); // BUG
    if (n < 100) FENCE;
    MMA(d, A, B); COMMIT;
    if (n < 100) WAIT(0);
    BUG(if (i == 6) { keep(d); FENCE; MMA(d, A, B); })
    keep(d);
  }
  WAIT(0); keep(d); STORE;
}
KERNEL(three_warps_of_four, BarrierDivergence) {
  SETUP; FENCE;
  if (T < FIX(128) BUG(96)) MMA(d, A, B);                           // BUG
  COMMIT; WAIT(0); keep(d); STORE;
}
KERNEL(half_of_a_warp, BarrierDivergence) {
  SETUP; FENCE;
  if (T / 32 != 2 || T % 32 < FIX(32) BUG(16)) MMA(d, A, B);        // BUG
  COMMIT; WAIT(0); keep(d); STORE;
}
KERNEL(a_warp_has_left, EmulatorError) {
  SETUP;
  BUG(if (T >= 96) return;)
  FENCE;                                                            // BUG
  MMA(d, A, B); COMMIT; WAIT(0); keep(d); STORE;
}
KERNEL(descriptors_differ_by_lane, EmulatorError) {
  SETUP; FENCE;
  MMA(d, A + FIX(T / 128) BUG(T % 2), B);                           // BUG
  COMMIT; WAIT(0); keep(d); STORE;
}
KERNEL(field_that_overflows, EmulatorError) {
  SETUP; FENCE;
  MMA(d, BUG(1 << 14 |) A, B);                                // BUG
  COMMIT; WAIT(0); keep(d); STORE;
}
KERNEL(out_of_bounds, OutOfBounds) {
  SETUP; FENCE;
  MMA(d, A, B + FIX(112) BUG(113));                                 // BUG
  COMMIT; WAIT(0); keep(d); STORE;
}
KERNEL(operand_never_written, UninitialisedRead) {
  __shared__ __align__(1024) uint4 s[256]; float d[4] = {0, 0, 0, 0};
  u64 A = WHERE(s, 1024), B = WHERE(s + 128, 128); fill(s, in, FIX(4096) BUG(2048));
  PROXY_FENCE; __syncthreads(); keep(d); FENCE;
  MMA(d, A, B);                                                     // BUG
  COMMIT; WAIT(0); keep(d); STORE;
}
KERNEL(no_barrier_after_the_stores) {
  __shared__ __align__(1024) uint4 s[256]; float d[4] = {0, 0, 0, 0};
  u64 A = WHERE(s, 1024), B = WHERE(s + 128, 128); fill(s, in, 4096);
  PROXY_FENCE; FIX(__syncthreads();) keep(d); FENCE;
  MMA(d, A, B);                                                     // BUG
  COMMIT; WAIT(0); keep(d); STORE;
}
KERNEL(no_proxy_fence) {
  __shared__ __align__(1024) uint4 s[256]; float d[4] = {0, 0, 0, 0};
  u64 A = WHERE(s, 1024), B = WHERE(s + 128, 128); fill(s, in, 4096);
  FIX(PROXY_FENCE;) __syncthreads(); keep(d); FENCE;
  MMA(d, A, B);                                                     // BUG
  COMMIT; WAIT(0); keep(d); STORE;
}
KERNEL(operand_overwritten_in_flight) {
  SETUP; FENCE; MMA(d, A, B); COMMIT; FIX(WAIT(0); __syncthreads();)
  if (T == 64) s[130] = make_uint4(1, 1, 1, 1);                     // BUG
  BUG(WAIT(0);) keep(d); STORE;
}
KERNEL(operand_released_before_the_wait) {
  SETUP;
  if (T < 128) {
    FENCE; MMA(d, A, B); COMMIT; FIX(WAIT(0);)
    asm volatile("bar.arrive 1, 256;" ::: "memory");
    WAIT(0); keep(d); STORE;
  } else {
    asm volatile("bar.sync 1, 256;" ::: "memory");
    s[T - 128] = make_uint4(1, 1, 1, 1);                            // BUG
  }
}
KERNEL(count_off_by_one_warp, DeadlockError) {
  SETUP;
  if (T < 128) {
    FENCE; MMA(d, A, B); COMMIT; WAIT(0); keep(d); STORE;
    asm volatile("bar.arrive 1, %0;" :: "n"(256 BUG(+ 32)) : "memory");
  } else {
    asm volatile("bar.sync 1, %0;" :: "n"(256 BUG(+ 32)) : "memory"); // BUG
    s[T - 128] = make_uint4(1, 1, 1, 1);
  }
}
KERNEL(registers_never_given_back, DeadlockError) {
  if (T < 128) {
    FIX(asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");)
  } else asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");      // BUG
  out[T] = 1;
}
"""
)
TWO_GROUPS = ("operand_released_before_the_wait", "count_off_by_one_warp")


def start(kernel: str, seed: int | None, fixed: bool) -> np.ndarray:
    values, out = np.full(2048, 0x3C00, np.uint16), np.zeros(384, np.float32)
    threads = 256 if kernel in TWO_GROUPS else 384 if "registers" in kernel else 128
    ptx = compile_ptx(CUDA, "sm_90a", ("-DFIXED",) if fixed else ())
    launch(ptx, kernel, 1, threads, [values, out, np.int32(8)], order_seed=seed)
    return out


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", planted(CUDA))
def test_the_bug_is_named_at_its_line(kernel: str, seed: int | None) -> None:
    assert_reported(CUDA, kernel, lambda: start(kernel, seed, fixed=False))


@pytest.mark.parametrize("kernel", planted(CUDA))
def test_its_correct_twin_runs(kernel: str) -> None:
    for seed in SEEDS:
        assert start(kernel, seed, fixed=True).any()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_deadlock_names_the_warps_that_wait(seed: int | None) -> None:
    with pytest.raises(DeadlockError) as caught:
        start("count_off_by_one_warp", seed, fixed=False)
    assert "256 of 288 threads have arrived" in str(caught.value)
    assert "warps 4-7" in str(caught.value)
