"""Loads and waits whose result decides whether they are executed again, and waits that fail.

A thread that polls a flag goes on only when the flag has the value that it waits for, so it does
not matter that the flag is written while it is read. Every other volatile load takes what happens
to be there. In the same way a wait for an mbarrier may give up (try_wait) or fail (test_wait), and
only a loop makes sure that its phase has completed.

Where a wait succeeds, its warp is ordered after the phase. But what is executed after a failure as
well is not ordered by the wait, although it succeeds in this launch. So the order counts only where
the kernel goes after a success alone.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ptx_emulator.ptx import instructions
from ptx_emulator.ptx.instructions import as_immediate, fact, mask_of, opcode_of, registers_in
from ptx_emulator.ptx.syntax import Instruction, LabelRef, Not, Operand, Pair, Reg

if TYPE_CHECKING:
    from ptx_emulator.ptx.program import PtxProgram

# The results of these depend on more than their operands, which they use.
_USES = frozenset(("ld", "ldu", "atom", "mbarrier", "call", "vprintf"))
_BRANCHES = frozenset(("bra", "brx"))


class Repeats(NamedTuple):
    """Numbers of instructions.

    Attributes:
        polls: volatile loads whose result decides about a way out of a loop that they are in.
        endless: waits for an mbarrier in a loop that only their result ends.
        idle: those whose loop does nothing meanwhile that another thread could wait for.
        counted: waits in a loop that their result ends, or something else.
        ignored: waits whose result nothing uses.
        spins: of each instruction of a loop that only the result of a strong load or an atomic
            ends, and that otherwise does nothing another thread could wait for, the number of that
            load or atomic.
    """

    polls: frozenset[int]
    endless: frozenset[int]
    idle: frozenset[int]
    counted: frozenset[int]
    ignored: frozenset[int]
    spins: dict[int, int]


def find_waits(code: list[Instruction]) -> list[int]:
    """The instructions that test or wait for a phase of an mbarrier."""
    words = {"try_wait", "test_wait"}
    return [pc for pc, ins in enumerate(code) if ins.op == "mbarrier" and words & {*ins.mods}]


def find_repeats(program: PtxProgram) -> Repeats:
    """The polls of a kernel, by data-flow analysis."""
    code = program.code
    loads = [pc for pc in program.accesses.strong if code[pc].op in ("ld", "atom")]
    waits = find_waits(code)
    if not loads and not waits:
        none = frozenset[int]()
        return Repeats(none, none, none, none, none, {})
    decided = {pc: _uses(program, pc) for pc in (*loads, *waits)}
    repeated: set[int] = set()
    idle: set[int] = set()
    counted: set[int] = set()
    spins: dict[int, int] = {}
    for loop in _loops(program):
        inside = loop.intersection(decided) - repeated
        ways_out = _ways_out(program, loop) if inside else set()
        guards = [r for way in ways_out for r in program.effects(code[way])[1]]
        for pc in inside:
            deciding = decided[pc].branches
            # Without the result, nothing that changes from turn to turn decides.
            alone = bool(ways_out) and ways_out <= deciding and _is_fixed(program, loop, guards, pc)
            if pc in waits:
                is_repeated = alone
                counted |= {pc} if ways_out & deciding else set()
            else:
                address = registers_in(code[pc].operands[1])
                is_repeated = bool(ways_out & deciding) and _is_fixed(program, loop, address)
            if is_repeated:
                repeated.add(pc)
                if not any(_concerns_other_threads(code[other]) for other in loop - {pc}):
                    idle.add(pc)
                    if alone and pc not in waits:
                        spins |= dict.fromkeys(loop, pc)
        if len(repeated) == len(decided):
            break
    volatile = [pc for pc in loads if pc in program.accesses.volatile]
    polls, endless = repeated.intersection(volatile), repeated.intersection(waits)
    ignored = [pc for pc in waits if not decided[pc].any]
    # Compilers copy the first turn of a loop to the place before it.
    polled = {_polled_location(code[pc]) for pc in polls}
    polls.update(pc for pc in volatile if _polled_location(code[pc]) in polled)
    return Repeats(
        frozenset(polls),
        frozenset(endless),
        frozenset(endless & idle),
        frozenset(counted),
        frozenset(ignored),
        spins,
    )


def _polled_location(ins: Instruction) -> tuple[object, ...]:
    return (ins.operands[1], *(word for word in ins.mods if word in ("global", "shared")))


def _loops(program: PtxProgram) -> Iterator[set[int]]:
    """The instructions of each loop, from the target of a branch back to it; short loops first.

    A branch back may lead to what never comes to the branch again: then there is no loop. A loop
    with several branches back is found by each of them, and then together with the shorter ones.
    """
    loops: list[set[int]] = []
    after, before = _ways(program)
    back = [(pc, to) for pc, targets in enumerate(after) for to in targets if to <= pc]
    for end, start in sorted(back, key=lambda edge: edge[0] - edge[1]):
        behind = _reached(end, start, lambda pc: before.get(pc, ()))
        if start in behind:
            loop = behind & _reached(start, end, lambda pc: after[pc] if pc < len(after) else ())
            yield loop
            whole = loop.union(*(other for other in loops if not other.isdisjoint(loop)))
            loops.append(whole)
            if whole != loop:
                yield whole


def _ways(program: PtxProgram) -> tuple[list[list[int]], dict[int, list[int]]]:
    """The instructions that may follow each one, and those that may come before it."""
    after = [program.successors(pc) for pc in range(len(program.code))]
    before: dict[int, list[int]] = {}
    for pc, targets in enumerate(after):
        for target in targets:
            before.setdefault(target, []).append(pc)
    return after, before


def _reached(first: int, last: int, ways: Callable[[int], Iterable[int]]) -> set[int]:
    """What can be reached from ``first`` without passing ``last``, both included."""
    reached, todo = {first}, [first] if first != last else []
    while todo:
        for pc in ways(todo.pop()):
            if pc not in reached:
                reached.add(pc)
                if pc != last:
                    todo.append(pc)
    return reached


def _ways_out(program: PtxProgram, loop: set[int]) -> set[int]:
    """The instructions that may leave a loop; those that end the launch do not count."""
    return {
        pc
        for pc in loop
        if opcode_of(program.code[pc]).branches and not loop.issuperset(program.successors(pc))
    }


def _is_fixed(program: PtxProgram, loop: set[int], registers: list[int], but: int = -1) -> bool:
    """Whether registers have the same value in every turn, but for the result of ``but``.

    A register that is computed from itself, directly or through others, has not.
    """
    sources: dict[int, set[int]] = {}
    todo = list(registers)
    while todo:
        register = todo.pop()
        if register in sources:
            continue
        sources[register] = set()
        for pc in loop - {but}:
            if program.writes[pc] >> register & 1:
                if program.code[pc].op in _USES:
                    return False
                sources[register].update(program.effects(program.code[pc])[1])
        todo += sources[register]
    # Without those whose sources are all fixed, what is left is a circle and what it leads to.
    left = set(sources)
    while fixed := {register for register in left if left.isdisjoint(sources[register])}:
        left -= fixed
    return not left


class _Uses(NamedTuple):
    """The branches that a result decides, and whether it is used for ``any`` purpose."""

    branches: set[int]
    any: bool


def _uses(program: PtxProgram, pc: int) -> _Uses:
    code = program.code
    result = mask_of(program.effects(code[pc])[0])
    dependent: dict[int, int] = {}
    todo = [(after, result) for after in program.successors(pc)]
    branches, used = set(), False
    while todo:
        index, registers = todo.pop()
        if index >= len(code) or not registers & program.live[index] & ~dependent.get(index, 0):
            continue
        registers = dependent[index] = registers & program.live[index] | dependent.get(index, 0)
        ins = code[index]
        if not program.reads[index] & registers:
            registers &= ~program.writes[index]
        elif ins.op in _USES or not fact("result", ins):
            used = True
            branches |= {index} if ins.op in _BRANCHES else set()
        else:
            registers |= mask_of(program.effects(ins)[0])
        todo += [(after, registers) for after in program.successors(index)]
    return _Uses(branches, used)


class Comparison(NamedTuple):
    """Whether an integer is less than another one, or equal to it.

    Attributes:
        kind: the type of what is less, such as "s32"; the bits of what is equal, such as "32".
    """

    kind: str
    one: Reg
    other: Reg | int

    @property
    def reads(self) -> int:
        """A bit mask of the registers."""
        operands = (self.one, self.other)
        return mask_of([operand.index for operand in operands if isinstance(operand, Reg)])

    def value(self, values: KnownValues) -> int | None:
        """1 or 0, or None where it is not known. What is less is not equal."""
        value = values.get(self)
        if isinstance(value, int):
            return value
        if isinstance(self.other, int) or self.kind[0] in "su":
            return None
        pairs = (self.one, self.other), (self.other, self.one)
        less = (Comparison(sign + self.kind, *pair) for sign in "su" for pair in pairs)
        return 0 if any(values.get(comparison) == 1 for comparison in less) else None


class Unknown(NamedTuple):
    """The value of a comparison that is not known, or its opposite."""

    comparison: Comparison
    opposite: bool


KnownValues = dict[int | Comparison, int | Unknown]
"""The values of registers, by number, and of comparisons on a way through a kernel: those that a
failure determines, and those that the branches on the way do."""
_MOST_WAYS = 8
"""The ways to an instruction that are followed apart; beyond it, what all of them know is."""
_COMPARED = {word: getattr(operator, word) for word in ("eq", "ne", "lt", "le", "gt", "ge")}
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
    if not waits:
        return FailedWaits(frozenset(), begins, ends)
    comparisons = filter(None, map(_comparison, program.code))
    compared = Counter(unknown.comparison.reads for unknown in comparisons)
    again = {reads for reads, times in compared.items() if times > 1}
    _, before = _ways(program)
    joins = {pc for pc, origins in before.items() if len(origins) > 1} | {0}
    for wait in waits:
        start = wait, _values_before(program, wait, before)
        failed = _after_failure(program, start, set(waits), again, joins)
        if not any(_concerns_other_threads(program.code[pc]) for pc in failed):
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


def _concerns_other_threads(ins: Instruction) -> bool:
    """Whether an instruction accesses what other threads access, or synchronises with them."""
    return instructions.may_access_between_threads(ins) or fact("unit", ins) == "barrier"


def _after_failure(
    program: PtxProgram,
    start: tuple[int, KnownValues],
    waits: set[int],
    again: set[int],
    joins: set[int],
) -> set[int]:
    """The instructions that may be executed after a wait has failed, before one that cannot.

    Args:
        start: the wait, and what is known before it.
        again: the registers, as bit masks, that several comparisons read.
        joins: where several ways meet; every loop has such a place.
    """
    code, endless = program.code, program.repeats.endless
    reached: set[int] = set()
    ways_to: dict[int, list[KnownValues]] = {}
    todo, wait = [start], start[0]
    while todo:
        pc, values = todo.pop()
        if pc >= len(code) or (pc in endless and pc != wait):
            continue
        reached.add(pc)
        if pc in joins:
            values = {key: x for key, x in values.items() if _registers(key) & program.live[pc]}
            ways = ways_to.setdefault(pc, [])
            if any(way.items() <= values.items() for way in ways):
                continue
            ways[:] = [values, *(way for way in ways if not values.items() <= way.items())]
            if len(ways) > _MOST_WAYS:
                values = dict(set.intersection(*(set(way.items()) for way in ways)))
                ways[:] = [values]
        ins = code[pc]
        guard = None if ins.guard is None else values.get(ins.guard.index)
        if ins.op == "bra" and ins.guard is not None:
            target = ins.operands[0]
            assert isinstance(target, LabelRef)
            for value, to in ((1, target.target), (0, pc + 1)):
                value ^= ins.guard_negated
                if guard != 1 - value:
                    todo.append((to, _values_after_branch(values, ins.guard.index, value)))
            continue
        if ins.guard is None or guard != int(ins.guard_negated):
            values = _values_after(program, pc, values, again, fails=pc in waits)
        todo += [(to, values) for to in program.successors(pc)]
    return reached - {wait}


def _values_before(program: PtxProgram, pc: int, before: dict[int, list[int]]) -> KnownValues:
    """The values that the branches on the only way to an instruction have shown."""
    values, shown = KnownValues(), dict[int, int]()
    current, written = pc, 0
    while len(before.get(current, ())) == 1 and before[current][0] < current:
        came, (current,) = current, before[current]
        ins = program.code[current]
        if ins.op == "bra" and ins.guard is not None and not written >> ins.guard.index & 1:
            taken = came != current + 1
            values[ins.guard.index] = shown[ins.guard.index] = taken ^ ins.guard_negated
        written |= program.writes[current]
        compared, to = _comparison(ins), ins.operands[0] if ins.operands else None
        if isinstance(to, Reg) and to.index in shown and ins.guard is None:
            value = shown.pop(to.index)
            if compared is not None and not written & compared.comparison.reads:
                values[compared.comparison] = value ^ compared.opposite
    return values


def _values_after_branch(values: KnownValues, register: int, value: int) -> KnownValues:
    """The known values where a branch has shown the value of a register."""
    before, decided = values.get(register), {**values, register: value}
    if isinstance(before, Unknown):
        decided[before.comparison] = value ^ before.opposite
    return decided


def _values_after(
    program: PtxProgram, pc: int, values: KnownValues, again: set[int], fails: bool
) -> KnownValues:
    """The known values after an instruction."""
    ins = program.code[pc]
    # Under a guard, too: `program.writes` has what is overwritten in any case.
    writes = program.writes[pc] if ins.guard is None else mask_of(program.effects(ins)[0])
    if not writes:
        return values
    value: int | Unknown | None = 0 if fails else _result(ins, values)
    compared = _comparison(ins)
    if value is None and compared is not None and compared.comparison.reads in again:
        outcome = compared.comparison.value(values)
        value = compared if outcome is None else outcome ^ compared.opposite
    if isinstance(value, Unknown) and writes & value.comparison.reads:
        value = None
    values = {
        key: x
        for key, x in values.items()
        if not writes & (_registers(key) | _registers_of_value(x))
    }
    to = ins.operands[0] if ins.operands else None
    to = to.first if isinstance(to, Pair) else to
    if isinstance(to, Reg) and value is not None and ins.guard is None:
        values[to.index] = value
    return values


def _registers(key: int | Comparison) -> int:
    return key.reads if isinstance(key, Comparison) else 1 << key


def _registers_of_value(value: int | Unknown) -> int:
    return value.comparison.reads if isinstance(value, Unknown) else 0


def _comparison(ins: Instruction) -> Unknown | None:
    """The comparison of two integers by an instruction; None for other instructions.

    All comparisons are written by "less" and "equal": a <= b is not b < a, and a <= 7 is a < 8.
    """
    is_one = ins.op == "setp" and len(ins.operands) == 3
    if not is_one or not re.fullmatch(r"[bsu](16|32|64)", ins.mods[-1]):
        return None
    word, kind = ins.mods[0], ins.mods[-1]
    word = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(word, word)
    a, b = (x if isinstance(x, Reg) else as_immediate(x) for x in ins.operands[1:])
    if isinstance(a, int):
        a, b, word = b, a, {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(word, word)
    if not isinstance(a, Reg) or b is None:
        return None
    if word in ("eq", "ne"):
        if isinstance(b, Reg) and b.index < a.index:
            a, b = b, a
        return Unknown(Comparison(kind[1:], a, b), word == "ne")
    if word not in ("lt", "le", "gt", "ge"):
        return None
    if word in ("le", "gt"):
        if isinstance(b, Reg):
            a, b, word = b, a, {"le": "ge", "gt": "lt"}[word]
        else:
            b, word = b + 1, {"le": "lt", "gt": "ge"}[word]
    return Unknown(Comparison(kind, a, b), word == "ge")


def _result(ins: Instruction, values: KnownValues) -> int | None:
    """The result of an instruction, if it depends on known values only."""

    def operand_value(operand: Operand) -> int | None:
        if isinstance(operand, Not):
            value = operand_value(operand.reg)
            return None if value is None else 1 - value
        if not isinstance(operand, Reg):
            return as_immediate(operand)
        register_value = values.get(operand.index)
        return register_value if isinstance(register_value, int) else None

    sources = [operand_value(operand) for operand in ins.operands[1:]]
    if ins.op == "selp" and sources[2] is not None:
        return sources[0 if sources[2] else 1]
    if ins.op == "vote" and "all" in ins.mods and sources[0] == 0:
        return 0
    if ins.op == "and" and 0 in sources:
        return 0
    if not sources or None in sources:
        return None
    function: Callable[..., Any] | None = _LOGIC.get(ins.op)
    if ins.op == "setp" and len(sources) == 2:
        function = next((_COMPARED[word] for word in ins.mods if word in _COMPARED), None)
    if ins.op in ("mov", "cvt"):
        return int(sources[0] != 0) if "pred" in ins.mods else sources[0]
    if ins.op == "not" and "pred" in ins.mods:
        return 1 - int(sources[0] or 0)
    return None if function is None else int(function(*sources))
