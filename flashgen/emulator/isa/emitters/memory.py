"""Emitters of ld, st, atom, mov, cvta, prefetch, fences and other instructions that move data."""

from __future__ import annotations

from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits, items_of
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.ptx.syntax import TYPE_BYTES, Imm, Instruction, Mem, Operand, Reg, Sym, Vec
from flashgen.emulator.state.memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW

SPACES = ("global", "shared", "shared::cta", "local", "param", "param::entry", "const")
# Memory orders and scopes; the emulator executes in an order that satisfies all of them.
ORDERS = ("weak", "relaxed", "acquire", "release", "volatile", "acq_rel", "mmio")
SCOPES = ("cta", "cluster", "gpu", "sys")
HINTS = ("ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc", "unified")
HINT_PREFIXES = ("L1::evict", "L1::no_allocate", "L2::evict", "L2::64B", "L2::128B", "L2::256B")
# State space of an access -> the run-time functions that execute it
FUNCTION = {
    "global": "global",
    "const": "global",
    "shared": "shared",
    "cluster": "cluster",
    "local": "local",
    "": "generic",
}


def take_hints(g: Generator) -> bool:
    """Removes cache hints; returns whether the instruction has a cache-policy operand."""
    mods = g.mods
    policy = bool(mods.take("L2::cache_hint"))
    mods.left = [m for m in mods.left if m not in HINTS and not m.startswith(HINT_PREFIXES)]
    return policy


def address(g: Generator, operand: Operand, space: str) -> str:
    """The int64 address of a memory operand."""
    if not isinstance(operand, Mem):
        raise g.unknown("a memory operand without brackets")
    base = operand.base
    if isinstance(base, Sym):
        return g.literal(g.address_of(base) + operand.offset, "i8")
    if isinstance(base, Imm):
        text = g.literal(base.value, "i8")
    elif g.program.dtype[base.index][1:] == "4":
        # 32-bit addresses wrap: compilers use negative bases with positive offsets.
        text = g.read(base, "u4")
        if operand.offset:
            text = f"({text} + {g.literal(operand.offset, 'u4')})"
        return f"{text}.astype(i8)"
    else:
        text = g.read(base, "i8")
    return f"({text} + {operand.offset})" if operand.offset else text


def space_of(g: Generator) -> str:
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


def take_access(g: Generator, memory: Operand) -> tuple[str, bool]:
    """The state space of an access, and whether it has a cache-policy operand.

    Removes the modifiers of the access that have no effect in the emulator.
    """
    space = "cluster" if g.mods.take("shared::cluster") else space_of(g)
    space = implied_space(g, space, memory)
    g.mods.take(*ORDERS)
    g.mods.take(*SCOPES)
    return space, take_hints(g)


