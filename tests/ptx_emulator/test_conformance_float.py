"""float32 arithmetic bit for bit, and the approximate functions within the error bounds of PTX."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.ptx_emulator.test_conformance import (
    EDGES_F32,
    F32,
    F64,
    Array,
    Exact,
    agree,
    bits_of,
    exact_add,
    exact_div,
    exact_fma,
    exact_mul,
    f32,
    pairs,
    probe,
    random_f32,
    rounded,
)
from tests.support.tiers import slow

SMALLEST = np.float32(2.0**-126)
NEGATIVE, INF = 0x80000000, 0x7F800000


def operand_pairs() -> tuple[Array, Array]:
    left, right = pairs(EDGES_F32)
    left = np.concatenate([left, random_f32(300, 1), random_f32(100, 2, -149, -120)])
    return left, np.concatenate([right, random_f32(300, 3), random_f32(100, 4, -149, -120)])


def exact_sub(x: Exact, y: Exact, mode: str = "rn") -> Exact:
    return exact_add(x, -y, mode)


BINARY = {"add": exact_add, "sub": exact_sub, "mul": exact_mul}


@pytest.mark.parametrize("typed", [True, slow(False)], ids=["f32-registers", "b32-registers"])
@pytest.mark.parametrize("mode", ["", ".rn", ".rz", ".rm", ".rp"])
@pytest.mark.parametrize("name", [*BINARY])
def test_f32_arithmetic_rounds_once_in_the_stated_direction(
    name: str, mode: str, typed: bool
) -> None:
    inputs = operand_pairs()
    got = probe(f"{name}{mode}.f32 %d, %a, %b;", "f4", *inputs, typed=typed)
    want = rounded(BINARY[name], F32, *inputs, mode=mode[1:] or "rn")
    agree(got, want.view(np.float32), *inputs)


@pytest.mark.parametrize("name", [*BINARY])
def test_f32_ftz_flushes_operands_and_results(name: str) -> None:
    left, right = operand_pairs()
    got = probe(f"{name}.ftz.f32 %d, %a, %b;", "f4", left, right)
    want = rounded(BINARY[name], F32, left, right, ftz=True)
    cut = rounded(BINARY[name], F32, left, right, mode="rz")
    # PTX does not document whether tininess is detected before or after rounding: leave out
    # 2^-126 less half a unit.
    clear = ~(((want & 0x7FFFFFFF) == 0x00800000) & (want != cut))
    agree(got[clear], want.view(np.float32)[clear], left[clear], right[clear])
    assert (bits_of(got) & 0x7F800000).astype(bool).sum() > 500


def fma_operands() -> tuple[Array, Array, Array]:
    """Edges, random numbers, and sums that cancel all but the product's own rounding error."""
    left, right = (v.repeat(5) for v in pairs(EDGES_F32[::2], EDGES_F32[1::2]))
    third = np.resize(EDGES_F32, left.size)
    a, b = random_f32(300, 5), random_f32(300, 6)
    with np.errstate(all="ignore"):
        cancel = -(a * b)
    return (
        np.concatenate([left, a, a]),
        np.concatenate([right, b, b]),
        np.concatenate([third, cancel, random_f32(300, 7)]),
    )


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f32_fma_rounds_once(mode: str) -> None:
    inputs = fma_operands()
    want = rounded(exact_fma, F32, *inputs, mode=mode).view(np.float32)
    agree(probe(f"fma.{mode}.f32 %d, %a, %b, %c;", "f4", *inputs), want, *inputs)
    agree(probe(f"mad.{mode}.f32 %d, %a, %b, %c;", "f4", *inputs, typed=False), want, *inputs)


def test_f32_fma_differs_from_multiply_then_add() -> None:
    a, b = random_f32(200, 8), random_f32(200, 9)
    body = """.reg .f32 p; mul.f32 p, %a, %b; neg.f32 p, p;
        fma.rn.f32 %d, %a, %b, p; mul.rn.f32 %e, %a, %b; add.rn.f32 %e, %e, p;"""
    fused, separate = probe(body, "f4 f4", a, b)
    error = a.astype(np.float64) * b - (a * b)
    agree(fused, error.astype(np.float32), a, b)
    assert (separate == 0).all()
    assert (fused != 0).sum() > 150


