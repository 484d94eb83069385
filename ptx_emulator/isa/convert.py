"""Narrow floats: conversions between number formats (cvt), arithmetic on halves, vectors.

numpy computes float16 in float32, which rounds sums, products and quotients correctly. bfloat16
is stored as uint16 bits and computed in the same way. Fused multiply-adds are computed in float64
with rounding to odd, so that they round once.

The conversions to 8-bit floats, e4m3 and e5m2, round to the nearest even number. With .satfinite,
the only form of PTX, numbers beyond the largest finite one become that number, and so do
infinities; a NaN becomes 0x7f.

Source: PTX ISA, "Data Movement and Conversion Instructions: cvt".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator.isa import floats
from ptx_emulator.isa.generator import Generator, instruction
from ptx_emulator.isa.mma import SMALL_FLOATS
from ptx_emulator.ptx.register_types import DTYPE
from ptx_emulator.ptx.syntax import TYPE_BYTES, Instruction

_INTEGRAL = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}
_SIXTEEN = np.uint32(16)


def float_to_integer(x: Any, rounded: Callable[[Any], Any], to: Any) -> Any:
    """To an integer dtype: out of range clamps. A NaN gives 0, or the highest bit alone where a
    type has 64 bits as a number."""
    wide = rounded(x.astype(np.float64))
    limits = np.iinfo(to)
    inside = np.clip(wide, float(limits.min), float(limits.max))
    nan = np.isnan(wide)
    # float(2**63 - 1) is 2**63: such values need the exact limit.
    top = inside >= float(limits.max)
    result = np.where(top | nan, 0.0, inside).astype(to)
    result = np.where(top, to.type(limits.max), result)
    if not nan.any():
        return result
    wider = x.dtype == np.float64 or to.itemsize == 8
    nan_result = (1 << 8 * to.itemsize - 1) * (-1 if to.kind == "i" else 1) if wider else 0
    return np.where(nan, to.type(nan_result), result)


def integer_to_float(x: Any, to: Any, rounding: str) -> Any:
    """An integer as float32 or float64, in any rounding mode or to odd (ro)."""
    near = x.astype(to)
    if rounding == "rn":
        return near
    if x.dtype.itemsize < to.itemsize:
        return near
    if x.dtype.itemsize < 8:
        return floats.round_directed(x.astype(np.float64), rounding)
    # Compare in integers; 2**63 and above does not fit, and can only be too high.
    over = near >= to.type(2.0**63 if x.dtype.kind == "i" else 2.0**64)
    back = np.where(over, to.type(0), near).astype(x.dtype)
    high, low = over | (back > x), ~over & (back < x)
    if rounding == "ro":
        return floats.to_odd(near, np.where(high, -1.0, np.where(low, 1.0, 0.0)))
    return floats.neighbour(near, x, high, low, rounding)


def saturate_integer(x: Any, to: Any) -> Any:
    """Clamps an integer to the range of a narrower or differently signed type."""
    limits = np.iinfo(to)
    source_limits = np.iinfo(x.dtype)
    low, high = max(limits.min, source_limits.min), min(limits.max, source_limits.max)
    return np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(to)


def pack_saturated(a: Any, b: Any, c: Any, bits: int, signed: bool) -> Any:
    """cvt.pack: ``b`` in the low ``bits`` bits, above it ``a``, both saturated; then ``c``."""
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    mask = np.uint32((1 << bits) - 1)
    x, y = (np.clip(v, low, high).astype(np.int32).view(np.uint32) & mask for v in (a, b))
    above = c << np.uint32(2 * bits) if bits < 16 else np.uint32(0)
    return above | x << np.uint32(bits) | y


def bf16_to_f32(bits: Any) -> Any:
    return (bits.astype(np.uint32) << _SIXTEEN).view(np.float32)


def to_bf16(x: Any, rounding: str = "rn") -> Any:
    """float32 or float64 to bfloat16 bits; a NaN becomes 0x7fff, as on the hardware."""
    if rounding != "rn":
        return _to_bf16_directed(x, rounding)
    near = x.astype(np.float32, copy=False)
    if x.dtype == np.float64:
        # Round to odd in float32 first: with 24 bits the rounding to 8 bits is correct.
        bits = np.asarray(near).view(np.uint32)
        back = near.astype(np.float64)
        inexact = (back != x) & ((bits & np.uint32(1)) == 0) & np.isfinite(near)
        towards = np.where(x > back, np.float32(np.inf), np.float32(-np.inf))
        near = np.where(inexact, np.nextafter(near, towards), near)
    bits = near.view(np.uint32)
    odd = (bits >> _SIXTEEN) & np.uint32(1)
    rounded = ((bits + (odd + np.uint32(0x7FFF))) >> _SIXTEEN).astype(np.uint16)
    bad = np.isnan(near)
    return np.where(bad, np.uint16(0x7FFF), rounded) if bad.any() else rounded


def _to_bf16_directed(x: Any, rounding: str) -> Any:
    """`to_bf16` towards zero (rz), down (rm) or up (rp)."""
    x = x.astype(np.float32) if x.dtype == np.float16 else x
    cut = np.asarray(floats.round_directed(x, "rz") if x.dtype == np.float64 else x)
    bits = cut.view(np.uint32)
    rounded = (bits >> _SIXTEEN).astype(np.uint16)
    if rounding != "rz":
        inexact = (cut != x) | ((bits & np.uint32(0xFFFF)) != 0)
        rounded = rounded + (inexact & (np.signbit(x) == (rounding == "rm"))).astype(np.uint16)
    # A NaN must not become an infinity.
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


_LARGEST = {
    "f16": np.float32(65504),
    "bf16": np.uint32(0x7F7F0000).view(np.float32),
    "tf32": np.uint32(0x7F7FE000).view(np.float32),
}


def within_finite(x: Any, kind: str) -> Any:
    """float32 numbers, clamped to the largest finite number of a format."""
    return np.clip(x, -_LARGEST[kind], _LARGEST[kind])


def pack_halves(high: Any, low: Any, kind: str, rounding: str, clamps: bool) -> Any:
    """Two float32 as a pair of float16 or bfloat16, ``low`` in the low half."""
    if clamps:
        high, low = floats.relu(high), floats.relu(low)
    if kind == "bf16":
        bits = to_bf16(high, rounding).astype(np.uint32) << _SIXTEEN
        return to_bf16(low, rounding).astype(np.uint32) | bits
    out: Any = np.empty((*np.broadcast_shapes(high.shape, low.shape), 2), np.float16)
    for index, half in enumerate((low, high)):
        # The assignment rounds to nearest.
        out[..., index] = (
            half if rounding == "rn" else floats.round_directed(half, rounding, np.float16)
        )
    return out.view(np.uint32)[..., 0]


def to_tf32(x: Any, rounding: str) -> Any:
    """float32 bits with 13 low bits cleared after rounding."""
    bits = x.view(np.uint32)
    if rounding == "rna":
        rounded = bits + np.uint32(0x1000)
    elif rounding == "rn":
        rounded = bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    else:
        rounded = bits
    rounded = rounded & np.uint32(0xFFFFE000)
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    nan = np.isnan(x)
    kept_bits = np.where(special, bits, rounded)
    return np.where(nan, np.uint32(0x7FFFFFFF), kept_bits).view(np.float32)


# Of each format: bits of the fraction, the lowest exponent, and the bits of the largest number.
_FORMATS = {"e4m3": (3, -6, 0x7E), "e5m2": (2, -14, 0x7B)}
_EIGHT = np.uint16(8)


def to_small_float(x: Any, kind: str) -> Any:
    """float16 or float32 as the bits of an 8-bit float, uint8."""
    fraction, lowest, most = _FORMATS[kind]
    size = np.abs(x.astype(np.float64))
    finite = np.where(np.isfinite(size), size, 0.0)
    _, exponent = np.frexp(finite)
    step = np.ldexp(1.0, np.maximum(exponent - 1, lowest) - fraction)
    magnitudes = SMALL_FLOATS[kind][: most + 1].astype(np.float64)
    nearest = np.where(np.isinf(size), magnitudes[most], np.rint(finite / step) * step)
    bits = np.searchsorted(magnitudes, np.minimum(nearest, magnitudes[most]))
    return np.where(np.isnan(x), 0x7F, bits | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def pack_small_floats(high: Any, low: Any, kind: str, clamps: bool) -> Any:
    """Two numbers as a pair of 8-bit floats, uint16, ``low`` in the low byte."""
    if clamps:
        high, low = floats.relu(high), floats.relu(low)
    upper = to_small_float(high, kind).astype(np.uint16) << _EIGHT
    return upper | to_small_float(low, kind).astype(np.uint16)


def small_floats_of_halves(pair: Any, kind: str, clamps: bool) -> Any:
    """A pair of float16, uint32, as a pair of 8-bit floats, uint16."""
    low, high = ((pair >> np.uint32(shift)).astype(np.uint16).view(np.float16) for shift in (0, 16))
    return pack_small_floats(high, low, kind, clamps)


def halves_of_small_floats(pair: Any, kind: str, clamps: bool) -> Any:
    """A pair of 8-bit floats, uint16, as a pair of float16, uint32; every number is exact."""
    table = SMALL_FLOATS[kind].astype(np.float16)
    table = floats.relu(table) if clamps else table
    bits = np.where(np.isnan(table), np.uint16(0x7FFF), table.view(np.uint16)).astype(np.uint32)
    low, high = bits.take(pair & np.uint16(0xFF)), bits.take(pair >> _EIGHT)
    return low | high << np.uint32(16)


@instruction("cvt", unit="convert")
def emit_convert_number(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    if mods.take("pack"):
        _pack(g, ins)
        return
    small = mods.take("e4m3x2", "e5m2x2")
    if small:
        _small_floats(g, ins, small.removesuffix("x2"))
        return
    pair = mods.take("f16x2", "bf16x2")
    source = mods.type()
    to = pair or mods.type()
    g.refuse_if(not to, "only one type")
    g.refuse_if(to == "tf32" and source != "f32", "this conversion to tf32")
    ftz = bool(mods.take("ftz"))
    saturates = bool(mods.take("sat"))
    clamps = bool(mods.take("relu"))
    finite = bool(mods.take("satfinite"))
    kind = to.removesuffix("x2")
    g.refuse_if(finite and (source != "f32" or kind not in _LARGEST), "satfinite of these types")
    integral = _INTEGRAL.get(mods.take(*_INTEGRAL))
    rounding = mods.take("rn", "rz", "rm", "rp", "rna")
    if pair:
        if source != "f32" or saturates or rounding not in ("rn", "rz"):
            raise g.unknown("this pair conversion")
        high, low = (g.read(o, "f4") for o in ins.operands[1:3])
        if finite:
            high, low = (f"within_finite({half}, {kind!r})" for half in (high, low))
        value = f"pack_halves({high}, {low}, {kind!r}, {rounding!r}, {clamps})"
        g.write(ins.operands[0], value, "u4")
        return
    _require_form(g, source, to, rounding, bool(integral))
    halves = ("f16", "bf16", "tf32")
    g.refuse_if(clamps and (source != "f32" or to not in halves), "relu of these types")
    g.refuse_if(saturates and not {"bf16", "tf32"}.isdisjoint((source, to)), "sat of these types")
    g.refuse_if(ftz and ("f32" not in (source, to) or to == "tf32"), "ftz of these types")
    dtype = DTYPE[to]
    value = g.read(ins.operands[1], DTYPE[source])
    if "f" not in source:
        value = _from_integer(value, source, to, saturates, rounding)
        g.write(ins.operands[0], value, dtype)
        return
    if clamps:
        value = f"relu({value})"
    if finite:
        value = f"within_finite({value}, {kind!r})"
    if ftz and source == "f32":
        value = f"flush({value})"
    if source == "bf16":
        value = f"bf16_to_f32({value})"
    if "f" not in to:
        g.write(ins.operands[0], f"float_to_integer({value}, {integral}, {dtype})", dtype)
        return
    if integral:
        value = f"{integral}({value})"
    if saturates:
        value = f"saturate({value})"
    value = _rounded(value, "f4" if source == "bf16" else DTYPE[source], to, rounding)
    if ftz and to == "f32":
        value = f"flush({value})"
    g.write(ins.operands[0], value, dtype)


def _require_form(g: Generator, source: str, to: str, rounding: str, integral: bool) -> None:
    """Checks the rounding mode of a conversion: it has one if, and only if, it may be inexact."""
    from_float, to_float = floats.is_float(source), floats.is_float(to) or to == "tf32"
    narrows = to_float and (not from_float or to == "tf32" or TYPE_BYTES[to] < TYPE_BYTES[source])
    g.refuse_if(narrows and not rounding, "no rounding mode")
    # Those from bfloat16, and between it and float16, may have one.
    free = narrows or (from_float and to_float and source != to and "bf16" in (source, to))
    allowed = free and (rounding != "rna" or to == "tf32")
    g.refuse_if(rounding and not allowed, f"the rounding mode .{rounding}")
    whole = from_float and (not to_float or source == to)
    g.refuse_if(integral and not whole, "rounding to an integer")
    g.refuse_if(from_float and not to_float and not integral, "no rounding to an integer")


def _small_floats(g: Generator, ins: Instruction, kind: str) -> None:
    """Conversions to and from pairs of 8-bit floats."""
    mods = g.mods
    clamps, saturates = bool(mods.take("relu")), bool(mods.take("satfinite"))
    other = g.one_of("f16x2", "f32")
    g.need("rn")
    to, *sources = ins.operands
    to_halves = ins.mods.index(other) < ins.mods.index(f"{kind}x2")
    if to_halves == saturates or (to_halves and other != "f16x2"):
        raise g.unknown("this conversion of 8-bit floats")
    if to_halves:
        value = f"halves_of_small_floats({g.read(sources[0], 'u2')}, {kind!r}, {clamps})"
        g.write(to, value, "u4")
    elif other == "f16x2":
        value = f"small_floats_of_halves({g.read(sources[0], 'u4')}, {kind!r}, {clamps})"
        g.write(to, value, "u2")
    else:
        high, low = (g.read(o, "f4") for o in sources)
        g.write(to, f"pack_small_floats({high}, {low}, {kind!r}, {clamps})", "u2")


def _pack(g: Generator, ins: Instruction) -> None:
    """cvt.pack: two integers saturated to fewer bits, side by side, below what the third holds."""
    into = g.one_of("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2")
    g.need("sat", "s32")
    bits = int(into[1:])
    g.refuse_if(bool(g.mods.take("b32")) != (bits < 16), "this number of operands")
    a, b = (g.read(o, "i4") for o in ins.operands[1:3])
    c = g.read(ins.operands[3], "u4") if bits < 16 else g.literal(0, "u4")
    g.write(ins.operands[0], f"pack_saturated({a}, {b}, {c}, {bits}, {into[0] == 's'})", "u4")


def _rounded(value: str, source_dtype: str, to: str, rounding: str) -> str:
    """A float of dtype ``source_dtype`` as the float type ``to``."""
    dtype = DTYPE[to]
    if to == "tf32":
        return f"to_tf32({value}, {rounding!r})"
    if to == "bf16":
        return f"to_bf16({value}, {rounding or 'rn'!r})"
    if int(source_dtype[1:]) > int(dtype[1:]):
        return f"round_directed({value}, {rounding or 'rn'!r}, {dtype})"
    return value if source_dtype == dtype else f"{value}.astype({dtype})"


def _from_integer(value: str, source: str, to: str, saturates: bool, rounding: str) -> str:
    dtype = DTYPE[to]
    if "f" not in to:
        if saturates:
            return f"saturate_integer({value}, {dtype})"
        wide, size = TYPE_BYTES[to], TYPE_BYTES[source]
        if wide > size:
            # Extended by the sign of the source.
            return f"{value}.astype({DTYPE[source][0]}{wide}).view({dtype})"
        return f"{value}.astype({dtype})"
    rounding = rounding or "rn"
    # Halves are rounded from float64, which is rounded to odd so that only the last one counts.
    intermediate = dtype if to in ("f32", "f64") else "f8"
    mode = rounding if intermediate == dtype else "ro"
    text = f"integer_to_float({value}, {intermediate}, {mode!r})"
    return _rounded(f"saturate({text})" if saturates else text, intermediate, to, rounding)


_FLOAT32: dict[str, Callable[..., Any]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply},
    **{"min": floats.minimum, "max": floats.maximum},
    **{"ex2": np.exp2, "tanh": np.tanh},
}


def widen(bits: Any, kind: str) -> Any:
    """uint16 bits of float16 or bfloat16 as float32."""
    return bf16_to_f32(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


def _flush16(bits: Any, kind: str) -> Any:
    small = np.uint16(0x0080 if kind == "bf16" else 0x0400)
    magnitude = bits & np.uint16(0x7FFF)
    return np.where(magnitude < small, bits & np.uint16(0x8000), bits)


def half_op(op: str, kind: str, flags: str, *operands: Any) -> Any:
    """An arithmetic instruction on uint16 bits.

    Args:
        op: add, sub, mul, fma, min, max, neg, abs, ex2, tanh.
        kind: f16 or bf16.
        flags: words among sat, ftz, relu, NaN, xorsign (of absolute values).
    """
    if "ftz" in flags:
        operands = tuple(_flush16(o, kind) for o in operands)
    if op in ("neg", "abs"):
        sign = np.uint16(0x8000)
        return operands[0] ^ sign if op == "neg" else operands[0] & ~sign
    x = [widen(o, kind) for o in operands]
    if op == "fma":
        product = x[0].astype(np.float64) * x[1].astype(np.float64)
        value = floats.odd_sum(product, x[2].astype(np.float64))
    else:
        arguments = [np.abs(v) for v in x] if "xorsign" in flags else x
        value = _FLOAT32[op](*arguments)
        if "xorsign" in flags:
            value = floats.xor_signs(value, *x)
        if "NaN" in flags:
            value = floats.or_nan(value, *x)
    if "sat" in flags:
        value = floats.saturate(value)
    if "relu" in flags:
        value = floats.relu(value)
    bits = to_bf16(value) if kind == "bf16" else value.astype(np.float16).view(np.uint16)
    return _flush16(bits, kind) if "ftz" in flags else bits


def half_op2(op: str, kind: str, flags: str, *operands: Any) -> Any:
    """An arithmetic instruction on pairs: uint32 values with two halves each."""
    return on_parts(np.dtype("u2"), lambda *v: half_op(op, kind, flags, *v), *operands)


def on_parts(element: Any, function: Callable[..., Any], *operands: Any) -> Any:
    """Applies ``function`` to the parts of uint32 values, which have the dtype ``element``."""
    shape = np.broadcast_shapes(*(o.shape for o in operands))
    if not shape:
        wide = [np.asarray(o).reshape(1) for o in operands]
        return function(*(w.view(element) for w in wide)).view(np.uint32)[0]
    wide = [np.ascontiguousarray(np.broadcast_to(o, shape)) for o in operands]
    return np.ascontiguousarray(function(*(w.view(element) for w in wide))).view(np.uint32)


def half_compare(a: Any, b: Any, kind: str, compare: Callable[[Any, Any], Any], ftz: bool) -> Any:
    if ftz:
        a, b = _flush16(a, kind), _flush16(b, kind)
    return compare(widen(a, kind), widen(b, kind))


def parts_of(value: Any, part: Any) -> Any:
    """A value as its parts: a last axis is added, the low part first."""
    return np.ascontiguousarray(value).reshape((*np.shape(value), 1)).view(part)


def join_parts(dtype: Any, part: Any, *values: Any) -> Any:
    """The reverse of :func:`parts_of`, the low part first."""
    out = np.empty((*np.broadcast_shapes(*(np.shape(v) for v in values)), len(values)), part)
    for index, value in enumerate(values):
        out[..., index] = value
    return out.view(dtype)[..., 0]
