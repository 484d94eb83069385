"""Chooses the numpy dtype that holds each register.

A .b32 register of PTX may hold integers or floats. Any choice is correct, because instructions view
the bits as the type they need; choosing the most frequent type makes such views rare.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator

from ptx_emulator.ptx.instructions import registers_in
from ptx_emulator.ptx.syntax import TYPE_BYTES, Instruction, Mem, Not, Operand, Pair

# PTX type -> dtype code. Untyped bits (b8 to b64) map to unsigned integers.
DTYPE = {
    **{f"{kind}{b}": f"{of}{b // 8}" for kind, of in ("uu", "bu", "si") for b in (8, 16, 32, 64)},
    **{"f16": "f2", "bf16": "u2", "tf32": "f4", "f32": "f4", "f64": "f8"},
    **{"f16x2": "u4", "bf16x2": "u4", "f32x2": "u8", "pred": "b1", "b128": "c16"},
}
_FIXED = {"f32", "f64", "f16", "pred", "f16x2", "bf16x2", "bf16", "b128"}
_MOVES = {"mov", "selp", "shfl"}


def register_dtypes(code: list[Instruction], kinds: list[str]) -> list[str]:
    """The dtype code of every register, by the majority of its uses.

    Args:
        code: all instructions.
        kinds: the PTX type of each register.
    """
    parent = list(range(len(kinds)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    # Of the registers that have a choice; others are the most, and need no votes.
    sizes = [0 if kind in _FIXED else TYPE_BYTES[kind] for kind in kinds]
    votes: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for ins in code:
        types = _types(ins.mods)
        if not types:
            continue
        if ins.op in _MOVES:
            size = TYPE_BYTES[types[-1]]
            regs = [r for o in ins.operands for r in _plain(o) if sizes[r] == size]
            for other in regs[1:]:
                parent[root(other)] = root(regs[0])
            if regs and any(kinds[reg] == "f32" for o in ins.operands[:1] for reg in _plain(o)[:1]):
                for reg in regs:
                    votes[reg]["f4"] += 1
        else:
            for operand, kind in _votes(ins, types):
                size = TYPE_BYTES.get(kind, -1)
                for reg in _plain(operand) if kind[0] != "b" else ():
                    if sizes[reg] == size:
                        votes[reg][DTYPE[kind]] += 1
    total: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for index, counter in votes.items():
        total[root(index)].update(counter)
    dtypes = []
    for register, kind in enumerate(kinds):
        if kind in _FIXED:
            dtypes.append(DTYPE[kind])
            continue
        width = str(TYPE_BYTES[kind])
        counts = total[root(register)].items()
        polled = [(count, dtype) for dtype, count in counts if dtype[1:] == width]
        dtypes.append(max(polled)[1] if polled else "u" + width)
    dtypes.append("u4")  # the carry flag
    return dtypes


@functools.cache
def _types(mods: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(m for m in mods if m in TYPE_BYTES and m != "pred")


def _votes(ins: Instruction, types: tuple[str, ...]) -> Iterator[tuple[Operand, str]]:
    """The types for which an instruction that is no move votes, with the operands."""
    first, last, others = types[0], types[-1], ins.operands[1:]
    if "wide" in ins.mods:
        last, first, others = first, first[0] + str(16 * TYPE_BYTES[first]), others[:2]
    elif ins.op in ("mma", "wgmma"):
        others = others[2:] if ins.op == "mma" else []
    elif ins.op != "cvt":
        first = last
    for index, operand in enumerate((*ins.operands[:1], *others)):
        yield operand, last if index else first


def _plain(operand: Operand) -> list[int]:
    """The registers of an operand that hold values of the instruction's types."""
    operand = operand.first if isinstance(operand, Pair) else operand
    return [] if isinstance(operand, (Mem, Not)) else registers_in(operand)
