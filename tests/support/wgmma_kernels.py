"""CUDA kernels for sm_90a that test wgmma, and the shared-memory layout of their operands.

The layouts are derived here from the PTX ISA's canonical layouts, element by element, independently
of the emulator's code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

KINDS: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}
MODE = {16: 0, 128: 1, 64: 2, 32: 3}  # the descriptor's code by the width of the swizzle

HEAD = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
#ifdef FIXED
#define FIX(...) __VA_ARGS__
#define BUG(...)
#else
#define FIX(...)
#define BUG(...) __VA_ARGS__
#endif
#define FENCE asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define COMMIT asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WAIT(n) asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(n) : "memory")
#define PROXY_FENCE asm volatile("fence.proxy.async.shared::cta;" ::: "memory")
#define SMEM(p) ((u32)__cvta_generic_to_shared(p))
template <int N> __device__ __forceinline__ void keep(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
}
template <int N> __device__ __forceinline__ void keep(u32 (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i]) :: "memory");
}
__device__ __forceinline__ void fill(uint4* to, const uint4* from, int bytes) {
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) to[i] = from[i];
}
"""


def issue(
    name: str,
    columns: int,
    kinds: tuple[str, str] = ("f16", "f16"),
    sums: str = "f32",
    fragments: bool = False,
    flags: tuple[int, ...] = (1, 1, 0, 0),
    saturates: bool = False,
) -> str:
    """A device function ``name(d, a, b, adds)`` around one wgmma.mma_async; a, b: descriptors.

    With ``fragments`` A is an array of four registers. ``flags``: signs, then transpositions.
    """
    depth = 32 // np.dtype(KINDS[kinds[0]]).itemsize
    clamp = "satfinite." if saturates else ""
    count = columns // (4 if sums == "f16" else 2)
    type_, letter = ("float", "f") if sums == "f32" else ("u32", "r")
    to = ", ".join(f"%{i}" for i in range(count))
    a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if fragments else f"%{count}"
    b = count + (4 if fragments else 1)
    outs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    ins = ", ".join(f'"r"(a[{i}])' for i in range(4)) if fragments else '"l"(a)'
    given = "const u32 (&a)[4]" if fragments else "u64 a"
    ends = "".join(f", {flag}" for flag in flags)
    return f"""
__device__ __forceinline__ void {name}({type_} (&d)[{count}], {given}, u64 b, int adds) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{b + 1}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{clamp}{sums}.{kinds[0]}.{kinds[1]} "
    "{{{to}}}, {a}, %{b}, p{ends}; }}"
    : {outs} : {ins}, "l"(b), "r"(adds) : "memory");
}}
"""


def gemm(name: str, columns: int, **form: Any) -> str:
    """A kernel of one warpgroup: D (64, N) = sum over steps; operands by descriptor.

    Arguments: images of A and B and their bytes, D, descriptors of A and B for each step, steps. D
    gets the registers of each thread one after the other.
    """
    sums = form.get("sums", "f32")
    count = columns // (4 if sums == "f16" else 2)
    type_ = "float" if sums == "f32" else "u32"
    return f"""
{issue("mma_" + name, columns, **form)}
extern "C" __global__ void __launch_bounds__(128)
{name}(const uint4* a, int bytes_a, const uint4* b, int bytes_b, {type_}* out,
       const u64* where, int steps) {{
  extern __shared__ __align__(1024) unsigned char smem[];
  fill((uint4*)smem, a, bytes_a);
  fill((uint4*)(smem + bytes_a), b, bytes_b);
  PROXY_FENCE; __syncthreads();
  {type_} d[{count}];
#pragma unroll
  for (int i = 0; i < {count}; ++i) d[i] = 7;
  keep(d);
  FENCE;
  for (int s = 0; s < steps; ++s)
    mma_{name}(d, where[2 * s], where[2 * s + 1], s > 0);
  COMMIT; WAIT(0);
  keep(d);
#pragma unroll
  for (int i = 0; i < {count}; ++i) out[threadIdx.x * {count} + i] = d[i];
}}
"""


@dataclass(frozen=True)
class Stored:
    """An operand in shared memory.

    Attributes:
        image: the operand's bytes.
        leading, stride: the byte offsets of the descriptor.
        starts: the byte at which each instruction's part begins.
        span: the width of the swizzle in bytes; 16 without a swizzle.
    """

    image: Array
    leading: int
    stride: int
    starts: Array
    span: int

    def descriptors(self, base: int = 0) -> Array:
        """One per instruction, for an image that lies at ``base``."""
        fixed = (self.leading >> 4) << 16 | (self.stride >> 4) << 32 | MODE[self.span] << 62
        return ((self.starts + base) >> 4).astype(np.uint64) | np.uint64(fixed)