def test_f32_fma_ftz_flushes_all_three_operands() -> None:
    tiny = f32([1, 0x80000001, 0x007FFFFF, 0x3F800000, 0xBF800000, 0x00800000])
    a, b = (v.repeat(tiny.size) for v in pairs(tiny))
    c = np.resize(tiny, a.size)
    got = probe("fma.rn.ftz.f32 %d, %a, %b, %c;", "f4", a, b, c)
    agree(got, rounded(exact_fma, F32, a, b, c, ftz=True).view(np.float32), a, b, c)


@pytest.mark.parametrize(
    "body", ["add.sat.f32", "mul.sat.f32", "add.ftz.sat.f32", "fma.rn.sat.f32"]
)
def test_f32_sat_clamps_to_the_unit_interval_and_nan_to_zero(body: str) -> None:
    left, right = operand_pairs()
    normal = (np.abs(left) >= SMALLEST) & (np.abs(right) >= SMALLEST)
    left, right = left[normal], right[normal]
    third = ", %c" if body.startswith("fma") else ""
    with np.errstate(all="ignore"):
        plain = left * right if body.startswith(("mul", "fma")) else left + right
        want = np.where(np.isnan(plain), 0, np.clip(plain, 0, 1)) + np.float32(0)
        want = np.where(("ftz" in body) & (want < SMALLEST), 0, want).astype(np.float32)
    inputs = [left, right, np.zeros_like(left)][: 3 if third else 2]
    got = probe(f"{body} %d, %a, %b{third};", "f4", *inputs)
    agree(got + np.float32(0), want, left, right)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f32_div_is_correctly_rounded(mode: str) -> None:
    inputs = operand_pairs()
    want = rounded(exact_div, F32, *inputs, mode=mode).view(np.float32)
    agree(probe(f"div.{mode}.f32 %d, %a, %b;", "f4", *inputs), want, *inputs)


def test_f32_sqrt_and_rcp_rn_are_correctly_rounded() -> None:
    values = np.concatenate([EDGES_F32, random_f32(1000, 11, -126, 126)])
    with np.errstate(all="ignore"):
        root = np.sqrt(values.astype(np.float64)).astype(np.float32)
    agree(probe("sqrt.rn.f32 %d, %a;", "f4", values), root, values)
    want = rounded(exact_div, F32, np.ones_like(values), values).view(np.float32)
    agree(probe("rcp.rn.f32 %d, %a;", "f4", values), want, values)


def within(got: Array, want: Array, inputs: Array, *, rel: float = 0, tiny: float = 0) -> None:
    """Finite values may differ by `rel` of the true value plus `tiny`; others not at all."""
    got64 = got.astype(np.float64)
    with np.errstate(all="ignore"):
        bound = np.abs(want) * rel + tiny
        fine = np.where(np.isfinite(want), np.abs(got64 - want) <= bound, got64 == want)
    fine |= np.isnan(want) & np.isnan(got64)
    # A result within its error of the largest number may round to infinity.
    fine |= np.isinf(got64) & (np.sign(got64) == np.sign(want)) & (np.abs(want) > 3.4028e38)
    at = int(np.argmin(fine))
    assert fine.all(), (
        f"{(~fine).sum()} wrong, e.g. of {inputs[at]!r}: {got[at]!r}, not {want[at]!r}"
    )


