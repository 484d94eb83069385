"""Registers of wgmma that other instructions access too early.

From the issue of a wgmma.mma_async to the wait that covers it, its accumulators and its fragments
of A must not be accessed; and ordinary writes to them are visible to wgmma only after a
wgmma.fence. Both depend on the executed path, so they are checked during execution
(`RegisterOrder`). A data-flow analysis (`WgmmaHazards`) follows all paths through a kernel once and
finds the instructions for which a check is necessary; a kernel that waits and fences on every path
has none.

The age of a register is the number of groups committed since a wgmma used it: wait_group n
completes the groups whose age is greater than n. Where paths join, a register may have several
ages.

The PTX ISA requires a wgmma.fence after any access to the registers. This checker does not require
one after reads, because an instruction reads its registers before a later wgmma starts, nor between
products of different shapes that use the same accumulators one after the other.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple, NoReturn

import numpy as np

from ptx_emulator.errors import FenceError, InFlight
from ptx_emulator.ptx import instructions
from ptx_emulator.ptx.instructions import accumulates, bits_of, mask_of, registers_in
from ptx_emulator.ptx.program import PtxProgram
from ptx_emulator.ptx.syntax import Instruction, Vec
from ptx_emulator.state.cohort import Cohort, rows_of
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Execution, Site, Wave


class WatchedRegisters(NamedTuple):
    """Registers of an instruction to check during execution.

    Attributes:
        accumulators: may be in flight as accumulators, and are read or written.
        fragments: may be in flight as fragments of A, and are written.
        marks: are written, and may be used by a wgmma before a fence.
    """

    accumulators: tuple[int, ...]
    fragments: tuple[int, ...]
    marks: tuple[int, ...]


class _InFlightState(NamedTuple):
    """Bit masks of registers: in flight, by age; and written since the last fence."""

    accumulators: tuple[int, ...]
    fragments: tuple[int, ...]
    written: int

    def merged(self, other: _InFlightState) -> _InFlightState:
        return _InFlightState(
            tuple(a | b for a, b in zip(self.accumulators, other.accumulators, strict=True)),
            tuple(a | b for a, b in zip(self.fragments, other.fragments, strict=True)),
            self.written | other.written,
        )


class WgmmaHazards:
    """Results of the analysis of one kernel, by number of the instruction.

    Attributes:
        completed: of each wait_group, the accumulators that it may complete.
        watched: ordinary instructions to check or to record.
        unfenced: of each mma_async, its registers that may be written since the last fence.
        first: each mma_async that may be executed before any fence.
    """

    def __init__(self, program: PtxProgram) -> None:
        self.completed: dict[int, tuple[int, ...]] = {}
        self.watched: dict[int, WatchedRegisters] = {}
        self.unfenced: dict[int, tuple[int, ...]] = {}
        self.first: set[int] = set()
        if any(ins.op == "wgmma" for ins in program.code):
            _DataFlow(program, self).run()


class _DataFlow:
    def __init__(self, program: PtxProgram, hazards: WgmmaHazards) -> None:
        self.program, self.hazards = program, hazards
        self.effects = [program.effects(ins) for ins in program.code]
        self.used = 0  # registers of any mma_async
        waits = [0]
        for ins in program.code:
            if accumulates(ins):
                self.used |= mask_of(registers_in(ins.operands[0]))
                self.used |= mask_of(registers_in(ins.operands[1]))
            elif ins.op == "wgmma" and "wait_group" in ins.mods:
                waits.append(instructions.as_immediate(ins.operands[0]) or 0)
        self.oldest = max(waits) + 1
        self.never_fenced = 1 << len(program.registers)

    def run(self) -> None:
        program = self.program
        starts = sorted(s for s in program.leaders if s < len(program.code))
        ends = dict(zip(starts, [*starts[1:], len(program.code)], strict=True))
        none = (0,) * (self.oldest + 1)
        before = {0: _InFlightState(none, none, self.never_fenced)}
        todo = [0]
        while todo:
            start = todo.pop()
            state = before[start]
            for pc in range(start, ends[start]):
                state = self.after(state, pc)
            for target in program.successors(ends[start] - 1):
                if target not in ends:
                    continue
                earlier = before.get(target)
                merged = state if earlier is None else earlier.merged(state)
                if merged != earlier:
                    before[target] = merged
                    todo.append(target)
        self.collect(before, ends)

    def after(self, state: _InFlightState, pc: int) -> _InFlightState:
        """The state after an instruction."""
        ins = self.program.code[pc]
        if ins.op != "wgmma":
            written = mask_of(self.effects[pc][0]) & self.used
            return state._replace(written=state.written | written) if written else state
        if accumulates(ins):
            accumulators, fragments = mask_of(registers_in(ins.operands[0])), fragments_of(ins)
            return _InFlightState(
                _renewed(state.accumulators, accumulators),
                _renewed(state.fragments, fragments),
                state.written & ~accumulators,
            )
        if "fence" in ins.mods:
            return state._replace(written=0)
        if "commit_group" in ins.mods:
            return state._replace(
                accumulators=_aged(state.accumulators), fragments=_aged(state.fragments)
            )
        left = instructions.as_immediate(ins.operands[0]) or 0
        remaining, gone = slice(0, left + 1), (0,) * (self.oldest - left)
        return state._replace(
            accumulators=state.accumulators[remaining] + gone,
            fragments=state.fragments[remaining] + gone,
        )

    def collect(self, before: dict[int, _InFlightState], ends: dict[int, int]) -> None:
        """Walks all reachable code once more and records the instructions to check."""
        code, hazards = self.program.code, self.hazards
        suspects = 0
        touched: dict[int, tuple[int, int]] = {}
        for start, state in before.items():
            for pc in range(start, ends[start]):
                ins = code[pc]
                if accumulates(ins):
                    registers = mask_of(registers_in(ins.operands[0])) | fragments_of(ins)
                    if state.written & registers:
                        suspects |= state.written & registers
                        hazards.unfenced[pc] = bits_of(state.written & registers)
                    if state.written & self.never_fenced:
                        hazards.first.add(pc)
                    # Fragments that are in flight as accumulators, and vice versa.
                    wrong = union(state.accumulators) & fragments_of(ins)
                    reused = union(state.fragments) & mask_of(registers_in(ins.operands[0]))
                    if wrong or reused:
                        touched[pc] = (wrong, reused)
                elif ins.op == "wgmma" and "wait_group" in ins.mods:
                    left = instructions.as_immediate(ins.operands[0]) or 0
                    hazards.completed[pc] = bits_of(union(state.accumulators[left + 1 :]))
                elif ins.op != "wgmma":
                    writes, reads = (mask_of(part) for part in self.effects[pc])
                    wrong = union(state.accumulators) & (writes | reads)
                    reused = union(state.fragments) & writes
                    if wrong or reused:
                        touched[pc] = (wrong, reused)
                state = self.after(state, pc)
        for pc, ins in enumerate(code):
            marks = 0 if ins.op == "wgmma" else mask_of(self.effects[pc][0]) & suspects
            wrong, reused = touched.get(pc, (0, 0))
            if marks or wrong or reused:
                hazards.watched[pc] = WatchedRegisters(*map(bits_of, (wrong, reused, marks)))


def fragments_of(ins: Instruction) -> int:
    """The registers of A of an mma_async; none if A lies in shared memory."""
    return mask_of(registers_in(ins.operands[1])) if isinstance(ins.operands[1], Vec) else 0


def union(masks: tuple[int, ...]) -> int:
    return functools.reduce(operator.or_, masks, 0)


def _renewed(ages: tuple[int, ...], used: int) -> tuple[int, ...]:
    """``used`` is in flight again, with age 0."""
    return (ages[0] | used, *(mask & ~used for mask in ages[1:])) if used else ages


def _aged(ages: tuple[int, ...]) -> tuple[int, ...]:
    """One more group was committed; the last entry stands for all greater ages."""
    return (0, *ages[:-2], ages[-2] | ages[-1])


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

    def note_writes(self, execution: Execution, registers: tuple[int, ...]) -> None:
        """Records the writes of an ordinary instruction to registers of a later wgmma."""
        rows = rows_of(execution.cohort, execution.lanes)
        for register in registers:
            if register not in self.written:
                self.written[register] = np.zeros(len(self.machine.row_block), bool)
            self.written[register][rows] = True
            self.writer[register] = execution.pc

    def require_fence(self, execution: Execution, registers: tuple[int, ...], first: bool) -> None:
        """Checks that the registers of a wgmma were not written since the last fence.

        Raises:
            FenceError: one was, or no fence has been executed.
        """
        machine, rows = self.machine, execution.cohort.rows
        if first and not self.fenced[rows].all():
            site = execution.site(np.argmin(self.fenced[rows]))
            what = "wgmma without any wgmma.fence before it"
            machine.fail(FenceError, what, site, "this warp has executed no wgmma.fence", _FENCE)
        for register in registers:
            written = self.written.get(register)
            if written is not None and written[rows].any():
                site = execution.site(np.argmax(written[rows]))
                what = "wgmma uses a register that was written since the last wgmma.fence"
                writer = machine.program.describe(self.writer[register])
                numbers = f"{machine.program.register_name(register)} was written by {writer}"
                machine.fail(FenceError, what, site, numbers, _FENCE)

    def check_in_flight(
        self, execution: Execution, accumulators: tuple[int, ...], fragments: tuple[int, ...]
    ) -> None:
        """Checks that registers of an ordinary instruction are not in flight.

        Raises:
            InFlight: one is, in a warpgroup of an active lane.
        """
        site = execution.site()
        groups = self.machine.wgmma.groups_of(rows_of(execution.cohort, execution.lanes))
        for chain in self.machine.wgmma.chains:
            if not np.isin(chain.groups, groups).any():
                continue
            for register in accumulators:
                if register in chain.registers:
                    self.fail_in_flight(site, register, chain.steps[-1].pc, "an accumulator")
            for step in chain.steps:
                for register in fragments:
                    if register in step.form.fragments:
                        self.fail_in_flight(site, register, step.pc, "a fragment of A")

    def fail_in_flight(self, site: Site, register: int, pc: int, use: str) -> NoReturn:
        """Raises for a register that an instruction in flight still uses."""
        machine = self.machine
        what = "a register of a wgmma in flight is accessed before its wait"
        program = machine.program
        numbers = f"{program.register_name(register)} is {use} of {program.describe(pc)}"
        way_out = "execute wgmma.commit_group and a wgmma.wait_group that covers it first"
        machine.fail(InFlight, what, site, numbers, way_out)
