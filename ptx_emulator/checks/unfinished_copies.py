"""Blocks that end while the hardware may still copy into their shared memory or out of it.

A bulk copy completes at an unknown time, so a block must have waited for those into its shared
memory, and for what those out of it read, whatever the emulator has executed by then.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ptx_emulator import errors
from ptx_emulator.errors import RaceError
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Site, Wave


def block_exits(machine: Wave, blocks: Array) -> None:
    """Checks that these blocks have waited for the copies into their shared memory.

    Raises:
        RaceError: a copy is in flight, or need not have completed for what the block has seen.
    """
    if machine.proxy is None:
        return
    for block in blocks.tolist():
        warps = block * machine.warps + np.arange(machine.warps)
        clocks = machine.row_cluster[warps], machine.row_member[warps]
        for transfer in (*machine.bulk.incoming, *machine.bulk.landed):
            if transfer.writes is None or transfer.barriers is None or transfer.phases is None:
                continue
            for row in np.flatnonzero(transfer.blocks == block).tolist():
                seen = machine.proxy.has_completed(*clocks, transfer.writes[row])
                # A relaxed wait orders nothing, and yet the copy has completed.
                waited = machine.mbarriers.late.phase[transfer.barriers[row], warps]
                seen |= waited >= transfer.phases[row]
                if not seen.any():
                    advice = "wait for its mbarrier in that block before it ends"
                    _fail(machine, transfer.execution.site(row), transfer.size, "into", advice)
            if not transfer.near:
                continue
            for row in np.flatnonzero(machine.row_block[transfer.issued.rows] == block).tolist():
                times = machine.clocks.seen[(*clocks, transfer.columns[row])]
                if (times < transfer.times[row]).all():
                    advice = "let the block that it copies to wait for it, and meet it at a "
                    advice += "barrier of the cluster"
                    _fail(machine, transfer.execution.site(row), transfer.size, "out of", advice)


def wave_ends(machine: Wave) -> None:
    """Checks that no copy reads the shared memory of a block that has ended.

    Raises:
        RaceError: one does.
    """
    if not machine.config.check or "exit_before_bulk_store" in machine.config.allow:
        return
    for transfer in machine.bulk.outgoing:
        advice = "execute cp.async.bulk.wait_group.read first"
        advice += errors.way_out("exit_before_bulk_store")
        site = transfer.execution.site(int(np.argmin(transfer.waited)))
        _fail(machine, site, transfer.size, "out of", advice)


def _fail(machine: Wave, site: Site, size: int, way: str, advice: str) -> NoReturn:
    what = "a block ends while one of its bulk copies may be in flight"
    numbers = f"a copy of {size:,} bytes {way} shared memory that has not been waited for"
    machine.fail(RaceError, what, site, numbers, advice)
