"""cvt in every direction, bit for bit: rounding modes, ties, overflow, saturation and packing."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ptx_emulator.test_conformance import (
    BF16,
    EDGES_F32,
    F16,
    F32,
    F64,
    TF32,
    Array,
    Exact,
    Format,
    agree,
    bits_of,
    decode,
    encode,
    f32,
    probe,
    random_f32,
    rounded,
)
from tests.ptx_emulator.test_conformance_integer import check, operands, signed

HALVES: dict[str, tuple[Format, np.dtype[Any]]] = {
    "f16": (F16, np.dtype(np.float16)),
    "bf16": (BF16, np.dtype(ml_dtypes.bfloat16)),
}


def around_every_tie(form: Format) -> Array:
    """float32 numbers at, just below and just above the midpoints between numbers of `form`."""
    last = form.infinity - 1
    picks = [*range(20), *np.linspace(0, last, 300).astype(int).tolist(), last - 1, last]
    ties = []
    for bits in [*picks, (1 << form.mantissa) - 1]:
        here, below = (Fraction(decode(b, form)) for b in (bits, max(bits - 1, 0)))
        above = Fraction(decode(bits + 1, form)) if bits < last else 2 * here - below
        ties.append(encode((here + above) / 2, F32))
    patterns = np.array(ties)[:, None] + np.array([-1, 0, 1])
    patterns = np.clip(patterns.reshape(-1), 0, 0x7F7FFFFF).astype(np.uint32)
    return f32(np.concatenate([patterns, patterns | 0x80000000]))


def same(x: Exact, mode: str = "rn") -> Exact:
    return x


def narrow(values: Array, name: str, mode: str, relu: bool = False) -> Array:
    form, kind = HALVES[name]
    want = rounded(same, F32, values, mode=mode, into=form).view(kind)
    with np.errstate(all="ignore"):
        negative = np.signbit(values) & ~np.isnan(values)
    return np.where(negative & relu, kind.type(0), want).astype(kind)


def unsigned_zero(values: Array) -> Array:
    return np.where(values == 0, values.dtype.type(0), values).astype(values.dtype)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_cvt_f32_to_half_at_every_tie(name: str, mode: str, relu: str) -> None:
    values = np.concatenate([EDGES_F32, random_f32(500, 1), around_every_tie(HALVES[name][0])])
    want = narrow(values, name, mode, bool(relu))
    got = probe(f"cvt.{mode}{relu}.{name}.f32 %d, %a;", "u2", values)
    agree(unsigned_zero(got.view(want.dtype)) if relu else got.view(want.dtype), want, values)


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("mode", ["rn", "rz", "rn.relu"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_cvt_packed_puts_the_first_source_in_the_upper_half(
    name: str, mode: str, typed: bool
) -> None:
    first = np.concatenate([EDGES_F32, random_f32(300, 2)])
    second = np.roll(first, 7)
    got = probe(f"cvt.{mode}.{name}x2.f32 %d, %a, %b;", "u4", first, second, typed=typed)
    kind = HALVES[name][1]
    for half, values in ((got >> 16, first), (got & 0xFFFF, second)):
        want = narrow(values, name, mode[:2], "relu" in mode)
        half = half.astype(np.uint16).view(kind)
        agree(unsigned_zero(half), unsigned_zero(want), values)


def test_cvt_f16_to_f32_is_exact_for_every_pattern() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    want = patterns.view(np.float16).astype(np.float32)
    agree(probe("cvt.f32.f16 %d, %a;", "f4", patterns, block=1024), want, patterns)


def test_cvt_f16_to_f64_and_back() -> None:
    patterns = np.arange(0, 1 << 16, 7, dtype=np.uint16)
    body = ".reg .f64 x; cvt.f64.f16 x, %a; cvt.rn.f16.f64 %d, x;"
    got = probe(body, "u2", patterns).view(np.float16)
    agree(got, patterns.view(np.float16), patterns)


def test_bf16_widens_by_a_shift_or_a_permutation() -> None:
    patterns = np.arange(0, 1 << 16, 5, dtype=np.uint32)
    body = "shl.b32 %d, %a, 16; prmt.b32 %e, %a, 0, 0x1044;"
    shifted, permuted = probe(body, "f4 f4", patterns, typed=False)
    want = (patterns << 16).view(np.float32)
    agree(bits_of(shifted), bits_of(want), patterns)
    agree(bits_of(permuted), bits_of(want), patterns)
    halves = patterns.astype(np.uint16)
    agree(probe("cvt.f32.bf16 %d, %a;", "f4", halves), want, halves)


def test_cvt_rna_tf32_rounds_ties_away() -> None:
    values = np.concatenate([EDGES_F32, random_f32(500, 3), around_every_tie(TF32)])
    want = rounded(same, F32, values, mode="rna", into=TF32) << 13
    got = probe("cvt.rna.tf32.f32 %d, %a;", "u4", values)
    number = ~np.isnan(values)
    agree((got & 0xFFFFE000)[number], want[number].astype(np.uint32), values[number])
    assert np.isnan((got & 0xFFFFE000).view(np.float32)[~number]).all()


ROUND = {
    "rni": lambda v: Fraction(round(v)),
    "rzi": lambda v: Fraction(math.trunc(v)),
    "rmi": lambda v: Fraction(math.floor(v)),
    "rpi": lambda v: Fraction(math.ceil(v)),
}
HALFWAY = np.array(
    [
        *np.arange(-5.5, 6, 0.5),
        *(0.49999997, -0.49999997, 0.99999994, -0.99999994, 8388607.5, 127.5, 255.5, 65535.5),
        *(32767.5, -32768.5, 2147483520, 4294967040, 2147483648, -2147483648, -2147483904),
        *(4294967296, 1e10, -1e10, 9.2e18, 1.9e19, -9.3e18),
    ],
    np.float32,
)


@pytest.mark.parametrize("mode", [*ROUND])
@pytest.mark.parametrize("target", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_cvt_f32_to_integer_rounds_and_saturates(target: str, mode: str) -> None:
    width = int(target[1:])
    values = np.concatenate([EDGES_F32, HALFWAY, random_f32(300, 4, -3, 40)])
    if width == 64:  # what NaN becomes is stated for the narrower targets only
        values = values[~np.isnan(values)]
    low = -(1 << width - 1) if target[0] == "s" else 0
    high = (1 << width - (target[0] == "s")) - 1

    def function(value: Exact) -> int:
        if isinstance(value, float):
            whole = 0 if not math.isinf(value) else low if value < 0 else high
            return whole
        return max(low, min(high, int(ROUND[mode](value))))

    want = [function(decode(b, F32)) & ((1 << width) - 1) for b in bits_of(values).tolist()]
    got = probe(f"cvt.{mode}.{target}.f32 %d, %a;", f"u{width // 8}", values)
    agree(got, np.array(want, got.dtype), values)


@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64", "s16", "u16", "s8", "u8"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_cvt_integer_to_f32_rounds_in_the_named_mode(source: str, mode: str) -> None:
    width = max(16, int(source[1:]))
    rng = np.random.default_rng(5)
    values = np.concatenate(
        [operands(f"u{width}"), rng.integers(0, 1 << width, 300, f"u{width // 8}")]
    )
    if width >= 32:
        near = np.array([(1 << 24) + i for i in range(8)] + [(1 << 25) + i for i in range(12)])
        values = np.concatenate([values, near.astype(values.dtype)])

    def number(bits: int) -> Exact:
        bits &= (1 << int(source[1:])) - 1
        return Fraction(signed(bits, int(source[1:])) if source[0] == "s" else bits) or 0.0

    want = np.array([encode(number(v), F32, mode) for v in values.tolist()], np.uint32)
    agree(probe(f"cvt.{mode}.f32.{source} %d, %a;", "u4", values, typed=False), want, values)


@pytest.mark.parametrize("mode", [*ROUND])
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_cvt_f32_to_integral_f32_keeps_the_sign_of_zero(mode: str, ftz: str) -> None:
    values = np.concatenate([EDGES_F32, HALFWAY, random_f32(300, 6, -3, 30)])

    def function(bits: int) -> int:
        value, sign = decode(bits, F32), bits & 0x80000000
        if not isinstance(value, Fraction) or (ftz and bits & 0x7F800000 == 0):
            return sign if isinstance(value, Fraction) else bits
        return sign | encode(abs(ROUND[mode](value)) or 0.0, F32)

    want = np.array([function(b) for b in bits_of(values).tolist()], np.uint32).view(np.float32)
    agree(probe(f"cvt.{mode}{ftz}.f32.f32 %d, %a;", "f4", values), want, values)


def test_cvt_sat_f32_clamps_to_the_unit_interval() -> None:
    values = np.concatenate([EDGES_F32, random_f32(200, 7)])
    with np.errstate(all="ignore"):
        want = np.where(np.isnan(values), 0, np.clip(values, 0, 1)).astype(np.float32)
    got = probe("cvt.sat.f32.f32 %d, %a;", "f4", values)
    agree(got + np.float32(0), want + np.float32(0), values)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_cvt_f64_to_f32_rounds_once(mode: str) -> None:
    rng = np.random.default_rng(8)
    values = np.ldexp(rng.normal(size=1000), rng.integers(-160, 130, 1000))
    values[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 3.5e38]
    want = rounded(same, F64, values, mode=mode, into=F32).view(np.float32)
    agree(probe(f"cvt.{mode}.f32.f64 %d, %a;", "f4", values), want, values)


def test_cvt_f32_to_f64_is_exact() -> None:
    values = np.concatenate([EDGES_F32, random_f32(100, 9)])
    with np.errstate(invalid="ignore"):
        want = values.astype(np.float64)
    agree(probe("cvt.f64.f32 %d, %a;", "f8", values), want, values)


@pytest.mark.parametrize("mode", ["rni", "rzi"])
@pytest.mark.parametrize("name", ["s16", "u16", "s32"])
def test_cvt_f16_to_integer(mode: str, name: str) -> None:
    patterns = np.arange(0, 1 << 16, 11, dtype=np.uint16)
    width = int(name[1:])
    low = -(1 << width - 1) if name[0] == "s" else 0
    high = (1 << width - (name[0] == "s")) - 1
    want = []
    for bits in patterns.tolist():
        value = decode(bits, F16)
        whole = int(ROUND[mode](value)) if isinstance(value, Fraction) else 0
        if isinstance(value, float) and math.isinf(value):
            whole = low if value < 0 else high
        want.append(max(low, min(high, whole)) & ((1 << width) - 1))
    got = probe(f"cvt.{mode}.{name}.f16 %d, %a;", f"u{width // 8}", patterns)
    agree(got, np.array(want, got.dtype), patterns)


@pytest.mark.parametrize("source", ["s32", "u32", "u16"])
def test_cvt_integer_to_f16_overflows_to_infinity(source: str) -> None:
    width = int(source[1:])
    values = np.concatenate([operands(f"u{width}"), np.arange(2040, 2070), np.arange(65500, 65530)])
    values = values.astype(f"u{width // 8}")

    def number(bits: int) -> Exact:
        return Fraction(signed(bits, width) if source[0] == "s" else bits) or 0.0

    want = np.array([encode(number(v), F16) for v in values.tolist()], np.uint16)
    agree(probe(f"cvt.rn.f16.{source} %d, %a;", "u2", values), want, values)


WIDTHS = [(src, dst) for src in ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
          for dst in ("s16", "u16", "s32", "u32", "s64", "u64")]  # fmt: skip


@pytest.mark.parametrize(("source", "target"), WIDTHS, ids=lambda v: v)
def test_cvt_between_integers_extends_or_truncates(source: str, target: str) -> None:
    width = int(source[1:])
    register = max(width, 16)
    values = operands(f"u{register}")
    body = f"cvt.{target}.{source} %d, %a;"

    def function(a: int) -> int:
        a &= (1 << width) - 1
        return signed(a, width) if source[0] == "s" else a

    check(body, target, f"u{register}", function, values)


@pytest.mark.parametrize(
    ("source", "target"),
    [p for p in itertools.product(["s32", "u32", "s64"], ["s8", "u8", "s16", "u16", "s32", "u32"])
     if p[0] != p[1]],
)  # fmt: skip
def test_cvt_sat_between_integers_clamps(source: str, target: str) -> None:
    width = int(target[1:])
    low, high = (
        (-(1 << width - 1), (1 << width - 1) - 1) if target[0] == "s" else (0, (1 << width) - 1)
    )
    out = f"{target[0]}{max(width, 32)}"
    values = operands(source)
    body = f"cvt.sat.{target}.{source} %d, %a;"
    check(body, out, source, lambda a: max(low, min(high, a)), values)


@pytest.mark.parametrize("source", ["f32", "f64"])
@pytest.mark.parametrize("target", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_cvt_of_a_nan_to_an_integer(source: str, target: str) -> None:
    """Zero; from float64 and to 64 bits the highest bit alone."""
    bits = int(target[1:])
    want = 1 << bits - 1 if source == "f64" or bits == 64 else 0
    nan = np.array([np.nan, -np.nan], f"f{int(source[1:]) // 8}")
    body = f".reg .b{bits} r; cvt.rni.{target}.{source} r, %a; "
    body += f"cvt.u64.u{bits} %d, r;" if bits < 64 else "mov.b64 %d, r;"
    agree(probe(body, "u8", nan), np.array([want, want], np.uint64), nan)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("target", ["f64", "f16", "bf16"])
def test_cvt_of_64_bit_integers_rounds_once(target: str, mode: str) -> None:
    numbers = [0, 1, -1, 2049, -2051, 65519, 65520, -70000, 2**53 + 1, -(2**53) - 3, 2**63 - 1]
    numbers += [2**62 + 2**54 + 1, -(2**62) - 2**54 - 1, 2**62 + 2**54, -(2**63)]
    given = np.array(numbers, np.int64)
    form = {"f64": F64, "f16": F16, "bf16": BF16}[target]
    if target == "f64":
        got = bits_of(probe(f"cvt.{mode}.f64.s64 %d, %a;", "f8", given))
    else:
        body = f".reg .b16 h; cvt.{mode}.{target}.s64 h, %a; cvt.u32.u16 %d, h;"
        got = probe(body, "u4", given)
    want = [encode(Fraction(v) if v else 0.0, form, mode) for v in numbers]
    agree(got, np.array(want, np.uint64).astype(got.dtype), given)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_cvt_from_float16_to_bfloat16_rounds_in_the_named_mode(mode: str) -> None:
    given = np.arange(0, 65536, 37, dtype=np.uint16)
    body = f".reg .b16 x, y; cvt.u16.u32 x, %a; cvt.{mode}.bf16.f16 y, x; cvt.u32.u16 %d, y;"
    got = probe(body, "u4", given.astype(np.uint32)).astype(np.uint16)
    want = [encode(decode(int(bits), F16), BF16, mode) for bits in given]
    agree(got.view(ml_dtypes.bfloat16), np.array(want, np.uint16).view(ml_dtypes.bfloat16), given)


@pytest.mark.parametrize("rounding", ["rna", "rn", "rz"])
def test_cvt_satfinite_gives_the_largest_finite_tf32(rounding: str) -> None:
    largest = np.uint32(0x7F7FE000).view(np.float32)
    given = np.array([np.inf, -np.inf, 3.4028235e38, -3.4028235e38, largest, 1.5], np.float32)
    got = probe(f"cvt.{rounding}.satfinite.tf32.f32 %d, %a;", "f4", given)
    assert got.tolist() == [largest, -largest, largest, -largest, largest, 1.5]


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_cvt_satfinite_gives_the_largest_finite_number(name: str) -> None:
    given = np.array([1.5, 1e5, -1e5, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan], np.float32)
    form = {"f16": F16, "bf16": BF16}[name]
    most = decode({"f16": 0x7BFF, "bf16": 0x7F7F}[name], form)
    want = []
    for x in given.tolist():
        near = x if math.isnan(x) else max(-most, min(most, Fraction(x) if abs(x) < 1e39 else x))
        want.append(encode(near, form, "rn"))
    body = f".reg .b16 h; cvt.rn.satfinite.{name}.f32 h, %a; cvt.u32.u16 %d, h;"
    got = probe(body, "u4", given)
    pair = probe(f"cvt.rn.satfinite.{name}x2.f32 %d, %a, %a;", "u4", given)
    kind = ml_dtypes.bfloat16 if name == "bf16" else np.float16
    for found in (got, pair & 0xFFFF, pair >> 16):
        agree(found.astype(np.uint16).view(kind), np.array(want, np.uint16).view(kind), given)
