"""Bugs planted in small kernels: each must be reported at its line, for any order of warps.

Every kernel below is correct when compiled with -DFIXED, and is then run as well: no error may be
reported for the correct twin. Lines that an error may refer to end in // BUG, and the arguments of
KERNEL say what is reported, see `planted`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from flashgen.shared.errors import EmulatorError
from ptx_emulator import errors, launch
from tests.ptx_emulator.test_conformance import Array
from tests.support.hopper_ptx import hopper_ptx
from tests.support.nvrtc_helper import compile_ptx

SEEDS = [None, 1, 2]

PREAMBLE = r"""
typedef unsigned u;
#ifdef FIXED
#define FIX(...) __VA_ARGS__
#define BUG(...)
#else
#define FIX(...)
#define BUG(...) __VA_ARGS__
#endif
#define KERNEL(name, ...) extern "C" __global__ void name(const int* in, int* out, int n)
#define T threadIdx.x
#define SMEM(p) ((u)__cvta_generic_to_shared(p))
#define COPY(to, from) \
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(SMEM(to)), "l"(from) : "memory")
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
#define NAMED(op, id, n) asm volatile("bar." op " %0, %1;" :: "n"(id), "n"(n) : "memory")
"""
CUDA = (
    PREAMBLE
    + r"""
