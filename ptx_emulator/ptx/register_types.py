"""Chooses the numpy dtype that holds each register.

A .b32 register of PTX may hold integers or floats. Any choice is correct, because instructions view
the bits as the type they need; choosing the most frequent type makes such views rare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

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

    votes: list[Counter[str]] = [Counter() for _ in kinds]

    def vote(operand: Operand, kind: str) -> None:
        for reg in _plain(operand):
            if TYPE_BYTES[kinds[reg]] == TYPE_BYTES.get(kind) and kind[0] != "b":
                votes[reg][DTYPE[kind]] += 1

    for ins in code:
        types = [m for m in ins.mods if m in TYPE_BYTES and m != "pred"]
        if not types:
            continue
        if ins.op in _MOVES:
            regs = [r for o in ins.operands for r in _plain(o)]
            size = TYPE_BYTES[types[-1]]
            regs = [r for r in regs if kinds[r] not in _FIXED and TYPE_BYTES[kinds[r]] == size]
            for other in regs[1:]:
                parent[root(other)] = root(regs[0])
            if kinds[_plain(ins.operands[0])[0] if _plain(ins.operands[0]) else 0] == "f32":
                for reg in regs:
                    votes[reg]["f4"] += 1
        else:
            _vote(ins, types, vote)
    total: dict[int, Counter[str]] = {}
    for index, counter in enumerate(votes):
        total.setdefault(root(index), Counter()).update(counter)
    found = []
    for place, kind in enumerate(kinds):
        width = str(TYPE_BYTES[kind])
        polled = [(count, code) for code, count in total[root(place)].items() if code[1:] == width]
        best = max(polled)[1] if polled else "u" + width
        found.append(DTYPE[kind] if kind in _FIXED else best)
    found.append("u4")  # the carry flag
    return found


def _vote(ins: Instruction, types: list[str], vote: Callable[[Operand, str], None]) -> None:
    """Votes for the operands of an instruction that is no move."""
    first, last, others = types[0], types[-1], ins.operands[1:]
    if "wide" in ins.mods:
        last, first, others = first, first[0] + str(16 * TYPE_BYTES[first]), others[:2]
    elif ins.op in ("mma", "wgmma"):
        others = others[2:] if ins.op == "mma" else []
    elif ins.op != "cvt":
        first = last
    for place, operand in enumerate((*ins.operands[:1], *others)):
        vote(operand, last if place else first)


def _plain(operand: Operand) -> list[int]:
    """The registers of an operand that hold values of the instruction's types."""
    operand = operand.first if isinstance(operand, Pair) else operand
    return [] if isinstance(operand, (Mem, Not)) else registers_in(operand)
