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


def atomic(
    execution: Execution, space: str, operation: Operation, address: Any, values: Any
) -> Any:
    """Applies an atomic to each active lane.

    Args:
        space: "global", "shared", "cluster" or "generic".
        values: one operand; two for "cas".

    Returns:
        The old values (n, 32), with the dtype of the elements.
    """
    execution = execution._replace(lanes=execution.active)
    machine, (name, kind), chosen = execution.machine, operation, execution.lanes
    size = TYPE_BYTES[kind]
    dtype = np.dtype("u2" if kind in ("f16", "bf16") else DTYPE[kind])
    out = np.zeros(chosen.shape, dtype)
    if not chosen.any():
        return out
    if space == "generic":
        for number, offset, part in by_space(execution, address):
            part_space = ("global", "cluster", "local", "param")[number]
            out[part.lanes] = atomic(part, part_space, operation, offset, values)[part.lanes]
        return out
    if space == "global":
        offsets = locate(execution, address, size, True)
        machine.counters.global_read_bytes += offsets.size * size
        machine.counters.global_write_bytes += offsets.size * size
        if machine.recorder is not None:
            machine.recorder.global_access(execution, offsets, size, ATOMIC)
        if machine.global_races:
            machine.global_races.write(execution, offsets, size, strong=True)
        view = machine.memory.flat.view[size]
    elif space in ("shared", "cluster"):
        blocks, block_offsets = resolved(execution, address, size)
        full = block_offsets + blocks * machine.shared_pitch
        if machine.recorder is not None:
            machine.recorder.shared_access(execution, block_offsets, size, in_turn=True)
        if machine.shared_races:
            machine.shared_races.atomic(execution, full, size)
        offsets = full[chosen]
        view = machine.shared.view[size]
    else:
        name = "local memory" if space == "local" else "parameters"
        what = f"the emulator does not support atomics on {name}"
        numbers = "no other thread can access local memory, and none may write parameters"
        way_out = "use an ordinary operation, or an address in shared or global memory"
        machine.fail(UnknownInstruction, what, execution.first(), numbers, way_out)
    operands = [execution.chosen(v) for v in values]
    memory, index = view.view(dtype), offsets >> SHIFT[size]
    if (name, kind, space) == ("add", "f32", "global"):
        name = FLUSHED_ADD
    out[chosen] = before = apply(memory, index, name, kind, operands)
    if machine.program.repeats.spins:
        machine.changed |= bool((memory[index] != before).any())
    return out


def apply(memory: Array, index: Array, operation: str, kind: str, values: list[Array]) -> Array:
    """Read-modify-write at ``index``, in order for equal indices; returns the old values."""
    old = np.empty(len(index), memory.dtype)
    turn = _turns(index)
    for number in range(int(turn.max()) + 1 if len(turn) else 0):
        now = turn == number if turn.any() else slice(None)
        elements = index[now]
        before = memory[elements]
        memory[elements] = combine(operation, kind, before, [v[now] for v in values])
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
    execution: Execution, operation: Operation, address: Any, barrier: Any, values: Any
) -> None:
    """red.async: an atomic on shared memory of the cluster that an mbarrier of its block counts."""
    atomic(execution, "cluster", operation, address, values)
    size = TYPE_BYTES[operation[1]]
    execution.machine.mbarriers.complete_store(execution, address, barrier, size)


def _emit_async(g: Generator, ins: Instruction) -> None:
    """red.async: the modifier async is already consumed."""
    for word in ("relaxed", "cluster", "shared::cluster", "mbarrier::complete_tx::bytes"):
        g.mods.take(word)
    operation, kind = g.mods.take(*_OPERATIONS), g.mods.type()
    address_text, barrier = (address(g, ins.operands[index], "shared") for index in (0, 2))
    value = g.read(ins.operands[1], DTYPE[kind])
    arguments = f"{(operation, kind)!r}, {address_text}, {barrier}, ({value},)"
    g.emit(f"atomic_async({g.checked_execution()}, {arguments})")


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
    address_text = address(g, memory, space)
    results = items_of(ins.operands[0])
    many = int(vector[1]) if vector else 1
    lengths = {len(items_of(value)) for value in values} | ({len(results)} if returns else set())
    g.refuse_if(lengths != {many}, "a vector whose length differs from its modifier")
    if vector:
        # PTX aligns a vector to its size, although each of its elements is an atomic of its own.
        size = TYPE_BYTES[kind] * many
        g.emit(f"check_aligned({g.checked_execution()}, {address_text}, {size}, 'global')")
    # One atomic per element of a vector; its results may overwrite operands.
    old_values = []
    for index, operands in enumerate(zip(*map(items_of, values), strict=True)):
        dtype = "u2" if kind in ("f16", "bf16") else DTYPE[kind]
        operand_texts = "".join(g.read(operand, dtype) + ", " for operand in operands)
        element = f"({address_text} + {index * TYPE_BYTES[kind]})" if index else address_text
        arguments = f"{FUNCTION[space]!r}, {(operation, kind)!r}"
        text = f"atomic({g.checked_execution()}, {arguments}, {element}, ({operand_texts}))"
        if returns:
            old_values.append(g.let(text))
        else:
            g.emit(text)
    for result, old in zip(results, old_values, strict=False):
        unpack(g, old, (result,), kind)
