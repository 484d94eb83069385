"""Helpers of the emulator's conformance suite, and tests of the suite's oracle.

The other ``test_emulator_conformance_*`` files each take one family of PTX instructions, run it in
the emulator through `probe` (one line of PTX over whole arrays) or `run` (a CUDA C++ kernel), and
compare with numbers worked out here from the PTX ISA's wording: integers as Python integers,
floating point as exact fractions that are rounded once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ptx_emulator import launch
from tests.support.nvrtc_helper import compile_ptx

Array = np.ndarray[Any, Any]
Exact = Fraction | float  # a Fraction if finite and not zero, else a float: signed zero, inf, nan

HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n"
NAMES_IN, NAMES_OUT = "abc", "def"

compiled = functools.cache(compile_ptx)


# ---------------------------------------------------------------------------------- the bench


def run(
    source: str,
    kernel: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    *args: object,
    shared: int = 0,
    check: bool = True,
    seed: int | None = None,
) -> Any:
    """Compiles CUDA C++ (once per text) and runs one of its kernels in the emulator."""
    ptx = compiled(source)
    grid, block = ((*size, 1, 1)[:3] for size in (grid, block))
    return launch(
        ptx, kernel, grid, block, list(args), shared_bytes=shared, check=check, order_seed=seed
    )


def run_ptx(ptx: str, kernel: str, grid: int, block: int, *args: object, **options: Any) -> Any:
    return launch(HEADER + ptx, kernel, (grid, 1, 1), (block, 1, 1), list(args), **options)


def probe_text(
    body: str, outs: Iterable[np.dtype[Any]], ins: Iterable[np.dtype[Any]], typed: bool
) -> str:
    """PTX of a kernel that runs `body` once per element; inputs %a %b %c, outputs %d %e %f."""
    outs, ins = list(outs), list(ins)

    def register(kind: np.dtype[Any]) -> str:
        floating = typed and kind in (np.float32, np.float64)
        return f".{'f' if floating else 'b'}{8 * kind.itemsize}"

    operands = [*zip(NAMES_IN, ins, strict=False), *zip(NAMES_OUT, outs, strict=False)]
    lines = [".visible .entry probe("]
    lines += [f"  .param .u64 p_{name}," for name, _ in operands]
    lines += ["  .param .u32 count", ")", "{", "  .reg .pred %past;"]
    lines += ["  .reg .b32 %index, %block, %size, %count;", "  .reg .b64 %base;"]
    for name, kind in operands:
        lines += [f"  .reg {register(kind)} %{name};", f"  .reg .b64 %at_{name};"]
    lines += ["  mov.u32 %index, %tid.x;", "  mov.u32 %block, %ctaid.x;"]
    lines += ["  mov.u32 %size, %ntid.x;"]
    lines += ["  mad.lo.u32 %index, %block, %size, %index;", "  ld.param.u32 %count, [count];"]
    lines += ["  setp.ge.u32 %past, %index, %count;", "  @%past bra DONE;"]
    for name, kind in operands:
        lines += [f"  ld.param.u64 %base, [p_{name}];", "  cvta.to.global.u64 %base, %base;"]
        lines += [f"  mad.wide.u32 %at_{name}, %index, {kind.itemsize}, %base;"]
    for name, kind in operands[: len(ins)]:
        lines += [f"  ld.global{register(kind)} %{name}, [%at_{name}];"]
    lines += ["  {", *(f"    {line.strip()}" for line in body.strip().splitlines()), "  }"]
    for name, kind in operands[len(ins) :]:
        lines += [f"  st.global{register(kind)} [%at_{name}], %{name};"]
    return "\n".join([*lines, "DONE:", "  ret;", "}"])


def probe(body: str, outs: str, *inputs: Array, typed: bool = True, block: int = 128) -> Any:
    """Runs `body` (PTX) on every element of `inputs`; `outs` names the output dtypes.

    `typed` declares the registers of float operands as .f32/.f64; otherwise all are .b32/.b64, as
    other compilers write them. Returns one array per output, or the array itself if there is one.
    """
    flat = [np.ascontiguousarray(array).reshape(-1) for array in inputs]
    count = flat[0].size
    kinds = [np.dtype(name) for name in outs.split()]
    results = [np.zeros(count, kind) for kind in kinds]
    text = probe_text(body, kinds, [array.dtype for array in flat], typed)
    run_ptx(text, "probe", -(-count // block), block, *flat, *results, np.uint32(count))
    return results[0] if len(results) == 1 else results


def pairs(left: Array, right: Array | None = None) -> tuple[Array, Array]:
    """Every combination of two lists of operands, flat."""
    grid = np.meshgrid(left, left if right is None else right, indexing="ij")
    return grid[0].reshape(-1).copy(), grid[1].reshape(-1).copy()


def bits_of(array: Array) -> Array:
    return array.view(f"u{array.dtype.itemsize}")


def agree(got: Array, want: Array, *inputs: Array, nan: str = "any") -> None:
    """Fails on the first element whose bits differ; nan="any" takes one NaN for another."""
    assert got.dtype.itemsize == want.dtype.itemsize
    wrong = bits_of(got) != bits_of(want)
    if nan == "any" and want.dtype.kind not in "iu":
        wrong &= ~(np.isnan(got.view(want.dtype)) & np.isnan(want))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        given = ", ".join(f"{array[at]!r} ({int(bits_of(array)[at]):#x})" for array in inputs)
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} differ; first at {at}: of {given}\n"
            f"  got  {got[at]!r} ({int(bits_of(got)[at]):#x})\n"
            f"  want {want[at]!r} ({int(bits_of(want)[at]):#x})"
        )


# ------------------------------------------------------------------- floating point, exactly


@dataclass(frozen=True)
class Format:
    """A binary floating-point format of IEEE shape."""

    bits: int
    mantissa: int

    @cached_property
    def exponent(self) -> int:
        return self.bits - self.mantissa - 1

    @cached_property
    def lowest(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent - 1))

    @cached_property
    def infinity(self) -> int:
        return ((1 << self.exponent) - 1) << self.mantissa


F16, BF16, TF32, F32, F64 = (Format(*s) for s in ((16, 10), (16, 7), (19, 10), (32, 23), (64, 52)))


def decode(bits: int, form: Format) -> Exact:
    sign = -1 if bits >> (form.bits - 1) else 1
    magnitude = bits & ((1 << (form.bits - 1)) - 1)
    if magnitude >= form.infinity:
        return sign * math.inf if magnitude == form.infinity else math.nan
    if magnitude == 0:
        return math.copysign(0.0, sign)
    exponent, fraction = magnitude >> form.mantissa, magnitude & ((1 << form.mantissa) - 1)
    if exponent:
        fraction, exponent = fraction | 1 << form.mantissa, exponent - 1
    power = exponent + form.lowest - form.mantissa
    return Fraction(sign * fraction << max(power, 0), 1 << max(-power, 0))


def binade(size: Fraction) -> int:
    """floor(log2 size) of a positive number, in integers: as a power, it would take longer."""
    over, under = size.numerator, size.denominator
    power = over.bit_length() - under.bit_length()
    return power - (under << max(power, 0) > over << max(-power, 0))


def encode(value: Exact, form: Format, mode: str = "rn") -> int:
    """Bits of `value` rounded once: rn (ties to even), rna (ties away), rz, rm (down), rp (up)."""
    if not isinstance(value, Fraction):
        if math.isnan(value):
            return form.infinity | 1 << (form.mantissa - 1)
        sign = math.copysign(1.0, value) < 0
        return sign << (form.bits - 1) | (form.infinity if math.isinf(value) else 0)
    negative, size = value < 0, abs(value)
    power = max(binade(size), form.lowest)
    unit = power - form.mantissa
    one = size.denominator << max(unit, 0)
    whole, rest = divmod(size.numerator << max(-unit, 0), one)
    up = {
        "rn": 2 * rest > one or (2 * rest == one and whole % 2 == 1),
        "rna": 2 * rest >= one,
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    result = ((power - form.lowest) << form.mantissa) + whole + up
    if result >= form.infinity:
        to_infinity = mode in ("rn", "rna") or mode == ("rm" if negative else "rp")
        result = form.infinity if to_infinity else form.infinity - 1
    return negative << (form.bits - 1) | result


def _plain(x: Exact) -> float:
    """The sign of a finite number, or the special number itself: enough for the special cases."""
    return (1.0 if x > 0 else -1.0) if isinstance(x, Fraction) else x


def exact_add(x: Exact, y: Exact, mode: str = "rn") -> Exact:
    if not (math.isfinite(_plain(x)) and math.isfinite(_plain(y))):
        return _plain(x) + _plain(y)
    if not isinstance(x, Fraction) and not isinstance(y, Fraction):
        down = mode == "rm" and math.copysign(1, x) != math.copysign(1, y)
        return -0.0 if down else x + y
    total = Fraction(x) + Fraction(y)
    return total if total else (-0.0 if mode == "rm" else 0.0)


def exact_mul(x: Exact, y: Exact, mode: str = "rn") -> Exact:
    both = isinstance(x, Fraction) and isinstance(y, Fraction)
    return x * y if both else _plain(x) * _plain(y)


def exact_fma(x: Exact, y: Exact, z: Exact, mode: str = "rn") -> Exact:
    return exact_add(exact_mul(x, y), z, mode)


def exact_div(x: Exact, y: Exact, mode: str = "rn") -> Exact:
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x / y
    with np.errstate(all="ignore"):
        return float(np.float64(_plain(x)) / np.float64(_plain(y)))


def rounded(
    operation: Callable[..., Exact],
    form: Format,
    *operands: Array,
    mode: str = "rn",
    into: Format | None = None,
    ftz: bool = False,
) -> Array:
    """`operation` on every element, exact and rounded once to `into` (bit patterns, unsigned)."""
    into = into or form

    def flush(bits: int, shape: Format) -> int:
        sign = bits & 1 << (shape.bits - 1)
        return sign if ftz and (bits ^ sign) < 1 << shape.mantissa else bits

    rows = [bits_of(np.ascontiguousarray(array)).tolist() for array in operands]
    results = [
        flush(
            encode(operation(*(decode(flush(b, form), form) for b in row), mode=mode), into, mode),
            into,
        )
        for row in zip(*rows, strict=True)
    ]
    return np.array(results, f"u{max(16, into.bits + 7 & ~7) // 8}" if into != TF32 else "u4")


def f32(patterns: Iterable[int]) -> Array:
    return np.array(list(patterns), np.uint32).view(np.float32)


EDGES_F32 = f32(
    itertools.chain.from_iterable(
        (pattern, pattern | 0x80000000)
        for pattern in (
            *(0x00000000, 0x00000001, 0x00400000, 0x007FFFFF, 0x00800000, 0x00800001, 0x01000000),
            *(0x33800000, 0x38800000, 0x3DCCCCCD, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001),
            *(0x3FC00000, 0x40490FDB, 0x4B7FFFFF, 0x4B800000, 0x4F000000, 0x5F000000, 0x7E800000),
            *(0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001),
        )
    )
)


def random_f32(count: int, seed: int, low: int = -20, high: int = 20) -> Array:
    """Signed numbers whose exponents are spread evenly over [low, high)."""
    rng = np.random.default_rng(seed)
    sizes = np.ldexp(rng.uniform(1, 2, count), rng.integers(low, high, count))
    return (sizes * rng.choice([-1.0, 1.0], count)).astype(np.float32)


# ---------------------------------------------------------------------- the oracle is right


@pytest.mark.parametrize(("form", "name"), [(F16, "float16"), (BF16, "bfloat16"), (F32, "float32")])
def test_the_oracle_rounds_like_ieee(form: Format, name: str) -> None:
    kind = np.dtype(name) if name != "bfloat16" else np.dtype(ml_dtypes.bfloat16)
    rng = np.random.default_rng(1)
    values = np.ldexp(rng.uniform(-2, 2, 4000), rng.integers(-30, 18, 4000)).astype(np.float32)
    values = np.concatenate([values, EDGES_F32[~np.isnan(EDGES_F32)]])
    mine = [encode(decode(b, F32), form) for b in bits_of(values).tolist()]
    with np.errstate(all="ignore"):
        agree(np.array(mine, f"u{kind.itemsize}"), bits_of(values.astype(kind)), values)


@pytest.mark.parametrize("form", [F16, BF16])
def test_the_oracle_keeps_every_16_bit_number(form: Format) -> None:
    numbers = [b for b in range(1 << 16) if (b & 0x7FFF) <= form.infinity]
    assert [encode(decode(b, form), form) for b in numbers] == numbers


@pytest.mark.parametrize("name", ["add", "mul", "div"])
def test_the_oracle_computes_like_this_machine(name: str) -> None:
    left, right = pairs(EDGES_F32)
    exact = {"add": exact_add, "mul": exact_mul, "div": exact_div}[name]
    with np.errstate(all="ignore"):
        want = {"add": np.add, "mul": np.multiply, "div": np.divide}[name](left, right)
    agree(rounded(exact, F32, left, right).view(np.float32), want, left, right)


def test_a_probe_reads_and_writes_every_element() -> None:
    values = np.arange(1000, dtype=np.uint32)
    agree(probe("mov.b32 %d, %a;", "u4", values), values, values)


def test_the_bench_notices_a_wrong_bit() -> None:
    values = np.arange(10, dtype=np.uint32)
    with pytest.raises(AssertionError, match="1 of 10 differ; first at 3"):
        agree(values, np.where(values == 3, 7, values).astype(np.uint32), values)
