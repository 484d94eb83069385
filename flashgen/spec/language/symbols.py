"""The symbols of mask and score expressions.

A symbol without a ``real`` assumption stands for a condition (a bool scalar), the others for
numbers. Positions ``Q`` and ``K`` are global: local row + q_offset, local key + k_offset.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

B = sympy.Symbol("b", integer=True, nonnegative=True)
H = sympy.Symbol("h", integer=True, nonnegative=True)
Q = sympy.Symbol("q", integer=True)
K = sympy.Symbol("k", integer=True)
SCORE = sympy.Symbol("score", real=True)

WEIGHT = sympy.Symbol(".weight", real=True)
"""The share of a key in the output, in functions of statistics; no scalar of a spec has this
name."""

# Kernels compute the score as ``SCALE * PRODUCT``, with an element of Q K^T. A spec may have
# scalars with the names of dummies.
SCALE = sympy.Symbol("scale", positive=True)
PRODUCT = sympy.Dummy("product", real=True)

# The tangent of the score: the derivative along the tangents of q and k.
SCORE_TANGENT = sympy.Dummy("score_tangent", real=True)

# ``K - Q`` as a float, which kernels add up without a conversion for each score.
DISTANCE = sympy.Dummy("distance", real=True)

BATCH = sympy.Symbol("batch", integer=True, positive=True)
HEADS = sympy.Symbol("heads", integer=True, positive=True)
SEQ_Q = sympy.Symbol("seq_q", integer=True, nonnegative=True)
SEQ_K = sympy.Symbol("seq_k", integer=True, nonnegative=True)

APART = sympy.Symbol(".q_minus_k", integer=True)
"""The distance q - k of a query and a key; no scalar of a spec has this name."""

# The first and last positions of a tile.
Q_LO = sympy.Symbol("q_lo", integer=True)
Q_HI = sympy.Symbol("q_hi", integer=True)
K_LO = sympy.Symbol("k_lo", integer=True)
K_HI = sympy.Symbol("k_hi", integer=True)

CORNERS = {Q: (Q_LO, Q_HI), K: (K_LO, K_HI)}

LOWEST_LITERAL = -(10**30)
"""A literal of this or less removes a score, as -inf does, where a score_mod returns it or adds it
to the score. Computed scores are never removed, however low they are."""


def is_condition(expr: sympy.Basic) -> bool:
    """True for an expression that is true or false, False for a number."""
    if isinstance(expr, sympy.Symbol):
        return expr.is_real is None
    return isinstance(expr, sympy.logic.boolalg.Boolean)


def is_int(expr: sympy.Basic) -> bool:
    """True when ``expr`` can be computed in integers alone, from its leaves up.

    The criterion is the computation, not the value: ``floor(score)`` has integer values but is a
    float computation.
    """
    if isinstance(expr, sympy.Symbol | sympy.Number):
        return bool(expr.is_integer)
    if isinstance(expr, sympy.Pow):
        base, exponent = expr.args
        return is_int(base) and bool(exponent.is_Integer and exponent >= 0)
    if isinstance(expr, sympy.Piecewise):
        return all(is_int(value) for value, _ in expr.args)
    if expr.func.__name__ == "Select":
        return all(is_int(value) for value in expr.args[1:])
    if expr.func in _INTEGER_CLOSED or getattr(expr.func, "integer_closed", False):
        return all(is_int(arg) for arg in expr.args)
    return bool(getattr(expr.func, "reads_tensor", False)) and is_int(expr.args[0])


_INTEGER_CLOSED = (sympy.Add, sympy.Mul, sympy.Abs, sympy.Min, sympy.Max, sympy.sign)


def with_args(expr: sympy.Basic, args: Sequence[sympy.Basic]) -> sympy.Basic:
    """The expression with other arguments, with the conditions of choices as they are written.

    sympy would divide both sides of a comparison by a coefficient, which makes quotients of floats
    of a comparison of integers.
    """
    if all(new is old for new, old in zip(args, expr.args, strict=True)):
        return expr
    options = {"evaluate": False} if isinstance(expr, sympy.Piecewise) else {}
    return expr.func(*args, **options)
