"""Wavefronts of shared memory, by the model that the counters use.

Shared memory has 32 banks of 4 bytes: successive words lie in successive banks, and a bank gives
or takes one word per wavefront. The lanes of a warp are served together where all of their bytes
can fit one wavefront: an access of at most 4 bytes a lane is one phase of 32 lanes, one of 8 bytes
two phases of 16 lanes, one of 16 bytes four phases of 8 lanes. ldmatrix has one phase for each
matrix: 8 rows of 16 bytes. Stores and the writes of cp.async go like loads.

A phase takes as many wavefronts as the busiest bank has different words; lanes that want the same
word share it. A phase without an active lane takes none, any other at least one. What is beyond
that one is a bank conflict. Lanes of an atomic do not share words: they take turns.

Source: CUDA C++ Programming Guide, "Compute Capabilities", "Shared Memory" (banks of 4 bytes, same
words are broadcast). The guide does not say how 8- and 16-byte accesses are divided; by halves and
quarters of a warp is how NVIDIA's profiler counts conflict-free ones (2 and 4 wavefronts). Not
modelled: that hardware may serve two halves in one wavefront when they want the same words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BANKS = 32
BANK_BYTES = 4
ROW_BYTES = 16  # of a matrix that ldmatrix reads


def wavefronts(
    addresses: Array, active: Array | None, size: int, in_turn: bool = False
) -> tuple[int, int]:
    """Wavefronts of some accesses of warps, and the fewest that there could be.

    Args:
        addresses: in bytes, multiples of ``size``, (warps, 32).
        active: which lanes take part, of the same shape; None when all do.
        size: bytes per lane, 1 to 16.
        in_turn: lanes do not share words.
    """
    wide = max(size, BANK_BYTES)
    lanes = BANKS * BANK_BYTES // wide
    units = (addresses // wide).reshape(-1, lanes)
    return phases(units, None if active is None else active.reshape(-1, lanes), in_turn)


def phases(units: Array, active: Array | None, in_turn: bool = False) -> tuple[int, int]:
    """The same for phases of lanes that could all be served by one wavefront.

    Args:
        units: what each lane wants, (phases, lanes), in units as wide as a lane's access.
            Successive units lie in successive groups of banks, of which there are as many as lanes.
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
    place = np.arange(len(units))[:, None] * groups + (units & (groups - 1))
    words = np.bincount(place[counted], minlength=len(units) * groups).reshape(-1, groups)
    return done + int(words.max(axis=1).sum()) if len(units) else done, least
