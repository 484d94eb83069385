"""Instructions that kernels of other authors use: 8-bit floats, comparisons that give halves, bits,
vectors of atomics, reductions of a warp."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ptx_emulator.errors import EmulatorError, Misaligned, UnknownInstruction
from tests.ptx_emulator.test_conformance import Array, agree, f32, probe, random_f32, run_ptx

SMALL = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def small(values: Array, kind: str) -> Array:
    """Bits of an 8-bit float by another implementation, with the rules of .satfinite."""
    limited = np.clip(values.astype(np.float32), -LARGEST[kind], LARGEST[kind])
    with np.errstate(invalid="ignore"):
        bits = limited.astype(SMALL[kind]).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), bits)


def samples() -> Array:
    special = f32([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0xFF7FFFFF, 1])
    # Every 8-bit float, the values half-way between two of them, and their neighbours.
    every = np.arange(256, dtype=np.uint8)
    exact = np.concatenate([every.view(t).astype(np.float32) for t in SMALL.values()])
    known = np.sort(exact[np.isfinite(exact)])
    middle = (known[1:] + known[:-1]) / np.float32(2)
    near = [np.nextafter(middle, np.float32(way)) for way in (-np.inf, np.inf)]
    return np.concatenate([special, known, middle, *near, random_f32(3000, 3, -20, 20)])


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("kind", SMALL)
def test_pairs_of_float32_become_8_bit_floats(kind: str, relu: str) -> None:
    high, low = samples(), samples()[::-1].copy()
    body = f".reg .b16 s; cvt.rn.satfinite{relu}.{kind}x2.f32 s, %a, %b; cvt.u32.u16 %d, s;"
    got = probe(body, "u4", high, low)
    if relu:
        high, low = (np.where(v < 0, np.float32(0), v) for v in (high, low))
        high, low = (np.where(v == 0, np.float32(0), v) for v in (high, low))
    want = small(high, kind).astype(np.uint32) << 8 | small(low, kind)
    agree(got, want.astype(np.uint32), high, low)


@pytest.mark.parametrize("kind", SMALL)
def test_pairs_of_halves_become_8_bit_floats(kind: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint32)
    pairs = every | (every[::-1] << 16)
    body = f".reg .b16 s; cvt.rn.satfinite.{kind}x2.f16x2 s, %a; cvt.u32.u16 %d, s;"
    low, high = (half.astype(np.uint16).view(np.float16) for half in (pairs & 0xFFFF, pairs >> 16))
    want = small(high, kind).astype(np.uint32) << 8 | small(low, kind)
    agree(probe(body, "u4", pairs), want.astype(np.uint32), pairs)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("kind", SMALL)
def test_8_bit_floats_become_halves(kind: str, relu: str) -> None:
    every = np.arange(256, dtype=np.uint32)
    pairs = every | every[::-1] << 8
    body = f".reg .b16 s; cvt.u16.u32 s, %a; cvt.rn{relu}.f16x2.{kind}x2 %d, s;"
    values = np.arange(256, dtype=np.uint8).view(SMALL[kind]).astype(np.float16)
    if relu:
        values = np.where(np.isnan(values) | (values > 0), values, np.float16(0))  # -0: +0
    got = probe(body, "u4", pairs)
    for shift, want in ((0, values), (16, values[::-1])):
        half = ((got >> shift) & 0xFFFF).astype(np.uint16).view(np.float16)
        agree(half, np.ascontiguousarray(want), every)


@pytest.mark.parametrize(("mode", "pick"), [
    ("rz", lambda low, high, x: np.where(x > 0, low, high)),
    ("rm", lambda low, high, x: low), ("rp", lambda low, high, x: high),
])  # fmt: skip
def test_bfloat16_from_float64_rounds_once(mode: str, pick: Any) -> None:
    """1 + 2^-7 - 2^-40 is next to a bfloat16 in float32, and still below it."""
    rng = np.random.default_rng(1)
    exact = np.ldexp(rng.integers(128, 256, 500).astype(np.float64), rng.integers(-30, 30, 500))
    exact *= rng.choice([-1.0, 1.0], 500)
    for nudge in (0.0, 2.0**-40, -(2.0**-40)):
        x = exact * (1 + nudge)
        step = np.ldexp(1.0, np.frexp(x)[1] - 8)
        low, high = np.floor(x / step) * step, np.ceil(x / step) * step
        want = pick(low, high, x).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
        body = f".reg .b16 s; cvt.{mode}.bf16.f64 s, %a; cvt.u32.u16 %d, s;"
        agree(probe(body, "u4", x), want, x)


def test_a_saturated_conversion_of_an_integer_to_a_float_stays_in_0_to_1() -> None:
    numbers = np.array([-5, -1, 0, 1, 2, 1000], np.int32)
    got = probe("cvt.rn.sat.f64.s32 %d, %a;", "f8", numbers)
    assert got.tolist() == [0, 0, 0, 1, 1, 1]
    body = ".reg .b16 s; cvt.rn.sat.f16.s32 s, %a; cvt.f32.f16 %d, s;"
    assert probe(body, "f4", numbers).tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("text", "bits"), [
    ("u8", 8), ("s8", 8), ("u4", 4), ("s4", 4), ("u2", 2), ("s2", 2),
])  # fmt: skip
def test_pack_puts_saturated_integers_below_the_third_operand(text: str, bits: int) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-300, 300, 1000).astype(np.int32) for _ in range(2))
    c = rng.integers(0, 1 << 32, 1000, dtype=np.uint64).astype(np.uint32)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if text[0] == "s" else (0, (1 << bits) - 1)
    mask = (1 << bits) - 1
    x, y = (np.clip(v.astype(np.int64), low, high) & mask for v in (a, b))
    want = (c.astype(np.int64) << 2 * bits | x << bits | y) & 0xFFFFFFFF
    got = probe(f"cvt.pack.sat.{text}.s32.b32 %d, %a, %b, %c;", "u4", a, b, c)
    agree(got, want.astype(np.uint32), a, b)


def test_pack_of_16_bit_integers_has_no_third_operand() -> None:
    a, b = np.array([70000, -70000, 5], np.int32), np.array([-1, 40000, 6], np.int32)
    got = probe("cvt.pack.sat.s16.s32 %d, %a, %b;", "u4", a, b)
    assert got.tolist() == [0x7FFFFFFF, 0x80007FFF, 0x00050006]


# ------------------------------------------------------------------ comparisons that give numbers

HALVES = np.array([0.0, -0.0, 1.0, 2.0, 6e-8, -6e-8, np.nan, np.inf], np.float16)


def both(values: Array) -> tuple[Array, Array, Array, Array]:
    """Pairs (low, high) of every combination as words, and the two halves of both operands."""
    x, y = (v.reshape(-1) for v in np.meshgrid(values, values, indexing="ij"))
    words = [
        v.view(np.uint16).astype(np.uint32) | w.view(np.uint16).astype(np.uint32) << 16
        for v, w in ((x, y), (y, x))
    ]
    return words[0], words[1], x, y


@pytest.mark.parametrize("word", ["eq", "lt", "ge", "neu", "gtu", "num"])
def test_set_of_pairs_gives_ones_or_masks(word: str) -> None:
    a, b, x, y = both(HALVES)
    compare = {
        "eq": lambda x, y: x == y,
        "lt": lambda x, y: x < y,
        "ge": lambda x, y: x >= y,
        "neu": lambda x, y: ~(x == y),
        "gtu": lambda x, y: ~(x <= y),
        "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
    }[word]
    low, high = (compare(*v).astype(np.uint32) for v in ((x, y), (y, x)))
    got = probe(f"set.{word}.f16x2.f16x2 %d, %a, %b;", "u4", a, b)
    agree(got, low * 0x3C00 | high * 0x3C000000, a, b)
    got = probe(f"set.{word}.u32.f16x2 %d, %a, %b;", "u4", a, b)
    agree(got, low * 0xFFFF | high * 0xFFFF0000, a, b)


def test_set_of_bfloat16_and_of_a_half() -> None:
    a, b = np.array([0x3F80, 0x4000], np.uint32), np.array([0x4000, 0x3F80], np.uint32)
    halves = ".reg .b16 s, t, u; cvt.u16.u32 s, %a; cvt.u16.u32 t, %b;"
    got = probe(f"{halves} set.lt.bf16.bf16 u, s, t; cvt.u32.u16 %d, u;", "u4", a, b)
    assert got.tolist() == [0x3F80, 0]
    got = probe(f"{halves} set.lt.f16.bf16 u, s, t; cvt.u32.u16 %d, u;", "u4", a, b)
    assert got.tolist() == [0x3C00, 0]
    got = probe(".reg .b16 s; set.gt.f16.s32 s, %a, %b; cvt.u32.u16 %d, s;", "u4", a, b)
    assert got.tolist() == [0, 0x3C00]
    got = probe("set.lt.bf16x2.bf16x2 %d, %a, %b;", "u4", a, b)
    assert got.tolist() == [0x3F80, 0]


def test_a_comparison_of_halves_flushes_when_it_says_so() -> None:
    small, zero = np.array([1, 0x3FF, 0x400], np.uint32), np.zeros(3, np.uint32)
    halves = ".reg .b16 s, t; .reg .pred p; cvt.u16.u32 s, %a; cvt.u16.u32 t, %b;"
    for flag, want in (("", [1, 1, 1]), (".ftz", [0, 0, 1])):
        body = f"{halves} setp.gt{flag}.f16 p, s, t; selp.b32 %d, 1, 0, p;"
        assert probe(body, "u4", small, zero).tolist() == want
        body = f".reg .pred p, q; setp.gt{flag}.f16x2 p|q, %a, %b; selp.b32 %d, 1, 0, p;"
        assert probe(body, "u4", small, zero).tolist() == want
        body = f"set.gt{flag}.u32.f16x2 %d, %a, %b;"
        assert probe(body, "u4", small, zero).tolist() == [0xFFFF * w for w in want]


# --------------------------------------------------------------------------- integers and bits


def words(count: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)


@pytest.mark.parametrize("combine", ["and", "or"])
def test_lop3_compares_its_result_with_zero(combine: str) -> None:
    a, b, c = (words(500, s) & np.uint32(3) for s in range(3))
    body = (
        ".reg .pred p, q; setp.lt.u32 q, %c, 2;"
        f"lop3.{combine}.b32 %d|p, %a, %b, %c, 0x80, q; selp.b32 %e, 1, 0, p;"
    )
    got, some = probe(body, "u4 u4", a, b, c)
    agree(got, a & b & c, a, b, c)
    holds = (a & b & c) != 0
    want = holds & (c < 2) if combine == "and" else holds | (c < 2)
    agree(some, want.astype(np.uint32), a, b, c)
    alone = probe(body.replace("%d|p", "_|p") + " mov.b32 %d, 0;", "u4 u4", a, b, c)[1]
    agree(alone, some, a, b, c)


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_the_upper_part_of_a_24_bit_product(kind: str) -> None:
    a, b, c = (words(800, s) for s in range(3))

    def narrow(x: int) -> int:
        x &= 0xFFFFFF
        return x - (1 << 24) if kind == "s32" and x >> 23 else x

    high = np.array([(narrow(x) * narrow(y) >> 16) & 0xFFFFFFFF
                     for x, y in zip(a.tolist(), b.tolist(), strict=True)], np.uint32)  # fmt: skip
    agree(probe(f"mul24.hi.{kind} %d, %a, %b;", "u4", a, b), high, a, b)
    agree(probe(f"mad24.hi.{kind} %d, %a, %b, %c;", "u4", a, b, c), high + c, a, b)
    if kind == "s32":
        wide = high.view(np.int32).astype(np.int64) + c.view(np.int32)
        want = np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32).view(np.uint32)
        agree(probe("mad24.hi.sat.s32 %d, %a, %b, %c;", "u4", a, b, c), want, a, b)


@pytest.mark.parametrize("first", ["s32", "u32"])
@pytest.mark.parametrize("second", ["s32", "u32"])
@pytest.mark.parametrize("mode", ["lo", "hi"])
def test_dp2a_multiplies_halves_by_bytes(first: str, second: str, mode: str) -> None:
    a, b, c = (words(300, s) for s in range(3))
    x = a.view(np.int16 if first == "s32" else np.uint16).reshape(-1, 2).astype(np.int64)
    y = b.view(np.int8 if second == "s32" else np.uint8).reshape(-1, 4).astype(np.int64)
    y = y[:, 2:] if mode == "hi" else y[:, :2]
    want = ((x * y).sum(axis=1) + c).astype(np.uint64).astype(np.uint32)
    agree(probe(f"dp2a.{mode}.{first}.{second} %d, %a, %b, %c;", "u4", a, b, c), want, a, b, c)


def test_fns_finds_the_nth_set_bit() -> None:
    rng = np.random.default_rng(5)
    mask = words(2000, 1) & words(2000, 2)
    base = rng.integers(0, 32, 2000).astype(np.uint32)
    offset = rng.integers(-6, 7, 2000).astype(np.int32)

    def nth(mask: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        way = range(base, 32) if offset > 0 else range(base, -1, -1)
        found = [place for place in way if mask >> place & 1]
        return found[abs(offset) - 1] if len(found) >= abs(offset) else 0xFFFFFFFF

    want = [nth(*v) for v in zip(mask.tolist(), base.tolist(), offset.tolist(), strict=True)]
    got = probe("fns.b32 %d, %a, %b, %c;", "u4", mask, base, offset)
    agree(got, np.array(want, np.uint32), mask, base, offset)


# --------------------------------------------------------------------------- vectors of atomics

RED = """.visible .entry k(.param .u64 p, .param .u64 q) {{ .reg .b64 %p, %q; .reg .b32 %r<4>;
    .reg .f32 %f<4>; .reg .b16 %h<8>;
    ld.param.u64 %p, [p]; ld.param.u64 %q, [q]; {load} red.global.add{modifiers} [%p], {value};
    ret; }}"""


@pytest.mark.parametrize(("modifiers", "load", "value", "dtype"), [
    (".noftz.v2.f16x2", "ld.global.v2.b32 {%r0, %r1}, [%q];", "{%r0, %r1}", np.float16),
    (".noftz.v4.bf16x2", "ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%q];", "{%r0, %r1, %r2, %r3}",
     ml_dtypes.bfloat16),
    (".v4.f32", "ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%q];", "{%f0, %f1, %f2, %f3}", np.float32),
    (".v2.f32", "ld.global.v2.f32 {%f0, %f1}, [%q];", "{%f0, %f1}", np.float32),
    (".noftz.v4.f16", "ld.global.v4.b16 {%h0, %h1, %h2, %h3}, [%q];", "{%h0, %h1, %h2, %h3}",
     np.float16),
])  # fmt: skip
def test_a_vector_of_reductions_adds_each_element(
    modifiers: str, load: str, value: str, dtype: Any
) -> None:
    target, source = np.arange(16).astype(dtype), (np.arange(16) / 4).astype(dtype)
    text = RED.format(modifiers=modifiers, load=load, value=value)
    count = int(modifiers.split(".v")[1][0]) * (2 if "x2" in modifiers else 1)
    want = target.copy()
    want[:count] = want[:count] + 3 * source[:count]
    raw = [a.view(np.uint16) if dtype is ml_dtypes.bfloat16 else a for a in (target, source)]
    run_ptx(text, "k", 1, 3, *raw)
    assert (target == want).all()


def test_a_vector_of_reductions_is_aligned_to_its_size() -> None:
    text = RED.format(modifiers=".v4.f32", load="ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%q];",
                      value="{%f0, %f1, %f2, %f3}").replace("[%p]", "[%p+4]")  # fmt: skip
    with pytest.raises(Misaligned, match="16-byte"):
        run_ptx(text, "k", 1, 1, np.zeros(16, np.float32), np.zeros(16, np.float32))


def test_atomics_on_local_memory_are_refused() -> None:
    text = """.visible .entry k(.param .u64 p) { .reg .b64 %p; .reg .b32 %r; .local .b32 x;
        mov.u64 %p, x; cvta.local.u64 %p, %p; atom.add.u32 %r, [%p], 1; ret; }"""
    with pytest.raises(UnknownInstruction, match="atomics on local memory") as caught:
        run_ptx(text, "k", 1, 1, np.zeros(16, np.float32))
    assert "lane 0" in caught.value.where
    with pytest.raises(UnknownInstruction, match="atomics on local memory"):
        run_ptx(text.replace("atom.add", "atom.local.add"), "k", 1, 1, np.zeros(16, np.float32))


# ------------------------------------------------------------------- reductions and registers


@pytest.mark.parametrize("operation", ["min", "max"])
@pytest.mark.parametrize("flags", ["", ".abs", ".NaN", ".abs.NaN"])
def test_redux_of_floats(operation: str, flags: str) -> None:
    values = random_f32(64, 4)
    values[40] = np.nan
    got = probe(f"redux.sync.{operation}{flags}.f32 %d, %a, -1;", "f4", values, block=32)
    sized = np.abs(values) if "abs" in flags else values
    pick = (np.minimum if operation == "min" else np.maximum) if "NaN" in flags else None
    pick = pick or (np.fmin if operation == "min" else np.fmax)
    want = np.repeat([pick.reduce(sized[:32]), pick.reduce(sized[32:])], 32)
    agree(got, want.astype(np.float32), values)


def test_redux_of_another_type_is_refused() -> None:
    with pytest.raises(EmulatorError, match=r"redux\.sync\.add\.f32"):
        probe("redux.sync.add.f32 %d, %a, -1;", "f4", random_f32(64, 4), block=32)


def test_registers_of_the_cluster_can_be_read() -> None:
    body = (
        ".reg .b32 x<4>; mov.u32 x0, %nclusterid.x; mov.u32 x1, %cluster_nctarank;"
        " mov.u32 x2, %nclusterid.y; mad.lo.u32 %d, x0, 100, x1; mad.lo.u32 %d, %d, 10, x2;"
    )
    got = probe(body, "u4", np.zeros(96, np.uint32), block=32)
    assert (got == 3 * 1000 + 10 + 1).all()
