"""A kernel ready for code generation: flat code, control flow, liveness, register types."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import numpy as np

from ptx_emulator.errors import LaunchArguments, UnknownInstruction
from ptx_emulator.ptx import instructions
from ptx_emulator.ptx.flatten import flatten
from ptx_emulator.ptx.instructions import Width, bits_of, fact, opcode_of
from ptx_emulator.ptx.register_types import register_dtypes
from ptx_emulator.ptx.repeats import find_failed_waits, find_repeats, find_waits
from ptx_emulator.ptx.syntax import (
    Instruction,
    LabelRef,
    Mem,
    Module,
    Operand,
    Reg,
    Special,
    Sym,
    Variable,
)

GLOBAL_BASE = 0x7F12_0000_0000
CONST_GAP = 4096
ALL_LANES = 0xFFFFFFFF  # as a member mask
_LONG = re.compile(r"\{([^{}]{60,})\}")
MOST_GROUPS = 63  # that wgmma.wait_group may leave in flight
REGION_LIMIT = 600  # most instructions of an if that some warps run without splitting the cohort


class Region(NamedTuple):
    """Straight-line code that a forward branch skips.

    Attributes:
        inputs: registers that it reads or must preserve.
        outputs: registers that it changes and that are live after it.
        warp_wide: whether it contains warp-wide instructions.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    warp_wide: bool


# Shared memory that the system reserves for cooperative groups, which expect at least 288 bytes.
_RESERVED, _RESERVED_BYTES = "reserved_smem_offset_1", 288
# The barrier of a grid, in cooperative launches; special registers hold its address in halves.
GRID_BARRIER = "%envreg"  # no name that a variable of the module can have in CUDA
GRID_WORKSPACE = {"envreg1": 32, "envreg2": 0}


def _reserved(code: list[Instruction]) -> dict[str, Variable]:
    """The memory that the system reserves, as variables, where code uses it."""
    variables = {}
    used = {o.name for ins in code for o in ins.operands if isinstance(o, Special)}
    if _RESERVED in used:
        variables[_RESERVED] = Variable(_RESERVED, "shared", "b8", _RESERVED_BYTES, 16)
    if used.intersection(GRID_WORKSPACE):
        variables[GRID_BARRIER] = Variable(GRID_BARRIER, "global", "b32", 2, 8)
    return variables


