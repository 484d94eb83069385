"""Masks by the distance q - k: what depends on it alone is equal along a diagonal of the scores.

A lane has rows that are 8 apart and columns that are 8 apart, so that most of its scores have the
distance of another of its scores. The compiler computes what they share once if the distance is a
name, and every comparison of positions that can is one of the distance.
"""

from __future__ import annotations

from functools import lru_cache

import sympy
from sympy.core.relational import Relational

from flashgen.spec.analysis.alternatives import simplified
from flashgen.spec.analysis.invariants import Level, LeveledCode, leveled
from flashgen.spec.analysis.natural import Nonnegative, with_natural_divisions
from flashgen.spec.analysis.sharing import CodeBlock
from flashgen.spec.language.lets import atoms_of, contains, distinct, replaced
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import APART, K, Q, is_int
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod
from flashgen.spec.language.tensor_elements import Element

OFFSETS = {Q: "q_offset", K: "k_offset"}
"""The names of what a call adds to its positions."""


def by_distance(mask: sympy.Basic) -> sympy.Basic:
    """The mask with `APART`, if it divides the distance; else the mask unchanged."""
    replacements: dict[sympy.Basic, sympy.Basic] = {}
    for part in distinct(mask):
        if isinstance(part, Relational) and is_int(part.lhs) and is_int(part.rhs):
            new = _relation(part)
        elif isinstance(part, sympy.Expr) and is_int(part) and part.args:
            new = _distance(part)
        else:
            continue
        if new is not None:
            replacements[part] = new
    result = replaced(mask, replacements)
    divisions = result.atoms(FloorDiv, FloorMod)
    return result if any(APART in division.free_symbols for division in divisions) else mask


def known_positions(spec: AttentionSpec) -> Nonnegative:
    """The positions that are not negative in the calls of a kernel without wide integers.

    These are the positions whose offsets the host knows. Rows that a tile has before the first
    query of a sequence are not stored, whatever their mask is.
    """
    data = {tensor.name for tensor in spec.offsets}
    data |= {"q_offset"} if spec.paged else set()
    return frozenset(position for position, offset in OFFSETS.items() if offset not in data)


def natural_positions(mask: sympy.Basic, positions: Nonnegative) -> Nonnegative:
    """The positions that spare the code of a mask a correction if they are not negative."""
    mask = by_distance(simplified(mask))
    best = with_natural_divisions(mask, positions)
    needed = (s for s in positions if with_natural_divisions(mask, positions - {s}) != best)
    return frozenset(needed)


def code_of_mask(mask: sympy.Basic, positions: Nonnegative) -> LeveledCode:
    """The code of a mask, whose first let is `APART` where it divides the distance.

    Args:
        positions: as in `with_natural_divisions`.
    """
    mask = with_natural_divisions(by_distance(simplified(mask)), positions)
    code = leveled(mask, name_costly=True)
    if APART not in mask.free_symbols:
        return code
    lets, sources = ((APART, Q - K), *code.block.lets), (Q - K, *code.block.sources)
    block = CodeBlock(lets, code.block.results, sources)
    return LeveledCode(block, {APART: Level.SCORE, **code.levels}, code.shared)


def is_of_distance(mask: sympy.Basic) -> bool:
    """Whether a mask divides the distance q - k, and depends on no other position.

    Lanes then evaluate it once for each distance of a warp's scores, not for each score.
    """
    if is_costly_mask(mask):
        return False
    mask = by_distance(simplified(mask))
    return APART in mask.free_symbols and {Q, K}.isdisjoint(mask.free_symbols)


def is_costly_mask(mask: sympy.Basic) -> bool:
    """Whether unrolled code would keep elements or quotients of every row and column."""
    quotients = atoms_of(mask, FloorDiv, FloorMod)
    return contains(mask, Element) or any(not {Q, K} <= e.free_symbols for e in quotients)


def is_costly_for_scores(mask: sympy.Basic) -> bool:
    """Whether each score reads an element or computes a quotient of its row or column alone.

    Such reads and quotients remain beside the values that a kernel computes once for a row or a
    column of scores.
    """
    exprs = _exprs_of_scores(mask)
    quotients = (quotient for expr in exprs for quotient in atoms_of(expr, FloorDiv, FloorMod))
    reads = any(contains(expr, Element) for expr in exprs)
    return reads or any(len({Q, K} & quotient.free_symbols) == 1 for quotient in quotients)


def has_condition_of(position: sympy.Basic, mask: sympy.Basic) -> bool:
    """Whether a score's own code compares the position of its row or column with a number."""
    relations = set[Relational]().union(*(atoms_of(e, Relational) for e in _exprs_of_scores(mask)))
    return any(e.free_symbols & {APART, Q, K} == {position} for e in relations)


@lru_cache(maxsize=256)
def _exprs_of_scores(mask: sympy.Basic) -> list[sympy.Basic]:
    """The expressions of a mask's code that each score computes."""
    code = code_of_mask(mask, frozenset())
    values = dict(code.block.lets)
    return [*(values[let] for let in code.needed(Level.SCORE)), *code.block.results]


def _relation(relation: Relational) -> Relational | None:
    sides = relation.lhs, relation.rhs
    if any({Q, K} <= side.free_symbols for side in sides):
        return None  # a side has the distance itself
    difference = _distance(relation.lhs - relation.rhs)
    sign = 0 if difference is None else difference.coeff(APART)
    if sign not in (1, -1):
        return None
    rest = difference - sign * APART
    if APART in rest.free_symbols:
        return None
    sides = (APART, -rest) if sign == 1 else (rest, APART)
    return relation.func(*sides, evaluate=False)


def _distance(expr: sympy.Expr) -> sympy.Expr | None:
    """An expression of q and k by their distance `APART`; None if it depends on more than that."""
    if not {Q, K} <= expr.free_symbols:
        return None
    new = replaced(expr, {Q: APART + K})
    return None if K in new.free_symbols else new
