"""Evaluation of expressions, with Python's exact integers or over numpy arrays."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import sympy

from flashgen.shared.errors import InputError
from flashgen.spec.analysis.minmax_table import table_of
from flashgen.spec.language import float_operations as floats
from flashgen.spec.language.bit_functions import BitFunction
from flashgen.spec.language.comparisons import FLOAT_RELATIONS
from flashgen.spec.language.float_functions import FUNCTIONS, Abs, FloatFunction, Sigmoid
from flashgen.spec.language.lets import lets_of
from flashgen.spec.language.symbols import is_int
from flashgen.spec.language.sympy_functions import (
    Floor,
    FloorDiv,
    FloorMod,
    Maximum,
    Minimum,
    Round,
    Select,
    branches_of,
)
from flashgen.spec.language.tensor_elements import Element, Extreme, Least, TensorSymbol

Env = Mapping[sympy.Symbol, Any]


def evaluate(expr: sympy.Basic, env: Env, real: type[np.floating[Any]] = np.float32) -> Any:
    """The value of ``expr`` for the values ``env`` of its symbols; tensors are numpy arrays.

    Python numbers give Python numbers (exact integers, floats); numpy arrays give arrays,
    elementwise with broadcasting. A float function outside its domain is NaN or infinite, as on the
    device.

    Args:
        real: the precision of sums, products and comparisons of floats, to which their operands and
            results are rounded: the precision of kernels by default.

    Raises:
        KeyError: a symbol has no value.
        TypeError: the expression has a function that flashgen cannot evaluate.
        InputError: elements of int64 tensors are too large to be computed with.
    """
    values = _Evaluation(env, real)
    try:
        for let in lets_of(expr):
            values.env[let] = values.value(let.value)
        return values.value(expr)
    except OverflowError:
        tensors = {x for x in expr.atoms(TensorSymbol) if x.dtype == "int64"}
        if not tensors:
            raise
        names = ", ".join(sorted(x.name for x in tensors))
        raise InputError(
            "a mod computes an integer of more than 64 bits",
            where=f"captured tensor {names}",
            numbers="elements of int64 tensors are between -2^60 and 2^60",
            way_out="x.unique(return_inverse=True)[1] where they are identities, or a float32 "
            "tensor",
        ) from None


class _Evaluation:
    """The values of subexpressions in one environment; each is computed once."""

    def __init__(self, env: Env, real: type[np.floating[Any]]) -> None:
        self.env = dict(env)
        self.real = real
        self.values: dict[sympy.Basic, Any] = {}

    def value(self, expr: sympy.Basic) -> Any:
        if not expr.args or expr not in self.values:
            self.values[expr] = self._computed(expr)
        return self.values[expr]

    def _computed(self, expr: sympy.Basic) -> Any:
        if isinstance(expr, sympy.Symbol):
            return self.env[expr]
        if expr in (sympy.true, sympy.false):
            return bool(expr)
        if expr.is_Integer:
            return int(expr)
        if expr in (sympy.zoo, sympy.nan, sympy.I):  # where a derivative or a root is undefined
            return math.nan
        if not expr.args:
            return float(expr)  # infinities too
        if isinstance(expr, sympy.Piecewise | Select):
            return self._choice(expr)
        if isinstance(expr, Element):
            return _read(self.env[expr.tensor], list(map(self.value, expr.indices)))
        if isinstance(expr, Extreme):
            table = table_of(self.env[expr.tensor], expr.axis, isinstance(expr, Least))
            return table.over(*map(self.value, (*expr.ends, *expr.others)))
        parts = [self.value(arg) for arg in expr.args]
        operation = _FLOATS.get(expr.func)
        if operation is not None and not (isinstance(expr, FloorDiv | FloorMod) and is_int(expr)):
            return self._rounded(operation, parts)
        function = expr.compute if isinstance(expr, BitFunction) else _FUNCTIONS.get(expr.func)
        if function is None:
            raise TypeError(f"cannot evaluate {expr.func.__name__}")
        return function(*parts)

    def _choice(self, expr: sympy.Expr) -> Any:
        branches, last = branches_of(expr)
        for index, (value, condition) in enumerate(branches):
            test = self.value(condition)
            if isinstance(test, np.ndarray):
                result = self.value(last)
                for chosen, where in reversed(branches[index:]):
                    result = np.where(self.value(where), self.value(chosen), result)
                return result
            if test:
                return self.value(value)
        return self.value(last)

    def _rounded(self, operation: Callable[..., Any], parts: list[Any]) -> Any:
        """An operation of IEEE 754 on floats."""
        with np.errstate(all="ignore"):
            result = operation(*map(self._float, parts))
        return result if isinstance(result, np.ndarray) else result.item()

    def _float(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x.astype(self.real)
        try:
            return self.real(x)
        except OverflowError:  # an integer that no float holds
            return self.real(math.copysign(math.inf, x))


def _read(tensor: Any, indices: list[Any]) -> Any:
    """The element at the index, clamped to the tensor."""
    inside = (
        np.clip(np.asarray(index, dtype=np.int64), 0, size - 1)
        for index, size in zip(indices, tensor.shape, strict=True)
    )
    element = tensor[tuple(inside)]
    if element.dtype.kind in "iub":  # keeps arithmetic exact
        element = element.astype(np.int64)
    return element if element.ndim else element.item()


def _either(python: Callable[..., Any], numpy: Callable[..., Any]) -> Any:
    def call(*args: Any) -> Any:
        arrays = any(isinstance(arg, np.ndarray) for arg in args)
        return (numpy if arrays else python)(*args)

    return call


def _folded(python: Callable[[Any, Any], Any], numpy: Callable[[Any, Any], Any]) -> Any:
    return _either(lambda *args: reduce(python, args), lambda *args: reduce(numpy, args))


def _power(x: Any, n: Any) -> Any:
    if isinstance(x, np.ndarray) or isinstance(n, np.ndarray):
        is_natural = isinstance(n, int) and n >= 0
        return x**n if is_natural else np.asarray(x, dtype=float) ** n
    if isinstance(n, int) and n >= 0:
        return x**n
    return _real(lambda: math.pow(x, n), math.inf if x == 0 else math.nan)


def _real(compute: Callable[[], float], undefined: float = math.nan) -> float:
    """The value; infinity at an overflow, ``undefined`` outside the domain."""
    try:
        return compute()
    except OverflowError:
        return math.inf
    except ValueError:
        return undefined


def _recorded(record: type[FloatFunction]) -> Callable[..., Any]:
    function, pole = getattr(math, record.called), record.pole
    array = getattr(np, record.numpy or record.called, None)

    def number(*args: float) -> float:
        return _real(lambda: function(*args), -math.inf if args == (pole,) else math.nan)

    rule: Callable[..., Any] = _either(number, array or np.vectorize(function, otypes=[float]))
    return rule


def _by_nonzero(divide: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A division by an integer that gives 0 where the integer is 0."""

    def quotient(a: Any, b: Any) -> Any:
        if isinstance(b, np.ndarray):
            return np.where(b == 0, 0, divide(a, np.where(b == 0, 1, b)))
        return divide(a, b) if b else divide(a, 1) * 0

    return quotient


