"""Sums of integers with rational factors: the integers are added exactly, then multiplied once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy

from flashgen.language.symbols import is_int


@dataclass(frozen=True)
class RationalSum:
    """``others + common * total``, where total is an integer."""

    others: tuple[sympy.Expr, ...]
    common: sympy.Rational
    total: sympy.Expr


def gather(
    expr: sympy.Add, plain: Callable[[sympy.Expr], bool], largest: int
) -> RationalSum | None:
    """The integer terms of a sum with one common factor; None if there are fewer than two.

    sympy writes 0.1 * (k - q) as k / 10 - q / 10. For large k and q the two products would be
    rounded although their difference is small.

    Args:
        plain: whether an integer term may be part of the total.
        largest: the largest factor that a term of the total may have.
    """
    terms: list[tuple[sympy.Rational, sympy.Expr]] = []
    others: list[sympy.Expr] = []
    for term in expr.args:
        factor, rest = term.as_coeff_Mul()
        if factor.is_Rational and not rest.is_number and is_int(rest) and plain(rest):
            terms.append((factor, rest))
        else:
            others.append(term)
    if len(terms) < 2:
        return None
    common = sympy.Rational(
        sympy.igcd(*(factor.p for factor, _ in terms)),
        sympy.ilcm(*(factor.q for factor, _ in terms)),
    )
    if max(abs(factor / common) for factor, _ in terms) > largest:
        return None
    total = sympy.Add(*(factor / common * rest for factor, rest in terms))
    if total.could_extract_minus_sign():
        common, total = -common, sympy.expand_mul(-total)
    return RationalSum(tuple(others), common, total)
