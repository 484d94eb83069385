"""Conversions between number formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.isa.registry import runtime
from flashgen.emulator.isa.semantics.floats import round_directed
from flashgen.emulator.isa.semantics.halves import f64_to_bf16

Array = npt.NDArray[Any]
_ROUND_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@runtime
def float_to_integer(x: Any, rounding: str, to: Any) -> Any:
    """To an integer dtype: out of range clamps, NaN gives 0."""
    wide = _ROUND_TO_INTEGER[rounding](x.astype(np.float64))
    limits = np.iinfo(to)
    inside = np.clip(wide, float(limits.min), float(limits.max))
    if to.itemsize < 8:
        return np.where(np.isnan(wide), 0.0, inside).astype(np.int64).astype(to)
    # float(2**63 - 1) is 2**63: such values need the exact limit.
    top = inside >= float(limits.max)
    safe = np.where(top | np.isnan(wide), 0.0, inside).astype(to)
    return np.where(top, to.type(limits.max), safe)


@runtime
def round_to_integral(x: Any, rounding: str) -> Any:
    return _ROUND_TO_INTEGER[rounding](x)


@runtime
def integer_to_f32(x: Any, rounding: str) -> Any:
    if rounding == "rn":
        return x.astype(np.float32)
    if x.dtype.itemsize < 8:
        return round_directed(x.astype(np.float64), rounding)
    near = x.astype(np.float32)
    # Compare in integers; 2**63 and above does not fit, and can only be too high.
    limit = np.float32(2.0**63 if x.dtype.kind == "i" else 2.0**64)
    over = near >= limit
    back = np.where(over, np.float32(0), near).astype(x.dtype)
    high, low = over | (back > x), ~over & (back < x)
    down = np.nextafter(near, np.float32(-np.inf))
    up = np.nextafter(near, np.float32(np.inf))
    positive = x > 0
    if rounding == "rz":
        high, low = high & positive, low & ~positive
    elif rounding == "rm":
        low = np.zeros_like(low)
    else:
        high = np.zeros_like(high)
    return np.where(high, down, np.where(low, up, near))


@runtime
def integer_to_f64(x: Any) -> Any:
    return x.astype(np.float64)


@runtime
def saturate_integer(x: Any, to: Any) -> Any:
    """Clamps an integer to the range of a narrower or differently signed type."""
    limits = np.iinfo(to)
    own = np.iinfo(x.dtype)
    low, high = max(limits.min, own.min), min(limits.max, own.max)
    return np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(to)


@runtime
def f64_to_f32(x: Any, rounding: str) -> Any:
    return round_directed(x, rounding)


@runtime
def to_f16(x: Any, rounding: str) -> Any:
    """float32 or float64 to float16."""
    near = x.astype(np.float16)
    if rounding == "rn":
        return near
    back = near.astype(x.dtype)
    down = np.nextafter(near, np.float16(-np.inf))
    up = np.nextafter(near, np.float16(np.inf))
    high, low = back > x, back < x
    if rounding == "rz":
        high, low = high & (x > 0), low & (x < 0)
    elif rounding == "rm":
        low = np.zeros_like(low)
    else:
        high = np.zeros_like(high)
    return np.where(high, down, np.where(low, up, near))


@runtime
def to_bf16(x: Any, rounding: str) -> Any:
    """float32 or float64 to bfloat16 bits."""
    if rounding == "rn":
        if x.dtype == np.float64:
            return f64_to_bf16(x)
        from flashgen.emulator.isa.semantics.halves import f32_to_bf16

        return f32_to_bf16(x)
    # rz: drop the low bits; a NaN must not become an infinity.
    bits = (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


@runtime
def pack_halves(high: Any, low: Any, kind: str, rounding: str, relu: bool) -> Any:
    """Two float32 as a pair of float16 or bfloat16, ``low`` in the low half."""
    if relu:
        zero = np.float32(0)
        high = np.where(np.isnan(high), high, np.maximum(high, zero))
        low = np.where(np.isnan(low), low, np.maximum(low, zero))
    shape = np.broadcast_shapes(high.shape, low.shape)
    if kind == "f16":
        out: Any = np.empty((*shape, 2), np.float16)
        if rounding == "rn":
            out[..., 0] = low
            out[..., 1] = high
        else:
            out[..., 0] = to_f16(low, rounding)
            out[..., 1] = to_f16(high, rounding)
        return out.view(np.uint32)[..., 0]
    return to_bf16(low, rounding).astype(np.uint32) | (
        to_bf16(high, rounding).astype(np.uint32) << np.uint32(16)
    )


@runtime
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
