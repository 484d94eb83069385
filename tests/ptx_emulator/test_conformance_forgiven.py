"""What PTX forbids and hardware forgives: reported by default, and allowed by name only.

Each kernel is in an idiom of public kernels that run on GPUs. With its name it gives the right
result; with every other name it is still reported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.shared.errors import EmulatorError
from ptx_emulator import FORGIVEN, LaunchArguments, TensorMap, launch, severity
from ptx_emulator.errors import RaceError, UninitialisedRead
from tests.ptx_emulator.test_conformance import Array
from tests.ptx_emulator.test_conformance_planted import SEEDS
from tests.support.hopper_ptx import PREAMBLE
from tests.support.nvrtc_helper import compile_ptx

# Shared memory of a wgmma m64n8k16 without swizzle: A 64 x 16 in core matrices of 8 x 8, B 8 x 16.
CUDA = (
    PREAMBLE
    + r"""
#define ARGS (MAP map, const uint4* in, float* out)

__device__ __forceinline__ ull describe(void* at, u lead, u stride) {
    return (ull)(SM(at) >> 4) | (ull)(lead >> 4) << 16 | (ull)(stride >> 4) << 32;
}
#define PRODUCT(A, B) \
    float d[4] = {0, 0, 0, 0}; \
    for (float& one : d) asm volatile("" : "+f"(one) :: "memory"); \
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); \
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5," \
                 " 1, 1, 1, 0, 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
                 : "l"(describe(A, 1024, 128)), "l"(describe(B, 128, 256)) : "memory"); \
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); \
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); \
    out[T] = d[0] + d[1] + d[2] + d[3];
#define COPY(to, from) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" \
                                    :: "r"(SM(to)), "l"(from) : "memory")
