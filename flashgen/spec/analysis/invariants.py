"""Loop-invariant parts of an expression: constant per head, query row or key column.

A kernel computes such a part once, before its loop over scores, and not once for each score. The
compiler cannot do this by itself: it does not know that the memory behind a read stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import sympy

from flashgen.spec.analysis.sharing import CodeBlock, share, worth_a_name
from flashgen.spec.language import float_operations as floats
from flashgen.spec.language.bit_functions import BitFunction
from flashgen.spec.language.float_functions import Abs
from flashgen.spec.language.lets import Let, lets_of
from flashgen.spec.language.symbols import (
    APART,
    DISTANCE,
    K_HI,
    K_LO,
    PRODUCT,
    Q_HI,
    Q_LO,
    SCORE,
    SCORE_TANGENT,
    K,
    Q,
)
from flashgen.spec.language.sympy_functions import (
    Floor,
    FloorDiv,
    FloorMod,
    Maximum,
    Minimum,
    Select,
)
from flashgen.spec.language.tensor_elements import Element


class Level(IntEnum):
    """Which scores share a value: all of a head, all of a query, all of a key, or a single one."""

    HEAD = 0
    QUERY = 1
    KEY = 2
    SCORE = 3


MOST_VALUES = {Level.HEAD: 32, Level.QUERY: 6, Level.KEY: 6}
"""The values of a level that a kernel keeps in registers; more are computed for each score."""

# A position, or the ends of the positions of a tile.
_QUERIES = frozenset((Q, Q_LO, Q_HI))
_KEYS = frozenset((K, K_LO, K_HI))
_SCORES = frozenset((SCORE, SCORE_TANGENT, PRODUCT, DISTANCE, APART))
_POSITIONS = _QUERIES | _KEYS | _SCORES

# One instruction, or a few: computing these again costs no more than a register.
_CHEAP = (
    *(
        sympy.Add,
        sympy.Mul,
        floats.AsFloat,
        floats.FloatSum,
        floats.FloatProduct,
        Abs,
        sympy.Abs,
        sympy.sign,
        Floor,
        Minimum,
        Maximum,
        sympy.Min,
        sympy.Max,
    ),
    *(sympy.Piecewise, sympy.functions.elementary.piecewise.ExprCondPair, Select, BitFunction),
)


@dataclass(frozen=True)
class LeveledCode:
    """Straight-line code with the level of each of its lets.

    Attributes:
        block: the code.
        levels: the level of each let.
        shared: the lets that are computed for their level and read by later levels.
    """

    block: CodeBlock
    levels: dict[sympy.Symbol, Level]
    shared: frozenset[sympy.Symbol]

    def values(self, level: Level) -> list[sympy.Symbol]:
        """The shared lets of a level, in order."""
        return [let for let in self.levels if let in self.shared and self.levels[let] == level]

    def needed(self, level: Level, result: int | None = None) -> list[sympy.Symbol]:
        """The lets that the code of a level computes, in order, without earlier shared lets.

        Args:
            result: the number of the only result that the last level computes; None for all.
        """
        values = dict(self.block.lets)
        goals = self.values(level)
        waiting: list[sympy.Basic] = [values[symbol] for symbol in goals]
        needed = set(goals)
        if level is Level.SCORE:
            waiting = list(
                self.block.results if result is None else self.block.results[result:][:1]
            )
        while waiting:
            new = (waiting.pop().free_symbols & values.keys()) - needed - self.before(level)
            needed |= new
            waiting += [values[symbol] for symbol in new]
        return [symbol for symbol in values if symbol in needed]

    def before(self, level: Level) -> set[sympy.Symbol]:
        """The shared lets that the code of a level reads instead of computing them."""
        return {symbol for symbol in self.shared if self.levels[symbol] < level}


def leveled(
    *results: sympy.Basic,
    levels: Sequence[Level] = tuple(MOST_VALUES),
    name_costly: bool = False,
    bounded: bool = True,
) -> LeveledCode:
    """Code of expressions that computes the costly values of these levels once.

    Args:
        levels: the levels whose values the kernel can keep; HEAD is one of them.
        name_costly: as in `share`.
        bounded: whether at most `MOST_VALUES` of a level are kept.
    """
    expressions: dict[Level, list[sympy.Basic]] = {level: [] for level in levels}
    for expr, level in _invariants(results):
        if level in expressions:
            expressions[level].append(expr)
    chosen = frozenset(
        expr
        for level in levels
        for expr in expressions[level][: MOST_VALUES[level] if bounded else None]
    )
    block = share(*results, name_costly=name_costly, named=chosen)
    values: dict[sympy.Symbol, frozenset[sympy.Symbol]] = {}
    for symbol, value in block.lets:
        free = value.free_symbols
        values[symbol] = frozenset().union(
            free & _POSITIONS, *(values[let] for let in free & values.keys())
        )
    source_of_let = dict(zip(block.lets, block.sources, strict=True))
    return LeveledCode(
        block,
        {symbol: _level(uses) for symbol, uses in values.items()},
        frozenset(symbol for (symbol, _), source in source_of_let.items() if source in chosen),
    )


def _invariants(results: Sequence[sympy.Basic]) -> Iterator[tuple[sympy.Basic, Level]]:
    """The largest costly parts whose level is below the level of their context, in order."""
    uses: dict[sympy.Basic, frozenset[sympy.Symbol]] = {}
    costs: dict[sympy.Basic, bool] = {}
    seen: set[tuple[sympy.Basic, Level]] = set()
    invariants: dict[sympy.Basic, Level] = {}

    def measure(expr: sympy.Basic) -> None:
        if expr in uses:
            return
        for arg in expr.args:
            measure(arg)
        positions = frozenset((expr.free_symbols if isinstance(expr, Let) else {expr}) & _POSITIONS)
        uses[expr] = positions.union(*(uses[arg] for arg in expr.args))
        costs[expr] = _is_costly(expr) or any(costs[arg] for arg in expr.args)

    def visit(expr: sympy.Basic, outer: Level) -> None:
        level = _level(uses[expr])
        if (expr, outer) in seen or not costs[expr]:
            return
        seen.add((expr, outer))
        if level < outer and worth_a_name(expr):
            invariants.setdefault(expr, level)
            outer = level
        for arg in expr.args:
            visit(arg, outer)

    for let in lets_of(*results):
        measure(let)
        measure(let.value)
        visit(let.value, _level(uses[let]))
    for result in results:
        measure(result)
        visit(result, Level.SCORE)
    yield from invariants.items()


def _level(uses: frozenset[sympy.Symbol]) -> Level:
    uses_query, uses_key = not uses.isdisjoint(_QUERIES), not uses.isdisjoint(_KEYS)
    if not _SCORES.isdisjoint(uses) or (uses_query and uses_key):
        return Level.SCORE
    return Level.QUERY if uses_query else Level.KEY if uses_key else Level.HEAD


def _is_costly(expr: sympy.Basic) -> bool:
    """Whether the operation itself costs more than a few instructions."""
    if isinstance(expr, sympy.Pow | floats.FloatPower):
        exponent = expr.args[1]
        return not (exponent.is_Integer and 0 < exponent <= 4)
    if isinstance(expr, floats.FloatQuotient):
        return not expr.args[1].is_number
    if isinstance(expr, Element | FloorDiv | FloorMod | Let):
        return True
    return isinstance(expr, sympy.Function) and not isinstance(expr, _CHEAP)