@pytest.mark.parametrize("form", ["approx", "approx.ftz", "full", "full.ftz"])
def test_f32_fast_division_is_within_two_units(form: str) -> None:
    left, right = operand_pairs()
    normal = ((np.abs(left) >= SMALLEST) | (left == 0)) & (np.abs(right) >= SMALLEST)
    left, right = left[normal | np.isnan(left)], right[normal | np.isnan(left)]
    with np.errstate(all="ignore"):
        want = left.astype(np.float64) / right
        huge = (np.abs(right) > 2.0**126) & np.isfinite(right) & ~np.isnan(left)
        if form.startswith("approx"):  # the reciprocal of a huge divisor flushes to zero
            want = np.where(huge, np.where(np.isinf(left), np.nan, 0.0), want)
        want = np.where(np.abs(want) > 3.4028235677973366e38, np.sign(want) * np.inf, want)
        clear = ~((np.abs(want) < 2.1 * SMALLEST) & (want != 0))  # 2 units of what, otherwise
    got = probe(f"div.{form}.f32 %d, %a, %b;", "f4", left, right)
    if form.startswith("approx"):
        clear &= ~((np.abs(right) > 2.0**126) & np.isnan(left))
    within(got[clear], want[clear], right[clear], rel=2.0**-22)


def test_div_full_is_not_confused_by_a_huge_divisor() -> None:
    left = f32([0x7F000000, 0x7F7FFFFF, 0xFF000000])
    right = f32([0x7F000000, 0x7F7FFFFF, 0x7F000000])
    got = probe("div.full.f32 %d, %a, %b;", "f4", left, right)
    within(got, np.array([1.0, 1.0, -1.0]), left, rel=2.0**-22)


SPREAD = np.concatenate([EDGES_F32, random_f32(2000, 21, -30, 30), random_f32(500, 22, -126, 127)])
NORMAL = SPREAD[(np.abs(SPREAD) >= SMALLEST) | (SPREAD == 0) | np.isnan(SPREAD)]
EXPONENTS = np.array(
    [*np.linspace(-126, 127.9, 3000), *np.linspace(-1, 1, 1000), 128, 1e9, np.inf, -np.inf, np.nan],
    np.float32,
)


