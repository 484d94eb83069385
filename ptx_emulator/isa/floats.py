"""Floating-point semantics: IEEE rounding, fused multiply-add, flushing, minimum and maximum.

A fused multiply-add of float32 is formed in float64, where the product is exact and only the sum
rounds. Rounding that sum once more to float32 differs from rounding once only when the sum lies
exactly half-way between two float32 values or below the normal range; those rare elements are
computed again by rounding to odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded
sums", 2008).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator.isa.generator import Generator, formula, instruction
from ptx_emulator.ptx.register_types import DTYPE
from ptx_emulator.ptx.syntax import Instruction, Operand

TINY = np.float32(2.0**-126)  # the smallest normal float32
_HALF = np.uint64(1 << 63)
_SHIFT = np.uint64(35)
_SINGLE = np.dtype("f4")


def flush(x: Any) -> Any:
    """Subnormal float32 values become zeros of the same sign."""
    if not np.any((np.abs(x) < TINY) & (x != 0)):
        return x
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def saturate(x: Any) -> Any:
    """Clamps to [0, 1]; a NaN becomes +0."""
    one, zero = x.dtype.type(1), x.dtype.type(0)
    return np.where(x > zero, np.minimum(x, one), zero)


def fma32(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32 with a single rounding to nearest even."""
    product = a.astype(np.float64) * b.astype(np.float64)
    total = product + c.astype(np.float64)
    result = total.astype(np.float32)
    half_way = (total.view(np.uint64) << _SHIFT) == _HALF
    small = (np.abs(total) < TINY) & (total != 0)
    doubtful = half_way | small
    if not doubtful.any():
        return result
    error = sum_error(product, c.astype(np.float64), total)
    exact = to_odd(total, error).astype(np.float32)
    return np.where(doubtful, exact, result)


def sum_error(a: Any, b: Any, total: Any) -> Any:
    """The exact rounding error of the sum ``total`` of ``a`` and ``b`` (Knuth's TwoSum)."""
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    return np.where(np.isfinite(error), error, 0.0)


def to_odd(total: Any, error: Any) -> Any:
    """``total + error`` rounded to odd, so that a later rounding to fewer bits is exact."""
    even = (np.asarray(total).view(np.uint64) & np.uint64(1)) == 0
    moves = even & (error != 0) & np.isfinite(total)
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where(moves, np.nextafter(total, towards), total)


def odd_sum(product: Any, c: Any) -> Any:
    """The exact sum of two float64, rounded to odd."""
    total = product + c
    return to_odd(total, sum_error(product, c, total))


