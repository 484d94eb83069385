"""Proof that the derivatives of the score function are correct, by independent rules.

The analysis differentiates with sympy and the ``fdiff`` methods of its functions. Here the chain
rule is applied node by node with the table below, which is independent of them. The two results are
then shown to be equal: by simplification, or else by evaluation at random points to 50 digits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import sympy

from flashgen.kernels.planner.proofs.certificate import Certificate, ProofStep
from flashgen.spec.analysis import Analysis
from flashgen.spec.language.float_functions import (
    Abs,
    Atan,
    Cos,
    Erf,
    Erfc,
    Exp,
    Expm1,
    Log,
    Log1p,
    Log2,
    Sigmoid,
    Sin,
    Tanh,
)
from flashgen.spec.language.float_operations import in_reals
from flashgen.spec.language.lets import elements_of, inlined, size_of
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import SCORE
from flashgen.spec.language.sympy_functions import (
    Floor,
    FloorDiv,
    FloorMod,
    Maximum,
    Minimum,
    Round,
)

POINTS = 32
DIGITS = 50

Derivative = Callable[[sympy.Expr], sympy.Expr]

# f'(x) of functions of one argument.
RULES: dict[type[sympy.Basic], Derivative] = {
    Exp: lambda x: Exp(x),
    Log: lambda x: 1 / x,
    Log2: lambda x: 1 / (x * sympy.log(2)),
    Tanh: lambda x: 1 - Tanh(x) ** 2,
    Sin: lambda x: Cos(x),
    Cos: lambda x: -Sin(x),
    Abs: lambda x: sympy.sign(x),
    Log1p: lambda x: 1 / (x + 1),
    Expm1: lambda x: Exp(x),
    Atan: lambda x: 1 / (x * x + 1),
    Erf: lambda x: 2 * Exp(-x * x) / sympy.sqrt(sympy.pi),
    Erfc: lambda x: -2 * Exp(-x * x) / sympy.sqrt(sympy.pi),
    Sigmoid: lambda x: Exp(-x) / (1 + Exp(-x)) ** 2,
}
STEPS = (Floor, Round, sympy.floor, sympy.ceiling, FloorDiv, sympy.sign)
"""Piecewise constant functions: their derivative is 0, as in torch."""


MOST_NODES = 500
"""Nodes of the largest score and derivative that are compared."""


def certify_derivatives(spec: AttentionSpec, analysis: Analysis) -> Certificate:
    """The proof for ds'/ds, and for ds'/dT of every learned element that the score reads."""
    score = analysis.score
    slopes = [(SCORE, score.derivative), *score.learned]
    steps = [step for variable, slope in slopes for step in _compared(spec.score, variable, slope)]
    return Certificate(
        "derivative",
        f"the derivatives that {spec.name}'s backward kernels use are those of score_mod",
        tuple(steps),
    )


def _compared(score: sympy.Expr, variable: sympy.Expr, slope: sympy.Expr) -> Iterator[ProofStep]:
    by = "score" if variable == SCORE else python_text(variable)
    if max(size_of(score), size_of(slope)) > MOST_NODES:
        yield ProofStep(
            f"d score_mod / d {by}: score_mod has too many operations to be proved", False
        )
        return
    score, slope = inlined(score), inlined(slope)
    # Elements of tensors are treated as independent numbers.
    names = {e: sympy.Symbol(f"x{i}", real=True) for i, e in enumerate(elements_of(score, slope))}
    x = names.get(variable, variable)
    by_chain_rule = _chain(in_reals(score).xreplace(names), x)
    stated = in_reals(slope).xreplace(names)
    yield ProofStep(
        f"d score_mod / d {by} = {python_text(slope)}, and by the chain rule, node by node,"
    )
    if by_chain_rule == stated or sympy.expand(by_chain_rule - stated) == 0:
        yield ProofStep("the same expression")
        return
    difference = _largest(by_chain_rule - stated)
    shown = python_text(by_chain_rule.xreplace({v: k for k, v in names.items()}))
    yield ProofStep(
        f"{shown}; equal to {DIGITS} digits "
        f"at {POINTS} random points, largest difference {sympy.Float(difference, 2)}",
        bool(difference < sympy.Float(10) ** (10 - DIGITS)),
    )


def _chain(expr: sympy.Expr, x: sympy.Expr) -> sympy.Expr:
    """d expr / dx by the sum, product, power and chain rules."""
    if expr == x:
        return sympy.S.One
    if x not in expr.free_symbols or isinstance(expr, STEPS):
        return sympy.S.Zero
    inner = [_chain(arg, x) for arg in expr.args if isinstance(arg, sympy.Expr)]
    if isinstance(expr, sympy.Add):
        return sympy.Add(*inner)
    if isinstance(expr, sympy.Mul):
        factors = expr.args
        return sympy.Add(
            *(sympy.Mul(*factors[:i], slope, *factors[i + 1 :]) for i, slope in enumerate(inner))
        )
    if isinstance(expr, sympy.Pow):
        base, exponent = expr.args
        if x not in exponent.free_symbols:
            return exponent * base ** (exponent - 1) * inner[0]
        return expr * (inner[1] * sympy.log(base) + exponent * inner[0] / base)
    if isinstance(expr, FloorMod):
        return inner[0] - FloorDiv(*expr.args) * inner[1]
    if isinstance(expr, Maximum | Minimum):
        return _slope_of_extremum(expr, inner)
    if isinstance(expr, sympy.Piecewise):
        # The derivative of each piece; jumps between pieces have none.
        return sympy.Piecewise(*((_chain(value, x), test) for value, test in expr.args))
    rule = RULES.get(expr.func)
    if rule is None:
        return sympy.nan  # no rule: the comparison fails and names the expression
    return rule(expr.args[0]) * inner[0]


def _slope_of_extremum(expr: sympy.Expr, slopes: list[sympy.Expr]) -> sympy.Expr:
    """The slope of an extremum whose arguments differ: the slope of the argument that it equals."""
    least = isinstance(expr, Minimum)
    total = sympy.S.Zero
    for i, (arg, slope) in enumerate(zip(expr.args, slopes, strict=True)):
        wins = sympy.And(
            *(
                (arg < other if least else arg > other)
                for j, other in enumerate(expr.args)
                if j != i
            )
        )
        total += sympy.Piecewise((slope, wins), (0, True))
    return total


def _largest(difference: sympy.Expr) -> sympy.Expr:
    """The largest value at random points; infinity where no point has a finite value."""
    chance = random.Random(0)
    symbols = sorted(difference.free_symbols, key=str)
    largest, seen = sympy.S.Zero, 0
    for _ in range(4 * POINTS):
        if seen == POINTS:
            break
        point = {symbol: _value(symbol, chance) for symbol in symbols}
        value = sympy.N(difference.xreplace(point), DIGITS)
        if not value.is_number or not value.is_finite:
            continue  # outside the domain of a logarithm or a root
        seen += 1
        largest = max(largest, abs(value))
    return largest if seen else sympy.oo


def _value(symbol: sympy.Symbol, chance: random.Random) -> sympy.Expr:
    if symbol.is_integer:
        return sympy.Integer(chance.randrange(0, 300))
    return sympy.Rational(chance.randrange(-4_000_000, 4_000_000), 1_000_003)
