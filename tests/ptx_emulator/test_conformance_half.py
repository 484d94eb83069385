"""float16 and bfloat16 arithmetic, alone and packed in pairs, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ptx_emulator.test_conformance import (
    BF16,
    F16,
    Array,
    Exact,
    Format,
    agree,
    exact_add,
    exact_fma,
    exact_mul,
    pairs,
    probe,
    random_f32,
    rounded,
)
from tests.ptx_emulator.test_conformance_compare import extreme, relation

BF = np.dtype(ml_dtypes.bfloat16)
KINDS: dict[str, tuple[Format, np.dtype[Any], list[int]]] = {
    "f16": (
        *(F16, np.dtype(np.float16)),
        [
            *(0, 1, 2, 0x3FF, 0x400, 0x401, 0x1000, 0x3800, 0x3BFF, 0x3C00, 0x3C01, 0x3E00),
            *(0x6400, 0x6800, 0x7800, 0x7BFF, 0x7C00, 0x7E00),
        ],
    ),
    "bf16": (
        *(BF16, BF),
        [
            *(
                0,
                1,
                2,
                0x7F,
                0x80,
                0x81,
                0x2000,
                0x3F00,
                0x3F7F,
                0x3F80,
                0x3F81,
                0x3FC0,
                0x4300,
                0x7E80,
            ),
            *(0x7F7F, 0x7F80, 0x7FC0),
        ],
    ),
}


def edges(name: str) -> Array:
    _, kind, patterns = KINDS[name]
    bits = np.array([*patterns, *(p | 0x8000 for p in patterns)], np.uint16)
    return np.concatenate([bits.view(kind), random_f32(6, 1, -4, 4).astype(kind)])


def halves(name: str, count: int) -> list[Array]:
    """`count` operands of an even length: every pair of edges, the third one scrambled."""
    left, right = pairs(edges(name))
    third = np.resize(np.random.default_rng(1).permutation(edges(name)), left.size)
    even = left.size & ~1
    return [v[:even].copy() for v in (left, right, third)][:count]


def packed(body: str, name: str, *operands: Array, words: bool) -> Array:
    """Runs `body` on 16-bit registers, or on the same data two to a 32-bit register."""
    unit = np.uint32 if words else np.uint16
    got = probe(body, np.dtype(unit).str[1:], *(v.view(unit) for v in operands))
    return got.view(KINDS[name][1])


def exact_sub(x: Exact, y: Exact, mode: str = "rn") -> Exact:
    return exact_add(x, -y, mode)


@pytest.mark.parametrize("words", [False, True], ids=["one", "pair"])
@pytest.mark.parametrize(
    ("opcode", "function"),
    [("add", exact_add), ("sub", exact_sub), ("mul", exact_mul), ("add.rn", exact_add)],
)
def test_f16_arithmetic_rounds_once(
    opcode: str, function: Callable[..., Exact], words: bool
) -> None:
    inputs = halves("f16", 2)
    want = rounded(function, F16, *inputs).view(np.float16)
    body = f"{opcode}.f16{'x2' if words else ''} %d, %a, %b;"
    agree(packed(body, "f16", *inputs, words=words), want, *inputs)


@pytest.mark.parametrize("words", [False, True], ids=["one", "pair"])
@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_half_fma_rounds_once(name: str, relu: str, words: bool) -> None:
    form, kind, _ = KINDS[name]
    inputs = halves(name, 3)
    want = rounded(exact_fma, form, *inputs).view(kind)
    body = f"fma.rn{relu}.{name}{'x2' if words else ''} %d, %a, %b, %c;"
    got = packed(body, name, *inputs, words=words)
    if relu:
        want = np.where(np.signbit(want) & ~np.isnan(want), kind.type(0), want).astype(kind)
        got = got + kind.type(0)
    agree(got, want, *inputs)


def test_f16_products_are_not_flushed_but_ftz_ones_are() -> None:
    inputs = halves("f16", 2)
    exact = rounded(exact_mul, F16, *inputs)
    subnormal = ((exact & 0x7C00) == 0) & ((exact & 0x7FFF) != 0)
    assert subnormal.sum() > 50
    want = rounded(exact_mul, F16, *inputs, ftz=True)
    clear = ~(((exact & 0x7FFF) == 0x400) & (exact != rounded(exact_mul, F16, *inputs, mode="rz")))
    got = packed("mul.ftz.f16 %d, %a, %b;", "f16", *inputs, words=False)
    agree(got[clear], want.view(np.float16)[clear], *(v[clear] for v in inputs))


def test_f16_sat_clamps_to_the_unit_interval() -> None:
    inputs = halves("f16", 2)
    plain = rounded(exact_add, F16, *inputs).view(np.float16)
    want = np.where(np.isnan(plain), 0, np.clip(plain, 0, 1)).astype(np.float16)
    got = packed("add.sat.f16x2 %d, %a, %b;", "f16", *inputs, words=True)
    agree(got + np.float16(0), want + np.float16(0), *inputs)


@pytest.mark.parametrize("words", [False, True], ids=["one", "pair"])
@pytest.mark.parametrize("nan", ["", ".NaN"])
@pytest.mark.parametrize("side", ["min", "max"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_half_min_and_max(name: str, side: str, nan: str, words: bool) -> None:
    _, kind, _ = KINDS[name]
    inputs = halves(name, 2)
    rows = zip(*(v.astype(np.float64).tolist() for v in inputs), strict=True)
    want = np.array([extreme(side, a, b, bool(nan)) for a, b in rows], kind)
    body = f"{side}{nan}.{name}{'x2' if words else ''} %d, %a, %b;"
    agree(packed(body, name, *inputs, words=words), want, *inputs)


@pytest.mark.parametrize("words", [False, True], ids=["one", "pair"])
@pytest.mark.parametrize(("opcode", "flip"), [("neg", 0x8000), ("abs", 0)])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_half_sign(name: str, opcode: str, flip: int, words: bool) -> None:
    values = edges(name)
    bits = values.view(np.uint16)
    want = (bits ^ flip if flip else bits & 0x7FFF).astype(np.uint16).view(values.dtype)
    got = packed(f"{opcode}.{name}{'x2' if words else ''} %d, %a;", name, values, words=words)
    agree(got, want, values)


@pytest.mark.parametrize("word", ["lt", "geu", "eq", "neu", "nan"])
def test_setp_f16(word: str) -> None:
    inputs = halves("f16", 2)
    body = f".reg .pred p; setp.{word}.f16 p, %a, %b; selp.u16 %d, 1, 0, p;"
    got = packed(body, "f16", *inputs, words=False).view(np.uint16)
    agree(got, relation(word, *inputs).astype(np.uint16), *inputs)


@pytest.mark.parametrize("word", ["lt", "geu", "eq", "neu"])
def test_setp_f16x2_writes_one_predicate_per_half(word: str) -> None:
    inputs = halves("f16", 2)
    words = [v.view(np.uint32) for v in inputs]
    body = f""".reg .pred p, q; setp.{word}.f16x2 p|q, %a, %b;
        selp.b32 %d, 1, 0, p; selp.b32 %e, 1, 0, q;"""
    low, high = probe(body, "u4 u4", *words)
    want = relation(word, *inputs)
    agree(low, want[0::2].copy(), *(v[0::2] for v in inputs))
    agree(high, want[1::2].copy(), *(v[1::2] for v in inputs))


@pytest.mark.parametrize(
    ("opcode", "truth", "relative", "absolute"),
    [
        ("ex2.approx.f16", np.exp2, 2.0**-9.9, 2.0**-24),
        ("tanh.approx.f16", np.tanh, 0.0, 2.0**-10.987),
    ],
)
@pytest.mark.parametrize("words", [False, True], ids=["one", "pair"])
def test_f16_approximations_stay_within_the_stated_error(
    opcode: str, truth: Callable[[Array], Array], relative: float, absolute: float, words: bool
) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)[::3].copy()
    with np.errstate(all="ignore"):
        want = truth(values.astype(np.float64))
        body = f"{opcode}{'x2' if words else ''} %d, %a;"
        got = packed(body, "f16", values, words=words).astype(np.float64)
        fine = np.abs(got - want) <= np.abs(want) * relative + absolute
        fine |= (np.isnan(got) & np.isnan(want)) | (got == want)
        fine |= np.isinf(got) & (want > 65504)
    assert fine.all(), (values[~fine][:4], got[~fine][:4], want[~fine][:4])


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_half_constants_and_halves_move_without_change(name: str) -> None:
    values = edges(name)
    bits = values.view(np.uint16)
    body = """.reg .b16 lo, hi; .reg .b32 both; mov.b16 lo, %a; mov.b16 hi, 0x3C00;
        mov.b32 both, {lo, hi}; mov.b32 {hi, lo}, both; mov.b32 %d, {lo, hi};"""
    got = probe(body, "u4", bits)
    agree(got, (bits.astype(np.uint32) << 16) | 0x3C00, bits)


def test_f16_arithmetic_goes_through_float32_when_the_program_does() -> None:
    inputs = halves("f16", 2)
    body = """.reg .f32 x, y; cvt.f32.f16 x, %a; cvt.f32.f16 y, %b; add.f32 x, x, y;
        cvt.rn.f16.f32 %d, x;"""
    with np.errstate(all="ignore"):
        want = (inputs[0].astype(np.float32) + inputs[1].astype(np.float32)).astype(np.float16)
    agree(packed(body, "f16", *inputs, words=False), want, *inputs)


def test_bf16_multiply_as_an_fma_with_minus_zero() -> None:
    """bf16 has no plain product on sm_80; compilers write fma with -0.0, which keeps the sign."""
    inputs = halves("bf16", 2)
    body = ".reg .b16 z; mov.b16 z, 0x8000; fma.rn.bf16 %d, %a, %b, z;"
    got = packed(body, "bf16", *inputs, words=False)
    agree(got, rounded(exact_mul, BF16, *inputs).view(BF), *inputs)
