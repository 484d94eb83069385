"""CUDA sources for tests of sm_90a in the emulator: mbarriers and bulk copies as inline PTX."""

from __future__ import annotations

import functools

from tests.support.nvrtc_helper import compile_ptx

PREAMBLE = r"""
typedef unsigned u;
typedef unsigned long long ull;
#ifdef FIXED
#define FIX(...) __VA_ARGS__
#define BUG(...)
#else
#define FIX(...)
#define BUG(...) __VA_ARGS__
#endif
#define KERNEL(name, ...) extern "C" __global__ void name
#define T threadIdx.x
struct __align__(64) CUtensorMap { ull opaque[16]; };
#define MAP const __grid_constant__ CUtensorMap
#define SM(p) ((u)__cvta_generic_to_shared(p))
__device__ __forceinline__ void init(ull* b, u n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(SM(b)), "r"(n) : "memory");
}
__device__ __forceinline__ void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void expect(ull* b, u bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(SM(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(ull* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(SM(b)) : "memory");
}
__device__ __forceinline__ void wait(ull* b, u parity) {
    asm volatile("{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;"
                 " @P bra DONE; bra AGAIN; DONE: }" :: "r"(SM(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ void load1(void* to, const CUtensorMap* m, int x, ull* b) {
    asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2}], [%3];"
                 :: "r"(SM(to)), "l"(m), "r"(x), "r"(SM(b)) : "memory");
}
__device__ __forceinline__ void load2(void* to, const CUtensorMap* m, int x, int y, ull* b) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(SM(to)), "l"(m), "r"(x), "r"(y), "r"(SM(b)) : "memory");
}
__device__ __forceinline__ void load3(void* to, const CUtensorMap* m, int x, int y, int z, ull* b) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(SM(to)), "l"(m), "r"(x), "r"(y), "r"(z), "r"(SM(b)) : "memory");
}
__device__ __forceinline__ void store2(const CUtensorMap* m, int x, int y, void* from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%1, {%2, %3}], [%0];"
                 :: "r"(SM(from)), "l"(m), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void load_bulk(void* to, const void* from, u bytes, ull* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];"
                 :: "r"(SM(to)), "l"(from), "r"(bytes), "r"(SM(b)) : "memory");
}
__device__ __forceinline__ void store_bulk(void* to, const void* from, u bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(SM(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int left> __device__ __forceinline__ void wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(left) : "memory");
}
"""


@functools.cache
def hopper_ptx(source: str, fixed: bool = False) -> str:
    """PTX of CUDA that may use what `PREAMBLE` defines; FIX(...) or BUG(...) parts by ``fixed``."""
    return compile_ptx(PREAMBLE + source, "sm_90a", ("-DFIXED",) if fixed else ())
