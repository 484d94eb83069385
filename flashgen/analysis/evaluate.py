"""Evaluation of expressions, with Python's exact integers or over numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import sympy

from flashgen.analysis.minmax_table import table_of
from flashgen.language import (
    Atan2,
    Element,
    Erf,
    Erfc,
    Expm1,
    Extreme,
    Floor,
    FloorDiv,
    FloorMod,
    Least,
    Log1p,
    Log2,
    Maximum,
    Minimum,
    Round,
    Sigmoid,
)
from flashgen.language.bit_functions import (
    BitAnd,
    BitOr,
    BitXor,
    Popcount,
    ShiftLeft,
    ShiftRight,
)
from flashgen.language.lets import lets_of
from flashgen.language.sympy_functions import Select
from flashgen.language.traced import MINUS_INFINITY

Env = Mapping[sympy.Symbol, Any]


def evaluate(expr: sympy.Basic, env: Env) -> Any:
    """The value of ``expr`` for the values ``env`` of its symbols; tensors are numpy arrays.

    Python numbers give Python numbers (exact integers, double-precision floats); numpy arrays give
    arrays, elementwise with broadcasting. A float function outside its domain is NaN or infinite,
    as on the device.

    Raises:
        KeyError: a symbol has no value.
        TypeError: the expression has a function that flashgen cannot evaluate.
    """
    lets = lets_of(expr)
    if lets:
        env = dict(env)
        for let in lets:
            env[let] = _value(let.value, env)
    return _value(expr, env)


def _value(expr: sympy.Basic, env: Env) -> Any:
    if isinstance(expr, sympy.Symbol):
        return env[expr]
    if expr in (sympy.true, sympy.false):
        return bool(expr)
    if expr.is_Integer:
        return int(expr)
    if expr in (sympy.zoo, sympy.nan):  # where a derivative is undefined
        return math.nan
    if not expr.args:
        return -math.inf if expr == MINUS_INFINITY else float(expr)
    if isinstance(expr, sympy.Piecewise | Select):
        return _choose(expr, env)
    if isinstance(expr, Element):
        return _read(env[expr.tensor], [_value(index, env) for index in expr.indices])
    if isinstance(expr, Extreme):
        table = table_of(env[expr.tensor], expr.axis, isinstance(expr, Least))
        return table.over(*(_value(part, env) for part in (*expr.ends, *expr.others)))
    function = _FUNCTIONS.get(expr.func)
    if function is None:
        raise TypeError(f"cannot evaluate {expr.func.__name__}")
    return function(*(_value(arg, env) for arg in expr.args))


def _read(tensor: Any, indices: list[Any]) -> Any:
    """The element at the index, clamped to the tensor."""
    inside = (
        np.clip(np.asarray(index, dtype=np.int64), 0, size - 1)
        for index, size in zip(indices, tensor.shape, strict=True)
    )
    found = tensor[tuple(inside)]
    if found.dtype.kind in "iub":  # keeps arithmetic exact
        found = found.astype(np.int64)
    return found if found.ndim else found.item()


def _choose(expr: sympy.Basic, env: Env) -> Any:
    if isinstance(expr, Select):
        branches, last = [(expr.args[1], expr.args[0])], expr.args[2]
    else:
        *branches, (last, _) = expr.args
    result = _value(last, env)
    for value, condition in reversed(branches):
        test = _value(condition, env)
        if isinstance(test, np.ndarray):
            result = np.where(test, _value(value, env), result)
        elif test:
            result = _value(value, env)
    return result


def _either(python: Callable[..., Any], numpy: Callable[..., Any]) -> Any:
    def call(*args: Any) -> Any:
        arrays = any(isinstance(arg, np.ndarray) for arg in args)
        return (numpy if arrays else python)(*args)

    return call


def _folded(python: Callable[[Any, Any], Any], numpy: Callable[[Any, Any], Any]) -> Any:
    return _either(lambda *args: reduce(python, args), lambda *args: reduce(numpy, args))


def _power(x: Any, n: Any) -> Any:
    if isinstance(x, np.ndarray) or isinstance(n, np.ndarray):
        whole = isinstance(n, int) and n >= 0
        return x**n if whole else np.asarray(x, dtype=float) ** n
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


def _scalar(function: Callable[[float], float]) -> Callable[[float], float]:
    return lambda x: _real(lambda: function(x), -math.inf if x == 0 else math.nan)


def _whole(*values: Any) -> bool:
    return all(np.asarray(value).dtype.kind in "iub" for value in values)


def _quotient(a: Any, b: Any) -> Any:
    """The quotient, rounded down: of integers exactly, and 0 by 0; of floats after its rounding."""
    if _whole(a, b):
        return _where_nonzero(lambda divisor: a // divisor, b)
    ratio = _divided(a, b)
    return np.floor(ratio) if isinstance(ratio, np.ndarray) else _floor(ratio)


def _remainder(a: Any, b: Any) -> Any:
    if _whole(a, b):
        return _where_nonzero(lambda divisor: a % divisor, b)
    with np.errstate(invalid="ignore"):
        found = np.mod(a, b)
    return found if isinstance(found, np.ndarray) else float(found)


def _where_nonzero(divide: Callable[[Any], Any], b: Any) -> Any:
    if isinstance(b, np.ndarray):
        return np.where(b == 0, 0, divide(np.where(b == 0, 1, b)))
    return divide(b) if b else divide(1) * 0


def _divided(a: Any, b: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.divide(a, b, dtype=float)
    return ratio if isinstance(ratio, np.ndarray) else float(ratio)


def _floor(x: float) -> float:
    return math.floor(x) if math.isfinite(x) else x


def _log1p(x: float) -> float:
    return _real(lambda: math.log1p(x), -math.inf if x == -1 else math.nan)


def _popcount(x: Any) -> int:
    return (int(x) & 0xFFFFFFFF).bit_count()


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    sympy.Add: lambda *args: sum(args[1:], args[0]),
    sympy.Mul: lambda *args: reduce(lambda a, b: a * b, args),
    sympy.Pow: _power,
    FloorDiv: _quotient,
    FloorMod: _remainder,
    Minimum: _folded(min, np.minimum),
    Maximum: _folded(max, np.maximum),
    sympy.Min: _folded(min, np.minimum),
    sympy.Max: _folded(max, np.maximum),
    sympy.Abs: abs,
    sympy.sign: _either(lambda x: (x > 0) - (x < 0), np.sign),
    sympy.exp: _either(_scalar(math.exp), np.exp),
    sympy.log: _either(_scalar(math.log), np.log),
    Log2: _either(_scalar(math.log2), np.log2),
    sympy.tanh: _either(math.tanh, np.tanh),
    sympy.sin: _either(_scalar(math.sin), np.sin),
    sympy.cos: _either(_scalar(math.cos), np.cos),
    Sigmoid: _either(lambda x: 0.5 * (1 + math.tanh(x / 2)), lambda x: 0.5 * (1 + np.tanh(x / 2))),
    Floor: _either(_floor, np.floor),
    Round: _either(lambda x: round(x) if math.isfinite(x) else x, np.rint),
    Erf: _either(math.erf, np.vectorize(math.erf, otypes=[float])),
    Erfc: _either(math.erfc, np.vectorize(math.erfc, otypes=[float])),
    Log1p: _either(_log1p, np.log1p),
    Expm1: _either(_scalar(math.expm1), np.expm1),
    Atan2: _either(math.atan2, np.arctan2),
    BitAnd: lambda a, b: a & b,
    BitOr: lambda a, b: a | b,
    BitXor: lambda a, b: a ^ b,
    ShiftLeft: lambda x, n: x << n,
    ShiftRight: lambda x, n: x >> n,
    Popcount: _either(_popcount, np.vectorize(_popcount, otypes=[np.int64])),
    sympy.StrictLessThan: lambda a, b: a < b,
    sympy.LessThan: lambda a, b: a <= b,
    sympy.StrictGreaterThan: lambda a, b: a > b,
    sympy.GreaterThan: lambda a, b: a >= b,
    sympy.Equality: lambda a, b: a == b,
    sympy.Unequality: lambda a, b: a != b,
    sympy.And: _folded(lambda a, b: a and b, np.logical_and),
    sympy.Or: _folded(lambda a, b: a or b, np.logical_or),
    sympy.Not: _either(lambda a: not a, np.logical_not),
}
