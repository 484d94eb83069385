"""Emitters of mbarrier instructions."""

from __future__ import annotations

from flashgen.emulator.isa.emitters.memory import address
from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits
from flashgen.emulator.ptx.syntax import Instruction, Mem, Operand, Reg, Sym
from flashgen.emulator.state.memory import SHARED_WINDOW

_ACTIONS = ("arrive", "arrive_drop", "test_wait", "try_wait", "init", "inval")
_BYTES = ("expect_tx", "complete_tx")


def place_of(g: Generator, operand: Operand) -> str:
    """The address of an mbarrier in the block's shared memory; its state space is optional."""
    if g.mods.take("shared", "shared::cta", "shared::cluster"):
        return address(g, operand, "shared")
    if isinstance(operand, Mem) and isinstance(operand.base, Sym):
        return address(g, operand, "shared")
    return f"({address(g, operand, '')} - {SHARED_WINDOW})"


@emits("mbarrier")
def mbarrier(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    action = mods.take(*_ACTIONS) or mods.take(*_BYTES)
    if not action or not mods.take("b64"):
        raise g.unknown()
    order = mods.take("release", "acquire", "relaxed")
    mods.take("cta", "cluster")
    operands = list(ins.operands)
    if action in ("init", "inval", *_BYTES):
        where = place_of(g, operands[0])
        number = g.read(operands[1], "u4") if len(operands) > 1 else ""
        g.require_defined()
        if action == "init":
            g.emit(f"E.mbarriers.init(C, {where}, {number}, {g.lanes()}, {g.pc})")
        elif action == "inval":
            g.emit(f"E.mbarriers.inval(C, {where}, {g.lanes()}, {g.pc})")
        else:
            sign = "-" if action == "complete_tx" else ""
            size = f"{sign}{number}.astype(i8)"
            g.emit(f"E.mbarriers.expect(C, {where}, {size}, {g.lanes()}, {g.pc})")
    elif action in ("test_wait", "try_wait"):
        _wait(g, operands, action == "try_wait")
    else:
        _arrive(g, operands, action == "arrive_drop", order != "relaxed")


def _wait(g: Generator, operands: list[Operand], blocks: bool) -> None:
    parity = bool(g.mods.take("parity"))
    where = place_of(g, operands[1])
    phase = g.read(operands[2], "u4" if parity else "u8")
    g.require_defined()
    done = g.let(f"E.mbarriers.wait(C, {where}, {phase}, {g.lanes()}, {g.pc}, {parity}, {blocks})")
    if blocks:
        g.emit(f"if {done} is None: return True")
    g.write(operands[0], done, "b1")


def _arrive(g: Generator, operands: list[Operand], drop: bool, release: bool) -> None:
    mods = g.mods
    expects = mods.take("expect_tx")
    complete = not mods.take("noComplete")
    to = None if isinstance(operands[0], Mem) else operands.pop(0)
    where = place_of(g, operands[0])
    given = g.read(operands[1], "u4") if len(operands) > 1 else ""
    count = given if given and not expects else "1"
    g.require_defined()
    modifiers = tuple(
        word
        for word, present in (
            ("relaxed", not release),
            ("drop", drop),
            ("noComplete", not complete),
        )
        if present
    )
    options = f", expects={given}" if expects else ""
    options += f", modifiers={modifiers}" if modifiers else ""
    call = f"E.mbarriers.arrive(C, {where}, {count}, {g.lanes()}, {g.pc}{options})"
    if isinstance(to, Reg):
        g.write(to, g.let(call), "u8")
    else:
        g.emit(call)