class PtxProgram:
    """One kernel of a module.

    Attributes:
        code: flat instructions.
        accesses: which of them access memory, and how; ``repeats``: which are polls.
        racing: volatile accesses that are no polls.
        acquired_by_fences: loads and atomics that acquire what was released at the next fence of
            their warp.
        asynchronous: whether mbarriers, bulk copies or wgmma are used.
        starts_dependents: whether griddepcontrol.launch_dependents is.
        live: bit mask of the live registers before each instruction (one more for the end).
        leaders: where a segment starts when no lane is masked off.
        gates: warpgroup-wide instructions that may have to wait for other warps.
        maybe_undefined: registers that are read before they are written on some path.
        strays: shuffles whose member mask may leave out lanes, or name some that do not exist.
        shared: offset of each shared variable; ``dynamic_shared``: where the extern array starts.
        reserved: offsets of the shared memory that the system reserves, zero at first.
        constants: address of each module variable of .global and .const.
    """

    def __init__(self, module: Module, name: str, ragged: bool) -> None:
        """``ragged``: the last warp of a block has fewer than 32 threads."""
        entry = module.functions.get(name)
        if entry is None or not entry.is_entry or not entry.has_body:
            kernels = ", ".join(f.name for f in module.functions.values() if f.is_entry)
            what = f"the PTX has no kernel {name!r}"
            where = "ptx_emulator.launch"
            numbers = f"kernels of this PTX: {kernels or 'none'}"
            way_out = 'name one of them (declare it extern "C" to keep its name)'
            raise LaunchArguments(what, where=where, numbers=numbers, way_out=way_out)
        self.module = module
        self.name = name
        self.params = entry.params
        self.directives = entry.directives
        self.required_threads = entry.directives.get(".reqntid", ())
        self.max_threads = self.required_threads or entry.directives.get(".maxntid", ())
        flat = flatten(module, entry)
        self.code = flat.code
        self.registers = flat.registers
        self.branch_targets = flat.branch_targets
        self.variables = {**module.variables, **flat.variables, **_reserved(self.code)}
        self._place_variables()
        self._require_operands()
        self.accesses = instructions.find_accesses(self.code)
        self.asynchronous = any(fact("asynchronous", ins) for ins in self.code)
        self.starts_dependents = any("launch_dependents" in ins.mods for ins in self.code)
        self._flow()
        self._liveness()
        self.repeats = find_repeats(self)
        self.failed_waits = find_failed_waits(self, find_waits(self.code))
        self.racing = self.accesses.volatile - self.repeats.polls
        self.acquired_by_fences = self.repeats.polls | self.accesses.relaxed | self.accesses.guesses
        self.dtype = register_dtypes(self.code, [kind for _, kind in self.registers])
        self._track_undefined(ragged)
        self.initial: list[Any] = [np.zeros((), dtype=d)[()] for d in self.dtype]
        self.initial += [np.uint64(0)] * len(self.tracked)
        self.region = functools.cache(self._region)
        self.live_list = functools.cache(self._live_list)

    # ---- variables

    def _place_variables(self) -> None:
        self.shared: dict[str, int] = {}
        self.local: dict[str, int] = {}
        self.constants: dict[str, int] = {}
        self.params_at: dict[str, int] = {}
        ends = {"shared": 0, "local": 0, "param": 0, "global": GLOBAL_BASE}

        def assign(table: dict[str, int], variable: Variable, name: str, space: str) -> None:
            align = max(variable.align, 16 if space == "global" else 1)
            table[name] = -(-ends[space] // align) * align
            ends[space] = table[name] + variable.size + (CONST_GAP if space == "global" else 0)

        dynamic: dict[str, int] = {}  # the alignments of extern arrays
        for name, variable in self.variables.items():
            if variable.space == "shared" and variable.count == 0:
                dynamic[name] = variable.align
            elif variable.space == "shared":
                assign(self.shared, variable, name, "shared")
            elif variable.space == "local":
                assign(self.local, variable, name, "local")
            elif variable.space in ("global", "const"):
                assign(self.constants, variable, name, "global")
        for variable in self.params:
            assign(self.params_at, variable, variable.name, "param")
        top = max(dynamic.values(), default=1)
        self.dynamic_shared = -(-ends["shared"] // top) * top
        self.shared |= dict.fromkeys(dynamic, self.dynamic_shared)
        start = self.shared.get(_RESERVED)
        self.reserved = slice(0, 0) if start is None else slice(start, start + _RESERVED_BYTES)
        self.local_bytes = -(-ends["local"] // 16) * 16
        self.param_bytes = ends["param"]
        self.constant_bytes = ends["global"] - GLOBAL_BASE

    def first_uses(self) -> dict[str, int]:
        """The first instruction that uses each variable which the kernel names or reaches."""
        uses: dict[str, int] = {}
        for pc, ins in enumerate(self.code):
            for operand in ins.operands:
                base = operand.base if isinstance(operand, Mem) else operand
                if isinstance(base, Sym):
                    uses.setdefault(base.name, pc)
        todo = list(uses)
        while todo:
            name = todo.pop()
            for _, target in self.variables[name].relocations if name in self.variables else ():
                if target not in uses:
                    uses[target] = uses[name]
                    todo.append(target)
        return uses

    def _require_operands(self) -> None:
        """Refuses instructions that lack the operands from which control and data flow are found.

        Emitters check all other operands, of the instructions that are executed.
        """
        for pc, ins in enumerate(self.code):
            least, fine = 1 if instructions.has_members(ins) else 0, True
            if ins.op == "bra":
                fine = len(ins.operands) == 1 and isinstance(ins.operands[0], LabelRef)
            elif ins.op == "brx":
                table = ins.operands[1] if len(ins.operands) == 2 else None
                fine = isinstance(table, Sym) and table.name in self.branch_targets
            elif instructions.accumulates(ins):
                least = 2
            elif ins.op == "shfl":
                least, first = 4, ins.operands[:1]
                fine = any(instructions.registers_in(o) for o in first)
            elif ins.op == "wgmma" and {"fence", "commit_group"}.isdisjoint(ins.mods):
                least, left = 1, [instructions.as_immediate(o) for o in ins.operands[:1]]
                fine = all(number is not None and 0 <= number <= MOST_GROUPS for number in left)
            if len(ins.operands) < least or not fine:
                what = f"the emulator does not support {ins.name} with these operands"
                where = f"kernel {self.name}, {self.source_location(pc)}"
                way_out = "check the operands against the PTX ISA"
                raise UnknownInstruction(what, where=where, numbers=self.text(pc), way_out=way_out)

    # ---- control flow and liveness

    def successors(self, pc: int) -> list[int]:
        """Instructions that may follow instruction ``pc``."""
        ins = self.code[pc]
        if not opcode_of(ins).branches:
            return [pc + 1]
        after = [pc + 1] if ins.guard is not None else []
        if ins.op == "bra":
            target = ins.operands[0]
            assert isinstance(target, LabelRef)
            return [target.target, *after]
        if ins.op == "brx":
            table = ins.operands[1]
            assert isinstance(table, Sym)
            return [*self.branch_targets[table.name], *after]
        return after

    def _flow(self) -> None:
        leaders = {0}
        for pc, ins in enumerate(self.code):
            opcode = opcode_of(ins)
            if opcode.branches:
                leaders.update(self.successors(pc))
            if opcode.branches or opcode.ends_segment or instructions.is_barrier(ins):
                leaders.add(pc + 1)
            if fact("starts_segment", ins):
                leaders.add(pc)
        self.gates = instructions.gates(self.code, leaders)
        self.leaders = leaders | self.gates

    def constant_of(self, operand: Operand) -> int | None:
        """The 32-bit value of an operand that is the same in every thread, else None."""
        seen: set[Operand] = set()
        while isinstance(operand, Reg) and operand not in seen:
            seen.add(operand)
            definitions = self._definitions.get(operand.index, [])
            if len(definitions) != 1:
                return None
            (ins,) = definitions
            if ins.op != "mov" or ins.guard is not None:
                return None
            operand = ins.operands[1]
        value = instructions.as_immediate(operand)
        return None if value is None else value & 0xFFFFFFFF

    def effects(self, ins: Instruction) -> tuple[list[int], list[int]]:
        """(registers written, registers read); a guarded write also reads."""
        writes: list[int] = []
        reads: list[int] = []
        for index, operand in enumerate(ins.operands):
            if index == 0 and fact("result", ins):
                writes = instructions.registers_in(operand)
            else:
                reads += instructions.registers_in(operand)
        if instructions.accumulates(ins):
            reads = [*reads, *writes]
        if ins.op in ("add", "addc", "sub", "subc", "mad", "madc"):
            carry = len(self.registers)
            if ins.op.endswith("c"):
                reads = [*reads, carry]
            if "cc" in ins.mods:
                writes = [*writes, carry]
        if ins.guard is not None:
            reads = [*reads, ins.guard.index, *writes]
        return writes, reads

    def _liveness(self) -> None:
        code = self.code
        count = len(code)
        writes, reads = [0] * count, [0] * count
        self._definitions: dict[int, list[Instruction]] = {}
        for pc, ins in enumerate(code):
            to, source = self.effects(ins)
            for r in to:
                self._definitions.setdefault(r, []).append(ins)
            writes[pc], reads[pc] = instructions.mask_of(to), instructions.mask_of(source)
            writes[pc] &= ~reads[pc] if ins.guard is not None else -1
        starts = sorted(s for s in self.leaders if s < count)
        ends = [*starts[1:], count]
        self.live = live = [0] * (count + 1)
        # Each stretch as a whole first, until nothing changes: what it overwrites, and what it
        # reads before that.
        stretches = []
        for start, end in zip(reversed(starts), reversed(ends), strict=True):
            killed, read = 0, 0
            for pc in range(end - 1, start - 1, -1):
                killed |= writes[pc]
                read = (read & ~writes[pc]) | reads[pc]
            stretches.append((start, end, self.successors(end - 1), ~killed, read))
        changed = True
        while changed:
            changed = False
            for start, _, after, preserved, read in stretches:
                state = 0
                for target in after:
                    state |= live[target]
                state = (state & preserved) | read
                if state != live[start]:
                    live[start] = state
                    changed = True
        for start, end, after, _, _ in stretches:
            state = 0
            for target in after:
                state |= live[target]
            for pc in range(end - 1, start, -1):
                live[pc] = state = (state & ~writes[pc]) | reads[pc]
        self.writes, self.reads = writes, reads
        self.maybe_undefined = live[0]

    def _track_undefined(self, ragged: bool) -> None:
        """Assigns a definedness slot to each register that may be read before it is written, that
        a shuffle may fill from a lane that does not take part in it, or a load from local memory.

        Values computed from such registers are tracked as well: a compiler may compute with an
        undefined value as long as the result never leaves the registers.
        """
        tracked = self.maybe_undefined
        self.strays = set()
        for pc, ins in enumerate(self.code):
            if ins.op == "shfl" and (ragged or self.constant_of(ins.operands[-1]) != ALL_LANES):
                self.strays.add(pc)
                tracked |= 1 << instructions.registers_in(ins.operands[0])[0]
            if self.local_bytes and instructions.may_read_local(ins):
                tracked |= instructions.mask_of(self.effects(ins)[0])
        changed = True
        while changed:
            changed = False
            for pc, ins in enumerate(self.code):
                if self.reads[pc] & tracked and fact("result", ins):
                    new = self.writes[pc] & ~tracked
                    if new and ins.op not in ("ld", "ldmatrix", "atom", "mma", "wgmma"):
                        tracked |= new
                        changed = True
        base = len(self.registers) + 1
        registers = [r for r in range(len(self.registers)) if tracked >> r & 1]
        self.tracked = {r: base + index for index, r in enumerate(registers)}
        slots = ((1 << len(registers)) - 1) << base
        self.live = [mask | slots for mask in self.live]

    def _region(self, start: int, end: int) -> Region | None:
        """The straight-line code between a forward branch and its target.

        None if it is long, or contains a branch, an exit or an instruction that may wait.
        """
        if not start < end <= start + REGION_LIMIT:
            return None
        reads = writes = 0
        warp_wide = False
        for pc in range(start, end):
            ins = self.code[pc]
            opcode, width = opcode_of(ins), fact("width", ins)
            if opcode.branches or opcode.ends_segment or fact("starts_segment", ins):
                return None
            if width in (Width.BLOCK, Width.WARPGROUP) or ins.op == "call":
                return None
            warp_wide |= instructions.is_warp_wide(ins)
            reads |= self.reads[pc]
            writes |= self.writes[pc]
        inputs = reads & self.live[start]
        outputs = writes & self.live[end]
        for reg, slot in self.tracked.items():
            if (inputs | outputs) >> reg & 1:
                inputs |= 1 << slot
            if outputs >> reg & 1:
                outputs |= 1 << slot
        return Region(bits_of(inputs | outputs), bits_of(outputs), warp_wide)

    def _live_list(self, pc: int) -> tuple[int, ...]:
        """Numbers of the registers that are live before instruction ``pc``."""
        return bits_of(self.live[min(pc, len(self.code))])

    # ---- messages

    def source_line(self, pc: int) -> str:
        """``file:line`` of the .cu, or of the PTX where there is no .loc."""
        return self.module.source_line(self.code[min(pc, len(self.code) - 1)])

    def describe(self, pc: int) -> str:
        """An instruction for messages: its line, the line that it was inlined at, its text."""
        return f"{self.source_location(pc)}: {_LONG.sub(_shorter, self.text(pc))}"

    def source_location(self, pc: int) -> str:
        """The line of an instruction, and the line that it was inlined at."""
        return self.module.source_location(self.code[min(pc, len(self.code) - 1)])

    def text(self, pc: int) -> str:
        """The text of the instruction in the PTX, on one line."""
        return self.module.text_of(self.code[min(pc, len(self.code) - 1)])

    def local_name(self, offset: int) -> str:
        """The variable of local memory at an offset, for messages; '' if there is none."""
        for name, start in self.local.items():
            if start <= offset < start + self.variables[name].size:
                return f", byte {offset - start} of {name.split('#')[0]}"
        return ""

    def register_name(self, index: int) -> str:
        return self.registers[index][0]


def _shorter(match: re.Match[str]) -> str:
    """Abbreviates a long list of registers to its first and last."""
    first, *_, last = match.group(1).split(",")
    return f"{{{first}, ..., {last.strip()}}}"
