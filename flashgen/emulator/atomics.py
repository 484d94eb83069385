"""Atomic read-modify-write on global and shared memory.

Lanes that hit the same address take turns, in the order of their warps and lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.access import (
    _BASES,
    _spaces,
    active,
    check_window,
    locate,
    shared_base,
    spread,
)
from flashgen.emulator.cohort import Cohort
from flashgen.emulator.dtypes import DTYPE
from flashgen.emulator.floats import maximum, minimum
from flashgen.emulator.halves import half_op, half_op2
from flashgen.emulator.memory import SHIFT
from flashgen.emulator.ptx import TYPE_BYTES
from flashgen.emulator.recorder import ATOMIC
from flashgen.emulator.registry import runtime

Array = npt.NDArray[Any]


@runtime
def atomic(
    E: Any,
    C: Cohort,
    space: str,
    operation: str,
    kind: str,
    address: Any,
    values: Any,
    lanes: Any,
    pc: int,
    wants_old: bool,
) -> Any:
    """Applies an atomic; returns the old values (n, 32) with the dtype of ``kind``."""
    size = TYPE_BYTES[kind]
    chosen = active(C, lanes)
    dtype = np.dtype("u2" if kind in ("f16", "bf16") else DTYPE[kind])
    out = np.zeros((C.n, 32), dtype)
    if not chosen.any():
        return out
    where = spread(address, C.n)
    if space == "generic":
        kinds = np.unique(_spaces(where)[chosen])
        if len(kinds) > 1:
            for k in kinds:
                part = chosen & (_spaces(where) == k)
                name = ("global", "shared", "local")[k]
                args = (address - _BASES[k], values, part, pc, wants_old)
                got = atomic(E, C, name, operation, kind, *args)
                out[part] = got[part]
            return out
        space = ("global", "shared", "local")[int(kinds[0])]
        where = where - _BASES[int(kinds[0])]
    if space == "global":
        offset = locate(E, C, where, chosen, size, pc, True)
        E.counters.global_read_bytes += offset.size * size
        E.counters.global_write_bytes += offset.size * size
        if E.recorder is not None:
            E.recorder.whole(C, offset, chosen, size, pc, ATOMIC)
        if E.global_races:
            E.global_races.atomic(C, offset, size, pc, chosen)
        view = E.memory.flat.view[size]
    elif space == "shared":
        check_window(E, C, where, chosen, size, pc, E.shared_size, "shared")
        full = where + shared_base(E, C)
        if E.recorder is not None:
            E.recorder.shared(C, where, chosen, size, pc, in_turn=True)
        if E.shared_races:
            E.shared_races.atomic(C, full, size, pc, chosen)
        offset = full[chosen]
        view = E.shared.view[size]
    else:
        raise ValueError("atomics on local memory")
    given = [spread(v, C.n)[chosen] for v in values]
    old = apply(view.view(dtype), offset >> SHIFT[size], operation, kind, given)
    out[chosen] = old
    return out


def apply(memory: Array, index: Array, operation: str, kind: str, values: list[Array]) -> Array:
    """Read-modify-write at ``index``; equal indices one after the other. Returns old values."""
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
    """How many earlier entries have the same index."""
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