def fma64(a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float64 with a single rounding."""
    high = a * b
    low = _product_error(a, b, high)
    sum_high = c + low
    sum_low = sum_error(c, low, sum_high)
    total = high + sum_high
    total_low = sum_error(high, sum_high, total)
    result = total + odd_sum(total_low, sum_low)
    plain = a * b + c
    return np.where(np.isfinite(plain), result, plain)


def _product_error(a: Any, b: Any, product: Any) -> Any:
    """The rounding error of a product (Dekker's TwoProduct with Veltkamp's splitting)."""
    factor = np.float64(134217729.0)
    a_high = factor * a - (factor * a - a)
    b_high = factor * b - (factor * b - b)
    a_low, b_low = a - a_high, b - b_high
    error = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    return np.where(np.isfinite(error), error, 0.0)


def directed(op: str, mode: str, a: Any, b: Any, c: Any = None) -> Any:
    """add, mul or fma of float32 rounded towards zero (rz), down (rm) or up (rp)."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    if op == "mul":
        return round_directed(x * y, mode)
    if op == "fma":
        x, y = x * y, c.astype(np.float64)
    result = round_directed(odd_sum(x, y), mode)
    if mode == "rm":
        # An exact zero is negative in this mode, unless both terms are +0.
        plus = (x == 0) & (y == 0) & ~np.signbit(x) & ~np.signbit(y)
        result = np.where((x + y == 0) & ~plus, np.float32(-0.0), result)
    return result


def directed_quotient(mode: str, a: Any, b: Any) -> Any:
    """a / b of float32 in a directed rounding mode."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    quotient = x / y
    product = quotient * y
    rest = (x - product) - _product_error(quotient, y, product)
    rest = np.where(np.isfinite(quotient) & (quotient != 0), rest * np.sign(y), 0.0)
    return round_directed(to_odd(quotient, rest), mode)


def directed_root(mode: str, a: Any) -> Any:
    """Square root of float32 in a directed rounding mode."""
    x = a.astype(np.float64)
    root = np.sqrt(x)
    square = root * root
    rest = (x - square) - _product_error(root, root, square)
    rest = np.where(np.isfinite(root) & (root != 0), rest, 0.0)
    return round_directed(to_odd(root, rest), mode)


def round_directed(value: Any, mode: str, to: Any = _SINGLE) -> Any:
    """A wider float as ``to``, float32 or float16, in any rounding mode."""
    near = value.astype(to)
    if mode == "rn":
        return near
    back = near.astype(value.dtype)
    return neighbour(near, value, back > value, back < value, mode)


def neighbour(near: Any, value: Any, too_high: Any, too_low: Any, mode: str) -> Any:
    """``near``, or where it lies on the wrong side of ``value`` for ``mode``, the number beside it.

    The neighbour of an overflow is the largest finite number.
    """
    if mode == "rz":
        too_high, too_low = too_high & (value > 0), too_low & (value < 0)
    elif mode == "rm":
        too_low = np.zeros_like(too_low)
    else:
        too_high = np.zeros_like(too_high)
    up = np.nextafter(near, near.dtype.type(np.inf))
    down = np.nextafter(near, near.dtype.type(-np.inf))
    return np.where(too_high, down, np.where(too_low, up, near))


def minimum(a: Any, b: Any) -> Any:
    """The smaller one; a NaN only when both are; -0 is smaller than +0."""
    return _signed_zero(np.fmin(a, b), a, b, np.logical_or)


def maximum(a: Any, b: Any) -> Any:
    """The larger one; a NaN only when both are; +0 is larger than -0."""
    return _signed_zero(np.fmax(a, b), a, b, np.logical_and)


def _signed_zero(result: Any, a: Any, b: Any, negative: Callable[..., Any]) -> Any:
    """``result``, but of two zeros the one that is negative if the signs of the two say so."""
    if np.count_nonzero(result) == np.size(result):
        return result
    sign = negative(np.signbit(a), np.signbit(b))
    zero = np.where(sign, a.dtype.type(-0.0), a.dtype.type(0.0))
    return np.where((a == 0) & (b == 0), zero, result)


def or_nan(result: Any, a: Any, b: Any) -> Any:
    """``result``, but a NaN where an operand is one."""
    return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), result)


def relu(x: Any) -> Any:
    """Negative values become +0; a NaN stays."""
    return np.where(np.isnan(x), x, np.maximum(x, x.dtype.type(0)))


def exp2_flushed(x: Any) -> Any:
    """ex2.approx.ftz: results below the normal range are zero."""
    result = np.exp2(x)
    return result * (result >= TINY)


def quick_quotient(a: Any, b: Any) -> Any:
    """div.approx: divisors beyond 2**126 give zero, as PTX documents."""
    result = a / b
    huge = np.abs(b) > np.float32(2.0**126)
    if not huge.any():
        return result
    zero = np.where(np.isinf(a) | np.isnan(a) | np.isnan(b), np.float32(np.nan), result * 0)
    return np.where(huge & ~np.isinf(b), zero, result)


_HALVES = {"f16", "bf16", "f16x2", "bf16x2"}
_FLOATS = {*_HALVES, "f32", "f64", "f32x2"}
_SIGNS = {"add": "+", "sub": "-", "mul": "*"}


def is_float(kind: str) -> bool:
    return kind in _FLOATS


def finish(g: Generator, to: Operand, value: str, dtype: str, ftz: bool, saturates: bool) -> None:
    """Applies .sat and .ftz to a result and assigns it."""
    if saturates:
        value = f"saturate({value})"
    if ftz:
        value = f"flush({value})"
    g.write(to, value, dtype)


def sources(g: Generator, operands: list[Operand], dtype: str, ftz: bool) -> list[str]:
    names = [g.read(o, dtype) for o in operands]
    return [f"flush({n})" if ftz and n[0] != "K" else n for n in names]


def half_arithmetic(g: Generator, ins: Instruction, kind: str) -> None:
    """Any arithmetic on f16, bf16 and their pairs."""
    g.mods.take("rn")
    flags = ",".join(w for w in ("sat", "ftz", "relu", "NaN") if g.mods.take(w))
    g.mods.take("approx")
    g.refuse_if(g.mods.take("xorsign", "noftz"), "xorsign or noftz")
    pair = kind.endswith("x2")
    raw = "u4" if pair else "u2"
    operands = ", ".join(g.read(o, raw) for o in ins.operands[1:])
    function = "half_op2" if pair else "half_op"
    value = f"{function}({ins.op!r}, {kind.removesuffix('x2')!r}, {flags!r}, {operands})"
    g.write(ins.operands[0], value if pair else f"({value}).view({DTYPE[kind]})", DTYPE[kind])


def emit_float(g: Generator, ins: Instruction, kind: str) -> None:
    """add, sub, mul, div, min, max, abs, neg, fma; mad is the same as fma since sm_20."""
    mods, op = g.mods, ins.op
    g.refuse_if(kind == "f32x2", "pairs of f32")
    if kind in _HALVES:
        g.refuse_if(op == "div", "half division")
        half_arithmetic(g, ins, kind)
        return
    dtype = DTYPE[kind]
    ftz = bool(mods.take("ftz"))
    values = sources(g, ins.operands[1:], dtype, ftz)
    if op in ("abs", "neg"):
        (value,) = values
        g.write(ins.operands[0], f"np.abs({value})" if op == "abs" else f"-{value}", dtype)
        return
    saturates = bool(mods.take("sat"))
    rounding = mods.take("rn", "rz", "rm", "rp") or "rn"
    g.refuse_if(rounding != "rn" and dtype != "f4", "directed rounding of f64")
    if op in ("fma", "mad"):
        a, b, c = values
        value = f"fma{kind[1:]}({a}, {b}, {c})"
        if rounding != "rn":
            value = f"directed('fma', {rounding!r}, {a}, {b}, {c})"
    else:
        value = _binary(g, op, rounding, values)
    finish(g, ins.operands[0], value, dtype, ftz, saturates)


def _binary(g: Generator, op: str, rounding: str, values: list[str]) -> str:
    """The result of add, sub, mul, div, min or max as an expression."""
    mods = g.mods
    if op in ("min", "max"):
        g.refuse_if(mods.take("xorsign"), "xorsign")
        propagates = mods.take("NaN")
        g.refuse_if(mods.take("abs") or len(values) != 2, "three operands or .abs")
    a, b = values
    if op in ("min", "max"):
        value = f"{op}imum({a}, {b})"
        return f"or_nan({value}, {a}, {b})" if propagates else value
    if op == "div":
        form = mods.take("approx", "full")
        if rounding != "rn":
            return f"directed_quotient({rounding!r}, {a}, {b})"
        return f"quick_quotient({a}, {b})" if form == "approx" else f"{a} / {b}"
    if rounding == "rn":
        return f"{a} {_SIGNS[op]} {b}"
    if op == "sub":
        return f"directed('add', {rounding!r}, {a}, -{b})"
    return f"directed({op!r}, {rounding!r}, {a}, {b})"


# ---- functions of one argument

_FUNCTIONS = {
    "ex2": "np.exp2({x})",
    "lg2": "np.log2({x})",
    "rcp": "{one} / {x}",
    "rsqrt": "(1.0 / np.sqrt({x}.astype(f8))).astype({dtype})",
    "sqrt": "np.sqrt({x})",
    "sin": "np.sin({x}.astype(f8)).astype({dtype})",
    "cos": "np.cos({x}.astype(f8)).astype({dtype})",
    "tanh": "np.tanh({x})",
}


@instruction(*_FUNCTIONS, unit="special")
def emit_function(g: Generator, ins: Instruction) -> None:
    kind = g.mods.take("f16x2", "bf16x2") or g.mods.type()
    if kind in _HALVES:
        g.refuse_if(ins.op not in ("ex2", "tanh"), "in half precision")
        half_arithmetic(g, ins, kind)
        return
    dtype = DTYPE[kind]
    ftz = bool(g.mods.take("ftz"))
    approx = g.mods.take("approx")
    rounding = g.mods.take("rn", "rz", "rm", "rp")
    directed = rounding not in ("", "rn")
    g.refuse_if(not approx and not rounding, "no rounding mode")
    g.refuse_if(directed and (dtype != "f4" or ins.op not in ("rcp", "sqrt")), "directed rounding")
    g.refuse_if(dtype == "f8" and ins.op not in ("rcp", "sqrt", "rsqrt"), "in double precision")
    if ins.op == "ex2" and ftz:
        g.write(ins.operands[0], f"exp2_flushed({g.read(ins.operands[1], dtype)})", dtype)
        return
    (x,) = sources(g, ins.operands[1:2], dtype, ftz)
    one = g.constant_one(dtype)
    value = _FUNCTIONS[ins.op].format(x=x, one=one, dtype=dtype)
    if directed and ins.op == "rcp":
        value = f"directed_quotient({rounding!r}, {one}, {x})"
    elif directed:
        value = f"directed_root({rounding!r}, {x})"
    finish(g, ins.operands[0], value, dtype, ftz, False)


formula("copysign", "compare", "T", "np.copysign({b:T}, {a:T})")


_PROPERTIES = {
    "finite": "np.isfinite({x})",
    "infinite": "np.isinf({x})",
    "number": "~np.isnan({x})",
    "notanumber": "np.isnan({x})",
    "normal": "np.isfinite({x}) & (np.abs({x}) >= np.finfo({dtype}).tiny)",
    "subnormal": "({x} != 0) & (np.abs({x}) < np.finfo({dtype}).tiny)",
}


@instruction("testp", unit="compare")
def emit_test(g: Generator, ins: Instruction) -> None:
    text = _PROPERTIES[g.mods.take(*_PROPERTIES)]
    dtype = DTYPE[g.mods.type()]
    g.write(ins.operands[0], text.format(x=g.read(ins.operands[1], dtype), dtype=dtype), "b1")
