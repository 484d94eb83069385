"""The table of emitters, the functions that generated code may call, and helpers of emitters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.emulator.ptx import TYPE_BYTES, Instruction, Operand, Pair, Sink, Vec

if TYPE_CHECKING:
    from flashgen.emulator.codegen import Generator

Emitter = Callable[["Generator", Instruction], None]
EMITTERS: dict[str, Emitter] = {}
RUNTIME: dict[str, Any] = {
    code: np.dtype(code)
    for code in ("b1", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c16")
}
RUNTIME["where"] = np.where
RUNTIME["np"] = np


def emits(*opcodes: str) -> Callable[[Emitter], Emitter]:
    """Registers the emitter of some opcodes."""

    def register(emitter: Emitter) -> Emitter:
        for opcode in opcodes:
            EMITTERS[opcode] = emitter
        return emitter

    return register


def runtime(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function callable by its name from generated code."""
    RUNTIME[function.__name__] = function
    return function


class Modifiers:
    """The modifiers of an instruction; each must be taken by the emitter, or it is unknown."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.left = list(words)

    def take(self, *words: str) -> str:
        """The first of ``words`` that is present, removed; else ''."""
        for word in words:
            if word in self.left:
                self.left.remove(word)
                return word
        return ""

    def type(self) -> str:
        """The last type modifier, removed; else ''."""
        for word in reversed(self.left):
            if word in TYPE_BYTES:
                # From the back: cvt.f32.f32 has the same word twice.
                place = len(self.left) - 1 - self.left[::-1].index(word)
                del self.left[place]
                return word
        return ""


def items_of(operand: Operand) -> tuple[Operand, ...]:
    """The items of a vector operand, or the operand alone."""
    return operand.items if isinstance(operand, Vec) else (operand,)


def split_pair(operand: Operand) -> tuple[Operand, Operand]:
    """``d|p`` as two operands; the second is a sink when there is none."""
    if isinstance(operand, Pair):
        return operand.first, operand.second
    return operand, Sink()
