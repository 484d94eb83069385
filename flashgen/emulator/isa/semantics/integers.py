"""Integer semantics that numpy does not have as one operation."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.isa.registry import runtime

Array = npt.NDArray[Any]
WIDER = {1: "2", 2: "4", 4: "8"}


@runtime
def multiply_high(a: Any, b: Any) -> Any:
    """The upper half of the product, in the operands' dtype."""
    kind, size = a.dtype.kind, a.dtype.itemsize
    if size < 8:
        wide = np.dtype(kind + WIDER[size])
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


@runtime
def divide(a: Any, b: Any) -> Any:
    """Quotient rounded towards zero; a division by zero gives all ones, as the hardware does."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        remainder = a - quotient * safe
        quotient = quotient + ((remainder != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
    ones = np.array(-1).astype(a.dtype)[()]
    return np.where(b == 0, ones, quotient)


@runtime
def remainder(a: Any, b: Any) -> Any:
    """Remainder with the sign of the dividend; a itself for a division by zero."""
    return np.where(b == 0, a, a - divide(a, b) * b)


@runtime
def saturating_add(a: Any, b: Any, sign: int) -> Any:
    wide = a.astype(np.int64) + sign * b.astype(np.int64)
    limit = np.iinfo(a.dtype)
    return np.clip(wide, limit.min, limit.max).astype(a.dtype)


@runtime
def shift_left(a: Any, count: Any) -> Any:
    """Shift of an unsigned value; counts beyond the width give 0."""
    bits = a.dtype.itemsize * 8
    inside = count < np.uint32(bits)
    amount = np.minimum(count, np.uint32(bits - 1)).astype(a.dtype)
    return (a << amount) * inside.astype(a.dtype)


@runtime
def shift_right(a: Any, count: Any) -> Any:
    """Shift that fills with zeros or the sign; counts beyond the width act as the width."""
    bits = a.dtype.itemsize * 8
    amount = np.minimum(count, np.uint32(bits - 1)).astype(a.dtype)
    if a.dtype.kind == "i":
        return a >> amount
    return (a >> amount) * (count < np.uint32(bits)).astype(a.dtype)


@runtime
def add_carry(a: Any, b: Any, carry: Any) -> tuple[Any, Any]:
    """Sum of unsigned numbers and a carry bit; and the carry out."""
    first = a + b
    total = first + carry.astype(a.dtype)
    out = (first < a) | (total < first)
    return total, out.astype(np.uint32)


@runtime
def subtract_borrow(a: Any, b: Any, borrow: Any) -> tuple[Any, Any]:
    take = borrow.astype(a.dtype)
    total = a - b - take
    out = (a < b) | ((a == b) & (take != 0))
    return total, out.astype(np.uint32)


@runtime
def population_count(a: Any) -> Any:
    return np.bitwise_count(a).astype(np.uint32)


def _highest_bit(a: Any) -> Any:
    """Position of the highest set bit of an unsigned value, -1 if there is none."""
    filled = a
    shift = 1
    while shift < a.dtype.itemsize * 8:
        filled = filled | (filled >> a.dtype.type(shift))
        shift *= 2
    return np.bitwise_count(filled).astype(np.int32) - np.int32(1)


@runtime
def leading_zeros(a: Any) -> Any:
    return (np.int32(a.dtype.itemsize * 8 - 1) - _highest_bit(a)).astype(np.uint32)


@runtime
def find_bit(a: Any, as_shift: bool) -> Any:
    """bfind: the highest bit that differs from the sign; 0xffffffff if there is none."""
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    bits = np.where(a < 0, ~a, a).view(unsigned) if a.dtype.kind == "i" else a
    place = _highest_bit(bits)
    if as_shift:
        place = np.where(place < 0, place, np.int32(a.dtype.itemsize * 8 - 1) - place)
    return place.astype(np.int32).view(np.uint32)


@runtime
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


@runtime
def extract_bits(a: Any, start: Any, length: Any) -> Any:
    """bfe: ``length`` bits from ``start``, sign-extended for signed values."""
    bits = a.dtype.itemsize * 8
    start = (start & np.uint32(0xFF)).astype(np.int64)
    length = (length & np.uint32(0xFF)).astype(np.int64)
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    raw = a.view(unsigned)
    mask = low_bits(length, unsigned)
    value = shift_right(raw, start.astype(np.uint32)) & mask
    if a.dtype.kind == "u":
        return value
    top = np.minimum(start + length - 1, bits - 1)
    sign = (raw >> np.maximum(top, 0).astype(unsigned)) & unsigned.type(1)
    negative = (sign != 0) & (length > 0)
    return np.where(negative, value | ~mask_from(start, length, bits, unsigned), value).view(
        a.dtype
    )


def mask_from(start: Any, length: Any, bits: int, unsigned: Any) -> Any:
    """Bits of the field that lie inside the register."""
    return low_bits(np.clip(bits - start, 0, length), unsigned)


def low_bits(count: Any, unsigned: Any) -> Any:
    """A mask of the ``count`` low bits."""
    bits = unsigned.itemsize * 8
    one = np.asarray(np.minimum(count, bits - 1)).astype(unsigned)
    mask = (unsigned.type(1) << one) - unsigned.type(1)
    ones = np.array(-1).astype(unsigned)[()]
    return np.where(count >= bits, ones, mask)


@runtime
def insert_bits(a: Any, b: Any, start: Any, length: Any) -> Any:
    """bfi: the low ``length`` bits of ``a`` into ``b`` at ``start``."""
    start = start & np.uint32(0xFF)
    length = (length & np.uint32(0xFF)).astype(np.int64)
    mask = shift_left(low_bits(length, a.dtype), start)
    return (shift_left(a, start) & mask) | (b & ~mask)


@runtime
def make_mask(start: Any, length: Any, wrap: bool) -> Any:
    """bmsk: ``length`` ones from bit ``start``."""
    if wrap:
        start, length = start & np.uint32(31), length & np.uint32(31)
    return shift_left(low_bits(length.astype(np.int64), np.dtype("u4")), start)


@runtime
def extend_sign(a: Any, count: Any, wrap: bool) -> Any:
    """szext: keeps the low ``count`` bits, extended by zero or by the sign."""
    count = (count & np.uint32(31) if wrap else np.minimum(count, np.uint32(32))).astype(np.int64)
    mask = low_bits(count, np.dtype("u4"))
    raw = a.view(np.uint32)
    value = raw & mask
    if a.dtype.kind == "u":
        return value
    sign = (raw >> np.maximum(count - 1, 0).astype(np.uint32)) & np.uint32(1)
    return np.where((sign != 0) & (count > 0), value | ~mask, value).view(np.int32)


@runtime
def funnel(a: Any, b: Any, count: Any, left: bool, wrap: bool) -> Any:
    """shf: shifts the 64 bits b:a; the upper word when shifting left, the lower one otherwise."""
    count = count & np.uint32(31) if wrap else np.minimum(count, np.uint32(32))
    both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
    amount = count.astype(np.uint64)
    if left:
        return ((both << amount) >> np.uint64(32)).astype(np.uint32)
    return (both >> amount).astype(np.uint32)


@runtime
def logic3(a: Any, b: Any, c: Any, table: int) -> Any:
    """lop3: any function of three bits, from its truth table."""
    known = {
        0x80: lambda: a & b & c,
        0xFE: lambda: a | b | c,
        0x96: lambda: a ^ b ^ c,
        0xC0: lambda: a & b,
        0xFC: lambda: a | b,
        0x3C: lambda: a ^ b,
        0xF8: lambda: a | (b & c),
        0xEA: lambda: (a & b) | c,
        0xE2: lambda: (b & c) | (~b & a),
        0xCA: lambda: (a & b) | (~a & c),
        0x78: lambda: a ^ (b & c),
        0x6A: lambda: (a & b) ^ c,
    }
    found = known.get(table)
    return found() if found else _logic3(a, b, c, table)


def _logic3(a: Any, b: Any, c: Any, table: int) -> Any:
    result: Any = np.uint32(0)
    for bit in range(8):
        if table >> bit & 1:
            x = a if bit & 4 else ~a
            y = b if bit & 2 else ~b
            z = c if bit & 1 else ~c
            result = result | (x & y & z)
    return result


@runtime
def permute_bytes(a: Any, b: Any, selector: Any, mode: str) -> Any:
    """prmt: four bytes chosen from b:a."""
    both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
    two = selector.astype(np.uint64) & np.uint64(3)
    result: Any = np.uint64(0)
    for place in range(4):
        if mode == "":
            nibble = (selector.astype(np.uint64) >> np.uint64(4 * place)) & np.uint64(15)
            chosen, sign = nibble & np.uint64(7), nibble >> np.uint64(3)
        else:
            chosen, sign = _prmt_mode(mode, two, place), np.uint64(0)
        byte = (both >> (chosen * np.uint64(8))) & np.uint64(0xFF)
        byte = np.where(sign != 0, (byte >> np.uint64(7)) * np.uint64(0xFF), byte)
        result = result | (byte << np.uint64(8 * place))
    return result.astype(np.uint32)


def _prmt_mode(mode: str, two: Any, place: int) -> Any:
    p = np.uint64(place)
    if mode == "f4e":
        return (two + p) & np.uint64(7)
    if mode == "b4e":
        return (two + np.uint64(8) - p) & np.uint64(7)
    if mode == "rc8":
        return two
    if mode == "ecl":
        return np.maximum(two, p)
    if mode == "ecr":
        return np.minimum(two, p)
    return (two & np.uint64(1)) * np.uint64(2) + (p & np.uint64(1))


@runtime
def dot4(a: Any, b: Any, c: Any, a_signed: bool, b_signed: bool) -> Any:
    """dp4a: the dot product of four bytes each, plus ``c``."""
    total = c.astype(np.int64)
    for place in range(4):
        x = (a >> np.uint32(8 * place)).astype(np.uint8)
        y = (b >> np.uint32(8 * place)).astype(np.uint8)
        left = x.view(np.int8).astype(np.int64) if a_signed else x.astype(np.int64)
        right = y.view(np.int8).astype(np.int64) if b_signed else y.astype(np.int64)
        total = total + left * right
    return total.astype(np.uint32)
