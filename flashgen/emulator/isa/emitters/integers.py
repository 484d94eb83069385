"""Emitters of integer arithmetic; the float forms of the same opcodes are in `floats`."""

from __future__ import annotations

from flashgen.emulator.isa.emitters.floats import (
    binary_float,
    is_float,
    multiply_add_float,
    unary_float,
)
from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits
from flashgen.emulator.isa.semantics import integers  # noqa: F401  (registers the run-time functions)
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.ptx.syntax import TYPE_BYTES, Instruction

_SIGNS = {"add": "+", "sub": "-", "mul": "*"}


def neutral(g: Generator, ins: Instruction, kind: str) -> str:
    """The dtype for operations whose bits do not depend on signedness."""
    return g.integer(ins.operands[0], TYPE_BYTES[kind])


def packed16(kind: str) -> str:
    """The element dtype of .u16x2 and .s16x2, '' for other types."""
    return {"u16x2": "u2", "s16x2": "i2"}.get(kind, "")


def take_packed(g: Generator) -> str:
    return packed16(g.mods.take("u16x2", "s16x2"))


def _packed_binary(g: Generator, ins: Instruction, element: str, expression: str) -> None:
    a, b = (g.read(o, "u4") for o in ins.operands[1:3])
    g.write(ins.operands[0], f"on_halves({element}, lambda a, b: {expression}, {a}, {b})", "u4")


@emits("add", "sub")
def add(g: Generator, ins: Instruction) -> None:
    element = take_packed(g)
    sign = _SIGNS[ins.op]
    if element:
        _packed_binary(g, ins, element, f"a {sign} b")
        return
    kind = g.mods.type()
    if is_float(kind):
        binary_float(g, ins, kind)
        return
    if "cc" in g.mods.left:
        carried(g, ins, kind, fresh=True)
        return
    if g.mods.take("sat"):
        a, b = (g.read(o, "i4") for o in ins.operands[1:])
        g.write(ins.operands[0], f"saturating_add({a}, {b}, {sign}1)", "i4")
        return
    dtype = neutral(g, ins, kind)
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    g.write(ins.operands[0], f"{a} {sign} {b}", dtype)


@emits("addc", "subc")
def add_with_carry(g: Generator, ins: Instruction) -> None:
    carried(g, ins, g.mods.type(), fresh=False)


def carried(g: Generator, ins: Instruction, kind: str, fresh: bool) -> None:
    dtype = f"u{TYPE_BYTES[kind]}"
    sets = bool(g.mods.take("cc"))
    slot = len(g.program.registers)
    carry = g.literal(0, "u4") if fresh else g.current(slot)
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    function = "add_carry" if ins.op.startswith("add") else "subtract_borrow"
    if g.guard:
        raise g.unknown("a guarded carry")
    both = g.let(f"{function}({a}, {b}, {carry})")
    g.write(ins.operands[0], f"{both}[0]", dtype)
    if sets:
        g.names[slot] = g.let(f"{both}[1]")


