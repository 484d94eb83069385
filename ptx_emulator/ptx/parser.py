"""Parses PTX text into a :class:`ptx_emulator.ptx.syntax.Module`.

Braces open scopes: registers, labels and variables of an inline-asm block hide outer ones.
"""

from __future__ import annotations

import re
from collections import ChainMap
from dataclasses import dataclass

from ptx_emulator.errors import PtxSyntaxError, UnknownInstruction
from ptx_emulator.ptx import syntax
from ptx_emulator.ptx.lexer import WARP_SIZE, Cursor
from ptx_emulator.ptx.syntax import Instruction, Operand, Reg, Sym, Variable

_LINKAGE = {".visible", ".weak", ".extern", ".common"}
_SPACES = {".shared", ".global", ".const", ".local", ".param", ".tex"}
_PART = re.compile(r"^%\w+\.(?:b[0-3]|h[01])$")  # of an operand of a video instruction
_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock_hi|clock64"
    r"|globaltimer|globaltimer_lo|globaltimer_hi|lanemask_(?:eq|lt|le|gt|ge)|dynamic_smem_size"
    r"|total_smem_size|aggr_smem_size|n?cluster\w*|is_explicit_cluster|envreg\d+|pm\d+\w*"
    r"|reserved_smem_offset_\w+|current_graph_exec)"
    r"(?:\.[xyzw])?$"
)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)(?:\s+(\d+))?(?:.*\binlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")


class _Scope:
    """What names mean inside braces, on top of what they mean outside."""

    def __init__(self, outer: _Scope | None = None) -> None:
        self.outer = outer
        self.registers: dict[str, Reg] = {}
        self.ranges: dict[str, tuple[str, int]] = {}  # prefix -> type, count
        self.labels: ChainMap[str, int] = outer.labels.new_child() if outer else ChainMap()
        self.vectors: ChainMap[str, syntax.Vec] = outer.vectors.new_child() if outer else ChainMap()
        # name -> unique name
        self.tables: ChainMap[str, str] = outer.tables.new_child() if outer else ChainMap()
        self.variables: ChainMap[str, str] = outer.variables.new_child() if outer else ChainMap()


@dataclass(frozen=True)
class _Forward:
    """A label that may be defined later in the function."""

    name: str
    scope: _Scope


def parse(text: str) -> syntax.Module:
    """Parses a whole module.

    Raises:
        PtxSyntaxError: the text is not valid PTX.
    """
    return _Parser(text).module()


class _Parser(Cursor):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        files = {int(n): name.replace("\\", "/") for n, name in _FILE.findall(self.clean)}
        target = re.search(r"\.target\s+(\w+)", self.clean)
        self.out = syntax.Module(text, {}, {}, files, target.group(1) if target else "")
        self.fn = syntax.Function("", False, [], [])
        self.scope = _Scope()
        self.calls = False  # the instruction has parentheses around lists of operands
        self.outermost: dict[tuple[int, ...], tuple[int, int]] = {}  # by file, line, column

    # ---- module level

    def module(self) -> syntax.Module:
        aliases: dict[str, str] = {}
        while self.kinds[self.index] != "end":
            text = self.texts[self.index]
            if self.kinds[self.index] in ("loc", "line"):
                self.index += 1
            elif text == ".section":
                self.skip_section()
            elif text in (".entry", ".func"):
                self.function()
            elif text in _LINKAGE:
                self.index += 1
            elif text in _SPACES:
                for variable in self.variable_declaration():
                    self.out.variables[variable.name] = variable
            elif text == ".alias":
                self.index += 1
                name = self.take()
                self.take(",")
                aliases[name] = self.take()
                self.take(";")
            elif text == ".pragma":
                while not self.accept(";"):
                    self.take()
            else:
                raise self.fail("not a directive that is allowed at module level")
        for name, target in aliases.items():
            if target in self.out.functions:
                self.out.functions[name] = self.out.functions[target]
        return self.out

    def skip_section(self) -> None:
        while self.take() != "{":
            pass
        depth = 1
        while depth:
            text = self.take()
            depth += (text == "{") - (text == "}")
            if self.kinds[self.index] == "end" and depth:
                raise self.fail("a section without an end")

    # ---- functions

    def function(self) -> None:
        is_entry = self.take() == ".entry"
        if self.accept(".attribute"):
            self.skip_attribute()
        self.fn = syntax.Function("", is_entry, [], [])
        self.scope = _Scope()
        if not is_entry and self.peek() == "(":
            self.fn.returns = self.parameters()
        self.fn.name = self.take()
        if self.peek() == "(":
            self.fn.params = self.parameters()
        while self.peek() not in ("{", ";"):
            word, sizes = self.take(), []
            if word == ".pragma":
                while not self.accept(";"):
                    self.take()
                continue
            while self.kinds[self.index] == "number":
                sizes.append(self.integer())
                self.accept(",")
            self.fn.directives[word] = tuple(sizes)
        declared = self.out.functions.get(self.fn.name)
        if self.accept(";"):
            self.out.functions.setdefault(self.fn.name, self.fn)
            return
        if declared is not None and declared.has_body:
            raise self.fail(f"a second body of {self.fn.name}")
        self.fn.has_body = True
        self.out.functions[self.fn.name] = self.fn
        self.take("{")
        self.body()
        self.fn.code = [self.resolved(i) for i in self.fn.code]

    def parameters(self) -> list[Variable]:
        self.take("(")
        parameters: list[Variable] = []
        while not self.accept(")"):
            if self.peek() == ".reg":
                self.take()
                kind = self.take()[1:]
                name = self.take()
                self.fn.param_registers[name] = self.declare(self.scope, name, kind)
                parameters.append(Variable(name, "reg", kind))
            else:
                for variable in self.variable_declaration(parameter=True):
                    self.scope.variables[variable.name] = variable.name
                    self.fn.variables[variable.name] = variable
                    parameters.append(variable)
            self.accept(",")
        return parameters

    def location(self, text: str) -> None:
        """Reads a ``.loc``; its ``inlined_at`` refers to the position of an earlier ``.loc``.

        If that position was itself inlined at several calls, the nearest earlier ``.loc`` is used:
        PTX does not identify the call.
        """
        match = _LOC.match(text)
        if match is None:
            raise self.fail("a .loc without a file and a line")
        file, line, column, *caller = (int(number or 0) for number in match.groups())
        self.line = self.outer = (file, line)
        if any(caller):
            self.outer = self.outermost.get(tuple(caller), (caller[0], caller[1]))
        self.outermost[file, line, column] = self.outer

    def body(self) -> None:
        """Statements up to the closing brace of the scope."""
        while True:
            kind, text = self.kinds[self.index], self.texts[self.index]
            if kind == "loc":
                self.location(text)
                self.index += 1
            elif text == "}":
                self.index += 1
                return
            elif text == "{":
                self.index += 1
                outer, self.scope = self.scope, _Scope(self.scope)
                self.body()
                self.scope = outer
            elif kind == "name" and text[0] == ".":
                self.body_directive(text)
            elif kind == "line":
                self.index += 1
            elif kind == "end":
                raise self.fail("a function without an end")
            elif self.texts[self.index + 1] == ":":
                self.scope.labels[text] = len(self.fn.code)
                self.index += 2
                if self.peek() == ".branchtargets":
                    self.index += 1
                    names = []
                    while not self.accept(";"):
                        names.append(self.take())
                        self.accept(",")
                    unique = text
                    while unique in self.fn.branch_targets:
                        unique += "'"
                    self.scope.tables[text] = unique
                    self.fn.branch_targets[unique] = [_Forward(n, self.scope) for n in names]  # type: ignore[misc]
                elif self.peek() == ".callprototype":
                    while not self.accept(";"):
                        self.take()
            else:
                self.instruction()

    def body_directive(self, text: str) -> None:
        if text == ".reg":
            self.index += 1
            kind = self.take()[1:]
            parts = int(kind[1:]) if kind in ("v2", "v4") else 0
            if parts:
                kind = self.take()[1:]
            while True:
                name = self.take()
                if parts:
                    components = [
                        self.declare(self.scope, f"{name}.{part}", kind) for part in "xyzw"[:parts]
                    ]
                    self.scope.registers |= {
                        f"{name}.{p}": r for p, r in zip("rgba"[:parts], components, strict=True)
                    }
                    self.scope.vectors[name] = syntax.Vec(tuple(components))
                elif self.accept("<"):
                    self.scope.ranges[name] = (kind, self.whole())
                    self.take(">")
                else:
                    self.declare(self.scope, name, kind)
                if not self.accept(","):
                    break
            self.take(";")
        elif text in _SPACES:
            for variable in self.variable_declaration():
                # Sibling scopes may use the same name: make it unique in the function.
                unique = variable.name
                while unique in self.fn.variables:
                    unique += "'"
                self.scope.variables[variable.name] = unique
                variable.name = unique
                self.fn.variables[unique] = variable
        elif text == ".pragma":
            while not self.accept(";"):
                self.take()
        elif text in _LINKAGE:
            self.index += 1
        else:
            raise self.fail("a directive that is not known inside a function")

    def declare(self, scope: _Scope, name: str, kind: str) -> Reg:
        if kind not in syntax.TYPE_BYTES:
            raise self.fail(f"unknown register type .{kind}")
        reg = Reg(len(self.fn.registers))
        self.fn.registers.append((name, kind))
        scope.registers[name] = reg
        return reg

    def register(self, name: str) -> Reg | None:
        stem = name.rstrip("0123456789")
        scope: _Scope | None = self.scope
        while scope is not None:
            register = scope.registers.get(name)
            if register is not None:
                return register
            span = scope.ranges.get(stem)
            if span and stem != name and int(name[len(stem) :]) < span[1]:
                return self.declare(scope, name, span[0])
            scope = scope.outer
        return None

    def instruction(self) -> None:
        begin = self.positions[self.index]
        guard, negated = None, False
        if self.accept("@"):
            negated = self.accept("!")
            guard = self.register(self.take())
            if guard is None:
                raise self.fail("a guard that is not a declared predicate")
        op, *mods = self.take().split(".")
        self.calls = op == "call"
        operands: list[Operand] = []
        while self.texts[self.index] != ";":
            operands.append(self.operand())
            if self.texts[self.index] != ",":
                break
            self.index += 1
            if self.texts[self.index] == ";":
                raise self.fail("expected an operand")
        location = (self.line, self.outer, begin, self.positions[self.index])
        self.take(";")
        self.fn.code.append(Instruction(op, tuple(mods), operands, guard, negated, *location))

    # ---- operands

    def operand(self) -> Operand:
        first = self.simple_operand()
        if self.texts[self.index] != "|":
            return first
        self.index += 1
        return syntax.Pair(first, self.simple_operand())

    def simple_operand(self) -> Operand:
        text = self.texts[self.index]
        if (reg := self.scope.registers.get(text)) is not None:
            self.index += 1
            return reg
        if self.kinds[self.index] == "name" and text != WARP_SIZE:
            self.index += 1
            return self.named(text)
        if text == "{":
            return syntax.Vec(self.list_until("}"))
        if text == "(" and self.calls:
            return syntax.Group(self.list_until(")"))
        if text == "[":
            return self.memory()
        if text == "!" and self.kinds[self.index + 1] == "name":
            self.index += 1
            negated = self.named(self.take())
            if not isinstance(negated, Reg):
                raise self.fail("only a predicate register can be negated")
            return syntax.Not(negated)
        return self.immediate()

    def list_until(self, close: str) -> tuple[Operand, ...]:
        self.index += 1
        items: list[Operand] = []
        while not self.accept(close):
            items.append(self.operand())
            self.accept(",")
        return tuple(items)

    def named(self, name: str) -> Operand:
        reg = self.scope.registers.get(name) or self.register(name)
        if reg is not None:
            return reg
        if name == "_":
            return syntax.Sink()
        if name[0] == "%" and _SPECIAL.match(name):
            return syntax.Special(name[1:])
        if name in self.scope.vectors:
            return self.scope.vectors[name]
        if name in self.scope.variables:
            return Sym(self.scope.variables[name], self.offset())
        if name in self.out.variables or name in self.out.functions:
            return Sym(name, self.offset())
        return _Forward(name, self.scope)  # type: ignore[return-value]

    def memory(self) -> Operand:
        self.take("[")
        base: Operand
        base = self.immediate() if self.kinds[self.index] != "name" else self.named(self.take())
        if not isinstance(base, (Reg, Sym, syntax.Imm)):
            raise self.fail("an address that is neither a register nor a known variable")
        offset = self.offset()
        coordinates: tuple[Operand, ...] = ()
        if self.accept(","):
            if self.peek() != "{":
                raise self.fail("expected the coordinates of a tensor copy")
            coordinates = self.list_until("}")
        self.take("]")
        return syntax.Mem(base, offset, coordinates)

    # ---- labels

    def resolved(self, ins: Instruction) -> Instruction:
        for index, operand in enumerate(ins.operands):
            if isinstance(operand, _Forward):
                ins.operands[index] = self.label(operand, ins)
        for name, targets in self.fn.branch_targets.items():
            self.fn.branch_targets[name] = [
                self.label(t, ins).target if isinstance(t, _Forward) else t for t in targets
            ]
        return ins

    def label(self, forward: _Forward, ins: Instruction) -> syntax.LabelRef:
        if forward.name in forward.scope.tables:
            return Sym(forward.scope.tables[forward.name])  # type: ignore[return-value]
        if forward.name in forward.scope.labels:
            return syntax.LabelRef(forward.scope.labels[forward.name])
        if forward.name in self.out.functions:
            return Sym(forward.name)  # type: ignore[return-value]
        line = self.text.count("\n", 0, ins.position) + 1
        what = f"{forward.name!r} is neither a register, a variable, a label nor a function"
        where = f"line {line} of the PTX, .loc line {ins.line[1]}"
        numbers = self.text[ins.position : ins.end].strip()
        if _PART.search(forward.name):
            what = f"the emulator does not support {ins.name}: a part of a register"
            way_out = "take the part by bfe, prmt or cvt first"
            raise UnknownInstruction(what, where=where, numbers=numbers, way_out=way_out)
        way_out = "declare it, or check that the text is complete"
        raise PtxSyntaxError(what, where=where, numbers=numbers, way_out=way_out)
