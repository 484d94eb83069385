"""The ranges of a tile's positions, and expressions as linear forms of what varies in the tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy

End: TypeAlias = sympy.Expr | None
Form: TypeAlias = tuple[tuple[sympy.Expr, int], ...]


class Effort:
    """The number of steps that one bound or condition may still take, for all its tiles together.

    Nested choices and disjunctions could take any number. Where no step remains, a range has no
    ends, and a tile counts as mixed.
    """

    MOST = 4_000
    MOST_SPLITS = 16

    def __init__(self) -> None:
        self.remaining = self.MOST
        self.splits = self.MOST_SPLITS

    def spend(self) -> bool:
        """Whether one more step is allowed."""
        self.remaining -= 1
        return self.remaining >= 0

    def split(self) -> bool:
        """Whether a conjunction may be split once more into the cases of one of its parts."""
        self.splits -= 1
        return self.splits >= 0


@dataclass(frozen=True)
class TileBounds:
    """The range of each varying symbol, and tighter ranges of linear forms in a context.

    Attributes:
        must_and_may: for a condition and a tile, a condition on the tile that is true only where
            the condition holds everywhere, and one that is false only where it holds nowhere.
            The range of a choice between two values needs both.
        effort: the steps that remain for this tile and for the tiles that contexts make of it.
        ranges, float_ranges: the range of each expression, so that none is bounded twice.
    """

    ends: Mapping[sympy.Symbol, tuple[End, End]]
    must_and_may: Callable[[sympy.Basic, TileBounds], tuple[sympy.Basic, sympy.Basic]]
    forms: Mapping[Form, tuple[End, End]] = field(default_factory=dict)
    effort: Effort = field(default_factory=Effort)
    ranges: dict[sympy.Expr, Any] = field(default_factory=dict, init=False, compare=False)
    float_ranges: dict[sympy.Expr, Any] = field(default_factory=dict, init=False, compare=False)

    def varies(self, expr: sympy.Basic) -> bool:
        return any(symbol in self.ends for symbol in expr.free_symbols)


def pick_known(pick: Callable[..., sympy.Expr], ends: Iterable[End]) -> End:
    """The minimum or maximum of the ends that exist; None without any."""
    finite = [end for end in ends if end is not None]
    return pick(*finite) if finite else None


MOST_TERMS = 64
"""Terms of the largest sum that a product of sums is multiplied out to."""


def expanded(expr: sympy.Expr) -> sympy.Expr:
    """A product of sums as a sum, if the sum is not long."""
    return sympy.expand_mul(expr, deep=False) if _terms(expr) <= MOST_TERMS else expr


def _terms(expr: sympy.Expr) -> int:
    if isinstance(expr, sympy.Add):
        return sum(map(_terms, expr.args))
    if isinstance(expr, sympy.Mul):
        return math.prod(map(_terms, expr.args))
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and 0 < expr.exp <= MOST_TERMS:
        return int(_terms(expr.base) ** int(expr.exp))
    return 1


def linear(expr: sympy.Expr, tile: TileBounds) -> tuple[dict[sympy.Expr, sympy.Expr], sympy.Expr]:
    """``expr`` as a sum of varying atoms times coefficients that do not vary, and a rest."""
    atoms: dict[sympy.Expr, sympy.Expr] = {}
    rest = sympy.S.Zero
    for term in sympy.Add.make_args(expr):
        if not tile.varies(term):
            rest += term
            continue
        factors = sympy.Mul.make_args(term)
        varying = [factor for factor in factors if tile.varies(factor)]
        coefficient = sympy.Mul(*(factor for factor in factors if not tile.varies(factor)))
        if len(varying) == 1 and isinstance(varying[0], sympy.Add):
            inner, inner_rest = linear(varying[0], tile)
            for atom, weight in inner.items():
                atoms[atom] = atoms.get(atom, sympy.S.Zero) + coefficient * weight
            rest += coefficient * inner_rest
        else:
            atom = sympy.Mul(*varying)
            atoms[atom] = atoms.get(atom, sympy.S.Zero) + coefficient
    weights = {atom: expanded(atoms[atom]) for atom in sorted(atoms, key=sympy.default_sort_key)}
    return {atom: weight for atom, weight in weights.items() if weight != 0}, rest


def normal_form(atoms: Mapping[sympy.Expr, sympy.Expr]) -> tuple[Form, int] | None:
    """Integer-weighted atoms as (form, factor) with atoms = factor * form, or None."""
    if not atoms or not all(weight.is_Integer for weight in atoms.values()):
        return None
    weights = [int(weight) for weight in atoms.values()]
    factor = math.gcd(*weights) * (1 if weights[0] > 0 else -1)
    return tuple((atom, int(weight) // factor) for atom, weight in atoms.items()), factor
