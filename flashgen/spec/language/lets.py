"""Expressions of any size: programs of named parts, each of bounded size.

sympy walks an expression as a tree, by recursion, and simplifies it again in every operation. Both
are fast for the expressions of most mods. A large expression is therefore a program: `named` gives
each part that has grown beyond LARGEST a symbol, a `Let`, which the rest of the expression uses
like any other symbol. The size of what sympy sees is bounded, a part that is used twice is computed
once, and the time from a mod to its kernel is linear in the number of its operations.

Only `AttentionSpec.mask` and `.score` and what is derived from them contain Lets. Code that looks
inside expressions goes through the functions below, which see the parts of Lets as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import sympy

from flashgen.spec.language.integer_limits import Limits, fits, limits
from flashgen.spec.language.symbols import is_condition, is_int, with_args
from flashgen.spec.language.tensor_elements import Element

LARGEST = 160
"""Nodes of the largest expression that is a tree; no spec in specs/ has more than 140."""

DEEPEST = 24
"""Levels of the deepest expression that is a tree; no spec in specs/ has more than 13."""


class Let(sympy.Symbol):  # type: ignore[misc]
    """The name of a part of a larger expression.

    Equal parts have equal names in every process. A Let is integer, real or (a condition) neither,
    like its value.

    Attributes:
        value: the part, an expression that may contain other Lets.
        limits: bounds of an integer value; far beyond 64 bits where it may overflow.
        slopes: derivatives of the value by symbols, as far as the analysis has computed them.
    """

    __slots__ = ("__weakref__", "_free", "limits", "slopes", "value")

    value: sympy.Basic
    limits: Limits | None
    slopes: dict[sympy.Symbol, sympy.Expr]

    def __new__(cls, value: sympy.Basic) -> Let:
        name = "let_" + hashlib.sha256(_text(value).encode()).hexdigest()[:16]
        existing = _LETS.get(name)
        if existing is not None:
            return existing
        let: Let = sympy.Symbol.__xnew__(cls, name, **_assumptions(value))
        let.value = value
        let.limits = _limits(value) if let.is_integer else None
        let.slopes = {}
        let._free = frozenset(value.free_symbols)
        _LETS[name] = let
        return let

    @property
    def free_symbols(self) -> set[sympy.Symbol]:
        """The symbols of the value: a Let depends on what its value depends on."""
        return set(self._free)

    def _eval_derivative(self, by: sympy.Symbol) -> sympy.Expr:
        return self.slopes[by] if by in self._free else sympy.S.Zero

    def _eval_derivative_n_times(self, by: sympy.Symbol, n: int) -> sympy.Expr:
        assert n == 1, "derivatives of scores are first derivatives"
        return self._eval_derivative(by)

    def _eval_subs(self, old: sympy.Basic, new: sympy.Basic) -> sympy.Basic:
        """Substitutes in the value too: sympy asks for signs of the result, and would ask without
        end where a symbol remains."""
        return substituted(self, {old: new}) if old in self._free else self

    def __getnewargs_ex__(self) -> tuple[tuple[sympy.Basic], dict[str, Any]]:
        return (self.value,), {}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Let, (self.value,)


_LETS: WeakValueDictionary[str, Let] = WeakValueDictionary()


def _text(expr: sympy.Basic) -> str:
    """The whole expression, the same in every process; sympy.srepr takes ten times as long."""
    if isinstance(expr, sympy.Symbol):  # of one name there are some of several dtypes and signs
        return f"{type(expr).__name__}:{expr._hashable_content()}"
    if not expr.args:
        return str(sympy.srepr(expr))
    return f"{expr.func.__name__}({','.join(map(_text, expr.args))})"


def _assumptions(value: sympy.Basic) -> dict[str, bool]:
    if is_condition(value):
        return {}
    if not is_int(value):
        return {"real": True}
    least, _ = _limits(value)
    sign = {"positive": True} if least > 0 else {"nonnegative": True} if least == 0 else {}
    return {"integer": True, **sign}


def _limits(value: sympy.Expr) -> Limits:
    return limits(value) if fits(value) else (-_OVERFLOW, _OVERFLOW)


_OVERFLOW = 2**64


def named(expr: sympy.Basic) -> sympy.Basic:
    """The expression itself, or a Let that stands for it if it is large."""
    return Let(expr) if expr.args and not _is_small(expr) else expr


def _is_small(expr: sympy.Basic) -> bool:
    remaining, level = LARGEST, [expr]
    for _ in range(DEEPEST):
        level = [arg for part in level for arg in part.args]
        remaining -= len(level)
        if not level or remaining < 0:
            return remaining >= 0
    return False


@lru_cache(maxsize=4096)
def direct_lets(expr: sympy.Basic) -> tuple[Let, ...]:
    """The Lets in an expression, without those inside of Lets, in order of first use."""
    if isinstance(expr, Let):
        return (expr,)
    lets: dict[Let, None] = {}
    for arg in expr.args:
        lets.update(dict.fromkeys(direct_lets(arg)))
    return tuple(lets)


def lets_of(*exprs: sympy.Basic) -> tuple[Let, ...]:
    """All Lets in expressions, each after those that its value uses."""
    lets: dict[Let, None] = {}
    waiting = [let for expr in reversed(exprs) for let in reversed(direct_lets(expr))]
    while waiting:
        let = waiting[-1]
        inner = [used for used in direct_lets(let.value) if used not in lets]
        if let in lets or not inner:
            lets[waiting.pop()] = None
        else:
            waiting += reversed(inner)
    return tuple(lets)


def parts_of(*exprs: sympy.Basic) -> tuple[sympy.Basic, ...]:
    """The values of all Lets in expressions, then the expressions."""
    return (*(let.value for let in lets_of(*exprs)), *exprs)


def size_of(expr: sympy.Basic) -> int:
    """The number of nodes of an expression with the values of Lets in their place."""
    sizes: dict[sympy.Basic, int] = {}

    def nodes(part: sympy.Basic) -> int:
        return sum(sizes.get(node, 1) for node in sympy.preorder_traversal(part))

    for let in lets_of(expr):
        sizes[let] = nodes(let.value)
    return nodes(expr)


def inlined(expr: sympy.Basic) -> sympy.Basic:
    """The expression with the values of Lets in their place."""
    values: dict[sympy.Basic, sympy.Basic] = {}
    for let in lets_of(expr):
        values[let] = replaced(let.value, values)
    return replaced(expr, values)


def substituted(expr: sympy.Basic, values: Mapping[Any, sympy.Basic]) -> sympy.Basic:
    """The expression with other expressions for symbols, in the values of Lets too.

    An expression among the keys has its value in place of what it contains.
    """
    replacements: dict[sympy.Basic, sympy.Basic] = dict(values)
    for let in lets_of(expr):
        if not let.free_symbols.isdisjoint(values):
            replacements[let] = Let(replaced(let.value, replacements))
    return replaced(expr, replacements)


def replaced(expr: sympy.Basic, values: Mapping[sympy.Basic, sympy.Basic]) -> sympy.Basic:
    """``expr.xreplace(values)`` with the conditions of choices as they are written."""
    results = dict(values)

    def rebuilt(expr: sympy.Basic) -> sympy.Basic:
        if expr not in results:
            results[expr] = with_args(expr, [rebuilt(arg) for arg in expr.args])
        return results[expr]

    return rebuilt(expr)


def distinct(*exprs: sympy.Basic) -> Iterator[sympy.Basic]:
    """Every subexpression once, without the values of Lets: a tree may repeat each many times."""
    seen: set[sympy.Basic] = set()
    waiting = list(exprs)
    while waiting:
        expr = waiting.pop()
        if expr not in seen:
            seen.add(expr)
            waiting += expr.args
            yield expr


def nodes_of(*exprs: sympy.Basic) -> Iterator[sympy.Basic]:
    """Every subexpression, the values of Lets included."""
    for part in parts_of(*exprs):
        yield from sympy.preorder_traversal(part)


def contains(expr: sympy.Basic, *kinds: type[sympy.Basic]) -> bool:
    """Whether a subexpression has one of these types, the values of Lets included."""
    return any(part.has(*kinds) for part in parts_of(expr))


def atoms_of(expr: sympy.Basic, *kinds: type[sympy.Basic]) -> set[sympy.Basic]:
    """The subexpressions of these types, the values of Lets included."""
    return {part for part in distinct(*parts_of(expr)) if isinstance(part, kinds)}


def elements_of(*exprs: sympy.Basic) -> tuple[Element, ...]:
    """Every element that expressions read, also in indices, in a fixed order."""
    elements = {part for part in distinct(*parts_of(*exprs)) if isinstance(part, Element)}
    return tuple(sorted(elements, key=sympy.default_sort_key))
