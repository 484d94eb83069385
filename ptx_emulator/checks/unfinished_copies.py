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


def block_exits(m: Wave, blocks: Array) -> None:
    """Checks that these blocks have waited for the copies into their shared memory.

    Raises:
        RaceError: a copy is in flight, or need not have completed for what the block has seen.
    """
    if m.proxy is None:
        return
    for block in blocks.tolist():
        warps = block * m.warps + np.arange(m.warps)
        clocks = m.row_cluster[warps], m.row_member[warps]
        for t in (*m.bulk.incoming, *m.bulk.landed):
            if t.writes is None or t.barriers is None or t.phases is None:
                continue
            for row in np.flatnonzero(t.blocks == block).tolist():
                seen = m.proxy.has_completed(*clocks, t.writes[row])
                # A relaxed wait orders nothing, and yet the copy has completed.
                seen |= m.mbarriers.late.phase[t.barriers[row], warps] >= t.phases[row]
                if not seen.any():
                    advice = "wait for its mbarrier in that block before it ends"
                    _fail(m, t.here.site(row), t.size, "into", advice)
            if not t.near:
                continue
            for row in np.flatnonzero(m.row_block[t.issued.rows] == block).tolist():
                if (m.clocks.seen[(*clocks, t.columns[row])] < t.times[row]).all():
                    advice = "let the block that it copies to wait for it, and meet it at a "
                    advice += "barrier of the cluster"
                    _fail(m, t.here.site(row), t.size, "out of", advice)


def wave_ends(m: Wave) -> None:
    """Checks that no copy reads the shared memory of a block that has ended.

    Raises:
        RaceError: one does.
    """
    if not m.config.check or "exit_before_bulk_store" in m.config.allow:
        return
    for t in m.bulk.outgoing:
        advice = "execute cp.async.bulk.wait_group.read first"
        advice += errors.way_out("exit_before_bulk_store")
        _fail(m, t.here.site(int(np.argmin(t.waited))), t.size, "out of", advice)


def _fail(m: Wave, site: Site, size: int, way: str, advice: str) -> NoReturn:
    what = "a block ends while one of its bulk copies may be in flight"
    numbers = f"a copy of {size:,} bytes {way} shared memory that has not been waited for"
    m.fail(RaceError, what, site, numbers, advice)
