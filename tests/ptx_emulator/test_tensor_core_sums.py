"""Sums of tensor cores: those that GPUs made, special values, and that blocks follow each other.

`model` below is written from the published rules (Khattak & Mikaitis, arXiv 2512.07004), in exact
rational numbers, and shares nothing with the emulator.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import ptx_emulator as emulator
from flashgen import reference
from ptx_emulator import LaunchArguments, UnknownInstruction
from tests.ptx_emulator.test_conformance import binade
from tests.ptx_emulator.test_conformance_matrix import FORMS, mma_text
from tests.support.nvrtc_helper import compile_ptx
from tests.support.tensor_core_vectors import (
    KINDS,
    SAMPLE,
    Vectors,
    by_mma,
    by_wgmma,
    emulated,
    vectors_of,
)
from tests.support.tiers import slow

Array = np.ndarray[Any, Any]
NAN = 0x7FFFFFFF
SMALLEST = {"fp16": -14, "bf16": -126, "tf32": -126, "E4M3": -6, "E5M2": -14}
# (GPU, operand type) -> products of a block, F; those of wgmma for 8-bit floats on H100
BLOCKS = {
    ("A100", "fp16"): (8, 24),
    ("A100", "bf16"): (8, 24),
    ("A100", "tf32"): (4, 24),
    ("Ada", "E4M3"): (16, 13),
    ("Ada", "E5M2"): (16, 13),
    ("H100", "fp16"): (16, 25),
    ("H100", "bf16"): (16, 25),
    ("H100", "tf32"): (8, 25),
    ("H100", "E4M3"): (32, 13),
    ("H100", "E5M2"): (32, 13),
}
OF_MMA = [key for key in BLOCKS if key[0] != "H100" or key[1][0] != "E"]
OF_WGMMA = [key for key in BLOCKS if key[0] == "H100"]


@pytest.mark.parametrize(
    "vectors", vectors_of(SAMPLE), ids=lambda v: f"{v.gpu}-{v.kind}-{'fp16' if v.half else 'fp32'}"
)
def test_sums_have_the_bits_that_gpus_gave(vectors: Vectors) -> None:
    assert emulated(vectors).tobytes() == vectors.d.tobytes()
    assert len(vectors.d) == 80
    assert np.isfinite(vectors.d).all()


# ---- the rules, one sum at a time


def exponent(x: Fraction, smallest: int) -> int:
    """floor(log2 |x|), or the smallest."""
    return max(binade(abs(x)), smallest)


def toward_zero(x: Fraction, unit: Fraction) -> Fraction:
    return (-1 if x < 0 else 1) * (abs(x) // unit) * unit


def block(a: Array, b: Array, c: float, fraction: int, smallest: int, result: str) -> float:
    """One block; the form of the result is "f32", "e8m13" or "f16"."""
    with np.errstate(invalid="ignore"):
        special = float((a.astype(np.float64) * b.astype(np.float64)).sum() + c)
    if not math.isfinite(special):
        return special
    floor = -(20 if result == "f16" else 132) - (fraction == 25)
    terms, exponents = [], [floor]
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        if x and y:
            terms.append(Fraction(x) * Fraction(y))
            exponents.append(exponent(Fraction(x), smallest) + exponent(Fraction(y), smallest))
    if c:
        terms.append(Fraction(c))
        exponents.append(exponent(Fraction(c), -126))
    unit = Fraction(2) ** (max(exponents) - fraction)
    total = sum((toward_zero(term, unit) for term in terms), Fraction(0))
    if not total:
        return 0.0
    if result == "f16":
        with np.errstate(over="ignore"):
            return float(np.float64(total).astype(np.float16))
    bits = 13 if result == "e8m13" else 23
    rounded = toward_zero(total, Fraction(2) ** (exponent(total, -126) - bits))
    return math.copysign(math.inf if abs(rounded) >= 2**128 else float(abs(rounded)), total)


def model(v: Vectors) -> Array:
    """The results of vectors whose d is not known, as float32."""
    products, fraction = BLOCKS[v.gpu, v.kind]
    result = "f16" if v.half else "e8m13" if fraction == 13 else "f32"
    a, b = v.a, v.b
    if v.kind == "tf32":
        a, b = ((m.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for m in (a, b))
    out = []
    for row, column, start in zip(a, b, v.c, strict=True):
        total = float(start)
        for first in range(0, len(row), products):
            now = slice(first, first + products)
            total = block(row[now], column[now], total, fraction, SMALLEST[v.kind], result)
        out.append(total)
    found = np.array(out, np.float32)
    found.view(np.uint32)[np.isnan(found)] = NAN if not v.half else 0x7FFFE000
    return found


SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0)


def awkward(seed: int, shape: tuple[int, ...], kind: str, spread: float) -> Array:
    """Values over many binades, some of them zeros, few infinite or NaN; as float32."""
    rng = np.random.default_rng(seed)
    top = min(spread, {"fp16": 10, "E4M3": 4, "E5M2": 10}.get(kind, 127))
    values = rng.normal(size=shape) * 2.0 ** rng.uniform(-spread, top, shape)
    draw = rng.random(shape)
    values[draw < 0.1] = 0.0
    values = np.where(draw > 0.997, rng.choice(SPECIAL, shape), values)
    with np.errstate(over="ignore"):
        return values.astype(KINDS[kind][1]).astype(np.float32)


def same_bits(found: Array, wanted: Array) -> bool:
    return found.astype(np.float32).tobytes() == wanted.astype(np.float32).tobytes()


@pytest.mark.parametrize("spreads", [(1, 14, 62), slow((6, 30, 70))], ids=["fast", "slow"])
@pytest.mark.parametrize("half", [slow(False), True])
@pytest.mark.parametrize(("gpu", "kind"), OF_MMA)
def test_sums_of_any_values_follow_the_rules(
    gpu: str, kind: str, half: bool, spreads: tuple[int, ...]
) -> None:
    """Exponents far apart, subnormal values, zeros, infinities, NaN and overflow."""
    if half and kind in ("bf16", "tf32"):
        return
    size = np.dtype(KINDS[kind][1]).itemsize
    accumulators = np.float16 if half else np.float32
    for seed, spread in enumerate(spreads):
        for k in (16 // size, 32 // size):
            a, b = (awkward(10 * seed + i, (96, k), kind, spread) for i in range(2))
            with np.errstate(over="ignore"):
                c = awkward(99 + seed, (96,), "tf32", 2 * spread).astype(accumulators)
            v = Vectors(gpu, kind, half, a, b, c.astype(np.float32), c)
            wanted = model(v)
            assert same_bits(emulated(v), wanted), (spread, k)
            assert np.isfinite(wanted).mean() > 0.2


@pytest.mark.parametrize("half", [False, slow(True)])
@pytest.mark.parametrize(("gpu", "kind"), OF_WGMMA)
def test_successive_wgmma_add_block_by_block(gpu: str, kind: str, half: bool) -> None:
    """Four instructions along k; the first starts from zero."""
    if half and kind in ("bf16", "tf32"):
        return
    k = 4 * 32 // np.dtype(KINDS[kind][1]).itemsize
    for spread in (1, 12):
        a, b = (awkward(seed, (64, k), kind, spread) for seed in range(2))
        v = Vectors(gpu, kind, half, a, b, np.zeros(64, np.float32), b[:, 0])
        assert same_bits(by_wgmma(v), model(v)), spread


@pytest.mark.parametrize("kind", ["fp16", "bf16", "tf32", "E4M3"])
@pytest.mark.parametrize("gpu", ["Ada", "H100"])
def test_successive_mma_add_block_by_block(gpu: str, kind: str) -> None:
    """The same product added five times, in one fused chain: as five separate instructions."""
    size = np.dtype(KINDS[kind][1]).itemsize
    a, b = (awkward(seed, (64, 32 // size), kind, 6) for seed in range(2))
    c = awkward(2, (64,), "tf32", 6)
    v = Vectors(gpu, kind, False, a, b, c, c)
    for _ in range(5):
        v = v._replace(c=by_mma(v))
    assert same_bits(by_mma(v._replace(c=c), times=5), v.c)
    assert not same_bits(by_mma(v._replace(c=c), times=5, sums="rounded"), v.c)


@pytest.mark.parametrize("kind", ["E4M3", "E5M2"])
def test_mma_of_8_bit_floats_on_hopper_adds_blocks_of_f16_and_then_c(kind: str) -> None:
    a, b = (awkward(seed, (64, 32), kind, 4) for seed in range(2))
    c = awkward(2, (64,), "tf32", 6)
    first = np.arange(32) % 4 < 2
    wanted = np.zeros(64, np.float32)
    for some in (first, ~first):
        v = Vectors("H100", "fp16", False, a[:, some], b[:, some], wanted, c)
        wanted = model(v)
    with np.errstate(invalid="ignore"):
        wanted = wanted + c
    wanted.view(np.uint32)[np.isnan(wanted)] = NAN
    assert same_bits(by_mma(Vectors("H100", kind, False, a, b, c, c)), wanted)


# ---- what a launch refuses


def product_of(target: str) -> str:
    form = "m16n8k16.row.col.f32.f16.f16.f32"
    text = mma_text(f"mma.sync.aligned.{form}", 4, 2, 4, 1)
    assert form in FORMS
    return f".version 8.0\n.target {target}\n.address_size 64\n{text}"


def test_sums_that_do_not_exist_are_refused() -> None:
    args = [np.zeros((32, count), np.uint32) for count in (4, 2, 4)]
    with pytest.raises(LaunchArguments, match="no such sums") as caught:
        emulator.launch(product_of("sm_80"), "k", 1, 32, args, sums="exact")
    assert "'hardware', 'rounded'" in caught.value.way_out


@pytest.mark.parametrize("target", ["sm_70", "sm_75"])
def test_an_architecture_whose_sums_are_not_known_is_refused(target: str) -> None:
    args = [np.zeros((32, count), np.uint32) for count in (4, 2, 4)]
    with pytest.raises(UnknownInstruction, match="is not known") as caught:
        emulator.launch(product_of(target), "k", 1, 32, args)
    assert target in caught.value.numbers
    emulator.launch(product_of(target), "k", 1, 32, args, sums="rounded")


# ---- the planted bug

LONG = r"""
// D (16 x 8) = A B for K = 16 n. Each lane's fragments of a step are consecutive. As a bug, all
// steps add to one accumulator; fixed, it is added outside every 64 products.
extern "C" __global__ void sum(const uint4* a, const uint2* b, float* out, int n) {
  float d[4] = {0, 0, 0, 0}, total[4] = {0, 0, 0, 0};
  for (int step = 0; step < n; ++step) {
    uint4 x = a[step * 32 + threadIdx.x];
    uint2 y = b[step * 32 + threadIdx.x];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(y.x), "r"(y.y));
#ifdef FIXED
    if (step % 4 == 3)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] += d[i], d[i] = 0;
