"""Global memory that asynchronous copies still read: nothing may write it before they complete.

A copy (cp.async, cp.async.bulk) reads its source at an unknown time between its start and the wait
that covers it. The emulator completes a cp.async when its thread waits, so a write that comes while
one is in flight is not ordered after it. A bulk copy may complete before the wait for its mbarrier:
of the latest that did, a writer must have seen the completion.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ptx_emulator.errors import RaceError
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Site, Wave


class CopySource(NamedTuple):
    """The global memory that one execution of a copy instruction reads.

    Attributes:
        touched: indices of the allocations that it reads.
        offsets: into `GlobalMemory.flat`, of ``size`` bytes each: (n, 32) for cp.async.
        lanes: of a cp.async, those that read (n, 32); None: all.
        copy_rows: of a bulk copy, the row of the transfer for each row of ``offsets``.
    """

    touched: list[int]
    offsets: Array
    size: int
    pc: int
    lanes: Array | None = None
    copy_rows: Array | None = None


def check_write(machine: Wave, site: Site, rows: Array, offsets: Array, size: int) -> None:
    """Checks a write by warps ``rows`` (k,) of ``size`` bytes at each offset (k,), which the latest
    access located.

    Raises:
        RaceError: a copy in flight reads some of the bytes.
    """
    for source, reads, late in _in_flight(machine, set(machine.memory.touched), rows):
        step = min(size, source.size)
        read = _pieces(reads, source.size, step)
        both = read[np.isin(read, _pieces(offsets[late], size, step))]
        if len(both):
            what = "race in global memory: the source of an asynchronous copy is overwritten "
            what += "before the copy has been waited for"
            numbers = f"{machine.memory.describe(int(both[0]) + machine.memory.base)}; the copy in "
            numbers += f"flight: {machine.program.describe(source.pc)}"
            way_out = "wait for the copy (cp.async.wait_group, or its mbarrier) before the write, "
            way_out += "in this thread or in one that it passes a barrier with"
            machine.fail(RaceError, what, site, numbers, way_out)


def _in_flight(
    machine: Wave, written: set[int], rows: Array
) -> Iterator[tuple[CopySource, Array, Any]]:
    """Copies from these allocations that may be in flight for some of the warps ``rows`` (k,).

    Yields:
        The source of a copy, the offsets that it reads, and for which of the rows it may be in
        flight.
    """
    everyone = slice(None)
    for flight in machine.copies.flights:
        source = flight.source
        if source is not None and written.intersection(source.touched):
            lanes = [part for part in (flight.lanes, source.lanes) if part is not None]
            reads = source.offsets[np.logical_and.reduce(lanes)] if lanes else source.offsets
            yield source, reads, everyone
    bulk = machine.bulk
    for transfer in (*bulk.incoming, *bulk.landed) if bulk.incoming or bulk.landed else ():
        source = transfer.source
        if source is None or not written.intersection(source.touched):
            continue
        if not transfer.done:
            yield source, source.offsets, everyone
            continue
        assert machine.proxy is not None
        assert transfer.writes is not None
        assert source.copy_rows is not None
        members = (machine.row_cluster[rows], machine.row_member[rows])
        for reads, copy_row in zip(source.offsets, source.copy_rows, strict=True):
            seen = machine.proxy.has_completed(*members, transfer.writes[copy_row])
            if not seen.all():
                yield source, reads, ~seen


def _pieces(offsets: Array, size: int, step: int) -> Array:
    """The offsets of all pieces of ``step`` bytes of accesses of ``size`` bytes, flat."""
    return (offsets.reshape(-1, 1) + np.arange(0, size, step)).reshape(-1)