KERNEL(missing_sync) {
    __shared__ int s[128];
    s[T] = 0; __syncthreads();
    s[T] = in[T];                                                   // BUG
    FIX(__syncthreads();)
    out[T] = s[127 - T];                                            // BUG
}
KERNEL(one_lane_too_far) {
    __shared__ int s[128];
    s[T] = 0; __syncthreads();
    s[T] = in[T];                                                   // BUG
    __syncwarp();
    out[T] = s[BUG(T == 63 ? 64 :) T];                              // BUG
}
KERNEL(loop_without_second_barrier) {
    __shared__ int s[128];
    int sum = 0;
    for (int i = 0; i < n; ++i) {
        s[T] = in[T] + i;                                           // BUG
        __syncthreads();
        sum += s[127 - T];                                          // BUG
        FIX(__syncthreads();)
    }
    out[T] = sum;
}
KERNEL(write_after_read) {
    __shared__ int s[128];
    s[T] = in[T]; __syncthreads();
    int x = s[(T + 32) % 128];                                      // BUG
    FIX(__syncthreads();)
    s[T] = x + 1;                                                   // BUG
    out[T] = s[T];
}
KERNEL(the_older_of_two_reads, RaceError, may overtake a read) {
    // Warp 2 comes after the newer read, of warp 1; its order after warp 3 is open.
    if (T == 127) out[127] = 5;
    __syncthreads();
    int x = 0;
    if (T / 32 == 0) { x = out[127]; FIX(NAMED("arrive", 2, 96);) }
    if (T / 32 == 1) { NAMED("sync", 1, 64); x = out[127]; NAMED("arrive", 2, BUG(64) FIX(96)); }
    if (T / 32 == 2) NAMED("sync", 2, BUG(64) FIX(96));
    if (T / 32 == 2) out[127] = 7;                                  // BUG
    if (T / 32 == 3) NAMED("sync", 1, 64);
    if (T < 64) out[T] = x;
}
KERNEL(two_writers, RaceError, a write and a write of another warp) {
    __shared__ int s[128];
    s[FIX(T) BUG(T % 64)] = in[T];                                  // BUG
    __syncthreads();
    out[T] = s[FIX(T) BUG(T % 64)];
}
KERNEL(outsider) {
    __shared__ int s[128];
    s[T] = 0; __syncthreads();
    if (T < 64) {
        s[T] = in[T];                                               // BUG
        NAMED("sync", 1, 64);
        out[T] = s[63 - T];
    } else out[T] = s[FIX(T) BUG(T - 64)];                          // BUG
}
KERNEL(arrives_before_writing) {
    __shared__ int s[32];
    if (T < 32) s[T] = 0;
    __syncthreads();
    if (T < 32) {
        BUG(NAMED("arrive", 1, 64);)
        s[T] = in[T];                                               // BUG
        FIX(NAMED("arrive", 1, 64);)
    } else if (T < 64) {
        NAMED("sync", 1, 64);
        out[T] = s[63 - T];                                         // BUG
    }
}
KERNEL(atomic_and_plain) {
    __shared__ int s[1];
    if (T == 0) s[0] = 0;
    __syncthreads();
    atomicAdd((int*)s, 1);                                          // BUG
    FIX(__syncthreads();)
    if (T == 100) s[0] = in[0];                                     // BUG
    __syncthreads();
    out[T] = s[0];
}
KERNEL(async_without_wait, RaceError|UninitialisedRead) {
    __shared__ int s[128];
    s[T] = 0;
    COPY((int*)&s[T], in + T);                                      // BUG
    COMMIT;
    FIX(WAIT(0);)
    out[T] = s[T];                                                  // BUG
}
KERNEL(async_wait_for_the_wrong_group, RaceError|UninitialisedRead) {
    __shared__ int s[256];
    s[T] = s[T + 128] = 0;
    COPY((int*)&s[T], in + T); COMMIT;                              // BUG
    COPY((int*)&s[T + 128], in + T); COMMIT;                        // BUG
    FIX(WAIT(0);) BUG(WAIT(1);)
    out[T] = s[T] + s[T + 128];                                     // BUG
}
KERNEL(async_wait_without_barrier) {
    __shared__ int s[128];
    s[T] = 0; __syncthreads();
    COPY((int*)&s[T], in + T);                                      // BUG
    COMMIT; WAIT(0);
    FIX(__syncthreads();)
    out[T] = s[T ^ 32];                                             // BUG
}
KERNEL(async_barrier_without_wait, RaceError|UninitialisedRead) {
    __shared__ int s[128];
    s[T] = 0; __syncthreads();
    COPY((int*)&s[T], in + T);                                      // BUG
    COMMIT;
    FIX(WAIT(0);)
    __syncthreads();
    out[T] = s[T ^ 32];                                             // BUG
}
KERNEL(async_into_a_buffer_still_read, RaceError, shared memory) {
    __shared__ int s[128];
    s[T] = in[T]; __syncthreads();
    int x = s[T ^ 64];                                              // BUG
    FIX(__syncthreads();)
    COPY((int*)&s[T], in + T);                                      // BUG
    COMMIT; WAIT(0);
    out[T] = x + s[T];
}
KERNEL(async_and_a_store) {
    __shared__ int s[128];
    COPY((int*)&s[T], in + T);                                      // BUG
    COMMIT;
    FIX(WAIT(0);)
    s[T] = 5;                                                       // BUG
    WAIT(0);
    out[T] = s[T];
}
KERNEL(global_race_between_warps, RaceError, another warp of the block) {
    out[T] = in[T];                                                 // BUG
    FIX(__syncthreads();)
    int x = ((volatile int*)out)[127 - T];                          // BUG
    __syncthreads();
    out[T] = x;
}
KERNEL(one_element_past_the_end, OutOfBounds) { out[T] = in[T BUG(+ 1)]; }       // BUG
KERNEL(one_element_before_the_start, OutOfBounds) { out[T] = in[(int)T BUG(- 1)]; } // BUG
KERNEL(one_byte_past_the_end, OutOfBounds) {
    const char* p = (const char*)in;
    out[T] = p[4 * T + 3 BUG(+ (T == 127))];                        // BUG
}
KERNEL(one_byte_written_past_the_end, OutOfBounds) {
    ((char*)out)[4 * T + 3 BUG(+ (T == 127))] = 1;                  // BUG
}
KERNEL(vector_over_the_end, OutOfBounds) {
    if (T < 32) {
        int4 v = *(const int4*)(in + 4 * T BUG(+ 4));               // BUG
        out[T] = v.x + v.y + v.z + v.w;
    }
}
KERNEL(null_pointer, OutOfBounds) { out[T] = in[T] BUG(+ *(volatile int*)0); }   // BUG
extern __shared__ int dynamic[];
KERNEL(past_dynamic_shared_memory, OutOfBounds) {
    dynamic[T] = in[T]; __syncthreads();
    if (T == 127) dynamic[FIX(127) BUG(128)] = 1;                   // BUG
    out[T] = dynamic[T];
}
KERNEL(past_a_local_array, OutOfBounds) {
    int a[8];
    for (int i = 0; i < 8; ++i) a[i] = in[i];
    out[T] = a[(in[T] & 7) BUG(+ n)];                               // BUG
}
KERNEL(misaligned_pair, Misaligned) {
    if (T >= 32) return;
    int2 v = *(const int2*)(in + 2 * T BUG(+ 1));                   // BUG
    out[T] = v.x + v.y;
}
KERNEL(misaligned_shared_quad, Misaligned) {
    __shared__ __align__(16) int s[132];
    s[T] = in[T]; if (T < 4) s[128 + T] = 0;
    __syncthreads();
    if (T >= 32) return;
    int4 v = *(int4*)(s + 4 * T BUG(+ 2));                          // BUG
    out[T] = v.x + v.y + v.z + v.w;
}
KERNEL(unwritten_word, UninitialisedRead) {
    __shared__ int s[128];
    if (FIX(1) BUG(T != 77)) s[T] = in[T];
    __syncthreads();
    out[T] = s[127 - T];                                            // BUG
}
KERNEL(half_written_word, UninitialisedRead) {
    __shared__ __align__(4) short s[256];
    s[2 * T] = in[T];
    FIX(s[2 * T + 1] = 0;)
    __syncthreads();
    out[T] = ((volatile int*)s)[127 - T];                           // BUG
}
KERNEL(barrier_for_half_a_warp, BarrierDivergence|DeadlockError) {
    __shared__ int s[128];
    s[T] = in[T];
    if (FIX(1) BUG((T & 31) < 16)) __syncthreads();                 // BUG
    out[T] = s[T];
    __syncthreads();                                                // BUG
}
KERNEL(named_barrier_for_too_few, DeadlockError) {
    if (T < 32) { FIX(NAMED("sync", 2, 32);) BUG(NAMED("sync", 2, 64);) } // BUG
    out[T] = in[T];
}
KERNEL(two_barriers_crossed, BarrierDivergence|DeadlockError) {
    if (T < 32) { NAMED("sync", 1, 64); NAMED("sync", 2, 64); }     // BUG
    else if (T < 64) {
        BUG(NAMED("sync", 2, 64); NAMED("sync", 1, 64);)            // BUG
        FIX(NAMED("sync", 1, 64); NAMED("sync", 2, 64);)
    }
    out[T] = in[T];
}
KERNEL(warps_disagree_on_the_count, EmulatorError) {
    if (T < 64) { FIX(NAMED("sync", 3, 128);) BUG(NAMED("sync", 3, 96);) } // BUG
    else NAMED("sync", 3, 128);                                     // BUG
    out[T] = in[T];
}
KERNEL(shuffle_with_absent_lanes, EmulatorError) {
    int x = in[T];
    if (FIX(1) BUG((T & 31) < 20)) x = __shfl_xor_sync(0xffffffffu, x, 1); // BUG
    __syncthreads();                                                // BUG
    out[T] = x;
}
KERNEL(ldmatrix_of_anothers_rows) {
    __shared__ __align__(16) int s[128];
    s[T] = in[T];                                                   // BUG
    FIX(__syncthreads();) BUG(__syncwarp();)
    u r; asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" // BUG
                      : "=r"(r) : "r"(SMEM((int*)s) + 16 * (T % 8)) : "memory"); // BUG
    out[T] = r;                                                     // BUG
}
KERNEL(ldmatrix_of_unwritten_rows, UninitialisedRead) {
    __shared__ __align__(16) int s[64];
    if (T < 64 FIX(+ 0) BUG(- 4)) s[T] = in[T];
    __syncthreads();
    u r; asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" // BUG
                      : "=r"(r) : "r"(SMEM((int*)s) + 128 + 16 * (T % 8)) : "memory"); // BUG
    out[T] = r;                                                     // BUG
}
KERNEL(ldmatrix_off_its_row, Misaligned) {
    __shared__ __align__(16) int s[128];
    s[T] = in[T]; __syncthreads();
    u r; asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" // BUG
                      : "=r"(r) : "r"(SMEM((int*)s) + 16 * (T % 8) BUG(+ 8)) : "memory"); // BUG
    out[T] = r;                                                     // BUG
}
"""
)


def planted(source: str) -> dict[str, tuple[str, str]]:
    """Of each KERNEL(name, errors, words): the classes of its error, and words of the message.

    One of several errors, and one of several words, is between ``|``. Without any: RaceError.
    """
    form = re.compile(r"^KERNEL\((\w+)(?:,\s*([\w|]+))?(?:,\s*([^()]*))?\)", re.MULTILINE)
    found = (match.groups() for match in form.finditer(source))
    return {name: (kinds or "RaceError", words or "") for name, kinds, words in found}


def marked_lines(source: str, kernel: str) -> list[str]:
    """The lines of `kernel` that end in // BUG, as an error message names them."""
    lines = source.splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(rf"KERNEL\({kernel}\b", line))
    found = []
    for at in range(start, len(lines)):
        if at > start and lines[at].startswith(("KERNEL(", "extern")):
            break
        if lines[at].endswith("// BUG"):
            found.append(f"test.cu:{at + 1}: ")
    return found


