"""Emitters of atom and red."""

from __future__ import annotations

from flashgen.emulator.isa.emitters.memory import (
    FUNCTION,
    ORDERS,
    SCOPES,
    address,
    implied_space,
    space_of,
    take_hints,
    unpack,
)
from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits, items_of
from flashgen.emulator.isa.semantics import atomics  # noqa: F401  (registers the run-time functions)
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.ptx.syntax import Instruction

_ATOMIC = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


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
            out = g.let(_call(g, operation, kind, f"({where} + {4 * place})", [value], space))
            if returns:
                unpack(g, out, (results[place],), kind)
        return
    read = [g.read(v, dtype) for v in values]
    g.require_defined()
    text = _call(g, operation, kind, where, read, space)
    if not returns:
        g.emit(text)
        return
    g.write(ins.operands[0], f"({g.let(text)}).view({DTYPE[kind]})", DTYPE[kind])


def _call(
    g: Generator, operation: str, kind: str, where: str, values: list[str], space: str
) -> str:
    given = ", ".join(values)
    return (
        f"atomic(E, C, {FUNCTION[space]!r}, {(operation, kind)!r}, {where}, ({given},), "
        f"{g.lanes()}, {g.pc})"
    )