extern "C" __global__ void atomic_without_fence ARGS {
    // The last warp to count itself reads what all have stored.
    __shared__ float s[128];
    __shared__ u count;
    if (T == 0) count = 0;
    __syncthreads();
    s[T] = ((const float*)in)[T];
    __threadfence_block();
    __syncwarp();
    u before = T % 32 == 0 ? atomicAdd(&count, 1) : 0;
    if (__shfl_sync(~0u, before, 0) == 3)
        for (int i = T % 32; i < 128; i += 32) out[i] = s[i];
}
extern "C" __global__ void barrier_left_incomplete ARGS {
    // Each turn releases the other warp for one more, and the last one releases nobody.
    if (T >= 64) return;
    for (int i = 0; i < 2; ++i) {
        if (i + T / 32) asm volatile("bar.sync %0, 64;" :: "r"((u)T / 32) : "memory");
        out[T] = i + 1;
        asm volatile("bar.arrive %0, 64;" :: "r"(1 - T / 32) : "memory");
    }
}
// The loop of CUDA's programming guide for an atomic that the hardware does not have.
__device__ __forceinline__ void add_by_swaps(u* sum, u more) {
    u found = *sum, expected;
    do { expected = found; found = atomicCAS(sum, expected, expected + more); }
    while (found != expected);
}
extern "C" __global__ void compare_and_swap_guess ARGS {
    __shared__ u sum;
    if (T == 0) sum = 0;
    __syncthreads();
    add_by_swaps(&sum, T);
    add_by_swaps((u*)out + 128, 3);
    __syncthreads();
    out[T] = sum;
}
extern "C" __global__ void cp_async_proxy ARGS {
    __shared__ __align__(128) uint4 a[128], b[16];
    COPY(a + T, in + T);
    if (T < 16) COPY(b + T, in + T);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    PRODUCT(a, b)
}
extern "C" __global__ void exit_before_bulk_store ARGS {
    __shared__ __align__(128) float s[128];
    s[T] = ((const float*)in)[T];
    fence_async();
    __syncthreads();
    if (T == 0) { store_bulk(out, s, 512); commit(); }
}
extern "C" __global__ void mbarrier_init_fence ARGS {
    __shared__ __align__(128) float s[128];
    __shared__ ull full;
    if (T == 0) init(&full, 1);
    __syncthreads();
    if (T == 0) { expect(&full, 512); load_bulk(s, in, 512, &full); }
    wait(&full, 0);
    out[T] = s[T];
}
extern "C" __global__ void mbarrier_reinit ARGS {
    __shared__ ull turn;
    for (int i = 0; i < 3; ++i) {
        if (T == 0) init(&turn, 128);
        __syncthreads();
        arrive(&turn);
        wait(&turn, 0);
        __syncthreads();
    }
    out[T] = 3;
}
extern "C" __global__ void same_value ARGS {
    __shared__ float total, each[128];
    total = 5;                          // every warp writes the same number
    out[128] = 7;
    each[T] = 0;
    __syncthreads();
    out[T] = total;
}
extern "C" __global__ void uninitialised_rows ARGS {
    __shared__ __align__(128) uint4 s[8];
    if (T < 4) s[T] = in[T];            // rows 4 to 7 of the matrix are masked
    __syncthreads();
    u x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(x) : "r"(SM(s + T % 8)) : "memory");
    out[T] = T % 32 < 16 ? (float)(x & 0xffff) : 0;
}
extern "C" __global__ void warp_synchronous ARGS {
    __shared__ float s[128];
    s[T] = ((const float*)in)[T];
    out[T] = s[T ^ 1];
}
extern "C" __global__ void wgmma_rows_syncwarp ARGS {
    __shared__ __align__(128) uint4 a[128], b[16];
    if (T < 16) b[T] = in[T];
    fence_async();
    __syncthreads();
    // Row r is in core matrix r / 8, and warp w has rows 16 w to 16 w + 15, of 2 chunks along k.
    for (int k = 0; k < 2; ++k) if (T % 32 < 16) {
        int r = T / 32 * 16 + T % 32;
        a[64 * k + r] = in[64 * k + r];
    }
    fence_async();
    __syncwarp();
    PRODUCT(a, b)
}
"""
)


def run(
    kernel: str, seed: int | None = None, allow: tuple[str, ...] = (), strict: bool = True
) -> Array:
    rng = np.random.default_rng(0)
    source = rng.integers(1, 4, 1024).astype(np.float16)
    out = np.zeros(256, np.float32)
    args = [TensorMap(np.zeros(64, np.float32), (64,)), source, out]

    ptx = compile_ptx(CUDA, "sm_90a")
    launch(ptx, kernel, 1, 128, args, order_seed=seed, strict=strict, allow=allow)
    return out


def wanted(kernel: str) -> Array:
    rng = np.random.default_rng(0)
    values = rng.integers(1, 4, 1024).astype(np.float16)
    floats = values.view(np.float32)[:128]
    out = np.zeros(256, np.float32)
    if kernel in ("atomic_without_fence", "exit_before_bulk_store", "mbarrier_init_fence"):
        out[:128] = floats
    elif kernel == "warp_synchronous":
        out[:128] = floats[np.arange(128) ^ 1]
    elif kernel == "barrier_left_incomplete":
        out[:64] = 2
    elif kernel == "compare_and_swap_guess":
        out[:128], out.view(np.uint32)[128] = 127 * 128 // 2, 3 * 128
    elif kernel == "mbarrier_reinit":
        out[:128] = 3
    elif kernel == "same_value":
        out[:128], out[128] = 5, 7
    elif kernel == "uninitialised_rows":
        lane = np.arange(128) % 32
        words = values.view(np.uint16).reshape(-1, 8)
        out[:128] = np.where(lane < 16, words[lane // 4 % 4, 2 * (lane % 4)], 0)
    else:
        chunks = values.astype(np.float32).reshape(-1, 8)
        a = np.concatenate([chunks[:64], chunks[64:128]], axis=1)
        b = np.concatenate([chunks[:8], chunks[8:16]], axis=1)
        d = a @ b.T
        lane, warp = np.arange(128) % 32, np.arange(128) // 32
        rows, columns = warp * 16 + lane // 4, lane % 4 * 2
        out[:128] = sum(d[rows + 8 * i, columns + j] for i in range(2) for j in range(2))
    return out


@pytest.mark.parametrize("name", FORGIVEN)
def test_a_finding_that_hardware_forgives_is_reported_with_its_name(name: str) -> None:
    others = tuple(FORGIVEN.keys() - {name})
    for seed in SEEDS:
        with pytest.raises(EmulatorError) as caught:
            run(name, seed, others)
        assert f'allow=("{name}",)' in caught.value.way_out
        assert severity(caught.value) == "by-the-letter"


@pytest.mark.parametrize("name", FORGIVEN)
def test_a_launch_may_allow_it(name: str) -> None:
    for seed in SEEDS:
        assert (run(name, seed, (name,)) == wanted(name)).all()


@pytest.mark.parametrize("name", FORGIVEN)
def test_a_launch_that_is_not_strict_allows_all(name: str) -> None:
    for seed in SEEDS:
        assert (run(name, seed, strict=False) == wanted(name)).all()


OF_B = "if (T >= 96 && T < 112) b[T - 96] = in[T]; for (int k"


@pytest.mark.parametrize(
    ("correct", "wrong"),
    [("int r = T / 32 * 16", "int r = (T / 32 ^ 1) * 16"), ("for (int k", OF_B)],
    ids=["rows of A of another warp", "B"],
)
@pytest.mark.parametrize("options", [{"allow": ("wgmma_rows_syncwarp",)}, {"strict": False}])
def test_what_another_warp_writes_for_wgmma_needs_a_barrier(
    correct: str, wrong: str, options: dict[str, Any]
) -> None:
    ptx = compile_ptx(CUDA.replace(correct, wrong), "sm_90a")
    args = [TensorMap(np.zeros(64, np.float32), (64,)), np.arange(1024, dtype=np.float16)]
    args.append(np.zeros(256, np.float32))
    with pytest.raises(RaceError) as caught:
        launch(ptx, "wgmma_rows_syncwarp", 1, 128, args, **options)
    assert severity(caught.value) == "error"


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(LaunchArguments, match="allow names a finding") as caught:
        run("same_value", None, ("same_values",))
    assert all(name in str(caught.value) for name in FORGIVEN)


@pytest.mark.parametrize("seed", SEEDS)
def test_different_values_are_a_race_whatever_is_allowed(seed: int | None) -> None:
    source = 'extern "C" __global__ void k(int* out) { __shared__ int s; s = threadIdx.x / 32 / 2;'
    source += " out[128] = threadIdx.x; __syncthreads(); out[threadIdx.x] = s; }"
    args = [np.zeros(129, np.int32)]
    for strict in (True, False):
        with pytest.raises(EmulatorError, match="race") as caught:
            launch(compile_ptx(source), "k", 1, 128, args, order_seed=seed, strict=strict)
        assert severity(caught.value) == "error"


def test_a_store_of_what_fresh_memory_holds_initialises_it_where_same_values_are_allowed() -> None:
    source = 'extern "C" __global__ void k(int* out) { __shared__ int s[64]; s[threadIdx.x] = 0;'
    source += " __syncthreads(); out[threadIdx.x] = s[63 - threadIdx.x] + 1; }"
    out = np.zeros(64, np.int32)
    launch(compile_ptx(source), "k", 1, 64, [out], allow=("same_value",))
    assert (out == 1).all()


@pytest.mark.parametrize("where", ["shared", "global"])
def test_only_the_plain_load_before_compare_and_swap_is_a_guess(where: str) -> None:
    """The finding has its name in both spaces; a plain store that meets the swaps has none."""
    source = 'extern "C" __global__ void k(int* out, int store) {'
    source += " __shared__ int s; int* p = SPACE; if (threadIdx.x == 0) *p = 0; __syncthreads();"
    source += " if (store && threadIdx.x == 127) *p = 5;"
    source += " int found = *p, old; do { old = found; found = atomicCAS(p, old, old + 1); }"
    source += " while (found != old); __syncthreads(); if (!threadIdx.x) out[1] = *p; }"
    source = source.replace("SPACE", "&s" if where == "shared" else "out")
    out, guess = np.zeros(2, np.int32), ("compare_and_swap_guess",)
    for store, allow in ((0, ()), (1, guess)):
        args = [out, np.int32(store)]
        with pytest.raises(RaceError) as caught:
            launch(compile_ptx(source), "k", 1, 128, args, allow=allow)
        assert (guess[0] in caught.value.way_out) == (not store)
    launch(compile_ptx(source), "k", 1, 128, [out, np.int32(0)], allow=guess)
    assert out[1] == 128


def test_uninitialised_bytes_are_nan_so_that_results_show_them() -> None:
    source = 'extern "C" __global__ void k(float* out) { __shared__ float s[32];'
    source += " if (threadIdx.x < 8) s[threadIdx.x] = 1; __syncthreads();"
    source += " out[threadIdx.x] = s[threadIdx.x]; }"
    out = np.zeros(32, np.float32)
    launch(compile_ptx(source), "k", 1, 32, [out], allow=("uninitialised_rows",))
    assert (out[:8] == 1).all()
    assert np.isnan(out[8:]).all()


UNWRITTEN = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out) {
  .reg .b64 %out, %at; .reg .b32 %t, %a, %b, %c; .reg .pred %p; .shared .align 8 .b8 s[256];
  ld.param.u64 %out, [out]; mov.u32 %t, %tid.x; mad.lo.u32 %b, %t, 8, s;
  cvt.u64.u32 %at, %b; WINDOW setp.lt.u32 %p, %t, 8; @%p mov.u32 %a, 5;
  stSPACE.v2.u32 [%at], {%a, %t}; ldSPACE.v2.u32 {%a, %b}, [%at];
  mad.wide.u32 %out, %t, 8, %out; st.global.v2.u32 [%out], {%a, %b}; ret;
}
"""


