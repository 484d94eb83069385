"""Alternatives of a mask that say less than others, or that differ in whether equality counts.

    (c & i >= j) | (~c & i > j) | (i == j & (c | d))        as a person writes it
    (i + [c] > j) | (i == j & d)                            with [c] = 1 where c holds, else 0

A value such as i + [c] is computed once for all scores of a query or a key.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
from sympy.core.relational import Relational

from flashgen.spec.language.lets import Let, contains
from flashgen.spec.language.symbols import K, Q, is_int
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod, Select

MOST = 8
"""Alternatives, and parts of one, that are compared with each other."""

_WEAKER = {"==": ("<=", ">="), "<": ("<=", "!="), ">": (">=", "!=")}


def simplified(mask: sympy.Basic) -> sympy.Basic:
    """An equal mask whose alternatives are as few and as short as these rules make them."""
    if isinstance(mask, Let) or not isinstance(mask, sympy.And | sympy.Or):
        return mask
    parts = [simplified(arg) for arg in mask.args]
    if isinstance(mask, sympy.And) or len(parts) > MOST:
        return mask.func(*parts)
    for index, part in enumerate(parts):
        others = parts[:index] + parts[index + 1 :]
        parts[index] = _without_repeated(part, others)
    return sympy.Or(*_merged([part for part in parts if part != sympy.false]))


def implies(a: sympy.Basic, b: sympy.Basic) -> bool:
    """Whether a condition is known to imply another one, by its form alone."""
    if a == b:
        return True
    if isinstance(b, sympy.And):
        return all(implies(a, part) for part in b.args)
    if isinstance(a, sympy.Or):
        return all(implies(part, b) for part in a.args)
    if isinstance(b, sympy.Or) and any(implies(a, part) for part in b.args):
        return True
    if isinstance(a, sympy.And):
        return any(implies(part, b) for part in a.args)
    if not isinstance(a, Relational) or not isinstance(b, Relational):
        return False
    if (b.lhs, b.rhs) == (a.rhs, a.lhs):
        b = b.reversed
    return (a.lhs, a.rhs) == (b.lhs, b.rhs) and b.rel_op in _WEAKER.get(a.rel_op, ())


def _without_repeated(part: sympy.Basic, others: Sequence[sympy.Basic]) -> sympy.Basic:
    """An alternative without its inner alternatives that another alternative covers."""
    if any(implies(part, other) for other in others):
        return sympy.false
    if not isinstance(part, sympy.And) or len(part.args) > MOST:
        return part
    for inner in part.args:
        if not isinstance(inner, sympy.Or):
            continue
        rest = [arg for arg in part.args if arg != inner]
        alternatives = [
            alternative
            for alternative in inner.args
            if not any(implies(sympy.And(*rest, alternative), other) for other in others)
        ]
        if len(alternatives) < len(inner.args):
            return sympy.And(*rest, sympy.Or(*alternatives))
    return part


def _merged(parts: list[sympy.Basic]) -> list[sympy.Basic]:
    """The alternatives, where two that differ only in whether equality counts are one."""
    for index, one in enumerate(parts):
        for other in parts[index + 1 :]:
            for a, b in ((one, other), (other, one)):
                merged = _merged_pair(a, b)
                if merged is not None:
                    rest = [part for part in parts if part not in (one, other)]
                    return _merged([*rest, merged])
    return parts


def _merged_pair(loose: sympy.Basic, strict: sympy.Basic) -> sympy.Basic | None:
    """``c & x >= y & more`` and ``~c & x > y & more`` as one alternative, if c and x, or c and y,
    depend on the same position, and x or y is worth computing once for it; else None."""
    if not isinstance(loose, sympy.And) or not isinstance(strict, sympy.And):
        return None
    only_loose, only_strict = set(loose.args) - set(strict.args), set(strict.args) - set(loose.args)
    if len(only_loose) != 2 or len(only_strict) != 2:
        return None
    if not all(isinstance(c, Relational) for c in only_loose):
        return None
    for compared in only_loose:
        (condition,) = only_loose - {compared}
        if {sympy.Not(condition), _strict(compared)} != only_strict:
            continue
        sides = compared.lhs, compared.rhs
        if compared.rel_op == "<=":
            sides = sides[::-1]
        if compared.rel_op not in (">=", "<=") or not all(map(is_int, sides)):
            continue
        x, y = sides
        position = condition.free_symbols & {Q, K}
        if len(position) != 1:
            continue
        if x.free_symbols & {Q, K} == position and contains(x, FloorDiv, FloorMod):
            merged = sympy.Gt(Select(condition, x + 1, x), y, evaluate=False)
        elif y.free_symbols & {Q, K} == position and contains(y, FloorDiv, FloorMod):
            merged = sympy.Gt(x, Select(condition, y - 1, y), evaluate=False)
        else:
            continue
        return sympy.And(merged, *(set(loose.args) & set(strict.args)))
    return None


def _strict(relation: Relational) -> sympy.Basic:
    """The comparison for which equality does not count."""
    kinds = {">=": sympy.Gt, "<=": sympy.Lt}
    kind = kinds.get(relation.rel_op)
    return relation if kind is None else kind(relation.lhs, relation.rhs, evaluate=False)
