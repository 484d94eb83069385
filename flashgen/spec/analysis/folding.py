"""Factors of a score that no score has to be multiplied by.

A kernel has elements x of Q K^T, and s = scale * x is the score that a score function is given. Its
result matters only as the exponent, which is multiplied by log2(e) anyway. It is written as
``unit * g(x) + shift``: kernels find maxima of g, multiply by ``unit * log2(e)`` in the exponent,
and add the shift to LSE alone, because it cancels in the weights. Factors of the score inside the
function join the scale, which is a number of the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import sympy

from flashgen.spec.analysis.invariants import LeveledCode, leveled
from flashgen.spec.language.float_functions import Abs
from flashgen.spec.language.float_operations import (
    AsFloat,
    FloatProduct,
    FloatQuotient,
    FloatSum,
    plain,
)
from flashgen.spec.language.lets import lets_of, replaced
from flashgen.spec.language.symbols import (
    DISTANCE,
    PRODUCT,
    SCALE,
    SCORE,
    K,
    Q,
    is_condition,
    is_int,
    with_args,
)
from flashgen.spec.language.sympy_functions import Maximum, Minimum
from flashgen.spec.language.tensor_elements import Element

_LARGEST_FACTOR = 2**32
"""Literals between this and its inverse are folded: their products with scales are floats."""

LEAST_SCALE = sympy.Rational(1, 2**96)
"""The least scale by which a bias is divided, for quotients within the range of floats. With a
smaller one, scores are 0 unless elements of Q K^T are beyond 2^70."""

_LARGEST_SHIFT = 2**10
"""A larger sum loses digits of the score, which the result of the score function loses too."""


@dataclass(frozen=True)
class FoldedScore:
    """A score function as ``factor * SCALE**degree * value + shift``.

    Attributes:
        value: the remaining function, an expression by `PRODUCT` and `SCALE`.
        factor: a positive literal.
        degree: the power of the scale that is not in the value.
        divides: whether the value has a quotient by the scale, which is at least `LEAST_SCALE`.
        shift: a literal.
        code: code for the value.
        code_with_slope: code for (value, ds'/dscore), where the value includes the shift, because
            LSE includes it; None where the value would need a quotient by the scale.
        notes: which parts are folded, and which are not and why, in words.
    """

    value: sympy.Expr
    factor: sympy.Expr
    degree: int
    divides: bool
    shift: sympy.Expr
    code: LeveledCode
    code_with_slope: LeveledCode | None
    notes: tuple[str, ...]


@lru_cache(maxsize=64)
def folded(
    score: sympy.Expr, slope: sympy.Expr, *, shifts: bool, distances: bool
) -> FoldedScore | None:
    """The score function with its factors folded; None where there is nothing to fold.

    Args:
        slope: ds'/dscore.
        shifts: whether a constant term may be left to LSE.
        distances: whether k - q may be rounded, from 2^24 on, in two steps.
    """
    if score == SCORE or SCORE not in score.free_symbols or lets_of(score, slope):
        return None
    notes: list[str] = []
    rest, shift = _without_shift(score) if shifts else (score, sympy.S.Zero)
    if shift != 0:
        notes.append(
            f"the term {float(shift):g} is added to LSE alone, because it cancels in the weights"
        )
    bias = _bias(rest) if distances else None
    inner, factor = _without_factors(bias[0] if bias else rest)
    degree = _degree(inner) or 0
    if bias and (degree == 2 or (factor, degree) == (1, 0)):
        bias = None
        inner, factor = _without_factors(rest)
        degree = _degree(inner) or 0
    rest = inner
    if factor != 1:
        notes.append(f"the factor {float(factor):g} is applied in the exponent")
    if degree:
        value = replaced(rest, {SCORE: PRODUCT})
        power = "scale" if degree == 1 else f"scale^{degree}"
        notes.append(f"the function is homogeneous: {power} is applied in the exponent")
    else:
        value, chains = _by_product(rest)
        factors = sorted(str(chain) for chain in chains if chain != SCALE)
        if factors:
            notes.append("factors of the score join the scale")
    if bias:
        _, distance_factor, weight = bias
        divisor = factor * Maximum(SCALE, LEAST_SCALE) if degree else factor
        value = FloatSum(value, FloatProduct(distance_factor, FloatQuotient(weight, divisor)))
        notes.append("the bias is divided by the factors that the exponent has")
    if distances:
        value, slope = _with_distance(value), _with_distance(slope)
    if DISTANCE in value.free_symbols:
        notes.append("k - q is added up as a float, without conversions of integers")
    if not notes:
        return None
    if _is_negative(rest):
        notes.append("a negative factor stays: maxima would become minima")
    shifted = value if shift == 0 else FloatSum(value, shift / factor)
    with_slope = leveled(shifted, _by_product(slope)[0]) if shift == 0 or degree == 0 else None
    return FoldedScore(
        value,
        factor,
        degree,
        bias is not None and degree == 1,
        shift,
        leveled(value),
        with_slope,
        tuple(notes),
    )


def _literal(expr: sympy.Expr) -> sympy.Expr | None:
    """The number of a literal that is neither 0 nor extreme."""
    number = plain(expr)
    if not (number.is_Rational or number.is_Float):
        return None
    return number if 1 / _LARGEST_FACTOR <= abs(number) <= _LARGEST_FACTOR else None


def _without_shift(score: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """The score without a last constant term, and this term."""
    if isinstance(score, FloatSum):
        for term, rest in (score.args, score.args[::-1]):
            number = _literal(term)
            if number is not None and abs(number) <= _LARGEST_SHIFT:
                return rest, number
    return score, sympy.S.Zero


def _without_factors(score: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """The score without positive literals as its factors, and their product."""
    factor = sympy.S.One
    while (without := _without_factor(score)) is not None:
        score, literal = without
        factor *= literal
    return score, factor


def _without_factor(score: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
    """The score without a positive literal as its factor, and the literal."""
    if isinstance(score, FloatProduct):
        for factor, rest in (score.args, score.args[::-1]):
            number = _literal(factor)
            if number is not None and number > 0:
                return rest, number
    if isinstance(score, FloatQuotient):
        number = _literal(score.args[1])
        if number is not None and number > 0:
            return score.args[0], 1 / number
    return None


def _is_negative(expr: sympy.Expr) -> bool:
    return isinstance(expr, sympy.Mul) and expr.args[0] is sympy.S.NegativeOne


def _degree(expr: sympy.Expr) -> int | None:
    """The n with f(c * score) = c^n * f(score) for every c > 0; None where there is none.

    An expression without the score has degree 0. Higher degrees than 2 leave the range of floats.
    """
    if expr == SCORE:
        return 1
    if SCORE not in expr.free_symbols:
        return 0
    if isinstance(expr, FloatProduct):
        degrees = [_degree(arg) for arg in expr.args]
        total = None if None in degrees else sum(d for d in degrees if d is not None)
        return total if total is not None and total <= 2 else None
    if isinstance(expr, FloatQuotient):
        return _degree(expr.args[0]) if _degree(expr.args[1]) == 0 else None
    if isinstance(expr, Abs | sympy.Abs | AsFloat):
        return _degree(expr.args[0])
    if _is_negative(expr) and len(expr.args) == 2:
        return _degree(expr.args[1])
    if isinstance(expr, FloatSum | Maximum | Minimum):
        return _common_degree([_degree_of_value(arg) for arg in expr.args])
    if isinstance(expr, sympy.Piecewise):
        if any(SCORE in condition.free_symbols for _, condition in expr.args):
            return None
        return _common_degree([_degree_of_value(value) for value, _ in expr.args])
    return None


_ANY = -1  # the degree of 0 and of -inf, which a factor does not change


def _degree_of_value(expr: sympy.Expr) -> int | None:
    return _ANY if plain(expr) in (sympy.S.Zero, -sympy.oo) else _degree(expr)


def _common_degree(degrees: list[int | None]) -> int | None:
    """The degree that all terms have; None where they differ, or where it is 0."""
    known_degrees = {degree for degree in degrees if degree != _ANY}
    (degree,) = known_degrees if len(known_degrees) == 1 else (None,)
    return degree or None


def _with_distance(expr: sympy.Expr) -> sympy.Expr:
    """The expression with `DISTANCE` where an operation of floats converts k - q, q - k, or their
    square or absolute value; not in conditions and indices, which are computed in integers."""
    if is_condition(expr) or is_int(expr) or isinstance(expr, Element) or not expr.args:
        return expr
    converts = isinstance(expr, FloatSum | FloatProduct | FloatQuotient | AsFloat)
    args = [(_distance(arg) if converts else None) or _with_distance(arg) for arg in expr.args]
    return with_args(expr, args)


def _distance(expr: sympy.Expr) -> sympy.Expr | None:
    """A difference of positions, its square or its absolute value, by `DISTANCE`; else None."""
    if expr in (K - Q, Q - K):
        return DISTANCE if expr == K - Q else -DISTANCE
    is_difference = bool(expr.args) and expr.args[0] in (K - Q, Q - K)
    if is_difference and isinstance(expr, sympy.Abs | Abs):
        return Abs(DISTANCE)
    if is_difference and isinstance(expr, sympy.Pow) and expr.args[1] == 2:
        return DISTANCE**2
    return None


def _bias(score: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr] | None:
    """(s, d, w) where the expression is s + d * w, s has the score, d depends on `DISTANCE` alone,
    and the scores of a head share w; else None."""
    if not isinstance(score, FloatSum):
        return None
    for term, rest in (score.args, score.args[::-1]):
        product = _with_distance(AsFloat(term))
        sign = -1 if _is_negative(product) else 1
        product = product.args[1] if sign < 0 and len(product.args) == 2 else product
        pairs = [(product, sympy.S.One)]
        if isinstance(product, FloatProduct):
            pairs = [product.args, product.args[::-1]]
        for factor, weight in pairs:
            shared = weight.free_symbols.isdisjoint((SCORE, Q, K, DISTANCE))
            if shared and factor.free_symbols == {DISTANCE}:
                return rest, factor, sign * weight
    return None


def _by_product(expr: sympy.Expr) -> tuple[sympy.Expr, set[sympy.Expr]]:
    """The expression by `PRODUCT`, where the score and factors that a head's scores share are one
    product; and the factors of `PRODUCT`."""
    values: dict[sympy.Basic, sympy.Basic] = {}
    for part in sympy.preorder_traversal(expr):
        if SCORE in part.free_symbols and (factor := _factor_of_score(part)) is not None:
            values.setdefault(part, FloatProduct(PRODUCT, factor))
    by_product = replaced(expr, values)
    return by_product, {f.args[0] if f.args[1] == PRODUCT else f.args[1] for f in values.values()}


def _factor_of_score(expr: sympy.Basic) -> sympy.Expr | None:
    """f where ``expr`` is the score times f / `SCALE`, and the scores of a head share f."""
    if expr == SCORE:
        return SCALE
    if isinstance(expr, sympy.Mul) and len(expr.args) == 2 and _literal(expr.args[0]) is not None:
        inner = None if _is_negative(expr) else _factor_of_score(expr.args[1])
        return None if inner is None else FloatProduct(inner, expr.args[0])
    if not isinstance(expr, FloatProduct | FloatQuotient):
        return None
    pairs = [expr.args] if isinstance(expr, FloatQuotient) else [expr.args, expr.args[::-1]]
    for inner, other in pairs:
        factor = _factor_of_score(inner)
        if factor is None or not other.free_symbols.isdisjoint((SCORE, Q, K)):
            continue
        if other.is_number and _literal(other) is None:
            continue
        return type(expr)(factor, other)
    return None
