"""Shared memory of other blocks of a cluster (distributed shared memory).

An address in the shared memory of a block's own window is its offset. mapa adds the rank of the
block in the cluster, plus one, in the bits from `RANK_SHIFT` on.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from ptx_emulator.checks.bounds import check_window
from ptx_emulator.errors import OutOfBounds
from ptx_emulator.isa.generator import Generator, formula, instruction
from ptx_emulator.ptx.register_types import DTYPE
from ptx_emulator.ptx.syntax import Instruction
from ptx_emulator.state.cohort import Cohort
from ptx_emulator.state.memory import SHARED_WINDOW, Array
from ptx_emulator.state.wave import Execution, Site, Wave

RANK_SHIFT = 24  # the window of a block is smaller than 16 MiB
_OFFSET = (1 << RANK_SHIFT) - 1
_NO_RANK = 254  # no cluster has as many blocks, and it fits in an address of 32 bits


def remote(address: Any) -> bool:
    """Whether some addresses have a rank; they are int64, relative to the shared window."""
    return bool((np.asarray(address) > _OFFSET).any())


def resolved(
    execution: Execution, address: Any, size: int, at_once: bool = True
) -> tuple[Array, Array]:
    """The block of the wave and the offset in its shared memory of each address, both (n, 32).

    The access takes place ``at_once``, or is watched until its end by the caller.

    Raises:
        OutOfBounds: there is no block of that rank, or it has exited, or the offset is too large.
        Misaligned: the offset is not a multiple of ``size``.
    """
    machine, addresses = execution.machine, execution.spread(address)
    rank, offset = (addresses >> RANK_SHIFT) - 1, addresses & _OFFSET
    rows = execution.cohort.rows
    own_blocks = machine.row_block[rows][:, None]
    _require_rank(execution, addresses >> RANK_SHIFT)
    bad = (rank >= machine.cluster_size) | (addresses < 0)
    first = own_blocks - own_blocks % machine.cluster_size
    blocks = np.where((rank < 0) | bad, own_blocks, first + rank)
    check_window(execution, offset, size, machine.shared_size, "shared")
    gone = machine.live_warps[blocks] == 0
    if execution.any(gone):
        site = execution.first(gone)
        fail_exited(site, machine, int(blocks[site.row, site.lane]))
    if at_once and machine.shared_races and machine.cluster_size > 1:
        chosen = execution.active & (blocks != own_blocks)
        others = execution.spread(rows[:, None])[chosen]
        machine.shared_races.note_remote(others, blocks[chosen], execution.pc)
    return blocks, offset


def fail_exited(site: Site, machine: Wave, block: int) -> NoReturn:
    what = "an access to the shared memory of a block that has exited"
    numbers = f"rank {block % machine.cluster_size} of the cluster"
    way_out = "let every block wait at a barrier of the cluster before it exits"
    machine.fail(OutOfBounds, what, site, numbers, way_out)


def _require_rank(execution: Execution, above: Array) -> None:
    """Checks ranks plus one (0: the block itself) against the size of the cluster."""
    size = execution.machine.cluster_size
    bad = (above > size) | (above < 0)
    if execution.any(bad):
        site = execution.first(bad)
        what = "an address in another block of the cluster, which has no block of this rank"
        rank = int(execution.spread(above)[site.row, site.lane]) - 1
        way_out = "check the rank that mapa is given, and the cluster of the launch"
        numbers = f"rank {rank}; the cluster has {size} blocks"
        execution.machine.fail(OutOfBounds, what, site, numbers, way_out)


def map_rank(address: Any, rank: Any) -> Any:
    """mapa: the address in the block of a rank, of the dtype of ``address`` (uint32 or uint64).

    Lanes may compute addresses of ranks that the cluster lacks, as long as they do not use them.
    """
    base = SHARED_WINDOW if address.dtype.itemsize == 8 else 0
    offset = (address.astype(np.int64) - base) & _OFFSET
    mapped = offset + ((np.minimum(rank.astype(np.int64), _NO_RANK) + 1) << RANK_SHIFT)
    return (mapped + base).astype(address.dtype)


def rank_of(machine: Wave, cohort: Cohort, address: Any) -> Any:
    """getctarank: the rank of the block in whose shared memory an address lies."""
    base = SHARED_WINDOW if address.dtype.itemsize == 8 else 0
    rank = ((address.astype(np.int64) - base) >> RANK_SHIFT) - 1
    own_rank = machine.row_block[cohort.rows][:, None] % machine.cluster_size
    return np.where(rank < 0, own_rank, rank).astype(np.uint32)


@instruction("mapa", unit="move")
def emit_map_address(g: Generator, ins: Instruction) -> None:
    """mapa: the address in another block of the cluster."""
    shared = bool(g.mods.take("shared::cluster"))
    dtype = DTYPE[g.mods.type()]
    to, source, rank = ins.operands
    value, number = g.read(source, dtype), g.read(rank, "u4")
    g.refuse_if(shared != (dtype == "u4"), "this width of an address")
    g.write(to, f"map_rank({value}, {number})", dtype)


formula("getctarank", "move", "u4", "rank_of(E, C, {a:T})", "shared::cluster")
