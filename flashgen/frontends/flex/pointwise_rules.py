"""Rules for ATen's elementwise operations, in flashgen's arithmetic.

A rule takes the result's tracer and dtype, and the operands. flashgen computes with exact integers
and in float32, so that only the kind of a torch dtype matters: bool, integer or float.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch

import flashgen.spec.language.mod_functions as fg
from flashgen.frontends.flex.traced_array import Entry, Result, condition, either, number
from flashgen.frontends.flex.tracer import DTYPES
from flashgen.spec.analysis.float_ranges import float_range
from flashgen.spec.analysis.float_rules import UNKNOWN, FloatRange
from flashgen.spec.analysis.tile_classes import bounds
from flashgen.spec.language.bit_functions import ShiftLeft
from flashgen.spec.language.float_functions import FUNCTIONS, Log
from flashgen.spec.language.float_operations import AsFloat
from flashgen.spec.language.integer_limits import NARROW, fits, limits
from flashgen.spec.language.lets import distinct, replaced
from flashgen.spec.language.mod_functions import where
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.scalar import Scalar
from flashgen.spec.language.symbols import SCORE, is_int
from flashgen.spec.language.tensor import Tensor
from flashgen.spec.language.tensor_elements import Element
from flashgen.spec.language.traced import Traced, Value

Rule = Callable[..., Entry]

_ZERO, _ONE = Value(sympy.S.Zero), Value(sympy.S.One)
LN_10 = Value(Log(sympy.Integer(10)))
LARGEST_FACTOR = 2**40


def _plain(function: Callable[..., Traced]) -> Rule:
    """A rule for numbers: conditions count as 0 and 1."""

    def rule(result: Result, /, *args: Any, **kwargs: Any) -> Entry:
        operands = [number(x.whole) if isinstance(x, Entry) else x for x in args]
        return Entry(function(*operands, **kwargs))

    return rule


def _conditions(function: Callable[..., Traced]) -> Rule:
    def rule(result: Result, /, *args: Entry) -> Entry:
        return Entry(function(*(condition(x.whole) for x in args)))

    return rule


def _comparison(function: Callable[[Traced, Traced], Traced]) -> Rule:
    def rule(result: Result, /, a: Entry, b: Entry) -> Entry:
        x, y = a.whole, b.whole
        if not (x.is_condition and y.is_condition and function in (operator.eq, operator.ne)):
            x, y = number(x), number(y)
        return Entry(function(x, y))

    return rule


# Operations whose results are minus infinity where operands are.


def _where(result: Result, /, test: Entry, yes: Entry, no: Entry) -> Entry:
    chosen = condition(test.whole)
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


def _range(x: Entry) -> FloatRange:
    """The numbers between which a value lies in every call; infinite where it may be NaN.

    Scores, and numbers of a call, are taken to be no larger than integers of 32 bits: NaN and
    infinities in queries and keys reach only the rows that keep their scores.
    """
    value = number(x.value)
    if any(isinstance(part, Element) and not is_int(part) for part in distinct(value.expr)):
        return UNKNOWN
    floats = [c.expr for c in value.captures if isinstance(c, Scalar) and not is_int(c.expr)]
    finite = AsFloat(sympy.Symbol("finite", integer=True))
    value_range = float_range(
        replaced(value.expr, dict.fromkeys((SCORE, *floats), finite)), bounds({})
    )
    return value_range if value_range.defined == sympy.true else UNKNOWN


def _add(result: Result, /, a: Entry, b: Entry, alpha: Entry | None = None) -> Entry:
    if result.dtype == torch.bool:
        return _conditions(operator.or_)(result, a, b)
    if alpha is not None:
        b = _multiply(result, b, alpha)
    for x, other in ((a, b), (b, a)):
        if x.lost is not None and _range(other).most == math.inf:  # -inf + inf is NaN
            return Entry(number(a.whole) + number(b.whole))
    return Entry(number(a.value) + number(b.value), either(a.lost, b.lost))


def _subtract(result: Result, /, a: Entry, b: Entry, alpha: Entry | None = None) -> Entry:
    if alpha is not None:
        b = _multiply(result, b, alpha)
    if b.lost is None and (a.lost is None or _range(b).least > -math.inf):
        return Entry(number(a.value) - number(b.value), a.lost)
    # Of other terms than the minuend's, which sympy would cancel: inf - inf is NaN.
    less = -number(b.value)
    return Entry(number(a.whole) + (less if b.lost is None else where(b.lost, math.inf, less)))


def _multiply(result: Result, /, a: Entry, b: Entry) -> Entry:
    if result.dtype == torch.bool:
        return _conditions(operator.and_)(result, a, b)
    for x, factor in ((a, b), (b, a)):
        if x.lost is not None and factor.lost is None and _range(factor).least > 0:
            return Entry(number(x.value) * number(factor.value), x.lost)
    left, right = number(a.whole), number(b.whole)
    product = left * right
    if not result.dtype.is_floating_point and is_int(product.expr) and not fits(product.expr, 61):
        product = _within(left) * _within(right)
    return Entry(product)


def _within(x: Traced) -> Traced:
    """A 64-bit element as a factor, clamped to a range that holds every position."""
    if not isinstance(x.expr, Element):
        return x
    return fg.maximum(fg.minimum(x, LARGEST_FACTOR), -LARGEST_FACTOR)


def _divide(result: Result, /, a: Entry, b: Entry, rounding_mode: str | None = None) -> Entry:
    y = number(b.whole)
    if not rounding_mode and a.lost is not None and b.lost is None:
        divisor = _range(b)
        if divisor.least > 0 and divisor.most < math.inf:
            return Entry(number(a.value) / y, a.lost)
    x = number(a.whole)
    if rounding_mode == "floor":
        return Entry(x // _divisor(result, y))
    if rounding_mode == "trunc":
        return Entry(_quotient(result, x, y))
    return Entry(x / y)


def _power(result: Result, /, a: Entry, b: Entry) -> Entry:
    x, y = number(a.whole), number(b.whole)
    exact = y.expr.is_Integer or (x.expr.is_Integer and int(x.expr).bit_count() == 1)
    if not result.dtype.is_floating_point and not exact:
        result.tracer.refuse(
            "a power of integers is computed in floats where its exponent is not a constant",
            numbers=f"{python_text(x.expr)} to the power of {python_text(y.expr)}",
            way_out="a power of floats, x.float() ** y, or an exponent that is a constant",
        )
    return Entry(x**y)


def _copy(result: Result, /, x: Entry, **_: Any) -> Entry:
    """A cast; between floats it has no effect, because everything is computed in float32.

    Integers of a narrow dtype are wrapped, as by other operations.
    """
    if result.dtype == torch.bool:
        return Entry(condition(x.whole))
    value = number(x.value)
    if not result.dtype.is_floating_point and not value.expr.is_integer:
        value = _toward_zero(result, number(x.whole))
    if result.dtype.is_floating_point:
        value = Value(AsFloat(value.expr), value.captures)
    return Entry(value, x.lost)


def _detach(result: Result, /, x: Entry) -> Entry:
    value = x.value
    learned = any(isinstance(c, Tensor) and c.grad for c in value.captures)
    if result.dtype.is_floating_point and (learned or SCORE in value.expr.free_symbols):
        result.tracer.refuse(
            "detach() of a value that has a gradient",
            numbers=f"value {python_text(value.expr)}",
            way_out="detach() of captured tensors themselves, or before the call",
        )
    return x


# Numbers.


def _toward_zero(result: Result, x: Traced) -> Traced:
    if result.tracer.never_negative(x.expr):
        return fg.floor(x)
    return where(x < 0, -fg.floor(-x), fg.floor(x))


def _quotient(result: Result, x: Traced, y: Traced) -> Traced:
    """Division that rounds toward 0."""
    y = _divisor(result, y)
    if result.tracer.never_negative(x.expr) and result.tracer.never_negative(y.expr):
        return x // y
    if not (is_int(x.expr) and is_int(y.expr)):
        return _toward_zero(result, x / y)
    size = fg.abs(x) // fg.abs(y)
    return where((x < 0) ^ (y < 0), -size, size)


def _divisor(result: Result, y: Traced) -> Traced:
    """A divisor that is positive at all positions of the call, as such for every call."""
    if is_int(y.expr) and not y.expr.is_number and result.tracer.never_negative(y.expr - 1):
        return fg.maximum(y, 1)
    if is_int(y.expr) and not y.expr.is_number and result.tracer.never_negative(-1 - y.expr):
        return fg.minimum(y, -1)
    return y


def _floored(function: Callable[[Traced, Traced], Traced]) -> Rule:
    def rule(result: Result, /, a: Entry, b: Entry) -> Entry:
        return Entry(function(number(a.whole), _divisor(result, number(b.whole))))

    return rule


def _fmod(result: Result, /, a: Entry, b: Entry) -> Entry:
    x, y = number(a.whole), _divisor(result, number(b.whole))
    if result.tracer.never_negative(x.expr) and result.tracer.never_negative(y.expr):
        return Entry(x % y)
    size = where(x < 0, -x, x)  # unlike that of abs, its derivative at 0 is 1
    rest = size % fg.abs(y)
    return Entry(where(x < 0, -rest, rest))


def _clamp(
    result: Result, /, x: Entry, min: Entry | None = None, max: Entry | None = None
) -> Entry:
    value = number(x.whole)
    lower = None if min is None else number(min.whole)
    upper = None if max is None else number(max.whole)
    if not result.dtype.is_floating_point:
        value = value if lower is None else fg.maximum(value, lower)
        return Entry(value if upper is None else fg.minimum(value, upper))
    if not _BOUNDS_SHARE_GRADIENTS:
        return Entry(fg.clamp(value, lower, upper))  # at a bound the gradient is that of the value
    if lower is not None:
        value = _above(value, lower) if _is_same(lower) else fg.maximum(value, lower)
    if upper is not None:
        value = _below(value, upper) if _is_same(upper) else fg.minimum(value, upper)
    return Entry(value)


_BOUNDS_SHARE_GRADIENTS = torch.__version__ >= "2.14"
"""Whether torch's gradient of a clamped value is 0 at a number, and half at an element."""


