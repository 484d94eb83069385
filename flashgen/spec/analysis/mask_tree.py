"""A mask as a tree of conjunctions and disjunctions over four kinds of atoms, without negations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import sympy
from sympy.core.relational import Relational

from flashgen.spec.analysis.tile_bounds import TileBounds, expanded, linear
from flashgen.spec.language.comparisons import FloatRelation
from flashgen.spec.language.divisors import is_data, may_be_zero
from flashgen.spec.language.sympy_functions import FloorMod, Maximum, Minimum


@dataclass(frozen=True)
class AllOf:
    """A conjunction: every part holds. The parts are the cases of ``whole``, which holds too."""

    parts: tuple[Node, ...]
    whole: AtLeast0 | None = None


@dataclass(frozen=True)
class AnyOf:
    """A disjunction: a part holds. The parts are the cases of ``whole``, which holds then."""

    parts: tuple[Node, ...]
    whole: AtLeast0 | None = None


@dataclass(frozen=True)
class AtLeast0:
    """An integer expression is at least 0."""

    expr: sympy.Expr


@dataclass(frozen=True)
class Congruent:
    """``x % modulus == remainder``, ``!=`` when not ``holds``; the modulus is known positive."""

    x: sympy.Expr
    modulus: sympy.Expr
    remainder: sympy.Expr
    holds: bool


@dataclass(frozen=True)
class Fact:
    """Any other condition: a bool scalar or a comparison of floats."""

    expr: sympy.Basic


Node = AllOf | AnyOf | AtLeast0 | Congruent | Fact

# Each split doubles the tree, so that deeper absolute values, minima and maxima stay.
_MAX_SPLITS = 6

_SPLIT = (sympy.Abs, Minimum, Maximum, sympy.Piecewise)


def lower(
    condition: sympy.Basic,
    tile: TileBounds,
    split: Callable[[sympy.Expr], bool],
    negate: bool = False,
) -> Node:
    """The tree of ``condition``, or of its negation.

    Args:
        tile: the symbols that vary.
        split: whether to resolve an absolute value, minimum, maximum or choice into cases.
        negate: return the tree of the negation.
    """
    if not tile.effort.spend():
        return Fact(sympy.Not(condition) if negate else condition)
    if isinstance(condition, sympy.Not):
        return lower(condition.args[0], tile, split, not negate)
    if isinstance(condition, sympy.And | sympy.Or):
        parts = tuple(lower(arg, tile, split, negate) for arg in condition.args)
        is_conjunction = isinstance(condition, sympy.And) != negate
        return AllOf(parts) if is_conjunction else AnyOf(parts)
    if isinstance(condition, Relational):
        return _relation(sympy.Not(condition) if negate else condition, tile, split)
    return Fact(sympy.Not(condition) if negate else condition)


def _relation(relation: Relational, tile: TileBounds, split: Callable[[sympy.Expr], bool]) -> Node:
    if isinstance(relation, sympy.Not | FloatRelation):
        return Fact(relation)
    left, right = relation.lhs, relation.rhs
    gap = expanded(left - right)
    if isinstance(relation, sympy.Eq | sympy.Ne):
        equal = isinstance(relation, sympy.Eq)
        congruence = _congruence(gap, tile, equal)
        if congruence is not None:
            return congruence
        if equal:
            return AllOf((_at_least_0(gap, tile, split), _at_least_0(-gap, tile, split)))
        return AnyOf((_at_least_0(gap - 1, tile, split), _at_least_0(-gap - 1, tile, split)))
    excess = {sympy.Ge: gap, sympy.Gt: gap - 1, sympy.Le: -gap, sympy.Lt: -gap - 1}
    return _at_least_0(excess[relation.func], tile, split)


def _congruence(gap: sympy.Expr, tile: TileBounds, equal: bool) -> Node | None:
    """``x % m - c`` equal to 0 or not, as a Congruent."""
    atoms, rest = linear(gap, tile)
    if len(atoms) != 1:
        return None
    ((atom, weight),) = atoms.items()
    if not isinstance(atom, FloorMod) or abs(weight) != 1:
        return None
    x, modulus = atom.args
    if tile.varies(modulus) or not modulus.is_nonnegative:
        return None
    if is_data(modulus) and may_be_zero(modulus):
        return None
    return Congruent(x, modulus, -rest * weight, equal)


def _at_least_0(expr: sympy.Expr, tile: TileBounds, split: Callable[[sympy.Expr], bool]) -> Node:
    """``expr >= 0``, by cases.

    The cases of a sum of several functions, as in ``abs(x) + abs(y) <= r``, are weaker than the sum
    where one function has a tight range and the other has none: the tree has the cases and the sum.
    """
    node = _by_cases(expr, tile, split)
    if isinstance(node, AllOf | AnyOf):
        expr = expanded(expr)
        atoms = linear(expr, tile)[0]
        if sum(isinstance(atom, _SPLIT) and split(atom) for atom in atoms) > 1:
            return replace(node, whole=AtLeast0(expr))
    return node


def _by_cases(
    expr: sympy.Expr, tile: TileBounds, split: Callable[[sympy.Expr], bool], depth: int = 0
) -> Node:
    expr = expanded(expr)
    atoms, _ = linear(expr, tile)
    for atom, weight in atoms.items():
        sign = 1 if weight.is_positive else -1 if weight.is_negative else 0
        if depth >= _MAX_SPLITS or sign == 0 or not split(atom) or not tile.effort.spend():
            continue
        rest = expr - weight * atom

        def case(value: sympy.Expr, weight: sympy.Expr = weight, rest: sympy.Expr = rest) -> Node:
            return _by_cases(rest + weight * value, tile, split, depth + 1)

        if isinstance(atom, sympy.Abs):
            x = atom.args[0]
            signs = (case(x), case(-x))
            return AnyOf(signs) if sign > 0 else AllOf(signs)
        if isinstance(atom, Minimum | Maximum):
            cases = tuple(case(arg) for arg in atom.args)
            any_suffices = isinstance(atom, Maximum) == (sign > 0)
            return AnyOf(cases) if any_suffices else AllOf(cases)
        if isinstance(atom, sympy.Piecewise):  # an alternative per branch, under its conditions
            alternatives, before = [], sympy.true
            for value, condition in atom.args:
                chosen = sympy.And(before, condition)
                if chosen != sympy.false:
                    alternatives.append(AllOf((lower(chosen, tile, split), case(value))))
                before = sympy.And(before, sympy.Not(condition))
            return AnyOf(tuple(alternatives))
    return AtLeast0(expr)
