"""Masks and scores as straight-line programs on torch tensors.

An expression is compiled once per spec to a list of torch calls. Values that do not depend on the
position or the score are computed once per call, all others once per tile. Integers are int64 and
exact; real numbers are computed in float32, or in float64 for float64 operands. A captured
tensor is a value like any other, bound once per call; its elements are read where they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import sympy
import torch

from flashgen.calls.cpu.elements import flat_index, inside, read
from flashgen.calls.cpu.program import VARYING, Program, ProgramStep
from flashgen.shared.errors import SpecError
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.language import float_operations as floats
from flashgen.spec.language.bit_functions import BitFunction
from flashgen.spec.language.comparisons import FLOAT_RELATIONS
from flashgen.spec.language.divisors import may_be_zero
from flashgen.spec.language.float_functions import FUNCTIONS, Abs
from flashgen.spec.language.integer_limits import fits
from flashgen.spec.language.lets import Let, lets_of
from flashgen.spec.language.symbols import is_condition, is_int
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


def compiled(
    exprs: tuple[sympy.Basic, ...], real: torch.dtype, elements: tuple[Element, ...] = ()
) -> Program:
    """The program that evaluates conditions and numbers, the latter in ``real``.

    Args:
        elements: elements of captured tensors, whose int64 flat indices (`flat_index`) follow the
            values of the expressions in the results.

    Raises:
        SpecError: an expression contains a function that mods cannot contain.
    """
    compiler = _Compiler(real)
    for let in lets_of(*exprs, *elements):
        compiler.define(let)
    results = tuple(
        compiler.condition(expr) if is_condition(expr) else compiler.real(expr) for expr in exprs
    )
    return compiler.program((*results, *map(compiler.element_index, elements)))


class _Compiler:
    """Each method returns the register that holds the value of its argument."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.constants: list[Tensor | None] = []
        self.varying: list[bool] = []
        self.inputs: dict[sympy.Symbol, int] = {}
        self.steps: list[ProgramStep] = []
        self.registers: dict[tuple[str, sympy.Basic], int] = {}

    def program(self, results: tuple[int, ...]) -> Program:
        once = tuple(step for step in self.steps if not self.varying[step.to])
        per_tile: list[ProgramStep] = []
        needed = set(results)
        for step in reversed([step for step in self.steps if self.varying[step.to]]):
            done = {arg for arg in step.args if arg not in needed and self.varying[arg]}
            needed |= done
            per_tile.append(ProgramStep(step.function, step.args, step.to, tuple(sorted(done))))
        return Program(self.inputs, tuple(self.constants), once, tuple(reversed(per_tile)), results)

    # Registers.

    def _register(self, varying: bool, constant: Tensor | None = None) -> int:
        self.constants.append(constant)
        self.varying.append(varying)
        return len(self.constants) - 1

    def _symbol(self, symbol: sympy.Symbol) -> int:
        if symbol not in self.inputs:
            self.inputs[symbol] = self._register(symbol in VARYING)
        return self.inputs[symbol]

    def _constant(self, value: bool | int | float, dtype: torch.dtype) -> int:
        return self._register(False, torch.tensor(value, dtype=dtype))

    def _step(self, function: Callable[..., Any], *args: int) -> int:
        to = self._register(any(self.varying[arg] for arg in args))
        self.steps.append(ProgramStep(function, args, to))
        return to

    def _fold(self, function: Callable[[Any, Any], Any], args: list[int]) -> int:
        return reduce(lambda a, b: self._step(function, a, b), args)

    # Kinds. Each expression is computed at most once in each.

    def _once(self, kind: str, expr: sympy.Basic, compute: Callable[[Any], int]) -> int:
        key = kind, expr
        if key not in self.registers:
            self.registers[key] = compute(expr)
        return self.registers[key]

    def condition(self, expr: sympy.Basic) -> int:
        return self._once("condition", expr, self._condition)

    def integer(self, expr: sympy.Expr) -> int:
        return self._once("integer", expr, self._integer)

    def real(self, expr: sympy.Expr) -> int:
        return self._once("real", expr, self._real)

    def define(self, let: Let) -> None:
        """Computes the part of a large expression, before its uses."""
        kind = (
            "condition" if is_condition(let) else "integer" if is_int(let) and fits(let) else "real"
        )
        self.registers[kind, let] = getattr(self, kind)(let.value)

    # Elements of captured tensors.

    def element_index(self, element: Element) -> int:
        return self._step(flat_index, self._symbol(element.tensor), *self._indices(element))

    def _element(self, element: Element, dtype: torch.dtype) -> int:
        tensor = self._symbol(element.tensor)
        return self._step(partial(read, dtype), tensor, *self._indices(element))

    def _indices(self, element: Element) -> list[int]:
        tensor = self._symbol(element.tensor)
        registers = []
        for axis, index in enumerate(element.indices):
            kind = self.integer if is_int(index) and fits(index) else self.real
            key = f"{element.tensor.name}, axis {axis}", index
            if key not in self.registers:
                self.registers[key] = self._step(partial(inside, axis), tensor, kind(index))
            registers.append(self.registers[key])
        return registers

    # Conditions.

    def _condition(self, expr: sympy.Basic) -> int:
        if isinstance(expr, sympy.Symbol):
            return self._symbol(expr)
        if expr in (sympy.true, sympy.false):
            return self._constant(bool(expr), torch.bool)
        if isinstance(expr, sympy.Not):
            return self._step(torch.logical_not, self.condition(expr.args[0]))
        if isinstance(expr, sympy.And | sympy.Or):
            join = torch.logical_and if isinstance(expr, sympy.And) else torch.logical_or
            return self._fold(join, [self.condition(arg) for arg in expr.args])
        compare = _RELATIONS.get(expr.func)
        if compare is None:
            raise _unknown(expr)
        left, right = expr.args
        if isinstance(left, Element) and left.tensor.dtype == "bool" and expr == sympy.Ne(left, 0):
            return self._element(left, torch.bool)
        kind = self.integer if is_int(left) and is_int(right) else self.real
        return self._step(compare, kind(left), kind(right))

    # Integers.

    def _integer(self, expr: sympy.Expr) -> int:
        if isinstance(expr, sympy.Symbol):
            return self._symbol(expr)
        if isinstance(expr, Element):
            return self._element(expr, torch.int64)
        if expr.is_Integer:
            return self._constant(int(expr), torch.int64)
        if isinstance(expr, sympy.Pow):
            return self._step(partial(torch.pow, exponent=int(expr.exp)), self.integer(expr.base))
        if isinstance(expr, sympy.Piecewise):
            return self._choice(expr, self.integer)
        if isinstance(expr, FloorDiv | FloorMod):
            return self._integer_division(expr)
        if isinstance(expr, BitFunction):
            return self._step(expr.compute, *map(self.integer, expr.args))
        return self._common(expr, self.integer)

    def _integer_division(self, expr: sympy.Expr) -> int:
        dividend, divisor = self.integer(expr.args[0]), expr.args[1]
        quotient = isinstance(expr, FloorDiv)
        if divisor.is_Integer and divisor > 0 and int(divisor).bit_count() == 1:
            # A shift and a bit mask round down, for negative numbers too.
            if quotient:
                shift = self._constant(int(divisor).bit_length() - 1, torch.int64)
                return self._step(torch.bitwise_right_shift, dividend, shift)
            return self._step(
                torch.bitwise_and, dividend, self._constant(int(divisor) - 1, torch.int64)
            )
        by, divide = self.integer(divisor), torch.floor_divide if quotient else torch.remainder
        if divisor.is_positive or not may_be_zero(divisor):
            return self._step(divide, dividend, by)
        return self._step(partial(_or_zero, divide), dividend, by)

    # Reals.

    def _real(self, expr: sympy.Expr) -> int:
        if expr.is_number and not is_condition(expr):
            number = math.inf if expr is sympy.zoo else float(evaluate(expr, {}))
            return self._constant(number, self.dtype)
        if is_int(expr) and (fits(expr) or isinstance(expr, BitFunction)):
            return self._step(partial(Tensor.to, dtype=self.dtype), self.integer(expr))
        if isinstance(expr, sympy.Symbol):
            return self._symbol(expr)
        if isinstance(expr, Element):
            return self._element(expr, self.dtype)
        if isinstance(expr, sympy.Mul):
            return self._real_product(expr)
        if isinstance(expr, sympy.Pow | floats.FloatPower):
            return self._real_power(*expr.args)
        if isinstance(expr, sympy.Piecewise):
            return self._choice(expr, self.real)
        if isinstance(expr, floats.AsFloat):
            return self.real(expr.args[0])
        function = _REAL_FUNCTIONS.get(expr.func)
        if function is not None:
            return self._step(function, *map(self.real, expr.args))
        return self._common(expr, self.real)

    def _real_product(self, expr: sympy.Mul) -> int:
        coefficient, product = expr.as_coeff_Mul()
        below = [f for f in sympy.Mul.make_args(product) if _is_reciprocal(f)]
        above = [f for f in sympy.Mul.make_args(product) if not _is_reciprocal(f)]
        if coefficient != 1 and not coefficient.is_Rational:
            above.append(coefficient)
            coefficient = sympy.S.One
        # The integers among the factors are multiplied exactly.
        whole = sympy.Mul(*(factor for factor in above if is_int(factor)))
        parts = [self.real(f) for f in above if not is_int(f)]
        if whole != 1:
            factors = [whole] if fits(whole) else sympy.Mul.make_args(whole)
            parts.insert(0, self._fold(torch.mul, list(map(self.real, factors))))
        if not parts:
            parts = [self._constant(1.0, self.dtype)]
        product = self._scaled(coefficient, self._fold(torch.mul, parts))
        if not below:
            return product
        divisor = sympy.Mul(*(factor.base**-factor.exp for factor in below))
        return self._step(torch.true_divide, product, self.real(divisor))

    def _scaled(self, factor: sympy.Rational, value: int) -> int:
        """A value times a fraction: rounded once for the numerator, once for the denominator."""
        if abs(factor.p) != 1:
            value = self._step(torch.mul, value, self._constant(float(factor.p), self.dtype))
        elif factor.p == -1:
            value = self._step(torch.neg, value)
        if factor.q == 1:
            return value
        return self._step(torch.true_divide, value, self._constant(float(factor.q), self.dtype))

    def _real_power(self, base: sympy.Expr, exponent: sympy.Expr) -> int:
        if exponent.is_number:
            power = partial(torch.pow, exponent=float(exponent))
            return self._step(power, self.real(base))
        if base == 2:
            return self._step(torch.exp2, self.real(exponent))
        return self._step(torch.pow, self.real(base), self.real(exponent))

    # Either kind.

    def _common(self, expr: sympy.Expr, kind: Callable[[sympy.Expr], int]) -> int:
        fold, single = _FOLDS.get(expr.func), _SAME_KIND.get(expr.func)
        if fold is not None:
            return self._fold(fold, [kind(arg) for arg in expr.args])
        if single is not None:
            return self._step(single, kind(expr.args[0]))
        raise _unknown(expr)

    def _choice(self, expr: sympy.Piecewise, kind: Callable[[sympy.Expr], int]) -> int:
        *branches, (last, otherwise) = expr.args
        if otherwise != sympy.true:
            raise _unknown(expr)
        chosen = kind(last)
        for value, condition in reversed(branches):
            chosen = self._step(torch.where, self.condition(condition), kind(value), chosen)
        return chosen


