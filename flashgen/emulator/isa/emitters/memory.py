"""Emitters of ld, st, mov, cvta, prefetch, fences and other instructions that move data."""

from __future__ import annotations

from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits, items_of
from flashgen.emulator.isa.semantics import memory as access  # noqa: F401  (registers the run-time functions)
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.ptx.syntax import TYPE_BYTES, Instruction, Mem, Operand, Reg, Sink, Sym, Vec
from flashgen.emulator.state.memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW

SPACES = ("global", "shared", "shared::cta", "local", "param", "param::entry", "const")
# Memory orders and scopes; the emulator executes in an order that satisfies all of them.
ORDERS = ("weak", "relaxed", "acquire", "release", "volatile", "acq_rel", "mmio")
SCOPES = ("cta", "cluster", "gpu", "sys")
HINTS = ("ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc", "unified")
FUNCTION = {
    "global": "global",
    "const": "global",
    "shared": "shared",
    "local": "local",
    "": "generic",
}


def take_hints(g: Generator) -> bool:
    """Removes cache hints; returns whether the instruction has a cache-policy operand."""
    mods = g.mods
    while mods.take(*HINTS):
        pass
    policy = bool(mods.take("L2::cache_hint"))
    mods.left = [
        m
        for m in mods.left
        if not m.startswith(("L1::evict", "L1::no_allocate", "L2::evict", "L2::64B", "L2::128B"))
        and not m.startswith("L2::256B")
    ]
    return policy


def address(g: Generator, operand: Operand, space: str) -> str:
    """The int64 address of a memory operand."""
    if not isinstance(operand, Mem):
        raise g.unknown("a memory operand without brackets")
    base = operand.base
    if isinstance(base, Sym):
        constant = g.address_of(base) + operand.offset
        return g.literal(constant, "i8")
    if isinstance(base, Reg):
        held = g.program.dtype[base.index]
        if held[1:] == "4":
            # 32-bit addresses wrap: compilers use negative bases with positive offsets.
            text = g.read(base, "u4")
            if operand.offset:
                return f"({text} + {g.literal(operand.offset, 'u4')}).astype(i8)"
            return f"{text}.astype(i8)"
        else:
            text = g.read(base, "i8")
    else:
        text = g.literal(base.value, "i8")
    if operand.offset:
        return f"({text} + {operand.offset})"
    return text


def space_of(g: Generator) -> str:
    # A cluster has one block, so shared::cluster is the shared memory of the block.
    space = g.mods.take(*SPACES, "shared::cluster")
    return space.split("::")[0]


def implied_space(g: Generator, space: str, memory: Operand) -> str:
    """A generic access to a named variable is an access to the variable's space."""
    if space or not isinstance(memory, Mem) or not isinstance(memory.base, Sym):
        return space
    variable = g.program.variables.get(memory.base.name)
    return variable.space if variable else space


def vector_of(g: Generator, operand: Operand) -> tuple[Operand, ...]:
    wanted = g.mods.take("v2", "v4", "v8")
    items = items_of(operand)
    if len(items) != (int(wanted[1]) if wanted else 1):
        raise g.unknown("a vector whose length differs from its modifier")
    return items


