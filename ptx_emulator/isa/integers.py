"""Integer arithmetic, logic, shifts and bit fields.

The float forms of the same opcodes are in `floats`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator.isa.comparisons import LOGIC
from ptx_emulator.isa.convert import parts_of
from ptx_emulator.isa.floats import emit_float, is_float
from ptx_emulator.isa.generator import (
    Generator,
    TypedEmitter,
    expression_of,
    formula,
    instruction,
    split_pair,
)
from ptx_emulator.ptx.instructions import as_immediate
from ptx_emulator.ptx.register_types import DTYPE
from ptx_emulator.ptx.syntax import TYPE_BYTES, Instruction


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
    return total, ((first < a) | (total < first)).astype(np.uint32)


def subtract_carry(a: Any, b: Any, carry: Any) -> tuple[Any, Any]:
    """Sum of ``a``, the complement of ``b`` and a carry bit; and the carry out: 0 if it borrows.

    PTX speaks of a borrow. The flag that GPUs keep is this carry, and compilers rely on that: the
    128-bit division of NVVM reads it after subc.cc by addc, as 1 where nothing was borrowed.
    """
    return add_carry(a, ~b, carry)


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
    position = _highest_bit(bits)
    if as_shift:
        position = np.where(position < 0, position, np.int32(a.dtype.itemsize * 8 - 1) - position)
    return position.astype(np.int32).view(np.uint32)


def reverse_bits(a: Any) -> Any:
    bits = np.unpackbits(parts_of(a, np.uint8), axis=-1, bitorder="little")
    return np.packbits(bits, axis=-1).view(a.dtype.newbyteorder(">"))[..., 0].astype(a.dtype)


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
    for number in range(4):
        nibble = (selector >> np.uint64(4 * number)) & np.uint64(15)
        chosen = _PERMUTATIONS[mode](selector & np.uint64(3), np.uint64(number)) if mode else nibble
        byte = (both >> ((chosen & np.uint64(7)) * np.uint64(8))) & np.uint64(0xFF)
        if not mode:
            # Bit 3 of a selector replicates the sign of the byte.
            byte = np.where(nibble & np.uint64(8), (byte >> np.uint64(7)) * np.uint64(0xFF), byte)
        result = result | (byte << np.uint64(8 * number))
    return result.astype(np.uint32)


# The modes of prmt: the number of a byte of b:a, modulo 8, from the selector and the byte's number.
_PERMUTATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "f4e": lambda selector, number: selector + number,
    "b4e": lambda selector, number: selector + np.uint64(8) - number,
    "rc8": lambda selector, number: selector,
    "ecl": np.maximum,
    "ecr": np.minimum,
    "rc16": lambda selector, number: (
        (selector & np.uint64(1)) * np.uint64(2) + (number & np.uint64(1))
    ),
}


def dot(a: Any, b: Any, c: Any, a_type: Any, b_type: Any, first: int) -> Any:
    """dp4a, dp2a: the parts of ``a`` times those of ``b`` from the ``first`` on, plus ``c``."""
    x, y = parts_of(a, a_type).astype(np.int64), parts_of(b, b_type).astype(np.int64)
    products = x * y[..., first : first + x.shape[-1]]
    return (products.sum(axis=-1) + c.astype(np.int64)).astype(np.uint32)


def find_nth(mask: Any, base: Any, offset: Any) -> Any:
    """fns: the position of the ``offset``-th set bit from ``base`` on, downwards if it is negative.

    An offset of 0 is for bit ``base`` itself. The result is 0xffffffff if there is no such bit.
    """
    mask, base, offset = (np.asarray(v).astype(np.int64)[..., None] for v in (mask, base, offset))
    positions = np.arange(32)
    distance = (positions - base) * np.where(offset < 0, -1, 1)
    bits = (mask >> positions & 1 != 0) & (distance >= 0)
    # The number of bits up to each, in the direction of the search.
    upto = (bits[..., None, :] & (distance[..., None, :] <= distance[..., None])).sum(axis=-1)
    nth_bit = bits & np.where(offset == 0, distance == 0, upto == np.abs(offset))
    return np.where(nth_bit.any(axis=-1), nth_bit.argmax(axis=-1), 0xFFFFFFFF).astype(np.uint32)


_SIGNS = {"add": "+", "sub": "-"}
_PACKED = {"u16x2": "u2", "s16x2": "i2"}  # the dtype of their elements


# ---- arithmetic


def _arithmetic(*opcodes: str, unit: str = "integer") -> Callable[[TypedEmitter], TypedEmitter]:
    """Registers the integer forms of opcodes; their float forms are those of `floats`."""

    def register(emitter: TypedEmitter) -> TypedEmitter:
        def emit(g: Generator, ins: Instruction) -> None:
            kind = g.mods.take(*_PACKED) or g.mods.type()
            (emit_float if is_float(kind) else emitter)(g, ins, kind)

        instruction(*opcodes, unit=unit)(emit)
        return emitter

    return register


def neutral(g: Generator, ins: Instruction, kind: str) -> str:
    """The dtype for operations whose bits do not depend on signedness."""
    return "b1" if kind == "pred" else g.integer(ins.operands[0], TYPE_BYTES[kind])


def _packed_binary(g: Generator, ins: Instruction, kind: str, expression: str) -> None:
    a, b = (g.read(o, "u4") for o in ins.operands[1:3])
    value = f"on_parts({_PACKED[kind]}, lambda a, b: {expression}, {a}, {b})"
    g.write(ins.operands[0], value, "u4")


@_arithmetic("add", "sub", unit="float")
def _add(g: Generator, ins: Instruction, kind: str) -> None:
    sign = _SIGNS[ins.op]
    if kind in _PACKED:
        _packed_binary(g, ins, kind, f"a {sign} b")
        return
    if "cc" in g.mods.left:
        _add_carried(g, ins, kind)
        return
    if g.mods.take("sat"):
        a, b = (g.read(o, "i4") for o in ins.operands[1:])
        g.write(ins.operands[0], f"saturating_add({a}, {b}, {sign}1)", "i4")
        return
    dtype = neutral(g, ins, kind)
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    g.write(ins.operands[0], f"{a} {sign} {b}", dtype)


@_arithmetic("addc", "subc")
def _add_carried(g: Generator, ins: Instruction, kind: str) -> None:
    dtype = f"u{TYPE_BYTES[kind]}"
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    _write_carried(g, ins, a, b, dtype)


def _write_carried(g: Generator, ins: Instruction, a: str, b: str, dtype: str) -> None:
    """Writes ``a + b`` or ``a - b``: addc, subc and madc read the carry flag, .cc writes it."""
    slot = len(g.program.registers)
    subtracts = ins.op.startswith("sub")
    carry = g.current(slot) if ins.op.endswith("c") else g.literal(subtracts, "u4")
    function = "subtract_carry" if subtracts else "add_carry"
    both = g.let(f"{function}({a}, {b}, {carry})")
    g.write(ins.operands[0], f"{both}[0]", dtype)
    if g.mods.take("cc"):
        value = f"where({g.guard}, {both}[1], {g.current(slot)})" if g.guard else f"{both}[1]"
        g.names[slot] = g.let(value)


def _product(g: Generator, ins: Instruction, kind: str) -> tuple[str, str]:
    """The product of an integer mul or mad as an expression, and its dtype."""
    form = g.mods.take("lo", "hi", "wide")
    dtype = DTYPE[kind]
    if ins.op in ("mul24", "mad24"):
        eight, wide = g.literal(8, dtype), f"{dtype[0]}8"
        a, b = (f"({g.read(o, dtype)} << {eight} >> {eight})" for o in ins.operands[1:3])
        above = g.literal(16 if form == "hi" else 0, wide)
        return f"({a}.astype({wide}) * {b} >> {above}).astype({dtype})", dtype
    if form == "wide":
        wide = f"{dtype[0]}{2 * TYPE_BYTES[kind]}"
        a, b = (f"{g.read(o, dtype)}.astype({wide})" for o in ins.operands[1:3])
        return f"({a} * {b})", wide
    if form != "hi":
        dtype = neutral(g, ins, kind)
    a, b = (g.read(o, dtype) for o in ins.operands[1:3])
    return (f"multiply_high({a}, {b})" if form == "hi" else f"({a} * {b})"), dtype


@_arithmetic("mul", unit="float")
@_arithmetic("mul24")
def _multiply(g: Generator, ins: Instruction, kind: str) -> None:
    value, dtype = _product(g, ins, kind)
    g.write(ins.operands[0], value, dtype)


@_arithmetic("mad", "fma", unit="float")
@_arithmetic("mad24")
def _multiply_add(g: Generator, ins: Instruction, kind: str) -> None:
    if "cc" in g.mods.left:
        _multiply_add_carried(g, ins, kind)
        return
    saturates = g.mods.take("sat")
    value, dtype = _product(g, ins, kind)
    if saturates:
        g.refuse_if("hi" not in ins.mods or kind != "s32", "saturation of this mad")
        c = g.read(ins.operands[3], "i4")
        g.write(ins.operands[0], f"saturating_add({value}, {c}, 1)", "i4")
        return
    g.write(ins.operands[0], f"{value} + {g.read(ins.operands[3], dtype)}", dtype)


@_arithmetic("madc")
def _multiply_add_carried(g: Generator, ins: Instruction, kind: str) -> None:
    value, dtype = _product(g, ins, kind)
    unsigned = f"u{dtype[1:]}"
    _write_carried(g, ins, f"{value}.view({unsigned})", g.read(ins.operands[3], unsigned), unsigned)


for _opcode, _unit, _text in (
    ("div", "special", "divide({a:T}, {b:T})"),
    ("abs", "compare", "np.abs({a:T})"),
    ("neg", "compare", "-{a:T}"),
):
    _arithmetic(_opcode, unit=_unit)(expression_of("T", _text))


@_arithmetic("min", "max", unit="compare")
def _minimum(g: Generator, ins: Instruction, kind: str) -> None:
    function = f"np.{ins.op}imum"
    g.refuse_if("relu" in ins.mods and kind[0] != "s", "relu of this type")
    if kind in _PACKED:
        value = f"{function}(a, b)"
        value = f"np.maximum({value}, i2.type(0))" if g.mods.take("relu") else value
        _packed_binary(g, ins, kind, value)
        return
    dtype = DTYPE[kind]
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    value = f"{function}({a}, {b})"
    if g.mods.take("relu"):
        value = f"np.maximum({value}, {g.literal(0, dtype)})"
    g.write(ins.operands[0], value, dtype)


@instruction("dp2a", "dp4a", unit="integer")
def emit_dot(g: Generator, ins: Instruction) -> None:
    halves = ins.op == "dp2a"
    first = 2 if halves and g.one_of("lo", "hi") == "hi" else 0
    b_sign, a_sign = (g.mods.type()[0].replace("s", "i") for _ in range(2))
    a, b = (g.read(o, "u4") for o in ins.operands[1:3])
    c = g.read(ins.operands[3], "i4" if "i" in (a_sign, b_sign) else "u4")
    value = f"dot({a}, {b}, {c}, {a_sign}{2 if halves else 1}, {b_sign}1, {first})"
    g.write(ins.operands[0], value, "u4")


@instruction("vabsdiff4", unit="integer")
def emit_byte_differences(g: Generator, ins: Instruction) -> None:
    """vabsdiff4 of unsigned bytes; with .add their sum, added to the last operand."""
    a, b, c = (g.read(o, DTYPE[g.mods.take("u32")]) for o in ins.operands[1:])
    value = f"on_parts(u1, lambda x, y: np.maximum(x, y) - np.minimum(x, y), {a}, {b})"
    if g.mods.take("add"):
        value = f"dot({value}, {g.literal(0x01010101, 'u4')}, {c}, u1, u1, 0)"
    g.write(ins.operands[0], value, "u4")


# ---- bits


@instruction("shl", "shr", unit="integer")
def emit_shift(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    g.refuse_if(is_float(kind), "a shift of this type")
    size = TYPE_BYTES[kind]
    count = as_immediate(ins.operands[2])
    left = ins.op == "shl"
    if count is not None and 0 <= count < 8 * size:
        dtype = g.integer(ins.operands[0], size) if left else DTYPE[kind]
        value, amount = g.read(ins.operands[1], dtype), g.literal(count, dtype)
        g.write(ins.operands[0], f"{value} {'<<' if left else '>>'} {amount}", dtype)
        return
    dtype = f"u{size}" if left else DTYPE[kind]
    value, amount = g.read(ins.operands[1], dtype), g.read(ins.operands[2], "u4")
    function = "shift_left" if left else "shift_right"
    g.write(ins.operands[0], f"{function}({value}, {amount})", dtype)


_LOGIC3 = {
    0x80: "{a} & {b} & {c}",
    0xFE: "{a} | {b} | {c}",
    0x96: "{a} ^ {b} ^ {c}",
    0xC0: "{a} & {b}",
    0xFC: "{a} | {b}",
    0x3C: "{a} ^ {b}",
    0xF8: "{a} | ({b} & {c})",
    0xEA: "({a} & {b}) | {c}",
    0xE2: "({b} & {c}) | (~{b} & {a})",
    0xCA: "({a} & {b}) | (~{a} & {c})",
    0x78: "{a} ^ ({b} & {c})",
    0x6A: "({a} & {b}) ^ {c}",
}


@instruction("lop3", unit="integer")
def emit_logic3(g: Generator, ins: Instruction) -> None:
    g.mods.type()
    table = g.immediate(ins.operands[4], "a table")
    combine = g.mods.take("or", "and")
    a, b, c = (g.read(o, "u4") for o in ins.operands[1:4])
    text = _LOGIC3.get(table, "logic3({a}, {b}, {c}, {table})")
    text = text.format(a=a, b=b, c=c, table=table)
    if not combine:
        g.write(ins.operands[0], text, "u4")
        return
    to, some = split_pair(ins.operands[0])
    value, other = g.let(f"np.asarray({text})"), g.read(ins.operands[5], "b1")
    holds = g.let(f"({value} != 0) {LOGIC[combine]} {other}")
    g.write(to, value, "u4")
    g.write(some, holds, "b1")


@instruction("prmt", unit="integer")
def emit_permute(g: Generator, ins: Instruction) -> None:
    g.mods.type()
    mode = g.mods.take("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    a, b = (g.read(o, "u4") for o in ins.operands[1:3])
    selector = as_immediate(ins.operands[3])
    low, sixteen = g.literal(0xFFFF, "u4"), g.literal(16, "u4")
    if mode == "" and selector == 0x5410:
        text = f"({a} & {low}) | ({b} << {sixteen})"
    elif mode == "" and selector == 0x7632:
        text = f"({a} >> {sixteen}) | ({b} & ~{low})"
    else:
        text = f"permute_bytes({a}, {b}, {g.read(ins.operands[3], 'u4')}, {mode!r})"
    g.write(ins.operands[0], text, "u4")


@instruction("bfe", unit="integer")
def emit_extract(g: Generator, ins: Instruction) -> None:
    dtype = DTYPE[g.mods.type()]
    a = g.read(ins.operands[1], dtype)
    start, length = (as_immediate(o) for o in ins.operands[2:])
    bits = 8 * int(dtype[1:])
    if dtype[0] == "u" and start is not None and length is not None and 0 <= start < bits:
        mask = g.literal((1 << min(length, bits)) - 1, dtype)
        g.write(ins.operands[0], f"({a} >> {g.literal(start, dtype)}) & {mask}", dtype)
        return
    b, c = (g.read(o, "u4") for o in ins.operands[2:])
    g.write(ins.operands[0], f"extract_bits({a}, {b}, {c})", dtype)


_DIFFERENCE = "(np.maximum({a:T}, {b:T}) - np.minimum({a:T}, {b:T}))"
for _opcode, _result, _text in (
    ("sad", "T", f"{{c:T}} + {_DIFFERENCE}"),
    ("rem", "T", "remainder({a:T}, {b:T})"),
    ("and", "N", "{a:N} & {b:N}"),
    ("or", "N", "{a:N} | {b:N}"),
    ("xor", "N", "{a:N} ^ {b:N}"),
    ("not", "N", "~{a:N}"),
    ("cnot", "N", "({a:N} == 0).astype({a:N}.dtype)"),
    ("shf", "u4", "funnel({a:u4}, {b:u4}, {c:u4}, {l/r}, {wrap/clamp})"),
    ("bfi", "U", "insert_bits({a:U}, {b:U}, {c:u4}, {d:u4})"),
    ("bmsk", "T", "make_mask({a:T}, {b:u4}, {wrap/clamp})"),
    ("szext", "T", "extend_sign({a:T}, {b:u4}, {wrap/clamp})"),
    ("popc", "u4", "np.bitwise_count({a:U}).astype(u4)"),
    ("clz", "u4", "leading_zeros({a:U})"),
    ("brev", "U", "reverse_bits({a:U})"),
    ("bfind", "u4", "find_bit({a:T}, {shiftamt})"),
    ("fns", "u4", "find_nth({a:u4}, {b:u4}, {c:i4})"),
):
    formula(_opcode, "integer", _result, _text)