def start(
    source: str, kernel: str, seed: int | None, fixed: bool, blocks: int = 1, threads: int = 128
) -> Array:
    values, out = np.arange(128, dtype=np.int32) * 3 + 0x01010100, np.zeros(512, np.int32)
    ptx = compile_ptx(source, options=("-DFIXED",) if fixed else ())
    args, shared = [values, out[:128], np.int32(8)], 512 if "dynamic" in kernel else 0
    launch(ptx, kernel, blocks, threads, args, shared, order_seed=seed)
    return out


def start_hopper(source: str, kernel: str, fixed: bool, seed: int | None = None) -> Array:
    """Runs a kernel of sm_90a with the arguments (in, out, flags); in two blocks if it says so."""
    values, out = np.arange(1024, dtype=np.int32) * 3 + 1, np.zeros(512, np.int32)
    args = [values, out, np.zeros(128, np.int32)]
    blocks, ptx = 2 if "block" in kernel else 1, hopper_ptx(source, fixed)
    launch(ptx, kernel, blocks, 128, args, order_seed=seed, step_limit=20_000)
    return out


def assert_reported(source: str, kernel: str, run: Callable[[], object]) -> EmulatorError:
    """The error of ``run``: as `planted` has it, with the kernel and one of its marked lines.

    A deadlock of a kernel without such lines names where the warps wait.
    """
    kinds, words = planted(source)[kernel]
    with pytest.raises(tuple(getattr(errors, kind) for kind in kinds.split("|"))) as caught:
        run()
    said = str(caught.value)
    assert kernel in said
    assert any(part in said for part in words.split("|")), said
    lines = marked_lines(source, kernel)
    assert any(line in said for line in lines) or (kinds == "DeadlockError" and not lines), said
    return caught.value


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", planted(CUDA))
def test_the_bug_is_named_at_its_line(kernel: str, seed: int | None) -> None:
    assert_reported(CUDA, kernel, lambda: start(CUDA, kernel, seed, fixed=False))


@pytest.mark.parametrize("kernel", planted(CUDA))
def test_its_correct_twin_runs(kernel: str) -> None:
    for seed in SEEDS:
        assert start(CUDA, kernel, seed, fixed=True).any()