#endif
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = total[i] + d[i];
}
"""


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90")])
def test_a_sum_longer_than_the_accumulator_passes_only_if_it_is_rounded(arch: str) -> None:
    """All terms are positive, so that every truncation makes the sum smaller.

    The error rule compares with a loop of float32 additions, k after k.
    """
    steps, lane = 256, np.arange(32)
    rng = np.random.default_rng(0)
    a, b = (rng.random((rows, 16 * steps)).astype(np.float16) for rows in (16, 8))
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    products = a.astype(np.float32)[:, None] * b.astype(np.float32)
    same = np.add.accumulate(products, axis=2)[..., -1]
    at = 16 * np.arange(steps)[:, None, None] + 2 * (lane % 4)[:, None] + [0, 1]
    row = np.broadcast_to(lane[:, None] // 4, at.shape)
    parts = [(a, row + 8 * (i % 2), at + 8 * (i // 2)) for i in range(4)]
    x = np.concatenate([m[rows, k] for m, rows, k in parts], axis=-1)
    y = np.concatenate([b[row, at], b[row, at + 8]], axis=-1)

    def verdict(fixed: bool, sums: str) -> reference.Verdict:
        out = np.zeros((32, 2, 2), np.float32)
        ptx = compile_ptx("#define FIXED\n" * fixed + LONG, arch)
        emulator.launch(ptx, "sum", 1, 32, [x, y, out, np.int32(steps)], sums=sums)
        d = out.reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
        return reference.compare(*map(torch.from_numpy, (d, exact, same)))

    assert verdict(fixed=False, sums="rounded")
    assert verdict(fixed=True, sums="rounded")
    assert verdict(fixed=True, sums="hardware")
    assert not verdict(fixed=False, sums="hardware")
