"""Traps."""

from __future__ import annotations

from typing import Any

from flashgen.emulator.errors import Trapped
from flashgen.emulator.state.cohort import Cohort, active, first_bad
from flashgen.emulator.state.wave import Site, Wave


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
