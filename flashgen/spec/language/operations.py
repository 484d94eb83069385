"""The machine instructions of an expression, and the effort of compiling it, roughly."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache

import sympy
from sympy.functions.elementary.piecewise import ExprCondPair

from flashgen.spec.language.float_functions import Cos, FloatFunction, Sin
from flashgen.spec.language.float_operations import AsFloat, FloatPower, FloatQuotient
from flashgen.spec.language.integer_limits import fits
from flashgen.spec.language.lets import Let, distinct, lets_of, parts_of
from flashgen.spec.language.symbols import is_int
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod, Maximum, Minimum
from flashgen.spec.language.tensor_elements import TensorRead

MOST_EFFORT = 1500
"""The `effort` of the largest mods of a kernel. A pass takes 2 to 5 ms of CPU time for each unit of
it, from the spec to the machine code: chains of one kind of operation take 2 to 8 s."""

# Counted in kernels of float16 and float32; all other operations count as one.
_READ, _QUOTIENT = 8, 4
_FAST_DIVISION, _DIVISION, _WIDE_DIVISION, _REMAINDER = 8, 30, 40, 250
_FAST_POWER, _POWER = 8, 120
LARGEST_REPEATED = 64
"""The largest exponent of a power that is computed by multiplications: beyond it, the roundings of
repeated squaring (half a unit for each factor) exceed those of powf."""


def operations(
    exprs: Sequence[sympy.Basic], multipliers: Container[sympy.Basic], *, fast: bool = False
) -> int:
    """The instructions of expressions; equal subexpressions are computed once.

    Args:
        multipliers: the divisors by which kernels divide by a multiplication.
        fast: whether powers by literal fractions are computed by a logarithm.
    """

    def cost(node: sympy.Basic) -> int:
        divides = isinstance(node, FloorDiv | FloorMod) and is_int(node)
        if divides and node.args[1] in multipliers and fits(node, 31):
            return _FAST_DIVISION
        return min(_cost(node), _FAST_POWER) if fast and is_fraction_power(node) else _cost(node)

    return sum(cost(node) for node in distinct(*parts_of(*exprs)) if node.args)


def is_fraction_power(node: sympy.Basic) -> bool:
    """Whether an operation is a power of a float by a literal fraction that is not large."""
    if not isinstance(node, sympy.Pow | FloatPower) or is_int(node.args[0]):
        return False
    base, exponent = node.args
    fraction = exponent.is_Rational and not exponent.is_Integer and not base.is_number
    return bool(fraction and abs(exponent) <= LARGEST_REPEATED)


def effort(exprs: Sequence[sympy.Basic]) -> int:
    """The time that it takes to make the kernels of expressions, in units of an addition.

    This time depends on the number of operations more than on their instructions.
    """
    return sum(map(_effort, distinct(*parts_of(*exprs))))


def effort_so_far(let: Let) -> int:
    """The `effort` of a part of a mod, found in one step for each part that it uses."""
    return sum(_own_effort(part) for part in lets_of(let))


@lru_cache(maxsize=1 << 14)
def _own_effort(let: Let) -> int:
    return sum(map(_effort, distinct(let.value)))


def _effort(node: sympy.Basic) -> int:
    if not node.args or isinstance(node, AsFloat | ExprCondPair):
        return 0
    if isinstance(node, Sin | Cos):
        return 4  # a call, where there are many
    if isinstance(node, TensorRead):
        return 6
    if isinstance(node, Minimum | Maximum) and not is_int(node):
        # The derivative by each argument compares it with all others.
        return 3 * (len(node.args) - 1) + len(node.args) ** 2 // 5
    return max(len(node.args) - 1, 1 + _cost(node) // 8)


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
        base, exponent = node.args
        roots = 2 if is_int(base) or abs(exponent) == sympy.S.Half else 1
        repeated = exponent.is_Rational and exponent.q <= roots
        few = repeated and abs(exponent) <= LARGEST_REPEATED
        return 4 if few or base.is_Rational else _POWER
    if isinstance(node, FloatFunction):
        return node.most_instructions
    if isinstance(node, TensorRead):
        return _READ
    return _QUOTIENT if isinstance(node, FloatQuotient) else max(1, len(node.args) - 1)
