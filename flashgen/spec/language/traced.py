"""Traced values: the arguments of a mod while flashgen traces it.

A mod runs once, on symbols. Operators build the expression. An operation that needs a value at
trace time (``if``, ``and``, ``int()``, an index) is an error that names the user's line and the
alternative. A literal 0.1 is the rational 1/10, so that only the kernel rounds.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable
from ctypes import c_float
from fractions import Fraction
from typing import Any, NoReturn, Union

import sympy

from flashgen.shared.dtypes import FLOAT32_LEAST, FLOAT32_MAX, is_bool
from flashgen.shared.errors import SpecError, UnhashableError
from flashgen.spec.language import advice
from flashgen.spec.language.float_functions import Abs
from flashgen.spec.language.float_operations import NAN, AsFloat, negative
from flashgen.spec.language.integer_limits import promoted, wrapped
from flashgen.spec.language.lets import Let, named
from flashgen.spec.language.operations import MOST_EFFORT, effort_so_far
from flashgen.spec.language.operators import combined
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.symbols import is_condition, is_int
from flashgen.spec.language.sympy_functions import Floor, Round
from flashgen.spec.language.user_source import refuse

Operand = Union["Traced", int, float, bool]

_Operator = Callable[["Traced", Operand], "Traced"]


def _operator(sign: str) -> _Operator:
    """The method for ``self sign other``."""
    return lambda self, other: combine(sign, self, other)


def _operators(sign: str) -> tuple[_Operator, _Operator]:
    """The methods for ``self sign other`` and ``other sign self``."""
    return _operator(sign), lambda self, other: combine(sign, other, self)


def _without_value(use: str, way_out: str, *, index: bool = False) -> Callable[..., NoReturn]:
    """A method that refuses an operation which needs a value.

    Args:
        index: whether Python, numpy or torch calls it for an index of an array.
    """

    def method(self: Traced, *args: object, **kwargs: object) -> NoReturn:
        table = advice.for_index() if index else None
        if table is not None:
            refuse(
                "an array that the spec does not capture has an index that is traced",
                numbers=f"index {python_text(self.expr)}, which has no value yet",
                way_out=table,
            )
        self._no_value(use, way_out)

    return method


class Traced:
    """A number or a condition that the kernel will compute.

    Attributes:
        expr: the sympy expression so far.
        captures: the scalars and tensors in the expression, in order of first use.
        narrow: the dtype of an integer that wraps around, one of `integer_limits.NARROW`; else "".
    """

    __slots__ = ("captures", "expr", "narrow")
    __array_ufunc__ = None  # lets numpy scalars on the left defer to the operators below

    def __init__(
        self, expr: sympy.Basic, captures: tuple[Capture, ...] = (), narrow: str = ""
    ) -> None:
        self.expr = expr
        self.captures = captures
        self.narrow = narrow

    @property
    def is_condition(self) -> bool:
        return is_condition(self.expr)

    def __repr__(self) -> str:
        return f"<traced {python_text(self.expr)}>"

    __add__, __radd__ = _operators("+")
    __sub__, __rsub__ = _operators("-")
    __mul__, __rmul__ = _operators("*")
    __truediv__, __rtruediv__ = _operators("/")
    __floordiv__, __rfloordiv__ = _operators("//")
    __mod__, __rmod__ = _operators("%")
    __and__, __rand__ = _operators("&")
    __or__, __ror__ = _operators("|")
    __xor__, __rxor__ = _operators("^")
    __lshift__, __rlshift__ = _operators("<<")
    __rshift__, __rrshift__ = _operators(">>")

    # Python reflects a comparison as its opposite.
    __lt__, __le__ = _operator("<"), _operator("<=")
    __gt__, __ge__ = _operator(">"), _operator(">=")
    __eq__, __ne__ = _operator("=="), _operator("!=")  # type: ignore[assignment]

    def __divmod__(self, other: Operand) -> tuple[Traced, Traced]:
        return combine("//", self, other), combine("%", self, other)

    def __rdivmod__(self, other: Operand) -> tuple[Traced, Traced]:
        return combine("//", other, self), combine("%", other, self)

    def __pow__(self, other: Operand, modulus: None = None) -> Traced:
        if modulus is not None:
            self._no_value("pow() with a modulus", "x**y % modulus")
        return combine("**", self, other)

    def __rpow__(self, other: Operand) -> Traced:
        return combine("**", other, self)

    def __neg__(self) -> Traced:
        return apply_function("-", negative, self)

    def __pos__(self) -> Traced:
        return apply_function("+", lambda x: x, self)

    def __abs__(self) -> Traced:
        return apply_function("abs", Abs, self)

    def __floor__(self) -> Traced:
        return apply_function("floor", Floor, self)

    def __round__(self, digits: None = None) -> Traced:
        if digits is not None:
            self._no_value("round() to decimal digits", "round(x * 100) / 100")
        return apply_function("round", Round, self)

    def __invert__(self) -> Traced:
        if self.is_condition:
            return Value(sympy.Not(self.expr), self.captures)
        if is_int(self.expr):
            return combine("-", -1, self)
        refuse(
            "~ is for conditions and integers, this is a float",
            numbers=f"operand {python_text(self.expr)}",
            way_out="compare it first, as in ~(x < 1); the negative of a number is -x",
        )

    # Operations that need a value, which a traced value does not have yet.

    def __bool__(self) -> NoReturn:
        refuse(
            "a traced value is neither true nor false yet: "
            "if, and, or, not and chained comparisons cannot be used on it",
            numbers=f"value {python_text(self.expr)}",
            way_out=advice.for_truth_value(),
        )

    def __hash__(self) -> int:
        search = "a search in a set, in a dictionary or in remembered results"
        self._no_value(search, advice.for_key(), UnhashableError)

    def __float__(self) -> NoReturn:
        self._no_value("float() and the functions of math", advice.for_call())

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._no_value(f".{name}", advice.for_attribute(name))

    __int__ = _without_value("int()", "fg.floor(x), or x // 1")
    __index__ = _without_value(
        "an index or a range", "fg.where(condition, a, b) to choose between values", index=True
    )
    __complex__ = _without_value("complex()", "real arithmetic")
    __iter__ = _without_value("iteration and unpacking", "a traced value as one number", index=True)
    __len__ = _without_value(
        "len()", "fg.seq_q, fg.seq_k, fg.heads or fg.batch for sizes", index=True
    )
    __getitem__ = _without_value("indexing", "a traced value as one number; it has no elements")
    __call__ = _without_value("a call", "x * (...) where a product is meant")
    __trunc__ = _without_value("trunc()", "fg.where(x < 0, -fg.floor(-x), fg.floor(x))")
    __ceil__ = _without_value("ceil()", "-fg.floor(-x)")
    __array__ = _without_value(
        "a numpy function", "the functions of flashgen, such as fg.exp", index=True
    )
    __matmul__ = __rmatmul__ = _without_value("@", "* for the product of two numbers")
    __contains__ = _without_value("in", "(x == a) | (x == b)")

    def _no_value(self, use: str, way_out: str, kind: type[SpecError] = SpecError) -> NoReturn:
        refuse(
            f"a traced value has no value yet: {use} cannot be used on it",
            numbers=f"value {python_text(self.expr)}",
            way_out=way_out,
            kind=kind,
        )


class Value(Traced):
    """The result of an operator. No capture is a subclass, so that no reflected operator is tried
    first."""

    __slots__ = ()


class Capture(Traced):
    """An argument of the operator that a mod uses: a `Scalar` or a `Tensor`."""

    __slots__ = ("dtype", "name")

    name: str
    dtype: str

    @property
    def key(self) -> tuple[object, ...]:
        """A value that equal captures share; ``==`` on captures is elementwise."""
        raise NotImplementedError


def as_expr(value: object) -> sympy.Basic:
    """The sympy expression of an operand: a traced value or a Python or numpy number or bool.

    Raises:
        SpecError: the type is not supported, or float32 cannot hold the number.
    """
    if isinstance(value, Traced):
        return value.expr
    if is_bool(value):
        return sympy.true if value else sympy.false
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return sympy.Integer(whole) if abs(whole) <= FLOAT32_MAX else _literal(_nearest(whole))
    if isinstance(value, numbers.Rational | Fraction):
        if max(abs(int(value.numerator)), int(value.denominator)) > _LARGEST_EXACT:
            return _literal(_nearest(value))
        return sympy.Rational(value.numerator, value.denominator)
    if isinstance(value, numbers.Real):
        return _literal(float(value))
    refuse(
        f"a {type(value).__name__} cannot be used in a mod",
        numbers=f"value {str(value)[:60]}",
        way_out=advice.for_type(value),
    )


_LARGEST_EXACT = 2**64
"""Fractions of larger numbers are floats."""


def _nearest(number: Any) -> float:
    """The nearest finite float."""
    try:
        return float(number)
    except OverflowError:
        return sys.float_info.max if number > 0 else -sys.float_info.max


def _literal(value: float) -> sympy.Expr:
    """A float32 literal as a rational number; `AsFloat` marks whole numbers."""
    if abs(value) < FLOAT32_LEAST:
        value = float(c_float(value).value)
    if math.isnan(value):
        return NAN
    if value == math.inf:
        return sympy.oo
    if value < -FLOAT32_MAX:  # removes a score, as -inf itself
        return -sympy.oo
    if value > FLOAT32_MAX:
        least = " or more" if value == sys.float_info.max else ""  # as `_nearest` gives it
        refuse(
            "a number that float32 cannot hold",
            numbers=f"{value!r}{least}; the largest finite float32 is {FLOAT32_MAX:.8g}",
            way_out="mask_mod or fg.where(condition, score, -math.inf) to remove scores; other "
            "numbers are finite in float32, or math.inf",
        )
    if value == 0 and math.copysign(1, value) < 0:
        return negative(AsFloat(sympy.S.Zero))
    return AsFloat(sympy.Rational(repr(value)))


def captures_of(*values: object) -> tuple[Capture, ...]:
    """The captures of all operands, each once, in order of first use."""
    traced = [value for value in values if isinstance(value, Traced)]
    return tuple({id(c): c for value in traced for c in value.captures}.values())


def traced_value(expr: sympy.Basic, *operands: object) -> Traced:
    """The traced value of a new expression, which must be a real number or a condition.

    A large expression gets a name (`spec.language.lets`), and one of narrow integers wraps.
    """
    narrow = narrow_dtype(*operands)
    expr = wrapped(expr, narrow)
    if expr.is_number and not is_condition(expr):
        expr = _in_float32(expr)
    if expr is sympy.nan:
        refuse(
            "this is not a finite real number",
            numbers=" and ".join(
                f"operand {python_text(as_expr(operand))}" for operand in operands
            ),
            way_out="no division by 0, and no log or root of a negative number",
        )
    expr = named(expr)
    if isinstance(expr, Let):
        _check_size(expr)
    return Value(expr, captures_of(*operands), narrow)


def _check_size(part: Let) -> None:
    needs = effort_so_far(part)
    if needs > MOST_EFFORT:
        refuse(
            "a mod is too large for a kernel",
            numbers=f"about {needs:,} additions up to here, with a function as several; "
            f"limit {MOST_EFFORT:,}",
            way_out="a captured tensor (fg.Tensor) with values that are computed before the call",
        )


def _in_float32(number: sympy.Expr) -> sympy.Expr:
    """A constant, or infinity where float32 cannot hold it; sympy's NaN where it is not real."""
    if number.is_Rational or number.has(sympy.oo, -sympy.oo):
        return number
    try:
        value = float(number)
    except OverflowError:
        value = math.inf if number.evalf(2) > 0 else -math.inf
    except TypeError:  # a complex number
        return sympy.nan
    if abs(value) > FLOAT32_MAX:
        return sympy.oo if value > 0 else -sympy.oo
    return sympy.nan if math.isnan(value) else number


