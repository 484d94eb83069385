"""Four warps as one: meeting at an instruction of the whole warpgroup, and setmaxnreg.

Registers are not modelled but counted. Every warp starts with as many per thread as the kernel was
compiled for, which follows from its launch bounds; what setmaxnreg.dec gives back goes to a pool of
the block, and setmaxnreg.inc waits until the pool has what it wants. Without launch bounds nothing
is known (the assembler ignores setmaxnreg then) and everything is accepted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.cohort import Cohort
from flashgen.emulator.registry import runtime
from flashgen.emulator.report import WaitsForWarp
from flashgen.errors import EmulatorError

if TYPE_CHECKING:
    from flashgen.emulator.machine import Machine
    from flashgen.emulator.program import Program

Array = npt.NDArray[Any]
REGISTER_FILE = 65536  # of an SM, 32 bits each
_MOST = 256  # of a thread


class WaitsForWarpgroup(WaitsForWarp):
    """The cohort stands at an instruction that other warps of its warpgroups have not reached."""

    whole = "warpgroup"

    def partners(self, rows: Array) -> Array:
        return np.asarray(self.needed)


class WaitsForRegisters:
    """Warpgroups that want more registers than their block has left."""

    def __init__(self, pc: int, count: int) -> None:
        self.pc = pc
        self.count = count


@runtime
def incomplete_warpgroup(E: Any, C: Cohort, pc: int) -> bool:
    """Whether a cohort must wait for warps, because it does not consist of whole warpgroups."""
    rows, m = C.rows, E
    if C.n % 4 == 0:
        quads = rows.reshape(-1, 4)
        if (quads[:, 3] - quads[:, 0] == 3).all() and not (m.row_warp[quads[:, 0]] & 3).any():
            if C.mask is None:
                return False
            _fail_incomplete(m, C, pc, int(np.argmin(C.mask.all(axis=1))))
    first = rows - (m.row_warp[rows] & 3)
    members = first[:, None] + np.arange(4)
    inside = (m.row_warp[first] + 4 <= m.warps)[:, None]
    there = np.where(inside, members, first[:, None])
    gone = ~inside[:, 0] | ~m.alive[there].all(axis=(1, 2))
    if gone.any():
        _fail_incomplete(m, C, pc, int(np.argmax(gone)))
    complete = np.isin(members, rows).all(axis=1)
    waiting = C
    if complete.any():
        _, waiting = m.split(C, complete, pc, pc)
        members = members[~complete]
    waiting.waits = WaitsForWarpgroup(pc, np.unique(members))
    return True


def _fail_incomplete(E: Any, C: Cohort, pc: int, row: int) -> None:
    warp = int(E.row_warp[C.rows[row]])
    low = warp - warp % 4
    lanes = [
        int(E.alive[C.rows[row] - warp + w].sum()) if w < E.warps else 0
        for w in range(low, low + 4)
    ]
    E.fail(
        EmulatorError,
        "an incomplete warpgroup executes an instruction of whole ones",
        C,
        pc,
        row=row,
        numbers=f"warps {low} to {low + 3} have {lanes[0]}, {lanes[1]}, {lanes[2]} and {lanes[3]} "
        f"threads left; blocks have {E.threads}",
        way_out="let all 128 threads of four warps, the first a multiple of 4, execute it",
    )


class RegisterPool:
    """Registers that the warpgroups of a wave have and that their blocks have left."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.at_entry = registers_at_entry(machine.program)
        self.held = np.full(len(machine.row_block), self.at_entry)  # per thread, by warp
        self.free = np.zeros(len(machine.blocks), np.int64)  # per lane, summed over warps

    def change(self, C: Cohort, count: int, grow: bool, pc: int) -> None:
        """setmaxnreg of whole warpgroups; a cohort that must wait executes it again later."""
        m = self.machine
        C.pc = pc + 1
        if not self.at_entry:
            return
        held = self.held[C.rows]
        wrong = held > count if grow else held < count
        if wrong.any():
            m.fail(
                EmulatorError,
                f"setmaxnreg.{'inc lowers' if grow else 'dec raises'} the number of registers",
                C,
                pc,
                row=int(np.argmax(wrong)),
                numbers=f"{held[wrong][0]} per thread now, {count} wanted; at the start "
                f"{self.at_entry}, by the launch bounds",
                way_out="use the other form, or change the launch bounds",
            )
        served = np.zeros(C.n, bool)
        for first in range(0, C.n, 4):
            group = slice(first, first + 4)
            block = int(m.row_block[C.rows[first]])
            more = 4 * (count - int(held[first]))
            if more <= self.free[block]:
                self.free[block] -= more
                self.held[C.rows[group]] = count
                served[group] = True
        waiting = C
        if served.any() and not served.all():
            _, waiting = m.split(C, served, pc + 1, pc)
        if not served.all():
            waiting.pc = pc
            waiting.waits = WaitsForRegisters(pc, count)
        if not grow:
            for c in m.cohorts:
                if isinstance(c.waits, WaitsForRegisters):
                    c.waits = None

    def describe(self, c: Cohort) -> str:
        """What a waiting cohort waits for, for the deadlock report."""
        m, pc = self.machine, c.waits.pc
        block = int(m.row_block[c.rows[0]])
        held = int(self.held[c.rows[0]])
        return (
            f"waits for registers: {c.waits.count} per thread wanted, {held} held, of those that "
            f"its block started with ({self.at_entry} per thread) {int(self.free[block])} per lane "
            f"of one warp are left; {m.program.describe(pc)}"
        )


def registers_at_entry(program: Program) -> int:
    """Registers per thread that a kernel with setmaxnreg starts with; 0 when nothing tells.

    ptxas gives such a kernel all that its launch bounds leave.
    """
    if program.directives.get(".maxnreg"):
        return int(program.directives[".maxnreg"][0])
    if not program.max_threads:
        return 0
    blocks = program.directives.get(".minnctapersm", (1,))[0] or 1
    warps = -(-math.prod(program.max_threads) // 32)
    return min(_MOST, REGISTER_FILE // (32 * warps * blocks) // 8 * 8)
