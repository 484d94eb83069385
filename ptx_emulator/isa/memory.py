"""Loads, stores and moves: the run-time functions of every state space, and emitters.

The functions take the `Execution` of an instruction, which has its active lanes, and an address: an
int64 value of shape (), (n, 1), (1, 32) or (n, 32). Loaded values have the shape of the address (or
(n, 32) where some lanes are inactive) and an unsigned dtype of the access width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator.checks.bounds import check_window, locate
from ptx_emulator.checks.shared_races import SharedRaces
from ptx_emulator.counters.recorder import READ, WRITE, count_sectors
from ptx_emulator.errors import OutOfBounds
from ptx_emulator.isa.cluster import remote, resolved
from ptx_emulator.isa.definedness import above, bytes_of_marks
from ptx_emulator.isa.generator import Generator, instruction, items_of
from ptx_emulator.ptx.instructions import may_read_local, registers_in
from ptx_emulator.ptx.register_types import DTYPE
from ptx_emulator.ptx.syntax import TYPE_BYTES, Imm, Instruction, Mem, Operand, Reg, Sym, Vec
from ptx_emulator.state.cohort import LANES
from ptx_emulator.state.memory import (
    ELEMENT,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    SHIFT,
    WINDOW_BYTES,
    Array,
)
from ptx_emulator.state.wave import ALL_BITS, Execution, Stored, UnwrittenLocal

_WRITTEN = {size: np.full(size, 255, np.uint8).view(dtype)[0] for size, dtype in ELEMENT.items()}
_BASES = (0, SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW)


def _changing(
    execution: Execution, view: Array, offsets: Array, value: Any, races: SharedRaces | None
) -> Array:
    """The lanes (n, 32) of a store that change memory; one of those that write the same value.

    What ``races`` has not seen written changes, whatever it holds.
    """
    chosen, size = execution.active, view.itemsize
    elements, values = offsets[chosen] >> SHIFT[size], execution.spread(value)[chosen]
    _, first, which = np.unique(elements, return_index=True, return_inverse=True)
    again = values == values[first][which]
    again[first] = False
    changes = np.zeros(chosen.shape, bool)
    other = view.take(elements) != values
    if races is not None:
        other |= races.never_written(offsets[chosen], size)
    changes[chosen] = ~again & other
    return changes


def _seen_by(
    execution: Execution, view: Array, offsets: Array, value: Any, races: SharedRaces | None
) -> Execution:
    """A store, at offsets in ``view`` (n, 32), as the checkers of races see it."""
    if "same_value" in execution.machine.config.allow:
        return execution._replace(lanes=_changing(execution, view, offsets, value, races))
    return execution


# ---- shared memory


def _shared_offsets(execution: Execution, address: Any, size: int, anywhere: bool) -> Array:
    """Checked offsets into `Wave.shared`; ``anywhere`` in the cluster, or in the warp's block."""
    machine = execution.machine
    if anywhere and remote(address):
        blocks, offset = resolved(execution, address, size)
        return blocks * machine.shared_pitch + offset
    check_window(execution, address, size, machine.shared_size, "shared")
    if machine.recorder is not None:
        machine.recorder.shared_access(execution, address, size)
    return address + machine.shared_base(execution.cohort)  # type: ignore[no-any-return]


def load_shared(execution: Execution, address: Any, size: int, anywhere: bool = False) -> Array:
    """Reads ``size`` bytes per lane from shared memory."""
    machine = execution.machine
    offsets = _shared_offsets(execution, address, size, anywhere)
    if machine.shared_races:
        machine.shared_races.read(execution, offsets, size)
    index = offsets >> SHIFT[size]
    if execution.lanes is None:
        machine.counters.shared_read_bytes += 32 * execution.cohort.n * size
        return machine.shared.view[size].take(index)
    chosen = execution.chosen(index)
    machine.counters.shared_read_bytes += len(chosen) * size
    return execution.filled(machine.shared.view[size].take(chosen))


def store_shared(
    execution: Execution, address: Any, value: Any, size: int, anywhere: bool = False
) -> None:
    """Writes ``size`` bytes per lane to shared memory."""
    machine, view = execution.machine, execution.machine.shared.view[size]
    offsets = execution.spread(_shared_offsets(execution, address, size, anywhere))
    if machine.shared_races:
        machine.stored = Stored(execution, view, offsets, value)
        seen = _seen_by(execution, view, offsets, value, machine.shared_races)
        machine.shared_races.write(seen, offsets, size)
        machine.stored = None
    index = execution.chosen(offsets >> SHIFT[size])
    machine.counters.shared_write_bytes += index.size * size
    view[index] = execution.chosen(value)


