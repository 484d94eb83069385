"""Proof that a plan's constraints hold, and its tiles cover the sequence, for every length."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import sympy

from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.formulas import Formula, counted, evaluate
from flashgen.kernels.planner.proofs.certificate import Certificate, ProofStep, vanishes
from flashgen.kernels.planner.quantities import QUANTITIES
from flashgen.shared.dtypes import POSITION_LIMIT

SYMBOLS = {name: sympy.Symbol(name, positive=True) for name in QUANTITIES}
_NAMES: dict[str, Any] = {
    **SYMBOLS,
    "max": sympy.Max,
    "min": sympy.Min,
    "ceil": sympy.ceiling,
    "floor": sympy.floor,
}


@functools.cache
def expression(formula: Formula) -> sympy.Expr:
    """The formula as a sympy expression over `SYMBOLS`."""
    return sympy.sympify(formula.text, locals=_NAMES)


def certify_constraints(plan: Plan) -> Certificate:
    """The proof for the shared memory and registers of one kernel, and the tiles of its launch."""
    return Certificate(
        plan.kernel,
        f"the {plan.kernel} kernel of {plan.arch} fits, and covers a sequence, whatever its length",
        (*_limits(plan), *_tiles(plan)),
    )


def _limits(plan: Plan) -> Iterator[ProofStep]:
    for line in plan.derivation:
        if line.limit is None:
            continue
        formula = Formula(line.name, line.formula)
        depends = expression(formula).free_symbols - set(SYMBOLS.values())
        unit = f" {line.unit}" if line.unit else ""
        yield ProofStep(
            f"{line.name} = {line.substituted} = {counted(line.value)}{unit} <= "
            f"{line.limit_name} = {counted(line.limit)}{unit}",
            bool(sympy.Le(sympy.sympify(evaluate(line.substituted)), sympy.sympify(line.limit))),
        )
        yield ProofStep(
            f"{line.name} = {line.formula} has no length in it: it is the same for all N",
            not depends,
        )


def _tiles(plan: Plan) -> Iterator[ProofStep]:
    """For N = B a + r, every tile starts before N, and the last one ends at N or beyond."""
    for axis, block in (("seq_q", plan.block_q), ("seq_k", plan.block_k)):
        if not block:
            continue
        size = sympy.Integer(block)
        a, s = sympy.symbols("a s", integer=True, nonnegative=True)
        exact = sympy.simplify(sympy.ceiling(size * a / size) * size - size * a)
        yield ProofStep(
            f"{axis} = {block} a: ceil({axis} / {block}) {block} - {axis} = {exact}",
            bool(exact == 0),
        )
        # r = 1 + s with s from 0 to B - 2: ceil((B a + r) / B) = a + 1 because 0 < r / B < 1.
        over = (a + 1) * size - (size * a + 1 + s)
        yield ProofStep(
            f"{axis} = {block} a + r, 0 < r < {block}: (a + 1) {block} - {axis} = {block} - r, "
            "above 0 and below a whole tile: no row is left out, no tile is empty",
            vanishes(over - (size - 1 - s)),
        )
    tiles = POSITION_LIMIT // min(b for b in (plan.block_q, plan.block_k) if b) + 1
    yield ProofStep(
        f"lengths are at most {POSITION_LIMIT:,}: at most {tiles:,} tiles, below 2^31",
        tiles < 2**31 and POSITION_LIMIT < 2**31,
    )