def narrow_dtype(*operands: object) -> str:
    """The dtype of integers in which an operation wraps around; "" where it does not.

    A condition and a Python number have no dtype.
    """
    traced = [x for x in operands if isinstance(x, Traced) and not x.is_condition]
    return promoted({x.narrow for x in traced})


def exprs_of(*operands: object) -> list[sympy.Basic]:
    """The expressions of the operands of an operation, with numbers in the dtype of the others."""
    narrow = narrow_dtype(*operands)
    return [wrapped(as_expr(x), "" if isinstance(x, Traced) else narrow) for x in operands]


def combine(operator: str, left: object, right: object) -> Traced:
    """``left operator right`` as a traced value."""
    return traced_value(combined(operator, *exprs_of(left, right)), left, right)


def apply_function(name: str, function: Callable[..., sympy.Expr], *values: object) -> Traced:
    """``function`` of numbers. Messages call it fg.``name``, or by the sign of an operator."""
    exprs = []
    called = f"fg.{name}" if name.isidentifier() else name
    for expr in exprs_of(*values):
        if is_condition(expr):
            refuse(
                f"{called} is for numbers, this is a condition",
                numbers=f"operand {python_text(expr)}",
                way_out="fg.where(condition, 1, 0) to make a number of a condition",
            )
        exprs.append(expr)
    return traced_value(function(*exprs), *values)
