"""Conversions to and from 8-bit floats, e4m3 and e5m2, two of them in 16 bits.

The conversions round to the nearest even number. With .satfinite, the only form of PTX, numbers
beyond the largest finite one become that number, and so do infinities; a NaN becomes 0x7f.

Source: PTX ISA, "Data Movement and Conversion Instructions: cvt".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.emulator.isa.semantics.floats import relu
from flashgen.emulator.isa.semantics.mma import SMALL_FLOATS

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
    known = SMALL_FLOATS[kind][: most + 1].astype(np.float64)
    nearest = np.where(np.isinf(size), known[most], np.rint(finite / step) * step)
    bits = np.searchsorted(known, np.minimum(nearest, known[most]))
    signed = bits | np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), 0x7F, signed).astype(np.uint8)


def pack_small_floats(high: Any, low: Any, kind: str, clamps: bool) -> Any:
    """Two numbers as a pair of 8-bit floats, uint16, ``low`` in the low byte."""
    if clamps:
        high, low = relu(high), relu(low)
    upper = to_small_float(high, kind).astype(np.uint16) << _EIGHT
    return upper | to_small_float(low, kind).astype(np.uint16)


def small_floats_of_halves(pair: Any, kind: str, clamps: bool) -> Any:
    """A pair of float16, uint32, as a pair of 8-bit floats, uint16."""
    low, high = ((pair >> np.uint32(shift)).astype(np.uint16).view(np.float16) for shift in (0, 16))
    return pack_small_floats(high, low, kind, clamps)


def halves_of_small_floats(pair: Any, kind: str, clamps: bool) -> Any:
    """A pair of 8-bit floats, uint16, as a pair of float16, uint32; every number is exact."""
    table = SMALL_FLOATS[kind].astype(np.float16)
    table = relu(table) if clamps else table
    bits = np.where(np.isnan(table), np.uint16(0x7FFF), table.view(np.uint16)).astype(np.uint32)
    low, high = bits.take(pair & np.uint16(0xFF)), bits.take(pair >> _EIGHT)
    return low | high << np.uint32(16)
