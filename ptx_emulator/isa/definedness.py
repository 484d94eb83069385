"""Which bits of a register have been written: those that are set in its marks.

Compilers copy the padding of structures and pack it with other bytes, and set the bit fields of a
word one by one. An instruction that moves bits therefore moves their marks, and the result of any
other one is undefined if a bit of a source is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.ptx.syntax import TYPE_BYTES, Imm, Instruction, Operand, Reg, Vec
from ptx_emulator.state.wave import ALL_BITS

if TYPE_CHECKING:
    from ptx_emulator.isa.generator import Generator

ALL = int(ALL_BITS)
_NONE = np.uint64(0)
# Bit n of their result depends on bit n of each source alone.
_BITWISE = ("ld", "ldu", "mov", "selp", "shfl", "not", "xor")
# The truth tables of these as lop3 has them, with a third operand of zeros.
_TABLES = {"and": 0xC0, "or": 0xFC}


def whole(marks: Any) -> Any:
    """All bits where all have been written, else none."""
    return np.where(marks == ALL_BITS, marks, _NONE)


def as_marks(written: Any) -> Any:
    """All bits where ``written`` holds, else none."""
    return np.where(written, ALL_BITS, _NONE)


def above(size: int) -> int:
    """The bits that a register of ``size`` bytes does not have, which count as written."""
    return ALL & -(1 << 8 * min(size, 8))


def bytes_of_marks(marks: Any, size: int) -> Any:
    """The marks of a register of ``size`` bytes, byte by byte; the two halves of 16 share marks."""
    marked = np.asarray(marks, np.uint64)[..., None].view(np.uint8)
    parts = (marked, marked) if size > 8 else (marked[..., :size],)
    return np.concatenate(parts, axis=-1)


def shifted_marks(marks: Any, bits: int, size: int) -> Any:
    """The marks of a register that is shifted to the left, or by a negative number to the right."""
    by = np.uint64(min(abs(bits), 63))
    if abs(bits) > 63:
        return ALL_BITS
    new = ~(ALL_BITS << by if bits >= 0 else ALL_BITS >> by)
    marks = marks | np.uint64(above(size))
    return (marks << by if bits >= 0 else marks >> by) | new | np.uint64(above(size))


def extended_marks(marks: Any, size: int, wide: int) -> Any:
    """The marks of a register of ``wide`` bytes to which an integer of ``size`` is extended by its
    sign."""
    extension = np.uint64(above(size))
    sign = marks >> np.uint64(8 * size - 1) & np.uint64(1) != 0
    return np.where(sign, marks | extension, (marks & ~extension) | np.uint64(above(wide)))


def picked_marks(low: Any, high: Any, selector: int) -> Any:
    """The marks of what prmt picks from two registers of 32 bits."""
    both = (low & np.uint64(0xFFFFFFFF)) | high << np.uint64(32)
    picked = np.uint64(above(4))
    for number in range(4):
        nibble = selector >> 4 * number & 15
        byte = both >> np.uint64(8 * (nibble & 7)) & np.uint64(255)
        if nibble & 8:  # the sign of the byte, repeated
            byte = (byte >> np.uint64(7)) * np.uint64(255)
        picked = picked | byte << np.uint64(8 * number)
    return picked


def inserted_marks(field: Any, marks: Any, start: int, length: int, size: int) -> Any:
    """The marks of a register of ``size`` bytes into which bfi inserts a field."""
    within = np.uint64((1 << (length & 255)) - 1 << start & ALL)
    return (field << np.uint64(start) & within) | (marks & ~within) | np.uint64(above(size))


def field_marks(marks: Any, start: int, length: int, size: int, signed: bool) -> Any:
    """The marks of a field of a register of ``size`` bytes, which is moved to bit 0.

    It is extended by zeros, or by its sign if it is ``signed``.
    """
    bits = 8 * size
    length = min(length, bits)
    if not signed:
        above_field = np.uint64(ALL & -(1 << length))
        return (shifted_marks(marks, -start, size) | above_field) if length else ALL_BITS
    if not length:
        return ALL_BITS
    last = min(start + length, bits) - 1
    sign = np.where(marks >> np.uint64(last) & np.uint64(1) != 0, ALL_BITS, _NONE)
    inside = np.uint64((1 << max(last - start, 0)) - 1)
    field = (marks | np.uint64(above(size))) >> np.uint64(min(start, 63))
    return (field & inside) | (sign & ~inside) | np.uint64(above(size))


def funnel_marks(low: Any, high: Any, by: int) -> Any:
    """The marks of bits ``by`` to ``by`` + 31 of two registers of 32 bits."""
    both = (low & np.uint64(0xFFFFFFFF)) | high << np.uint64(32)
    return both >> np.uint64(by) | np.uint64(above(4))


def marks_of_result(g: Generator, ins: Instruction, to: int) -> str:
    """An expression for the marks of register ``to``, after the sources have been read."""
    common = " & ".join(sorted(set(g.defined))) or g.literal(ALL, "u8")
    kinds = [word for word in ins.mods if word in TYPE_BYTES]
    size = TYPE_BYTES[kinds[-1]] if kinds else 0
    if ins.op == "mov" and any(isinstance(o, Vec) for o in ins.operands[:2]):
        return _moved(g, ins, to, size) if size <= 8 else f"whole({common})"
    if ins.op in _BITWISE:
        return common
    if ins.op in _TABLES:
        return _logic(g, [*ins.operands[1:3], Imm(0)], _TABLES[ins.op], size)
    if ins.op == "lop3":
        if {"or", "and"}.intersection(ins.mods):  # of all bits a predicate is made
            return f"whole({common})"
        return _logic(g, ins.operands[1:4], g.program.constant_of(ins.operands[4]) or 0, 4)
    integers = len(kinds) == 2 and {kind[0] for kind in kinds} <= {"u", "s"}
    if ins.op == "cvt" and integers and "sat" not in ins.mods:
        narrow = min(kinds, key=TYPE_BYTES.__getitem__)
        if narrow[0] == "u":
            return f"({common}) | {g.literal(above(TYPE_BYTES[narrow]), 'u8')}"
        return f"extended_marks({common}, {TYPE_BYTES[narrow]}, {g.program.dtype[to][1:]})"
    count = g.program.constant_of(ins.operands[-1]) if len(ins.operands) > 2 else None
    if ins.op in ("shl", "shr") and count is not None:
        if kinds[-1][0] == "s":
            return f"field_marks({_marks(g, ins.operands[1])}, {count}, {8 * size}, {size}, True)"
        bits = count if ins.op == "shl" else -count
        return f"shifted_marks({_marks(g, ins.operands[1])}, {bits}, {size})"
    if ins.op == "shf" and count is not None:
        by = count & 31 if "wrap" in ins.mods else min(count, 32)
        low, high = (_marks(g, o) for o in ins.operands[1:3])
        return f"funnel_marks({low}, {high}, {by if 'r' in ins.mods else 32 - by})"
    if ins.op == "prmt" and count is not None and ins.mods == ("b32",):
        return f"picked_marks({_marks(g, ins.operands[1])}, {_marks(g, ins.operands[2])}, {count})"
    if ins.op in ("bfi", "bfe"):
        start, length = (g.program.constant_of(o) for o in ins.operands[-2:])
        if ins.op == "bfe" and start is not None and length is not None:
            field = f"{_marks(g, ins.operands[1])}, {start & 255}, {length & 255}"
            return f"field_marks({field}, {size}, {kinds[-1][0] == 's'})"
        if start is not None and length is not None and start < 64:
            field, into = (_marks(g, o) for o in ins.operands[1:3])
            return f"inserted_marks({field}, {into}, {start}, {length}, {size})"
    return f"whole({common})"


def _marks(g: Generator, operand: Operand) -> str:
    slot = g.program.tracked.get(operand.index) if isinstance(operand, Reg) else None
    return g.literal(ALL, "u8") if slot is None else g.current(slot)


def _logic(g: Generator, operands: Sequence[Operand], table: int, size: int) -> str:
    """The marks of a function of three operands, bit by bit, with a truth table as lop3 has it.

    A bit depends on an operand if that operand alone may change it, whatever the registers hold.
    """
    constants = [_constant(g, operand, size) for operand in operands]
    parts = []
    for number, operand in enumerate(operands):
        if constants[number] is not None:
            continue
        depends = 0
        for inputs in range(8):
            if (table >> inputs ^ table >> (inputs ^ 4 >> number)) & 1:
                possible = ALL
                for other, constant in enumerate(constants):
                    if constant is not None and other != number:
                        possible &= constant if inputs & 4 >> other else ~constant
                depends |= possible
        parts.append(f"({_marks(g, operand)} | {g.literal(~depends & ALL, 'u8')})")
    return " & ".join(parts) or g.literal(ALL, "u8")


def _constant(g: Generator, operand: Operand, size: int) -> int | None:
    """The bits of a constant operand of ``size`` bytes, else None."""
    if isinstance(operand, Imm):
        return operand.value & ALL
    return g.program.constant_of(operand) if size <= 4 else None


def _moved(g: Generator, ins: Instruction, to: int, size: int) -> str:
    """mov between a register and the registers of its parts."""
    target, source = ins.operands
    if isinstance(source, Vec):
        part = size // len(source.items)
        parts = (
            f"shifted_marks({_marks(g, item)} | {g.literal(above(part), 'u8')}, "
            f"{8 * part * number}, {size})"
            for number, item in enumerate(source.items)
        )
        return " & ".join(parts)
    assert isinstance(target, Vec)
    part = size // len(target.items)
    number = next(i for i, o in enumerate(target.items) if isinstance(o, Reg) and o.index == to)
    moved = f"shifted_marks({_marks(g, source)}, {-8 * part * number}, {size})"
    return f"{moved} | {g.literal(above(part), 'u8')}"
