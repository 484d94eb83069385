"""Programmatic dependent launch: the second launch starts as early as it may, and is checked.

`first` writes and reads; the kernels after it are launched with ``overlaps=True``.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from ptx_emulator import RaceError, launch
from tests.support.nvrtc_helper import compile_ptx

Array = np.ndarray[Any, Any]
SEEDS = [None, 1]
BLOCKS, THREADS = 132, 128  # more blocks than a wave of the emulator has
SIZE = BLOCKS * THREADS
CUDA = r"""
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#define START asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#define I (blockIdx.x * blockDim.x + threadIdx.x)
#define KERNEL(name) extern "C" __global__ void name(const int* in, int* mid, int* out)
KERNEL(first) { START; mid[I] = in[I] + 1; }
KERNEL(second) { const int own = in[I]; WAIT; START; out[I] = 10 * mid[I] + own; }
KERNEL(third) { WAIT; mid[I] = out[I] + 1; }
// Its dependents may start before `first` has ended.
KERNEL(starts_too_early) { START; WAIT; out[I] = 10 * mid[I]; }
KERNEL(waits_late) { const int early = mid[I]; WAIT; out[I] = 10 * early; }  // LATE
KERNEL(overwrites_a_result) { mid[I] = 7; WAIT; }  // RESULT
KERNEL(overwrites_an_input) { ((int*)in)[I] = 7; WAIT; }  // INPUT
KERNEL(by_nc) { WAIT; out[I] = __ldg(mid + I); }  // NC
KERNEL(never_waits) { out[I] = in[I]; }
// A wait of one warp is valid for what a barrier orders after it.
KERNEL(one_warp_waits) {
  if (threadIdx.x < 32) WAIT;
  __syncthreads();
  out[I] = 10 * mid[I];
}
KERNEL(one_warp_waits_too_late) {
  __syncthreads();
  if (threadIdx.x < 32) WAIT;
  out[I] = 10 * mid[I];  // APART
}
KERNEL(polls) {  // another warp, which waits
  __shared__ volatile int done;
  if (threadIdx.x == 0) done = 0;
  __syncthreads();
  if (threadIdx.x == 32) {
    WAIT;
    done = 1;
  }
  if (threadIdx.x == 0) while (!done) {}
  __syncthreads();
  out[I] = 10 * mid[I];
}
"""
IN = np.arange(SIZE, dtype=np.int32)


def run(*kernels: str, check: bool = True, seed: int | None = None) -> tuple[Array, Array]:
    """Launches the kernels in turn, all but the first one with ``overlaps``; mid and out."""
    mid, out = np.full(SIZE, -1, np.int32), np.zeros(SIZE, np.int32)
    arrays = [IN.copy(), mid, out]
    ptx = compile_ptx(CUDA, "sm_90a")
    for place, kernel in enumerate(kernels):
        how = {"check": check, "order_seed": seed, "overlaps": place > 0}
        launch(ptx, kernel, BLOCKS, THREADS, arrays, **how)
    return mid, out


def line(mark: str) -> str:
    lines = CUDA.splitlines()
    return f"test.cu:{next(i for i, text in enumerate(lines) if text.endswith('// ' + mark)) + 1}:"


@pytest.mark.parametrize(
    ("kernel", "seed"),
    [*product(["second", "one_warp_waits", "starts_too_early"], SEEDS), ("polls", None)],
)
def test_a_launch_that_waits_sees_what_the_one_before_wrote(kernel: str, seed: int | None) -> None:
    out = run("first", kernel, seed=seed)[1]
    assert (out == 10 * (IN + 1) + (IN if kernel == "second" else 0)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_each_of_three_launches_waits_for_the_one_before(seed: int | None) -> None:
    mid, out = run("first", "second", "third", seed=seed)
    assert (mid == out + 1).all()
    assert (out == 11 * IN + 10).all()


def test_before_its_wait_a_launch_sees_nothing_of_the_one_before() -> None:
    """Without checkers too: the blocks of the first wave run ahead of all writes."""
    out = run("first", "waits_late", check=False)[1]
    assert (out[:THREADS] == -10).all()
    assert (out[-THREADS:] == 10 * (IN[-THREADS:] + 1)).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kernel", "what", "where"),
    [
        ("waits_late", "a read of what the launch before may still write", "LATE"),
        ("overwrites_a_result", "a write of what the launch before may still access", "RESULT"),
        ("overwrites_an_input", "a write of what the launch before may still access", "INPUT"),
        ("one_warp_waits_too_late", "a read of what the launch before may still write", "APART"),
        ("by_nc", "valid for memory that nothing writes", "NC"),
    ],
)
def test_an_access_before_the_wait_is_reported(
    kernel: str, what: str, where: str, seed: int | None
) -> None:
    with pytest.raises(RaceError, match=what) as caught:
        run("first", kernel, seed=seed)
    assert line(where) in str(caught.value)
    assert "accessed by first" in str(caught.value)


@pytest.mark.parametrize("check", [True, False])
def test_an_overlapping_launch_without_a_wait_is_reported(check: bool) -> None:
    with pytest.raises(RaceError, match="never waits for it"):
        run("first", "never_waits", check=check)


def test_no_wait_is_needed_after_a_launch_that_lets_nothing_start() -> None:
    assert (run("never_waits", "never_waits")[1] == IN).all()


def test_a_launch_that_starts_others_before_it_waits_leaves_two_running() -> None:
    """The third kernel reads what the first wrote, and waits for neither."""
    assert run("first", "second", "waits_late")[1] is not None  # `second` has waited for `first`
    with pytest.raises(RaceError, match="accessed by first"):
        run("first", "starts_too_early", "waits_late")


@pytest.mark.parametrize("kernel", ["waits_late", "overwrites_a_result", "by_nc"])
def test_without_the_attribute_a_launch_follows_the_end_of_the_one_before(kernel: str) -> None:
    mid, out = np.full(SIZE, -1, np.int32), np.zeros(SIZE, np.int32)
    for each in ("first", kernel):
        launch(compile_ptx(CUDA, "sm_90a"), each, BLOCKS, THREADS, [IN.copy(), mid, out])
    assert (mid == (7 if kernel == "overwrites_a_result" else IN + 1)).all()
