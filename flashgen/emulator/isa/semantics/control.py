"""Traps, and addresses in a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.emulator.errors import Trapped
from flashgen.emulator.state.cohort import Cohort, active, first_bad
from flashgen.emulator.state.wave import Site, Wave
from flashgen.errors import EmulatorError


def raise_trap(machine: Wave, cohort: Cohort, lanes: Any, pc: int, what: str) -> None:
    if not active(cohort, lanes).any():
        return
    row, lane = first_bad(cohort, lanes, True)
    machine.fail(
        Trapped,
        what,
        Site(cohort, pc, row, lane),
        "a GPU stops the program here as well",
        "find out why the kernel takes this branch",
    )


def require_rank(machine: Wave, cohort: Cohort, rank: Any, lanes: Any, pc: int) -> None:
    bad = np.asarray(rank) != 0
    if not (bad & active(cohort, lanes)).any():
        return
    row, lane = first_bad(cohort, lanes, bad)
    machine.fail(
        EmulatorError,
        "an address in another block of the cluster",
        Site(cohort, pc, row, lane),
        "the cluster has one block, of rank 0",
        "the emulator supports clusters of one block only",
    )