def _or_zero(divide: Callable[[Tensor, Tensor], Tensor], x: Tensor, by: Tensor) -> Tensor:
    """The quotient or remainder of integers; 0 where the divisor is 0."""
    return divide(x, torch.where(by == 0, 1, by)).masked_fill_(by == 0, 0)


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    """The remainder with the sign of b, in float64: exact, as that of kernels. In float32 PyTorch
    gives NaN where the quotient exceeds the largest float32, for contiguous tensors alone."""
    return torch.remainder(a.double(), b.double()).to(a.dtype)


def _is_reciprocal(factor: sympy.Expr) -> bool:
    return bool(factor.is_Pow and factor.exp.is_Rational and factor.exp < 0)


def _unknown(expr: sympy.Basic) -> SpecError:
    return SpecError(
        "the tiled algorithms cannot evaluate a part of this spec",
        where="flashgen.calls.cpu",
        numbers=f"{expr.func.__name__} in {expr}",
        way_out="the functions of flashgen",
    )


_RELATIONS: dict[type[sympy.Basic], Callable[..., Any]] = {
    kind: getattr(torch, of_floats.decide.__name__)
    for real, of_floats in FLOAT_RELATIONS.items()
    for kind in (real, of_floats)
}

_FOLDS: dict[type[sympy.Basic], Callable[[Any, Any], Any]] = {
    sympy.Add: torch.add,
    sympy.Mul: torch.mul,
    Minimum: torch.minimum,
    Maximum: torch.maximum,
    sympy.Min: torch.minimum,
    sympy.Max: torch.maximum,
}

_SAME_KIND: dict[type[sympy.Basic], Callable[..., Any]] = {
    sympy.Abs: torch.abs,
    sympy.sign: torch.sign,
}

_REAL_FUNCTIONS: dict[type[sympy.Basic], Callable[..., Any]] = {
    floats.FloatSum: torch.add,
    floats.FloatProduct: torch.mul,
    floats.FloatQuotient: torch.true_divide,
    FloorDiv: torch.floor_divide,
    FloorMod: _remainder,
    Abs: torch.abs,
    Floor: torch.floor,
    Round: torch.round,
    **{record: getattr(torch, name) for name, record in FUNCTIONS.items()},
}
