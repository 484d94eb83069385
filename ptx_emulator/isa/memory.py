"""Loads, stores and moves: the run-time functions of every state space, and emitters.

An address is an int64 value of shape (), (n, 1), (1, 32) or (n, 32). ``lanes`` is None when all
lanes are active, else a boolean mask of the active lanes. Loaded values have the shape of the
address (or (n, 32) when lanes are masked) and an unsigned dtype of the access width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator.checks.bounds import check_window, locate
from ptx_emulator.counters.recorder import READ, WRITE, count_sectors
from ptx_emulator.errors import OutOfBounds, UninitialisedRead
from ptx_emulator.isa.cluster import remote, resolved
from ptx_emulator.isa.generator import Generator, instruction, items_of
from ptx_emulator.ptx.register_types import DTYPE
from ptx_emulator.ptx.syntax import TYPE_BYTES, Imm, Instruction, Mem, Operand, Reg, Sym, Vec
from ptx_emulator.state.cohort import Cohort, active, first_bad, spread
from ptx_emulator.state.memory import (
    ELEMENT,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    SHIFT,
    WINDOW_BYTES,
    Array,
)
from ptx_emulator.state.wave import Site, Stored, Wave

_WRITTEN = {size: np.ones(size, np.uint8).view(dtype)[0] for size, dtype in ELEMENT.items()}
_BASES = (0, SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW)


def _of_lanes(cohort: Cohort, value: Any, lanes: Any) -> Array:
    """A value of all lanes (n, 32), or one entry per active lane."""
    every = spread(value, cohort.n)
    return every if lanes is None else every[spread(lanes, cohort.n)]


def _changing(cohort: Cohort, view: Array, index: Array, value: Any, lanes: Any) -> Array:
    """The lanes (n, 32) of a store that change memory; one of those that write the same value."""
    chosen = active(cohort, lanes)
    place, given = index[chosen], spread(value, cohort.n)[chosen]
    _, first, which = np.unique(place, return_index=True, return_inverse=True)
    again = given == given[first][which]
    again[first] = False
    changes = np.zeros((cohort.n, 32), bool)
    changes[chosen] = ~again & (view.take(place) != given)
    return changes


# ---- shared memory


def load_shared(
    machine: Wave, cohort: Cohort, address: Any, lanes: Any, size: int, pc: int
) -> Array:
    """Reads ``size`` bytes per lane from shared memory."""
    check_window(machine, cohort, address, lanes, size, pc, machine.shared_size, "shared")
    where = address + machine.shared_base(cohort)
    view = machine.shared.view[size]
    index = where >> SHIFT[size]
    if machine.recorder is not None:
        machine.recorder.shared_access(cohort, address, lanes, size, pc)
    if machine.shared_races:
        machine.shared_races.read(cohort, where, size, pc, lanes)
    if lanes is None:
        machine.counters.shared_read_bytes += 32 * cohort.n * size
        return view.take(index)  # type: ignore[no-any-return]
    chosen = _of_lanes(cohort, index, lanes)
    machine.counters.shared_read_bytes += len(chosen) * size
    out = np.zeros((cohort.n, 32), ELEMENT[size])
    out[spread(lanes, cohort.n)] = view.take(chosen)
    return out


def store_shared(
    machine: Wave, cohort: Cohort, address: Any, value: Any, lanes: Any, size: int, pc: int
) -> None:
    """Writes ``size`` bytes per lane to shared memory."""
    check_window(machine, cohort, address, lanes, size, pc, machine.shared_size, "shared")
    where = spread(address + machine.shared_base(cohort), cohort.n)
    if machine.recorder is not None:
        machine.recorder.shared_access(cohort, address, lanes, size, pc)
    view, place = machine.shared.view[size], where >> SHIFT[size]
    if machine.shared_races:
        changes = lanes
        if "same_value" in machine.allow:
            changes = _changing(cohort, view, place, value, lanes)
        machine.stored = Stored(cohort, view, where, 0, value, lanes)
        machine.shared_races.write(cohort, where, size, pc, changes)
        machine.stored = None
    index = _of_lanes(cohort, place, lanes)
    machine.counters.shared_write_bytes += index.size * size
    view[index] = _of_lanes(cohort, value, lanes)


def load_cluster(
    machine: Wave, cohort: Cohort, address: Any, lanes: Any, size: int, pc: int
) -> Array:
    """Reads shared memory of any block of the cluster."""
    if not remote(address):
        return load_shared(machine, cohort, address, lanes, size, pc)
    where = _remote(machine, cohort, address, lanes, size, pc)
    chosen = _of_lanes(cohort, where, lanes)
    machine.counters.shared_read_bytes += chosen.size * size
    if machine.shared_races:
        machine.shared_races.read(cohort, where, size, pc, lanes)
    out = np.zeros((cohort.n, 32), ELEMENT[size])
    out[active(cohort, lanes)] = machine.shared.view[size].take(chosen >> SHIFT[size]).reshape(-1)
    return out


def store_cluster(
    machine: Wave, cohort: Cohort, address: Any, value: Any, lanes: Any, size: int, pc: int
) -> None:
    """Writes shared memory of any block of the cluster."""
    if not remote(address):
        store_shared(machine, cohort, address, value, lanes, size, pc)
        return
    where = _remote(machine, cohort, address, lanes, size, pc)
    if machine.shared_races:
        machine.shared_races.write(cohort, where, size, pc, lanes)
    index = _of_lanes(cohort, where >> SHIFT[size], lanes)
    machine.counters.shared_write_bytes += index.size * size
    machine.shared.view[size][index] = _of_lanes(cohort, value, lanes)


def store_async(
    machine: Wave, cohort: Cohort, where: tuple[Any, Any], values: Any, lanes: Any, size: int,
    pc: int,
) -> None:  # fmt: skip
    """st.async: a store to shared memory of the cluster that an mbarrier of its block counts.

    Args:
        where: addresses of the destination and of the mbarrier.
    """
    address, barrier = where
    store_cluster(machine, cohort, address, values, lanes, size, pc)
    machine.mbarriers.complete_store(cohort, barrier, size, lanes, pc)


def _remote(machine: Wave, cohort: Cohort, address: Any, lanes: Any, size: int, pc: int) -> Array:
    """Offsets into `Wave.shared` (n, 32) of addresses in a cluster."""
    blocks, offset = resolved(machine, cohort, address, lanes, size, pc)
    return blocks * machine.shared_pitch + offset


# ---- local memory


def _local_index(
    machine: Wave, cohort: Cohort, address: Any, lanes: Any, size: int, pc: int
) -> Array:
    limit = machine.program.local_bytes
    check_window(machine, cohort, address, lanes, size, pc, limit, "local")
    thread = cohort.rows[:, None] * 32 + np.arange(32)
    machine.counters.local_bytes += 32 * cohort.n * size
    return (thread * limit + address) >> SHIFT[size]  # type: ignore[no-any-return]


def load_local(
    machine: Wave, cohort: Cohort, address: Any, lanes: Any, size: int, pc: int
) -> Array:
    index = _local_index(machine, cohort, address, lanes, size, pc)
    if lanes is not None:
        index = np.where(spread(lanes, cohort.n), index, 0)
    if machine.local_written is not None:
        missing = machine.local_written.view[size].take(index) != _WRITTEN[size]
        if (missing & active(cohort, lanes)).any():
            row, lane = first_bad(cohort, lanes, missing)
            machine.fail(
                UninitialisedRead,
                "local memory is read that its thread has never written",
                Site(cohort, pc, row, lane),
                f"{size}-byte read at local offset {int(spread(address, cohort.n)[row, lane])}"
                f"{machine.program.local_name(int(spread(address, cohort.n)[row, lane]))}",
                "initialise every element of the array before it is read",
            )
    return machine.local.view[size].take(index)


def store_local(
    machine: Wave,
    cohort: Cohort,
    address: Any,
    value: Any,
    lanes: Any,
    size: int,
    pc: int,
    written: Any = None,
) -> None:
    """Stores an element of each thread. ``written`` is false where the register was never written;
    None stands for all lanes."""
    index = _of_lanes(cohort, _local_index(machine, cohort, address, lanes, size, pc), lanes)
    machine.local.view[size][index] = _of_lanes(cohort, value, lanes)
    if machine.local_written is not None:
        marks = _WRITTEN[size]
        if written is not None:
            marks = _of_lanes(cohort, np.where(written, marks, np.zeros_like(marks)), lanes)
        machine.local_written.view[size][index] = marks


# ---- global memory


def load_global(
    machine: Wave, cohort: Cohort, address: Any, lanes: Any, size: int, pc: int, noted: bool = True
) -> Array:
    """Reads ``size`` bytes per lane from global memory; see `GlobalRaces.read`."""
    offset = locate(machine, cohort, address, lanes, size, pc, False)
    counters = machine.counters
    lanes_read = 32 * cohort.n if lanes is None else len(offset)
    counters.global_read_bytes += lanes_read * size
    counters.global_read_sectors += count_sectors(cohort, offset, lanes)
    if machine.recorder is not None:
        machine.recorder.global_access(cohort, offset, lanes, size, pc, READ)
    if machine.global_races:
        machine.global_races.read(cohort, offset, size, pc, lanes, noted)
    view = machine.memory.flat.view[size]
    if lanes is None:
        return view.take(offset >> SHIFT[size])  # type: ignore[no-any-return]
    out = np.zeros((cohort.n, 32), ELEMENT[size])
    out[spread(lanes, cohort.n)] = view.take(offset >> SHIFT[size])
    return out


def store_global(
    machine: Wave, cohort: Cohort, address: Any, value: Any, lanes: Any, size: int, pc: int
) -> None:
    """Writes ``size`` bytes per lane to global memory."""
    if lanes is None:
        address = spread(address, cohort.n)
    offset = locate(machine, cohort, address, lanes, size, pc, True)
    counters = machine.counters
    counters.global_write_bytes += offset.size * size
    counters.global_write_sectors += count_sectors(cohort, offset, lanes)
    if machine.recorder is not None:
        machine.recorder.global_access(cohort, offset, lanes, size, pc, WRITE)
    if machine.global_races:
        changed, changes = offset, lanes
        view, base = machine.memory.flat.view[size], machine.memory.base
        if "same_value" in machine.allow:
            full = spread(address - base, cohort.n)
            changes = _changing(cohort, view, full >> SHIFT[size], value, lanes)
            changed = full[changes]
        machine.stored = Stored(cohort, view, address, base, value, lanes)
        machine.global_races.write(cohort, changed, size, pc, changes)
        machine.stored = None
    machine.memory.flat.view[size][offset >> SHIFT[size]] = _of_lanes(cohort, value, lanes)


# ---- parameters and generic addresses


def load_parameter(
    machine: Wave, cohort: Cohort, address: Any, lanes: Any, size: int, pc: int
) -> Array:
    """Reads the kernel's parameters; a constant address gives a uniform value."""
    check_window(
        machine, cohort, address, lanes, size, pc, machine.program.param_bytes, "parameter"
    )
    if lanes is not None:
        address = np.where(spread(lanes, cohort.n), address, 0)
    data = machine.parameters
    if address.ndim == 0:
        at = int(address)
        return data[at : at + size].view(ELEMENT[size])[0]  # type: ignore[no-any-return]
    padded = data[: len(data) // size * size]
    return padded.view(ELEMENT[size]).take(address >> SHIFT[size])  # type: ignore[no-any-return]


def spaces(address: Any) -> Array:
    """0 global, 1 shared, 2 local, 3 parameters for each generic address."""
    shared = (address >= SHARED_WINDOW) & (address < SHARED_WINDOW + WINDOW_BYTES)
    local = (address >= LOCAL_WINDOW) & (address < LOCAL_WINDOW + WINDOW_BYTES)
    param = (address >= PARAM_WINDOW) & (address < PARAM_WINDOW + WINDOW_BYTES)
    return np.asarray(shared * 1 + local * 2 + param * 3)


def store_parameter(
    machine: Wave, cohort: Cohort, address: Any, value: Any, lanes: Any, size: int, pc: int
) -> None:
    """Fails: the parameters of a kernel are constant."""
    machine.fail(
        OutOfBounds,
        f"{size}-byte store to the parameters of the kernel, which are constant",
        Site(cohort, pc, *first_bad(cohort, lanes, True)),
        f"parameter offset {int(spread(address, cohort.n).flat[0])}",
        "copy the parameter to a variable and change that",
    )


_LOADS = (load_global, load_cluster, load_local, load_parameter)
_STORES = (store_global, store_cluster, store_local, store_parameter)


def by_space(cohort: Cohort, address: Any, lanes: Any) -> list[tuple[int, Any, Any]]:
    """Splits an access to generic addresses by space.

    Returns:
        For each space that the active lanes access: its number (see `spaces`), the addresses in
        this space, and the lanes.
    """
    kinds = spaces(address)
    present = np.unique(kinds if lanes is None else _of_lanes(cohort, kinds, lanes)).tolist()
    if len(present) == 1:
        return [(present[0], address - _BASES[present[0]], lanes)]
    every = active(cohort, lanes)
    return [
        (kind, spread(address - _BASES[kind], cohort.n), spread(kinds == kind, cohort.n) & every)
        for kind in present
    ]


def load_generic(
    machine: Wave, cohort: Cohort, address: Any, lanes: Any, size: int, pc: int
) -> Array:
    parts = by_space(cohort, address, lanes)
    found = [_LOADS[kind](machine, cohort, at, part, size, pc) for kind, at, part in parts]
    if len(found) == 1:
        return found[0]
    out = np.zeros((cohort.n, 32), ELEMENT[size])
    for (_, _, part), got in zip(parts, found, strict=True):
        out[part] = got[part]
    return out


def store_generic(
    machine: Wave, cohort: Cohort, address: Any, value: Any, lanes: Any, size: int, pc: int
) -> None:
    for kind, at, part in by_space(cohort, address, lanes):
        _STORES[kind](machine, cohort, at, value, part, size, pc)


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


def accessed_bytes(ins: Instruction) -> tuple[int, int]:
    """Bytes of an access to shared and to global memory; 16 where it accesses neither."""
    kinds = [word for word in ins.mods if word in TYPE_BYTES]
    if not kinds or not {"param", "local"}.isdisjoint(ins.mods):
        return 16, 16
    size = TYPE_BYTES[kinds[-1]]
    if ins.op not in ("atom", "red"):  # vectors of atomics are one atomic per element
        size *= next((int(word[1]) for word in ins.mods if word in ("v2", "v4", "v8")), 1)
    shared, device = (
        any(word.startswith(space) for word in ins.mods) for space in ("shared", "global")
    )
    return 16 if device else size, 16 if shared else size


def is_ordered(ins: Instruction) -> bool:
    """Whether a load or store of memory that threads share has an order, or is volatile."""
    ordered = not set(ORDERS[1:]).isdisjoint(ins.mods)
    return ordered and {"param", "local"}.isdisjoint(ins.mods)


@instruction("ld", "ldu", unit="memory", accesses=accessed_bytes, strong=is_ordered)
def emit_load(g: Generator, ins: Instruction) -> None:
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


def _unsigned(size: int) -> str:
    return "c16" if size == 16 else f"u{size}"


def _bits(g: Generator, operand: Operand, kind: str) -> str:
    """A stored element as the unsigned dtype of its size."""
    dtype, unsigned = DTYPE[kind], _unsigned(TYPE_BYTES[kind])
    return g.read(operand, dtype) + ("" if dtype == unsigned else f".view({unsigned})")


def emit_store_async(g: Generator, ins: Instruction) -> None:
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
    value = joined(g, items, DTYPE[kind], _unsigned(size))
    g.require_defined()
    g.emit(f"store_async(E, C, ({where}, {barrier}), {value}, {g.lanes()}, {size}, {g.pc})")


@instruction(
    "st",
    unit="memory",
    result=False,
    accesses=accessed_bytes,
    strong=is_ordered,
    asynchronous=lambda ins: "async" in ins.mods,
)
def emit_store(g: Generator, ins: Instruction) -> None:
    if g.mods.take("async"):
        emit_store_async(g, ins)
        return
    kind = g.mods.type()
    space, _ = take_access(g, ins.operands[0])
    items = vector_of(g, ins.operands[1])
    size = TYPE_BYTES[kind] * len(items)
    if size > 16 or space in ("param", "const"):
        raise g.unknown("an access of this width or space")
    where = address(g, ins.operands[0], space)
    if space == "local":
        emit_store_local(g, where, items, kind)
        return
    if len(items) > 1:
        value = joined(g, items, DTYPE[kind], _unsigned(size))
    else:
        value = _bits(g, items[0], kind)
    g.require_defined()
    g.emit(f"store_{FUNCTION[space]}(E, C, {where}, {value}, {g.lanes()}, {size}, {g.pc})")


def emit_store_local(g: Generator, where: str, items: tuple[Operand, ...], kind: str) -> None:
    """A store to local memory, of each element by itself.

    Compilers store vectors of which the program has set a part. An element from a register that
    nothing has written becomes one that nothing has written, and is an error where it is read.
    """
    g.require_defined()  # the address
    size = TYPE_BYTES[kind]
    for place, item in enumerate(items):
        value = _bits(g, item, kind)
        written = " & ".join(sorted(set(g.defined))) or "None"
        g.defined = []
        here = f"{where} + {place * size}" if place else where
        g.emit(f"store_local(E, C, {here}, {value}, {g.lanes()}, {size}, {g.pc}, {written})")


def joined(g: Generator, items: tuple[Operand, ...], part: str, whole: str) -> str:
    """Items of dtype ``part`` side by side as one value of dtype ``whole``."""
    return f"join_parts({whole}, {part}, {', '.join(g.read(item, part) for item in items)})"


@instruction("mov", unit="move")
def emit_move(g: Generator, ins: Instruction) -> None:
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


@instruction("cvta", unit="move")
def emit_convert_address(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    to_space = g.mods.take("to")
    space = space_of(g)
    base = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}.get(space, 0)
    value = g.read(ins.operands[1], DTYPE[kind])
    if base:
        value = f"{value} {'-' if to_space else '+'} {g.literal(base, DTYPE[kind])}"
    g.write(ins.operands[0], value, DTYPE[kind])


@instruction("isspacep", unit="move")
def emit_is_space(g: Generator, ins: Instruction) -> None:
    space = space_of(g)
    kind = {"global": 0, "shared": 1, "local": 2}.get(space)
    if kind is None:
        raise g.unknown("this space")
    g.write(ins.operands[0], f"spaces({g.read(ins.operands[1], 'i8')}) == {kind}", "b1")


@instruction("prefetch", "prefetchu", "discard", "applypriority", unit="memory", result=False)
@instruction("pmevent", unit="control", result=False)
def emit_no_effect(g: Generator, ins: Instruction) -> None:
    g.mods.left.clear()


@instruction("createpolicy", unit="move")
def emit_create_policy(g: Generator, ins: Instruction) -> None:
    g.mods.left.clear()
    g.write(ins.operands[0], g.literal(0, "u8"), "u8")


@instruction("alloca", "stacksave", "stackrestore", unit="control")
def emit_stack(g: Generator, ins: Instruction) -> None:
    raise g.unknown("a stack of run-time size")
