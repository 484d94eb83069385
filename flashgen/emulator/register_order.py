"""The order of ordinary instructions and wgmma on the same registers, checked while they run.

Only where `hazards` has found that some path could be wrong: everything here is then exact.
Registers that were only read since the last fence need none here, though the PTX ISA asks for one
after any access: what an instruction reads it has read before a later wgmma starts. Nor is a fence
asked for between products of different shapes that use the same sums one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from flashgen.emulator.access import spread
from flashgen.emulator.cohort import Cohort
from flashgen.emulator.errors import FenceError, InFlight

if TYPE_CHECKING:
    from flashgen.emulator.machine import Machine

Array = npt.NDArray[Any]
_FENCE = (
    "execute wgmma.fence after the last ordinary instruction that writes a sum or a fragment of "
    'A; asm volatile("" : "+f"(x) :: "memory") on each before the fence keeps the compiler from '
    "moving one behind it"
)


class RegisterOrder:
    """What ordinary instructions of a wave wrote since the last wgmma.fence of their warps."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.fenced = np.zeros(len(machine.row_block), bool)
        self.written: dict[int, Array] = {}  # register -> rows
        self.writer: dict[int, int] = {}  # register -> instruction

    def fence(self, C: Cohort) -> None:
        """wgmma.fence."""
        self.fenced[C.rows] = True
        for rows in self.written.values():
            rows[C.rows] = False

    def mark(self, C: Cohort, registers: tuple[int, ...], lanes: Any, pc: int) -> None:
        """An ordinary instruction writes registers that a wgmma may use before a fence."""
        rows = _rows(C, lanes)
        for register in registers:
            if register not in self.written:
                self.written[register] = np.zeros(len(self.machine.row_block), bool)
            self.written[register][rows] = True
            self.writer[register] = pc

    def demand_fence(self, C: Cohort, registers: tuple[int, ...], first: bool, pc: int) -> None:
        """What this wgmma uses must not have been written since the last fence.

        Raises:
            FenceError: it was, or there has been no fence at all.
        """
        m = self.machine
        if first and not self.fenced[C.rows].all():
            m.fail(
                FenceError,
                "wgmma without any wgmma.fence before it",
                C,
                pc,
                row=int(np.argmin(self.fenced[C.rows])),
                numbers="this warp has executed none",
                way_out=_FENCE,
            )
        for register in registers:
            rows = self.written.get(register)
            if rows is not None and rows[C.rows].any():
                m.fail(
                    FenceError,
                    "wgmma uses a register that was written since the last wgmma.fence",
                    C,
                    pc,
                    row=int(np.argmax(rows[C.rows])),
                    numbers=f"{m.program.register_name(register)} was written by "
                    + m.program.describe(self.writer[register]),
                    way_out=_FENCE,
                )

    def touched(
        self, C: Cohort, sums: tuple[int, ...], fragments: tuple[int, ...], lanes: Any, pc: int
    ) -> None:
        """An instruction uses registers that may be in flight.

        Raises:
            InFlight: one of them is, in a warpgroup of an active lane.
        """
        groups = self.machine.wgmma.groups_of(_rows(C, lanes))
        for chain in self.machine.wgmma.chains:
            if not np.isin(chain.groups, groups).any():
                continue
            for register in sums:
                if register in chain.registers:
                    self.fail_in_flight(C, pc, register, chain.steps[-1].pc, "one of the sums")
            for step in chain.steps:
                for register in fragments:
                    if register in step.form.fragments:
                        self.fail_in_flight(C, pc, register, step.pc, "a fragment of A")

    def fail_in_flight(self, C: Cohort, pc: int, register: int, by: int, use: str) -> NoReturn:
        """Raises for a register that an instruction in flight still uses."""
        m = self.machine
        m.fail(
            InFlight,
            "a register of a wgmma in flight is touched before its wait",
            C,
            pc,
            numbers=f"{m.program.register_name(register)} is {use} of {m.program.describe(by)}",
            way_out="execute wgmma.commit_group and a wgmma.wait_group that covers it first",
        )


def _rows(C: Cohort, lanes: Any) -> Array:
    """The warps with an active lane."""
    if lanes is None:
        return C.rows
    return np.asarray(C.rows[spread(lanes, C.n).any(axis=1)])
