"""A condition as a tree of all-of and any-of over few kinds of atoms, negations pushed inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy
from sympy.core.relational import Relational

from ..expr import FloorMod, Maximum, Minimum, is_int
from .ranges import Tile, linear


@dataclass(frozen=True)
class All:
    """Every part holds."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Some:
    """At least one part holds."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class AtLeast0:
    """An integer expression is 0 or more."""

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
    """Anything else: a bool scalar or a comparison of floats."""

    expr: sympy.Basic


Node = All | Some | AtLeast0 | Congruent | Fact

# Each split doubles the tree; beyond this depth absolute values and extrema stay as they are.
_MAX_SPLITS = 6


def lower(
    condition: sympy.Basic, tile: Tile, split: Callable[[sympy.Expr], bool], negate: bool = False
) -> Node:
    """The tree of ``condition``, or of its negation.

    Args:
        tile: says which symbols vary.
        split: which absolute values, extrema and choices to resolve into cases.
    """
    if isinstance(condition, sympy.Not):
        return lower(condition.args[0], tile, split, not negate)
    if isinstance(condition, sympy.And | sympy.Or):
        parts = tuple(lower(arg, tile, split, negate) for arg in condition.args)
        both = isinstance(condition, sympy.And) != negate
        return All(parts) if both else Some(parts)
    if isinstance(condition, Relational):
        return _relation(condition.negated if negate else condition, tile, split)
    if condition in (sympy.true, sympy.false):
        return Fact(sympy.Not(condition) if negate else condition)
    return Fact(sympy.Not(condition) if negate else condition)


def _relation(rel: Relational, tile: Tile, split: Callable[[sympy.Expr], bool]) -> Node:
    left, right = rel.lhs, rel.rhs
    if not (is_int(left) and is_int(right)):
        return Fact(rel)
    gap = sympy.expand_mul(left - right)
    if isinstance(rel, sympy.Eq | sympy.Ne):
        equal = isinstance(rel, sympy.Eq)
        congruence = _congruence(gap, tile, equal)
        if congruence is not None:
            return congruence
        if equal:
            return All((_at_least_0(gap, tile, split), _at_least_0(-gap, tile, split)))
        return Some((_at_least_0(gap - 1, tile, split), _at_least_0(-gap - 1, tile, split)))
    if isinstance(rel, sympy.Ge):
        return _at_least_0(gap, tile, split)
    if isinstance(rel, sympy.Gt):
        return _at_least_0(gap - 1, tile, split)
    if isinstance(rel, sympy.Le):
        return _at_least_0(-gap, tile, split)
    return _at_least_0(-gap - 1, tile, split)


def _congruence(gap: sympy.Expr, tile: Tile, equal: bool) -> Node | None:
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
    return Congruent(x, modulus, -rest * weight, equal)


def _at_least_0(
    expr: sympy.Expr, tile: Tile, split: Callable[[sympy.Expr], bool], depth: int = 0
) -> Node:
    expr = sympy.expand_mul(expr)
    atoms, _ = linear(expr, tile)
    for atom, weight in atoms.items():
        sign = 1 if weight.is_positive else -1 if weight.is_negative else 0
        if depth >= _MAX_SPLITS or sign == 0 or not split(atom):
            continue
        rest = expr - weight * atom

        def case(value: sympy.Expr, weight: sympy.Expr = weight, rest: sympy.Expr = rest) -> Node:
            return _at_least_0(rest + weight * value, tile, split, depth + 1)

        if isinstance(atom, sympy.Abs):
            x = atom.args[0]
            both = (case(x), case(-x))
            return Some(both) if sign > 0 else All(both)
        if isinstance(atom, Minimum | Maximum):
            cases = tuple(case(arg) for arg in atom.args)
            any_suffices = isinstance(atom, Maximum) == (sign > 0)
            return Some(cases) if any_suffices else All(cases)
        if isinstance(atom, sympy.Piecewise):
            return _cases(atom, case, tile, split)
    return AtLeast0(expr)


def _cases(
    atom: sympy.Expr,
    case: Callable[[sympy.Expr], Node],
    tile: Tile,
    split: Callable[[sympy.Expr], bool],
) -> Node:
    """One alternative per branch, each with the conditions under which it is taken."""
    alternatives, before = [], sympy.true
    for value, condition in atom.args:
        taken = sympy.And(before, condition)
        if taken != sympy.false:
            alternatives.append(All((lower(taken, tile, split), case(value))))
        before = sympy.And(before, sympy.Not(condition))
    return Some(tuple(alternatives))
