"""Evaluates sympy expressions on torch tensors, node by node.

This second implementation of the semantics of specs is independent of the compiler: it has no
analysis, simplification or generated code. Expressions of integers are computed in int64, all
others in ``real`` (float64 for the oracle).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce

import numpy as np
import sympy
import torch

from flashgen.shared.dropout import philox
from flashgen.shared.errors import SpecError
from flashgen.shared.random_numbers import counter
from flashgen.spec.language import bit_functions as bits
from flashgen.spec.language import float_functions as functions
from flashgen.spec.language import float_operations as floats
from flashgen.spec.language.comparisons import FLOAT_RELATIONS, FloatRelation
from flashgen.spec.language.lets import lets_of
from flashgen.spec.language.symbols import SCORE, is_condition
from flashgen.spec.language.sympy_functions import (
    Floor,
    FloorDiv,
    FloorMod,
    Maximum,
    Minimum,
    Round,
)
from flashgen.spec.language.tensor_elements import Element

Tensor = torch.Tensor

# An integer product that could overflow int64 is computed in `real` instead, as in kernels.
_LARGEST_INTEGER = 2.0**62


def evaluate(
    expr: sympy.Basic,
    values: Mapping[sympy.Symbol, Tensor],
    real: torch.dtype = torch.float64,
    decides: torch.dtype | None = None,
) -> Tensor:
    """The value of ``expr`` with ``values`` for its symbols, with torch's broadcasting.

    Args:
        expr: a number or a condition from tracing a mod.
        values: int64, ``real`` or bool tensors for every free symbol; for the symbol of a captured
            tensor that tensor itself, of any dtype. Values can also be given for subexpressions of
            ``expr``.
        real: dtype of all computations except integer computations.
        decides: dtype in which the sides of comparisons and the arguments of functions with jumps
            are computed where they do not depend on the score; ``real`` if None. A mask is what
            float32 makes it, also in float64.

    Returns:
        int64 or ``real`` for numbers, bool for conditions; in the shape that the symbols
        of ``expr`` broadcast to, which can be smaller than that of all ``values``.

    Raises:
        SpecError: a symbol has no value, or mods cannot contain a function of ``expr``.
    """
    return _Evaluator(values, real, decides or real).value_with_lets(expr)


class _Evaluator:
    def __init__(
        self, values: Mapping[sympy.Symbol, Tensor], real: torch.dtype, decides: torch.dtype
    ) -> None:
        self.real = real
        self.deciding = self if decides == real else _Evaluator(values, decides, decides)
        self.device = next(iter(values.values())).device if values else torch.device("cpu")
        self.computed: dict[sympy.Basic, Tensor] = dict(values)

    def value_with_lets(self, expr: sympy.Basic) -> Tensor:
        """The value of an expression with Lets."""
        for let in lets_of(expr):
            if let not in self.computed:
                self.computed[let] = self.value(let.value)
        return self.value(expr)

    def value(self, expr: sympy.Basic) -> Tensor:
        """The value of ``expr``; shared subexpressions are computed once."""
        if expr not in self.computed:
            self.computed[expr] = self._compute(expr)
        return self.computed[expr]

    def number(self, expr: sympy.Basic) -> Tensor:
        """The value of ``expr`` in ``real``."""
        return self.value(expr).to(self.real)

    def alike(self, *exprs: sympy.Basic) -> list[Tensor]:
        """The values of ``exprs``, in int64 if all are integers, otherwise in ``real``."""
        return self.unify([self.value(expr) for expr in exprs])

    def unify(self, tensors: list[Tensor]) -> list[Tensor]:
        if all(tensor.dtype == torch.int64 for tensor in tensors):
            return tensors
        return [tensor.to(self.real) for tensor in tensors]

    def _compute(self, expr: sympy.Basic) -> Tensor:
        if expr is sympy.true or expr is sympy.false:
            return torch.tensor(bool(expr), device=self.device)
        if expr.is_Integer and abs(int(expr)) < _LARGEST_INTEGER:
            return torch.tensor(int(expr), device=self.device)
        if expr.is_number and not expr.has(sympy.Function) and not is_condition(expr):
            return torch.tensor(float(expr), dtype=self.real, device=self.device)
        rule = _RULES.get(expr.func)
        if rule is None:
            raise SpecError(
                "the reference cannot evaluate a part of this spec",
                where="flashgen.reference",
                numbers=f"{expr.func.__name__} in {expr}; given: "
                + ", ".join(sorted(str(symbol) for symbol in self.computed if symbol.is_Symbol)),
                way_out="the functions of flashgen, and a value for every scalar",
            )
        decided = SCORE not in expr.free_symbols and isinstance(expr, _DECIDED)
        if decided and self.deciding is not self:
            return self.deciding.value_with_lets(expr)
        return rule(self, expr)


def _sum(run: _Evaluator, expr: sympy.Basic) -> Tensor:
    return reduce(torch.add, run.alike(*expr.args))


def _product(run: _Evaluator, expr: sympy.Basic) -> Tensor:
    return _multiply(run, [run.value(arg) for arg in expr.args])


def _multiply(run: _Evaluator, factors: list[Tensor]) -> Tensor:
    factors = run.unify(factors)
    if factors[0].dtype == torch.int64:
        bound = math.prod(float(x.abs().max()) if x.numel() else 0.0 for x in factors)
        if bound > _LARGEST_INTEGER:
            factors = [factor.to(run.real) for factor in factors]
    return reduce(torch.mul, factors)


def _power(run: _Evaluator, expr: sympy.Basic) -> Tensor:
    base, exponent = expr.args
    return (
        _multiply(run, [run.value(base)] * int(exponent)) if exponent else run.number(exponent) + 1
    )


def _float_power(run: _Evaluator, expr: sympy.Basic) -> Tensor:
    base, exponent = expr.args
    if exponent.is_number:
        return torch.pow(run.number(base), float(exponent))
    return torch.pow(run.number(base), run.number(exponent))


def _element(run: _Evaluator, expr: Element) -> Tensor:
    tensor, *indices = (run.value(arg) for arg in expr.args)
    inside = tuple(_inside(index, size) for index, size in zip(indices, tensor.shape, strict=True))
    return tensor[inside].to(run.real if tensor.is_floating_point() else torch.int64)


def _inside(index: Tensor, size: int) -> Tensor:
    """The nearest index of a dimension; 0 for NaN."""
    nearest = index.detach().nan_to_num(0.0) if index.is_floating_point() else index
    return nearest.clamp(0, size - 1).to(torch.int64)


def _floor_div(run: _Evaluator, expr: sympy.Basic) -> Tensor:
    a, b = run.alike(*expr.args)
    if b.dtype != torch.int64:
        if expr.args[1].is_Rational:  # as float32 holds it: 0.5 // 0.01 is 50 there
            b = b.to(torch.float32).to(b.dtype)
        return torch.floor_divide(a.detach(), b.detach())  # its derivative is 0
    return _or_zero(torch.floor_divide(a, _divisor(b)), b)


def _floor_mod(run: _Evaluator, expr: sympy.Basic) -> Tensor:
    a, b = run.alike(*expr.args)
    if b.dtype != torch.int64:
        return torch.remainder(a, b)
    return _or_zero(torch.remainder(a, _divisor(b)), b)


def _divisor(b: Tensor) -> Tensor:
    return torch.where(b == 0, torch.ones_like(b), b)


def _or_zero(result: Tensor, b: Tensor) -> Tensor:
    """A quotient or a remainder of integers, which is 0 where the divisor is 0."""
    return torch.where(b == 0, torch.zeros_like(result), result)


def _choice(run: _Evaluator, expr: sympy.Basic) -> Tensor:
    values = run.alike(*(value for value, _ in expr.args))
    chosen = values[-1]
    if expr.args[-1][1] is not sympy.true:
        # Where no branch applies the value is undefined, which NaN shows in the result.
        chosen = torch.full_like(chosen, math.nan, dtype=run.real)
        values = [value.to(run.real) for value in values]
    for value, (_, condition) in reversed(list(zip(values, expr.args, strict=True))):
        chosen = torch.where(run.value(condition), value, chosen)
    return chosen


def _relation(compare: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    return lambda run, expr: compare(*run.alike(*expr.args))


def _logic(combine: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    return lambda run, expr: reduce(combine, (run.value(arg) for arg in expr.args))


def _extremum(combine: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    return lambda run, expr: reduce(combine, run.alike(*expr.args))


def _popcount(x: Tensor) -> Tensor:
    return torch.stack([x >> bit & 1 for bit in range(32)]).sum(0)


def _random_bits(low: Tensor, high: Tensor, *indices: Tensor) -> Tensor:
    """By the counters of `flashgen.shared.random_numbers`, with dropout's generator."""
    *_, q, k = indices
    words = np.asarray(
        philox(
            tuple(word.cpu().numpy() for word in counter(*indices)),
            (int(low) & 0xFFFFFFFF, int(high) & 0xFFFFFFFF),
        )
    )
    word_index = (2 * (q & 1) + (k & 1)).cpu().numpy()
    word_index = np.broadcast_to(word_index, words.shape[:-1])
    chosen = np.take_along_axis(words, word_index[..., None], axis=-1)[..., 0]
    return torch.from_numpy(chosen.astype(np.int64) >> 8).to(q.device)