def ones_where_unwritten(execution: Execution, value: Any, written: Any) -> Any:
    """A stored value with ones in the bits that were never written, if that is allowed."""
    written = written | np.uint64(above(value.itemsize))  # a register may be wider
    execution.machine.require_defined(execution, written, "uninitialised_rows")
    if np.all(written == ALL_BITS):
        return value
    shape = np.broadcast_shapes(np.shape(value), np.shape(written))
    filled = np.array(np.broadcast_to(value, shape))
    filled[..., None].view(np.uint8)[...] |= ~bytes_of_marks(written, value.itemsize)
    return filled


def load_cluster(execution: Execution, address: Any, size: int) -> Array:
    """Reads shared memory of any block of the cluster."""
    return load_shared(execution, address, size, True)


def store_cluster(execution: Execution, address: Any, value: Any, size: int) -> None:
    """Writes shared memory of any block of the cluster."""
    store_shared(execution, address, value, size, True)


def store_async(execution: Execution, address: Any, barrier: Any, values: Any, size: int) -> None:
    """st.async: a store to shared memory of the cluster that an mbarrier of its block counts."""
    store_cluster(execution, address, values, size)
    execution.machine.mbarriers.complete_store(execution, address, barrier, size)


# ---- local memory


def _local_index(execution: Execution, address: Any, size: int) -> Array:
    machine, rows = execution.machine, execution.cohort.rows
    check_window(execution, address, size, machine.program.local_bytes, "local")
    index: Array = (rows[:, None] * 32 + LANES) * machine.program.local_bytes + address
    return index >> SHIFT[size]


def load_local(execution: Execution, address: Any, size: int) -> Array:
    """Reads ``size`` bytes per lane from local memory."""
    index = _local_index(execution, address, size)
    execution.machine.counters.local_bytes += 32 * execution.cohort.n * size
    if execution.lanes is not None:
        index = np.where(execution.spread(execution.lanes), index, 0)
    return execution.machine.local.view[size].take(index)


def written_local(execution: Execution, address: Any, size: int, parts: int) -> list[Any]:
    """The marks (n, 32), see `definedness`, of each of the parts of an access to local memory."""
    machine, element_bytes = execution.machine, size // parts
    assert machine.local_written is not None
    index = _local_index(execution, address, size)
    marks = machine.local_written.view[1].reshape(-1, size)
    written = marks.take(np.where(execution.active, index, 0), axis=0)
    written[~execution.active] = 255
    missing: Any = (written != 255).any(axis=2)
    if not missing.any():
        return [ALL_BITS] * parts
    element = np.argmax(written != 255, axis=2) // element_bytes
    offset = execution.spread(address) + element_bytes * element
    machine.unwritten[execution.pc] = UnwrittenLocal(
        execution.cohort.rows, missing, offset, element_bytes
    )
    split = written.reshape(*missing.shape, parts, element_bytes)
    if element_bytes > 8:
        split = split[..., :8] & split[..., 8:]
    packed = np.full((*missing.shape, parts, 8), 255, np.uint8)
    packed[..., :element_bytes] = split
    return [packed.view(np.uint64)[..., part, 0] for part in range(parts)]


def store_local(
    execution: Execution, address: Any, value: Any, size: int, written: Any = None
) -> None:
    """Stores an element of each thread. ``written``: the marks of the register; None: all bits."""
    machine, index = execution.machine, execution.chosen(_local_index(execution, address, size))
    machine.counters.local_bytes += 32 * execution.cohort.n * size
    machine.local.view[size][index] = execution.chosen(value)
    if machine.local_written is not None:
        marks = _WRITTEN[size]
        if written is not None:
            element = bytes_of_marks(written, size).view(ELEMENT[size])[..., 0]
            marks = execution.chosen(element)
        machine.local_written.view[size][index] = marks


# ---- global memory


def load_global(execution: Execution, address: Any, size: int, noted: bool = True) -> Array:
    """Reads ``size`` bytes per lane from global memory; see `GlobalRaces.read`."""
    machine, offset = execution.machine, locate(execution, address, size, False)
    count = 32 * execution.cohort.n if execution.lanes is None else len(offset)
    machine.counters.global_read_bytes += size * count
    machine.counters.global_read_sectors += count_sectors(execution, offset)
    if machine.recorder is not None:
        machine.recorder.global_access(execution, offset, size, READ)
    if machine.global_races:
        machine.global_races.read(execution, offset, size, noted)
    return execution.filled(machine.memory.flat.view[size].take(offset >> SHIFT[size]))


