"""Emitters of cp.async and of atomic operations."""

from __future__ import annotations

from flashgen.emulator import atomics  # noqa: F401  (registers the run-time functions)
from flashgen.emulator.codegen import Generator
from flashgen.emulator.dtypes import DTYPE
from flashgen.emulator.effects import as_immediate
from flashgen.emulator.emit_bulk import bulk
from flashgen.emulator.emit_memory import (
    FUNCTION,
    ORDERS,
    SCOPES,
    address,
    implied_space,
    space_of,
    take_hints,
    unpack,
)
from flashgen.emulator.ptx import Instruction, Operand, Reg
from flashgen.emulator.registry import emits, items_of

_ATOMIC = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


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
        g.say(f"E.copies.commit(C, {g.lanes()})")
        return
    if mods.take("wait_all"):
        g.say(f"E.copies.commit(C, {g.lanes()})")
        g.say(f"E.copies.wait(C, None, {g.lanes()})")
        return
    if mods.take("wait_group"):
        count = as_immediate(ins.operands[0])
        if count is None:
            raise g.unknown("a computed number of groups")
        g.say(f"E.copies.wait(C, {count}, {g.lanes()})")
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
    g.demand()
    g.say(f"E.copies.issue(C, {to}, {source}, {g.lanes()}, {size}, {read}, {g.pc})")


def _source_bytes(g: Generator, operand: Operand, size: str) -> str:
    """The source size operand, or the predicate that ignores the source."""
    if isinstance(operand, Reg) and g.program.dtype[operand.index] == "b1":
        return f"where({g.read(operand, 'b1')}, 0, {size})"
    number = as_immediate(operand)
    return str(number) if number is not None else f"{g.read(operand, 'u4')}.astype(i8)"


@emits("atom", "red")
def atomic(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    operation = mods.take(*_ATOMIC)
    kind = mods.take("f16x2", "bf16x2") or mods.type()
    vector = mods.take("v2", "v4", "v8")
    returns = ins.op == "atom"
    memory, *values = ins.operands[1:] if returns else ins.operands
    space = implied_space(g, space_of(g), memory)
    mods.take(*ORDERS)
    mods.take(*SCOPES)
    mods.take("noftz")
    if take_hints(g):
        values = values[:-1]
    if not operation or space not in FUNCTION or (vector and kind not in ("f32",)):
        raise g.unknown("this operation")
    dtype = "u2" if kind in ("f16", "bf16") else DTYPE[kind]
    where = address(g, memory, space)
    if vector:
        parts = items_of(values[0])
        results = items_of(ins.operands[0]) if returns else ()
        for place, part in enumerate(parts):
            value = g.read(part, dtype)
            out = g.let(_call(g, operation, kind, f"({where} + {4 * place})", [value], space, True))
            if returns:
                unpack(g, out, (results[place],), kind)
        return
    read = [g.read(v, dtype) for v in values]
    g.demand()
    text = _call(g, operation, kind, where, read, space, returns)
    if not returns:
        g.say(text)
        return
    g.write(ins.operands[0], f"({g.let(text)}).view({DTYPE[kind]})", DTYPE[kind])


def _call(
    g: Generator, operation: str, kind: str, where: str, values: list[str], space: str, old: bool
) -> str:
    given = ", ".join(values)
    return (
        f"atomic(E, C, {FUNCTION[space]!r}, {operation!r}, {kind!r}, {where}, ({given},), "
        f"{g.lanes()}, {g.pc}, {old})"
    )
