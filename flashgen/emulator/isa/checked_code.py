"""The part of the code generator that writes what checkers need.

These are: which registers have been written, registers of wgmma in flight, the member masks of
warp-wide instructions, and what synchronises the lanes of a warp.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from flashgen.emulator.checks.wgmma_hazards import WgmmaHazards
from flashgen.emulator.ptx.program import PtxProgram
from flashgen.emulator.ptx.syntax import Instruction, Operand


class CheckedCode:
    """Base of `flashgen.emulator.isa.generator.Generator`, which documents the attributes."""

    program: PtxProgram
    hazards: WgmmaHazards
    check: bool
    guard: str
    pc: int
    ins: Instruction
    names: dict[int, str]
    namespace: dict[str, Any]
    defined: list[str]
    synchronised: bool

    @abstractmethod
    def emit(self, text: str) -> None: ...

    @abstractmethod
    def let(self, expression: str) -> str: ...

    @abstractmethod
    def current(self, index: int) -> str: ...

    @abstractmethod
    def read(self, operand: Operand, dtype: str) -> str: ...

    @abstractmethod
    def literal(self, value: int, dtype: str) -> str: ...

    @abstractmethod
    def lanes(self) -> str: ...

    # ---- definedness: which registers have been written, where some path may not write them

    def note_definedness(self, index: int) -> None:
        if self.check and index in self.program.tracked:
            self.defined.append(self.current(self.program.tracked[index]))

    def result_definedness(self, index: int) -> str | None:
        if not self.check or index not in self.program.tracked:
            return None
        parts = sorted(set(self.defined))
        return " & ".join(parts) if parts else self.literal(1, "b1")

    def set_definedness(self, index: int, value: str) -> None:
        slot = self.program.tracked[index]
        if self.guard:
            value = f"where({self.guard}, {value}, {self.current(slot)})"
        self.names[slot] = self.let(value)

    def require_defined(self) -> None:
        """Emits a check that the registers read so far by this instruction have been written.

        Called where their values leave the registers: addresses, stored values, branches.
        """
        for name in sorted(set(self.defined)):
            self.emit(f"E.require_defined(C, {name}, {self.lanes()}, {self.pc})")
        self.defined = []

    # ---- registers of wgmma, member masks, lanes

    def watch(self) -> None:
        """Emits checks of registers of wgmma that this instruction may access too early."""
        watch = self.hazards.watched.get(self.pc)
        if watch is None:
            return
        accumulators, fragments, marks = watch
        if accumulators or fragments:
            self.emit(
                f"E.wgmma.order.check_in_flight(C, {accumulators}, {fragments}, "
                f"{self.lanes()}, {self.pc})"
            )
        if marks:
            self.emit(f"E.wgmma.order.note_writes(C, {marks}, {self.lanes()}, {self.pc})")

    def membermask(self) -> str:
        """The member mask of a .sync instruction as an expression; 'None' means all lanes."""
        ins = self.ins
        masked = ("shfl", "vote", "match", "redux", "bar", "barrier", "elect")
        if ins.op not in masked or "sync" not in ins.mods:
            return "None"
        constant = self.program.constant_of(ins.operands[-1])
        if constant is not None:
            return self.literal(constant, "u4")
        return self.read(ins.operands[-1], "u4")
