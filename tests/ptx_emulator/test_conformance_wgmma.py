"""wgmma against numpy: all operand layouts, types and widths.

Kernels are CUDA with inline PTX, compiled by NVRTC for sm_90a. Operands are small integers unless
stated otherwise, so that every product and sum is exact.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

import ptx_emulator as emulator
from ptx_emulator.counters.totals import added
from tests.support.nvrtc_helper import compile_ptx
from tests.support.tiers import one_in, slow
from tests.support.wgmma_kernels import (
    HEAD,
    KINDS,
    Stored,
    fragments_of,
    gemm,
    gemm_ptx,
    issue,
    stored,
    sums_of,
)

Array = np.ndarray[Any, Any]
HEADER = ".version 8.0\n.target sm_90a\n.address_size 64\n"
SPANS = (16, 32, 64, 128)
WIDTHS = tuple(range(8, 257, 8))
MIXED = {kind: (kind, kind) for kind in KINDS if kind not in ("s8", "u8")}
MIXED["both8"] = "e4m3", "e5m2"

compiled = functools.cache(lambda source: compile_ptx(source, "sm_90a"))


def integers(seed: int, shape: tuple[int, ...], kind: str) -> Array:
    limit = 3 if kind.startswith("e") else 5
    rng = np.random.default_rng(seed)
    return rng.integers(-limit, limit + 1, shape).astype(np.float32).astype(KINDS[kind])


def exact(a: Array, b: Array) -> Array:
    return a.astype(np.float64) @ b.astype(np.float64).T


def run(
    source: str, name: str, a: Stored, b: Stored, out: Array, **options: Any
) -> emulator.Counters:
    """Runs a kernel of `gemm`."""
    where = np.stack([a.descriptors(), b.descriptors(a.image.size)], axis=1)
    sizes = [np.int32(part.image.size) for part in (a, b)]
    args = [a.image, sizes[0], b.image, sizes[1], out, where, np.int32(len(where))]
    shared = a.image.size + b.image.size
    return emulator.launch(compiled(source), name, 1, 128, args, shared, **options)


LAYOUTS = HEAD + "".join(
    gemm(f"{kind}_{ta}{tb}", 96, kinds=(kind, kind), flags=(1, 1, ta, tb))
    for kind in ("f16", "bf16")
    for ta, tb in itertools.product((0, 1), repeat=2)
)


@pytest.mark.parametrize("kind", ["f16", slow("bf16")])
@pytest.mark.parametrize(("major_a", "major_b"), one_in(3, [(0, 0), (0, 1), (1, 0), (1, 1)]))
def test_16_bit_operands_in_every_swizzle_and_major(kind: str, major_a: int, major_b: int) -> None:
    a, b = integers(1, (64, 128), kind), integers(2, (96, 128), kind)
    pairs = zip(SPANS, SPANS[::-1], strict=True)
    for span_a, span_b in itertools.product(SPANS, repeat=2) if kind == "f16" else pairs:
        out = np.zeros((128, 48), np.float32)
        left, right = stored(a, span_a, bool(major_a)), stored(b, span_b, bool(major_b))
        run(LAYOUTS, f"{kind}_{major_a}{major_b}", left, right, out)
        assert (sums_of(out, 96) == exact(a, b)).all(), (span_a, span_b)


KMAJOR = HEAD + "".join(
    gemm(name, 40, kinds=kinds, flags=(1, 1)) for name, kinds in MIXED.items() if name[-2:] != "16"
)


@pytest.mark.parametrize("name", ["tf32", "e4m3", "e5m2", "both8"])
@pytest.mark.parametrize("span", SPANS)
def test_other_types_lie_k_major(name: str, span: int) -> None:
    kinds = MIXED[name]
    depth = 256 // np.dtype(KINDS[kinds[0]]).itemsize
    a, b = integers(3, (64, depth), kinds[0]), integers(4, (40, depth), kinds[1])
    out = np.zeros((128, 20), np.float32)
    run(KMAJOR, name, stored(a, span), stored(b, span), out)
    assert (sums_of(out, 40) == exact(a, b)).all()


INTEGERS = HEAD + "".join(
    gemm(f"{a}{b}_{clamps}", 48, kinds=(a, b), sums="s32", flags=(), saturates=bool(clamps))
    for a, b, clamps in (("s8", "s8", 0), ("u8", "s8", 0), ("u8", "u8", 0), ("u8", "u8", 1))
)


@pytest.mark.parametrize("name", ["s8s8_0", "u8s8_0"])
def test_products_of_integers_are_exact(name: str) -> None:
    rng = np.random.default_rng(14)
    a, b = (
        rng.integers(0, 256, (rows, 128)).astype(np.uint8).view(KINDS[kind])
        for rows, kind in ((64, name[:2]), (48, name[2:4]))
    )
    out = np.zeros((128, 24), np.uint32)
    run(INTEGERS, name, stored(a, 64), stored(b, 64), out)
    assert (sums_of(out.view(np.int32), 48) == a.astype(np.int64) @ b.astype(np.int64).T).all()


@pytest.mark.parametrize("clamps", [0, 1])
def test_sums_of_integers_wrap_or_are_clamped(clamps: int) -> None:
    a, b = np.full((64, 32), 255, np.uint8), np.full((48, 32), 255, np.uint8)
    source = INTEGERS.replace("d[i] = 7;", "d[i] = 2147483000;").replace("s > 0", "1")
    out = np.zeros((128, 24), np.int32)
    run(source, f"u8u8_{clamps}", stored(a, 32), stored(b, 32), out)
    total = 2147483000 + 32 * 255**2
    assert (out == ((1 << 31) - 1 if clamps else total - (1 << 32))).all()


def test_tf32_operands_lose_their_low_bits() -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal((rows, 64)).astype(np.float32) for rows in (64, 40))
    out = np.zeros((128, 20), np.float32)
    run(KMAJOR, "tf32", stored(a, 128), stored(b, 128), out)
    cut_a, cut_b = ((m.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for m in (a, b))
    np.testing.assert_allclose(sums_of(out, 40), exact(cut_a, cut_b), rtol=0, atol=2e-5)
    assert np.abs(sums_of(out, 40) - exact(a, b)).max() > 1e-4


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_every_8_bit_float_has_its_value(kind: str) -> None:
    """Row r of A holds one value in its first column, B has a 1 there."""
    values = np.arange(256, dtype=np.uint8).view(KINDS[kind])
    b = np.zeros((40, 32), KINDS[kind])
    b[:, 0] = 1
    for part in range(4):
        a = np.zeros((64, 32), KINDS[kind])
        a[:, 0] = values[64 * part : 64 * part + 64]
        out = np.zeros((128, 20), np.float32)
        run(KMAJOR, kind, stored(a, 32), stored(b, 32), out)
        want = np.repeat(a[:, :1].astype(np.float32), 40, axis=1)
        np.testing.assert_array_equal(sums_of(out, 40), want)


@pytest.mark.parametrize("width", one_in(3, WIDTHS))
def test_every_width_with_sums_that_were_never_written(width: int) -> None:
    """In PTX as other compilers write it: floats in .b32 registers."""
    a, b = integers(6, (64, 32), "f16"), integers(width, (width, 32), "f16")
    left, right = stored(a, 64), stored(b, 64)
    where = np.stack([left.descriptors(), right.descriptors(4096)], axis=1)
    image = np.zeros(16384, np.uint8)
    image[: right.image.size] = right.image
    out = np.zeros((128, width // 2), np.float32)
    args = [left.image, image, out, where]
    emulator.launch(HEADER + gemm_ptx(width), "k", 1, 128, args, 20480)
    assert (sums_of(out, width) == exact(a, b)).all()


@pytest.mark.parametrize(("sign_a", "sign_b"), [(-1, 1), (1, -1), (-1, -1)])
def test_a_scale_of_minus_one_negates_the_product(sign_a: int, sign_b: int) -> None:
    name = f"s{sign_a}{sign_b}".replace("-", "m")
    source = HEAD + gemm(name, 24, flags=(sign_a, sign_b, 0, 0))
    a, b = integers(7, (64, 64), "f16"), integers(8, (24, 64), "f16")
    out = np.zeros((128, 12), np.float32)
    run(source, name, stored(a, 128), stored(b, 128), out)
    assert (sums_of(out, 24) == sign_a * sign_b * exact(a, b)).all()


@pytest.mark.parametrize("kind", ["f16", "e4m3"])
def test_sums_of_float16_round_after_every_instruction(kind: str) -> None:
    flags = (1, 1, 0, 0) if kind == "f16" else (1, 1)
    source = HEAD + gemm("half", 48, kinds=(kind, kind), sums="f16", flags=flags)
    part = 32 // np.dtype(KINDS[kind]).itemsize
    rng = np.random.default_rng(9)
    a, b = (rng.standard_normal((rows, 4 * part)).astype(KINDS[kind]) for rows in (64, 48))
    out = np.zeros((128, 12), np.uint32)
    run(source, "half", stored(a, 64), stored(b, 64), out, sums="rounded")
    want = np.zeros((64, 48), np.float16)
    for step in range(4):
        now = slice(step * part, step * part + part)
        product = exact(a[:, now], b[:, now]).astype(np.float32)
        want = (want.astype(np.float32) + product).astype(np.float16)
    got = sums_of(out.view(np.float16).reshape(128, 24), 48)
    # The order of additions inside an instruction is not promised: one rounding of float16 apart.
    assert np.abs(got.astype(np.float64) - want).max() <= 2.0**-8
    assert (got == want).mean() > 0.95


FRAGMENTS = HEAD + "".join(
    f"""
{issue(f"mma_{kind}", 64, (kind, kind), fragments=True, flags=flags)}
extern "C" __global__ void __launch_bounds__(128)
{kind}(const u32* a, const uint4* b, int bytes, float* out, const u64* where, int steps) {{
  extern __shared__ __align__(1024) unsigned char smem[];
  fill((uint4*)smem, b, bytes);
  PROXY_FENCE; __syncthreads();
  float d[32]; u32 x[4][4];
#pragma unroll
  for (int i = 0; i < 32; ++i) d[i] = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i / 4][i % 4] = a[threadIdx.x * 16 + i];
  keep(d); FENCE;
#pragma unroll
  for (int s = 0; s < 4; ++s) mma_{kind}(d, x[s], where[s], 1);
  COMMIT; WAIT(0); keep(d);
#pragma unroll
  for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = d[i];
}}
"""
    for kind, flags in [("f16", (1, 1, 0)), ("bf16", (1, 1, 0)), ("tf32", (1, 1)), ("e4m3", (1, 1))]
)


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "e4m3"])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_comes_from_registers(kind: str, seed: int | None) -> None:
    depth = 128 // np.dtype(KINDS[kind]).itemsize
    a, b = integers(10, (64, depth), kind), integers(11, (64, depth), kind)
    held, right = fragments_of(a), stored(b, 128)
    out = np.zeros((128, 32), np.float32)
    args = [held, right.image, np.int32(right.image.size), out, right.descriptors(), np.int32(4)]
    ptx = compiled(FRAGMENTS)
    emulator.launch(ptx, kind, 1, 128, args, right.image.size, order_seed=seed)
    assert (sums_of(out, 64) == exact(a, b)).all()


def test_counters_know_products_and_the_bytes_of_operands() -> None:
    a, b = integers(1, (64, 64), "f16"), integers(2, (96, 64), "f16")
    left, right = stored(a, 128), stored(b, 128)
    with emulator.profiling() as launches:
        run(LAYOUTS, "f16_00", left, right, np.zeros((128, 48), np.float32))
    total = launches[0].total()
    assert total.multiply_adds == {"m64n96k16 f32 f16 f16": 64 * 96 * 64}
    assert total.warps["tensor"] == 4 * 4
    executed = launches[0].by_instruction()
    products = added(totals for text, totals in executed if "mma_async" in text)
    assert products.shared_bytes == (64 + 96) * 64 * 2
    assert products.wavefronts == products.wavefronts_least == products.shared_bytes // 128
    assert launches[0].shared_read_bytes == products.shared_bytes


ROW_OFFSET = r"""
typedef unsigned u; typedef unsigned long long ull;
#define T threadIdx.x
// Rows of 64 halfs with a swizzle of 128 bytes: chunk c of row r lies at chunk c ^ (r % 8).
extern "C" __global__ void k(const uint4* a, const uint4* b, float* out, int first) {
  __shared__ __align__(1024) uint4 x[72 * 8], y[16 * 8];
  for (int i = T; i < 72 * 8; i += 128) x[i / 8 * 8 + (i % 8 ^ i / 8 % 8)] = a[i];
  for (int i = T; i < 16 * 8; i += 128) y[i / 8 * 8 + (i % 8 ^ i / 8 % 8)] = b[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  float d[4] = {0, 0, 0, 0};
  for (float& one : d) asm volatile("" : "+f"(one) :: "memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int k = 0; k < 4; ++k) {
    const u at = (u)__cvta_generic_to_shared(x) + 128 * first + 32 * k;
    const u other = (u)__cvta_generic_to_shared(y) + 128 * first + 32 * k;
    const ull form = 1ull << 16 | 64ull << 32 | 1ull << 62;
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5,"
                 " 1, 1, 1, 0, 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(form | at >> 4), "l"(form | other >> 4) : "memory");
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; ++i)
    out[(T / 32 * 16 + T % 32 / 4 + i / 2 * 8) * 8 + T % 4 * 2 + i % 2] = d[i];
}
"""


@pytest.mark.parametrize("first", [0, 1, 5])
def test_an_operand_may_start_at_any_row_of_the_pattern(first: int) -> None:
    """A start at 128 modulo 1024 with base offset 0: the swizzle depends on the address."""
    from ptx_emulator import launch
    from tests.support.nvrtc_helper import compile_ptx

    rng = np.random.default_rng(first)
    a, b = (rng.integers(-4, 5, (rows, 64)).astype(np.float16) for rows in (72, 16))
    out = np.zeros((64, 8), np.float32)
    launch(compile_ptx(ROW_OFFSET, "sm_90a"), "k", 1, 128, [a, b, out, first])
    want = a[first : first + 64].astype(np.float32) @ b[first : first + 8].astype(np.float32).T
    assert (out == want).all()
