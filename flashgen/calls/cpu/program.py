"""Straight-line programs on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from flashgen.spec.language.symbols import SCORE, SCORE_TANGENT, K, Q

Tensor = torch.Tensor

VARYING = (Q, K, SCORE, SCORE_TANGENT)
"""The symbols whose values differ from tile to tile."""


@dataclass(frozen=True)
class ProgramStep:
    """``registers[to] = function(*registers[args])``; then the registers ``done`` are free."""

    function: Callable[..., Any]
    args: tuple[int, ...]
    to: int
    done: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Program:
    """Expressions as steps in order; equal subexpressions are computed once.

    Attributes:
        inputs: the register of each symbol.
        constants: tensors without dimensions, by register.
        once: steps that depend on neither position nor score.
        per_tile: the other steps, which run for each tile.
        results: the register of each expression's value.
    """

    inputs: Mapping[sympy.Symbol, int]
    constants: tuple[Tensor | None, ...]
    once: tuple[ProgramStep, ...]
    per_tile: tuple[ProgramStep, ...]
    results: tuple[int, ...]

    def uses(self, *symbols: sympy.Symbol) -> bool:
        return any(symbol in self.inputs for symbol in symbols)

    def bind(self, values: Mapping[sympy.Symbol, Tensor]) -> BoundProgram:
        """The program with all values computed that are equal for all tiles of a call.

        Args:
            values: int64, real or bool tensors for every symbol in `inputs` except `VARYING`, and
                the captured tensors.
        """
        registers = list(self.constants)
        for symbol, register in self.inputs.items():
            if symbol not in VARYING:
                registers[register] = values[symbol]
        _execute(self.once, registers)
        return BoundProgram(self, tuple(registers))


@dataclass(frozen=True)
class BoundProgram:
    """A program as a function of positions and scores."""

    program: Program
    registers: tuple[Tensor | None, ...]

    def __call__(
        self, q: Tensor, k: Tensor, score: Tensor | None = None, tangent: Tensor | None = None
    ) -> list[Tensor]:
        """The values of the expressions: bool, int64 or real, of a shape that broadcasts.

        Args:
            q, k: global positions, int64.
            score, tangent: scores and their tangents in the program's real dtype, for programs
                that use them.
        """
        registers = list(self.registers)
        for symbol, value in zip(VARYING, (q, k, score, tangent), strict=True):
            if symbol in self.program.inputs:
                registers[self.program.inputs[symbol]] = value
        _execute(self.program.per_tile, registers)
        results = [registers[register] for register in self.program.results]
        return [value for value in results if value is not None]


def _execute(steps: tuple[ProgramStep, ...], registers: list[Tensor | None]) -> None:
    for step in steps:
        registers[step.to] = step.function(*[registers[arg] for arg in step.args])
        for register in step.done:
            registers[register] = None
