"""Formulas that are text and function at once.

A formula is written as a person reads it, which is also valid Python. The function that the search
evaluates, the line that a derivation prints with numbers in place of names, and the sympy
expression of `symbolic` all come from that one text: what is printed is what was computed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType

from flashgen.kernels.planner.quantities import QUANTITIES, Number

_FUNCTIONS = {"max": max, "min": min, "ceil": math.ceil, "floor": math.floor}
_GLOBALS = {"__builtins__": {}, **_FUNCTIONS}
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Formula:
    """A named formula: ``name = text``, in ``unit``."""

    name: str
    text: str
    unit: str = ""

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The quantities in the formula, in the order of their first occurrence."""
        return tuple(dict.fromkeys(w for w in _WORD.findall(self.text) if w in QUANTITIES))

    @functools.cached_property
    def _code(self) -> CodeType:
        return compile(self.text, f"<formula {self.name}>", "eval")

    def __call__(self, values: Mapping[str, Number]) -> Number:
        """The value; an int when it is whole."""
        result: Number = eval(self._code, _GLOBALS, values)
        return tidy(result)

    def substituted(self, values: Mapping[str, Number]) -> str:
        """The text with numbers in place of names."""
        return _WORD.sub(
            lambda word: plain(values[word[0]]) if word[0] in QUANTITIES else word[0], self.text
        )


class FormulaSequence:
    """Formulas in an order in which each needs only those before it.

    They are compiled and evaluated together, because the search evaluates them for each tile.
    """

    def __init__(self, *formulas: Formula) -> None:
        self.formulas = formulas

    @functools.cached_property
    def _code(self) -> CodeType:
        return _code_of(self.formulas)

    def __call__(self, values: dict[str, Number]) -> dict[str, Number]:
        """``values``, to which the value of each formula is added under its name."""
        exec(self._code, _GLOBALS, values)
        return values


@functools.lru_cache(maxsize=256)
def _code_of(formulas: tuple[Formula, ...]) -> CodeType:
    lines = "\n".join(f"{formula.name} = {formula.text}" for formula in formulas)
    return compile(lines, "<formulas>", "exec")


def tidy(value: Number) -> Number:
    """An int where the value is whole, so that bytes and registers print as such."""
    return int(value) if value == int(value) else float(value)


def plain(value: Number) -> str:
    """A number inside a formula: no separators; four digits where it is not whole."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def counted(value: Number) -> str:
    """A number in a sentence: 166,912 or 0.2561."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


def evaluate(text: str) -> Number:
    """The value of a formula's substituted text: the arithmetic that a derivation prints.

    Raises:
        NameError: the text has names other than min, max, ceil and floor.
    """
    code = compile(text, "<derivation>", "eval")
    unknown = set(code.co_names) - set(_FUNCTIONS)
    if unknown:
        raise NameError(f"not a number: {', '.join(sorted(unknown))}")
    return tidy(eval(code, _GLOBALS))
