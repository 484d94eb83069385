"""Why a cohort cannot run: one small class per kind of wait, stored in ``Cohort.waits``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class WaitsForWarp:
    """The cohort stands at a warp-wide instruction that other lanes have not reached.

    Attributes:
        pc: the instruction.
        needed: lanes that must reach it (n, 32).
    """

    whole = "warp"

    def __init__(self, pc: int, needed: Array) -> None:
        self.pc = pc
        self.needed = needed

    def partners(self, rows: Array) -> Array:
        """The warps that have to arrive before ``rows`` can continue."""
        return rows


class WaitsForWarpgroup(WaitsForWarp):
    """The cohort stands at an instruction that other warps of its warpgroups have not reached.

    ``needed`` holds the warps of these warpgroups.
    """

    whole = "warpgroup"

    def partners(self, rows: Array) -> Array:
        return np.asarray(self.needed)


class WaitsAtBarrier:
    """Rows that have arrived at a named barrier of their block.

    Attributes:
        pc: the instruction.
        ids: barrier of each row (n,).
        result: (register, operation, dtype) of bar.red, else None.
    """

    def __init__(self, pc: int, ids: Array, result: tuple[int, str, str] | None) -> None:
        self.pc = pc
        self.ids = ids
        self.result = result


class WaitsForPhase:
    """Rows that wait for mbarriers; ``barriers`` and ``lanes`` are (n, 1) or (n, 32)."""

    def __init__(self, pc: int, barriers: Array, lanes: Array) -> None:
        self.pc = pc
        self.barriers = barriers
        self.lanes = lanes


class WaitsForCluster:
    """Rows that wait for the phase of the cluster barrier in which they arrived."""

    def __init__(self, pc: int) -> None:
        self.pc = pc


class WaitsForRegisters:
    """Warpgroups whose setmaxnreg.inc requests more registers than their block has left."""

    def __init__(self, pc: int, count: int) -> None:
        self.pc = pc
        self.count = count
