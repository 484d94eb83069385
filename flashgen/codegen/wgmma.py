"""The forms of wgmma that a kernel uses, each as a device function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.codegen.source import ELEMENTS
from flashgen.planner import Plan

_NUMBERS_A_LINE = 15  # numbers of three digits in a line of 100 columns
_REGISTERS_OF_8_COLUMNS = 4

_WHAT = {
    "multiply_rows": "D (+)= A B^T, 16 columns of each: row-wise both, from shared memory.",
    "multiply_queries": "D (+)= A^T B^T, 16 rows of A and columns of B, from shared memory.",
    "multiply_columns": "D += A^T B, 16 rows of each, from shared memory.",
}
_MAJORS = {"multiply_rows": "0, 0", "multiply_queries": "1, 0", "multiply_columns": "1, 1"}
_FROM_REGISTERS = "D += A B, 16 columns of A, from registers, and rows of B, from shared memory."


@dataclass(frozen=True)
class Product:
    """One form of wgmma, on accumulators ``float d[columns / 8][4]``.

    Attributes:
        name: the name of the function.
        columns: the columns of the product, the instruction's n.
        element: the operands' type in PTX.
        from_registers: whether A is in four registers instead of shared memory.
    """

    name: str
    columns: int
    element: str
    from_registers: bool = False

    @property
    def what(self) -> str:
        """The product as the comment of the function describes it."""
        return _FROM_REGISTERS if self.from_registers else _WHAT[self.name]

    @property
    def shape(self) -> str:
        """The shape and the types in the instruction's name."""
        return f"m64n{self.columns}k16.f32.{self.element}.{self.element}"

    @property
    def majors(self) -> str:
        """The instruction's last arguments: which operands in shared memory are transposed."""
        return "1" if self.from_registers else _MAJORS[self.name]

    @property
    def may_begin(self) -> bool:
        """Whether the product may overwrite the accumulators, as the first one of a sum does."""
        return self.name != "multiply_columns"

    @property
    def operands(self) -> str:
        """The operands A and B in the assembly, numbered after the accumulators."""
        count = self.columns // 2
        if not self.from_registers:
            return f"%{count}, %{count + 1}"
        return f"{{{', '.join(f'%{count + i}' for i in range(4))}}}, %{count + 4}"

    @property
    def add(self) -> str:
        """The assembly operand that is not 0 where the product is added to the accumulators."""
        return f"%{self.columns // 2 + (5 if self.from_registers else 2)}"

    @property
    def numbers(self) -> list[str]:
        """The accumulators in the assembly, ``"%0, %1, ..."``, broken into lines."""
        names = [f"%{number}" for number in range(self.columns // 2)]
        lines = [names[at : at + _NUMBERS_A_LINE] for at in range(0, len(names), _NUMBERS_A_LINE)]
        texts = [", ".join(line) for line in lines]
        return [*(f'"{text}, "' for text in texts[:-1]), f'"{texts[-1]}"']

    @property
    def registers(self) -> list[str]:
        """The accumulators as C++ operands, ``"+f"(d[0][0]), ...``, broken into lines."""
        lines = [
            ", ".join(f'"+f"(d[{n}][{e}])' for e in range(_REGISTERS_OF_8_COLUMNS))
            for n in range(self.columns // 8)
        ]
        return [*(f"{line}," for line in lines[:-1]), lines[-1]]


def products_of(plan: Plan, shapes: Iterable[tuple[str, int]]) -> list[Product]:
    """The products of a kernel: one for each name and number of columns in ``shapes``."""
    element = ELEMENTS[plan.dtype].mma
    return [
        Product(name, columns, element, name == "multiply_columns" and plan.column_warps == 1)
        for name, columns in sorted(set(shapes))
    ]
