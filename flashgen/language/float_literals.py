"""float32 numbers as C++ literals."""

from __future__ import annotations

import struct

LARGEST_LITERAL = float(2**128 - 2**104)
"""The largest finite float32."""


def float32_literal(value: float) -> str:
    """The shortest C++ literal of the float32 nearest to ``value``."""
    if value != value:
        return "__int_as_float(0x7fc00000)"  # NaN has no literal
    (exact,) = struct.unpack("f", struct.pack("f", value))
    text = next(t for d in range(1, 18) if _as_float32(t := f"{exact:.{d - 1}e}") == exact)
    mantissa, exponent = text.split("e")
    if not -5 < int(exponent) < 9:
        return f"{mantissa}e{int(exponent)}f"
    digits = max(1, len(mantissa.partition(".")[2]) - int(exponent))
    return f"{float(text):.{digits}f}f"


def _as_float32(text: str) -> float:
    (value,) = struct.unpack("f", struct.pack("f", float(text)))
    return float(value)