def _is_same(bound: Traced) -> bool:
    """Whether a bound is a number of the call, and no element and no position."""
    numbers = {c.expr for c in bound.captures if isinstance(c, Scalar)}
    return bound.expr.free_symbols <= numbers and len(numbers) == len(bound.captures)


def _above(value: Traced, bound: Traced) -> Traced:
    """The value or the bound, which has the gradient where they are equal; NaN where it is."""
    return where(value <= bound, bound, value)


def _below(value: Traced, bound: Traced) -> Traced:
    return where(value >= bound, bound, value)


def _hard_tanh(x: Traced, low: Traced = -_ONE, high: Traced = _ONE) -> Traced:
    return _below(_above(x, low), high)


def _hard_sigmoid(x: Traced) -> Traced:
    return _hard_tanh(x / 6 + 0.5, _ZERO)


def _extremum(name: str, function: Callable[[Traced, Traced], Traced]) -> Rule:
    def rule(result: Result, /, a: Entry, b: Entry) -> Entry:
        if result.dtype == torch.bool:
            return _conditions(operator.or_ if name == "maximum" else operator.and_)(result, a, b)
        return Entry(function(number(a.whole), number(b.whole)))

    return rule


def _number_of(
    function: Callable[[Traced, Traced], Traced], compare: Callable[[Traced, Traced], Traced]
) -> Callable[..., Traced]:
    """An extremum that is NaN only where both sides are NaN."""

    def extremum(a: Traced, b: Traced) -> Traced:
        if is_int(a.expr) and is_int(b.expr):
            return function(a, b)
        if not _BOUNDS_SHARE_GRADIENTS:  # the first of two equal numbers has the gradient
            return where(compare(a, b) | (b != b), a, b)
        return where(a != a, b, where(b != b, a, function(a, b)))

    return extremum


