"""The shadow of shared memory: the last write of each vector, and the clocks that order writes.

A vector has as many bytes as the narrowest access of the kernel to shared memory, so accesses to
neighbouring bytes never share a vector. A stamp is the clock and the warp of the last write (see
`clocks`); the stamps from `ASYNC` on are numbers of asynchronous writes, and the last three of them
are the constants below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.clocks import Clocks
from flashgen.emulator.state.wave import Wave

Array = npt.NDArray[Any]

ASYNC = np.uint32(0xE0000000)
MBARRIER = np.uint32(0xFFFFFFFD)  # an mbarrier object lies in the vector
FLIGHT = np.uint32(0xFFFFFFFE)  # a cp.async that has not been waited for writes the vector
NEVER = np.uint32(0xFFFFFFFF)  # not written since the block started


class SharedShadow:
    """Shadow of the shared memory of all blocks of a wave.

    Attributes:
        vector: bytes per vector; ``shift``: its logarithm to base 2.
        count: number of vectors.
        written: stamp of the last write of each vector.
        writer_pc: instruction of the last write of each vector.
    """

    def __init__(self, machine: Wave, blocks: int) -> None:
        self.machine = machine
        self.vector = machine.program.shared_vector
        self.shift = self.vector.bit_length() - 1
        self.warps = machine.warps
        self.count = blocks * machine.shared_pitch >> self.shift
        self.written = np.full(self.count, NEVER, np.uint32)
        self.writer_pc = np.zeros(self.count, np.int32)
        self.clocks = Clocks(blocks, self.warps, machine.program.asynchronous)

    def take(self, table: Array, where: Array, size: int) -> Array:
        """The values of a shadow table for each vector, (g, vectors)."""
        many = size >> self.shift
        if many <= 1:
            return table.take(where >> self.shift)
        rows: Array = table.reshape(-1, many).take(where // size, axis=0)
        return rows.reshape(len(where), -1)

    def put(self, table: Array, where: Array, size: int, value: Any) -> None:
        """Sets the values of a shadow table to one value, or to one value per access (g,)."""
        many = size >> self.shift
        if many <= 1:
            table[where >> self.shift] = value[:, None] if np.ndim(value) else value
        else:
            table.reshape(-1, many)[where // size] = (
                value[:, None, None] if np.ndim(value) else value
            )

    def vector_at(self, where: Array, size: int, place: int, which: int) -> int:
        """The number of the vector at an index of the result of `take`."""
        access, part = divmod(which, max(1, size >> self.shift))
        return int(where[place, access] >> self.shift) + part
