"""Conversions between number formats."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.emulator.isa.semantics.floats import neighbour, relu, round_directed

_ROUND_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_SIXTEEN = np.uint32(16)


def round_to_integral(x: Any, rounding: str) -> Any:
    return _ROUND_TO_INTEGER[rounding](x)


def float_to_integer(x: Any, rounding: str, to: Any) -> Any:
    """To an integer dtype: out of range clamps, NaN gives 0."""
    wide = round_to_integral(x.astype(np.float64), rounding)
    limits = np.iinfo(to)
    inside = np.clip(wide, float(limits.min), float(limits.max))
    if to.itemsize < 8:
        return np.where(np.isnan(wide), 0.0, inside).astype(np.int64).astype(to)
    # float(2**63 - 1) is 2**63: such values need the exact limit.
    top = inside >= float(limits.max)
    safe = np.where(top | np.isnan(wide), 0.0, inside).astype(to)
    return np.where(top, to.type(limits.max), safe)


def integer_to_f32(x: Any, rounding: str) -> Any:
    near = x.astype(np.float32)
    if rounding == "rn":
        return near
    if x.dtype.itemsize < 8:
        return round_directed(x.astype(np.float64), rounding)
    # Compare in integers; 2**63 and above does not fit, and can only be too high.
    limit = np.float32(2.0**63 if x.dtype.kind == "i" else 2.0**64)
    over = near >= limit
    back = np.where(over, np.float32(0), near).astype(x.dtype)
    return neighbour(near, x, over | (back > x), ~over & (back < x), rounding)


def saturate_integer(x: Any, to: Any) -> Any:
    """Clamps an integer to the range of a narrower or differently signed type."""
    limits = np.iinfo(to)
    own = np.iinfo(x.dtype)
    low, high = max(limits.min, own.min), min(limits.max, own.max)
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
    cut = np.asarray(round_directed(x, "rz") if x.dtype == np.float64 else x)
    bits = cut.view(np.uint32)
    rounded = (bits >> _SIXTEEN).astype(np.uint16)
    if rounding != "rz":
        inexact = (cut != x) | ((bits & np.uint32(0xFFFF)) != 0)
        rounded = rounded + (inexact & (np.signbit(x) == (rounding == "rm"))).astype(np.uint16)
    # A NaN must not become an infinity.
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def pack_halves(high: Any, low: Any, kind: str, rounding: str, clamps: bool) -> Any:
    """Two float32 as a pair of float16 or bfloat16, ``low`` in the low half."""
    if clamps:
        high, low = relu(high), relu(low)
    if kind == "bf16":
        bits = to_bf16(high, rounding).astype(np.uint32) << _SIXTEEN
        return to_bf16(low, rounding).astype(np.uint32) | bits
    shape = np.broadcast_shapes(high.shape, low.shape)
    out: Any = np.empty((*shape, 2), np.float16)
    for place, half in enumerate((low, high)):
        # The assignment rounds to nearest.
        out[..., place] = half if rounding == "rn" else round_directed(half, rounding, np.float16)
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
    kept = np.where(special, bits, rounded)
    return np.where(nan, np.uint32(0x7FFFFFFF), kept).view(np.float32)