def _hypotenuse(x: Traced, y: Traced) -> Traced:
    """The root of the sum of squares; no square leaves the range of floats."""
    smaller, larger = fg.minimum(fg.abs(x), fg.abs(y)), fg.maximum(fg.abs(x), fg.abs(y))
    return where(smaller == larger, 2**0.5 * larger, larger * fg.sqrt(1 + (smaller / larger) ** 2))


def _hypot(x: Traced, y: Traced) -> Traced:
    """At (0, 0), where it has no derivative, that of the root is NaN, as torch's is."""
    return where((x == 0) & (y == 0), fg.sqrt(x * x + y * y), _hypotenuse(x, y))


def _cofunction(x: Traced) -> Traced:
    return fg.sqrt((1 - x) * (1 + x))


def _signbit(x: Traced) -> Traced:
    return x < 0 if is_int(x.expr) else (x < 0) | ((x == 0) & (1 / x < 0))


def _inverse_sinh(x: Traced) -> Traced:
    size = where(x < 0, -x, x)  # unlike that of abs, its derivative at 0 is 1
    result = fg.log1p(size + size * (size / (1 + _hypotenuse(size, _ONE))))
    result = where(size == math.inf, size, result)
    return where(x < 0, -result, result)


def _round(result: Result, /, x: Entry, decimals: Entry | None = None) -> Entry:
    if decimals is None:
        return Entry(fg.round(number(x.whole)))
    unit = 10.0 ** number(decimals.whole)
    return Entry(fg.round(number(x.whole) * unit) / unit)


# Operations on the bits of integers.


