"""Emitters of cp.async; bulk copies go to `bulk_copies`."""

from __future__ import annotations

from flashgen.emulator.isa.emitters.bulk_copies import bulk
from flashgen.emulator.isa.emitters.memory import (
    address,
    take_hints,
)
from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits
from flashgen.emulator.ptx.instructions import as_immediate
from flashgen.emulator.ptx.syntax import Instruction, Operand, Reg


@emits("cp")
def copy(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    if "async" in mods.left and mods.take("bulk"):
        mods.take("async")
        bulk(g, ins)
        return
    if not mods.take("async") or "mbarrier" in mods.left:
        raise g.unknown("cp.async that an mbarrier waits for")
    if mods.take("commit_group"):
        g.emit(f"E.copies.commit(C, {g.lanes()})")
        return
    if mods.take("wait_all"):
        g.emit(f"E.copies.commit(C, {g.lanes()})")
        g.emit(f"E.copies.wait(C, None, {g.lanes()})")
        return
    if mods.take("wait_group"):
        count = as_immediate(ins.operands[0])
        if count is None:
            raise g.unknown("a computed number of groups")
        g.emit(f"E.copies.wait(C, {count}, {g.lanes()})")
        return
    small = mods.take("ca", "cg")
    if not small or not mods.take("shared", "shared::cta") or not mods.take("global"):
        raise g.unknown()
    policy = take_hints(g)
    operands = list(ins.operands)
    if policy:
        operands.pop()
    size = as_immediate(operands[2])
    if size not in ((16,) if small == "cg" else (4, 8, 16)):
        raise g.unknown("this copy size")
    to = address(g, operands[0], "shared")
    source = address(g, operands[1], "global")
    read = str(size)
    if len(operands) > 3:
        read = _source_bytes(g, operands[3], str(size))
    g.require_defined()
    g.emit(f"E.copies.issue(C, {to}, {source}, {g.lanes()}, {size}, {read}, {g.pc})")


def _source_bytes(g: Generator, operand: Operand, size: str) -> str:
    """The source size operand, or the predicate that ignores the source."""
    if isinstance(operand, Reg) and g.program.dtype[operand.index] == "b1":
        return f"where({g.read(operand, 'b1')}, 0, {size})"
    number = as_immediate(operand)
    return str(number) if number is not None else f"{g.read(operand, 'u4')}.astype(i8)"
