"""Numeric bounds of integer expressions over all arguments that the launcher accepts.

Integers of 8 and 16 bits wrap around as torch's do: an operation of them, or of one and a number,
has the dtype that torch gives it, and its result is the exact one modulo 2^8 or 2^16. All others
are exact in 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import sympy
from sympy.core.relational import Relational

from flashgen.shared.dtypes import COUNT_LIMIT, ELEMENT_RANGES, POSITION_LIMIT, SCALAR_LIMIT
from flashgen.spec.language.bit_functions import BitFunction
from flashgen.spec.language.symbols import (
    BATCH,
    HEADS,
    K_HI,
    K_LO,
    Q_HI,
    Q_LO,
    SEQ_K,
    SEQ_Q,
    B,
    H,
    K,
    Q,
    is_condition,
    is_int,
)
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod, Maximum, Minimum, Select
from flashgen.spec.language.tensor_elements import TensorRead

Limits = tuple[int, int]

NARROW = ("uint8", "int8", "int16")
"""The dtypes of integers that wrap around."""

# Mods do not see the offsets; kernels subtract them from bounds.
_OFFSETS = tuple(sympy.Symbol(name, integer=True) for name in ("q_offset", "k_offset"))
_POSITIONS = (Q, K, Q_LO, Q_HI, K_LO, K_HI, *_OFFSETS)
_LARGEST = {
    **dict.fromkeys((B, H, BATCH, HEADS), COUNT_LIMIT),
    **dict.fromkeys((SEQ_Q, SEQ_K), POSITION_LIMIT),
}
LIMITS_INSIDE = {SEQ_Q: (1, POSITION_LIMIT), SEQ_K: (1, POSITION_LIMIT)}
"""Limits of sizes wherever an element of the scores exists."""


def limits(
    expr: sympy.Expr,
    bounds: Mapping[sympy.Symbol, Limits] | None = None,
    memo: dict[sympy.Expr, Limits] | None = None,
) -> Limits:
    """The least and the greatest value that an integer expression can take, as Python ints.

    The bounds hold but need not be tight: equal subexpressions are treated as independent.
    ``bounds`` gives bounds of further symbols, such as names of common subexpressions. ``memo``
    keeps the limits of subexpressions, for further calls with the same ``bounds``.
    """
    if bounds is None:
        return _limits_alone(expr)
    memo = {} if memo is None else memo
    if expr not in memo:
        memo[expr] = _limits(expr, bounds, memo)
    return memo[expr]


@lru_cache(maxsize=1 << 14)
def _limits_alone(expr: sympy.Expr) -> Limits:
    return _limits(expr, None, None)


def _limits(
    expr: sympy.Expr,
    bounds: Mapping[sympy.Symbol, Limits] | None,
    memo: dict[sympy.Expr, Limits] | None,
) -> Limits:
    if isinstance(expr, sympy.Symbol):
        return _symbol(expr, bounds or {})
    if expr.is_Integer:
        return int(expr), int(expr)
    if isinstance(expr, sympy.Piecewise):
        return _join([limits(value, bounds, memo) for value, _ in expr.args])
    if isinstance(expr, Select):
        return _join([limits(value, bounds, memo) for value in expr.args[1:]])
    if isinstance(expr, TensorRead) and is_int(expr):
        return expr.limits
    parts = [limits(arg, bounds, memo) for arg in expr.args]
    if isinstance(expr, sympy.Add):
        return sum(lo for lo, _ in parts), sum(hi for _, hi in parts)
    if isinstance(expr, sympy.Mul):
        result = parts[0]
        for part in parts[1:]:
            corners = [a * b for a in result for b in part]
            result = min(corners), max(corners)
        return result
    if isinstance(expr, sympy.Pow):
        (lo, hi), (n, _) = parts
        corners = [lo**n, hi**n] + ([0] if lo <= 0 <= hi else [])
        return min(corners), max(corners)
    if isinstance(expr, sympy.Abs):
        lo, hi = parts[0]
        return max(0, lo, -hi), max(hi, -lo)
    if isinstance(expr, Minimum | sympy.Min):
        return min(lo for lo, _ in parts), min(hi for _, hi in parts)
    if isinstance(expr, Maximum | sympy.Max):
        return max(lo for lo, _ in parts), max(hi for _, hi in parts)
    if isinstance(expr, FloorDiv | FloorMod):
        (low, high), divisor = parts
        a = (max(0, low), max(0, high)) if expr.natural else (low, high)
        return _quotient(a, divisor) if isinstance(expr, FloorDiv) else _remainder(a, divisor)
    if isinstance(expr, BitFunction):
        return expr.limits(*parts)
    if isinstance(expr, sympy.sign):
        return -1, 1
    raise TypeError(f"not an integer expression: {expr}")


def decided(
    kind: type[Relational],
    a: sympy.Expr,
    b: sympy.Expr,
    bounds: Mapping[sympy.Symbol, Limits] | None = None,
) -> bool | None:
    """The truth of a comparison ``kind(a, b)`` of integers, where it is always the same.

    ``bounds`` gives bounds of symbols, as for `limits`.
    """
    (a_lo, a_hi), (b_lo, b_hi) = limits(a, bounds), limits(b, bounds)
    if kind not in (sympy.Eq, sympy.Ne):
        at_low, at_high = bool(kind(a_lo, b_hi)), bool(kind(a_hi, b_lo))
        if at_low == at_high:
            return at_low
    elif a_lo > b_hi or a_hi < b_lo:
        return kind is sympy.Ne
    difference = a - b
    return bool(kind(difference, 0)) if difference.is_number else None


KERNEL_BITS = 62
"""The bits, beside a sign, of integers and of all intermediate results in kernels."""


def fits(expr: sympy.Expr, bits: int = KERNEL_BITS) -> bool:
    """True if every intermediate result of an integer expression fits ``bits`` bits and a sign."""
    return too_large(expr, bits) is None


@lru_cache(maxsize=1 << 14)
def too_large(expr: sympy.Expr, bits: int = KERNEL_BITS) -> sympy.Expr | None:
    """The first part of an integer expression that may not fit ``bits`` bits and a sign."""
    if expr.args and not isinstance(expr, sympy.Piecewise | Select | TensorRead):
        for arg in expr.args:
            part = too_large(arg, bits)
            if part is not None:
                return part
    return expr if magnitude(expr) >= 2**bits else None


def magnitude(expr: sympy.Expr) -> int:
    """The largest absolute value of an integer expression, or of a part of a sum."""
    if isinstance(expr, sympy.Add):
        return sum(max(map(abs, limits(arg))) for arg in expr.args)
    return max(map(abs, limits(expr)))


def _symbol(symbol: sympy.Symbol, bounds: Mapping[sympy.Symbol, Limits]) -> Limits:
    if symbol in bounds:
        return bounds[symbol]
    let_limits: Limits | None = getattr(symbol, "limits", None)
    if let_limits is not None:  # a Let, whose value has been bounded
        return let_limits
    if symbol in _POSITIONS:
        return -POSITION_LIMIT, POSITION_LIMIT
    least = -SCALAR_LIMIT
    if symbol.is_positive:
        least = 1
    elif symbol.is_nonnegative:
        least = 0
    return least, _LARGEST.get(symbol, SCALAR_LIMIT)


def _join(parts: list[Limits]) -> Limits:
    return min(lo for lo, _ in parts), max(hi for _, hi in parts)


def _quotient(a: Limits, b: Limits) -> Limits:
    # The divisors nearest to 0 and farthest from it give the least and the greatest quotient; a
    # quotient by 0 is 0.
    divisors = [d for d in (b[0], b[1], -1, 1) if d != 0 and b[0] <= d <= b[1]]
    corners = [n // d for n in a for d in divisors] + ([0] if b[0] <= 0 <= b[1] else [])
    return min(corners), max(corners)


def _remainder(a: Limits, b: Limits) -> Limits:
    if a[0] >= 0 and b[0] > 0:
        return 0, min(a[1], b[1] - 1)
    return min(0, b[0] + 1), max(0, b[1] - 1)


def promoted(dtypes: set[str]) -> str:
    """The dtype of an operation on integers of these dtypes; "" stands for 64 bits.

    Of the narrow dtypes, only int16 holds all numbers of two others.
    """
    if not dtypes <= set(NARROW) or not dtypes:
        return ""
    return next(iter(dtypes)) if len(dtypes) == 1 else "int16"


def wrapped(expr: sympy.Basic, dtype: str) -> sympy.Basic:
    """The integer as the dtype holds it; anything else, and every integer of "", as it is."""
    if not dtype or is_condition(expr) or not is_int(expr):
        return expr
    low, high = ELEMENT_RANGES[dtype]
    least, greatest = limits(expr)
    if low <= least and greatest <= high:
        return expr
    return FloorMod(expr - low, high - low + 1) + low
