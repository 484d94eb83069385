"""Atomic read-modify-write on global and shared memory.

Lanes that access the same address are served one after the other, by warp and lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator.checks.bounds import locate
from ptx_emulator.counters.recorder import ATOMIC
from ptx_emulator.errors import UnknownInstruction
from ptx_emulator.isa.cluster import resolved
from ptx_emulator.isa.convert import half_op, half_op2
from ptx_emulator.isa.floats import flush, maximum, minimum
from ptx_emulator.isa.generator import Generator, instruction, items_of
from ptx_emulator.isa.memory import FUNCTION, accessed_bytes, address, by_space, take_access, unpack
from ptx_emulator.isa.warp import REDUCTIONS
from ptx_emulator.ptx.register_types import DTYPE
from ptx_emulator.ptx.syntax import TYPE_BYTES, Instruction
from ptx_emulator.state.memory import SHIFT, Array
from ptx_emulator.state.wave import Execution

Operation = tuple[str, str]
"""An operation and the PTX type of its elements, such as ("add", "f32")."""


def atomic(here: Execution, space: str, operation: Operation, address: Any, values: Any) -> Any:
    """Applies an atomic to each active lane.

    Args:
        space: "global", "shared", "cluster" or "generic".
        values: one operand; two for "cas".

    Returns:
        The old values (n, 32), with the dtype of the elements.
    """
    here = here._replace(lanes=here.active)
    machine, (name, kind), chosen = here.machine, operation, here.lanes
    size = TYPE_BYTES[kind]
    dtype = np.dtype("u2" if kind in ("f16", "bf16") else DTYPE[kind])
    out = np.zeros(chosen.shape, dtype)
    if not chosen.any():
        return out
    if space == "generic":
        for number, at, part in by_space(here, address):
            own = ("global", "cluster", "local", "param")[number]
            out[part.lanes] = atomic(part, own, operation, at, values)[part.lanes]
        return out
    if space == "global":
        offset = locate(here, address, size, True)
        machine.counters.global_read_bytes += offset.size * size
        machine.counters.global_write_bytes += offset.size * size
        if machine.recorder is not None:
            machine.recorder.global_access(here, offset, size, ATOMIC)
        if machine.global_races:
            machine.global_races.write(here, offset, size, strong=True)
        view = machine.memory.flat.view[size]
    elif space in ("shared", "cluster"):
        blocks, where = resolved(here, address, size)
        full = where + blocks * machine.shared_pitch
        if machine.recorder is not None:
            machine.recorder.shared_access(here, where, size, in_turn=True)
        if machine.shared_races:
            machine.shared_races.atomic(here, full, size)
        offset = full[chosen]
        view = machine.shared.view[size]
    else:
        name = "local memory" if space == "local" else "parameters"
        what = f"the emulator does not support atomics on {name}"
        numbers = "no other thread can access local memory, and none may write parameters"
        way_out = "use an ordinary operation, or an address in shared or global memory"
        machine.fail(UnknownInstruction, what, here.first(), numbers, way_out)
    given = [here.chosen(v) for v in values]
    memory, index = view.view(dtype), offset >> SHIFT[size]
    if (name, kind, space) == ("add", "f32", "global"):
        name = FLUSHED_ADD
    out[chosen] = before = apply(memory, index, name, kind, given)
    if machine.program.repeats.spins:
        machine.changed |= bool((memory[index] != before).any())
    return out


def apply(memory: Array, index: Array, operation: str, kind: str, values: list[Array]) -> Array:
    """Read-modify-write at ``index``, in order for equal indices; returns the old values."""
    old = np.empty(len(index), memory.dtype)
    turn = _turns(index)
    for number in range(int(turn.max()) + 1 if len(turn) else 0):
        now = turn == number if turn.any() else slice(None)
        at = index[now]
        before = memory[at]
        memory[at] = combine(operation, kind, before, [v[now] for v in values])
        old[now] = before
    return old


def _turns(index: Array) -> Array:
    """For each entry, the number of earlier entries with the same index."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.ones(len(ordered), bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    first = np.maximum.accumulate(np.where(starts, np.arange(len(ordered)), 0))
    turn = np.empty(len(index), np.int64)
    turn[order] = np.arange(len(index)) - first
    return turn


