"""Straight-line programs on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from flashgen.expr import SCORE, K, Q

Tensor = torch.Tensor

VARYING = (Q, K, SCORE)
"""What each tile has its own values of."""


@dataclass(frozen=True)
class Step:
    """``registers[to] = function(*registers[args])``, after which ``done`` are not needed."""

    function: Callable[..., Any]
    args: tuple[int, ...]
    to: int
    done: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Program:
    """Some expressions in the order of their computation, equal subexpressions computed once.

    Attributes:
        inputs: the register of each symbol.
        constants: tensors without dimensions, by register.
        once: steps that depend on neither position nor score.
        each: the others.
        results: the register of each expression's value.
    """

    inputs: Mapping[sympy.Symbol, int]
    constants: tuple[Tensor | None, ...]
    once: tuple[Step, ...]
    each: tuple[Step, ...]
    results: tuple[int, ...]

    def uses(self, *symbols: sympy.Symbol) -> bool:
        return any(symbol in self.inputs for symbol in symbols)

    def bind(self, values: Mapping[sympy.Symbol, Tensor]) -> Bound:
        """The program with all that stays the same during a call computed.

        Args:
            values: int64, real or bool tensors of every symbol in `inputs` but Q, K and SCORE, and
                the captured tensors themselves.
        """
        registers = list(self.constants)
        for symbol, place in self.inputs.items():
            if symbol not in VARYING:
                registers[place] = values[symbol]
        _execute(self.once, registers)
        return Bound(self, tuple(registers))


@dataclass(frozen=True)
class Bound:
    """A program that waits for positions and scores."""

    program: Program
    registers: tuple[Tensor | None, ...]

    def __call__(self, q: Tensor, k: Tensor, score: Tensor | None = None) -> list[Tensor]:
        """The values of the expressions: bool, int64 or real, of a shape that broadcasts.

        Args:
            q, k: int64, global positions.
            score: of the program's real dtype, for programs that use it.
        """
        registers = list(self.registers)
        for symbol, value in zip(VARYING, (q, k, score), strict=True):
            if symbol in self.program.inputs:
                registers[self.program.inputs[symbol]] = value
        _execute(self.program.each, registers)
        found = [registers[place] for place in self.program.results]
        return [value for value in found if value is not None]


def _execute(steps: tuple[Step, ...], registers: list[Tensor | None]) -> None:
    for step in steps:
        registers[step.to] = step.function(*[registers[arg] for arg in step.args])
        for place in step.done:
            registers[place] = None
