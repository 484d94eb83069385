"""Loads and stores of every state space, called from generated code.

An address is an int64 value of shape (), (n, 1), (1, 32) or (n, 32). ``lanes`` is None when all
lanes are active, else a boolean mask of the active lanes. Loaded values have the shape of the
address (or (n, 32) when lanes are masked) and an unsigned dtype of the access width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.bounds import check_window, locate
from flashgen.emulator.counters.recorder import READ, WRITE, count_sectors
from flashgen.emulator.errors import OutOfBounds, UninitialisedRead
from flashgen.emulator.isa.semantics.cluster import remote, resolved
from flashgen.emulator.state.cohort import Cohort, active, first_bad, spread
from flashgen.emulator.state.memory import (
    ELEMENT,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    SHIFT,
    WINDOW_BYTES,
)
from flashgen.emulator.state.wave import Site, Stored, Wave

Array = npt.NDArray[Any]
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
