"""Floating-point semantics: IEEE rounding, fused multiply-add, flushing, minimum and maximum.

A fused multiply-add of float32 is formed in float64, where the product is exact and only the sum
rounds. Rounding that sum once more to float32 differs from rounding once only when the sum lies
exactly half-way between two float32 values or below the normal range; those rare elements are
computed again by rounding to odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded
sums", 2008).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from ptx_emulator.isa.generator import Generator, formula, instruction
from ptx_emulator.ptx.register_types import DTYPE
from ptx_emulator.ptx.syntax import Instruction, Operand

TINY = np.float32(2.0**-126)  # the smallest normal float32
_TINY_DOUBLE = 2.0**-1022
_HALF = np.uint64(1 << 63)
_SHIFT = np.uint64(35)
_SINGLE = np.dtype("f4")
_SMALL, _LARGE = 2.0**-900, 2.0**960


def flush(x: Any) -> Any:
    """Subnormal values become zeros of the same sign."""
    tiny = TINY if x.dtype == _SINGLE else _TINY_DOUBLE
    if not np.any((np.abs(x) < tiny) & (x != 0)):
        return x
    return np.where(np.abs(x) < tiny, np.copysign(x.dtype.type(0), x), x)


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
    exact = to_odd(total, sum_error(product, c.astype(np.float64), total)).astype(np.float32)
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
    result = _fma64_of_normal_terms(a, b, c)
    high = np.abs(a * b)
    # Where the errors of products and sums are float64 numbers as well, they are exact.
    normal = (high > _SMALL) & (high < _LARGE) & (np.abs(result) > _SMALL)
    normal &= (np.abs(a) < _LARGE) & (np.abs(b) < _LARGE) & (np.abs(c) < _LARGE)
    if (normal | (a == 0) | (b == 0)).all():
        return result
    return np.where(normal, result, exact("fma", "rn", a, b, c))


def _fma64_of_normal_terms(a: Any, b: Any, c: Any) -> Any:
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


_EXACT: dict[str, Callable[..., Fraction]] = {
    **{"add": operator.add, "mul": operator.mul, "div": operator.truediv},
    "fma": lambda a, b, c: a * b + c,
}
_PLAIN: dict[str, Callable[..., Any]] = {
    **{"add": np.add, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt},
    "fma": lambda a, b, c: a * b + c,
}


def exact(op: str, mode: str, *operands: Any) -> Any:
    """add, mul, div, fma or sqrt of float64 in any rounding mode, through fractions.

    float32 is computed in float64; float64 has no wider type, so that each element is computed by
    itself, which is slow.
    """
    arguments = np.broadcast_arrays(*operands)
    result = np.array(_PLAIN[op](*arguments))
    # What numpy computes of infinities, NaNs and divisions by zero is exact.
    finite = np.isfinite(arguments).all(axis=0)
    if op in ("div", "sqrt"):
        finite &= arguments[-1] != 0 if op == "div" else arguments[0] > 0
    for index in np.flatnonzero(finite):
        values = [float(x.flat[index]) for x in arguments]
        result.flat[index] = _exact_element(op, mode, values, float(result.flat[index]))
    return result[()]


def _exact_element(op: str, mode: str, values: list[float], plain: float) -> float:
    """One element of `exact`; ``plain`` has the sign of a result that is zero."""
    numbers = [Fraction(value) for value in values]
    if op == "sqrt":
        near, high, low = (
            plain,
            Fraction(plain) ** 2 > numbers[0],
            Fraction(plain) ** 2 < numbers[0],
        )
    else:
        value = _EXACT[op](*numbers)
        if value == 0:
            if mode != "rm" or op in ("mul", "div"):
                return plain
            # A sum that is zero is negative in this mode, unless both terms are +0.
            plus = op == "add" and all(np.copysign(1, x) > 0 for x in values) and not any(values)
            product = np.copysign(1, values[0]) * np.copysign(1, values[1])
            plus |= op == "fma" and product > 0 and np.copysign(1, values[2]) > 0
            return 0.0 if plus else -0.0
        try:
            near = float(value)
        except OverflowError:
            near = np.inf if value > 0 else -np.inf
        near = float(np.copysign(near, 1 if value > 0 else -1))
        high = near == np.inf or (near != -np.inf and Fraction(near) > value)
        low = near == -np.inf or (near != np.inf and Fraction(near) < value)
    if (mode == "rp" or (mode == "rz" and near < 0)) and low:
        return float(np.nextafter(near, np.inf))
    if (mode == "rm" or (mode == "rz" and near > 0)) and high:
        return float(np.nextafter(near, -np.inf))
    return near


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


def xor_signs(result: Any, a: Any, b: Any) -> Any:
    """``result``, which is not negative, with the sign of a product; a NaN stays."""
    return np.where(np.signbit(a) ^ np.signbit(b), -result, result)


def relu(x: Any) -> Any:
    """Negative values become +0; a NaN stays."""
    return np.where(np.isnan(x) | (x > 0), x, x.dtype.type(0))


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
    flags = ",".join(w for w in ("sat", "ftz", "relu", "NaN", "xorsign") if g.mods.take(w))
    if "xorsign" in flags:
        g.need("abs")
    g.mods.take("approx")
    pair = kind.endswith("x2")
    raw = "u4" if pair else "u2"
    operands = ", ".join(g.read(o, raw) for o in ins.operands[1:])
    function = "half_op2" if pair else "half_op"
    value = f"{function}({ins.op!r}, {kind.removesuffix('x2')!r}, {flags!r}, {operands})"
    g.write(ins.operands[0], value if pair else f"({value}).view({DTYPE[kind]})", DTYPE[kind])


# What each opcode computes, rounded to nearest; of some, in a directed rounding mode.
_NEAREST = {
    **{"add": "{a} + {b}", "sub": "{a} - {b}", "mul": "{a} * {b}", "div": "{a} / {b}"},
    **{"min": "minimum({a}, {b})", "max": "maximum({a}, {b})"},
    **{"abs": "np.abs({a})", "neg": "-{a}"},
    **dict.fromkeys(("fma", "mad"), "fma{bits}({a}, {b}, {c})"),  # the same since sm_20
}
_FUNCTIONS = {
    **{"ex2": "np.exp2({a})", "lg2": "np.log2({a})", "rcp": "{one} / {a}", "sqrt": "np.sqrt({a})"},
    "rsqrt": "(1.0 / np.sqrt({a}.astype(f8))).astype({dtype})",
    "sin": "np.sin({a}.astype(f8)).astype({dtype})",
    "cos": "np.cos({a}.astype(f8)).astype({dtype})",
    "tanh": "np.tanh({a})",
}
_DIRECTED = {
    "add": "directed('add', {mode!r}, {a}, {b})",
    "sub": "directed('add', {mode!r}, {a}, -{b})",
    "mul": "directed('mul', {mode!r}, {a}, {b})",
    **dict.fromkeys(("fma", "mad"), "directed('fma', {mode!r}, {a}, {b}, {c})"),
    "div": "directed_quotient({mode!r}, {a}, {b})",
    "rcp": "directed_quotient({mode!r}, {one}, {a})",
    "sqrt": "directed_root({mode!r}, {a})",
}
_DIRECTED_DOUBLE = {
    "add": "exact('add', {mode!r}, {a}, {b})",
    "sub": "exact('add', {mode!r}, {a}, -{b})",
    "mul": "exact('mul', {mode!r}, {a}, {b})",
    **dict.fromkeys(("fma", "mad"), "exact('fma', {mode!r}, {a}, {b}, {c})"),
    "div": "exact('div', {mode!r}, {a}, {b})",
    "rcp": "exact('div', {mode!r}, {one}, {a})",
    "sqrt": "exact('sqrt', {mode!r}, {a})",
}
_SOURCE = re.compile(r"\{([abc])\}")


def _result(g: Generator, ins: Instruction, text: str, dtype: str, ftz: bool, mode: str) -> str:
    """An expression of one of the tables with the sources of an instruction."""
    names = sorted({*_SOURCE.findall(text)})
    values = dict(zip(names, sources(g, ins.operands[1:], dtype, ftz), strict=True))
    one = g.constant_one(dtype) if "{one}" in text else ""
    return text.format(**values, one=one, dtype=dtype, bits=8 * int(dtype[1:]), mode=mode)


def emit_float(g: Generator, ins: Instruction, kind: str) -> None:
    """add, sub, mul, div, min, max, abs, neg, fma and mad."""
    mods, op = g.mods, ins.op
    g.refuse_if(kind == "f32x2", "pairs of f32")
    if kind in _HALVES:
        g.refuse_if(op == "div", "half division")
        half_arithmetic(g, ins, kind)
        return
    dtype, ftz, text = DTYPE[kind], bool(mods.take("ftz")), _NEAREST[op]
    if op in ("abs", "neg"):
        g.write(ins.operands[0], _result(g, ins, text, dtype, ftz, ""), dtype)
        return
    saturates = bool(mods.take("sat"))
    mode = mods.take("rn", "rz", "rm", "rp") or "rn"
    if op in ("min", "max"):
        if mods.take("xorsign"):
            g.need("abs")
            text = f"xor_signs({op}imum(np.abs({{a}}), np.abs({{b}})), {{a}}, {{b}})"
        text = f"or_nan({text}, {{a}}, {{b}})" if mods.take("NaN") else text
        g.refuse_if(mods.take("abs") or len(ins.operands) != 3, "three operands or .abs")
    elif op == "div" and mods.take("approx", "full") == "approx":
        text = "quick_quotient({a}, {b})"
    if mode != "rn":
        text = (_DIRECTED if dtype == "f4" else _DIRECTED_DOUBLE).get(op, text)
    finish(g, ins.operands[0], _result(g, ins, text, dtype, ftz, mode), dtype, ftz, saturates)


# ---- functions of one argument


@instruction(*_FUNCTIONS, unit="special")
def emit_function(g: Generator, ins: Instruction) -> None:
    kind, op = g.mods.take("f16x2", "bf16x2") or g.mods.type(), ins.op
    if kind in _HALVES:
        g.refuse_if(op not in ("ex2", "tanh"), "in half precision")
        half_arithmetic(g, ins, kind)
        return
    g.refuse_if(kind not in ("f32", "f64"), "this type")
    dtype, ftz = DTYPE[kind], bool(g.mods.take("ftz"))
    approx, mode = g.mods.take("approx"), g.mods.take("rn", "rz", "rm", "rp")
    directed = mode not in ("", "rn")
    g.refuse_if(not approx and not mode, "no rounding mode")
    g.refuse_if(directed and op not in _DIRECTED, "directed rounding")
    g.refuse_if(dtype == "f8" and op not in ("rcp", "sqrt", "rsqrt"), "in double precision")
    if op == "ex2" and ftz:
        g.write(ins.operands[0], f"exp2_flushed({g.read(ins.operands[1], dtype)})", dtype)
        return
    roundings = _DIRECTED if dtype == "f4" else _DIRECTED_DOUBLE
    text = (roundings if directed else _FUNCTIONS)[op]
    finish(g, ins.operands[0], _result(g, ins, text, dtype, ftz, mode), dtype, ftz, False)


formula("copysign", "compare", "T", "np.copysign({b:T}, {a:T})")


_PROPERTIES = {
    "finite": "np.isfinite({x})",
    "infinite": "np.isinf({x})",
    "number": "~np.isnan({x})",
    "notanumber": "np.isnan({x})",
    # Zeros count as normal.
    "normal": "np.isfinite({x}) & ((np.abs({x}) >= np.finfo({dtype}).tiny) | ({x} == 0))",
    "subnormal": "({x} != 0) & (np.abs({x}) < np.finfo({dtype}).tiny)",
}


@instruction("testp", unit="compare")
def emit_test(g: Generator, ins: Instruction) -> None:
    text = _PROPERTIES[g.mods.take(*_PROPERTIES)]
    dtype = DTYPE[g.mods.type()]
    g.write(ins.operands[0], text.format(x=g.read(ins.operands[1], dtype), dtype=dtype), "b1")