def _floor(x: float) -> float:
    return math.floor(x) if math.isfinite(x) else x


def _least(a: Any, b: Any) -> Any:
    return a if a != a or a < b else b


def _greatest(a: Any, b: Any) -> Any:
    return a if a != a or a > b else b


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    sympy.Add: lambda *args: sum(args[1:], args[0]),
    sympy.Mul: lambda *args: reduce(lambda a, b: a * b, args),
    sympy.Pow: _power,
    FloorDiv: _by_nonzero(operator.floordiv),
    FloorMod: _by_nonzero(operator.mod),
    Minimum: _folded(_least, np.minimum),
    Maximum: _folded(_greatest, np.maximum),
    sympy.Min: _folded(min, np.minimum),
    sympy.Max: _folded(max, np.maximum),
    Abs: abs,
    sympy.Abs: abs,
    sympy.sign: _either(lambda x: (x > 0) - (x < 0), np.sign),
    **{record: _recorded(record) for record in FUNCTIONS.values() if record is not Sigmoid},
    Sigmoid: lambda x: 1 / (1 + np.exp(-np.asarray(x, dtype=float)))[()],
    Floor: _either(_floor, np.floor),
    Round: _either(lambda x: round(x) if math.isfinite(x) else x, np.rint),
    **{kind: float_relation.decide for kind, float_relation in FLOAT_RELATIONS.items()},
    sympy.And: _folded(lambda a, b: a and b, np.logical_and),
    sympy.Or: _folded(lambda a, b: a or b, np.logical_or),
    sympy.Not: _either(lambda a: not a, np.logical_not),
}

_FLOATS: dict[Any, Callable[..., Any]] = {
    floats.AsFloat: lambda x: x,
    floats.FloatSum: np.add,
    floats.FloatProduct: np.multiply,
    floats.FloatQuotient: np.divide,
    floats.FloatPower: np.power,
    FloorDiv: np.floor_divide,
    FloorMod: np.mod,
    **{float_relation: float_relation.decide for float_relation in FLOAT_RELATIONS.values()},
}
"""Operations of floats, which round."""