@pytest.mark.parametrize(
    ("space", "window"), [(".shared", ""), ("", "cvta.shared.u64 %at, %at;")], ids=["shared", "any"]
)
def test_a_register_never_written_may_be_stored_if_that_is_allowed(space: str, window: str) -> None:
    ptx = UNWRITTEN.replace("SPACE", space).replace("WINDOW", window)
    to_global = ptx.replace("{%a, %b}; ret", "{%c, %b}; ret").replace("5;", "5; @%p mov.u32 %c, 5;")
    to_global = to_global.replace("{%a, %t}", "{%t, %t}")
    for text in (ptx, to_global):
        out = np.zeros((32, 2), np.uint32)
        with pytest.raises(UninitialisedRead, match="register") as caught:
            launch(text, "k", 1, 32, [out])
        assert severity(caught.value) == "by-the-letter"
        launch(text, "k", 1, 32, [out], allow=("uninitialised_rows",))
        assert (out[:8, 0] == 5).all()
        assert (out[8:, 0] == 0xFFFFFFFF).all()
        assert (out[:, 1] == np.arange(32)).all()


def test_padding_that_is_stored_has_ones_if_that_is_allowed() -> None:
    ptx = """.version 8.0
        .target sm_80
        .address_size 64
        .visible .entry k(.param .u64 out) { .reg .b64 %out; .reg .b32 %t; .reg .b16 %h;
          .local .align 4 .b8 a[4]; ld.param.u64 %out, [out]; mov.u16 %h, 7;
          st.local.u8 [a+1], %h; ld.local.u32 %t, [a]; st.global.u32 [%out], %t; ret; }"""
    out = np.zeros(1, np.uint32)
    with pytest.raises(UninitialisedRead, match="local memory") as caught:
        launch(ptx, "k", 1, 1, [out])
    assert severity(caught.value) == "by-the-letter"
    launch(ptx, "k", 1, 1, [out], strict=False)
    assert out.tolist() == [0xFFFF07FF]


def test_bytes_of_ordinary_stores_need_the_proxy_fence_even_if_copies_do_not() -> None:
    source = CUDA.replace("COPY(a + T, in + T);", "a[T] = in[T];", 1)
    unused = TensorMap(np.zeros(64, np.float32), (64,))
    args = [unused, np.ones(1024, np.float16), np.zeros(256, np.float32)]
    ptx, allow = compile_ptx(source, "sm_90a"), ("cp_async_proxy",)
    with pytest.raises(EmulatorError, match="without a proxy fence"):
        launch(ptx, "cp_async_proxy", 1, 128, args, allow=allow)
