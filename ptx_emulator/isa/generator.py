"""Compiles a segment of PTX to one Python function over numpy arrays.

A segment extends from an instruction to the next branch, barrier or branch target. Its function is
``segment(E, C)``, where ``E`` is the machine and ``C`` the cohort of warps that executes it. In the
generated code ``R`` holds the cohort's registers and ``M`` its mask. Every register is a numpy
value of shape (), (n, 1) or (n, 32) for the n warps of the cohort and is never modified in place.
Within a segment, registers are Python locals in single-assignment form, which are deleted after
their last use so that numpy reuses memory that is still in the cache. The emitter of an opcode,
which `instruction` or `formula` registers, writes the code of an instruction.

A segment has two variants: one for cohorts in which all lanes are active, without masks; and one
for cohorts with inactive lanes, which ends before every warp-wide instruction because this may have
to wait.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import numpy as np

from ptx_emulator.checks.wgmma_registers import WgmmaHazards
from ptx_emulator.errors import UnknownInstruction
from ptx_emulator.isa import definedness, forms
from ptx_emulator.isa.pending_products import PendingProducts
from ptx_emulator.isa.special_registers import SPECIAL
from ptx_emulator.ptx import instructions, syntax
from ptx_emulator.ptx.instructions import OPCODES, Opcode, Width, fact, opcode_of
from ptx_emulator.ptx.lexer import double_to_single
from ptx_emulator.ptx.program import ALL_LANES, GRID_BARRIER, GRID_WORKSPACE, PtxProgram
from ptx_emulator.ptx.register_types import DTYPE
from ptx_emulator.ptx.syntax import Imm, Instruction, Operand, Reg
from ptx_emulator.state.wave import Execution

Emitter = Callable[[Any, Instruction], None]
"""Writes the code of an instruction: (generator, instruction)."""
TypedEmitter = Callable[[Any, Instruction, str], None]
"""Writes the code of an instruction of a type: (generator, instruction, type)."""
# What generated code finds by name: numpy, dtypes, and the functions of the modules of `isa`.
RUNTIME: dict[str, Any] = {"np": np, "where": np.where, "Execution": Execution}
for _code in ["b1", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c16"]:
    RUNTIME[_code] = np.dtype(_code)


def instruction(*opcodes: str, unit: Any, **facts: Any) -> Callable[[Emitter], Emitter]:
    """Registers the emitter of some opcodes, and their facts: see `Opcode`."""

    def register(emitter: Emitter) -> Emitter:
        OPCODES.update(dict.fromkeys(opcodes, Opcode(emitter, unit, **facts)))
        return emitter

    return register


_FIELD = re.compile(r"\{([a-d]:)?([\w/]+)\}")


def formula(op: str, unit: str, result: str, text: str, ignored: str = "", **facts: Any) -> None:
    """Registers an op whose result is an expression; see `expression_of`."""
    emit = expression_of(result, text, ignored)
    instruction(op, unit=unit, **facts)(lambda g, ins: emit(g, ins, g.mods.type()))


def expression_of(result: str, text: str, ignored: str = "") -> TypedEmitter:
    """The emitter of an expression.

    Args:
        result: its dtype: T is that of the type, U the unsigned one of the same size, N the one for
            bits that do not depend on the sign, and S that of the type modifier before; ``u4|b1``
            for the dtypes of ``d|p``.
        text: the expression. ``{a:u4}`` is the first source, read as uint32; ``{wrap}`` is whether
            the modifier .wrap is present, and ``{wrap/clamp}`` whether it is .wrap, not .clamp.
        ignored: a modifier without effect.
    """
    read = {letter[0]: name for letter, name in _FIELD.findall(text) if letter}
    typed = not {"T", "U", "N"}.isdisjoint([result, *read.values()])

    def emit(g: Generator, ins: Instruction, kind: str) -> None:
        to, *sources = ins.operands
        g.refuse_if(typed and not kind, "no type")
        g.mods.take(ignored)
        size = syntax.TYPE_BYTES.get(kind, 4)
        neutral = "b1" if kind == "pred" else g.integer(to, size)
        dtypes = {"T": DTYPE.get(kind, ""), "U": f"u{size}", "N": neutral}
        if result == "S":
            dtypes["S"] = DTYPE[g.mods.type()]
        operands = zip(sorted(read), sources, strict=True)
        values = {a: g.read(source, dtypes.get(read[a], read[a])) for a, source in operands}

        def filled(field: re.Match[str]) -> str:
            words = field[2].split("/")
            return values[field[1][0]] if field[1] else str(g.mods.take(*words) == words[0])

        value = _FIELD.sub(filled, text)
        if "|" not in result:
            g.write(to, value, dtypes.get(result, result))
            return
        both = g.let(value)
        for index, (part, dtype) in enumerate(zip(split_pair(to), result.split("|"), strict=True)):
            g.write(part, f"{both}[{index}]", dtype)

    return emit


class Modifiers:
    """The modifiers of an instruction that its emitter has not consumed yet.

    Modifiers that are left when the emitter returns make the instruction unsupported.
    """

    def __init__(self, words: tuple[str, ...]) -> None:
        self.left = list(words)

    def take(self, *words: str) -> str:
        """Removes and returns the first of ``words`` that is present; '' if there is none."""
        for word in words:
            if word in self.left:
                self.left.remove(word)
                return word
        return ""

    def type(self) -> str:
        """Removes and returns the last type modifier; '' if there is none."""
        for index in reversed(range(len(self.left))):
            if self.left[index] in syntax.TYPE_BYTES:
                return self.left.pop(index)
        return ""


def items_of(operand: Operand) -> tuple[Operand, ...]:
    """The items of a vector operand, or the operand alone."""
    return operand.items if isinstance(operand, syntax.Vec) else (operand,)


def split_pair(operand: Operand) -> tuple[Operand, Operand]:
    """``d|p`` as two operands; the second is a `Sink` if there is only one."""
    if isinstance(operand, syntax.Pair):
        return operand.first, operand.second
    return operand, syntax.Sink()


def fragment_items(g: Any, operand: Operand, count: int) -> tuple[Operand, ...]:
    """The registers of a fragment of a matrix, which has ``count`` of them."""
    items = items_of(operand)
    g.refuse_if(len(items) != count, "another number of registers")
    return items


SegmentFunction = Callable[[Any, Any], Any]
"""(machine, cohort) -> True if it did nothing because the cohort waits, and must run again."""
_LOCAL = re.compile(r"\bv\d+\b")
_UNSIGNED = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


@functools.lru_cache(maxsize=2048)
def _compiled(text: str) -> CodeType:
    """The code of a function; kernels that differ in few places have most of them in common."""
    return compile(text, "<segment>", "exec")


class Generator:
    """Writes the function of one segment."""

    def __init__(
        self, program: PtxProgram, hazards: WgmmaHazards, masked: bool, check: bool, profile: bool
    ) -> None:
        self.program = program
        self.hazards = hazards
        self.masked = masked
        self.check = check
        self.profile = profile
        self.lines: list[str] = []
        self.names: dict[int, str] = {}
        self.loads: dict[int, str] = {}
        self.constants: dict[tuple[int, str], str] = {}
        self.namespace: dict[str, Any] = dict(RUNTIME)
        self.counter = 0
        self.pc = 0
        self.ins: Instruction = program.code[0] if program.code else Instruction("exit", (), [])
        self.mods = Modifiers(())
        self.guard = ""
        self.specials: dict[str, str] = {}
        self.defined: list[str] = []  # definedness of the sources that this instruction reads
        self.products = PendingProducts()
        self.in_flight: set[tuple[int, ...]] = set()  # accumulators of wgmma that this segment uses
        self.ended = False
        # Lanes have synchronised since the last access to shared memory in this segment.
        self.synchronised = False

    # ---- text

    def fresh(self) -> str:
        self.counter += 1
        return f"v{self.counter}"

    def emit(self, text: str) -> None:
        self.lines.append(text)

    def let(self, expression: str) -> str:
        """Assigns an expression to a new local; returns its name."""
        name = self.fresh()
        self.lines.append(f"{name} = {expression}")
        return name

    def unknown(
        self,
        feature: str = "",
        way_out: str = "add it to the emitter of its family in ptx_emulator/isa/",
    ) -> UnknownInstruction:
        problem = f"the emulator does not support {self.ins.name}"
        problem += f": {feature}" if feature else ""
        where = f"kernel {self.program.name}, {self.program.source_location(self.pc)}"
        numbers = self.program.text(self.pc)
        return UnknownInstruction(problem, where=where, numbers=numbers, way_out=way_out)

    def refuse_if(self, condition: Any, feature: str) -> None:
        """Refuses the instruction, which has ``feature`` if the condition holds."""
        if condition:
            raise self.unknown(feature)

    def need(self, *words: str) -> None:
        """Removes modifiers that the instruction must have."""
        for word in words:
            if not self.mods.take(word):
                raise self.unknown(f"no .{word}")

    def one_of(self, *words: str) -> str:
        """Removes and returns the one of some modifiers that the instruction must have."""
        word = self.mods.take(*words)
        if not word:
            raise self.unknown(f"none of .{', .'.join(words)}")
        return word

    def immediate(self, operand: Operand, role: str) -> int:
        """The value of an operand, which must be an integer constant."""
        value = instructions.as_immediate(operand)
        if value is None:
            raise self.unknown(f"{role} that is not a constant")
        return value

    # ---- registers

    def current(self, index: int) -> str:
        """The local that currently holds a register."""
        name = self.names.get(index)
        if name in self.products.names:
            self.flush(self.program.live[self.pc])
        if name is None:
            name = self.names[index] = self.fresh()
            self.loads[index] = name
        return name

    def read(self, operand: Operand, dtype: str) -> str:
        """An expression for an operand as ``dtype``; wider registers are truncated."""
        if isinstance(operand, Reg):
            name, register_dtype = self.current(operand.index), self.program.dtype[operand.index]
            self.note_definedness(operand.index)
            if int(dtype[1:]) > int(register_dtype[1:]):
                raise self.unknown(f"a {register_dtype} register read as {dtype}")
            return self.viewed(name, register_dtype, dtype)
        if isinstance(operand, Imm):
            return self.constant(operand, dtype)
        if isinstance(operand, syntax.Special):
            return self.viewed(*self.special(operand.name), dtype)
        if isinstance(operand, syntax.Sym):
            return self.literal(self.address_of(operand), dtype)
        if isinstance(operand, syntax.Not) and dtype == "b1":
            return f"~{self.read(operand.reg, 'b1')}"
        raise self.unknown("an operand of this kind")

    def viewed(self, value: str, value_dtype: str, dtype: str) -> str:
        """A value of ``value_dtype`` as another dtype: its bits, truncated or extended by zeros."""
        if value_dtype == dtype:
            return value
        self.refuse_if("b1" in (value_dtype, dtype), "a predicate used as a number")
        self.refuse_if("c16" in (value_dtype, dtype), "a part of a register of 128 bits")
        size, wanted = int(value_dtype[1:]), int(dtype[1:])
        if size != wanted:
            value = f"{value}.view({_UNSIGNED[size]}).astype({_UNSIGNED[wanted]})"
        return f"{value}.view({dtype})"

    def address_of(self, symbol: syntax.Sym) -> int:
        program = self.program
        for table in (program.shared, program.constants, program.local):
            if symbol.name in table:
                return table[symbol.name] + symbol.offset
        if symbol.name in program.params_at:
            return program.params_at[symbol.name] + symbol.offset
        if function := program.module.address_of_function(symbol.name):
            return function
        raise self.unknown(f"the address of {symbol.name}")

    def literal(self, value: int, dtype: str) -> str:
        """A typed constant with the given bits (of a number as wide as ``dtype``)."""
        size = 1 if dtype == "b1" else int(dtype[1:])
        bits = value & ((1 << 8 * size) - 1)
        key = (bits, dtype)
        name = self.constants.get(key)
        if name is None:
            name = self.constants[key] = f"K{len(self.constants)}"
            data = bits.to_bytes(size, "little")
            self.namespace[name] = np.frombuffer(data, dtype=RUNTIME[dtype])[0]
        return name

    def object(self, value: Any) -> str:
        """The name of a constant object in the segment's namespace."""
        name = f"O{len(self.namespace)}"
        self.namespace[name] = value
        return name

    def constant_one(self, dtype: str) -> str:
        one = np.array(1, dtype=RUNTIME[dtype])
        return self.literal(int.from_bytes(one.tobytes(), "little"), dtype)

    def constant(self, imm: Imm, dtype: str) -> str:
        value = imm.value
        if imm.float_bits:
            wanted = 8 * int(dtype[1:]) if dtype != "b1" else 0
            if imm.float_bits == 64 and wanted == 32:
                value = double_to_single(value)
            elif imm.float_bits == 32 and wanted == 64 and dtype == "f8":
                value = int(np.float64(np.uint32(value).view(np.float32)).view(np.uint64))
            elif imm.float_bits != wanted:
                raise self.unknown("a float constant of a different width")
        elif dtype[0] == "f":
            # An integer literal in a float instruction is a number; in .bN it is bits.
            value = int.from_bytes(np.array(value, dtype=RUNTIME[dtype]).tobytes(), "little")
        return self.literal(value, dtype)

    def special(self, name: str) -> tuple[str, str]:
        if name in self.program.shared:  # what the system reserves there
            return self.literal(self.program.shared[name], "u4"), "u4"
        if name in GRID_WORKSPACE:
            address = self.program.constants[GRID_BARRIER]
            return self.literal(address >> GRID_WORKSPACE[name], "u4"), "u4"
        self.refuse_if(name not in SPECIAL, f"the special register %{name}")
        text, dtype = SPECIAL[name]
        if name.startswith(("clock", "globaltimer")):
            return self.let(text), dtype
        if name not in self.specials:
            self.specials[name] = self.let(text)
        return self.specials[name], dtype

    def integer(self, operand: Operand, size: int) -> str:
        """The dtype to compute a sign-agnostic integer result in, so that no view is needed."""
        if isinstance(operand, Reg):
            register_dtype = self.program.dtype[operand.index]
            if register_dtype[0] in "iu" and register_dtype[1:] == str(size):
                return register_dtype
        return _UNSIGNED[size]

    def write(self, operand: Operand, expression: str, dtype: str) -> None:
        """Assigns ``expression`` (of ``dtype``) to a destination, under the guard if there is one.

        A destination wider than the value is extended: by its sign if ``dtype`` is signed.
        """
        if isinstance(operand, syntax.Sink):
            return
        if not isinstance(operand, Reg):
            raise self.unknown("a destination that is not a register")
        index = operand.index
        register_dtype = self.program.dtype[index]
        if register_dtype != dtype:
            of_predicate = "b1" in (register_dtype, dtype)
            self.refuse_if(of_predicate, "a predicate as the destination of a number")
            wide, size = int(register_dtype[1:]), int(dtype[1:])
            self.refuse_if(wide > 8, "a result of this type in a register of 128 bits")
            if wide > size:
                kind = "i" if dtype[0] == "i" else "u"
                narrow = f"({expression})"
                if dtype[0] == "f":
                    narrow += f".view({_UNSIGNED[size]})"
                expression = f"{narrow}.astype({kind}{wide}).view({register_dtype})"
            elif wide < size:
                raise self.unknown("a destination that is too narrow")
            else:
                expression = f"({expression}).view({register_dtype})"
        if self.guard:
            old = self.current(index)
            name = self.let(f"where({self.guard}, {expression}, {old})")
        else:
            name = self.let(expression)
        self.names[index] = name
        self.set_defined(index)

    def write_items(self, items: Iterable[Operand], value: str, dtype: str) -> None:
        """Assigns the elements of ``value``, whose text has {} for the number of an element."""
        for number, item in enumerate(items):
            self.write(item, value.format(number), dtype)

    def flush(self, live: int) -> None:
        """Emits all pending tensor-core products.

        Args:
            live: bit mask of the registers that are read later.
        """
        needed = {name for index, name in self.names.items() if live >> index & 1}
        self.lines += self.products.flush(needed)

    # ---- definedness: which registers have been written, where some path may not write them

    def note_definedness(self, index: int) -> None:
        if self.check and index in self.program.tracked:
            self.defined.append(self.current(self.program.tracked[index]))

    def result_definedness(self, index: int) -> str | None:
        if not self.check or index not in self.program.tracked:
            return None
        return definedness.marks_of_result(self, self.ins, index)

    def set_definedness(self, index: int, value: str) -> None:
        slot = self.program.tracked[index]
        if self.guard:
            value = f"where({self.guard}, {value}, {self.current(slot)})"
        self.names[slot] = self.let(value)

    def set_defined(self, index: int) -> None:
        """Makes a register as defined as the values that were read since `require_defined`."""
        defined = self.result_definedness(index)
        if defined is not None:
            self.set_definedness(index, defined)

    def require_defined(self) -> None:
        """Emits a check that the registers read so far by this instruction have been written.

        Called where their values leave the registers: addresses, stored values, branches.
        """
        for name in sorted(set(self.defined)):
            self.emit(f"E.require_defined({self.execution()}, {name})")
        self.defined = []

    # ---- registers of wgmma, member masks, lanes

    def watch(self) -> None:
        """Emits checks of registers of wgmma that this instruction may access too early."""
        watch = self.hazards.watched.get(self.pc)
        if watch is None:
            return
        accumulators, fragments, marks = watch
        if accumulators or fragments:
            registers = f"{accumulators}, {fragments}"
            self.emit(f"E.wgmma.order.check_in_flight({self.execution()}, {registers})")
        if marks:
            self.emit(f"E.wgmma.order.note_writes({self.execution()}, {marks})")

    def membermask(self) -> str:
        """The member mask of a .sync instruction as an expression; 'None' means all lanes."""
        if not instructions.has_members(self.ins):
            return "None"
        mask = self.ins.operands[-1]
        constant = self.program.constant_of(mask)
        return self.read(mask, "u4") if constant is None else self.literal(constant, "u4")

    def lanes(self) -> str:
        """The active lanes as an expression, 'None' when all are."""
        if self.masked:
            return f"M & {self.guard}" if self.guard else "M"
        return self.guard or "None"

    def execution(self, lanes: str = "") -> str:
        """An `Execution` of this instruction as an expression, by the active lanes or by others."""
        return f"Execution(E, C, {lanes or self.lanes()}, {self.pc})"

    def checked_execution(self, lanes: str = "") -> str:
        """`execution`, after a check that the values read so far have been written."""
        self.require_defined()
        return self.execution(lanes)

    # ---- the segment

    def generate(self, start: int) -> SegmentFunction:
        """Compiles the segment that starts at instruction ``start``."""
        program = self.program
        pc = start
        count = len(program.code)
        while True:
            self.pc = pc
            if pc >= count:
                self.finish(pc)
                self.emit("return E.exit(C, None)")
                break
            ins = program.code[pc]
            apart = self.masked and fact("width", ins) is not Width.THREAD
            if pc != start and (apart or pc in program.leaders):
                self.finish(pc)
                self.emit(f"C.pc = {pc}")
                break
            self.instruction(ins)
            if self.ended:
                break
            pc += 1
        self.end = min(pc + 1 if self.ended else pc, count)
        return self.compile()

    def instruction(self, ins: Instruction) -> None:
        self.ins = ins
        self.mods = Modifiers(ins.mods)
        self.defined = []
        opcode, width = opcode_of(ins), fact("width", ins)
        if opcode.emit is None:
            raise self.unknown()
        wrong = forms.problem(ins.op, ins.mods, len(ins.operands))
        if wrong:
            raise self.unknown(wrong, "a form of the PTX ISA, as isa/forms.py lists them")
        try:
            self.emit_instruction(ins, opcode, width)
        except (ValueError, IndexError, KeyError, TypeError, ZeroDivisionError) as problem:
            if forms.are_listed(ins.op):
                raise  # a form of PTX: the mistake is the emitter's
            # Other emitters unpack the operands, and look up the types, that they support.
            raise self.unknown("with these operands") from problem
        if self.mods.left:
            raise self.unknown("the modifier ." + " .".join(self.mods.left))

    def emit_instruction(self, ins: Instruction, opcode: Opcode, width: Width) -> None:
        """Emits the checks of an instruction, and then its own code."""
        assert opcode.emit is not None
        self.guard = ""
        failed = self.program.failed_waits
        if self.check and (self.pc in failed.begins or self.pc in failed.ends):
            begins, ends = failed.begins.get(self.pc, ()), failed.ends.get(self.pc, ())
            self.emit(f"E.mbarriers.order_by(C, {begins}, {ends})")
        if ins.guard is not None and ins.op not in ("bra", "exit", "ret", "brx"):
            value = self.read(ins.guard, "b1")
            self.guard = self.let(f"~{value}") if ins.guard_negated else value
            self.require_defined()
            if self.profile:
                self.emit(f"E.recorder.guarded(C, {self.guard}, {self.pc})")
        if self.masked and instructions.is_warp_wide(ins):
            self.emit(f"if E.wait_for_warp(C, {self.membermask()}, {self.pc}): return True")
            if width is Width.WHOLE_WARP:
                self.emit(f"E.members.require_whole_warp(C, {self.pc})")
        self.require_members(ins)
        if width is Width.WARPGROUP and (self.masked or self.pc in self.program.gates):
            self.emit(f"if E.wait_for_warpgroup(C, {self.pc}): return True")
        self.watch()
        self.track_lanes(ins)
        opcode.emit(self, ins)

    def require_members(self, ins: Instruction) -> None:
        """Emits a check that the lanes that execute a .sync instruction are in its mask."""
        members = self.membermask() if instructions.is_warp_wide(ins) else "None"
        if members != "None" and self.namespace.get(members) != ALL_LANES:
            self.emit(f"E.members.require({self.execution()}, {members})")

    def track_lanes(self, ins: Instruction) -> None:
        """Emits the calls by which the checker of lanes follows an instruction."""
        if not self.check or not self.program.accesses.between_threads:
            return
        if instructions.synchronises_lanes(ins):
            members = self.membermask()
            whole = members == "None" or self.namespace.get(members) == ALL_LANES
            if whole and self.synchronised:
                return
            self.emit(f"E.shared_races.synchronise_lanes(C, {'None' if whole else members})")
            self.synchronised = whole
        elif instructions.may_access_between_threads(ins):
            self.synchronised = False

    def finish(self, *targets: int) -> None:
        """Stores the registers that are live at any of the targets back into the cohort."""
        live = 0
        for pc in targets:
            live |= self.program.live[min(pc, len(self.program.code))]
        self.flush(live)
        for index, name in sorted(self.names.items()):
            if not live >> index & 1:
                if index in self.loads:
                    self.emit(f"R[{index}] = None")
            elif self.loads.get(index) != name:
                self.emit(f"R[{index}] = {name}")

    def compile(self) -> SegmentFunction:
        head = ["R = C.registers"]
        if self.masked:
            head.append("M = C.mask")
        head += [f"{name} = R[{index}]" for index, name in sorted(self.loads.items())]
        lines = head + self.lines
        last = {name: n for n, line in enumerate(lines) for name in _LOCAL.findall(line)}
        dying: dict[int, list[str]] = {}
        for name, number in last.items():
            dying.setdefault(number, []).append(name)
        body = []
        for number, line in enumerate(lines):
            body.append("    " + line)
            if number in dying and not line.startswith(("return", "if ")):
                body.append("    del " + ", ".join(dying[number]))
        text = "def segment(E, C):\n" + "\n".join(body) + "\n"
        self.text = text
        exec(_compiled(text), self.namespace)
        return self.namespace["segment"]  # type: ignore[no-any-return]
