"""The number of machine instructions of an expression, roughly."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from flashgen.language import (
    Atan2,
    Cos,
    Erf,
    Erfc,
    Exp,
    Expm1,
    FloatPower,
    FloorDiv,
    FloorMod,
    Log,
    Log1p,
    Sin,
    Tanh,
)
from flashgen.language.lets import nodes_of
from flashgen.language.tensor_elements import TensorRead

# Counted in kernels of float16 and float32; all other operations count as one.
_INSTRUCTIONS: tuple[tuple[tuple[type[sympy.Basic], ...], int], ...] = (
    ((Sin, Cos), 80),
    ((Atan2,), 60),
    ((Erf, Erfc, Expm1, Log1p), 30),
    ((Exp, Log, Tanh, TensorRead), 8),
)
_DIVISION, _POWER = 30, 60  # by a variable, to a variable exponent


def operations(exprs: Sequence[sympy.Basic]) -> int:
    """The instructions of expressions; equal subexpressions are computed once."""
    return sum(map(_cost, {node for node in nodes_of(*exprs) if node.args}))


def _cost(node: sympy.Basic) -> int:
    if isinstance(node, FloorDiv | FloorMod):
        return 4 if node.args[1].is_number else _DIVISION
    if isinstance(node, sympy.Pow | FloatPower):
        return 4 if node.args[1].is_Rational else _POWER
    found = (cost for kinds, cost in _INSTRUCTIONS if isinstance(node, kinds))
    return next(found, max(1, len(node.args) - 1))
