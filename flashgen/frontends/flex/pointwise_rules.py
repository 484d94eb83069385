"""Rules for ATen's elementwise operations, in flashgen's arithmetic.

A rule takes the result's tracer and dtype, and the operands. flashgen computes with exact integers
and in float32, so that only the kind of a torch dtype matters: bool, integer or float.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch

import flashgen.spec.language.mod_functions as fg
from flashgen.frontends.flex.traced_array import Entry, Result, condition, either, number
from flashgen.spec.language.float_functions import FUNCTIONS, Log
from flashgen.spec.language.float_operations import AsFloat
from flashgen.spec.language.integer_limits import fits
from flashgen.spec.language.mod_functions import where
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.symbols import SCORE, is_int
from flashgen.spec.language.tensor import Tensor
from flashgen.spec.language.tensor_elements import Element
from flashgen.spec.language.traced import Traced, Value

Rule = Callable[..., Entry]

LN_10 = Value(Log(sympy.Integer(10)))
LARGEST_FACTOR = 2**40


def _plain(name: str, function: Callable[..., Traced]) -> Rule:
    """A rule for numbers: conditions count as 0 and 1, and minus infinity is an error."""

    def rule(to: Result, /, *args: Any, **kwargs: Any) -> Entry:
        given = [to.number(name, x) if isinstance(x, Entry) else x for x in args]
        return Entry(function(*given, **kwargs))

    return rule


def _conditions(name: str, function: Callable[..., Traced]) -> Rule:
    def rule(to: Result, /, *args: Entry) -> Entry:
        return Entry(function(*(condition(to.finite(name, x)) for x in args)))

    return rule


def _comparison(function: Callable[[Traced, Traced], Traced]) -> Rule:
    def rule(to: Result, /, a: Entry, b: Entry) -> Entry:
        x, y = to.finite("comparison", a), to.finite("comparison", b)
        if not (x.is_condition and y.is_condition and function in (operator.eq, operator.ne)):
            x, y = number(x), number(y)
        return Entry(function(x, y))

    return rule


# Operations that accept minus infinity.


def _where(to: Result, /, test: Entry, yes: Entry, no: Entry) -> Entry:
    chosen = condition(to.finite("where", test))
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


def _add(to: Result, /, a: Entry, b: Entry, alpha: Entry | None = None) -> Entry:
    if to.dtype == torch.bool:
        return _conditions("add", operator.or_)(to, a, b)
    y = number(b.value)
    if alpha is not None:
        b = _multiply(to, b, alpha)
        y = b.value
    return Entry(number(a.value) + y, either(a.lost, b.lost))


def _subtract(to: Result, /, a: Entry, b: Entry, alpha: Entry | None = None) -> Entry:
    y = to.number("sub", b)
    if alpha is not None:
        y = y * alpha.value
    return Entry(number(a.value) - y, a.lost)


def _multiply(to: Result, /, a: Entry, b: Entry) -> Entry:
    if to.dtype == torch.bool:
        return _conditions("mul", operator.and_)(to, a, b)
    lost = None
    for x, factor in ((a, b), (b, a)):
        if x.lost is not None:
            if not factor.value.expr.is_positive or factor.lost is not None:
                to.finite("mul", x)
            lost = x.lost
    left, right = number(a.value), number(b.value)
    product = left * right
    if not to.dtype.is_floating_point and is_int(product.expr) and not fits(product.expr, 61):
        product = _within(left) * _within(right)
    return Entry(product, lost)


def _within(x: Traced) -> Traced:
    """A 64-bit element as a factor, clamped to a range that holds every position."""
    if not isinstance(x.expr, Element):
        return x
    return fg.maximum(fg.minimum(x, LARGEST_FACTOR), -LARGEST_FACTOR)


def _divide(to: Result, /, a: Entry, b: Entry, rounding_mode: str | None = None) -> Entry:
    y = to.number("div", b)
    if a.lost is not None and (rounding_mode or not y.expr.is_positive):
        to.finite("div", a)
    x = number(a.value)
    if rounding_mode == "floor":
        return Entry(x // _divisor(to, y))
    if rounding_mode == "trunc":
        return Entry(_quotient(to, x, y))
    return Entry(x / y, a.lost)


def _power(to: Result, /, a: Entry, b: Entry) -> Entry:
    x, y = to.number("pow", a), to.number("pow", b)
    exact = y.expr.is_Integer or (x.expr.is_Integer and int(x.expr).bit_count() == 1)
    if not to.dtype.is_floating_point and not exact:
        to.tracer.refuse(
            "a power of integers is computed in floats where its exponent is not a constant",
            numbers=f"{python_text(x.expr)} to the power of {python_text(y.expr)}",
            way_out="a power of floats, x.float() ** y, or an exponent that is a constant",
        )
    return Entry(x**y)


def _copy(to: Result, /, x: Entry, **_: Any) -> Entry:
    """A cast; between floats it has no effect, because everything is computed in float32.

    The integers of a narrow dtype are wrapped as those of other operations.
    """
    if to.dtype == torch.bool:
        return Entry(condition(to.finite("bool", x)))
    value = number(x.value)
    if not to.dtype.is_floating_point and not value.expr.is_integer:
        value = _toward_zero(to, value)
        to.finite("int", x)
    if to.dtype.is_floating_point:
        value = Value(AsFloat(value.expr), value.captures)
    return Entry(value, x.lost)


def _detach(to: Result, /, x: Entry) -> Entry:
    value = x.value
    learned = any(isinstance(c, Tensor) and c.grad for c in value.captures)
    if to.dtype.is_floating_point and (learned or SCORE in value.expr.free_symbols):
        to.tracer.refuse(
            "detach() of a value that has a gradient",
            numbers=f"value {python_text(value.expr)}",
            way_out="detach() of captured tensors themselves, or before the call",
        )
    return x


# Numbers.


def _toward_zero(to: Result, x: Traced) -> Traced:
    if to.tracer.never_negative(x.expr):
        return fg.floor(x)
    return where(x < 0, -fg.floor(-x), fg.floor(x))


def _quotient(to: Result, x: Traced, y: Traced) -> Traced:
    """Division that rounds toward 0."""
    y = _divisor(to, y)
    if to.tracer.never_negative(x.expr) and to.tracer.never_negative(y.expr):
        return x // y
    if not (is_int(x.expr) and is_int(y.expr)):
        return _toward_zero(to, x / y)
    size = fg.abs(x) // fg.abs(y)
    return where((x < 0) ^ (y < 0), -size, size)


def _divisor(to: Result, y: Traced) -> Traced:
    """A divisor that is positive at all positions of the call, as such for every call."""
    if is_int(y.expr) and not y.expr.is_number and to.tracer.never_negative(y.expr - 1):
        return fg.maximum(y, 1)
    if is_int(y.expr) and not y.expr.is_number and to.tracer.never_negative(-1 - y.expr):
        return fg.minimum(y, -1)
    return y


def _floored(name: str, function: Callable[[Traced, Traced], Traced]) -> Rule:
    def rule(to: Result, /, a: Entry, b: Entry) -> Entry:
        return Entry(function(to.number(name, a), _divisor(to, to.number(name, b))))

    return rule


def _fmod(to: Result, /, a: Entry, b: Entry) -> Entry:
    x, y = to.number("fmod", a), _divisor(to, to.number("fmod", b))
    if to.tracer.never_negative(x.expr) and to.tracer.never_negative(y.expr):
        return Entry(x % y)
    rest = fg.abs(x) % fg.abs(y)
    return Entry(where(x < 0, -rest, rest))


def _clamp(to: Result, /, x: Entry, min: Entry | None = None, max: Entry | None = None) -> Entry:
    value = to.number("clamp", x)
    least = None if min is None or min.is_lost else to.number("clamp", min)
    most = None if max is None else to.number("clamp", max)
    if not to.dtype.is_floating_point:
        value = value if least is None else fg.maximum(value, least)
        return Entry(value if most is None else fg.minimum(value, most))
    return Entry(fg.clamp(value, least, most))  # torch's gradient at a bound is that of the value


def _extremum(name: str, function: Callable[[Traced, Traced], Traced]) -> Rule:
    def rule(to: Result, /, a: Entry, b: Entry) -> Entry:
        if name == "maximum" and (a.is_lost or b.is_lost):
            return b if a.is_lost else a
        x, y = to.finite(name, a), to.finite(name, b)
        if to.dtype == torch.bool:
            return Entry(x | y if name == "maximum" else x & y)
        return Entry(function(number(x), number(y)))

    return rule


def _number_of(function: Callable[[Traced, Traced], Traced]) -> Callable[..., Traced]:
    """An extremum of which NaN is the result only where both sides are."""

    def extremum(a: Traced, b: Traced) -> Traced:
        if is_int(a.expr) and is_int(b.expr):
            return function(a, b)
        return where(a != a, b, where(b != b, a, function(a, b)))

    return extremum


# Operations on the bits of integers.


def _bitwise(name: str, function: Callable[..., Traced]) -> Rule:
    def rule(to: Result, /, a: Entry, b: Entry) -> Entry:
        x, y = to.finite(name, a), to.finite(name, b)
        return Entry(function(x, y) if to.dtype == torch.bool else function(number(x), number(y)))

    return rule


def _bitwise_not(to: Result, /, x: Entry) -> Entry:
    value = to.finite("bitwise_not", x)
    return Entry(~value if value.is_condition else -value - 1)


_NUMBERS: dict[str, Callable[..., Traced]] = {
    "abs": fg.abs,
    "neg": operator.neg,
    "positive": operator.pos,
    "sign": fg.sign,
    "sgn": fg.sign,
    "exp2": fg.exp2,
    "log10": lambda x: fg.log(x) / LN_10,
    "sqrt": fg.sqrt,
    "rsqrt": fg.rsqrt,
    "reciprocal": lambda x: 1 / x,
    "tan": lambda x: fg.sin(x) / fg.cos(x),
    "sinh": lambda x: (fg.exp(x) - fg.exp(-x)) / 2,
    "cosh": lambda x: (fg.exp(x) + fg.exp(-x)) / 2,
    "floor": fg.floor,
    "round": fg.round,
    "ceil": lambda x: -fg.floor(-x),
    "frac": lambda x: x - where(x < 0, -fg.floor(-x), fg.floor(x)),
    "relu": lambda x: where(x <= 0, 0, x),  # NaN where x is
    **{name: getattr(fg, name) for name in FUNCTIONS},
}
_CONDITIONS: dict[str, Callable[..., Traced]] = {
    "logical_and": operator.and_,
    "logical_or": operator.or_,
    "logical_xor": operator.xor,
    "logical_not": operator.invert,
}
_BITS = (
    ("and", "__and__", operator.and_),
    ("or", "__or__", operator.or_),
    ("xor", "__xor__", operator.xor),
    ("left_shift", "__lshift__", operator.lshift),
    ("right_shift", "__rshift__", operator.rshift),
)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

RULES: dict[str, Rule] = {
    **{name: _plain(name, function) for name, function in _NUMBERS.items()},
    **{name: _conditions(name, function) for name, function in _CONDITIONS.items()},
    **{name: _comparison(getattr(operator, name)) for name in _COMPARISONS},
    "remainder": _floored("remainder", operator.mod),
    "floor_divide": _floored("floor_divide", operator.floordiv),
    **dict.fromkeys(("trunc", "fix"), lambda to, x: Entry(_toward_zero(to, to.number("trunc", x)))),
    "where": _where,
    "masked_fill": lambda to, x, mask, value: _where(to, mask, value, x),
    "add": _add,
    "sub": _subtract,
    "rsub": lambda to, a, b, alpha=None: _subtract(to, b, a, alpha),
    "mul": _multiply,
    "div": _divide,
    "pow": _power,
    "true_divide": _divide,
    "fmod": _fmod,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda to, x, max: _clamp(to, x, None, max),
    "minimum": _extremum("minimum", fg.minimum),
    "maximum": _extremum("maximum", fg.maximum),
    "fmin": _extremum("minimum", _number_of(fg.minimum)),
    "fmax": _extremum("maximum", _number_of(fg.maximum)),
    "_to_copy": _copy,
    "detach": _detach,
    **{name: _bitwise(f"bitwise_{kind}", function) for kind, name, function in _BITS},
    **{f"bitwise_{kind}": _bitwise(f"bitwise_{kind}", function) for kind, _, function in _BITS},
    "bitwise_not": _bitwise_not,
}
"""The rule of each operation by its name; it covers all overloads."""
