"""The score function as straight-line code: value, derivative, common subexpressions named once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import sympy

from ..expr import (
    SCORE,
    Element,
    FloorDiv,
    FloorMod,
    K,
    Q,
    TensorSymbol,
    elements_of,
    is_condition,
    is_int,
)


@dataclass(frozen=True)
class Block:
    """Straight-line code: each let may use the ones before it, the results may use all.

    Let symbols are named t0, t1, ... and carry the kind of their expression: integer, real, or no
    assumption for a condition.
    """

    lets: tuple[tuple[sympy.Symbol, sympy.Basic], ...]
    results: tuple[sympy.Basic, ...]


@dataclass(frozen=True)
class ScoreAnalysis:
    """What the kernels need of a score function.

    Attributes:
        identity: the score comes out as it went in.
        ignores_score: the result does not depend on the score, and the derivative is 0.
        derivative: ds'/dscore as one expression.
        value: computes s'.
        value_and_derivative: computes (s', ds'/dscore) with everything common to both shared.
        learned: each element of a learned tensor that the score reads, with ds'/d(element).
        partials: computes these derivatives, in this order.
    """

    identity: bool
    ignores_score: bool
    derivative: sympy.Expr
    value: Block
    value_and_derivative: Block
    learned: tuple[tuple[Element, sympy.Expr], ...]
    partials: Block


def analyse_score(
    score: sympy.Expr, learned_tensors: Collection[TensorSymbol] = ()
) -> ScoreAnalysis:
    """Differentiate and share; ``learned_tensors`` are those whose gradients are wanted."""
    slope = derivative(score)
    learned = tuple(
        (element, derivative(score, element))
        for element in elements_of(score)
        if element.tensor in learned_tensors
    )
    return ScoreAnalysis(
        identity=score == SCORE,
        ignores_score=SCORE not in score.free_symbols,
        derivative=slope,
        value=share(score),
        value_and_derivative=share(score, slope),
        learned=learned,
        partials=share(*(partial for _, partial in learned)),
    )


def derivative(score: sympy.Expr, by: sympy.Expr = SCORE) -> sympy.Expr:
    """ds'/dscore, or by one element that the score reads, at every place where it reads it.

    Where the score function jumps or bends it is that of torch's autograd.
    """
    if isinstance(by, sympy.Symbol):
        return _in_and_or(_differentiated(score, by))
    stand_in = sympy.Dummy("element", real=True)
    found = _differentiated(score.xreplace({by: stand_in}), stand_in)
    return _in_and_or(found.xreplace({stand_in: by}))


class _Power(sympy.Function):  # type: ignore[misc]
    """``a ** n``, with a derivative that is not divided by ``a``, and 0 where torch has 0."""

    nargs = (2,)

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        a, n = self.args
        if argindex == 1:
            return sympy.Piecewise((0, sympy.Eq(n, 0)), (n * a ** (n - 1), True))
        none = sympy.And(sympy.Eq(a, 0), n >= 0)
        return sympy.Piecewise((0, none), (a**n * sympy.log(a), True))


def _differentiated(score: sympy.Expr, by: sympy.Symbol) -> sympy.Expr:
    """sympy's derivative, but for powers whose exponent is not known: it has n a^n / a of a^n."""

    def unknown(expr: sympy.Basic) -> bool:
        return isinstance(expr, sympy.Pow) and not expr.exp.is_number and expr.has(by)

    found = sympy.diff(score.replace(unknown, lambda power: _Power(*power.args)), by)
    return found.replace(_Power, sympy.Pow)


def _in_and_or(expr: sympy.Expr) -> sympy.Expr:
    """Without sympy's if-then-else of conditions, which it makes of a choice that is compared."""
    while True:
        inner = [ite for ite in expr.atoms(sympy.ITE) if not ite.args[0].has(sympy.ITE)]
        if not inner:
            return expr
        expr = expr.xreplace(
            {
                ite: sympy.Or(
                    sympy.And(ite.args[0], ite.args[1]),
                    sympy.And(sympy.Not(ite.args[0]), ite.args[2]),
                )
                for ite in inner
            }
        )


def share(*results: sympy.Basic, name_costly: bool = False) -> Block:
    """Name every computed subexpression that occurs more than once.

    Equal subtrees only: regrouping sums and products would change rounding. The order is that of
    first use, so the same expressions always give the same names.

    Args:
        name_costly: name elements of tensors and divisions too where they occur once. Code that
            computes them on every path is shared by neighbouring scores of a row or a column;
            behind an ``&&`` each would compute them for itself.
    """
    counts: Counter[sympy.Basic] = Counter()
    for result in results:
        _count(result, counts)
    names: dict[sympy.Basic, sympy.Symbol] = {}
    lets: list[tuple[sympy.Symbol, sympy.Basic]] = []

    def rebuilt(expr: sympy.Basic) -> sympy.Basic:
        if expr in names:
            return names[expr]
        if not expr.args:
            return expr
        new = _with_args(expr, [rebuilt(arg) for arg in expr.args])
        if (counts[expr] > 1 or (name_costly and _is_costly(expr))) and _worth_a_name(expr):
            symbol = _let_symbol(len(lets), expr)
            names[expr] = symbol
            lets.append((symbol, new))
            return symbol
        return new

    return Block(results=tuple(rebuilt(result) for result in results), lets=tuple(lets))


def _count(expr: sympy.Basic, counts: Counter[sympy.Basic]) -> None:
    counts[expr] += 1
    if counts[expr] == 1:
        for arg in expr.args:
            _count(arg, counts)


def _is_costly(expr: sympy.Basic) -> bool:
    return isinstance(expr, Element | FloorDiv | FloorMod)


def _worth_a_name(expr: sympy.Basic) -> bool:
    """True for what costs an instruction: not a constant, a negation or a branch of a choice."""
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
    if isinstance(expr, sympy.Piecewise):
        return expr.func(*args, evaluate=False)
    return expr.func(*args)


def _let_symbol(number: int, expr: sympy.Basic) -> sympy.Symbol:
    name = f"t{number}"
    if is_condition(expr):
        return sympy.Symbol(name)
    return sympy.Symbol(name, integer=True) if is_int(expr) else sympy.Symbol(name, real=True)


def kind_of_sum(element: Element) -> str:
    """What has an element of a tensor in common, by the positions in its indices.

    Returns:
        "block": all scores of a block; "row": those of a query; "column": those of a key;
        "element": each score may have another.
    """
    uses = {symbol for index in element.indices for symbol in index.free_symbols}
    if SCORE in uses or {Q, K} <= uses:
        return "element"
    return "row" if Q in uses else "column" if K in uses else "block"