@emits("ld", "ldu")
def load(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    kind = mods.type()
    space = implied_space(g, space_of(g), ins.operands[1])
    items = vector_of(g, ins.operands[0])
    mods.take(*ORDERS)
    mods.take(*SCOPES)
    take_hints(g)
    each = TYPE_BYTES[kind]
    size = each * len(items)
    if size > 16 or kind == "pred":
        raise g.unknown("an access wider than 16 bytes")
    where = address(g, ins.operands[1], space)
    g.require_defined()
    function = "parameter" if space == "param" else FUNCTION[space]
    lanes = "None" if space == "param" else g.lanes()
    value = g.let(f"load_{function}(E, C, {where}, {lanes}, {size}, {g.pc})")
    unpack(g, value, items, kind)


def unpack(g: Generator, value: str, items: tuple[Operand, ...], kind: str) -> None:
    """Assigns the elements of a loaded value."""
    dtype = DTYPE[kind]
    if len(items) == 1:
        g.write(items[0], f"{value}.view({dtype})", dtype)
        return
    parts = g.let(f"{value}.reshape({value}.shape + (1,)).view({dtype})")
    for place, item in enumerate(items):
        g.write(item, f"{parts}[..., {place}]", dtype)


def packed(g: Generator, items: tuple[Operand, ...], kind: str) -> str:
    """An expression for the value to store."""
    dtype = DTYPE[kind]
    unsigned = "c16" if TYPE_BYTES[kind] == 16 else f"u{TYPE_BYTES[kind]}"
    values = [g.read(item, dtype) for item in items]
    if len(items) == 1:
        return values[0] if dtype == unsigned else f"{values[0]}.view({unsigned})"
    return f"interleave(C.n, {dtype}, {', '.join(values)})"


@emits("st")
def store(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    kind = mods.type()
    space = implied_space(g, space_of(g), ins.operands[0])
    items = vector_of(g, ins.operands[1])
    mods.take(*ORDERS)
    mods.take(*SCOPES)
    take_hints(g)
    size = TYPE_BYTES[kind] * len(items)
    if size > 16 or space in ("param", "const"):
        raise g.unknown("an access of this width or space")
    where = address(g, ins.operands[0], space)
    value = packed(g, items, kind)
    g.require_defined()
    g.emit(f"store_{FUNCTION[space]}(E, C, {where}, {value}, {g.lanes()}, {size}, {g.pc})")


@emits("mov")
def move(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    to, source = ins.operands
    if isinstance(source, Vec):
        pack(g, to, source.items, kind)
        return
    if isinstance(to, Vec):
        value = g.let(g.read(source, DTYPE[kind]))
        part = f"u{TYPE_BYTES[kind] // len(to.items)}"
        if TYPE_BYTES[kind] // len(to.items) == 0:
            raise g.unknown("parts smaller than a byte")
        parts = g.let(f"parts_of({value}, {part})")
        for place, item in enumerate(to.items):
            if not isinstance(item, Sink):
                g.write(item, f"{parts}[..., {place}]", part)
        return
    dtype = DTYPE[kind]
    if isinstance(to, Reg) and isinstance(source, Reg):
        held, held_source = (g.program.dtype[r.index] for r in (to, source))
        if held == held_source:
            dtype = held
    g.write(to, g.read(source, dtype), dtype)


def pack(g: Generator, to: Operand, items: tuple[Operand, ...], kind: str) -> None:
    part = f"u{TYPE_BYTES[kind] // len(items)}"
    values = ", ".join(g.read(item, part) for item in items)
    g.write(to, f"join_parts({DTYPE[kind]}, {part}, {values})", DTYPE[kind])


@emits("cvta")
def convert_address(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    to_space = g.mods.take("to")
    space = space_of(g)
    windows = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}
    base = windows.get(space, 0)
    value = g.read(ins.operands[1], DTYPE[kind])
    if base:
        value = f"{value} {'-' if to_space else '+'} {g.literal(base, DTYPE[kind])}"
    g.write(ins.operands[0], value, DTYPE[kind])


@emits("isspacep")
def is_space(g: Generator, ins: Instruction) -> None:
    space = space_of(g)
    kind = {"global": 0, "shared": 1, "local": 2}.get(space)
    if kind is None:
        raise g.unknown("this space")
    g.write(ins.operands[0], f"space_is({g.read(ins.operands[1], 'i8')}, {kind})", "b1")


@emits("prefetch", "prefetchu", "discard", "applypriority")
def hint(g: Generator, ins: Instruction) -> None:
    g.mods.left.clear()


@emits("createpolicy")
def create_policy(g: Generator, ins: Instruction) -> None:
    g.mods.left.clear()
    g.write(ins.operands[0], g.literal(0, "u8"), "u8")


@emits("membar", "fence")
def fence(g: Generator, ins: Instruction) -> None:
    scope = g.mods.take("cta", "gl", "sys", "gpu", "cluster")
    g.mods.take("sc", "acq_rel", "acquire", "release")
    if g.mods.take("mbarrier_init"):
        return
    if g.mods.take("proxy"):
        fence_proxy(g)
        return
    if scope:
        g.emit(f"E.fence(C, {scope != 'cta'})")


def fence_proxy(g: Generator) -> None:
    if g.mods.take("alias"):
        return
    if not g.mods.take("async"):
        raise g.unknown("a fence of this proxy")
    # Which proxy wrote global memory is not tracked.
    if not g.mods.take("global"):
        g.mods.take("shared::cta", "shared::cluster")
        g.emit(f"E.fence_proxy(C, {g.lanes()})")


@emits("alloca", "stacksave", "stackrestore")
def stack(g: Generator, ins: Instruction) -> None:
    raise g.unknown("a stack of run-time size")