@emits("mul", "mul24")
def multiply(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    if is_float(kind):
        binary_float(g, ins, kind)
        return
    value, dtype = product(g, ins, kind)
    g.write(ins.operands[0], value, dtype)


def product(g: Generator, ins: Instruction, kind: str) -> tuple[str, str]:
    """The product of an integer mul or mad as an expression, and its dtype."""
    form = g.mods.take("lo", "hi", "wide")
    dtype = DTYPE[kind] if kind[0] != "b" else f"u{TYPE_BYTES[kind]}"
    if ins.op in ("mul24", "mad24"):
        if form != "lo":
            raise g.unknown("mul24.hi")
        shift = g.literal(8, dtype)
        a, b = (f"(({g.read(o, dtype)} << {shift}) >> {shift})" for o in ins.operands[1:3])
        return f"({a} * {b})", dtype
    if form == "wide":
        wide = f"{dtype[0]}{2 * TYPE_BYTES[kind]}"
        a, b = (f"{g.read(o, dtype)}.astype({wide})" for o in ins.operands[1:3])
        return f"({a} * {b})", wide
    if form == "hi":
        a, b = (g.read(o, dtype) for o in ins.operands[1:3])
        return f"multiply_high({a}, {b})", dtype
    dtype = neutral(g, ins, kind)
    a, b = (g.read(o, dtype) for o in ins.operands[1:3])
    return f"({a} * {b})", dtype


@emits("madc")
def multiply_add_with_carry(g: Generator, ins: Instruction) -> None:
    _multiply_add_carried(g, ins, g.mods.type(), fresh=False)


def _multiply_add_carried(g: Generator, ins: Instruction, kind: str, fresh: bool) -> None:
    sets = bool(g.mods.take("cc"))
    value, dtype = product(g, ins, kind)
    unsigned = f"u{dtype[1:]}"
    slot = len(g.program.registers)
    carry = g.literal(0, "u4") if fresh else g.current(slot)
    if g.guard:
        raise g.unknown("a guarded carry")
    c = g.read(ins.operands[3], unsigned)
    both = g.let(f"add_carry({value}.view({unsigned}), {c}, {carry})")
    g.write(ins.operands[0], f"{both}[0]", unsigned)
    if sets:
        g.names[slot] = g.let(f"{both}[1]")


@emits("mad", "fma", "mad24")
def multiply_add(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    if is_float(kind):
        multiply_add_float(g, ins, kind)
        return
    if "cc" in g.mods.left:
        _multiply_add_carried(g, ins, kind, fresh=True)
        return
    if g.mods.take("sat"):
        raise g.unknown("saturation of mad")
    value, dtype = product(g, ins, kind)
    g.write(ins.operands[0], f"{value} + {g.read(ins.operands[3], dtype)}", dtype)


@emits("div", "rem")
def divide(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    if is_float(kind):
        binary_float(g, ins, kind)
        return
    dtype = DTYPE[kind]
    function = "divide" if ins.op == "div" else "remainder"
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    g.write(ins.operands[0], f"{function}({a}, {b})", dtype)


@emits("min", "max")
def minimum(g: Generator, ins: Instruction) -> None:
    element = take_packed(g)
    function = "np.minimum" if ins.op == "min" else "np.maximum"
    if element:
        g.mods.take("relu")
        if "relu" in ins.mods:
            raise g.unknown("relu")
        _packed_binary(g, ins, element, f"{function}(a, b)")
        return
    kind = g.mods.type()
    if is_float(kind):
        binary_float(g, ins, kind)
        return
    dtype = DTYPE[kind]
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    value = f"{function}({a}, {b})"
    if g.mods.take("relu"):
        value = f"np.maximum({value}, {g.literal(0, dtype)})"
    g.write(ins.operands[0], value, dtype)


@emits("abs", "neg")
def sign(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    if is_float(kind):
        unary_float(g, ins, kind)
        return
    dtype = DTYPE[kind]
    value = g.read(ins.operands[1], dtype)
    g.write(ins.operands[0], f"np.abs({value})" if ins.op == "abs" else f"-{value}", dtype)


@emits("sad")
def absolute_difference(g: Generator, ins: Instruction) -> None:
    dtype = DTYPE[g.mods.type()]
    a, b, c = (g.read(o, dtype) for o in ins.operands[1:])
    g.write(ins.operands[0], f"{c} + (np.maximum({a}, {b}) - np.minimum({a}, {b}))", dtype)


@emits("dp4a")
def dot_bytes(g: Generator, ins: Instruction) -> None:
    second, first = g.mods.type(), g.mods.type()
    a, b, c = (g.read(o, "u4") for o in ins.operands[1:])
    signed = first == "s32" or second == "s32"
    held = f"{c}.view(i4)" if signed else c
    value = f"dot4({a}, {b}, {held}, {first == 's32'}, {second == 's32'})"
    g.write(ins.operands[0], value, "u4")