# The units at global memory add float32 so; those at shared memory keep subnormal numbers.
FLUSHED_ADD = "add.ftz"
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **REDUCTIONS,
    FLUSHED_ADD: lambda old, new: flush(flush(old) + flush(new)),
    "exch": lambda old, new: new,
    "cas": lambda old, expected, new: np.where(old == expected, new, old),
    "inc": lambda old, last: np.where(old >= last, 0, old + 1),
    "dec": lambda old, last: np.where((old == 0) | (old > last), last, old - 1),
}


def combine(operation: str, kind: str, old: Array, values: list[Array]) -> Any:
    """The new values of a read-modify-write."""
    if kind in ("f16", "bf16"):
        return half_op(operation, kind, "", old, *values)
    if kind in ("f16x2", "bf16x2"):
        return half_op2(operation, kind[:-2], "", old, *values)
    if (operation, kind) == ("cas", "b128"):
        same = old.view(np.uint64) == values[0].view(np.uint64)
        return np.where(same.reshape(-1, 2).all(axis=1), values[1], old)
    if kind[0] == "f" and operation in ("min", "max"):
        return (minimum if operation == "min" else maximum)(old, *values)
    return _OPERATIONS[operation](old, *values)


_VECTORS = ("f32", "f16", "bf16", "f16x2", "bf16x2")


def atomic_async(
    here: Execution, operation: Operation, address: Any, barrier: Any, values: Any
) -> None:
    """red.async: an atomic on shared memory of the cluster that an mbarrier of its block counts."""
    atomic(here, "cluster", operation, address, values)
    size = TYPE_BYTES[operation[1]]
    here.machine.mbarriers.complete_store(here, address, barrier, size)


def _emit_async(g: Generator, ins: Instruction) -> None:
    """red.async: the modifier async is already consumed."""
    for word in ("relaxed", "cluster", "shared::cluster", "mbarrier::complete_tx::bytes"):
        g.mods.take(word)
    operation, kind = g.mods.take(*_OPERATIONS), g.mods.type()
    where, barrier = (address(g, ins.operands[place], "shared") for place in (0, 2))
    how = f"{(operation, kind)!r}, {where}, {barrier}, ({g.read(ins.operands[1], DTYPE[kind])},)"
    g.emit(f"atomic_async({g.here()}, {how})")


@instruction("atom", unit="memory", accesses=accessed_bytes, strong=True)
@instruction(
    "red",
    unit="memory",
    result=False,
    accesses=accessed_bytes,
    strong=True,
    asynchronous=lambda ins: "async" in ins.mods,
)
def emit_atomic(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    if mods.take("async"):
        _emit_async(g, ins)
        return
    operation = mods.take(*_OPERATIONS)
    kind = mods.take("f16x2", "bf16x2") or mods.type()
    vector = mods.take("v2", "v4", "v8")
    returns = ins.op == "atom"
    memory, *values = ins.operands[1:] if returns else ins.operands
    space, policy = take_access(g, memory)
    mods.take("noftz")
    if policy:
        values.pop()
    g.refuse_if(len(values) != (2 if operation == "cas" else 1), "another number of operands")
    if not operation or space not in FUNCTION or (vector and kind not in _VECTORS):
        raise g.unknown("this operation")
    g.refuse_if(space == "local", "atomics on local memory")
    where = address(g, memory, space)
    results = items_of(ins.operands[0])
    many = int(vector[1]) if vector else 1
    lengths = {len(items_of(value)) for value in values} | ({len(results)} if returns else set())
    g.refuse_if(lengths != {many}, "a vector whose length differs from its modifier")
    if vector:
        # PTX aligns a vector to its size, although each of its elements is an atomic of its own.
        size = TYPE_BYTES[kind] * many
        g.emit(f"check_aligned({g.here()}, {where}, {size}, 'global')")
    # One atomic per element of a vector; its results may overwrite operands.
    found = []
    for place, operands in enumerate(zip(*map(items_of, values), strict=True)):
        dtype = "u2" if kind in ("f16", "bf16") else DTYPE[kind]
        given = "".join(g.read(operand, dtype) + ", " for operand in operands)
        at = f"({where} + {place * TYPE_BYTES[kind]})" if place else where
        how = f"{FUNCTION[space]!r}, {(operation, kind)!r}"
        text = f"atomic({g.here()}, {how}, {at}, ({given}))"
        if returns:
            found.append(g.let(text))
        else:
            g.emit(text)
    for result, old in zip(results, found, strict=False):
        unpack(g, old, (result,), kind)