def store_global(execution: Execution, address: Any, value: Any, size: int) -> None:
    """Writes ``size`` bytes per lane to global memory."""
    if execution.lanes is None:
        address = execution.spread(address)
    machine, offset = execution.machine, locate(execution, address, size, True)
    view = machine.memory.flat.view[size]
    machine.counters.global_write_bytes += offset.size * size
    machine.counters.global_write_sectors += count_sectors(execution, offset)
    if machine.recorder is not None:
        machine.recorder.global_access(execution, offset, size, WRITE)
    if machine.global_races:
        base = machine.memory.base
        full = offset if execution.lanes is None else execution.spread(address) - base
        seen = _seen_by(execution, view, full, value, None)
        machine.stored = Stored(execution, view, full, value)
        machine.global_races.write(seen, offset if seen is execution else full[seen.lanes], size)
        machine.stored = None
    view[offset >> SHIFT[size]] = execution.chosen(value)


# ---- parameters and generic addresses


def load_parameter(execution: Execution, address: Any, size: int) -> Array:
    """Reads the kernel's parameters; a constant address gives a uniform value."""
    machine = execution.machine
    check_window(execution, address, size, machine.program.param_bytes, "parameter")
    if execution.lanes is not None:
        address = np.where(execution.spread(execution.lanes), address, 0)
    if address.ndim == 0:
        start = int(address)
        return machine.parameters[start : start + size].view(ELEMENT[size])[0]  # type: ignore[no-any-return]
    padded = machine.parameters[: len(machine.parameters) // size * size]
    return padded.view(ELEMENT[size]).take(address >> SHIFT[size])  # type: ignore[no-any-return]


def spaces(address: Any) -> Array:
    """0 global, 1 shared, 2 local, 3 parameters for each generic address."""
    windows = enumerate(_BASES[1:], 1)
    within = [((address >= w) & (address < w + WINDOW_BYTES)) * kind for kind, w in windows]
    return np.asarray(sum(within))


def store_parameter(execution: Execution, address: Any, value: Any, size: int) -> None:
    """Fails: the parameters of a kernel are constant."""
    what = f"{size}-byte store to the parameters of the kernel, which are constant"
    numbers = f"parameter offset {int(execution.spread(address).flat[0])}"
    way_out = "copy the parameter to a variable and change that"
    execution.machine.fail(OutOfBounds, what, execution.first(), numbers, way_out)


_STORES = (store_global, store_cluster, store_local, store_parameter)


def by_space(execution: Execution, address: Any) -> list[tuple[int, Any, Execution]]:
    """Splits an access to generic addresses by space.

    Returns:
        For each space that the active lanes access: its number (see `spaces`), the addresses in
        this space, and the execution by its lanes.
    """
    kinds = spaces(address)
    present = np.unique(kinds if execution.lanes is None else execution.chosen(kinds)).tolist()
    if len(present) == 1:
        return [(present[0], address - _BASES[present[0]], execution)]
    split = []
    for kind in present:
        part = execution._replace(lanes=execution.spread(kinds == kind) & execution.active)
        split.append((kind, execution.spread(address - _BASES[kind]), part))
    return split


def load_generic(execution: Execution, address: Any, size: int) -> Array:
    """Reads ``size`` bytes per lane from the space of each address."""
    parts = by_space(execution, address)
    loads = (load_global, load_cluster, load_local, load_parameter)
    loaded = [loads[kind](part, offset, size) for kind, offset, part in parts]
    if len(loaded) == 1:
        return loaded[0]
    out = np.zeros((execution.cohort.n, 32), ELEMENT[size])
    for (_, _, part), got in zip(parts, loaded, strict=True):
        out[part.lanes] = got[part.lanes]
    return out


def written_generic(execution: Execution, address: Any, size: int, parts: int) -> list[Array]:
    """As `written_local`; memory of other spaces counts as written, or is checked there."""
    written = [np.full((execution.cohort.n, 32), ALL_BITS) for _ in range(parts)]
    for kind, offset, part in by_space(execution, address):
        if _STORES[kind] is store_local:
            part_written = written_local(part, offset, size, parts)
            written = [a & b for a, b in zip(written, part_written, strict=True)]
    return written


def store_generic(
    execution: Execution, address: Any, value: Any, size: int, written: Any = None
) -> None:
    """Stores to the space of each address; ``written`` as in `store_local`."""
    for kind, offset, part in by_space(execution, address):
        if _STORES[kind] is store_local:
            store_local(part, offset, value, size, written)
            continue
        stored = value if written is None else ones_where_unwritten(part, value, written)
        _STORES[kind](part, offset, stored, size)


SPACES = ("global", "shared", "shared::cta", "local", "param", "param::entry", "const")
# Memory orders and scopes; the emulator executes in an order that satisfies all of them.
ORDERS = ("weak", "relaxed", "acquire", "release", "volatile", "acq_rel", "mmio")
SCOPES = ("cta", "cluster", "gpu", "sys")
_SCOPED = ("relaxed", "acquire", "release", "acq_rel")
_STRONG = (*_SCOPED, "volatile")
# The orders that only the opposite of an access can have
_OPPOSITE = {"ld": ("release", "acq_rel"), "ldu": _STRONG, "st": ("acquire", "acq_rel")}
HINTS = ("ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc", "unified")
HINT_PREFIXES = ("L1::evict", "L1::no_allocate", "L2::evict", "L2::64B", "L2::128B", "L2::256B")
# State space of an access -> the run-time functions that execute it
FUNCTION = {space: space for space in ("global", "shared", "cluster", "local")}
FUNCTION |= {"const": "global", "": "generic"}


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


def shared_address(g: Generator, operand: Operand) -> str:
    """The address of an operand that lies in shared memory; its state space may be missing."""
    if g.mods.take("shared", "shared::cta", "shared::cluster"):
        return address(g, operand, "shared")
    if isinstance(operand, Mem) and isinstance(operand.base, Sym):
        return address(g, operand, "shared")
    return f"({address(g, operand, '')} - {SHARED_WINDOW})"


def space_of(g: Generator) -> str:
    return g.mods.take(*SPACES, "shared::cluster").split("::")[0]


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
    g.mods.take("mmio")
    order, scope = g.mods.take(*ORDERS), g.mods.take(*SCOPES)
    if g.ins.op not in ("atom", "red"):
        g.refuse_if(order in _SCOPED and not scope, "an order without a scope")
        g.refuse_if(order in _OPPOSITE[g.ins.op], f".{order}")
        read_only = "nc" in g.mods.left
        g.refuse_if(read_only and (order in _STRONG or g.ins.op == "st"), "this form of .nc")
    return space, take_hints(g)


def accessed_bytes(ins: Instruction) -> tuple[int, int]:
    """Bytes of an access to shared and to global memory; 16 where it accesses neither."""
    kinds = [word for word in ins.mods if word in TYPE_BYTES]
    if not kinds or not {"param", "local"}.isdisjoint(ins.mods):
        return 16, 16
    size = TYPE_BYTES[kinds[-1]]
    if ins.op not in ("atom", "red"):  # vectors of atomics are one atomic per element
        size *= next((int(word[1]) for word in ins.mods if word in ("v2", "v4", "v8")), 1)
    shared, device = (any(w.startswith(space) for w in ins.mods) for space in ("shared", "global"))
    return 16 if device else size, 16 if shared else size


def is_ordered(ins: Instruction) -> bool:
    """Whether a load or store of memory that threads share has an order, or is volatile."""
    ordered = not set(ORDERS[1:]).isdisjoint(ins.mods)
    return ordered and {"param", "local"}.isdisjoint(ins.mods)


@instruction("ld", "ldu", unit="memory", accesses=accessed_bytes, strong=is_ordered)
def emit_load(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    memory = ins.operands[1]
    space, _ = take_access(g, memory)
    items = vector_of(g, ins.operands[0])
    size = TYPE_BYTES[kind] * len(items)
    g.refuse_if(size > 16 or kind == "pred", "an access wider than 16 bytes")
    address_text = address(g, memory, space)
    function = "parameter" if space == "param" else FUNCTION[space]
    named = isinstance(memory, Mem) and isinstance(memory.base, Sym)
    # A parameter at a constant address is the same in all lanes, active or not.
    execution = g.checked_execution("None" if space == "param" and named else "")
    value = g.let(f"load_{function}({execution}, {address_text}, {size})")
    written = ""
    if g.check and g.program.local_bytes and may_read_local(ins):
        written = g.let(f"written_{function}({execution}, {address_text}, {size}, {len(items)})")
    unpack(g, value, items, kind, written)


def unpack(
    g: Generator, value: str, items: tuple[Operand, ...], kind: str, written: str = ""
) -> None:
    """Assigns the elements of a loaded value; ``written``: a list of the marks of each."""
    dtype = DTYPE[kind]
    marks = "whole({})" if kind[0] == "s" else "{}"  # a sign may be extended
    if len(items) == 1:
        values = f"{value}.view({dtype})"
    else:
        values = g.let(f"{value}.reshape({value}.shape + (1,)).view({dtype})") + "[..., {}]"
    for number, item in enumerate(items):
        g.defined = [marks.format(f"{written}[{number}]")] if written else []
        g.write(item, values.format(number), dtype)
    g.defined = []


def write_parts(g: Generator, parts: str, items: tuple[Operand, ...], dtype: str) -> None:
    """Assigns the elements along the last axis of an expression."""
    g.write_items(items, g.let(parts) + "[..., {}]", dtype)


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
    g.refuse_if(g.mods.take("mmio", "release") or TYPE_BYTES[kind] < 4, "this form")
    g.mods.take("shared::cluster")
    items = vector_of(g, ins.operands[1])
    size = TYPE_BYTES[kind] * len(items)
    g.refuse_if(size > 16, "more than 16 bytes")
    address_text, barrier = (address(g, o, "shared") for o in (ins.operands[0], ins.operands[2]))
    value = joined(g, items, DTYPE[kind], _unsigned(size))
    g.emit(f"store_async({g.checked_execution()}, {address_text}, {barrier}, {value}, {size})")


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
    g.refuse_if(size > 16 or space in ("param", "const"), "an access of this width or space")
    address_text = address(g, ins.operands[0], space)
    maybe_undefined = g.check and not g.program.tracked.keys().isdisjoint(
        register for item in items for register in registers_in(item)
    )
    if space == "local" or (space == "" and maybe_undefined):
        emit_store_each(g, FUNCTION[space], address_text, items, kind)
        return
    if maybe_undefined:
        value = _bits_or_ones(g, items, kind)
    elif len(items) > 1:
        value = joined(g, items, DTYPE[kind], _unsigned(size))
    else:
        value = _bits(g, items[0], kind)
    g.emit(f"store_{FUNCTION[space]}({g.checked_execution()}, {address_text}, {value}, {size})")


def _bits_or_ones(g: Generator, items: tuple[Operand, ...], kind: str) -> str:
    """The elements of a store, of which some may never have been written."""
    execution, values = g.checked_execution(), []  # the address is defined
    for item in items:
        value = _bits(g, item, kind)
        for written in sorted(set(g.defined)):
            value = g.let(f"ones_where_unwritten({execution}, {value}, {written})")
        g.defined = []
        values.append(value)
    size = TYPE_BYTES[kind]
    whole = f"join_parts({_unsigned(size * len(items))}, {_unsigned(size)}, {', '.join(values)})"
    return whole if len(items) > 1 else values[0]


def emit_store_each(
    g: Generator, space: str, address_text: str, items: tuple[Operand, ...], kind: str
) -> None:
    """A store to what may be local memory ("local" or "generic"), of each element by itself.

    Compilers store vectors of which the program has set a part. An element from a register that
    nothing has written becomes one that nothing has written, and is an error where it is read.
    """
    size = TYPE_BYTES[kind]
    execution = g.checked_execution()  # the address is defined
    if len(items) > 1:
        arguments = f"np.asarray({address_text}), {size * len(items)}, {space!r}"
        g.emit(f"check_aligned({execution}, {arguments})")
    for number, item in enumerate(items):
        value = _bits(g, item, kind)
        written = " & ".join(sorted(set(g.defined))) or "None"
        g.defined = []
        element = f"{address_text} + {number * size}" if number else address_text
        g.emit(f"store_{space}({g.checked_execution()}, {element}, {value}, {size}, {written})")


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
        g.refuse_if(not part, "parts smaller than a byte")
        write_parts(g, f"parts_of({g.read(source, dtype)}, u{part})", to.items, f"u{part}")
        return
    if isinstance(to, Reg) and isinstance(source, Reg):
        register_dtype, source_dtype = (g.program.dtype[r.index] for r in (to, source))
        if register_dtype == source_dtype:
            dtype = register_dtype
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
    word = g.mods.take(*SPACES, "shared::cluster")
    kind = {"global": 0, "shared": 1, "local": 2, "param": 3, "const": 0}.get(word.split("::")[0])
    g.refuse_if(kind is None, "this space")
    value = g.let(g.read(ins.operands[1], "i8"))
    text = f"(spaces({value}) == {kind})"
    if kind == 0:  # constants are in the memory of the module's variables
        variables = [v for v in g.program.variables.values() if v.space == "const"]
        starts = [(g.program.constants[v.name], v.size) for v in variables]
        within = [f"(({value} >= {start}) & ({value} < {start + size}))" for start, size in starts]
        constant = "(" + " | ".join(within or [f"({value} != {value})"]) + ")"
        text += f" & {'' if word == 'const' else '~'}{constant}"
    elif word in ("shared", "shared::cta"):
        text += f" & (rank_of(E, C, {value}) == {g.viewed(*g.special('cluster_ctarank'), 'u4')})"
    g.write(ins.operands[0], text, "b1")


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