def _integers(function: Callable[..., Tensor]) -> Rule:
    return lambda run, expr: function(*map(run.value, expr.args))


def _real(function: Callable[..., Tensor]) -> Rule:
    return lambda run, expr: function(*map(run.number, expr.args))


def _same_kind(function: Callable[[Tensor], Tensor]) -> Rule:
    return lambda run, expr: function(run.value(expr.args[0]))


def _if_then_else(run: _Evaluator, expr: sympy.Basic) -> Tensor:
    condition, yes, no = (run.value(arg) for arg in expr.args)
    return torch.where(condition, yes, no)


_DECIDED = (FloatRelation, Floor, Round, FloorDiv, FloorMod, Element)
"""Functions that jump: rounding an argument can change the result by more than the rounding."""

Rule = Callable[[_Evaluator, sympy.Basic], Tensor]

_RULES: dict[type[sympy.Basic], Rule] = {
    sympy.Add: _sum,
    sympy.Mul: _product,
    sympy.Pow: _power,
    Element: _element,
    floats.AsFloat: lambda run, expr: run.number(expr.args[0]),
    floats.FloatSum: _real(torch.add),
    floats.FloatProduct: _real(torch.mul),
    floats.FloatQuotient: _real(torch.div),
    floats.FloatPower: _float_power,
    FloorDiv: _floor_div,
    FloorMod: _floor_mod,
    sympy.Piecewise: _choice,
    sympy.ITE: _if_then_else,
    Minimum: _extremum(torch.minimum),
    Maximum: _extremum(torch.maximum),
    sympy.Min: _extremum(torch.minimum),
    sympy.Max: _extremum(torch.maximum),
    functions.Abs: _real(torch.abs),
    sympy.Abs: _same_kind(torch.abs),
    sympy.sign: _same_kind(torch.sign),
    Floor: _real(torch.floor),
    sympy.floor: _real(torch.floor),
    sympy.ceiling: _real(torch.ceil),
    functions.Log2: _real(torch.log2),
    functions.Sigmoid: _real(torch.sigmoid),
    Round: _real(torch.round),
    functions.Erf: _real(torch.erf),
    functions.Erfc: _real(torch.erfc),
    functions.Log1p: _real(torch.log1p),
    functions.Expm1: _real(torch.expm1),
    functions.Atan: _real(torch.atan),
    functions.Atan2: _real(torch.atan2),
    bits.BitAnd: _integers(torch.bitwise_and),
    bits.BitOr: _integers(torch.bitwise_or),
    bits.BitXor: _integers(torch.bitwise_xor),
    bits.ShiftLeft: _integers(torch.bitwise_left_shift),
    bits.ShiftRight: _integers(torch.bitwise_right_shift),
    bits.Popcount: _integers(_popcount),
    bits.RandomBits: _integers(_random_bits),
    functions.Exp: _real(torch.exp),
    functions.Log: _real(torch.log),
    functions.Tanh: _real(torch.tanh),
    functions.Sin: _real(torch.sin),
    functions.Cos: _real(torch.cos),
    sympy.Eq: _relation(torch.eq),
    sympy.Ne: _relation(torch.ne),
    sympy.Lt: _relation(torch.lt),
    sympy.Le: _relation(torch.le),
    sympy.Gt: _relation(torch.gt),
    sympy.Ge: _relation(torch.ge),
    sympy.And: _logic(torch.logical_and),
    sympy.Or: _logic(torch.logical_or),
    sympy.Xor: _logic(torch.logical_xor),
    sympy.Not: _same_kind(torch.logical_not),
}
_RULES |= {of_floats: _RULES[kind] for kind, of_floats in FLOAT_RELATIONS.items()}