@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize(
    ("name", "function", "bound", "values"),
    [
        ("ex2", np.exp2, {"rel": 2.0**-22}, EXPONENTS),
        ("rcp", lambda x: 1 / x, {"rel": 2.0**-23}, NORMAL),
        ("sqrt", np.sqrt, {"rel": 2.0**-22}, NORMAL),
        ("rsqrt", lambda x: 1 / np.sqrt(x), {"rel": 2.0**-22}, NORMAL),
        ("lg2", lambda x: np.log2(x), {"rel": 2.0**-22, "tiny": 2.0**-22}, NORMAL),
        ("sin", np.sin, {"tiny": 2.0**-20}, np.linspace(-3.2, 3.2, 2000, dtype=np.float32)),
        ("cos", np.cos, {"tiny": 2.0**-20}, np.linspace(-3.2, 3.2, 2000, dtype=np.float32)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_approximations_stay_within_the_stated_error(
    name: str, function: Callable[[Array], Array], bound: dict[str, float], values: Array, ftz: str
) -> None:
    with np.errstate(all="ignore"):
        want = function(values.astype(np.float64))
        want = np.where(np.abs(want) > 3.4028235677973366e38, np.sign(want) * np.inf, want)
    clear = ~((np.abs(want) < SMALLEST) & (want != 0))
    if name in ("sin", "cos"):
        clear[:] = True
    for typed in (True, False):
        got = probe(f"{name}.approx{ftz}.f32 %d, %a;", "f4", values, typed=typed)
        within(got[clear], want[clear], values[clear], **bound)


def test_tanh_approx_keeps_its_sign_and_saturates_at_one() -> None:
    values = np.concatenate([np.linspace(-12, 12, 3001), [np.inf, -np.inf, np.nan, 1e-6, 1e30]])
    values = values.astype(np.float32)
    got = probe("tanh.approx.f32 %d, %a;", "f4", values)
    within(got, np.tanh(values.astype(np.float64)), values, rel=2.0**-11)
    assert (np.abs(got[~np.isnan(got)]) <= 1).all()


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("ex2.approx.ftz.f32", {NEGATIVE: 1.0, 1: 1.0, NEGATIVE + INF: 0.0, 0xC3480000: 0.0}),
        ("ex2.approx.f32", {NEGATIVE + 1: 1.0, 0xC3020000: 2.0**-130, 0xC3480000: 0.0}),
        ("ex2.approx.ftz.f32", {0xC3020000: 0.0}),
        ("lg2.approx.f32", {0: -math.inf, NEGATIVE: -math.inf, 0xBF800000: math.nan, 1: -149.0}),
        ("lg2.approx.ftz.f32", {1: -math.inf, NEGATIVE + 1: -math.inf, 0x3F800000: 0.0}),
        ("rcp.approx.ftz.f32", {1: math.inf, NEGATIVE + 1: -math.inf, 0x7F000000: 0.0}),
        ("rcp.approx.f32", {0x7F000000: 2.0**-127, 0: math.inf, NEGATIVE: -math.inf, INF: 0.0}),
        ("rsqrt.approx.f32", {0: math.inf, NEGATIVE: -math.inf, 0xBF800000: math.nan, INF: 0.0}),
        ("rsqrt.approx.ftz.f32", {1: math.inf, NEGATIVE + 1: -math.inf}),
        ("sqrt.approx.ftz.f32", {1: 0.0, NEGATIVE + 1: -0.0, NEGATIVE: -0.0, 0xBF800000: math.nan}),
        ("sqrt.approx.f32", {NEGATIVE: -0.0, INF: math.inf, 0x40800000: 2.0}),
        ("tanh.approx.f32", {NEGATIVE: -0.0, INF: 1.0, NEGATIVE + INF: -1.0, 0x41F00000: 1.0}),
        ("sin.approx.ftz.f32", {1: 0.0, NEGATIVE + 1: -0.0, INF: math.nan, NEGATIVE: -0.0}),
        ("cos.approx.ftz.f32", {1: 1.0, NEGATIVE: 1.0, NEGATIVE + INF: math.nan}),
    ],
)
def test_approximations_at_special_operands(body: str, want: dict[int, float]) -> None:
    inputs = f32(want)
    agree(probe(f"{body} %d, %a;", "f4", inputs), np.array([*want.values()], np.float32), inputs)


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("add.f64 %d, %a, %b;", np.add), ("mul.f64 %d, %a, %b;", np.multiply),
        ("div.rn.f64 %d, %a, %b;", np.divide), ("max.f64 %d, %a, %b;", np.fmax),
        ("sub.rn.f64 %d, %a, %b;", np.subtract), ("sqrt.rn.f64 %d, %a;", lambda a, b: np.sqrt(a)),
    ],
    ids=lambda v: str(v)[:12],
)  # fmt: skip
def test_f64_arithmetic(body: str, want: Callable[[Array, Array], Array]) -> None:
    rng = np.random.default_rng(2)
    left, right = np.ldexp(rng.normal(size=(2, 300)), rng.integers(-300, 300, (2, 300)))
    with np.errstate(all="ignore"):
        agree(probe(body, "f8", left, right), want(left, right), left, right)


def test_the_reciprocals_of_f64_are_flushed_below_its_own_normal_range() -> None:
    values = np.array([2.0**200, -(2.0**-200), 2.0**1022, 2.0**1023, 5e-324, -1e-310, -0.0])
    got = probe("rcp.approx.ftz.f64 %d, %a;", "f8", values)
    want = [2.0**-200, -(2.0**200), 2.0**-1022, 0, np.inf, -np.inf, -np.inf]
    agree(got, np.array(want), values)
    roots = np.array([2.0**1022, 2.0**-1022, 5e-324, 2.0**300])
    want = [2.0**-511, 2.0**511, np.inf, 2.0**-150]
    agree(probe("rsqrt.approx.ftz.f64 %d, %a;", "f8", roots), np.array(want), roots)


def test_f64_fma_rounds_once() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(2, 300))
    got = probe("fma.rn.f64 %d, %a, %b, %c;", "f8", a, b, -(a * b))
    agree(got, rounded(exact_fma, F64, a, b, -(a * b)).view(np.float64), a, b)
    assert (got != 0).sum() > 200


@pytest.mark.parametrize(("text", "bits"), [("0f3F800000", 0x3F800000), ("0F7f800000", 0x7F800000),
    ("0fFF800000", 0xFF800000), ("0f00000001", 1), ("0d3FF8000000000000", 0x3FC00000),
    ("1.5", 0x3FC00000), ("-2.0e-3", 0xBB03126F)])  # fmt: skip
