"""Control flow: divergence and reconvergence, loops, switches, calls, grids, scoped names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest

from flashgen.shared.errors import EmulatorError
from ptx_emulator.errors import Misaligned, Trapped, UninitialisedRead, UnknownInstruction
from ptx_emulator.ptx.flatten import flatten
from ptx_emulator.ptx.parser import parse
from tests.ptx_emulator.test_conformance import Array, compiled, probe, run, run_ptx

SEEDS = [None, 1]

CUDA = r"""
#define THREAD (blockIdx.x * blockDim.x + threadIdx.x)
extern "C" __global__ void nested(const int* in, int* out) {
    int i = THREAD, x = in[i], r = 0;
    if (x & 1) {
        if (x & 2) { r = x * 3; if (x & 4) r -= 7; else r += 1; }
        else       { for (int j = 0; j < (x >> 3); ++j) r += j * j; }
        r ^= 0x55;
    } else if (x > 40) {
        r = -x;
        if (x > 80) { out[i] = 12345; return; }
    }
    out[i] = r;
}
extern "C" __global__ void collatz(const int* in, int* out) {
    int i = THREAD, x = in[i], steps = 0;
    while (x != 1) { x = x & 1 ? 3 * x + 1 : x / 2; ++steps; }
    out[i] = steps;
}
extern "C" __global__ void jumps(const int* in, int* out) {
    int i = THREAD, x = in[i], sum = 0;
    for (int a = 0; a < 12; ++a) {
        if ((x + a) % 5 == 0) continue;
        for (int b = 0; b < a; ++b) {
            if (b * a > x) break;
            if ((b ^ x) & 1) continue;
            sum += a * 16 + b;
        }
        if (sum > 1000 + x) break;
        sum += 1;
    }
    out[i] = sum;
}
extern "C" __global__ void reconverge(const int* in, int* out) {
    int i = THREAD, x = in[i], sum = 0;
    for (int j = 0; j < x % 9; ++j) sum += x + j;
    if (x % 3 == 0) sum *= 2;
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    out[i] = sum;
}
extern "C" __global__ void shuffle_in_loop(const int* in, int* out) {
    int i = THREAD, lane = threadIdx.x & 31, x = in[i], left = x % 7;
    while (__any_sync(0xffffffffu, left > 0)) {
        int other = __shfl_xor_sync(0xffffffffu, x, 1);
        if (left > 0) { x += other * (lane + 1); --left; }
    }
    out[i] = x;
}
extern "C" __global__ void early(const int* in, int* out, int n) {
    int i = THREAD;
    if (i >= n) return;
    int x = in[i];
    if (x < 0) return;
    unsigned here = __activemask();
    out[i] = x + 1 + (here == 0);
}
extern "C" __global__ void early_then_barrier(const int* in, int* out, int n) {
    __shared__ int s[128];
    if (threadIdx.x >= n) return;           // the barrier counts those that stay
    s[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = s[n - 1 - threadIdx.x];
}
extern "C" __global__ void dispatch(const int* in, int* out) {
    int i = THREAD, x = in[i], r;
    switch (x & 15) {
        case 0: r = x + 1; break;
        case 1: r = x * x; break;
        case 2: r = -x;
        case 3: r = x ^ 77; break;
        case 4: r = x / 3; break;
        case 5: r = x % 7; break;
        case 6: r = x << 2; break;
        case 9: r = 99; break;
        case 11: return;
        default: r = 1000;
    }
    out[i] = r;
}
__device__ __noinline__ float poly(float x, int n) {
    float y = 0.f;
    for (int i = 0; i < n; ++i) y = y * x + 1.f;
    return y;
}
struct Both { float low, high; int where; };
__device__ __noinline__ Both extremes(const float* p, int n) {
    Both b = {p[0], p[0], 0};
    for (int i = 1; i < n; ++i) {
        if (p[i] < b.low) { b.low = p[i]; b.where = i; }
        b.high = p[i] > b.high ? p[i] : b.high;
    }
    return b;
}
__device__ __noinline__ void accumulate(float* sum, float x) { *sum += x; }
extern "C" __global__ void calls(const float* in, float* out) {
    int i = threadIdx.x;
    float sum = 0.f;
    if (i % 3) sum = poly(in[i], i % 5);
    Both b = extremes(in + i, 4);
    accumulate(&sum, b.low + 10.f * b.where);
    if (i & 1) accumulate(&sum, b.high);
    out[i] = sum;
}
__device__ __noinline__ int step(int x) {
    int r = x & 3;
    while (x > 2) { x = x & 1 ? x - 3 : x / 2; r = 5 * r + x; }
    return r & 63;
}
__device__ __noinline__ int twice(int x) { return step(x) + 64 * step(step(x) ^ 33); }
extern "C" __global__ void chains(const int* in, int* out) {
    int i = threadIdx.x, x = in[i];
    out[i] = x & 1 ? twice(step(x) + 7) - twice(x) : step(twice(x)) + step(x);
}
__device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
extern "C" __global__ void recursion(const int* in, int* out) {
    int i = threadIdx.x;
    out[i] = fib(in[i] % 9);
}
extern "C" __global__ void grid3(int* out) {
    int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int n = blockDim.x * blockDim.y * blockDim.z;
    out[b * n + t] = blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z + 1000 * threadIdx.x
                   + 10000 * threadIdx.y + 100000 * threadIdx.z;
}
extern "C" __global__ void waves(const int* in, int* out) {
    __shared__ int s[32];
    s[threadIdx.x] = in[THREAD];
    __syncthreads();
    out[THREAD] = s[31 - threadIdx.x] + blockIdx.x;
}
extern "C" __global__ void scoped(const int* in, int* out) {
    int i = THREAD, x = in[i], r = 0, q = 0;
    #pragma unroll
    for (int k = 0; k < 3; ++k)
        asm volatile("{ .reg .pred P; .reg .b32 t; setp.gt.s32 P, %1, %2; mov.b32 t, 5;\n"
                     "@P bra SKIP; mov.b32 t, 9; SKIP: add.s32 %0, %0, t; }"
                     : "+r"(r) : "r"(x), "r"(10 * k));
    asm volatile("{ .reg .b32 t; { .reg .b32 t; mov.b32 t, 1; add.s32 %0, %1, t; }"
                 " mov.b32 t, 2; add.s32 %0, %0, t; }" : "=r"(q) : "r"(x));
    out[i] = r * 1000 + q;
}
"""
VALUES = np.random.default_rng(1).integers(0, 100, 256).astype(np.int32)


def lanewise(kernel: str, seed: int | None = None, values: Array = VALUES) -> Array:
    out = np.full_like(values, -1)
    run(CUDA, kernel, (2,), (values.size // 2,), values, out, seed=seed)
    return out


def nested(x: int) -> int:
    if x & 1:
        looped = sum(j * j for j in range(x >> 3))
        return (x * 3 + (-7 if x & 4 else 1) if x & 2 else looped) ^ 0x55
    return 12345 if x > 80 else -x if x > 40 else 0


def collatz(x: int) -> int:
    steps = 0
    while x != 1:
        x, steps = (3 * x + 1 if x & 1 else x // 2), steps + 1
    return steps


def jumps(x: int) -> int:
    total = 0
    for a in range(12):
        if (x + a) % 5 == 0:
            continue
        for b in range(a):
            if b * a > x:
                break
            if (b ^ x) & 1:
                continue
            total += a * 16 + b
        if total > 1000 + x:
            break
        total += 1
    return total


def dispatch(x: int) -> int:
    cases = {0: x + 1, 1: x * x, 2: x ^ 77, 3: x ^ 77, 4: x // 3, 5: x % 7, 6: x << 2}
    cases |= {9: 99, 11: -1}
    return cases.get(x & 15, 1000)


def scoped(x: int) -> int:
    return 1000 * sum(5 if x > 10 * k else 9 for k in range(3)) + x + 3


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("function", [nested, jumps, dispatch, scoped], ids=lambda f: f.__name__)
def test_each_lane_follows_its_own_path(function: Callable[[int], int], seed: int | None) -> None:
    got = lanewise(function.__name__, seed)
    assert got.tolist() == [function(x) for x in VALUES.tolist()]


def test_loops_end_lane_by_lane() -> None:
    values = np.maximum(VALUES, 1)
    assert lanewise("collatz", values=values).tolist() == [collatz(x) for x in values.tolist()]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_warp_is_whole_again_after_a_divergent_loop(seed: int | None) -> None:
    x = VALUES.astype(np.int64)
    trips = x % 9
    sums = (x * trips + trips * (trips - 1) // 2) * np.where(x % 3 == 0, 2, 1)
    want = sums.reshape(-1, 32).sum(axis=1).repeat(32)
    assert (lanewise("reconverge", seed) == want).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles_inside_a_loop_that_runs_until_the_last_lane_is_done(seed: int | None) -> None:
    x = VALUES.astype(np.uint32)
    left, lane = VALUES % 7, np.arange(VALUES.size) % 32
    for _ in range(left.max()):
        other = x[np.arange(x.size) ^ 1]
        x = np.where(left > 0, x + other * (lane + 1).astype(np.uint32), x)
        left = left - 1
    assert (lanewise("shuffle_in_loop", seed).view(np.uint32) == x).all()


def test_lanes_that_return_early_write_nothing() -> None:
    values = VALUES - 50
    out = np.full_like(values, -1)
    run(CUDA, "early", (3,), (96,), values, out, np.int32(250))
    want = np.where((values >= 0) & (np.arange(256) < 250), values + 1, -1)
    assert (out == want).all()


@pytest.mark.parametrize("count", [32, 50, 64, 97, 128])
def test_threads_that_have_left_are_not_waited_for(count: int) -> None:
    out = np.full(128, -1, np.int32)
    run(CUDA, "early_then_barrier", (1,), (128,), VALUES[:128], out, np.int32(count))
    assert (out[:count] == VALUES[:count][::-1]).all()
    assert (out[count:] == -1).all()


def test_calls_return_scalars_structs_and_write_through_pointers() -> None:
    x = np.random.default_rng(2).integers(-9, 9, 70).astype(np.float32)
    out = np.zeros(64, np.float32)
    run(CUDA, "calls", (1,), (64,), x, out)
    for i in range(64):
        window = x[i : i + 4].tolist()
        total = 0.0
        if i % 3:
            for _ in range(i % 5):
                total = total * x[i] + 1
        total += min(window) + 10 * window.index(min(window)) + (max(window) if i & 1 else 0)
        assert out[i] == total, i


def test_lanes_in_different_calls_of_one_function_have_values_of_their_own() -> None:
    def step(x: int) -> int:
        r = x & 3
        while x > 2:
            x = x - 3 if x & 1 else x // 2
            r = 5 * r + x
        return r & 63

    def twice(x: int) -> int:
        return step(x) + 64 * step(step(x) ^ 33)

    x = np.random.default_rng(3).integers(0, 500, 64).astype(np.int32)
    out = np.zeros(64, np.int32)
    run(CUDA, "chains", (1,), (64,), x, out)
    for value, got in zip(x.tolist(), out.tolist(), strict=True):
        odd = value & 1
        want = twice(step(value) + 7) - twice(value) if odd else step(twice(value)) + step(value)
        assert got == want, value


def test_all_calls_of_a_function_have_the_same_registers() -> None:
    def registers(calls: int) -> int:
        chained = "step(" * calls + "in[threadIdx.x]" + ")" * calls
        source = CUDA.replace("step(twice(x)) + step(x)", chained)
        flat = flatten(module := parse(compiled(source)), module.functions["chains"])
        return len(flat.registers)

    assert registers(40) < registers(20) + 100 < 400


def test_recursion_is_refused_by_name() -> None:
    with pytest.raises(UnknownInstruction, match="recursive") as caught:
        run(CUDA, "recursion", (1,), (64,), VALUES[:64], np.zeros(64, np.int32))
    assert "as a loop" in caught.value.way_out
    assert "test.cu:" in caught.value.where


POINTERS = r"""
typedef double (*Step)(double, const double*);
struct Pair { double value; int parts[3]; };
typedef Pair (*Change)(Pair, int);
__device__ __noinline__ double plus(double a, const double* by) { return a + by[0]; }
__device__ __noinline__ double times(double a, const double* by) { return a * by[1]; }
__constant__ Step steps[3] = {plus, 0, times};
__device__ __noinline__ Pair first(Pair p, int by) { p.parts[0] += by; return p; }
__device__ __noinline__ Pair last(Pair p, int by) { p.parts[2] *= by; p.value = -by; return p; }
__device__ __noinline__ double twice(Step step, double a, const double* by) {
    return step(step(a, by), by);
}
extern "C" __global__ void table(double* out, const double* by, int skip) {
    int t = threadIdx.x;
    Step chosen = t % 3 ? plus : times;
    out[t] = t < 40 ? steps[(t & 1) * skip](twice(chosen, t, by), by) + (chosen == plus) : 0;
}
extern "C" __global__ void structs(double* out) {
    Change changes[2] = {first, last};
    Pair p = {0.5, {1, 2, 3}};
    for (int i = 0; i < 3; ++i) p = changes[threadIdx.x >> i & 1](p, i + 2);
    out[threadIdx.x] = p.value + p.parts[0] + 100 * p.parts[1] + 10000 * p.parts[2];
}
struct Shape { __device__ virtual int size(int) const = 0; };
struct Line : Shape { __device__ int size(int a) const override { return a; } };
struct Box : Shape {
    const Shape* inner;
    __device__ Box(const Shape* inner) : inner(inner) {}
    __device__ int size(int a) const override { return a * inner->size(a + 1); }
};
extern "C" __global__ void methods(int* out, int boxes) {
    Line line;
    Box box(&line), nested(&box);
    const Shape* shapes[3] = {&line, &box, boxes > 1 ? &nested : &box};
    out[threadIdx.x] = shapes[threadIdx.x % 3]->size(threadIdx.x);
}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pointer_calls_the_function_of_each_lane(seed: int | None) -> None:
    out, by = np.zeros(64), np.array([2.0, 3.0])
    run(POINTERS, "table", (1,), (64,), out, by, np.int32(2), seed=seed)
    want = []
    for t in range(40):
        value = t + 4.0 if t % 3 else t * 9.0
        want.append((value * 3 if t % 2 else value + 2) + (t % 3 > 0))
    assert out.tolist() == want + [0.0] * 24


def test_a_pointer_to_no_function_ends_the_kernel_at_its_call() -> None:
    with pytest.raises(Trapped, match=r"points to no function(.|\n)*lane 1, test\.cu:16: call"):
        run(POINTERS, "table", (1,), (64,), np.zeros(64), np.ones(2), np.int32(1))


def test_structs_are_passed_through_pointers_to_functions() -> None:
    out = np.zeros(8)
    run(POINTERS, "structs", (1,), (8,), out)
    for t in range(8):
        value, parts = 0.5, [1, 2, 3]
        for i in range(3):
            if t >> i & 1:
                parts[2], value = parts[2] * (i + 2), -i - 2
            else:
                parts[0] += i + 2
        assert out[t] == value + parts[0] + 100 * parts[1] + 10000 * parts[2]


def test_virtual_functions_run_and_one_inside_itself_is_refused_where_it_happens() -> None:
    out, lanes = np.zeros(64, np.int32), np.arange(64)
    run(POINTERS, "methods", (1,), (64,), out, np.int32(1))
    assert (out == np.where(lanes % 3 == 0, lanes, lanes * (lanes + 1))).all()
    with pytest.raises(UnknownInstruction, match=r"through a pointer, recursive(.|\n)*as a loop"):
        run(POINTERS, "methods", (1,), (64,), out, np.int32(2))


def tables_that_call_each_other(functions: int, levels: int) -> str:
    """CUDA C++ of tables of functions, those of each level but the first call the one before."""
    source = "typedef int (*Step)(int);\n"
    for level in range(levels):
        names = [f"f{level}_{i}" for i in range(functions)]
        for i, name in enumerate(names):
            body = f"a + {i}"
            if level:
                body += f" + table{level - 1}[(a + {i}) % {functions}](a * 2)"
            source += f"__device__ __noinline__ int {name}(int a) {{ return {body}; }}\n"
        source += f"__constant__ Step table{level}[] = {{{', '.join(names)}}};\n"
    call = f"table{levels - 1}[threadIdx.x % {functions}](threadIdx.x)"
    return source + f'extern "C" __global__ void k(int* out) {{ out[threadIdx.x] = {call}; }}'


def test_functions_that_may_call_each_other_through_pointers_have_one_body_each() -> None:
    """Copies for every order in which they may call each other are more than memory holds."""

    def wanted(level: int, i: int, a: int) -> int:
        return a + i + (wanted(level - 1, (a + i) % 4, a * 2) if level else 0)

    source, out = tables_that_call_each_other(4, 3), np.zeros(64, np.int32)
    run(source, "k", (1,), (64,), out)
    assert out.tolist() == [wanted(2, t % 4, t) for t in range(64)]
    module = parse(compiled(source))
    bodies = sum(len(fn.code) for fn in module.functions.values())
    assert len(flatten(module, module.functions["k"]).code) < 10 * 12 * bodies


@pytest.mark.parametrize("seed", SEEDS)
def test_a_grid_of_three_dimensions(seed: int | None) -> None:
    grid, block = (3, 2, 4), (5, 4, 3)
    out = np.zeros(24 * 60, np.int32)
    run(CUDA, "grid3", grid, block, out, seed=seed)
    z, y, x, tz, ty, tx = np.indices((*grid[::-1], *block[::-1])).reshape(6, -1)
    assert (out == x + 10 * y + 100 * z + 1000 * tx + 10000 * ty + 100000 * tz).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_more_blocks_than_could_ever_run_at_once(seed: int | None) -> None:
    values = np.arange(32 * 2500, dtype=np.int32)
    out = np.zeros_like(values)
    run(CUDA, "waves", (2500,), (32,), values, out, seed=seed)
    want = values.reshape(-1, 32)[:, ::-1] + np.arange(2500)[:, None]
    assert (out.reshape(-1, 32) == want).all()


def test_brx_idx_jumps_by_a_table() -> None:
    body = """.reg .pred p; .reg .b32 i; and.b32 i, %a, 3; mov.b32 %d, 0;
        table: .branchtargets L0, L1, L2, L0;
        brx.idx i, table;
        L0: add.u32 %d, %d, 100; bra.uni OUT;
        L1: add.u32 %d, %d, 200; setp.gt.u32 p, %a, 50; @p bra L2; bra OUT;
        L2: add.u32 %d, %d, 300;
        OUT: add.u32 %d, %d, i;"""
    values = VALUES.astype(np.uint32)
    base = {0: 100, 1: 200, 2: 300, 3: 100}
    want = [base[x & 3] + (300 if x & 3 == 1 and x > 50 else 0) + (x & 3) for x in values.tolist()]
    assert probe(body, "u4", values).tolist() == want


def test_a_predicated_instruction_acts_only_where_its_guard_holds() -> None:
    body = """.reg .pred p, q; .reg .b32 x; setp.lt.u32 p, %a, 50; and.b32 x, %a, 1;
        setp.ne.and.s32 q, x, 0, p; mov.b32 %d, 7; @p add.u32 %d, %d, %a; @!p mov.b32 %d, 1;
        @q st.global.u32 [%at_a], 1000; @!q mov.pred p, q; ld.global.u32 %e, [%at_a];
        @p add.u32 %d, %d, 10000;"""
    values = VALUES.astype(np.uint32)
    before = values.copy()
    got, memory = probe(body, "u4 u4", values)
    odd = (before < 50) & (before & 1 == 1)
    assert (memory == np.where(odd, 1000, before)).all()
    want = np.where(before < 50, before + 7, 1) + np.where(odd, 10000, 0)
    assert (got == want).all()


def test_exit_ends_a_thread_from_inside_a_function() -> None:
    ptx = """.func quit(.param .b32 v) { .reg .b32 %v; .reg .pred %p; ld.param.b32 %v, [v];
            setp.gt.s32 %p, %v, 9; @%p exit; ret; }
        .visible .entry k(.param .u64 out) { .reg .b32 %t; .reg .b64 %p; mov.u32 %t, %tid.x;
            ld.param.u64 %p, [out]; mad.wide.u32 %p, %t, 4, %p;
            { .param .b32 v; st.param.b32 [v+0], %t; call.uni quit, (v); }
            st.global.u32 [%p], 1; ret; }"""
    out = np.zeros(32, np.uint32)
    run_ptx(ptx, "k", 1, 32, out)
    assert out.tolist() == [1] * 10 + [0] * 22


@pytest.mark.parametrize(
    ("kind", "want"), [("u8", 0xC8), ("s8", 0xFFC8), ("u16", 0x1C8), ("b8", 0xC8)]
)
def test_a_parameter_is_read_narrower_than_it_was_written(kind: str, want: int) -> None:
    """As NVRTC passes a bool: 32 bits are written, of which the function reads the lowest 8."""
    ptx = f""".func (.param .b32 r) low(.param .b32 v) {{ .reg .b16 %h; .reg .b32 %w;
            ld.param.{kind} %h, [v]; cvt.u32.u16 %w, %h; st.param.b32 [r+0], %w; ret; }}
        .visible .entry k(.param .u64 out) {{ .reg .b32 %t; .reg .b64 %p;
            ld.param.u64 %p, [out]; mov.u32 %t, 0x1C8;
            {{ .param .b32 v; .param .b32 r; st.param.b32 [v+0], %t;
               call.uni (r), low, (v); ld.param.b32 %t, [r+0]; }}
            st.global.u32 [%p], %t; ret; }}"""
    out = np.zeros(1, np.uint32)
    run_ptx(ptx, "k", 1, 1, out)
    assert out.tolist() == [want]


@pytest.mark.parametrize("space", [".local", ""])
@pytest.mark.parametrize("element", [0, 1])
def test_a_vector_of_which_a_part_is_set_is_stored_to_local_memory(
    element: int, space: str
) -> None:
    """As compilers store an array that the program has set in part; the rest must not be read."""
    ptx = f""".visible .entry k(.param .u64 out) {{ .local .align 4 .b8 a[4];
            .reg .b16 %h<3>; .reg .b32 %t; .reg .b64 %p, %a; .reg .pred %q;
            ld.param.u64 %p, [out]; mov.u32 %t, %tid.x; setp.eq.u32 %q, %t, 99;
            mov.u64 %a, a; {"" if space else "cvta.local.u64 %a, %a;"}
            mov.u16 %h0, 7; @%q mov.u16 %h1, 8;
            st{space}.v2.u8 [%a], {{%h0, %h1}}; ld.local.u8 %h2, [a+{element}];
            cvt.u32.u16 %t, %h2; st.global.u32 [%p], %t; ret; }}"""
    out = np.zeros(1, np.uint32)
    if element:
        with pytest.raises(UninitialisedRead, match="local memory is read"):
            run_ptx(ptx, "k", 1, 1, out)
    else:
        run_ptx(ptx, "k", 1, 1, out)
        assert out.tolist() == [7]


STORE = """.visible .entry k(.param .u64 out) { .local .align 16 .b8 a[16];
    .shared .align 16 .b8 s[16]; .reg .b32 %t, %u; .reg .b64 %p; .reg .pred %q; mov.u32 %t, %tid.x;
    setp.eq.u32 %q, %t, 99; @%q mov.u32 %u, 8; mov.u64 %p, NAME; cvta.SPACE.u64 %p, %p;
    st.v2.u32 [%p+AT], {%t, %u}; ret; }"""


@pytest.mark.parametrize(
    ("space", "at", "error"),
    [
        ("local", 8, None),
        ("local", 4, Misaligned),
        ("shared", 8, UninitialisedRead),
        ("shared", 4, Misaligned),
    ],
)
def test_only_local_memory_holds_what_nothing_has_written(
    space: str, at: int, error: type[EmulatorError] | None
) -> None:
    text = STORE.replace("NAME", space[0] if space == "shared" else "a")
    text = text.replace("SPACE", space).replace("AT", str(at))
    with pytest.raises(error) if error else nullcontext():
        run_ptx(text, "k", 1, 1, np.zeros(1, np.uint32))


@pytest.mark.parametrize("space", [".local", ""])
@pytest.mark.parametrize("element", [0, 1])
def test_a_vector_of_local_memory_needs_only_the_elements_that_are_read(
    element: int, space: str
) -> None:
    """As compilers load the members of a structure with the padding between them."""
    ptx = f""".visible .entry k(.param .u64 out) {{ .local .align 8 .b8 a[8];
            .reg .b32 %t<3>; .reg .b64 %p, %a; ld.param.u64 %p, [out];
            mov.u64 %a, a; {"" if space else "cvta.local.u64 %a, %a;"} mov.u32 %t2, 7;
            st.local.u32 [a], %t2; ld{space}.v2.u32 {{%t0, %t1}}, [%a];
            st.global.u32 [%p], %t{element}; ret; }}"""
    out = np.zeros(1, np.uint32)
    if element:
        with pytest.raises(UninitialisedRead, match="local memory is read"):
            run_ptx(ptx, "k", 1, 1, out)
    else:
        run_ptx(ptx, "k", 1, 1, out)
        assert out.tolist() == [7]


PACK = """ld.local.v4.u8 {%h0, %h1, %h2, %h3}, [a]; cvt.u32.u16 %d, %h1; shl.b32 %d, %d, 8;
    cvt.u32.u16 %u, %h0; and.b32 %u, %u, 255; or.b32 %d, %d, %u;"""
FIELD = "ld.local.u32 %d, [a+4]; mov.u32 %u, 5; bfi.b32 %d, %u, %d, 8, 4;"
SET = """or.b32 %d, %d, 3; and.b32 %d, %d, -29; or.b32 %d, %d, 16; st.local.u32 [a+20], %d;
    ld.local.u32 %d, [a+20];"""
UNWRITTEN = "ld.local.u32 %d, [a+4];"
HIGH = f"{UNWRITTEN} and.b32 %d, %d, 128;"  # bit 7 alone is not written
WIDE = "ld.local.b128 %q, [a]; st.local.b128 [a+16], %q;"
LOW = "cvt.u32.u64 %d, %x;"
FIRST = "ld.local.u32 %d, [a];"  # bits 0 to 7 are written
COPY = "ld.local.u64 %x, [a+8]; st.local.u64 [a+16], %x;"


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (f"{COPY} ld.local.u32 %d, [a+16];", 9),
        (f"{COPY} ld.local.u32 %d, [a+20];", None),
        (f"{PACK} st.local.u32 [a+24], %d; ld.local.u8 %h0, [a+24]; cvt.u32.u16 %d, %h0;", 5),
        (f"{PACK} st.local.u32 [a+24], %d; ld.local.u8 %h0, [a+25]; cvt.u32.u16 %d, %h0;", None),
        (f"{PACK} cvt.u16.u32 %h0, %d; st.local.u8 [a+1], %h0; ld.local.u8 %d, [a+1];", 5),
        ("ld.local.u32 %d, [a]; prmt.b32 %d, %d, 0, 0x4440;", 5),
        ("ld.local.u32 %d, [a]; prmt.b32 %d, %d, 0, 0x4410;", None),
        ("ld.local.u32 %d, [a]; and.b32 %d, %d, 0x8000000F;", None),
        ("ld.local.u32 %d, [a]; and.b32 %d, 0xF, %d;", 5),
        ("ld.local.u32 %d, [a]; add.u32 %d, %d, 1; and.b32 %d, %d, 255;", None),
        ("ld.local.u64 %x, [a+8]; mov.b64 {%d, %u}, %x;", 9),
        ("ld.local.u64 %x, [a+8]; mov.b64 {%u, %d}, %x;", None),
        (f"ld.local.u32 %u, [a+12]; mov.b64 %x, {{%u, 7}}; shr.u64 %x, %x, 32; {LOW}", 7),
        (f"ld.local.u32 %u, [a+12]; mov.b64 %x, {{7, %u}}; shr.u64 %x, %x, 1; {LOW}", None),
        (f"ld.local.u64 %x, [a+8]; shl.b64 %x, %x, 36; shr.u64 %x, %x, 36; {LOW}", 9),
        ("ld.local.s8 %d, [a+1]; and.b32 %d, %d, 0xFF00;", None),
        (f"ld.local.u32 %d, [a+4]; {SET} and.b32 %d, %d, 31;", 19),
        (f"ld.local.u32 %d, [a+4]; {SET} and.b32 %d, %d, 63;", None),
        (f"{FIELD} and.b32 %d, %d, 0xF00;", 0x500),
        (f"{FIELD} and.b32 %d, %d, 0x1F00;", None),
        ("ld.local.u32 %u, [a]; mov.u32 %d, 9; bfi.b32 %d, %u, %d, 28, 16;", 0x50000009),
        ("ld.local.u32 %u, [a+4]; mov.u32 %d, 9; bfi.b32 %d, %u, %d, 8, 256;", 9),
        (f"{FIRST} lop3.b32 %d, %d, 0xFFFF, 0xFF00, 0xCA; and.b32 %d, %d, 0xFFFF00FF;", 5),
        (f"{FIRST} mov.u32 %u, 0xF; lop3.b32 %d, %d, %u, 0x10, 0xEA;", 0x15),
        (f"{FIRST} lop3.b32 %d, %d, 0x1F0, 0x10, 0xEA;", None),
        (f"{FIRST} lop3.b32 %d, %d, 7, 9, 0xAA;", 9),
        (f"{FIRST} shl.b32 %d, %d, 24; shr.s32 %d, %d, 20;", 0x50),
        (f"{FIRST} shr.s32 %d, %d, 4; and.b32 %d, %d, 0x1F;", None),
        (f"{FIRST} shr.s32 %d, %d, 4; and.b32 %d, %d, 0xF;", 0),
        (f"{FIRST} bfe.u32 %d, %d, 2, 6;", 1),
        (f"{FIRST} bfe.u32 %d, %d, 2, 7;", None),
        (f"{FIRST} bfe.s32 %d, %d, 0, 3;", 0xFFFFFFFD),
        (f"{FIRST} bfe.s32 %d, %d, 4, 5; and.b32 %d, %d, 15;", 0),
        (f"{FIRST} bfe.s32 %d, %d, 4, 5; and.b32 %d, %d, 0x8000000F;", None),
        (f"{FIRST} shf.l.wrap.b32 %d, 0, %d, 24;", 0x05000000),
        (f"{FIRST} shf.r.wrap.b32 %d, 3, %d, 24; and.b32 %d, %d, 0xFFFF;", 0x500),
        (f"{FIRST} shf.r.wrap.b32 %d, 3, %d, 24; and.b32 %d, %d, 0x1FFFF;", None),
        (f"{FIRST} shf.l.clamp.b32 %d, 3, %d, 40;", 3),
        (f"{HIGH} prmt.b32 %d, %d, 0, 0x4448; and.b32 %d, %d, 127;", None),
        (f"{UNWRITTEN} or.b32 %d, %d, 128; prmt.b32 %d, %d, 0, 0x4448;", 255),
        (f"{HIGH} cvt.s32.s8 %d, %d; and.b32 %d, %d, 127;", 0),
        (f"{HIGH} cvt.s8.u32 %d, %d; and.b32 %d, %d, 256;", None),
        (f"ld.local.u64 %x, [a+16]; mov.b128 %q, {{7, %x}}; mov.b128 {{_, %x}}, %q; {LOW}", None),
        ("mov.b64 %x, 7; mov.b128 %q, {%x, %x}; mov.b128 {_, %x}, %q; cvt.u32.u64 %d, %x;", 7),
        ("ld.local.u32 %d, [a]; st.global.u8 [%p], %d; mov.u32 %d, 5;", 5),
        ("ld.local.u32 %d, [a+4]; st.global.u8 [%p], %d;", None),
        (f"{WIDE} ld.local.u8 %d, [a+24];", 9),
        (f"{WIDE} ld.local.u8 %d, [a+17];", None),
    ],
)  # fmt: skip
def test_padding_may_be_moved_with_the_bytes_beside_it(body: str, want: int | None) -> None:
    """As compilers copy structures and set bit fields; byte 0 and bytes 8 to 11 are written."""
    ptx = f""".visible .entry k(.param .u64 out) {{ .local .align 16 .b8 a[32];
            .reg .b16 %h<4>; .reg .b32 %d, %u; .reg .b64 %p, %x; .reg .b128 %q;
            ld.param.u64 %p, [out];
            mov.u16 %h0, 5; st.local.u8 [a], %h0; mov.u32 %d, 9; st.local.u32 [a+8], %d;
            {body} st.global.u32 [%p], %d; ret; }}"""
    out = np.zeros(1, np.uint32)
    with pytest.raises(UninitialisedRead, match="local") if want is None else nullcontext():
        run_ptx(ptx, "k", 1, 1, out)
    assert want is None or out.tolist() == [want]


def test_spellings_of_other_compilers() -> None:
    """Spaces inside brackets and braces, comments, .loc and .pragma between instructions."""
    body = """.loc 1 2 3
        // a comment with a brace }
        mov.b32 { %h0, %h1 } , %a ;/* and one /* inside */ add.s16 %h0 , %h0 , 1;
        .pragma "nounroll";
        mov.b32 %d,{%h1,%h0};
        $L_x$1: @!%q bra $L_x$2; add.u32 %d, %d, 0x1U;
        $L_x$2: add.u32 %d, %d, 010; add.u32 %d, %d, -1; add.u32 %d, %d, 0b11;"""
    body = ".reg.b16 %h<2>; .reg .pred %q; setp.ne.b32 %q, %a, %a;\n" + body
    values = np.random.default_rng(3).integers(0, 1 << 32, 64, np.uint32)
    swapped = (values >> 16) | ((values & 0xFFFF) + 1 & 0xFFFF) << 16
    assert (probe(body, "u4", values) == swapped + np.uint32(8 - 1 + 3)).all()