@emits("ld", "ldu")
def load(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    space, _ = take_access(g, ins.operands[1])
    items = vector_of(g, ins.operands[0])
    size = TYPE_BYTES[kind] * len(items)
    if size > 16 or kind == "pred":
        raise g.unknown("an access wider than 16 bytes")
    where = address(g, ins.operands[1], space)
    g.require_defined()
    function = "parameter" if space == "param" else FUNCTION[space]
    memory = ins.operands[1]
    named = isinstance(memory, Mem) and isinstance(memory.base, Sym)
    # A parameter at a constant address is the same in all lanes, active or not.
    lanes = "None" if space == "param" and named else g.lanes()
    value = g.let(f"load_{function}(E, C, {where}, {lanes}, {size}, {g.pc})")
    unpack(g, value, items, kind)


def unpack(g: Generator, value: str, items: tuple[Operand, ...], kind: str) -> None:
    """Assigns the elements of a loaded value."""
    dtype = DTYPE[kind]
    if len(items) == 1:
        g.write(items[0], f"{value}.view({dtype})", dtype)
        return
    write_parts(g, f"{value}.reshape({value}.shape + (1,)).view({dtype})", items, dtype)


def write_parts(g: Generator, parts: str, items: tuple[Operand, ...], dtype: str) -> None:
    """Assigns the elements along the last axis of an expression."""
    parts = g.let(parts)
    for place, item in enumerate(items):
        g.write(item, f"{parts}[..., {place}]", dtype)


def store_async(g: Generator, ins: Instruction) -> None:
    """st.async: the modifier async is already consumed."""
    kind = g.mods.type()
    for word in ("weak", "mbarrier::complete_tx::bytes"):
        g.mods.take(word)
    if g.mods.take("mmio", "release") or TYPE_BYTES[kind] < 4:
        raise g.unknown("this form")
    g.mods.take("shared::cluster")
    items = vector_of(g, ins.operands[1])
    size = TYPE_BYTES[kind] * len(items)
    if size > 16:
        raise g.unknown("more than 16 bytes")
    where, barrier = (address(g, o, "shared") for o in (ins.operands[0], ins.operands[2]))
    unsigned = "c16" if size == 16 else f"u{size}"
    value = joined(g, items, DTYPE[kind], unsigned)
    g.require_defined()
    g.emit(f"store_async(E, C, ({where}, {barrier}), {value}, {g.lanes()}, {size}, {g.pc})")


@emits("st")
def store(g: Generator, ins: Instruction) -> None:
    if g.mods.take("async"):
        store_async(g, ins)
        return
    kind = g.mods.type()
    space, _ = take_access(g, ins.operands[0])
    items = vector_of(g, ins.operands[1])
    size = TYPE_BYTES[kind] * len(items)
    if size > 16 or space in ("param", "const"):
        raise g.unknown("an access of this width or space")
    where = address(g, ins.operands[0], space)
    if space == "local":
        store_local(g, where, items, kind)
        return
    dtype, unsigned = DTYPE[kind], "c16" if size == 16 else f"u{size}"
    if len(items) > 1:
        value = joined(g, items, dtype, unsigned)
    else:
        value = g.read(items[0], dtype) + ("" if dtype == unsigned else f".view({unsigned})")
    g.require_defined()
    g.emit(f"store_{FUNCTION[space]}(E, C, {where}, {value}, {g.lanes()}, {size}, {g.pc})")


def store_local(g: Generator, where: str, items: tuple[Operand, ...], kind: str) -> None:
    """A store to local memory, of each element by itself.

    Compilers store vectors of which the program has set a part. An element from a register that
    nothing has written becomes one that nothing has written, and is an error where it is read.
    """
    g.require_defined()  # the address
    size = TYPE_BYTES[kind]
    unsigned = "c16" if size == 16 else f"u{size}"
    for place, item in enumerate(items):
        value = g.read(item, DTYPE[kind]) + (
            "" if DTYPE[kind] == unsigned else f".view({unsigned})"
        )
        written = " & ".join(sorted(set(g.defined))) or "None"
        g.defined = []
        here = f"{where} + {place * size}" if place else where
        g.emit(f"store_local(E, C, {here}, {value}, {g.lanes()}, {size}, {g.pc}, {written})")


def joined(g: Generator, items: tuple[Operand, ...], part: str, whole: str) -> str:
    """Items of dtype ``part`` side by side as one value of dtype ``whole``."""
    return f"join_parts({whole}, {part}, {', '.join(g.read(item, part) for item in items)})"


@emits("mov")
def move(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    to, source = ins.operands
    dtype, size = DTYPE[kind], TYPE_BYTES[kind]
    if isinstance(source, Vec):
        g.write(to, joined(g, source.items, f"u{size // len(source.items)}", dtype), dtype)
        return
    if isinstance(to, Vec):
        part = size // len(to.items)
        if not part:
            raise g.unknown("parts smaller than a byte")
        write_parts(g, f"parts_of({g.read(source, dtype)}, u{part})", to.items, f"u{part}")
        return
    if isinstance(to, Reg) and isinstance(source, Reg):
        held, held_source = (g.program.dtype[r.index] for r in (to, source))
        if held == held_source:
            dtype = held
    g.write(to, g.read(source, dtype), dtype)


_VECTORS = ("f32", "f16", "bf16", "f16x2", "bf16x2")
_ATOMIC = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


@emits("atom", "red")
def atomic(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    operation = mods.take(*_ATOMIC)
    kind = mods.take("f16x2", "bf16x2") or mods.type()
    vector = mods.take("v2", "v4", "v8")
    returns = ins.op == "atom"
    memory, *values = ins.operands[1:] if returns else ins.operands
    space, policy = take_access(g, memory)
    mods.take("noftz")
    if policy:
        values.pop()
    if not operation or space not in FUNCTION or (vector and kind not in _VECTORS):
        raise g.unknown("this operation")
    if space == "local":
        raise g.unknown("atomics on local memory")
    where = address(g, memory, space)
    if vector:
        # PTX aligns a vector to its size, although each of its elements is an atomic of its own.
        size = TYPE_BYTES[kind] * int(vector[1])
        g.emit(f"require_alignment(E, C, {where}, {g.lanes()}, {size}, {g.pc})")
    results = items_of(ins.operands[0])
    # One atomic per element of a vector.
    for place, operands in enumerate(zip(*map(items_of, values), strict=True)):
        dtype = "u2" if kind in ("f16", "bf16") else DTYPE[kind]
        given = "".join(g.read(operand, dtype) + ", " for operand in operands)
        g.require_defined()
        at = f"({where} + {place * TYPE_BYTES[kind]})" if place else where
        text = (
            f"atomic(E, C, {FUNCTION[space]!r}, {(operation, kind)!r}, {at}, ({given}), "
            f"{g.lanes()}, {g.pc})"
        )
        if returns:
            unpack(g, g.let(text), (results[place],), kind)
        else:
            g.emit(text)


@emits("cvta")
def convert_address(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    to_space = g.mods.take("to")
    space = space_of(g)
    base = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}.get(space, 0)
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
    g.write(ins.operands[0], f"spaces({g.read(ins.operands[1], 'i8')}) == {kind}", "b1")


@emits("prefetch", "prefetchu", "discard", "applypriority", "pmevent")
def no_effect(g: Generator, ins: Instruction) -> None:
    g.mods.left.clear()


@emits("createpolicy")
def create_policy(g: Generator, ins: Instruction) -> None:
    g.mods.left.clear()
    g.write(ins.operands[0], g.literal(0, "u8"), "u8")


@emits("membar", "fence")
def fence(g: Generator, ins: Instruction) -> None:
    scope = g.mods.take("cta", "gl", "sys", "gpu", "cluster")
    kind = g.mods.take("sc", "acq_rel", "acquire", "release")
    if g.mods.take("mbarrier_init"):
        g.emit(f"E.mbarriers.fence_init(C, {g.lanes()})")
        return
    if g.mods.take("proxy"):
        fence_proxy(g, ins)
        return
    if scope:
        sequential = kind == "sc" or ins.op == "membar"
        g.emit(f"E.fence(C, {scope != 'cta'}, {sequential})")


def fence_proxy(g: Generator, ins: Instruction) -> None:
    if g.mods.take("alias"):
        return
    if g.mods.take("tensormap::generic"):
        if ins.operands:  # of acquire: the map and its size
            where = address(g, ins.operands[0], "")
            g.require_defined()
            g.emit(f"E.maps.fence(C, {where}, {g.lanes()})")
        else:
            g.emit("E.fence(C, True)")
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
