"""Comparisons, predicates, selections and minima, with NaN and signed zeros among the operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ptx_emulator.test_conformance import EDGES_F32, Array, agree, f32, pairs, probe
from tests.ptx_emulator.test_conformance_integer import M32, check, operands

COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("relation", [*COMPARE])
def test_setp_and_selp(relation: str, kind: str) -> None:
    body = f".reg .pred p; setp.{relation}.{kind} p, %a, %b; selp.b32 %d, 7, 9, p;"
    function = COMPARE[relation]
    inputs = pairs(operands(kind))
    check(body, "u32", f"{kind} {kind}", lambda a, b: 7 if function(a, b) else 9, *inputs)


@pytest.mark.parametrize(
    ("word", "relation"), [("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")]
)
def test_setp_unsigned_words(word: str, relation: str) -> None:
    body = f".reg .pred p; setp.{word}.u32 p, %a, %b; selp.u32 %d, 1, 0, p;"
    inputs = pairs(operands("u32"))
    check(body, "u32", "u32 u32", lambda a, b: COMPARE[relation](a, b), *inputs)


@pytest.mark.parametrize("combine", ["and", "or", "xor"])
@pytest.mark.parametrize("negate", ["", "!"])
def test_setp_combines_and_writes_both_results(combine: str, negate: str) -> None:
    def function(a: int, b: int, c: int) -> int:
        join = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}[combine]
        third = (c & 1) ^ (negate == "!")
        return join(int(a < b), third) + 2 * join(int(a >= b), third)

    body = f""".reg .pred p, q, r; .reg .b32 x, y;
        and.b32 x, %c, 1; setp.eq.u32 r, x, 1;
        setp.lt.{combine}.s32 p|q, %a, %b, {negate}r;
        selp.b32 x, 1, 0, p; selp.b32 y, 2, 0, q; or.b32 %d, x, y;"""
    left, right = pairs(operands("s32"))
    third = np.arange(left.size, dtype=np.uint32)
    check(body, "u32", "s32 s32 u32", function, left, right, third)


@pytest.mark.parametrize(
    ("body", "function"),
    [
        ("set.lt.u32.s32 %d, %a, %b;", lambda a, b: M32 if a < b else 0),
        ("set.ge.f32.s32 %d, %a, %b;", lambda a, b: 0x3F800000 if a >= b else 0),
        ("slct.b32.s32 %d, %a, 77, %b;", lambda a, b: a if b >= 0 else 77),
    ],
)
def test_set_and_slct(body: str, function: Callable[[int, int], int]) -> None:
    check(body, "u32", "s32 s32", function, *pairs(operands("s32")))


@pytest.mark.parametrize(
    ("body", "function"),
    [
        ("and.pred r, p, q;", lambda p, q: p and q),
        ("or.pred r, p, !q;", None),
        ("xor.pred r, p, q;", lambda p, q: p != q),
        ("not.pred r, p;", lambda p, q: not p),
        ("mov.pred r, q;", lambda p, q: q),
    ],
)
def test_predicate_logic(body: str, function: Any) -> None:
    if function is None:  # a negated source needs the plain form
        body, function = "not.pred q, q; or.pred r, p, q;", lambda p, q: p or not q
    body = f""".reg .pred p, q, r; .reg .b32 x;
        and.b32 x, %a, 1; setp.ne.s32 p, x, 0; and.b32 x, %a, 2; setp.ne.s32 q, x, 0;
        {body} selp.b32 %d, 1, 0, r;"""
    values = np.arange(64, dtype=np.uint32)
    check(body, "u32", "u32", lambda a: bool(function(bool(a & 1), bool(a & 2))), values)


FLOAT_COMPARE: dict[str, Callable[[float, float], bool]] = {
    **{word: (lambda a, b, f=f: not _nan(a, b) and f(a, b)) for word, f in COMPARE.items()},
    **{word + "u": (lambda a, b, f=f: _nan(a, b) or f(a, b)) for word, f in COMPARE.items()},
    "num": lambda a, b: not _nan(a, b),
    "nan": lambda a, b: _nan(a, b),
}


def _nan(a: float, b: float) -> bool:
    return math.isnan(a) or math.isnan(b)


def relation(word: str, left: Array, right: Array) -> Array:
    with np.errstate(all="ignore"):
        left, right = left.astype(np.float64), right.astype(np.float64)
    rows = zip(left.tolist(), right.tolist(), strict=True)
    return np.array([FLOAT_COMPARE[word](a, b) for a, b in rows], np.uint32)


@pytest.mark.parametrize("word", [*FLOAT_COMPARE])
def test_setp_and_set_of_f32_are_false_or_true_on_nan_as_their_name_says(word: str) -> None:
    left, right = pairs(EDGES_F32)
    body = f".reg .pred p; setp.{word}.f32 p, %a, %b; selp.b32 %d, 1, 0, p;"
    agree(probe(body, "u4", left, right), relation(word, left, right), left, right)
    agree(probe(body, "u4", left, right, typed=False), relation(word, left, right), left, right)
    ones = probe(f"set.{word}.u32.f32 %d, %a, %b;", "u4", left, right)
    agree(ones, relation(word, left, right) * np.uint32(M32), left, right)


@pytest.mark.parametrize("word", ["lt", "geu", "ne", "equ"])
def test_setp_f32_second_result_is_the_negation_before_the_combination(word: str) -> None:
    left, right = pairs(EDGES_F32)
    third = np.arange(left.size, dtype=np.uint32) & 1
    body = f""".reg .pred p, q, r; .reg .b32 x; setp.ne.s32 r, %c, 0;
        setp.{word}.and.f32 p|q, %a, %b, r; selp.b32 %d, 1, 0, p; selp.b32 x, 2, 0, q;
        or.b32 %d, %d, x;"""
    true = relation(word, left, right)
    want = (true & third) | (((1 - true) & third) << 1)
    agree(probe(body, "u4", left, right, third), want.astype(np.uint32), left, right, third)


def test_setp_ftz_compares_subnormals_as_zero() -> None:
    left, right = pairs(f32([0, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000]))
    body = ".reg .pred p; setp{}.f32 p, %a, %b; selp.b32 %d, 1, 0, p;"
    tiny = np.float32(2.0**-126)
    flushed = [np.where(np.abs(v) < tiny, np.float32(0), v) for v in (left, right)]
    agree(probe(body.format(".eq.ftz"), "u4", left, right), relation("eq", *flushed), left, right)
    agree(probe(body.format(".eq"), "u4", left, right), relation("eq", left, right), left, right)


def extreme(name: str, a: float, b: float, keep_nan: bool) -> float:
    if _nan(a, b):
        return math.nan if keep_nan or (math.isnan(a) and math.isnan(b)) else b if a != a else a
    if a == b == 0:
        signs = [math.copysign(1, a), math.copysign(1, b)]
        return math.copysign(0.0, max(signs) if name == "max" else min(signs))
    return max(a, b) if name == "max" else min(a, b)


@pytest.mark.parametrize("nan", ["", ".NaN"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_min_and_max_order_zeros_and_drop_or_keep_nan(name: str, nan: str) -> None:
    left, right = pairs(EDGES_F32)
    rows = zip(left.tolist(), right.tolist(), strict=True)
    want = np.array([extreme(name, a, b, bool(nan)) for a, b in rows], np.float32)
    body = f"{name}{nan}.f32 %d, %a, %b;"
    agree(probe(body, "f4", left, right), want, left, right)
    agree(probe(body, "f4", left, right, typed=False), want, left, right)


@pytest.mark.parametrize("nan", ["", ".NaN"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_packed_half_min_and_max_work_on_each_half(name: str, nan: str) -> None:
    edges = np.array([0, 0x8000, 1, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00], np.uint16)
    left, right = pairs(edges.view(np.float16))
    rows = zip(left.tolist(), right.tolist(), strict=True)
    want = np.array([extreme(name, a, b, bool(nan)) for a, b in rows], np.float16)
    count = left.size & ~1
    words = [half[:count].view(np.uint32) for half in (left, right)]
    got = probe(f"{name}{nan}.f16x2 %d, %a, %b;", "u4", *words)
    agree(got.view(np.float16), want[:count], left[:count], right[:count])


@pytest.mark.parametrize(
    ("body", "function"),
    [
        ("abs.f32 %d, %a;", lambda a: a & 0x7FFFFFFF),
        ("neg.f32 %d, %a;", lambda a: a ^ 0x80000000),
        ("copysign.f32 %d, %a, 0f42000000;", lambda a: a & 0x80000000 | 0x42000000),
        (".reg .pred p; testp.finite.f32 p, %a; selp.b32 %d, 1, 0, p;",
         lambda a: int(a & 0x7F800000 != 0x7F800000)),
        (".reg .pred p; testp.subnormal.f32 p, %a; selp.b32 %d, 1, 0, p;",
         lambda a: int(0 < a & 0x7FFFFFFF < 0x00800000)),
        (".reg .pred p; testp.normal.f32 p, %a; selp.b32 %d, 1, 0, p;",
         lambda a: int(a & 0x7FFFFFFF == 0 or 0x00800000 <= a & 0x7FFFFFFF < 0x7F800000)),
        (".reg .pred p; setp.eq.u32 p, 1, 1; selp.f32 %d, %a, 0f00000000, p;", lambda a: a),
        ("slct.f32.f32 %d, 0f3F800000, 0f40000000, %a;",
         lambda a: 0x3F800000 if a < 0x7F800001 or a == 0x80000000 else 0x40000000),
    ],
    ids=lambda v: str(v)[:18],
)  # fmt: skip
def test_sign_and_class_of_f32(body: str, function: Callable[[int], int]) -> None:
    patterns = EDGES_F32[~np.isnan(EDGES_F32)].view(np.uint32)
    check(body, "u32", "u32", function, patterns)


def test_slct_flushes_what_it_compares_when_it_says_so() -> None:
    given = np.array([-1e-40, -0.0, 0.0, -1.0, math.nan, 1e-40], np.float32)
    for form, want in (("slct", [2, 1, 1, 2, 2, 1]), ("slct.ftz", [1, 1, 1, 2, 2, 1])):
        got = probe(f"{form}.u32.f32 %d, 1, 2, %a;", "u4", given)
        agree(got, np.array(want, np.uint32), given)
