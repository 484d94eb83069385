"""Integer semantics that numpy does not have as one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def multiply_high(a: Any, b: Any) -> Any:
    """The upper half of the product, in the operands' dtype."""
    kind, size = a.dtype.kind, a.dtype.itemsize
    if size < 8:
        wide = np.dtype(f"{kind}{2 * size}")
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(8 * size)).astype(a.dtype)
    x, y = a.astype(np.uint64), b.astype(np.uint64)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> shift, y & low, y >> shift
    middle = x1 * y0 + (x0 * y0 >> shift)
    cross = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> shift) + (cross >> shift)
    if kind == "i":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.astype(a.dtype)


def divide(a: Any, b: Any) -> Any:
    """Quotient rounded towards zero; a division by zero gives all ones, as the hardware does."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        remainder = a - quotient * safe
        quotient = quotient + ((remainder != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(b == 0, ~a.dtype.type(0), quotient)


def remainder(a: Any, b: Any) -> Any:
    """Remainder with the sign of the dividend; a itself for a division by zero."""
    return np.where(b == 0, a, a - divide(a, b) * b)


def saturating_add(a: Any, b: Any, sign: int) -> Any:
    wide = a.astype(np.int64) + sign * b.astype(np.int64)
    limit = np.iinfo(a.dtype)
    return np.clip(wide, limit.min, limit.max).astype(a.dtype)


def shift_left(a: Any, count: Any) -> Any:
    """Shift of an unsigned value; counts beyond the width give 0."""
    bits = a.dtype.itemsize * 8
    inside = count < np.uint32(bits)
    amount = np.minimum(count, np.uint32(bits - 1)).astype(a.dtype)
    return (a << amount) * inside.astype(a.dtype)


def shift_right(a: Any, count: Any) -> Any:
    """Shift that fills with zeros or the sign; counts beyond the width act as the width."""
    bits = a.dtype.itemsize * 8
    amount = np.minimum(count, np.uint32(bits - 1)).astype(a.dtype)
    if a.dtype.kind == "i":
        return a >> amount
    return (a >> amount) * (count < np.uint32(bits)).astype(a.dtype)


def add_carry(a: Any, b: Any, carry: Any) -> tuple[Any, Any]:
    """Sum of unsigned numbers and a carry bit; and the carry out."""
    first = a + b
    total = first + carry.astype(a.dtype)
    out = (first < a) | (total < first)
    return total, out.astype(np.uint32)


def subtract_borrow(a: Any, b: Any, borrow: Any) -> tuple[Any, Any]:
    take = borrow.astype(a.dtype)
    total = a - b - take
    out = (a < b) | ((a == b) & (take != 0))
    return total, out.astype(np.uint32)


def _highest_bit(a: Any) -> Any:
    """Position of the highest set bit of an unsigned value, -1 if there is none."""
    filled = a
    shift = 1
    while shift < a.dtype.itemsize * 8:
        filled = filled | (filled >> a.dtype.type(shift))
        shift *= 2
    return np.bitwise_count(filled).astype(np.int32) - np.int32(1)


def leading_zeros(a: Any) -> Any:
    return (np.int32(a.dtype.itemsize * 8 - 1) - _highest_bit(a)).astype(np.uint32)


def find_bit(a: Any, as_shift: bool) -> Any:
    """bfind: the highest bit that differs from the sign; 0xffffffff if there is none."""
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    bits = np.where(a < 0, ~a, a).view(unsigned) if a.dtype.kind == "i" else a
    place = _highest_bit(bits)
    if as_shift:
        place = np.where(place < 0, place, np.int32(a.dtype.itemsize * 8 - 1) - place)
    return place.astype(np.int32).view(np.uint32)


def reverse_bits(a: Any) -> Any:
    kind = a.dtype.type
    result, bits = a, a.dtype.itemsize * 8
    step = bits // 2
    mask = (1 << bits) - 1
    while step:
        pattern = mask // ((1 << step) + 1)
        low = kind(pattern)
        result = ((result >> kind(step)) & low) | ((result & low) << kind(step))
        step //= 2
    return result


def extract_bits(a: Any, start: Any, length: Any) -> Any:
    """bfe: ``length`` bits from ``start``, sign-extended for signed values."""
    bits = a.dtype.itemsize * 8
    start = (start & np.uint32(0xFF)).astype(np.int64)
    length = (length & np.uint32(0xFF)).astype(np.int64)
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    raw = a.view(unsigned)
    value = shift_right(raw, start.astype(np.uint32)) & low_bits(length, unsigned)
    if a.dtype.kind == "u":
        return value
    top = np.minimum(start + length - 1, bits - 1)
    sign = (raw >> np.maximum(top, 0).astype(unsigned)) & unsigned.type(1)
    negative = (sign != 0) & (length > 0)
    # Bits of the field that lie inside the register.
    inside = low_bits(np.clip(bits - start, 0, length), unsigned)
    return np.where(negative, value | ~inside, value).view(a.dtype)


def low_bits(count: Any, unsigned: Any) -> Any:
    """A mask of the ``count`` low bits."""
    bits = unsigned.itemsize * 8
    one = np.asarray(np.minimum(count, bits - 1)).astype(unsigned)
    mask = (unsigned.type(1) << one) - unsigned.type(1)
    return np.where(count >= bits, ~unsigned.type(0), mask)


def insert_bits(a: Any, b: Any, start: Any, length: Any) -> Any:
    """bfi: the low ``length`` bits of ``a`` into ``b`` at ``start``."""
    start = start & np.uint32(0xFF)
    length = (length & np.uint32(0xFF)).astype(np.int64)
    mask = shift_left(low_bits(length, a.dtype), start)
    return (shift_left(a, start) & mask) | (b & ~mask)


def make_mask(start: Any, length: Any, wrap: bool) -> Any:
    """bmsk: ``length`` ones from bit ``start``."""
    if wrap:
        start, length = start & np.uint32(31), length & np.uint32(31)
    return shift_left(low_bits(length.astype(np.int64), np.dtype("u4")), start)


def extend_sign(a: Any, count: Any, wrap: bool) -> Any:
    """szext: keeps the low ``count`` bits, extended by zero or by the sign."""
    count = count & np.uint32(31) if wrap else np.minimum(count, np.uint32(32))
    return extract_bits(a, np.uint32(0), count)


def _joined(low: Any, high: Any) -> Any:
    return (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)


def funnel(a: Any, b: Any, count: Any, left: bool, wrap: bool) -> Any:
    """shf: shifts the 64 bits b:a; the upper word when shifting left, the lower one otherwise."""
    count = count & np.uint32(31) if wrap else np.minimum(count, np.uint32(32))
    both = _joined(a, b)
    amount = count.astype(np.uint64)
    if left:
        return ((both << amount) >> np.uint64(32)).astype(np.uint32)
    return (both >> amount).astype(np.uint32)


def logic3(a: Any, b: Any, c: Any, table: int) -> Any:
    """lop3: any function of three bits, from its truth table."""
    result: Any = np.uint32(0)
    for bit in range(8):
        if table >> bit & 1:
            x = a if bit & 4 else ~a
            y = b if bit & 2 else ~b
            z = c if bit & 1 else ~c
            result = result | (x & y & z)
    return result


def permute_bytes(a: Any, b: Any, selector: Any, mode: str) -> Any:
    """prmt: four bytes chosen from b:a."""
    both = _joined(a, b)
    selector = selector.astype(np.uint64)
    result: Any = np.uint64(0)
    for place in range(4):
        nibble = (selector >> np.uint64(4 * place)) & np.uint64(15)
        chosen = _PERMUTATIONS[mode](selector & np.uint64(3), np.uint64(place)) if mode else nibble
        byte = (both >> ((chosen & np.uint64(7)) * np.uint64(8))) & np.uint64(0xFF)
        if not mode:
            # Bit 3 of a selector replicates the sign of the byte.
            byte = np.where(nibble & np.uint64(8), (byte >> np.uint64(7)) * np.uint64(0xFF), byte)
        result = result | (byte << np.uint64(8 * place))
    return result.astype(np.uint32)


# The modes of prmt: the number of a byte of b:a, modulo 8, from the selector and the byte's place.
_PERMUTATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "f4e": lambda selector, place: selector + place,
    "b4e": lambda selector, place: selector + np.uint64(8) - place,
    "rc8": lambda selector, place: selector,
    "ecl": np.maximum,
    "ecr": np.minimum,
    "rc16": lambda selector, place: (
        (selector & np.uint64(1)) * np.uint64(2) + (place & np.uint64(1))
    ),
}


def dot2(a: Any, b: Any, c: Any, a_type: Any, b_type: Any, high: bool) -> Any:
    """dp2a: 16-bit parts of ``a`` times the low or the high two bytes of ``b``, plus ``c``."""
    total = c.astype(np.int64)
    for place in range(2):
        x = (a >> np.uint32(16 * place)).astype(np.uint16).view(a_type)
        y = (b >> np.uint32(8 * place + 16 * high)).astype(np.uint8).view(b_type)
        total = total + x.astype(np.int64) * y.astype(np.int64)
    return total.astype(np.uint32)


def find_nth(mask: Any, base: Any, offset: Any) -> Any:
    """fns: the place of the ``offset``-th set bit from ``base`` on, downwards if it is negative.

    An offset of 0 is for bit ``base`` itself. The result is 0xffffffff if there is no such bit.
    """
    mask, base, offset = np.broadcast_arrays(mask, base, offset)
    left = np.where(offset == 0, 1, np.abs(offset.astype(np.int64)))
    place = base.astype(np.int64)
    step = np.where(offset < 0, -1, 1)
    found = np.full(mask.shape, 0xFFFFFFFF, np.uint32)
    for turn in range(32):
        inside = (place >= 0) & (place < 32) & ((offset != 0) | (turn == 0))
        here = (mask >> np.clip(place, 0, 31).astype(np.uint32)) & np.uint32(1)
        left = left - (inside & (here != 0))
        hit = inside & (here != 0) & (left == 0)
        found = np.where(hit, place.astype(np.uint32), found)
        place = place + step
    return found


def dot4(a: Any, b: Any, c: Any, a_type: Any, b_type: Any) -> Any:
    """dp4a: the dot product of four bytes each, of the given dtypes, plus ``c``."""
    total = c.astype(np.int64)
    for shift in range(0, 32, 8):
        x, y = ((v >> np.uint32(shift)).astype(np.uint8) for v in (a, b))
        total = total + x.view(a_type).astype(np.int64) * y.view(b_type).astype(np.int64)
    return total.astype(np.uint32)
