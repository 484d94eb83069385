"""Memory: widths and extensions, vectors, local, shared, constant, generic and parameter space."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from flashgen.shared.errors import FlashgenError
from ptx_emulator.checks.shared_races import SharedRaces
from ptx_emulator.state.memory import FlatMemory
from tests.ptx_emulator.test_conformance import Array, agree, probe, run, run_ptx

WORDS = np.random.default_rng(1).integers(0, 1 << 32, 512, np.uint32)
BYTES = WORDS.view(np.uint8)


@pytest.mark.parametrize(
    ("kind", "out"),
    [
        (f"{sign}{width}", f"u{out // 8}")
        for sign in "us"
        for width in (8, 16, 32)
        for out in (16, 32, 64)
        if out >= width
    ],
)
def test_narrow_loads_extend_by_their_sign(kind: str, out: str) -> None:
    size = int(kind[1:]) // 8
    for offset in range(0, 4, size):
        view = f"{'i' if kind[0] == 's' else 'u'}{size}"
        want = WORDS.view(view)[offset // size :: 4 // size].astype("i8").astype(out)
        agree(probe(f"ld.global.{kind} %d, [%at_a+{offset}];", out, WORDS), want, WORDS)


@pytest.mark.parametrize("kind", ["b8", "b16", "b32", "b64", "f32"])
def test_bit_loads_and_stores_round_trip_through_shared_memory(kind: str) -> None:
    size = int(kind[1:]) // 8
    register = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}[size]
    body = f""".reg .b32 t, s; .reg .{register} v; .shared .align 8 .b8 room[1024];
        mov.u32 t, %tid.x; mov.u32 s, room; mad.lo.u32 s, t, 8, s; mov.b64 %d, 0;
        ld.global.{kind} v, [%at_a]; st.shared.b64 [s], %d; st.shared.{kind} [s+{8 - size}], v;
        ld.shared.b64 %d, [s];"""
    values = WORDS.view(np.uint64)
    want = (values & np.uint64((1 << 8 * size) - 1)) << np.uint64(64 - 8 * size)
    agree(probe(body.replace("f32 v", "b32 v"), "u8", values), want, values)


@pytest.mark.parametrize("space", ["global", "shared", "local"])
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (k[:-2], int(k[-1]))
        for k in ["b32x2", "b32x4", "b64x2", "b16x4", "b16x2", "u8x4", "f32x4", "s8x2"]
    ],
)
def test_vectors_move_all_their_elements(kind: str, count: int, space: str) -> None:
    size = int(kind[1:]) // 8
    total = size * count
    regs = ", ".join(f"%v{i}" for i in range(count))
    backwards = ", ".join(f"%v{i}" for i in reversed(range(count)))
    room = "" if space == "global" else f".{space} .align 16 .b8 room[2048];"
    at = "mov.b64 %r, %q;"
    if space != "global":  # the room is the block's in shared memory, the thread's in local
        pitch = 0 if space == "local" else 16
        at = f"mov.u64 %r, room; mad.wide.u32 %r, %t, {pitch}, %r;"
    ptx = f""".visible .entry k(.param .u64 in, .param .u64 out) {{ {room}
        .reg .b64 %p, %q, %r; .reg .b32 %t; .reg .b{max(16, 8 * size)} %v<{count}>;
        mov.u32 %t, %tid.x; ld.param.u64 %p, [in]; mad.wide.u32 %p, %t, {total}, %p;
        ld.param.u64 %q, [out]; mad.wide.u32 %q, %t, {total}, %q; {at}
        ld.global.v{count}.{kind} {{{regs}}}, [%p];
        st.{space}.v{count}.{kind} [%r], {{{backwards}}};
        ld.{space}.v{count}.{kind} {{{regs}}}, [%r]; st.global.v{count}.{kind} [%q], {{{regs}}};
        ret; }}"""
    data = BYTES[: 128 * total].copy()
    out = np.zeros_like(data)
    run_ptx(ptx, "k", 1, 128, data, out)
    want = data.reshape(128, count, size)[:, ::-1]
    assert (out.reshape(128, count, size) == want).all()


@pytest.mark.parametrize(
    "form",
    ["ld.global.nc.b32", "ld.volatile.global.b32", "ld.relaxed.gpu.global.b32", "ld.global.cg.b32",
     "ld.acquire.gpu.global.b32", "ld.global.L1::evict_last.b32", "ld.global.L2::128B.b32",
     "ld.global.nc.L1::no_allocate.L2::256B.b32", "ld.global.ca.u32", "ld.weak.global.b32",
     "ld.b32", "ldu.global.b32", "ld.volatile.b32"],
)  # fmt: skip
def test_load_qualifiers_do_not_change_the_value(form: str) -> None:
    agree(probe(f"{form} %d, [ %at_a + 0 ];", "u4", WORDS), WORDS, WORDS)


@pytest.mark.parametrize("space", ["shared", "shared::cta", ""])
def test_shared_memory_goes_by_several_names(space: str) -> None:
    dot = f".{space}" if space else ""
    body = f""".reg .b32 t, s; .reg .b64 g; .reg .pred p; .shared .align 4 .b8 room[512];
        mov.u32 t, %tid.x; mov.u32 s, room; mad.lo.u32 s, t, 4, s; cvt.u64.u32 g, s;
        cvta.shared.u64 g, g; st{dot}.b32 [ADDRESS], %a; isspacep.shared p, g;
        cvta.to.shared.u64 g, g; cvt.u32.u64 s, g; @p ld.shared.b32 %d, [s];"""
    values = WORDS[:128]
    agree(probe(body.replace("ADDRESS", "s" if space else "g"), "u4", values), values, values)


def test_cache_policies_and_prefetches_are_hints() -> None:
    body = """.reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;
        prefetch.global.L2 [%at_a];
        ld.global.L1::evict_first.L2::cache_hint.b32 %d, [%at_a], policy;
        membar.gl; fence.acq_rel.gpu; membar.cta; fence.sc.cta;
        st.global.L1::no_allocate.b32 [%at_a], %d;"""
    agree(probe(body, "u4", WORDS), WORDS, WORDS)


CUDA = r"""
typedef unsigned long long u64;
extern "C" __global__ void narrow_stores(const int* in, signed char* c, short* s, bool* b) {
    int i = threadIdx.x;
    c[i] = in[i]; s[i] = in[i]; b[i] = in[i] & 4;
}
extern "C" __global__ void local_array(const int* in, int* out, int n) {
    int stack[24];
    for (int i = 0; i < 24; ++i) stack[i] = i * 100 + threadIdx.x;
    for (int i = 0; i < n; ++i) {
        int at = (unsigned)in[i * blockDim.x + threadIdx.x] % 24;
        stack[at] = stack[(at + 7) % 24] + i;
    }
    int sum = 0;
    for (int i = 0; i < 24; ++i) sum = sum * 31 + stack[i];
    out[threadIdx.x] = sum;
}
__device__ __noinline__ int read(const int* p) { return *p * 2; }
__device__ __noinline__ void write(int* p, int v) { *p = v; }
extern "C" __global__ void generic(const int* in, int* out) {
    __shared__ int held[64];
    int own[4] = {1000, 2000, 3000, 4000}, i = threadIdx.x;
    held[i] = 7 * i;
    __syncthreads();
    const int* from = i % 3 == 0 ? in + i : i % 3 == 1 ? &held[63 - i] : own + i % 4;
    int got = read(from);
    write(i % 3 == 1 ? &held[63 - i] : i % 3 == 0 ? out + 64 + i : own + i % 4, -i);
    out[i] = got;
    if (i % 3 == 1) out[64 + i] = held[63 - i];
    if (i % 3 == 2) out[64 + i] = own[i % 4];
    out[128 + i] = __isShared(from) + 2 * __isLocal(from) + 4 * __isGlobal(from);
}
extern __shared__ double dynamic[];
extern "C" __global__ void both_shared(double* out, int n) {
    __shared__ char small[5];
    __shared__ int words[32];
    int i = threadIdx.x;
    if (i < 5) small[i] = 10 + i;
    words[i] = 100 + i;
    for (int j = i; j < n; j += 32) dynamic[j] = 0.5 * j;
    __syncthreads();
    out[i] = small[i % 5] + words[31 - i] + dynamic[(i * 7) % n];
    out[32 + i] = (u64)__cvta_generic_to_shared(dynamic) % 8;
}
__constant__ float table[6] = {1.5f, -2.f, 3.25f, 0.f, 1e-30f, 7.f};
__constant__ signed char little[7] = {1, -2, 3, -4, 5, -6, 7};
__device__ short preset[8] = {5, 4, 3, 2, 1, 0, -1, -2};
__device__ int zeros[8];
__device__ float lone = 2.5f;
struct Pair { int a; double b; };
__device__ Pair pairs[2] = {{3, 0.25}, {-4, 8.0}};
__device__ short* pointer = preset + 2;
extern "C" __global__ void initialised(float* out) {
    int i = threadIdx.x % 8;
    zeros[i] += i * 10;
    out[i] = table[i % 6] + little[i % 7] + preset[i] + zeros[i] + lone
           + pairs[i % 2].a + (float)pairs[i % 2].b + pointer[i % 4];
}
struct Mixed {
    const float* x; signed char tiny; float* y; short half; int n; float scale; double wide;
    long long offset; int list[5]; bool flag;
};
extern "C" __global__ void by_value(Mixed m, int last) {
    int i = threadIdx.x;
    if (i < m.n)
        m.y[i + m.offset] = m.x[i] * m.scale + (float)m.wide + m.tiny + m.half + m.list[4] + last
                          + m.flag;
}
struct Sized { float* data; signed char rank; };
struct Nested { signed char first; Sized in; struct { short a; signed char b; } small; Sized out; };
extern "C" __global__ void nested(Nested s) {
    s.out.data[threadIdx.x] = s.in.data[threadIdx.x] + s.first + 10 * s.in.rank + 100 * s.small.a
                            + 1000 * s.small.b + 10000 * s.out.rank;
}
extern "C" __global__ void indexed_param(const Mixed m, const __grid_constant__ Mixed g) {
    int i = threadIdx.x;
    if (i < m.n) m.y[i] = m.list[i % 5] * 10.f + g.list[(i + 1) % 5];
}
extern "C" __global__ void in_place(const float* a, float* b) {
    b[threadIdx.x] = a[threadIdx.x] * 2.f;
}
extern "C" __global__ void chain(const float* a, volatile float* b, float* c) {
    int i = threadIdx.x;
    b[i] = a[i] * 2.f;
    c[i] = a[i + 16] + 1.f;
}
extern "C" __global__ void every_second(float* b) { b[2 * threadIdx.x] = threadIdx.x; }
extern "C" __global__ void maybe(const float* a, float* b, long long n) {
    b[threadIdx.x] = a ? a[threadIdx.x] : (float)n;
}
"""


def test_narrow_stores_keep_the_low_bits() -> None:
    values = WORDS[:64].view(np.int32)
    c, s, b = np.zeros(64, np.int8), np.zeros(64, np.int16), np.zeros(64, np.bool_)
    run(CUDA, "narrow_stores", (1,), (64,), values, c, s, b)
    assert (c == values.astype(np.int8)).all()
    assert (s == values.astype(np.int16)).all()
    assert (b == (values & 4 != 0)).all()


def test_a_launch_frees_its_memory_without_the_garbage_collector() -> None:
    values = WORDS[:64].view(np.int32)
    results = np.zeros(64, np.int8), np.zeros(64, np.int16), np.zeros(64, np.bool_)

    def held() -> int:
        return sum(type(each) in (FlatMemory, SharedRaces) for each in gc.get_objects())

    before = held()
    gc.disable()
    try:
        run(CUDA, "narrow_stores", (1,), (64,), values, *results)
        after = held()
    finally:
        gc.enable()
    assert after <= before


def test_local_arrays_are_private_and_indexed_at_run_time() -> None:
    steps, threads = 9, 70
    picks = np.random.default_rng(2).integers(0, 1 << 20, (steps, threads)).astype(np.int32)
    out = np.zeros(threads, np.int32)
    run(CUDA, "local_array", (1,), (threads,), picks, out, np.int32(steps))
    for thread in range(threads):
        stack = [i * 100 + thread for i in range(24)]
        for i in range(steps):
            at = int(picks[i, thread]) % 24
            stack[at] = stack[(at + 7) % 24] + i
        total = 0
        for value in stack:
            total = total * 31 + value
        assert out[thread] == np.uint32(total & 0xFFFFFFFF).view(np.int32)


def test_generic_addresses_reach_the_space_they_came_from() -> None:
    given, out, i = np.arange(64, dtype=np.int32) + 500, np.zeros(192, np.int32), np.arange(64)
    run(CUDA, "generic", (1,), (64,), given, out)
    own = 1000 * (i % 4 + 1)
    want = 2 * np.where(i % 3 == 0, given, np.where(i % 3 == 1, 7 * (63 - i), own))
    assert (out[:64] == want).all()
    assert (out[64:128] == -i).all()
    assert (out[128:] == np.array([4, 1, 2])[i % 3]).all()


def test_static_and_dynamic_shared_memory_do_not_overlap() -> None:
    n, i = 45, np.arange(32)
    out = np.zeros(64)
    run(CUDA, "both_shared", (1,), (32,), out, np.int32(n), shared=8 * n)
    assert (out[:32] == 10 + i % 5 + 131 - i + 0.5 * (i * 7 % n)).all()
    assert (out[32:] == 0).all()


def test_constants_and_globals_start_with_their_initial_values() -> None:
    out, i = np.zeros(8, np.float32), np.arange(8)
    table = np.array([1.5, -2, 3.25, 0, 1e-30, 7], np.float32)
    little, preset = np.array([1, -2, 3, -4, 5, -6, 7]), np.array([5, 4, 3, 2, 1, 0, -1, -2])
    pair = np.array([3.25, 4.0])
    want = table[i % 6] + little[i % 7] + preset[i] + 10 * i + 2.5 + pair[i % 2] + preset[2 + i % 4]
    for _ in range(2):  # a launch starts afresh: zeros[] does not keep what the first one added
        run(CUDA, "initialised", (1,), (8,), out)
        assert (out == want).all()


def mixed(x: Array, y: Array, offset: int) -> tuple[object, ...]:
    head = (x, np.int8(-3), y, np.int16(300), np.int32(x.size), np.float32(1.5), np.float64(0.125))
    return (*head, np.int64(offset), *(np.int32(v) for v in (11, 22, 33, 44, 55)), np.bool_(True))


def test_a_struct_by_value_follows_natural_alignment() -> None:
    x, y = np.arange(20, dtype=np.float32), np.zeros(25, np.float32)
    run(CUDA, "by_value", (1,), (32,), mixed(x, y, 5), np.int32(1000))
    assert (y[:5] == 0).all()
    assert (y[5:] == x * 1.5 + 0.125 - 3 + 300 + 55 + 1000 + 1).all()


def test_a_struct_inside_a_struct_keeps_its_own_alignment() -> None:
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    argument = (np.int8(1), (x, np.int8(2)), (np.int16(3), np.int8(4)), [y, np.int8(5)])
    run(CUDA, "nested", (1,), (32,), argument)
    assert (y == x + 54321).all()


def test_an_array_inside_a_parameter_is_indexed_at_run_time() -> None:
    x, y = np.zeros(20, np.float32), np.zeros(20, np.float32)
    run(CUDA, "indexed_param", (1,), (32,), mixed(x, y, 0), mixed(x, y, 0))
    i, numbers = np.arange(20), np.array([11, 22, 33, 44, 55])
    assert (y == numbers[i % 5] * 10 + numbers[(i + 1) % 5]).all()


def test_an_array_passed_twice_is_one_buffer() -> None:
    values = np.arange(32, dtype=np.float32)
    run(CUDA, "in_place", (1,), (32,), values, values)
    assert (values == 2 * np.arange(32)).all()


def test_views_of_one_array_see_each_other() -> None:
    values = np.arange(64, dtype=np.float32)
    run(CUDA, "chain", (1,), (16,), values[:32], values[16:48], values[32:])
    assert (values[:16] == np.arange(16)).all()
    assert (values[16:32] == 2 * np.arange(16)).all()
    assert (values[32:48] == 2 * np.arange(16) + 1).all()


def test_none_is_a_null_pointer() -> None:
    out = np.zeros(32, np.float32)
    run(CUDA, "maybe", (1,), (32,), None, out, np.int64(1 << 33))
    assert (out == 2.0**33).all()
    run(CUDA, "maybe", (1,), (32,), np.full(32, 3, np.float32), out, np.int64(0))
    assert (out == 3).all()


def test_a_strided_array_is_memory_from_end_to_end_or_is_refused() -> None:
    base = np.zeros(64, np.float32)
    try:
        run(CUDA, "every_second", (1,), (32,), base[::2])
    except FlashgenError:
        assert (base == 0).all()
    else:
        assert (base[::2] == np.arange(32)).all()
        assert (base[1::2] == 0).all()


def test_the_address_of_an_array_keeps_its_alignment() -> None:
    ptx = """.visible .entry k(.param .u64 p) { .reg .b64 %p, %q; ld.param.u64 %p, [p];
        and.b64 %q, %p, 15; st.global.u64 [%p], %q; ret; }"""
    room = np.zeros(8, np.uint64)
    start = (-room.ctypes.data // 8) % 2
    for offset in (start, start + 1):
        view = room[offset : offset + 1]
        run_ptx(ptx, "k", 1, 1, view)
        assert view[0] == view.ctypes.data % 16


@pytest.mark.parametrize("strict", [True, False])
def test_the_system_reserves_shared_memory_that_is_zero(strict: bool) -> None:
    """Groups of several warps meet there: `cooperative_groups::tiled_partition<64>`."""
    ptx = """.visible .entry k(.param .u64 out) { .reg .b64 %o; .reg .b32 %t, %at, %mine, %x, %y;
        .shared .align 4 .b32 s[32]; ld.param.u64 %o, [out]; mov.u32 %t, %tid.x;
        mad.wide.u32 %o, %t, 4, %o; mov.u32 %at, %reserved_smem_offset_1; mov.u32 %mine, s;
        mad.lo.u32 %mine, %t, 4, %mine; st.shared.u32 [%mine], %t; bar.warp.sync -1;
        atom.shared.or.b32 %x, [%at+284], 64; ld.shared.u32 %y, [%mine]; add.u32 %x, %x, %y;
        st.global.u32 [%o], %x; ret; }"""
    out = np.zeros(32, np.uint32)
    run_ptx(ptx, "k", 1, 32, out, strict=strict)
    assert sorted((out - np.arange(32)).tolist()) == [0] + [64] * 31


def test_sizes_of_shared_memory_are_those_allocated() -> None:
    """In units of 128 bytes since sm_80, and with 1 KiB that the system reserves."""
    ptx = """.visible .entry k(.param .u64 out) { .reg .b64 %o; .reg .b32 %x, %y, %z;
        .shared .align 4 .b8 s[100]; ld.param.u64 %o, [out]; mov.u32 %x, s;
        mov.u32 %x, %dynamic_smem_size; mov.u32 %y, %total_smem_size; mov.u32 %z, %aggr_smem_size;
        st.global.v2.u32 [%o], {%x, %y}; st.global.u32 [%o+8], %z; ret; }"""
    out = np.zeros(3, np.uint32)
    run_ptx(ptx, "k", 1, 1, out, shared_bytes=40)
    assert out.tolist() == [40, 256, 1280]
