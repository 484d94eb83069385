"""Sums in which integers meet rational factors: added up exactly first, multiplied once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy

from .symbols import is_int


@dataclass(frozen=True)
class Gathered:
    """``others + common * total``, where total is an integer."""

    others: tuple[sympy.Expr, ...]
    common: sympy.Rational
    total: sympy.Expr


def gather(expr: sympy.Add, plain: Callable[[sympy.Expr], bool], largest: int) -> Gathered | None:
    """The integers of a sum behind one common factor; None when fewer than two terms are such.

    sympy writes 0.1 * (k - q) as k / 10 - q / 10; far from the origin the two products would round
    where their difference is small.

    Args:
        plain: which integers may be added up.
        largest: factors of the total beyond it are left as they are.
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
    return Gathered(tuple(others), common, total)
