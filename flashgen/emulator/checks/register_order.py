"""Checks the order of ordinary instructions and wgmma on the same registers during execution.

Only the instructions found by `wgmma_hazards` are checked; the checks themselves are exact. The PTX
ISA requires a wgmma.fence after any access to the registers. This checker does not require one
after reads, because an instruction reads its registers before a later wgmma starts, nor between
products of different shapes that use the same accumulators one after the other.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from flashgen.emulator.errors import FenceError, InFlight
from flashgen.emulator.state.cohort import Cohort, spread
from flashgen.emulator.state.wave import Site, Wave

Array = npt.NDArray[Any]
_FENCE = (
    "execute wgmma.fence after the last ordinary instruction that writes an accumulator or a "
    'fragment of A; asm volatile("" : "+f"(x) :: "memory") on each register before the fence keeps '
    "the compiler from moving a write behind it"
)


class RegisterOrder:
    """Registers that ordinary instructions wrote since the last wgmma.fence of their warps."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        self.fenced = np.zeros(len(machine.row_block), bool)
        self.written: dict[int, Array] = {}  # register -> rows
        self.writer: dict[int, int] = {}  # register -> instruction

    def fence(self, cohort: Cohort) -> None:
        """wgmma.fence."""
        self.fenced[cohort.rows] = True
        for rows in self.written.values():
            rows[cohort.rows] = False

    def note_writes(self, cohort: Cohort, registers: tuple[int, ...], lanes: Any, pc: int) -> None:
        """Records the writes of an ordinary instruction to registers of a later wgmma."""
        rows = _rows(cohort, lanes)
        for register in registers:
            if register not in self.written:
                self.written[register] = np.zeros(len(self.machine.row_block), bool)
            self.written[register][rows] = True
            self.writer[register] = pc

    def require_fence(
        self, cohort: Cohort, registers: tuple[int, ...], first: bool, pc: int
    ) -> None:
        """Checks that the registers of a wgmma were not written since the last fence.

        Raises:
            FenceError: one was, or no fence has been executed.
        """
        m = self.machine
        if first and not self.fenced[cohort.rows].all():
            m.fail(
                FenceError,
                "wgmma without any wgmma.fence before it",
                Site(cohort, pc, int(np.argmin(self.fenced[cohort.rows]))),
                "this warp has executed no wgmma.fence",
                _FENCE,
            )
        for register in registers:
            rows = self.written.get(register)
            if rows is not None and rows[cohort.rows].any():
                m.fail(
                    FenceError,
                    "wgmma uses a register that was written since the last wgmma.fence",
                    Site(cohort, pc, int(np.argmax(rows[cohort.rows]))),
                    f"{m.program.register_name(register)} was written by "
                    + m.program.describe(self.writer[register]),
                    _FENCE,
                )

    def check_in_flight(
        self,
        cohort: Cohort,
        accumulators: tuple[int, ...],
        fragments: tuple[int, ...],
        lanes: Any,
        pc: int,
    ) -> None:
        """Checks that registers of an ordinary instruction are not in flight.

        Raises:
            InFlight: one is, in a warpgroup of an active lane.
        """
        groups = self.machine.wgmma.groups_of(_rows(cohort, lanes))
        for chain in self.machine.wgmma.chains:
            if not np.isin(chain.groups, groups).any():
                continue
            for register in accumulators:
                if register in chain.registers:
                    self.fail_in_flight(cohort, pc, register, chain.steps[-1].pc, "an accumulator")
            for step in chain.steps:
                for register in fragments:
                    if register in step.form.fragments:
                        self.fail_in_flight(cohort, pc, register, step.pc, "a fragment of A")

    def fail_in_flight(self, cohort: Cohort, pc: int, register: int, by: int, use: str) -> NoReturn:
        """Raises for a register that an instruction in flight still uses."""
        m = self.machine
        m.fail(
            InFlight,
            "a register of a wgmma in flight is accessed before its wait",
            Site(cohort, pc),
            f"{m.program.register_name(register)} is {use} of {m.program.describe(by)}",
            "execute wgmma.commit_group and a wgmma.wait_group that covers it first",
        )


def _rows(cohort: Cohort, lanes: Any) -> Array:
    """The warps with an active lane."""
    if lanes is None:
        return cohort.rows
    return np.asarray(cohort.rows[spread(lanes, cohort.n).any(axis=1)])
