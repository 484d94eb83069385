"""Straight-line code of expressions: subexpressions that occur more than once get a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import lru_cache

import sympy
from sympy.core.relational import Relational

from flashgen.spec.language.float_functions import FUNCTIONS
from flashgen.spec.language.float_operations import (
    FloatPower,
    FloatProduct,
    FloatQuotient,
    FloatSum,
)
from flashgen.spec.language.integer_limits import fits
from flashgen.spec.language.lets import Let, distinct, elements_of, lets_of, parts_of
from flashgen.spec.language.symbols import is_condition, is_int
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod, Maximum, Minimum, Select
from flashgen.spec.language.tensor_elements import Element, TensorRead


@dataclass(frozen=True)
class CodeBlock:
    """Straight-line code: a let may use the lets before it, results may use all lets.

    Let symbols are named t0, t1, ... and carry the kind of their expression: integer, real, or no
    assumption for a condition. ``sources`` has the expression of each let without other lets.
    """

    lets: tuple[tuple[sympy.Symbol, sympy.Basic], ...]
    results: tuple[sympy.Basic, ...]
    sources: tuple[sympy.Basic, ...] = ()

    def stages(self) -> list[tuple[list[sympy.Symbol], sympy.Basic]]:
        """Each result with the lets that it needs and no earlier result needs, in their order."""
        values, placed = dict(self.lets), set[sympy.Symbol]()
        stages = []
        for result in self.results:
            needed, waiting = set[sympy.Symbol](), [result]
            while waiting:
                new = (waiting.pop().free_symbols & values.keys()) - needed - placed
                needed |= new
                waiting += [values[symbol] for symbol in new]
            placed |= needed
            stages.append(([symbol for symbol in values if symbol in needed], result))
        return stages


@lru_cache(maxsize=64)
def share(
    *results: sympy.Basic, name_costly: bool = False, named: Set[sympy.Basic] = frozenset()
) -> CodeBlock:
    """Name every computed subexpression that occurs more than once.

    Only equal subtrees share a name: regrouping sums and products would change rounding. Names are
    in the order of first use, so the same expressions always give the same names.

    Args:
        name_costly: also name elements of tensors and divisions that occur once, and tests for
            multiples in place of their divisions. The compiler can then share them among the scores
            of a row or column, which it cannot do behind ``&&``.
        named: further expressions that have a name even if they occur once.
    """
    parts = list(distinct(*parts_of(*results)))
    uses = Counter(arg for part in parts for arg in part.args if isinstance(arg, FloorMod))
    tests = {part for part in parts if is_divisibility(part) and uses[part.args[0]] == 1}
    tested = {test.args[0] for test in tests}

    def is_named(expr: sympy.Basic, count: int) -> bool:
        costly = name_costly and (isinstance(expr, Element | FloorDiv | FloorMod) or expr in tests)
        return expr in named or (expr not in tested and (count > 1 or costly))

    return _Sharing(results, is_named).block()


def is_divisibility(expr: sympy.Basic) -> bool:
    """True for a test whether the remainder of integers is 0, or not 0.

    The test takes less time than the remainder, if nothing else needs the remainder.
    """
    return (
        isinstance(expr, sympy.Eq | sympy.Ne)
        and isinstance(expr.lhs, FloorMod)
        and expr.rhs == 0
        and is_int(expr.lhs)
    )


def share_evaluated(*results: sympy.Basic, first_let: int = 0) -> CodeBlock:
    """Name subexpressions so that no result needs more divisions or reads than it had.

    A division or an element of a tensor is named where the result that first uses it computes it
    whatever its conditions are: neither behind an ``and`` or ``or`` nor in a branch of a choice.
    Code that computes the results one by one, each after the names that it needs, therefore
    divides by no number that a condition guards, and may stop after any of them.

    For readability, divisions, elements, choices and clamped values have names even if they occur
    once.

    Args:
        first_let: number of the first name, for a block inside another that has names too.
    """

    def is_named(expr: sympy.Basic, count: int) -> bool:
        return _deserves_a_name(expr) or (count > 1 and not _is_offset(expr))

    return _Sharing(results, is_named, guarded=True, first_let=first_let).block()


class _Sharing:
    """The names of one block, found in the order of first use.

    Args:
        is_named: whether an expression with this number of occurrences has a name.
        guarded: name costly expressions only where they are always evaluated.
    """

    def __init__(
        self,
        results: tuple[sympy.Basic, ...],
        is_named: Callable[[sympy.Basic, int], bool],
        guarded: bool = False,
        first_let: int = 0,
    ) -> None:
        self.results = results
        self.is_named = is_named
        self.guarded = guarded
        self.first_let = first_let
        self.counts: Counter[sympy.Basic] = Counter()
        self.names: dict[sympy.Basic, sympy.Symbol] = {}
        self.same: dict[sympy.Basic, sympy.Symbol] = {}  # Lets whose value has a name already
        self.lets: list[tuple[sympy.Symbol, sympy.Basic]] = []
        self.inner = lets_of(*results)
        self.indices = {
            index
            for element in elements_of(*results)
            for index in element.indices
            if sum(1 for _ in sympy.preorder_traversal(index)) > _LONG_INDEX
        }

    def block(self) -> CodeBlock:
        for part in parts_of(*self.results):
            self._count(part)
        for let in self.inner:
            value = self._rebuilt(let.value, evaluated=True)
            if isinstance(value, sympy.Symbol):
                self.same[let] = value
            else:
                self._name(let, value)
        results = tuple(self._rebuilt(result, evaluated=True) for result in self.results)
        return CodeBlock(tuple(self.lets), results, tuple(self.names))

    def _count(self, expr: sympy.Basic) -> None:
        self.counts[expr] += 1
        if self.counts[expr] == 1:
            for arg in expr.args:
                self._count(arg)

    def _rebuilt(self, expr: sympy.Basic, evaluated: bool) -> sympy.Basic:
        if expr in self.names:
            return self.names[expr]
        if expr in self.same:
            return self.same[expr]
        if not expr.args:
            return expr
        flags = _evaluated_args(expr) if evaluated else [False] * len(expr.args)
        parts = zip(expr.args, flags, strict=True)
        new = _with_args(expr, [self._rebuilt(arg, flag) for arg, flag in parts])
        named = self.is_named(expr, self.counts[expr]) or (evaluated and expr in self.indices)
        if not (named and worth_a_name(expr)):
            return new
        if self.guarded and not evaluated and is_costly(new):
            return new
        return self._name(expr, new)

    def _name(self, expr: sympy.Basic, value: sympy.Basic) -> sympy.Symbol:
        symbol = _let_symbol(self.first_let + len(self.lets), expr)
        self.names[expr] = symbol
        self.lets.append((symbol, value))
        return symbol


_LONG_INDEX = 20
"""An index of a tensor with more parts than this has a name of its own."""

_COSTLY = (
    *(TensorRead, FloorDiv, FloorMod, sympy.Pow, FloatPower, FloatQuotient),
    *(record for record in FUNCTIONS.values() if record.is_costly),
)
"""Operations that code computes only on the paths that need them."""


def is_costly(expr: sympy.Basic) -> bool:
    """True if the expression contains a read of a tensor, a division or a slow function.

    A division of integers by a number or a scalar that is never 0 is a multiplication.
    """
    return any(
        isinstance(part, _COSTLY) and not _is_multiplication(part) for part in distinct(expr)
    )


def _is_multiplication(expr: sympy.Basic) -> bool:
    if not isinstance(expr, FloorDiv | FloorMod):
        return False
    divisor = expr.args[1]
    return is_int(expr) and bool(
        divisor.is_number or (isinstance(divisor, sympy.Symbol) and divisor.is_positive)
    )


def _evaluated_args(expr: sympy.Basic) -> list[bool]:
    """Which arguments of an expression are computed whenever it is."""
    if isinstance(expr, sympy.And | sympy.Or):
        return [False] * len(expr.args)  # their order may change as parts get names
    if isinstance(expr, Select):
        return [True, False, False]
    if isinstance(expr, sympy.Piecewise):
        return [index == 0 for index in range(len(expr.args))]
    if isinstance(expr, sympy.functions.elementary.piecewise.ExprCondPair):
        return [False, True]
    return [True] * len(expr.args)


def _deserves_a_name(expr: sympy.Basic) -> bool:
    """True for a division by a variable, an element, a choice and a value that is clamped."""
    if isinstance(expr, FloorDiv | FloorMod):
        return not expr.args[1].is_number
    if isinstance(expr, Minimum | Maximum):
        return any(isinstance(arg, Minimum | Maximum) for arg in expr.args)
    return isinstance(expr, TensorRead | Select | sympy.Piecewise)


def _is_offset(expr: sympy.Basic) -> bool:
    """True for a symbol with a number added to it or as its factor."""
    return (
        isinstance(expr, sympy.Add | sympy.Mul | FloatSum | FloatProduct)
        and len(expr.args) == 2
        and (expr.args[0].is_number and isinstance(expr.args[1], sympy.Symbol))
    )


def worth_a_name(expr: sympy.Basic) -> bool:
    """True for an expression that costs an instruction: no constant, negation or branch."""
    if expr.is_number if isinstance(expr, sympy.Expr) else not expr.free_symbols:
        return False
    if isinstance(expr, sympy.functions.elementary.piecewise.ExprCondPair):
        return False
    if isinstance(expr, sympy.Mul) and len(expr.args) == 2 and expr.args[0] == -1:
        return False
    return isinstance(expr, sympy.Expr) or is_condition(expr)


def _with_args(expr: sympy.Basic, args: list[sympy.Basic]) -> sympy.Basic:
    if tuple(args) == expr.args:
        return expr
    if isinstance(expr, sympy.Piecewise | Relational | Minimum | Maximum):
        return expr.func(*args, evaluate=False)
    return expr.func(*args)


def _let_symbol(number: int, expr: sympy.Basic) -> sympy.Symbol:
    name = f"t{number}"
    if is_condition(expr):
        return sympy.Symbol(name)
    if isinstance(expr, Let) and not (is_int(expr) and fits(expr)):
        return sympy.Symbol(name, real=True)  # kernels compute integers that overflow in floats
    return sympy.Symbol(name, integer=True) if is_int(expr) else sympy.Symbol(name, real=True)
