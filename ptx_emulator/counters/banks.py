"""A model of the wavefronts (bank conflicts) of shared memory.

Shared memory has 32 banks of 4 bytes. Successive words lie in successive banks, and each bank
transfers one word per wavefront. A warp's access is divided into phases of lanes whose bytes fit
into one wavefront: an access of at most 4 bytes per lane is one phase of 32 lanes, one of 8 bytes
two phases of 16 lanes, one of 16 bytes four phases of 8 lanes. ldmatrix has one phase per matrix
of 8 rows of 16 bytes. Stores and the writes of cp.async are divided in the same way.

The number of wavefronts of a phase is the largest number of different words in one bank; lanes
that access the same word share it. A phase without active lanes takes no wavefront, any other
phase at least one. Each additional wavefront is a bank conflict. Lanes of an atomic do not share
words.

Source: CUDA C++ Programming Guide, "Compute Capabilities", "Shared Memory" (banks of 4 bytes; equal
words are broadcast). The guide does not document how 8- and 16-byte accesses are divided; halves
and quarters of a warp match NVIDIA's profiler for conflict-free accesses (2 and 4 wavefronts). Not
modelled: the hardware may serve two halves that access the same words in one wavefront.
"""

from __future__ import annotations

import numpy as np

from ptx_emulator.state.memory import Array

BANKS = 32
BANK_BYTES = 4
ROW_BYTES = 16  # of a matrix that ldmatrix reads


def wavefronts(addresses: Array, active: Array | None, size: int, in_turn: bool) -> tuple[int, int]:
    """Wavefronts of accesses of warps, and the minimum for the same number of lanes and bytes.

    Args:
        addresses: in bytes, multiples of ``size``, (warps, 32).
        active: the active lanes, of the same shape; None for all lanes.
        size: bytes per lane, 1 to 16.
        in_turn: lanes do not share words, as those of an atomic.
    """
    wide = max(size, BANK_BYTES)
    lanes = BANKS * BANK_BYTES // wide
    units = (addresses // wide).reshape(-1, lanes)
    return phases(units, None if active is None else active.reshape(-1, lanes), in_turn)


def phases(units: Array, active: Array | None, in_turn: bool = False) -> tuple[int, int]:
    """`wavefronts` of accesses that are already divided into phases.

    Args:
        units: the address of each lane in units of its access width, (phases, lanes).
            Successive units lie in successive groups of banks; there is one group per lane.
    """
    groups = units.shape[1]
    if active is None:
        least = len(units)
        used = np.bitwise_or.reduce(np.int64(1) << (units & (groups - 1)), axis=1)
        slow = used != (1 << groups) - 1
        if not slow.any():
            return least, least
        units = units[slow]
        counted = np.ones(units.shape, bool)
        done = least - len(units)
    else:
        counted, done = active, 0
        least = int(active.any(axis=1).sum())
    if not in_turn:
        units = np.where(counted, units, -1)
        units = np.sort(units, axis=1)
        counted = units >= 0
        counted[:, 1:] &= units[:, 1:] != units[:, :-1]
    banks = np.arange(len(units))[:, None] * groups + (units & (groups - 1))
    words = np.bincount(banks[counted], minlength=len(units) * groups).reshape(-1, groups)
    return done + int(words.max(axis=1).sum()) if len(units) else done, least
