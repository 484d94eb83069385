"""Inlines every device function that a kernel calls: one flat list of instructions.

Parameters of calls (``st.param`` / ``ld.param`` on a local ``.param``) become plain registers, and
the guard of an instruction that threads execute together becomes a branch around it. A call through
a pointer becomes a comparison with each function that it may point to, and the calls of these. Such
functions, and those that call through pointers, have one body behind the kernel, from which a table
of branches returns: copies of each for every order in which they may call each other would be more
than any memory holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ptx_emulator.errors import UnknownInstruction
from ptx_emulator.ptx import syntax
from ptx_emulator.ptx.instructions import is_barrier, is_warp_wide
from ptx_emulator.ptx.syntax import TYPE_BYTES, Instruction, LabelRef, Operand, Reg, Sym, Variable


def flatten(module: syntax.Module, entry: syntax.Function) -> syntax.Function:
    """``entry`` with all calls inlined; calls of external functions remain.

    Raises:
        UnknownInstruction: a recursive call.
    """
    flat = replace(entry)
    if any(i.op == "call" for i in entry.code):
        flat = replace(entry, code=[], registers=[], variables={}, branch_targets={})
        inliner = _Inliner(module, flat)
        inliner.expand(entry, {}, (entry.name,), None)
        inliner.append_bodies()
    if any(_needs_branch(i) for i in flat.code):
        _branch_around(flat)
    return flat


def _needs_branch(ins: Instruction) -> bool:
    return ins.guard is not None and (is_warp_wide(ins) or is_barrier(ins) or ins.op == "brx")


def _branch_around(flat: syntax.Function) -> None:
    """Replaces the guards of warp-wide instructions and barriers by branches around them."""
    starts: list[int] = []
    code: list[Instruction] = []
    for number, ins in enumerate(flat.code):
        starts.append(len(code))
        if _needs_branch(ins):
            around = replace(ins, op="bra", mods=(), operands=[LabelRef(number + 1)])
            around.guard_negated = not ins.guard_negated
            code.append(around)
            ins = replace(ins, guard=None)
        code.append(ins)
    starts.append(len(code))
    _relocate(flat, code, starts)


def _relocate(flat: syntax.Function, code: list[Instruction], starts: list[int]) -> None:
    """Gives a function other code, in which its instructions are at the indices ``starts``."""
    flat.code = [replace(i, operands=[_relocated(o, starts) for o in i.operands]) for i in code]
    tables = flat.branch_targets.items()
    flat.branch_targets = {name: [starts[t] for t in targets] for name, targets in tables}


class _Body(NamedTuple):
    """The body of a function that calls share.

    Attributes:
        caller: the register with the number of the call that a thread is in; 0 in none.
        jumps: the branches to the body.
        returns: where each call goes on; 0 for none.
    """

    caller: Reg
    jumps: list[Instruction]
    returns: list[int]


def _relocated(operand: Operand, starts: list[int]) -> Operand:
    return LabelRef(starts[operand.target]) if isinstance(operand, LabelRef) else operand


class _Inliner:
    def __init__(self, module: syntax.Module, flat: syntax.Function) -> None:
        self.module = module
        self.flat = flat
        self.slots: dict[tuple[str, int], Reg] = {}
        self.bases: dict[str, int] = {}
        self.pointed_to = functools.cache(lambda: _pointed_to(module))
        self.shares = functools.cache(self._shares)
        self.bodies: dict[str, _Body] = {}

    def base(self, fn: syntax.Function) -> int:
        """The number of the first register of ``fn``; only one call of ``fn`` runs at a time.

        All its calls have the same registers: the masks of live registers stay short.
        """
        if fn.name not in self.bases:
            self.bases[fn.name] = len(self.flat.registers)
            self.flat.registers += fn.registers
        return self.bases[fn.name]

    def expand(
        self,
        fn: syntax.Function,
        aliases: dict[str, str],
        stack: tuple[str, ...],
        after: list[int] | None,
        outer: tuple[int, int] | None = None,
    ) -> None:
        """Appends the body of ``fn``; ``aliases`` maps its parameters to the caller's variables.

        ``after`` collects the positions of the branches that replace ``ret``; ``outer`` is the
        source line of the outermost call.
        """
        flat, base = self.flat, self.base(fn)
        names = dict(aliases)
        copy = f"#{fn.name}#{len(flat.code)}"
        names |= {table: table if after is None else table + copy for table in fn.branch_targets}
        for name, variable in fn.variables.items():
            if name not in names:
                # All calls of a function have the same variables, but for local ones.
                tag = copy if variable.space == "local" else f"#{fn.name}"
                names[name] = name if after is None else name + tag
                flat.variables[names[name]] = replace(variable, name=names[name])
        starts: list[int] = []
        patches: list[int] = []

        def move(operand: Operand) -> Any:
            return _renamed(operand, lambda r: Reg(r.index + base), names)

        for ins in fn.code:
            starts.append(len(flat.code))
            ins = replace(ins, operands=[move(o) for o in ins.operands], outer=outer or ins.outer)
            if ins.guard is not None:
                ins.guard = Reg(ins.guard.index + base)
            target = next((o for o in ins.operands if isinstance(o, Sym)), None)
            callee = self.module.functions.get(target.name) if target else None
            if ins.op == "call" and callee is not None and callee.has_body:
                self.call(ins, callee, stack)
            elif ins.op == "call" and any(isinstance(o, Reg) for o in ins.operands):
                self.call_through(ins)
            elif ins.op == "call" and target is not None and target.name == "vprintf":
                flat.code.append(self.external(ins, target.name))
            elif after is not None and ins.op == "ret":
                after.append(len(flat.code))
                flat.code.append(replace(ins, op="bra", mods=(), operands=[LabelRef(-1)]))
            elif ins.op in ("ld", "st") and "param" in ins.mods:
                self.parameter_access(ins, after is None)
            else:
                if any(isinstance(o, LabelRef) for o in ins.operands):
                    patches.append(len(flat.code))
                flat.code.append(ins)
        starts.append(len(flat.code))
        for index in patches:
            flat.code[index].operands = [_relocated(o, starts) for o in flat.code[index].operands]
        for name, targets in fn.branch_targets.items():
            flat.branch_targets[names[name]] = [starts[t] for t in targets]

    def call(self, ins: Instruction, callee: syntax.Function, stack: tuple[str, ...]) -> None:
        if callee.name in stack:
            way_out = "write the recursion as a loop: calls are inlined"
            raise _unknown(self.module, ins, "a recursive call", way_out)
        if self.shares(callee.name):
            self.call_shared(ins, callee)
            return
        results, arguments = _results_and_arguments(ins)
        base, parameters = self.base(callee), callee.param_registers
        into = list(zip(callee.params, arguments, strict=True))
        back = list(zip(callee.returns, results, strict=True))
        aliases = {v.name: value.name for v, value in (*into, *back) if isinstance(value, Sym)}
        ins, around = self.around(ins)
        for variable, value in into:
            if variable.name not in aliases:
                self.move(ins, Reg(base + parameters[variable.name].index), value, variable.type)
        returns: list[int] = []
        self.expand(callee, aliases, (*stack, callee.name), returns, ins.outer)
        for index in returns:
            self.flat.code[index].operands = [LabelRef(len(self.flat.code))]
        for variable, value in back:
            if variable.name not in aliases:
                self.move(ins, value, Reg(base + parameters[variable.name].index), variable.type)
        if around is not None:
            around.operands = [LabelRef(len(self.flat.code))]

    def around(self, ins: Instruction) -> tuple[Instruction, Instruction | None]:
        """An instruction without its guard, and the branch around it that replaces the guard."""
        if ins.guard is None:
            return ins, None
        around = replace(ins, op="bra", mods=(), guard_negated=not ins.guard_negated)
        self.flat.code.append(around)
        return replace(ins, guard=None), around

    def _shares(self, name: str) -> bool:
        """Whether calls share the body of a function: a pointer may point to it, or it calls
        through a pointer, itself or by a function that it calls.
        """
        if any(fn.name == name for fn in self.pointed_to()):
            return True
        functions, todo, met = self.module.functions, [name], {name}
        while todo:
            for ins in (i for i in functions[todo.pop()].code if i.op == "call"):
                if any(isinstance(o, Reg) for o in ins.operands):
                    return True
                called = {o.name for o in ins.operands if isinstance(o, Sym)} - met
                todo += called & functions.keys()
                met |= called
        return False

    def call_shared(self, ins: Instruction, callee: syntax.Function) -> None:
        """A call of a function with one body for all calls."""
        code, registers = self.flat.code, self.flat.registers
        base, parameters = self.base(callee), callee.param_registers
        if callee.name not in self.bodies:
            registers += [("caller", "u32")]
            self.bodies[callee.name] = _Body(Reg(len(registers) - 1), [], [0])
        body = self.bodies[callee.name]
        results, arguments = _results_and_arguments(ins)
        ins, around = self.around(ins)
        idle = Reg(len(registers))
        registers.append(("idle", "pred"))
        compared: list[Operand] = [idle, body.caller, syntax.Imm(0)]
        code.append(replace(ins, op="setp", mods=("eq", "u32"), operands=compared))
        code.append(replace(ins, op="bra", mods=(), guard=idle, guard_negated=False))
        code[-1].operands = [LabelRef(len(code) + 1)]
        code.append(replace(ins, operands=[]))  # a recursive call: refused where it is executed
        for variable, value in zip(callee.params, arguments, strict=True):
            if isinstance(value, Sym):
                self.copy(ins, callee, "ld", variable, value)
            else:
                self.move(ins, Reg(base + parameters[variable.name].index), value, variable.type)
        self.move(ins, body.caller, syntax.Imm(len(body.returns)), "u32")
        body.jumps.append(replace(ins, op="bra", mods=(), operands=[]))
        code.append(body.jumps[-1])
        body.returns.append(len(code))
        for variable, value in zip(callee.returns, results, strict=True):
            if isinstance(value, Sym):
                self.copy(ins, callee, "st", variable, value)
            else:
                self.move(ins, value, Reg(base + parameters[variable.name].index), variable.type)
        if around is not None:
            around.operands = [LabelRef(len(code))]

    def copy(
        self, ins: Instruction, callee: syntax.Function, op: str, variable: Variable, value: Sym
    ) -> None:
        """Copies what a function loads of a parameter ("ld"), or stores in its result ("st")."""
        parts = set()
        for other in (i for i in callee.code if i.op == op):
            memory = other.operands[1 if op == "ld" else 0]
            item = other.operands[0 if op == "ld" else 1]
            base = memory.base if isinstance(memory, syntax.Mem) else None
            if isinstance(memory, syntax.Mem) and isinstance(base, Sym):
                width = len(item.items) if isinstance(item, syntax.Vec) else 1
                first, kind = base.offset + memory.offset, other.mods[-1]
                if base.name == variable.name:
                    parts |= {(first + i * TYPE_BYTES[kind], kind) for i in range(width)}
        source, to = value.name, _shared_name(callee, variable)
        if op == "st":
            source, to = to, source
        for offset, kind in sorted(parts):
            copy = Reg(len(self.flat.registers))
            self.flat.registers.append(("copy", kind if TYPE_BYTES[kind] > 1 else "b16"))
            read: list[Operand] = [copy, syntax.Mem(Sym(source, 0), offset)]
            write: list[Operand] = [syntax.Mem(Sym(to, 0), offset), copy]
            for name, operands in (("ld", read), ("st", write)):
                access = replace(ins, op=name, mods=("param", kind), operands=operands)
                self.parameter_access(access, False)

    def append_bodies(self) -> None:
        """Appends the bodies of functions that calls share, and their returns."""
        code, flat = self.flat.code, self.flat
        if not self.bodies:
            return
        code.append(replace(code[-1], op="ret", mods=(), operands=[], guard=None))
        outside: list[Instruction] = []  # at the start of the kernel: no thread is in a function
        starts: list[int] = []
        while len(starts) < len(self.bodies):
            name, body = list(self.bodies.items())[len(starts)]
            callee = self.module.functions[name]
            starts.append(len(code))
            aliases = {v.name: _shared_name(callee, v) for v in (*callee.params, *callee.returns)}
            for variable in (*callee.params, *callee.returns):
                shared_name = aliases[variable.name]
                flat.variables[shared_name] = replace(variable, name=shared_name)
            returns: list[int] = []
            self.expand(callee, aliases, (name,), returns)
            for index in returns:
                code[index].operands = [LabelRef(len(code))]
            last, to = replace(callee.code[-1], guard=None), Reg(len(flat.registers))
            flat.registers.append(("to", "u32"))
            self.move(last, to, body.caller, "u32")
            self.move(last, body.caller, syntax.Imm(0), "u32")
            table = Sym(f"{name}#callers")
            code.append(replace(last, op="brx", mods=("idx",), operands=[to, table]))
            none: list[Operand] = [body.caller, syntax.Imm(0)]
            outside.append(replace(code[0], op="mov", mods=("u32",), operands=none, guard=None))
        for start, (name, body) in zip(starts, self.bodies.items(), strict=True):
            for jump in body.jumps:
                jump.operands = [LabelRef(start)]
            body.returns[0] = body.returns[1]
            flat.branch_targets[f"{name}#callers"] = body.returns
        _relocate(flat, outside + code, list(range(len(outside), len(outside) + len(code) + 1)))

    def call_through(self, ins: Instruction) -> None:
        """A call through a pointer."""
        code, registers = self.flat.code, self.flat.registers
        widths = [list(map(self.width, items)) for items in _results_and_arguments(ins)]
        callees = [
            fn
            for fn in self.pointed_to()
            if [[v.size for v in fn.returns], [v.size for v in fn.params]] == widths
        ]
        if not callees:
            code.append(ins)  # refused where it is executed
            return
        pointer = next(o for o in ins.operands if isinstance(o, Reg))
        other = Reg(len(registers))
        registers.append(("other", "pred"))
        ins, around = self.around(ins)
        ends = [around] if around is not None else []
        for callee in callees:
            address = syntax.Imm(self.module.address_of_function(callee.name))
            compared: list[Operand] = [other, pointer, address]
            code.append(replace(ins, op="setp", mods=("ne", "u64"), operands=compared))
            past = replace(ins, op="bra", mods=(), guard=other, guard_negated=False)
            code.append(past)
            self.call_shared(ins, callee)
            ends.append(replace(ins, op="bra", mods=(), operands=[]))
            code.append(ends[-1])
            past.operands = [LabelRef(len(code))]
        code.append(replace(ins, op="call_of_nothing", mods=(), operands=[]))
        for end in ends:
            end.operands = [LabelRef(len(code))]

    def width(self, item: Operand) -> int:
        """Bytes of a parameter or register; 0 of something else, which fits no function."""
        if isinstance(item, Sym) and item.name in self.flat.variables:
            return self.flat.variables[item.name].size
        return TYPE_BYTES[self.flat.registers[item.index][1]] if isinstance(item, Reg) else 0

    def external(self, ins: Instruction, name: str) -> Instruction:
        """A call of a function that the emulator has, as an instruction of that name."""
        operands: list[Operand] = []
        for operand in ins.operands:
            for item in operand.items if isinstance(operand, syntax.Group) else ():
                variable = self.flat.variables.get(item.name) if isinstance(item, Sym) else None
                operands.append(self.slot(variable.name, 0, variable.type) if variable else item)
        return replace(ins, op=name, mods=(), operands=operands)

    def slot(self, name: str, offset: int, kind: str) -> Reg:
        """The register of a value in the parameters of a call."""
        slot = self.slots.get((name, offset))
        if slot is None:
            slot = self.slots[name, offset] = Reg(len(self.flat.registers))
            wide = kind if TYPE_BYTES[kind] > 1 else "b16"
            self.flat.registers.append((f"{name}+{offset}", wide))
        return slot

    def move(self, ins: Instruction, to: Operand, value: Operand, kind: str) -> None:
        self.flat.code.append(replace(ins, op="mov", mods=(kind,), operands=[to, value]))

    def parameter_access(self, ins: Instruction, in_entry: bool) -> None:
        """Replaces ``ld.param`` / ``st.param`` of a call by moves; the kernel's own remain."""
        load = ins.op == "ld"
        memory = ins.operands[1 if load else 0]
        if not isinstance(memory, syntax.Mem) or not isinstance(memory.base, Sym):
            if in_entry and load:
                self.flat.code.append(ins)
                return
            raise _unknown(self.module, ins, "a computed address in the parameters of a call")
        name, kind = memory.base.name, ins.mods[-1]
        if in_entry and load and not any(slot[0] == name for slot in self.slots):
            self.flat.code.append(ins)
            return
        value = ins.operands[0 if load else 1]
        values = value.items if isinstance(value, syntax.Vec) else (value,)
        for index, item in enumerate(values):
            offset = memory.base.offset + memory.offset + index * TYPE_BYTES[kind]
            slot = self.slot(name, offset, kind)
            width, most = TYPE_BYTES[kind], TYPE_BYTES[self.flat.registers[slot.index][1]]
            # The low bytes of what was written: a bool is written as 32 bits and read as 8.
            narrowed = load and width < most and not kind.startswith("f")
            if most != max(2, width) and not narrowed:
                raise _unknown(
                    self.module, ins, "a call parameter read with a different width than written"
                )
            to, source = (item, slot) if load else (slot, item)
            if width == 1 or narrowed:
                sign = "s" if kind.startswith("s") else "u"
                kinds = (f"{sign}{max(16, 8 * width)}", f"{sign}{8 * width}")
                move = replace(ins, op="cvt", mods=kinds, operands=[to, source])
            else:
                move = replace(ins, op="mov", mods=("b" + str(8 * TYPE_BYTES[kind]),))
                move.operands = [to, source]
            self.flat.code.append(move)


