"""Loads and stores of every state space, called from generated code.

An address is an int64 value of shape (), (n, 1), (1, 32) or (n, 32). ``lanes`` is None when all
lanes are active, else a boolean value that says which are. Loaded values have the shape of the
address (or (n, 32) when lanes are masked) and an unsigned dtype of the access width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.cohort import Cohort
from flashgen.emulator.errors import Misaligned, OutOfBounds
from flashgen.emulator.memory import (
    ELEMENT,
    LOCAL_WINDOW,
    SHARED_WINDOW,
    SHIFT,
    WINDOW_BYTES,
)
from flashgen.emulator.recorder import READ, WRITE
from flashgen.emulator.registry import runtime

Array = npt.NDArray[Any]


def spread(value: Any, n: int) -> Array:
    """A value of any shape as (n, 32)."""
    return np.broadcast_to(value, (n, 32))


def active(C: Cohort, lanes: Any) -> Array:
    return spread(True if lanes is None else lanes, C.n)


def first_bad(C: Cohort, lanes: Any, bad: Any) -> tuple[int, int]:
    """Row and lane of the first active lane for which ``bad`` holds."""
    row, lane = np.argwhere(spread(bad, C.n) & active(C, lanes))[0]
    return int(row), int(lane)


# ---- shared memory


def shared_base(E: Any, C: Cohort) -> Array:
    base = C.shared_base
    if base is None:
        base = C.shared_base = E.shared_base_of_row[C.rows]
    return base


def check_window(
    E: Any, C: Cohort, address: Any, lanes: Any, size: int, pc: int, limit: int, space: str
) -> None:
    """Bounds and alignment of shared or local addresses."""
    if lanes is None:
        # The OR of all addresses is an upper bound of each and has all their low bits.
        both = int(np.bitwise_or.reduce(address, axis=None)) if address.ndim else int(address)
        if 0 <= both <= limit - size and not both & (size - 1):
            return
    bad = (address < 0) | (address > limit - size)
    if (spread(bad, C.n) & active(C, lanes)).any():
        row, lane = first_bad(C, lanes, bad)
        at = int(spread(address, C.n)[row, lane])
        E.fail(
            OutOfBounds,
            f"{size}-byte access outside {space} memory",
            C,
            pc,
            row=row,
            lane=lane,
            numbers=f"offset {at:,} of {limit:,} bytes of {space} memory",
            way_out="check the index, or pass a larger shared_bytes"
            if space == "shared"
            else "check the index",
        )
    check_aligned(E, C, address, lanes, size, pc, space)


def check_aligned(E: Any, C: Cohort, address: Any, lanes: Any, size: int, pc: int, s: str) -> None:
    bad = (address & (size - 1)) != 0
    if not (spread(bad, C.n) & active(C, lanes)).any():
        return
    row, lane = first_bad(C, lanes, bad)
    at = int(spread(address, C.n)[row, lane])
    extra = ""
    if s == "global":
        extra = f"; {E.memory.describe(at)}"
    E.fail(
        Misaligned,
        f"misaligned {size}-byte access to {s} memory",
        C,
        pc,
        row=row,
        lane=lane,
        numbers=f"address {at:#x} is {at & (size - 1)} mod {size}{extra}",
        way_out=f"make the address a multiple of {size} bytes, or use narrower accesses",
    )


@runtime
def load_shared(E: Any, C: Cohort, address: Any, lanes: Any, size: int, pc: int) -> Array:
    """Reads ``size`` bytes per lane from shared memory."""
    check_window(E, C, address, lanes, size, pc, E.shared_size, "shared")
    where = address + shared_base(E, C)
    view = E.shared.view[size]
    index = where >> SHIFT[size]
    if E.recorder is not None:
        E.recorder.shared(C, address, lanes, size, pc)
    if lanes is None:
        E.counters.shared_read_bytes += 32 * C.n * size
        if E.shared_races:
            E.shared_races.read(C, where, size, pc, None)
        return view.take(index)  # type: ignore[no-any-return]
    lanes = spread(lanes, C.n)
    chosen = spread(index, C.n)[lanes]
    E.counters.shared_read_bytes += len(chosen) * size
    if E.shared_races:
        E.shared_races.read(C, where, size, pc, lanes)
    out = np.zeros((C.n, 32), ELEMENT[size])
    out[lanes] = view.take(chosen)
    return out


@runtime
def store_shared(
    E: Any, C: Cohort, address: Any, value: Any, lanes: Any, size: int, pc: int
) -> None:
    """Writes ``size`` bytes per lane to shared memory."""
    check_window(E, C, address, lanes, size, pc, E.shared_size, "shared")
    where = spread(address + shared_base(E, C), C.n)
    if E.recorder is not None:
        E.recorder.shared(C, address, lanes, size, pc)
    if E.shared_races:
        E.shared_races.write(C, where, size, pc, lanes)
    index = where >> SHIFT[size]
    value = spread(value, C.n)
    if lanes is not None:
        lanes = spread(lanes, C.n)
        index, value = index[lanes], value[lanes]
    E.counters.shared_write_bytes += index.size * size
    E.shared.view[size][index] = value


# ---- local memory


def _local_index(E: Any, C: Cohort, address: Any, lanes: Any, size: int, pc: int) -> Array:
    limit = E.program.local_bytes
    check_window(E, C, address, lanes, size, pc, limit, "local")
    thread = C.rows[:, None] * 32 + np.arange(32)
    E.counters.local_bytes += 32 * C.n * size
    return (thread * limit + address) >> SHIFT[size]  # type: ignore[no-any-return]


@runtime
def load_local(E: Any, C: Cohort, address: Any, lanes: Any, size: int, pc: int) -> Array:
    index = _local_index(E, C, address, lanes, size, pc)
    if lanes is not None:
        index = np.where(spread(lanes, C.n), index, 0)
    return E.local.view[size].take(index)  # type: ignore[no-any-return]


@runtime
def store_local(
    E: Any, C: Cohort, address: Any, value: Any, lanes: Any, size: int, pc: int
) -> None:
    index = _local_index(E, C, address, lanes, size, pc)
    value = spread(value, C.n)
    if lanes is not None:
        lanes = spread(lanes, C.n)
        index, value = index[lanes], value[lanes]
    E.local.view[size][index] = value


# ---- global memory


def locate(E: Any, C: Cohort, address: Any, lanes: Any, size: int, pc: int, write: bool) -> Any:
    """Checks global addresses; returns the offsets into the arena of the active lanes.

    The result has the shape of ``address`` when ``lanes`` is None, else one entry per active lane.
    """
    memory = E.memory
    if lanes is None:
        chosen = address
    else:
        chosen = spread(address, C.n)[spread(lanes, C.n)]
        if not len(chosen):
            memory.touched = []
            return chosen
    low, high = (int(chosen.min()), int(chosen.max())) if chosen.ndim else (int(chosen),) * 2
    place = memory.find(low)
    if place < 0 or high + size > memory.ends[place]:
        starts = np.searchsorted(memory.starts, chosen, "right") - 1
        bad = (starts < 0) | (chosen + size > memory.ends[starts])
        if bad.any():
            _out_of_bounds(E, C, address, lanes, size, pc, write)
        touched = np.unique(starts).tolist()
    else:
        touched = [place]
    memory.touched = touched
    if size > 1 and int(np.bitwise_or.reduce(chosen, axis=None)) & (size - 1):
        check_aligned(E, C, address, lanes, size, pc, "global")
    if write:
        for index in touched:
            allocation = memory.allocations[index]
            allocation.dirty = True
            if not allocation.writable:
                E.fail(
                    OutOfBounds,
                    f"a store to {allocation.label}, whose numpy array is read-only",
                    C,
                    pc,
                    numbers=memory.describe(low),
                    way_out="pass a writable array, or do not write to it",
                )
    return chosen - memory.base


def _out_of_bounds(
    E: Any, C: Cohort, address: Any, lanes: Any, size: int, pc: int, w: bool
) -> None:
    memory = E.memory
    everywhere = spread(address, C.n)
    starts = np.searchsorted(memory.starts, everywhere, "right") - 1
    bad = (starts < 0) | (everywhere + size > memory.ends[np.maximum(starts, 0)])
    row, lane = first_bad(C, lanes, bad)
    at = int(everywhere[row, lane])
    E.fail(
        OutOfBounds,
        f"{size}-byte {'store' if w else 'load'} outside every buffer",
        C,
        pc,
        row=row,
        lane=lane,
        numbers=f"address {at:#x}: {memory.describe(at)}; "
        f"{int((bad & active(C, lanes)).sum())} lanes of this instruction are outside",
        way_out="check the index against the array that was passed",
    )


def count_sectors(C: Cohort, offset: Any, lanes: Any) -> int:
    """Distinct 32-byte sectors that each warp touches, summed over warps."""
    if lanes is None:
        if offset.ndim == 0 or offset.shape[1] == 1:
            return C.n
        sector = offset >> 5
        step = np.diff(sector, axis=1)
        if offset.shape[0] == C.n and int(step.min()) >= 0:
            return C.n + int(np.count_nonzero(step))
        sector = np.sort(spread(sector, C.n), axis=1)
        return C.n + int(np.count_nonzero(np.diff(sector, axis=1)))
    lanes = spread(lanes, C.n)
    sector = np.full((C.n, 32), -1, np.int64)
    sector[lanes] = offset >> 5
    sector.sort(axis=1)
    changes = int(np.count_nonzero(np.diff(sector, axis=1)))
    return changes + int(np.count_nonzero(sector[:, 0] >= 0))


@runtime
def load_global(E: Any, C: Cohort, address: Any, lanes: Any, size: int, pc: int) -> Array:
    """Reads ``size`` bytes per lane from global memory."""
    offset = locate(E, C, address, lanes, size, pc, False)
    counters = E.counters
    lanes_read = 32 * C.n if lanes is None else len(offset)
    counters.global_read_bytes += lanes_read * size
    counters.global_read_sectors += count_sectors(C, offset, lanes)
    if E.recorder is not None:
        E.recorder.whole(C, offset, lanes, size, pc, READ)
    if E.global_races:
        E.global_races.read(C, offset, size, pc, lanes)
    view = E.memory.flat.view[size]
    if lanes is None:
        return view.take(offset >> SHIFT[size])  # type: ignore[no-any-return]
    out = np.zeros((C.n, 32), ELEMENT[size])
    out[spread(lanes, C.n)] = view.take(offset >> SHIFT[size])
    return out


@runtime
def store_global(
    E: Any, C: Cohort, address: Any, value: Any, lanes: Any, size: int, pc: int
) -> None:
    """Writes ``size`` bytes per lane to global memory."""
    if lanes is None:
        address = spread(address, C.n)
    offset = locate(E, C, address, lanes, size, pc, True)
    counters = E.counters
    counters.global_write_bytes += offset.size * size
    counters.global_write_sectors += count_sectors(C, offset, lanes)
    if E.recorder is not None:
        E.recorder.whole(C, offset, lanes, size, pc, WRITE)
    if E.global_races:
        E.global_races.write(C, offset, size, pc, lanes)
    value = spread(value, C.n)
    if lanes is not None:
        value = value[spread(lanes, C.n)]
    E.memory.flat.view[size][offset >> SHIFT[size]] = value


# ---- parameters and generic addresses


@runtime
def load_parameter(E: Any, C: Cohort, address: Any, lanes: Any, size: int, pc: int) -> Array:
    """Reads the kernel's parameters; a constant address gives a uniform value."""
    check_window(E, C, address, lanes, size, pc, E.program.param_bytes, "parameter")
    if lanes is not None:
        address = np.where(spread(lanes, C.n), address, 0)
    data = E.parameters
    if address.ndim == 0:
        at = int(address)
        return data[at : at + size].view(ELEMENT[size])[0]  # type: ignore[no-any-return]
    padded = data[: len(data) // size * size]
    return padded.view(ELEMENT[size]).take(address >> SHIFT[size])  # type: ignore[no-any-return]


def _spaces(address: Any) -> Array:
    """0 global, 1 shared, 2 local for each generic address."""
    shared = (address >= SHARED_WINDOW) & (address < SHARED_WINDOW + WINDOW_BYTES)
    local = (address >= LOCAL_WINDOW) & (address < LOCAL_WINDOW + WINDOW_BYTES)
    return np.asarray(shared * 1 + local * 2)


_LOADS = (load_global, load_shared, load_local)
_STORES = (store_global, store_shared, store_local)
_BASES = (0, SHARED_WINDOW, LOCAL_WINDOW)


@runtime
def load_generic(E: Any, C: Cohort, address: Any, lanes: Any, size: int, pc: int) -> Array:
    kinds = _spaces(address)
    here = kinds if lanes is None else spread(kinds, C.n)[spread(lanes, C.n)]
    present = np.unique(here)
    if len(present) == 1:
        kind = int(present[0])
        return _LOADS[kind](E, C, address - _BASES[kind], lanes, size, pc)  # type: ignore[no-any-return]
    out = np.zeros((C.n, 32), ELEMENT[size])
    for kind in present:
        part = spread(kinds == kind, C.n) & active(C, lanes)
        got = _LOADS[kind](E, C, spread(address - _BASES[kind], C.n), part, size, pc)
        out[part] = got[part]
    return out


@runtime
def store_generic(
    E: Any, C: Cohort, address: Any, value: Any, lanes: Any, size: int, pc: int
) -> None:
    kinds = _spaces(address)
    here = kinds if lanes is None else spread(kinds, C.n)[spread(lanes, C.n)]
    present = np.unique(here)
    if len(present) == 1:
        kind = int(present[0])
        _STORES[kind](E, C, address - _BASES[kind], value, lanes, size, pc)
        return
    for kind in present:
        part = spread(kinds == kind, C.n) & active(C, lanes)
        _STORES[kind](E, C, spread(address - _BASES[kind], C.n), value, part, size, pc)
