"""Which bits of a register have been written: those that are set in its marks.

Compilers copy the padding of structures and pack it with other bytes, and set the bit fields of a
word one by one. An instruction that moves bits therefore moves their marks, and the result of any
other one is undefined if a bit of a source is.
"""

from __future__ import annotations

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


def marks_of_result(g: Generator, ins: Instruction, to: int) -> str:
    """An expression for the marks of register ``to``, after the sources have been read."""
    common = " & ".join(sorted(set(g.defined))) or g.literal(ALL, "u8")
    kinds = [word for word in ins.mods if word in TYPE_BYTES]
    size = TYPE_BYTES[kinds[-1]] if kinds else 0
    if ins.op == "mov" and any(isinstance(o, Vec) for o in ins.operands[:2]):
        return _moved(g, ins, to, size) if size <= 8 else f"whole({common})"
    if ins.op in _BITWISE:
        return common
    if ins.op in ("and", "or"):
        a, b = ins.operands[1:3]
        return (
            f"({_marks(g, a)} | {_known(g, b, ins.op)}) & ({_marks(g, b)} | {_known(g, a, ins.op)})"
        )
    integers = len(kinds) == 2 and {kind[0] for kind in kinds} <= {"u", "s"}
    if ins.op == "cvt" and integers and "sat" not in ins.mods:
        narrow = min(kinds, key=TYPE_BYTES.__getitem__)
        if narrow[0] == "u":
            return f"({common}) | {g.literal(above(TYPE_BYTES[narrow]), 'u8')}"
        return f"extended_marks({common}, {TYPE_BYTES[narrow]}, {g.program.dtype[to][1:]})"
    count = g.program.constant_of(ins.operands[-1]) if len(ins.operands) > 2 else None
    if ins.op in ("shl", "shr") and count is not None and kinds[-1][0] != "s":
        bits = count if ins.op == "shl" else -count
        return f"shifted_marks({_marks(g, ins.operands[1])}, {bits}, {size})"
    if ins.op == "prmt" and count is not None and ins.mods == ("b32",):
        return f"picked_marks({_marks(g, ins.operands[1])}, {_marks(g, ins.operands[2])}, {count})"
    if ins.op == "bfi":
        start, length = (g.program.constant_of(o) for o in ins.operands[3:])
        if start is not None and length is not None and start < 64:
            field, into = (_marks(g, o) for o in ins.operands[1:3])
            return f"inserted_marks({field}, {into}, {start}, {length}, {size})"
    return f"whole({common})"


def _marks(g: Generator, operand: Operand) -> str:
    slot = g.program.tracked.get(operand.index) if isinstance(operand, Reg) else None
    return g.literal(ALL, "u8") if slot is None else g.current(slot)


def _known(g: Generator, operand: Operand, op: str) -> str:
    """The bits of a constant that decide the result of a logical operation; none of a register."""
    value = 0 if not isinstance(operand, Imm) else operand.value if op == "or" else ~operand.value
    return g.literal(value & ALL, "u8")


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