def _bitwise(function: Callable[..., Traced]) -> Rule:
    def rule(result: Result, /, a: Entry, b: Entry) -> Entry:
        x, y = a.whole, b.whole
        return Entry(
            function(x, y) if result.dtype == torch.bool else function(number(x), number(y))
        )

    return rule


def _left_shift(result: Result, /, a: Entry, b: Entry) -> Entry:
    x, n = number(a.whole), number(b.whole)
    farthest = ShiftLeft.farthest(limits(x.expr))
    wraps = DTYPES[result.dtype] in NARROW  # farther shifts leave no bit
    if not (wraps or n.expr.is_number or result.tracer.never_negative(farthest - n.expr)):
        result.tracer.refuse(
            "integers may be shifted to the left by so many places that bits are lost",
            numbers=f"{python_text(x.expr)} by {python_text(n.expr)}; at most {farthest} places, "
            "as integers have 61 bits",
            way_out="small integers by few places, as in torch.tensor(1) << n.clamp(max=60)",
        )
    shifted = x << n
    if n.expr.is_number or result.tracer.never_negative(n.expr):
        return Entry(shifted)
    return Entry(where(n < 0, 0, shifted))  # torch's amounts below 0 are large ones


def _right_shift(result: Result, /, a: Entry, b: Entry) -> Entry:
    x, n = number(a.whole), number(b.whole)
    shifted = x >> n
    if n.expr.is_number or result.tracer.never_negative(n.expr):
        return Entry(shifted)
    return Entry(where(n < 0, x >> 63, shifted))


def _bitwise_not(result: Result, /, x: Entry) -> Entry:
    value = x.whole
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
    "hypot": _hypot,
    "asin": lambda x: fg.atan2(x, _cofunction(x)),
    "acos": lambda x: fg.atan2(_cofunction(x), x),
    "asinh": _inverse_sinh,
    "acosh": lambda x: fg.log(x + fg.sqrt(x - 1) * fg.sqrt(x + 1)),
    "atanh": lambda x: (fg.log1p(x) - fg.log1p(-x)) / 2,
    "signbit": _signbit,
    "ceil": lambda x: -fg.floor(-x),
    "frac": lambda x: x - where(x < 0, -fg.floor(-x), fg.floor(x)),
    "relu": lambda x: where(x <= 0, 0, x),  # NaN where x is
    "hardtanh": _hard_tanh,
    "hardsigmoid": _hard_sigmoid,
    "hardswish": lambda x: x * _hard_sigmoid(x),
    **{name: getattr(fg, name) for name in FUNCTIONS},
}
_CONDITIONS: dict[str, Callable[..., Traced]] = {
    "logical_and": operator.and_,
    "logical_or": operator.or_,
    "logical_xor": operator.xor,
    "logical_not": operator.invert,
}
_BITS = {
    **dict.fromkeys(("__and__", "bitwise_and"), operator.and_),
    **dict.fromkeys(("__or__", "bitwise_or"), operator.or_),
    **dict.fromkeys(("__xor__", "bitwise_xor"), operator.xor),
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

RULES: dict[str, Rule] = {
    **{name: _plain(function) for name, function in _NUMBERS.items()},
    **{name: _conditions(function) for name, function in _CONDITIONS.items()},
    **{name: _comparison(getattr(operator, name)) for name in _COMPARISONS},
    "remainder": _floored(operator.mod),
    "floor_divide": _floored(operator.floordiv),
    **dict.fromkeys(
        ("trunc", "fix"), lambda result, x: Entry(_toward_zero(result, number(x.whole)))
    ),
    "round": _round,
    "where": _where,
    "masked_fill": lambda result, x, mask, value: _where(result, mask, value, x),
    "add": _add,
    "sub": _subtract,
    "rsub": lambda result, a, b, alpha=None: _subtract(result, b, a, alpha),
    "mul": _multiply,
    "div": _divide,
    "pow": _power,
    "true_divide": _divide,
    "fmod": _fmod,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda result, x, max: _clamp(result, x, None, max),
    "minimum": _extremum("minimum", fg.minimum),
    "maximum": _extremum("maximum", fg.maximum),
    "fmin": _extremum("minimum", _number_of(fg.minimum, operator.le)),
    "fmax": _extremum("maximum", _number_of(fg.maximum, operator.ge)),
    "_to_copy": _copy,
    "detach": _detach,
    **{name: _bitwise(function) for name, function in _BITS.items()},
    "bitwise_not": _bitwise_not,
    **dict.fromkeys(("__lshift__", "bitwise_left_shift"), _left_shift),
    **dict.fromkeys(("__rshift__", "bitwise_right_shift"), _right_shift),
}
"""The rule of each operation by its name; it covers all overloads."""
