"""Analysis of score functions: value and derivatives as straight-line code."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import sympy

from flashgen.spec.analysis.invariants import Level, LeveledCode, leveled
from flashgen.spec.language.comparisons import relation
from flashgen.spec.language.float_functions import Atan2
from flashgen.spec.language.float_operations import FloatPower
from flashgen.spec.language.lets import (
    Let,
    contains,
    direct_lets,
    distinct,
    elements_of,
    lets_of,
    named,
    replaced,
    substituted,
)
from flashgen.spec.language.symbols import SCORE, K, Q, is_condition
from flashgen.spec.language.sympy_functions import Maximum, Minimum, unless
from flashgen.spec.language.tensor_elements import Element, TensorSymbol


@dataclass(frozen=True)
class ScoreAnalysis:
    """The value and derivatives of a score function, as kernels compute them.

    Attributes:
        identity: whether the function returns the score unchanged.
        ignores_score: whether the result does not depend on the score, so that the derivative is 0.
        derivative: ds'/dscore as one expression.
        value: code for s'.
        value_and_derivative: code for (s', ds'/dscore), with common subexpressions shared.
        learned: each element of a learned tensor that the function reads, with ds'/d(element).
        partials: code for these derivatives, in the same order. Kernels add them along diagonals of
            a tile and keep no values of keys for them.
    """

    identity: bool
    ignores_score: bool
    derivative: sympy.Expr
    value: LeveledCode
    value_and_derivative: LeveledCode
    learned: tuple[tuple[Element, sympy.Expr], ...]
    partials: LeveledCode


def analyse_score(
    score: sympy.Expr, learned_tensors: Collection[TensorSymbol] = ()
) -> ScoreAnalysis:
    """The analysis of a score function; ``learned_tensors`` need gradients."""
    return _analysis(score, frozenset(learned_tensors))


@lru_cache(maxsize=64)
def _analysis(score: sympy.Expr, learned_tensors: frozenset[TensorSymbol]) -> ScoreAnalysis:
    slope = derivative(score)
    read = [element for element in elements_of(score) if element.tensor in learned_tensors]
    learned = tuple(zip(read, derivatives(score, read), strict=True))
    return ScoreAnalysis(
        identity=score == SCORE,
        ignores_score=SCORE not in score.free_symbols,
        derivative=slope,
        value=leveled(score),
        value_and_derivative=leveled(score, slope),
        learned=learned,
        partials=leveled(*(partial for _, partial in learned), levels=(Level.HEAD, Level.QUERY)),
    )


def derivative(score: sympy.Expr, by: sympy.Expr = SCORE) -> sympy.Expr:
    """ds'/dscore, or the derivative by one element of a tensor, over all its occurrences.

    Where the score function is not differentiable, it is the derivative of torch's autograd.
    """
    if isinstance(by, sympy.Symbol):
        for let in lets_of(score):
            if by in let.free_symbols and by not in let.slopes and not is_condition(let):
                let.slopes[by] = named(_in_and_or(_differentiated(let.value, by)))
        return named(_in_and_or(_differentiated(score, by)))
    (slope,) = derivatives(score, [by])
    return slope


def derivatives(score: sympy.Expr, elements: Sequence[Element]) -> list[sympy.Expr]:
    """The derivatives by several elements, each as from `derivative`.

    A large expression is differentiated in reverse mode: by each part, from the last one to the
    first, then by the elements in each part. The time does not depend on the number of elements.
    """
    tensors = {element.tensor for element in elements}
    parts: list[Let | None] = [None, *reversed(lets_of(score))] if elements else []
    terms: dict[sympy.Expr | None, list[sympy.Expr]] = {None: [sympy.S.One]}
    for part in parts:
        if part in terms:
            outer = named(sympy.Add(*terms[part]))
            value = score if part is None else part.value
            read = [element for element in elements if value.has(element)]
            variables: list[sympy.Expr] = [*direct_lets(value), *read]
            for inner in variables:
                if not (is_condition(inner) or tensors.isdisjoint(inner.free_symbols)):
                    terms.setdefault(inner, []).append(_chained(outer, _by_part(value, inner)))
    return [named(sympy.Add(*terms.get(element, ()))) for element in elements]


def _by_part(value: sympy.Expr, part: sympy.Expr) -> sympy.Expr:
    """The derivative by a Let or an element, with all other parts constant."""
    stand_in = sympy.Symbol(".part", real=True)  # no scalar has this name
    slope = _differentiated(replaced(value, {part: stand_in}), stand_in)
    return _in_and_or(substituted(slope, {stand_in: part}))


def _chained(outer: sympy.Expr, inner: sympy.Expr) -> sympy.Expr:
    """The product of two derivatives; 0 where a choice ignores the part, whatever the other is.

    `sympy_functions` has the rule of an expression that is no program of parts. Here values are
    compared: the choices are behind the names of parts, and any slope may be infinite where a
    choice ignores it, because it overflows.
    """
    chosen = contains(outer, *_CHOICES) or contains(inner, *_CHOICES)
    if outer.is_number or inner.is_number or not chosen:
        return outer * inner
    # Of names, because sympy multiplies out the choices of two sides that it compares.
    outer, inner = (Let(slope) if slope.args else slope for slope in (outer, inner))
    none = sympy.Or(*(relation(sympy.Eq, slope, sympy.S.Zero) for slope in (outer, inner)))
    return unless(none, outer * inner)


_CHOICES = (sympy.Piecewise, Minimum, Maximum)


def _differentiated(score: sympy.Expr, by: sympy.Symbol) -> sympy.Expr:
    # Conditions are hidden behind names, because sympy would rewrite them.
    choices = [part for part in distinct(score) if isinstance(part, sympy.Piecewise)]
    names = {c: Let(c) for choice in choices for _, c in choice.args if c.args}
    # So are signs, which are constant between their steps: sympy would add a Dirac delta at 0.
    for sign in (part for part in distinct(score) if isinstance(part, sympy.sign)):
        names[sign] = Let(sign)
        names[sign].slopes[by] = sympy.S.Zero
    hidden, sides = _with_named_sides(replaced(score, names), by)
    slope = _without_idle_shares(sympy.diff(hidden, by))
    values: dict[sympy.Basic, sympy.Basic] = {let: c for c, let in names.items()}
    for let in sides:
        value = replaced(let.value, values)
        if value != let.value:
            values[let] = Let(value)
    return replaced(slope, values)


def _without_idle_shares(slope: sympy.Expr) -> sympy.Expr:
    """The slope without the derivatives of extrema with 0 that are multiplied by the extremum.

    Where such a derivative is not 1, the extremum is 0 or NaN, and so is the product.
    """
    for product in distinct(slope):
        if not isinstance(product, sympy.Mul):
            continue
        powers = (factor.as_base_exp() for factor in product.args)
        bases = {base for base, exponent in powers if exponent.is_positive}
        shares = {
            extremum.fdiff(index)
            for extremum in bases
            if isinstance(extremum, Minimum | Maximum) and sympy.S.Zero in extremum.args
            for index, arg in enumerate(extremum.args, 1)
            if arg != 0 and len(extremum.args) == 2
        }
        if shares.intersection(product.args):
            rest = (factor for factor in product.args if factor not in shares)
            slope = replaced(slope, {product: sympy.Mul(*rest)})
    return slope


def _with_named_sides(expr: sympy.Expr, by: sympy.Symbol) -> tuple[sympy.Expr, list[Let]]:
    """The expression with a Let, and its derivative, for each choice that a derivative compares.

    sympy would fold the choices in a condition, and lose their cases.

    Returns:
        The expression, and these Lets, inner ones first.
    """
    lets: list[Let] = []

    def with_names(function: sympy.Expr) -> sympy.Expr:
        sides = []
        for side in function.args:
            if side.has(sympy.Piecewise):
                slope = sympy.diff(side, by)
                side = Let(side)
                side.slopes[by] = slope
                lets.append(side)
            sides.append(side)
        return function.func(*sides, evaluate=False)

    return expr.replace(lambda part: isinstance(part, _COMPARED), with_names), lets


_COMPARED = (Minimum, Maximum, Atan2, FloatPower)
"""Functions whose derivatives depend on comparisons of their arguments."""


def _in_and_or(expr: sympy.Expr) -> sympy.Expr:
    """The expression without ITE, which sympy makes of a choice inside a comparison."""
    while True:
        ites = [part for part in distinct(expr) if isinstance(part, sympy.ITE)]
        inner = [ite for ite in ites if not ite.args[0].has(sympy.ITE)]
        if not inner:
            return expr
        expr = replaced(
            expr,
            {
                ite: sympy.Or(
                    sympy.And(ite.args[0], ite.args[1]),
                    sympy.And(sympy.Not(ite.args[0]), ite.args[2]),
                )
                for ite in inner
            },
        )


def kind_of_sum(element: Element) -> str:
    """Which scores share an element of a tensor, by the positions in its indices.

    Returns:
        "block": all scores of a thread block; "row": the scores of a query; "column": the scores of
        a key; "element": each score may read another element.
    """
    uses = {symbol for index in element.indices for symbol in index.free_symbols}
    if SCORE in uses or {Q, K} <= uses:
        return "element"
    return "row" if Q in uses else "column" if K in uses else "block"