def _results_and_arguments(ins: Instruction) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """The results and the arguments of a call."""
    groups = [o for o in ins.operands if isinstance(o, syntax.Group)]
    before = isinstance(ins.operands[0], syntax.Group)
    results = groups[0].items if before else ()
    return results, groups[-1].items if len(groups) > before else ()


def _shared_name(fn: syntax.Function, variable: Variable) -> str:
    """The name of a parameter of a function whose body calls share."""
    return f"{variable.name}#{fn.name}#"


def _pointed_to(module: syntax.Module) -> list[syntax.Function]:
    """The functions whose address a variable or an instruction has."""
    names = {name for v in module.variables.values() for _, name in v.relocations}
    for fn in module.functions.values():
        code = (i for i in fn.code if i.op != "call")
        names |= {o.name for i in code for o in i.operands if isinstance(o, Sym)}
    functions = {id(f): f for name, f in module.functions.items() if name in names and f.has_body}
    return [f for f in functions.values() if not f.is_entry]


def _renamed(operand: Any, register: Callable[[Reg], Reg], names: dict[str, str]) -> Any:
    """An operand, or a field of one, with other registers and names of variables."""
    if isinstance(operand, tuple):
        return tuple(_renamed(item, register, names) for item in operand)
    if isinstance(operand, Reg):
        return register(operand)
    if isinstance(operand, Sym):
        return Sym(names.get(operand.name, operand.name), operand.offset)
    if not isinstance(operand, (syntax.Not, syntax.Mem, syntax.Pair, syntax.Vec, syntax.Group)):
        return operand
    return type(operand)(*(_renamed(value, register, names) for value in vars(operand).values()))


def _unknown(
    module: syntax.Module,
    ins: Instruction,
    feature: str,
    way_out: str = "let the compiler inline the function (__forceinline__): calls are inlined",
) -> UnknownInstruction:
    problem = f"{feature} is not supported"
    where, numbers = module.source_location(ins), module.text_of(ins)
    return UnknownInstruction(problem, where=where, numbers=numbers, way_out=way_out)