def stored(matrix: Array, span: int, mn_major: bool = False) -> Stored:
    """A matrix (rows, k) laid out as wgmma reads it; several panels of the swizzle's width."""
    rows, depth = matrix.shape
    size = matrix.itemsize
    r, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    part = 32 // size  # k of one instruction
    first = np.arange(depth // part) * part
    if mn_major:
        run = span // size  # elements of a row of the pattern, along r
        if span == 16:
            # Cores of 8 x 8: along r first, then along k.
            stride, leading = 128, 128 * (rows // 8)
            at = k // 8 * leading + k % 8 * 16 + r // 8 * stride + r % 8 * size
            starts = first // 8 * leading
        else:
            stride, leading = 8 * span, depth * span
            at = r // run * leading + k // 8 * stride + k % 8 * span + r % run * size
            starts = first * span
    elif span == 16:
        # Cores of 8 rows of 16 bytes: along r first, then along k.
        run = 16 // size
        stride, leading = 128, 16 * rows
        at = k // run * leading + r // 8 * stride + r % 8 * 16 + k % run * size
        starts = first // run * leading
    else:
        run = span // size  # k of a panel
        stride, leading = 8 * span, 0
        at = k // run * (rows * span) + r // 8 * stride + r % 8 * span + k % run * size
        starts = first // run * (rows * span) + first % run * size
    if span > 16:
        at = at ^ (at >> 7 & (span // 16 - 1)) << 4
    image = np.zeros(-(-int(at.max() + size) // 1024) * 1024, np.uint8)
    octets = np.ascontiguousarray(matrix).view(np.uint8).reshape(rows, depth, size)
    for byte in range(size):
        image[at + byte] = octets[..., byte]
    return Stored(image, leading, stride, starts, span)


def sums_of(registers: Array, columns: int) -> Array:
    """D (64 w, N) from the registers of 128 w threads, (threads, registers)."""
    out = np.zeros((len(registers) // 2, columns), registers.dtype)
    thread, place = np.meshgrid(
        np.arange(len(registers)), np.arange(registers.shape[1]), indexing="ij"
    )
    warp, lane = thread // 32, thread % 32
    row = 16 * warp + lane // 4 + 8 * (place // 2 % 2)
    out[row, 8 * (place // 4) + 2 * (lane % 4) + place % 2] = registers
    return out


def fragments_of(matrix: Array) -> Array:
    """A (64, k) as each of 128 threads holds it: (threads, 4 registers per 32 bytes of k)."""
    size = matrix.itemsize
    each, part = 4 // size, 32 // size  # elements of a register, k of an instruction
    steps = matrix.shape[1] // part
    thread = np.arange(128)
    row, lane = 16 * (thread // 32) + thread % 32 // 4, thread % 4
    words = []
    for step in range(steps):
        for register in range(4):
            first = step * part + each * lane + part // 2 * (register // 2)
            picked = matrix[(row + 8 * (register % 2))[:, None], first[:, None] + np.arange(each)]
            words.append(np.ascontiguousarray(picked).view(np.uint32)[:, 0])
    return np.stack(words, axis=1)


def gemm_ptx(columns: int) -> str:
    """PTX of a kernel ``k`` of one warpgroup: D (64, N) = A B for f16 and k = 32, in two steps.

    Arguments: images of A (4096 bytes) and of B (16384 bytes), D as `gemm` has it, descriptors.
    """
    count = columns // 2
    registers = ", ".join(f"%d{i}" for i in range(count))
    fills = "".join(
        f"ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%{name} + {2048 * i}];"
        f"st.shared.v4.b32 [%s + {at + 2048 * i}], {{%x0, %x1, %x2, %x3}};\n"
        for name, at, parts in (("pa", 0, 2), ("pb", 4096, 8))
        for i in range(parts)
    )
    product = f"""ld.global.b64 %a, [%pw + {{0}}]; ld.global.b64 %b, [%pw + {{1}}];
        wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {{{{{registers}}}}}, %a, %b,
        {{2}}, 1, 1, 0, 0;\n"""
    return f""".visible .entry k(.param .u64 a, .param .u64 b, .param .u64 d, .param .u64 w)
        .maxntid 128 {{
        .reg .b32 %d<{count}>, %x<4>, %t, %s; .reg .b64 %pa, %pb, %pd, %pw, %a, %b, %i;
        .reg .pred %no, %yes; .extern .shared .align 1024 .b8 smem[];
        ld.param.u64 %pa, [a]; ld.param.u64 %pb, [b]; ld.param.u64 %pd, [d]; ld.param.u64 %pw, [w];
        mov.u32 %t, %tid.x; mov.u32 %s, smem; mad.lo.u32 %s, %t, 16, %s;
        mad.wide.u32 %pa, %t, 16, %pa; mad.wide.u32 %pb, %t, 16, %pb;
        mad.wide.u32 %pd, %t, {4 * count}, %pd;
        setp.eq.u32 %no, %t, %t; not.pred %yes, %no; mov.pred %no, %yes; not.pred %yes, %no;
        {fills} fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned;
        {product.format(0, 8, "%no")} {product.format(16, 24, "%yes")}
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        {"".join(f"st.global.b32 [%pd + {4 * i}], %d{i};" for i in range(count))} ret; }}"""
