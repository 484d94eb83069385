"""Where registers of wgmma may be touched too early: found once per kernel, by data flow.

A warpgroup's sums and fragments of A belong to wgmma.mma_async from its issue to the wait that
covers it, and what ordinary instructions wrote to them is seen only past a wgmma.fence. Both can
only be judged while the kernel runs; but following every path through the code shows which few
instructions could be wrong at all, and only those are watched. In a kernel that waits and fences on
every path that is none.

A register's age is how many groups were committed since it was used: wait_group n ends what is
older than n. Where paths join, a register may have several ages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashgen.emulator.effects import (
    WARPGROUP_WIDE,
    accumulates,
    as_immediate,
    registers_in,
)
from flashgen.emulator.ptx import Vec

if TYPE_CHECKING:
    from flashgen.emulator.program import Program
    from flashgen.emulator.ptx import Instruction


class Watch(NamedTuple):
    """Registers of an instruction to look at while it runs.

    Attributes:
        sums: that may be in flight as sums, and that it reads or writes.
        fragments: that may be in flight as fragments of A, and that it writes.
        marks: that it writes, and that some wgmma may read before a fence.
    """

    sums: tuple[int, ...]
    fragments: tuple[int, ...]
    marks: tuple[int, ...]


class _State(NamedTuple):
    """Bit masks of registers: by age the sums and the fragments in flight; written, unfenced."""

    sums: tuple[int, ...]
    fragments: tuple[int, ...]
    written: int

    def joined(self, other: _State) -> _State:
        return _State(
            tuple(a | b for a, b in zip(self.sums, other.sums, strict=True)),
            tuple(a | b for a, b in zip(self.fragments, other.fragments, strict=True)),
            self.written | other.written,
        )


class Hazards:
    """What to watch in one kernel, by number of the instruction.

    Attributes:
        landing: of each wait_group, the sums that it may complete.
        watched: ordinary instructions that may touch what is in flight or must be remembered.
        unfenced: of each mma_async, its registers that may have been written since the last fence.
        first: each mma_async that may come before any fence.
    """

    def __init__(self, program: Program) -> None:
        self.landing: dict[int, tuple[int, ...]] = {}
        self.watched: dict[int, Watch] = {}
        self.unfenced: dict[int, tuple[int, ...]] = {}
        self.first: set[int] = set()
        if any(ins.op == "wgmma" for ins in program.code):
            _Analysis(program, self).run()


def gates(code: list[Instruction], leaders: set[int]) -> set[int]:
    """Instructions of whole warpgroups before which warps may have to wait for each other.

    Within a segment warps stay together, so it is the first of each; it begins a segment then.
    """
    found = set()
    together = False
    for pc, ins in enumerate(code):
        together = together and pc not in leaders
        if ins.op in WARPGROUP_WIDE and not together:
            found.add(pc)
            together = True
    return found


class _Analysis:
    def __init__(self, program: Program, found: Hazards) -> None:
        self.program, self.found = program, found
        self.effects = [program.effects(ins) for ins in program.code]
        self.used = 0  # registers of any mma_async
        waits = [0]
        for ins in program.code:
            if accumulates(ins):
                self.used |= mask_of(registers_in(ins.operands[0]))
                self.used |= mask_of(registers_in(ins.operands[1]))
            elif ins.op == "wgmma" and "wait_group" in ins.mods:
                waits.append(as_immediate(ins.operands[0]) or 0)
        self.oldest = max(waits) + 1
        self.never_fenced = 1 << len(program.registers)

    def run(self) -> None:
        program = self.program
        starts = sorted(s for s in program.leaders if s < len(program.code))
        ends = dict(zip(starts, [*starts[1:], len(program.code)], strict=True))
        none = (0,) * (self.oldest + 1)
        before = {0: _State(none, none, self.never_fenced)}
        todo = [0]
        while todo:
            start = todo.pop()
            state = before[start]
            for pc in range(start, ends[start]):
                state = self.after(state, pc)
            for target in program.successors(ends[start] - 1):
                if target not in ends:
                    continue
                known = before.get(target)
                joined = state if known is None else known.joined(state)
                if joined != known:
                    before[target] = joined
                    todo.append(target)
        self.collect(before, ends)

    def after(self, state: _State, pc: int) -> _State:
        """The state behind an instruction."""
        ins = self.program.code[pc]
        if ins.op != "wgmma":
            written = mask_of(self.effects[pc][0]) & self.used
            return state._replace(written=state.written | written) if written else state
        if accumulates(ins):
            sums, fragments = mask_of(registers_in(ins.operands[0])), fragments_of(ins)
            return _State(
                _renewed(state.sums, sums),
                _renewed(state.fragments, fragments),
                state.written & ~sums,
            )
        if "fence" in ins.mods:
            return state._replace(written=0)
        if "commit_group" in ins.mods:
            return state._replace(sums=_aged(state.sums), fragments=_aged(state.fragments))
        left = as_immediate(ins.operands[0]) or 0
        kept, gone = slice(0, left + 1), (0,) * (self.oldest - left)
        return state._replace(sums=state.sums[kept] + gone, fragments=state.fragments[kept] + gone)

    def collect(self, before: dict[int, _State], ends: dict[int, int]) -> None:
        """Walks all reachable code once more and notes what may be wrong."""
        code, found = self.program.code, self.found
        suspects = 0
        touched: dict[int, tuple[int, int]] = {}
        for start, state in before.items():
            for pc in range(start, ends[start]):
                ins = code[pc]
                if accumulates(ins):
                    mine = mask_of(registers_in(ins.operands[0])) | fragments_of(ins)
                    if state.written & mine:
                        suspects |= state.written & mine
                        found.unfenced[pc] = bits_of(state.written & mine)
                    if state.written & self.never_fenced:
                        found.first.add(pc)
                    # Fragments that are in flight as sums, and the other way round.
                    wrong = union(state.sums) & fragments_of(ins)
                    reused = union(state.fragments) & mask_of(registers_in(ins.operands[0]))
                    if wrong or reused:
                        touched[pc] = (wrong, reused)
                elif ins.op == "wgmma" and "wait_group" in ins.mods:
                    left = as_immediate(ins.operands[0]) or 0
                    found.landing[pc] = bits_of(union(state.sums[left + 1 :]))
                elif ins.op != "wgmma":
                    writes, reads = (mask_of(part) for part in self.effects[pc])
                    wrong = union(state.sums) & (writes | reads)
                    reused = union(state.fragments) & writes
                    if wrong or reused:
                        touched[pc] = (wrong, reused)
                state = self.after(state, pc)
        for pc, ins in enumerate(code):
            marks = 0 if ins.op == "wgmma" else mask_of(self.effects[pc][0]) & suspects
            wrong, reused = touched.get(pc, (0, 0))
            if marks or wrong or reused:
                found.watched[pc] = Watch(bits_of(wrong), bits_of(reused), bits_of(marks))


def fragments_of(ins: Instruction) -> int:
    """Registers of A of an mma_async that does not take A from shared memory."""
    return mask_of(registers_in(ins.operands[1])) if isinstance(ins.operands[1], Vec) else 0


def mask_of(registers: list[int]) -> int:
    mask = 0
    for register in registers:
        mask |= 1 << register
    return mask


def union(masks: tuple[int, ...]) -> int:
    whole = 0
    for mask in masks:
        whole |= mask
    return whole


def bits_of(mask: int) -> tuple[int, ...]:
    return tuple(place for place, bit in enumerate(bin(mask)[:1:-1]) if bit == "1")


def _renewed(ages: tuple[int, ...], used: int) -> tuple[int, ...]:
    """``used`` is in flight again, with age 0."""
    if not used:
        return ages
    return (ages[0] | used, *(mask & ~used for mask in ages[1:]))


def _aged(ages: tuple[int, ...]) -> tuple[int, ...]:
    """One more group was committed; the oldest age stands for all beyond it."""
    return (0, *ages[:-2], ages[-2] | ages[-1])
