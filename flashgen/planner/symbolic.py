"""Formulas as sympy expressions, for proofs."""

from __future__ import annotations

import functools
from typing import Any

import sympy

from flashgen.planner.formulas import Formula
from flashgen.planner.quantities import QUANTITIES

SYMBOLS = {name: sympy.Symbol(name, positive=True) for name in QUANTITIES}
_NAMES: dict[str, Any] = {
    **SYMBOLS,
    "max": sympy.Max,
    "min": sympy.Min,
    "ceil": sympy.ceiling,
    "floor": sympy.floor,
}


@functools.cache
def expression(formula: Formula) -> sympy.Expr:
    """The formula as a sympy expression over `SYMBOLS`."""
    return sympy.sympify(formula.text, locals=_NAMES)
