"""Global memory that asynchronous copies still read: nothing may write it before they complete.

A copy (cp.async, cp.async.bulk) reads its source at an unknown time between its start and the wait
that covers it. The emulator completes a copy no earlier than a wait for it, or as late as it can,
so a write that comes while the copy is in flight is not ordered after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flashgen.emulator.errors import RaceError
from flashgen.emulator.state.wave import Site, Wave

Array = npt.NDArray[Any]


class CopySource(NamedTuple):
    """What an execution of an instruction copies.

    Attributes:
        touched: indices of the allocations that it reads.
        offsets: into `GlobalMemory.flat`, of ``size`` bytes each: (n, 32) for cp.async.
        lanes: of a cp.async, those that read (n, 32); None: all.
    """

    touched: list[int]
    offsets: Array
    size: int
    pc: int
    lanes: Array | None = None


def check_write(machine: Wave, site: Site, offsets: Array, size: int) -> None:
    """Checks a write of ``size`` bytes at each offset (k,), which the latest access located.

    Raises:
        RaceError: a copy in flight reads some of the bytes.
    """
    written = set(machine.memory.touched)
    for source, reads in _in_flight(machine):
        if not written.intersection(source.touched):
            continue
        step = min(size, source.size)
        read = _pieces(reads, source.size, step)
        both = read[np.isin(read, _pieces(offsets, size, step))]
        if len(both):
            machine.fail(
                RaceError,
                "race in global memory: the source of an asynchronous copy is overwritten before "
                "the copy has been waited for",
                site,
                f"{machine.memory.describe(int(both[0]) + machine.memory.base)}; the copy in "
                f"flight: {machine.program.describe(source.pc)}",
                "wait for the copy (cp.async.wait_group, or its mbarrier) before the write, in "
                "this thread or in one that it passes a barrier with",
            )


def _in_flight(machine: Wave) -> Iterator[tuple[CopySource, Array]]:
    """The sources of copies in flight, and the offsets that they read."""
    for flight in machine.copies.flights:
        source = flight.source
        if source is not None:
            lanes = [part for part in (flight.lanes, source.lanes) if part is not None]
            yield source, source.offsets[np.logical_and.reduce(lanes)] if lanes else source.offsets
    for transfer in machine.bulk.incoming:
        if transfer.source is not None:
            yield transfer.source, transfer.source.offsets


def _pieces(offsets: Array, size: int, step: int) -> Array:
    """The offsets of all pieces of ``step`` bytes of accesses of ``size`` bytes, flat."""
    parts = np.arange(0, size, step)
    return (offsets.reshape(-1, 1) + parts).reshape(-1)
