"""Atomic read-modify-write on global and shared memory.

Lanes that access the same address are served one after the other, by warp and lane.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.bounds import check_window, locate
from flashgen.emulator.counters.recorder import ATOMIC
from flashgen.emulator.isa.registry import runtime
from flashgen.emulator.isa.semantics.floats import maximum, minimum
from flashgen.emulator.isa.semantics.halves import half_op, half_op2
from flashgen.emulator.isa.semantics.memory import BASES, spaces
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.ptx.syntax import TYPE_BYTES
from flashgen.emulator.state.cohort import Cohort, active, spread
from flashgen.emulator.state.memory import SHIFT
from flashgen.emulator.state.wave import Wave

Array = npt.NDArray[Any]


@runtime
def atomic(
    machine: Wave,
    cohort: Cohort,
    space: str,
    operation: tuple[str, str],
    address: Any,
    values: Any,
    lanes: Any,
    pc: int,
) -> Any:
    """Applies an atomic to each active lane.

    Args:
        space: "global", "shared" or "generic".
        operation: the operation and the PTX type of the elements, such as ("add", "f32").
        values: one operand; two for "cas".

    Returns:
        The old values (n, 32), with the dtype of the elements.
    """
    name, kind = operation
    size = TYPE_BYTES[kind]
    chosen = active(cohort, lanes)
    dtype = np.dtype("u2" if kind in ("f16", "bf16") else DTYPE[kind])
    out = np.zeros((cohort.n, 32), dtype)
    if not chosen.any():
        return out
    where = spread(address, cohort.n)
    if space == "generic":
        kinds = np.unique(spaces(where)[chosen])
        if len(kinds) > 1:
            for k in kinds:
                part = chosen & (spaces(where) == k)
                own = ("global", "shared", "local")[k]
                got = atomic(machine, cohort, own, operation, address - BASES[k], values, part, pc)
                out[part] = got[part]
            return out
        space = ("global", "shared", "local")[int(kinds[0])]
        where = where - BASES[int(kinds[0])]
    if space == "global":
        offset = locate(machine, cohort, where, chosen, size, pc, True)
        machine.counters.global_read_bytes += offset.size * size
        machine.counters.global_write_bytes += offset.size * size
        if machine.recorder is not None:
            machine.recorder.global_access(cohort, offset, chosen, size, pc, ATOMIC)
        if machine.global_races:
            machine.global_races.atomic(cohort, offset, size, pc, chosen)
        view = machine.memory.flat.view[size]
    elif space == "shared":
        check_window(machine, cohort, where, chosen, size, pc, machine.shared_size, "shared")
        full = where + machine.shared_base(cohort)
        if machine.recorder is not None:
            machine.recorder.shared_access(cohort, where, chosen, size, pc, in_turn=True)
        if machine.shared_races:
            machine.shared_races.atomic(cohort, full, size, pc, chosen)
        offset = full[chosen]
        view = machine.shared.view[size]
    else:
        raise ValueError("atomics on local memory")
    given = [spread(v, cohort.n)[chosen] for v in values]
    old = apply(view.view(dtype), offset >> SHIFT[size], name, kind, given)
    out[chosen] = old
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


def combine(operation: str, kind: str, old: Array, values: list[Array]) -> Any:
    """The new values of a read-modify-write."""
    new = values[0]
    if kind in ("f16", "bf16"):
        return half_op(operation, kind, "", old, new)
    if kind in ("f16x2", "bf16x2"):
        return half_op2(operation, kind[:-2], "", old, new)
    is_float = kind[0] == "f"
    if operation == "add":
        return old + new
    if operation == "exch":
        return new
    if operation == "cas":
        return np.where(old == new, values[1], old)
    if operation == "min":
        return minimum(old, new) if is_float else np.minimum(old, new)
    if operation == "max":
        return maximum(old, new) if is_float else np.maximum(old, new)
    if operation == "and":
        return old & new
    if operation == "or":
        return old | new
    if operation == "xor":
        return old ^ new
    one, zero = old.dtype.type(1), old.dtype.type(0)
    if operation == "inc":
        return np.where(old >= new, zero, old + one)
    return np.where((old == zero) | (old > new), new, old - one)
