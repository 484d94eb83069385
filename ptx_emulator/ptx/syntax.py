"""The parsed form of PTX, as plain data."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

# Bytes of a register or memory element of each fundamental type.
TYPE_BYTES = {
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    **{"f16": 2, "bf16": 2, "tf32": 4, "f32": 4, "f64": 8},
    **{"f16x2": 4, "bf16x2": 4, "f32x2": 8, "pred": 1, "b128": 16},
}


@dataclass(frozen=True)
class Reg:
    """A virtual register: its number in the function."""

    index: int


@dataclass(frozen=True)
class Imm:
    """An immediate: an integer, or the bits of a float of ``float_bits`` bits.

    ``unsigned`` is whether a constant expression treats it as .u64, and not as .s64.
    """

    value: int
    float_bits: int = 0
    unsigned: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Sym:
    """The address of a variable plus an offset, or the name of a function."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class LabelRef:
    """A branch target: the index of an instruction once the function is complete."""

    target: int


@dataclass(frozen=True)
class Sink:
    """The operand ``_``: a result that is discarded."""


@dataclass(frozen=True)
class Not:
    """A negated predicate operand."""

    reg: Reg


@dataclass(frozen=True)
class Pair:
    """``d|p``: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Vec:
    """``{a, b, ...}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Mem:
    """``[base + offset]``, or ``[base, {coordinates}]`` of a tensor copy."""

    base: Reg | Sym | Imm
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Group:
    """A parenthesised list of a call."""

    items: tuple[Operand, ...]


Operand = Reg | Imm | Special | Sym | LabelRef | Sink | Not | Pair | Vec | Mem | Group


@dataclass
class Instruction:
    """One instruction: ``@guard op.mods operands;``."""

    op: str
    mods: tuple[str, ...]
    operands: list[Operand]
    guard: Reg | None = None
    guard_negated: bool = False
    line: tuple[int, int] = (0, 0)  # .loc: file number, line
    outer: tuple[int, int] = (0, 0)  # file number and line of the outermost call it was inlined at
    position: int = 0  # in the text of the module
    end: int = 0

    @property
    def name(self) -> str:
        return ".".join((self.op, *self.mods))


@dataclass
class Variable:
    """A variable of a state space, or a parameter. ``count`` 0 is an unsized (dynamic) array."""

    name: str
    space: str
    type: str
    count: int = 1
    align: int = 1
    init: bytes | None = None
    relocations: list[tuple[int, str]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return TYPE_BYTES[self.type] * self.count


@dataclass
class Function:
    """An entry or a device function.

    ``registers`` holds (name, type); ``directives`` holds the directives between the parameters
    and the body, such as {".maxntid": (128,)}.
    """

    name: str
    is_entry: bool
    params: list[Variable]
    returns: list[Variable]
    code: list[Instruction] = field(default_factory=list)
    registers: list[tuple[str, str]] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    param_registers: dict[str, Reg] = field(default_factory=dict)
    branch_targets: dict[str, list[int]] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    has_body: bool = False


@dataclass
class Module:
    """A parsed PTX module."""

    text: str
    functions: dict[str, Function]
    variables: dict[str, Variable]
    files: dict[int, str]
    target: str

    def source_line(self, ins: Instruction) -> str:
        """``file:line`` of the .cu, or of the PTX where there is no .loc."""
        if not ins.line[1]:
            return f"PTX line {self.text.count(chr(10), 0, ins.position) + 1}"
        return self._file_line(*ins.line)

    def source_location(self, ins: Instruction) -> str:
        """The line of an instruction, and the line that it was inlined at."""
        location = self.source_line(ins)
        if ins.outer != ins.line and ins.outer[1]:
            location += f", inlined at {self._file_line(*ins.outer)}"
        return location

    def _file_line(self, number: int, line: int) -> str:
        file = self.files.get(number, "?")
        directory = os.getcwd().replace("\\", "/").rstrip("/") + "/"
        return f"{file.removeprefix(directory)}:{line}"

    def text_of(self, ins: Instruction) -> str:
        """The text of the instruction in the PTX, on one line."""
        return " ".join(self.text[ins.position : ins.end].split())

    def address_of_function(self, name: str) -> int:
        """The value of a pointer to a device function, 0 if the module has none of this name."""
        fn = self.functions.get(name)
        if fn is None or fn.is_entry:
            return 0
        return 16 * (1 + next(i for i, f in enumerate(self.functions.values()) if f is fn))
