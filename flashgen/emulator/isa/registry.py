"""Registers opcodes with the emitters that write their code; helpers of emitters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashgen.emulator.ptx.instructions import OPCODES, Opcode
from flashgen.emulator.ptx.syntax import TYPE_BYTES, Instruction, Operand, Pair, Sink, Vec

Emitter = Callable[[Any, Instruction], None]
"""Writes the code of an instruction: (generator, instruction)."""
# What generated code finds by name: numpy, dtypes, and the functions of the modules of `isa`.
RUNTIME: dict[str, Any] = {"np": np, "where": np.where}
for _code in ["b1", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c16"]:
    RUNTIME[_code] = np.dtype(_code)


def instruction(*opcodes: str, unit: Any, **facts: Any) -> Callable[[Emitter], Emitter]:
    """Registers the emitter of some opcodes, and their facts: see `Opcode`."""

    def register(emitter: Emitter) -> Emitter:
        opcode = Opcode(emitter, unit, **facts)
        OPCODES.update(dict.fromkeys(opcodes, opcode))
        return emitter

    return register


class Modifiers:
    """The modifiers of an instruction that its emitter has not consumed yet.

    Modifiers that are left when the emitter returns make the instruction unsupported.
    """

    def __init__(self, words: tuple[str, ...]) -> None:
        self.left = list(words)

    def take(self, *words: str) -> str:
        """Removes and returns the first of ``words`` that is present; '' if there is none."""
        for word in words:
            if word in self.left:
                self.left.remove(word)
                return word
        return ""

    def type(self) -> str:
        """Removes and returns the last type modifier; '' if there is none."""
        for place in reversed(range(len(self.left))):
            if self.left[place] in TYPE_BYTES:
                return self.left.pop(place)
        return ""


def items_of(operand: Operand) -> tuple[Operand, ...]:
    """The items of a vector operand, or the operand alone."""
    return operand.items if isinstance(operand, Vec) else (operand,)


def split_pair(operand: Operand) -> tuple[Operand, Operand]:
    """``d|p`` as two operands; the second is a `Sink` if there is only one."""
    if isinstance(operand, Pair):
        return operand.first, operand.second
    return operand, Sink()


def fragment_items(g: Any, operand: Operand, count: int) -> tuple[Operand, ...]:
    """The registers of a fragment of a matrix, which has ``count`` of them."""
    items = items_of(operand)
    if len(items) != count:
        raise g.unknown("a fragment of this size")
    return items
