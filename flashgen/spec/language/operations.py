"""The number of machine instructions of an expression, roughly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import sympy

from flashgen.spec.language.float_functions import FloatFunction
from flashgen.spec.language.float_operations import FloatPower, FloatQuotient
from flashgen.spec.language.integer_limits import fits
from flashgen.spec.language.lets import Let, distinct, lets_of, parts_of
from flashgen.spec.language.symbols import is_int
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod
from flashgen.spec.language.tensor_elements import TensorRead

MOST_INSTRUCTIONS = 20_000
"""Instructions per score of the largest mods of a kernel. The compiler takes about 7 s for a pass
of these, and the stages before it 2 s; more where most of them are choices."""

# Counted in kernels of float16 and float32; all other operations count as one.
_READ, _QUOTIENT = 8, 4
_DIVISION, _WIDE_DIVISION, _POWER, _REMAINDER = 30, 40, 120, 80


def operations(exprs: Sequence[sympy.Basic]) -> int:
    """The instructions of expressions; equal subexpressions are computed once."""
    return sum(map(_cost, (node for node in distinct(*parts_of(*exprs)) if node.args)))


def operations_so_far(let: Let) -> int:
    """As `operations` of a part of a mod, in the time of one step for each part that it uses."""
    return sum(_own_operations(each) for each in lets_of(let))


@lru_cache(maxsize=1 << 14)
def _own_operations(let: Let) -> int:
    return sum(map(_cost, (node for node in distinct(let.value) if node.args)))


def _cost(node: sympy.Basic) -> int:
    if isinstance(node, FloorDiv | FloorMod):
        divisor = node.args[1]
        if not is_int(node):
            return _REMAINDER
        if divisor.is_Integer and int(divisor).bit_count() == 1:
            return 2
        if not fits(node, 31):
            return _WIDE_DIVISION
        return 4 if divisor.is_number else _DIVISION
    if isinstance(node, sympy.Pow | FloatPower):
        return 4 if node.args[1].is_Rational or node.args[0].is_Rational else _POWER
    if isinstance(node, FloatFunction):
        return node.most_instructions
    if isinstance(node, TensorRead):
        return _READ
    return _QUOTIENT if isinstance(node, FloatQuotient) else max(1, len(node.args) - 1)
