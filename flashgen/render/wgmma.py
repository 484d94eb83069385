"""The operands of wgmma in inline assembly: half as many registers as a tile has columns."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

_NUMBERS_A_LINE = 15  # of three digits, in lines of 100 columns
_REGISTERS_OF_8_COLUMNS = 4


@dataclass(frozen=True)
class Results:
    """The accumulators ``float d[columns / 8][4]`` of one instruction.

    Attributes:
        columns: of the product; the instruction's n.
        numbers: as the assembly names them, ``"%0, %1, ..."``, in lines.
        registers: as C++ passes them, ``"+f"(d[0][0]), ...``, in lines.
    """

    columns: int
    numbers: tuple[str, ...]
    registers: tuple[str, ...]

    @property
    def count(self) -> int:
        """Also the number of the next operand."""
        return self.columns // 2

    def operand(self, place: int) -> str:
        """How the assembly names the operand so many behind the accumulators."""
        return f"%{self.count + place}"

    @staticmethod
    def of(columns: int) -> Results:
        names = [f"%{number}" for number in range(columns // 2)]
        lines = [names[at : at + _NUMBERS_A_LINE] for at in range(0, len(names), _NUMBERS_A_LINE)]
        numbers = [", ".join(line) for line in lines]
        eights = itertools.product(range(columns // 8), range(_REGISTERS_OF_8_COLUMNS))
        passed = [f'"+f"(d[{n}][{e}])' for n, e in eights]
        four = _REGISTERS_OF_8_COLUMNS
        registers = [", ".join(passed[at : at + four]) for at in range(0, len(passed), four)]
        return Results(
            columns,
            (*(f'"{line}, "' for line in numbers[:-1]), f'"{numbers[-1]}"'),
            (*(f"{line}," for line in registers[:-1]), registers[-1]),
        )