def test_float_literals(text: str, bits: int) -> None:
    unused = np.zeros(32, np.float32)
    got = probe(f"mov.f32 %d, {text};", "f4", unused)
    assert (bits_of(got) == bits).all()


def far_apart(count: int) -> list[Array]:
    """float64 operands of which products and sums overflow, underflow and cancel."""
    random = np.random.default_rng(7)
    found = []
    for low, high, third in ((-560, -500, -1070), (480, 530, 1010), (-1070, -900, -1074)):
        a, b = (random.uniform(1, 2, count) * random.choice([-1.0, 1.0], count) for _ in range(2))
        a = np.ldexp(a, random.integers(low, high, count))
        b = np.ldexp(b, random.integers(low, high, count) if low > -1000 else 0)
        c = np.ldexp(random.choice([-1.0, 1.5], count), random.integers(third, third + 12, count))
        with np.errstate(over="ignore"):
            c[: count // 3] = -(a * b)[: count // 3]
        found.append(np.array([a, b, c]))
    found.append(np.array([[2.0**600], [2.0**424], [-(2.0**1023)]]))
    found.append(np.array([[-(2.0**-600)], [2.0**-600], [0.0]]))
    return list(np.concatenate(found, axis=1))


def test_f64_fma_rounds_once_where_products_overflow_or_underflow() -> None:
    given = [x[np.isfinite(far_apart(60)).all(axis=0)] for x in far_apart(60)]
    want = rounded(exact_fma, F64, *given)
    agree(bits_of(probe("fma.rn.f64 %d, %a, %b, %c;", "f8", *given)), want, *given)


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "fma", "rcp"])
def test_f64_rounds_in_the_stated_direction(op: str, mode: str) -> None:
    a, b = pairs(np.array([0.0, -0.0, 1.0, -1.0, 3.0, 0.1, -0.7, 1e308, -1e308, 5e-324, np.inf]))
    operands = {"fma": "%a, %b, %b", "rcp": "%b"}.get(op, "%a, %b")
    got = probe(f"{op}.{mode}.f64 %d, {operands};", "f8", a, b)
    ways: dict[str, tuple[Callable[..., Exact], tuple[Array, ...]]] = {
        "add": (exact_add, (a, b)),
        "sub": (exact_add, (a, -b)),
        "mul": (exact_mul, (a, b)),
        "div": (exact_div, (a, b)),
        "fma": (exact_fma, (a, b, b)),
        "rcp": (exact_div, (np.ones_like(b), b)),
    }
    operation, given = ways[op]
    want = rounded(operation, F64, *given, mode=mode).view(np.float64)
    agree(got, want, a, b)


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_the_root_of_f64_rounds_in_the_stated_direction(mode: str) -> None:
    a = np.array([0.0, -0.0, 1.0, 2.0, 3.0, 0.25, 1e-320, 1e308, 1.5e-323, np.inf])
    got = probe(f"sqrt.{mode}.f64 %d, %a;", "f8", a)
    for value, root in zip(a.tolist(), got.tolist(), strict=True):
        if value in (0.0, 1.0, 0.25, math.inf):
            assert root == math.sqrt(value)
            continue
        beside = math.nextafter(root, 0 if mode == "rp" else math.inf)
        low, high = sorted((Fraction(root), Fraction(beside)))
        assert low**2 < Fraction(value) < high**2
        assert root == (high if mode == "rp" else low)


@pytest.mark.parametrize(("kind", "body"), [("f32", ""), ("f16x2", "words")])
def test_xorsign_gives_a_minimum_the_sign_of_the_product(kind: str, body: str) -> None:
    a, b = np.array([1, -2, 3, -4], np.float32), np.array([-2, -1, 5, 6], np.float32)
    want = np.array([-1, 1, 3, -4], np.float32)
    if body:
        a, b, want = (np.repeat(x.astype(np.float16), 2).view(np.uint32) for x in (a, b, want))
    out = "u4" if body else "f4"
    agree(probe(f"min.xorsign.abs.{kind} %d, %a, %b;", out, a, b), want, a, b)
