"""setmaxnreg: the number of registers that each warp holds.

Every warp starts with the number of registers per thread for which the kernel was compiled, see
`registers_at_entry`; they are allocated in units of eight. setmaxnreg.dec returns registers to a
pool of the block, and setmaxnreg.inc waits until the pool has enough. Without launch bounds the
number is unknown (the assembler ignores setmaxnreg then), and every request is granted.
"""

from __future__ import annotations

import math

import numpy as np

from flashgen.shared.errors import EmulatorError
from ptx_emulator.ptx.instructions import as_immediate
from ptx_emulator.ptx.program import PtxProgram
from ptx_emulator.state.cohort import Cohort, WaitsForRegisters
from ptx_emulator.state.wave import Site, Wave

REGISTER_FILE = 65536  # 32-bit registers per SM
_MOST = 255  # registers per thread that instructions can name
_UNIT = 8  # registers per thread are allocated in multiples of this number


class RegisterPool:
    """Registers that the warps of a wave hold, and that are free in their blocks."""

    def __init__(self, machine: Wave) -> None:
        self.machine = machine
        self.at_entry = registers_at_entry(machine.program)
        allocated = -(-self.at_entry // _UNIT) * _UNIT
        self.held = np.full(len(machine.row_block), allocated)  # per thread, by warp
        self.free = np.zeros(len(machine.blocks), np.int64)  # registers per lane, summed over warps

    def change(self, cohort: Cohort, count: int, grow: bool, pc: int) -> None:
        """setmaxnreg by whole warpgroups; a cohort that has to wait executes it again later."""
        machine = self.machine
        cohort.pc = pc + 1
        if not self.at_entry:
            return
        held = self.held[cohort.rows]
        wrong = held > count if grow else held < count
        if wrong.any():
            what = f"setmaxnreg.{'inc lowers' if grow else 'dec raises'} the number of registers"
            numbers = f"{held[wrong][0]} per thread now, {count} requested; at the start "
            numbers += f"{self.at_entry}, by the launch bounds and the largest setmaxnreg"
            way_out = "use the other form of setmaxnreg, or change the launch bounds"
            site = Site(cohort, pc, int(np.argmax(wrong)))
            machine.fail(EmulatorError, what, site, numbers, way_out)
        granted = np.zeros(cohort.n, bool)
        for first in range(0, cohort.n, 4):
            group = slice(first, first + 4)
            block = int(machine.row_block[cohort.rows[first]])
            more = 4 * (count - int(held[first]))
            if more <= self.free[block]:
                self.free[block] -= more
                self.held[cohort.rows[group]] = count
                granted[group] = True
        machine.hold(cohort, granted, pc, WaitsForRegisters(pc, count), pc + 1)
        if not grow:
            machine.wake(WaitsForRegisters)

    def describe(self, cohort: Cohort) -> list[str]:
        """What a waiting cohort waits for, for the deadlock report."""
        machine, pc = self.machine, cohort.waits.pc
        block = int(machine.row_block[cohort.rows[0]])
        held = int(self.held[cohort.rows[0]])
        warps, instruction = machine.warps_text(cohort.rows), machine.program.describe(pc)
        return [
            f"{warps}, waits for registers: {cohort.waits.count} per thread requested, "
            f"{held} held; the block started with {self.at_entry} per thread, and "
            f"{int(self.free[block])} per lane of one warp are free; {instruction}"
        ]


def registers_at_entry(program: PtxProgram) -> int:
    """Registers per thread that a kernel with setmaxnreg starts with; 0 if unknown.

    The assembler assigns such a kernel as many registers as its launch bounds allow, but not more
    than its largest setmaxnreg, and at most 255: ptxas -v prints this number.
    """
    if program.directives.get(".maxnreg"):
        allowed = int(program.directives[".maxnreg"][0])
    elif program.max_threads:
        blocks = program.directives.get(".minnctapersm", (1,))[0] or 1
        warps = -(-math.prod(program.max_threads) // 32)
        allowed = REGISTER_FILE // (32 * warps * blocks) // _UNIT * _UNIT
    else:
        return 0
    changes = (ins.operands[0] for ins in program.code if ins.op == "setmaxnreg")
    wanted = max((as_immediate(operand) or 0 for operand in changes), default=_MOST)
    return min(allowed, wanted, _MOST)
