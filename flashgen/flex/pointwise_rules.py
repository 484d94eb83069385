"""Rules for ATen's elementwise operations, in flashgen's arithmetic.

A rule takes the tracer, the dtype of the result and the operands. flashgen computes with exact
integers and in float32, so that only the kind of a torch dtype matters: bool, integer or float.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

import flashgen.language as fg
from flashgen.flex.bitwise_rules import RULES as BITWISE
from flashgen.flex.bitwise_rules import logical_and, logical_or, logical_xor
from flashgen.flex.traced_array import Entry, condition, either, finite, number
from flashgen.language import Traced, where
from flashgen.language.integer_limits import fits
from flashgen.language.symbols import is_int
from flashgen.language.traced import Value

Rule = Callable[..., Entry]

ONE = Value(sympy.S.One)
LN_2 = Value(sympy.log(2))
LN_10 = Value(sympy.log(10))
LARGEST_FACTOR = 2**40


def _plain(name: str, function: Callable[..., Traced]) -> Rule:
    """A rule for numbers: conditions count as 0 and 1, and minus infinity is an error."""

    def rule(tracer: Any, dtype: torch.dtype, /, *args: Any, **kwargs: Any) -> Entry:
        given = [number(finite(tracer, name, x)) if isinstance(x, Entry) else x for x in args]
        return Entry(function(*given, **kwargs))

    return rule


def _conditions(name: str, function: Callable[..., Traced]) -> Rule:
    def rule(tracer: Any, dtype: torch.dtype, /, *args: Entry) -> Entry:
        return Entry(function(*(condition(finite(tracer, name, x)) for x in args)))

    return rule


def _comparison(function: Callable[[Traced, Traced], Traced]) -> Rule:
    def rule(tracer: Any, dtype: torch.dtype, /, a: Entry, b: Entry) -> Entry:
        x, y = finite(tracer, "comparison", a), finite(tracer, "comparison", b)
        if not (x.is_condition and y.is_condition and function in (_eq, _ne)):
            x, y = number(x), number(y)
        return Entry(function(x, y))

    return rule


def _eq(a: Traced, b: Traced) -> Traced:
    return a == b


def _ne(a: Traced, b: Traced) -> Traced:
    return a != b


# Operations that accept minus infinity.


def _where(tracer: Any, dtype: torch.dtype, /, test: Entry, yes: Entry, no: Entry) -> Entry:
    chosen = condition(finite(tracer, "where", test))
    lost = None
    for side, holds in ((yes, chosen), (no, ~chosen)):
        if side.lost is not None:
            lost = either(lost, holds & side.lost)
    if yes.is_lost or no.is_lost:
        return Entry((no if yes.is_lost else yes).value, lost)
    a, b = yes.value, no.value
    if not (a.is_condition and b.is_condition):
        a, b = number(a), number(b)
    return Entry(where(chosen, a, b), lost)


def _masked_fill(tracer: Any, dtype: torch.dtype, /, x: Entry, mask: Entry, value: Entry) -> Entry:
    return _where(tracer, dtype, mask, value, x)


def _add(
    tracer: Any, dtype: torch.dtype, /, a: Entry, b: Entry, alpha: Entry | None = None
) -> Entry:
    if dtype == torch.bool:
        return _conditions("add", logical_or)(tracer, dtype, a, b)
    y = number(b.value)
    if alpha is not None:
        b = _multiply(tracer, dtype, b, alpha)
        y = b.value
    return Entry(number(a.value) + y, either(a.lost, b.lost))


def _subtract(
    tracer: Any, dtype: torch.dtype, /, a: Entry, b: Entry, alpha: Entry | None = None
) -> Entry:
    y = number(finite(tracer, "sub", b))
    if alpha is not None:
        y = y * alpha.value
    return Entry(number(a.value) - y, a.lost)


def _rsub(
    tracer: Any, dtype: torch.dtype, /, a: Entry, b: Entry, alpha: Entry | None = None
) -> Entry:
    return _subtract(tracer, dtype, b, a, alpha)


def _multiply(tracer: Any, dtype: torch.dtype, /, a: Entry, b: Entry) -> Entry:
    if dtype == torch.bool:
        return _conditions("mul", logical_and)(tracer, dtype, a, b)
    lost = None
    for x, factor in ((a, b), (b, a)):
        if x.lost is not None:
            if not factor.value.expr.is_positive or factor.lost is not None:
                finite(tracer, "mul", x)
            lost = x.lost
    left, right = number(a.value), number(b.value)
    product = left * right
    if not dtype.is_floating_point and is_int(product.expr) and not fits(product.expr, 61):
        product = _within(left) * _within(right)
    return Entry(product, lost)


def _within(x: Traced) -> Traced:
    """A 64-bit element as a factor, clamped to a range that holds every position."""
    if not isinstance(x.expr, fg.Element):
        return x
    return fg.maximum(fg.minimum(x, LARGEST_FACTOR), -LARGEST_FACTOR)


def _divide(
    tracer: Any, dtype: torch.dtype, /, a: Entry, b: Entry, rounding_mode: str | None = None
) -> Entry:
    y = number(finite(tracer, "div", b))
    if a.lost is not None and (rounding_mode or not y.expr.is_positive):
        finite(tracer, "div", a)
    x = number(a.value)
    if rounding_mode == "floor":
        return Entry(x // y)
    if rounding_mode == "trunc":
        return Entry(_quotient(tracer, x, y))
    return Entry(x / y, a.lost)


def _copy(tracer: Any, dtype: torch.dtype, /, x: Entry, **_: Any) -> Entry:
    """A cast; between floats it has no effect, because everything is computed in float32."""
    if dtype == torch.bool:
        return Entry(condition(finite(tracer, "bool", x)))
    value = number(x.value)
    if not dtype.is_floating_point and not value.expr.is_integer:
        value = _toward_zero(tracer, value)
        finite(tracer, "int", x)
    return Entry(value, x.lost)


def _detach(tracer: Any, dtype: torch.dtype, /, x: Entry) -> Entry:
    value = x.value
    learned = any(isinstance(c, fg.Tensor) and c.grad for c in value.captures)
    if dtype.is_floating_point and (learned or fg.SCORE in value.expr.free_symbols):
        tracer.refuse(
            "detach() of a value that has a gradient",
            numbers=f"value {fg.python_text(value.expr)}",
            way_out="detach() of captured tensors themselves, or before the call",
        )
    return x


# Numbers.


def _toward_zero(tracer: Any, x: Traced) -> Traced:
    if tracer.never_negative(x.expr):
        return fg.floor(x)
    return where(x < 0, -fg.floor(-x), fg.floor(x))


def _quotient(tracer: Any, x: Traced, y: Traced) -> Traced:
    """Division that rounds toward 0."""
    if tracer.never_negative(x.expr) and tracer.never_negative(y.expr):
        return x // y
    if not (is_int(x.expr) and is_int(y.expr)):
        return _toward_zero(tracer, x / y)
    size = fg.absolute(x) // fg.absolute(y)
    return where((x < 0) ^ (y < 0), -size, size)


def _fmod(tracer: Any, dtype: torch.dtype, /, a: Entry, b: Entry) -> Entry:
    x, y = (number(finite(tracer, "fmod", e)) for e in (a, b))
    if tracer.never_negative(x.expr) and tracer.never_negative(y.expr):
        return Entry(x % y)
    rest = fg.absolute(x) % fg.absolute(y)
    return Entry(where(x < 0, -rest, rest))


def _clamp(
    tracer: Any,
    dtype: torch.dtype,
    /,
    x: Entry,
    low: Entry | None = None,
    high: Entry | None = None,
    **named: Entry | None,
) -> Entry:
    low, high = named.get("min", low), named.get("max", high)
    value = number(finite(tracer, "clamp", x))
    low = None if low is not None and low.is_lost else low
    bounds = [None if e is None else number(finite(tracer, "clamp", e)) for e in (low, high)]
    least, most = bounds
    if not dtype.is_floating_point:
        value = value if least is None else fg.maximum(value, least)
        return Entry(value if most is None else fg.minimum(value, most))
    # torch's gradient at a bound is that of the value, not half of it.
    result = value if least is None else where(value < least, least, value)
    return Entry(result if most is None else where(result > most, most, result))


def _extremum(name: str, function: Callable[[Traced, Traced], Traced]) -> Rule:
    def rule(tracer: Any, dtype: torch.dtype, /, a: Entry, b: Entry) -> Entry:
        if name == "maximum" and (a.is_lost or b.is_lost):
            return b if a.is_lost else a
        x, y = finite(tracer, name, a), finite(tracer, name, b)
        if dtype == torch.bool:
            return Entry(logical_or(x, y) if name == "maximum" else logical_and(x, y))
        return Entry(function(number(x), number(y)))

    return rule


def _power(x: Traced, exponent: Traced) -> Traced:
    if exponent.expr.is_Rational and x.expr.is_number and not x.expr.is_Rational:
        return fg.exp(exponent * fg.log(x))
    return x**exponent


def _sign(x: Traced) -> Traced:
    return where(x > 0, 1, where(x < 0, -1, 0))


def _round(tracer: Any, dtype: torch.dtype, /, x: Entry) -> Entry:
    """Halves go to the even neighbour."""
    value = number(finite(tracer, "round", x))
    if value.expr.is_integer:
        return Entry(value)
    up = fg.floor(value + 0.5)
    half = (up - value == 0.5) & (up - 2 * fg.floor(up / 2) == 1)
    return Entry(where(half, up - 1, up))


def _tan(x: Traced) -> Traced:
    return fg.sin(x) / fg.cos(x)


def _relu(x: Traced) -> Traced:
    return where(x > 0, x, 0)


_NUMBERS: dict[str, Callable[..., Traced]] = {
    "abs": fg.absolute,
    "neg": lambda x: -x,
    "positive": lambda x: +x,
    "sign": _sign,
    "sgn": _sign,
    "exp": fg.exp,
    "exp2": lambda x: 2**x,
    "expm1": lambda x: fg.exp(x) - 1,
    "log": fg.log,
    "log2": fg.log2,
    "log10": lambda x: fg.log(x) / LN_10,
    "log1p": lambda x: fg.log(1 + x),
    "sqrt": fg.sqrt,
    "rsqrt": lambda x: 1 / fg.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sin": fg.sin,
    "cos": fg.cos,
    "tan": _tan,
    "tanh": fg.tanh,
    "sigmoid": fg.sigmoid,
    "sinh": lambda x: (fg.exp(x) - fg.exp(-x)) / 2,
    "cosh": lambda x: (fg.exp(x) + fg.exp(-x)) / 2,
    "floor": fg.floor,
    "ceil": lambda x: -fg.floor(-x),
    "frac": lambda x: x - where(x < 0, -fg.floor(-x), fg.floor(x)),
    "relu": _relu,
    "pow": _power,
    "remainder": lambda x, y: x % y,
    "floor_divide": lambda x, y: x // y,
}
_CONDITIONS: dict[str, Callable[..., Traced]] = {
    "logical_and": logical_and,
    "logical_or": logical_or,
    "logical_xor": logical_xor,
    "logical_not": lambda x: ~x,
}
_COMPARISONS: dict[str, Callable[[Traced, Traced], Traced]] = {
    "eq": _eq,
    "ne": _ne,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}

RULES: dict[str, Rule] = {
    **{name: _plain(name, function) for name, function in _NUMBERS.items()},
    **{name: _conditions(name, function) for name, function in _CONDITIONS.items()},
    **{name: _comparison(function) for name, function in _COMPARISONS.items()},
    "trunc": lambda tracer, dtype, x: Entry(
        _toward_zero(tracer, number(finite(tracer, "trunc", x)))
    ),
    "fix": lambda tracer, dtype, x: RULES["trunc"](tracer, dtype, x),
    "round": _round,
    "where": _where,
    "masked_fill": _masked_fill,
    "add": _add,
    "sub": _subtract,
    "rsub": _rsub,
    "mul": _multiply,
    "div": _divide,
    "true_divide": _divide,
    "fmod": _fmod,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda tracer, dtype, x, high: _clamp(tracer, dtype, x, None, high),
    "minimum": _extremum("minimum", fg.minimum),
    "maximum": _extremum("maximum", fg.maximum),
    "fmin": _extremum("minimum", fg.minimum),
    "fmax": _extremum("maximum", fg.maximum),
    "_to_copy": _copy,
    "detach": _detach,
    **BITWISE,
}
"""The rule of each operation by its name; it covers all overloads."""
