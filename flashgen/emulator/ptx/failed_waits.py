"""What a kernel executes after a wait for an mbarrier has failed.

Where a wait succeeds, its warp is ordered after the phase. But try_wait may give up and test_wait
may come too early: what is executed after a failure as well is not ordered by the wait, although it
succeeds in this launch. So the order counts only where the kernel goes after a success alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.emulator.ptx.instructions import (
    as_immediate,
    fact,
    may_access_between_threads,
)
from flashgen.emulator.ptx.syntax import Instruction, LabelRef, Not, Operand, Pair, Reg

if TYPE_CHECKING:
    from flashgen.emulator.ptx.program import PtxProgram

Known = dict[int, int]
"""The values of registers that a failure determines."""
_COMPARED = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_LOGIC = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


class FailedWaits(NamedTuple):
    """Waits whose success does not order all that follows, by numbers of instructions.

    Attributes:
        loose: these waits.
        begins, ends: of an instruction, the waits whose order counts from there on, or no more.
    """

    loose: frozenset[int]
    begins: dict[int, tuple[int, ...]]
    ends: dict[int, tuple[int, ...]]


def find_failed_waits(program: PtxProgram, waits: list[int]) -> FailedWaits:
    """Follows the failure of each wait through a kernel; loops that a wait ends do not fail."""
    loose: set[int] = set()
    begins: dict[int, tuple[int, ...]] = {}
    ends: dict[int, tuple[int, ...]] = {}
    for wait in waits:
        failed = _after_failure(program, wait, set(waits))
        if not any(_matters(program.code[pc]) for pc in failed):
            continue
        loose.add(wait)
        for pc in range(len(program.code)):
            for after in program.successors(pc):
                inside = pc in failed or pc == wait
                if inside and after not in failed:
                    begins[after] = (*begins.get(after, ()), wait)
                elif not inside and after in failed:
                    ends[after] = (*ends.get(after, ()), wait)
    return FailedWaits(frozenset(loose), begins, ends)


def _matters(ins: Instruction) -> bool:
    """Whether it accesses what other threads access, or synchronises with them."""
    return may_access_between_threads(ins) or fact("unit", ins) == "barrier"


def _after_failure(program: PtxProgram, wait: int, waits: set[int]) -> set[int]:
    """The instructions that may be executed after a wait has failed, before one that cannot."""
    code, endless = program.code, program.repeats.endless
    found: dict[int, Known] = {}
    todo = [(wait, Known())]
    while todo:
        pc, known = todo.pop()
        if pc >= len(code) or (pc in endless and pc != wait):
            continue
        if pc in found:
            known = dict(found[pc].items() & known.items())
            if known == found[pc]:
                continue
        found[pc] = known
        ins = code[pc]
        taken = 1 if ins.guard is None else known.get(ins.guard.index)
        if taken is not None and ins.guard_negated:
            taken = 1 - taken
        after = program.successors(pc)
        if taken is not None and ins.op == "bra":
            target = ins.operands[0]
            assert isinstance(target, LabelRef)
            after = [target.target if taken else pc + 1]
        if taken != 0:
            value = 0 if pc in waits else _value(ins, known)
            known = {r: v for r, v in known.items() if not program.writes[pc] >> r & 1}
            to = ins.operands[0] if ins.operands else None
            to = to.first if isinstance(to, Pair) else to
            if isinstance(to, Reg) and value is not None and ins.guard is None:
                known[to.index] = value
        todo += [(target, known) for target in after]
    return set(found) - {wait}


def _value(ins: Instruction, known: Known) -> int | None:
    """The result of an instruction, if it depends on known values only."""

    def of(operand: Operand) -> int | None:
        if isinstance(operand, Not):
            value = known.get(operand.reg.index)
            return None if value is None else 1 - value
        return known.get(operand.index) if isinstance(operand, Reg) else as_immediate(operand)

    values = [of(operand) for operand in ins.operands[1:]]
    if ins.op == "selp" and values[2] is not None:
        return values[0 if values[2] else 1]
    if ins.op == "vote" and "all" in ins.mods and values[0] == 0:
        return 0
    if ins.op == "and" and 0 in values:
        return 0
    if not values or None in values:
        return None
    function: Callable[..., Any] | None = _LOGIC.get(ins.op)
    if ins.op == "setp" and len(values) == 2:
        function = next((_COMPARED[word] for word in ins.mods if word in _COMPARED), None)
    if ins.op in ("mov", "cvt"):
        return values[0]
    if ins.op == "not" and "pred" in ins.mods:
        return 1 - int(values[0] or 0)
    return None if function is None else int(function(*values))
