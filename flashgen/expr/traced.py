"""Traced values: what the arguments of a mod are while flashgen reads it.

A mod runs once, on symbols. Operators build the expression; everything that would need a value now
(``if``, ``and``, ``int()``, an index) is refused with the user's line and the way to write it.
Numbers are exact: a literal 0.1 is the rational 1/10, so that only the kernel rounds.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, NoReturn, Union

import sympy

from ..errors import SpecError
from . import advice
from .functions import FloorDiv, FloorMod
from .limits import fits, limits
from .literal import LARGEST_LITERAL
from .shown import shown
from .source import user_location
from .symbols import is_condition, is_int

if TYPE_CHECKING:
    from .scalar import Scalar
    from .tensor import Tensor

Operand = Union["Traced", int, float, bool]
Capture = Union["Scalar", "Tensor"]

_UNREAL = (sympy.nan, sympy.zoo, sympy.oo, -sympy.oo, sympy.I)


def refuse(what: str, *, numbers: str, way_out: str) -> NoReturn:
    """Raise a SpecError that points at the user's line now running."""
    raise SpecError(what, where=user_location(), numbers=numbers, way_out=way_out) from None


class Traced:
    """A number or a condition that the kernel will compute.

    Attributes:
        expr: the sympy expression so far.
        captures: the run-time numbers and tensors it was built from, in order of first use.
    """

    __slots__ = ("captures", "expr")
    __array_ufunc__ = None  # numpy scalars on the left then defer to our operators
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expr: sympy.Basic, captures: tuple[Capture, ...] = ()) -> None:
        self.expr = expr
        self.captures = captures

    @property
    def is_condition(self) -> bool:
        return is_condition(self.expr)

    def __repr__(self) -> str:
        return f"<traced {shown(self.expr)}>"

    # Arithmetic.

    def __add__(self, other: Operand) -> Traced:
        return combine("+", self, other)

    def __radd__(self, other: Operand) -> Traced:
        return combine("+", other, self)

    def __sub__(self, other: Operand) -> Traced:
        return combine("-", self, other)

    def __rsub__(self, other: Operand) -> Traced:
        return combine("-", other, self)

    def __mul__(self, other: Operand) -> Traced:
        return combine("*", self, other)

    def __rmul__(self, other: Operand) -> Traced:
        return combine("*", other, self)

    def __truediv__(self, other: Operand) -> Traced:
        return combine("/", self, other)

    def __rtruediv__(self, other: Operand) -> Traced:
        return combine("/", other, self)

    def __floordiv__(self, other: Operand) -> Traced:
        return combine("//", self, other)

    def __rfloordiv__(self, other: Operand) -> Traced:
        return combine("//", other, self)

    def __mod__(self, other: Operand) -> Traced:
        return combine("%", self, other)

    def __rmod__(self, other: Operand) -> Traced:
        return combine("%", other, self)

    def __divmod__(self, other: Operand) -> tuple[Traced, Traced]:
        return combine("//", self, other), combine("%", self, other)

    def __rdivmod__(self, other: Operand) -> tuple[Traced, Traced]:
        return combine("//", other, self), combine("%", other, self)

    def __pow__(self, other: Operand) -> Traced:
        return combine("**", self, other)

    def __rpow__(self, other: Operand) -> Traced:
        return combine("**", other, self)

    def __neg__(self) -> Traced:
        return combine("-", 0, self)

    def __pos__(self) -> Traced:
        return combine("+", 0, self)

    def __abs__(self) -> Traced:
        from .maths import absolute

        return absolute(self)

    def __floor__(self) -> Traced:
        from .maths import floor

        result = floor(self)
        assert isinstance(result, Traced)
        return result

    # Comparisons.

    def __lt__(self, other: Operand) -> Traced:
        return combine("<", self, other)

    def __le__(self, other: Operand) -> Traced:
        return combine("<=", self, other)

    def __gt__(self, other: Operand) -> Traced:
        return combine(">", self, other)

    def __ge__(self, other: Operand) -> Traced:
        return combine(">=", self, other)

    def __eq__(self, other: object) -> Traced:  # type: ignore[override]
        return combine("==", self, other)

    def __ne__(self, other: object) -> Traced:  # type: ignore[override]
        return combine("!=", self, other)

    # Conditions.

    def __and__(self, other: Operand) -> Traced:
        return combine("&", self, other)

    def __rand__(self, other: Operand) -> Traced:
        return combine("&", other, self)

    def __or__(self, other: Operand) -> Traced:
        return combine("|", self, other)

    def __ror__(self, other: Operand) -> Traced:
        return combine("|", other, self)

    def __xor__(self, other: Operand) -> Traced:
        return combine("^", self, other)

    def __rxor__(self, other: Operand) -> Traced:
        return combine("^", other, self)

    def __invert__(self) -> Traced:
        if not self.is_condition:
            refuse(
                "~ is for conditions, this is a number",
                numbers=f"operand {shown(self.expr)}",
                way_out="compare it first, as in ~(q < k); the negative of a number is -x",
            )
        return Value(sympy.Not(self.expr), self.captures)

    # What a traced value cannot do: it has no value yet.

    def __bool__(self) -> NoReturn:
        way_out = advice.for_truth_value()
        refuse(
            "a traced value is neither true nor false yet: "
            "if, and, or, not and chained comparisons cannot be used on it",
            numbers=f"value {shown(self.expr)}",
            way_out=way_out,
        )

    def __int__(self) -> NoReturn:
        self._no_value("int()", "fg.floor(x), or x // 1")

    def __index__(self) -> NoReturn:
        self._no_value("an index or a range", "fg.where(condition, a, b) to choose between values")

    def __float__(self) -> NoReturn:
        self._no_value("float() and the functions of math", advice.for_call())

    def __complex__(self) -> NoReturn:
        self._no_value("complex()", "real arithmetic")

    def __iter__(self) -> NoReturn:
        self._no_value("iteration and unpacking", "a traced value as one number")

    def __len__(self) -> NoReturn:
        self._no_value("len()", "fg.seq_q, fg.seq_k, fg.heads or fg.batch for sizes")

    def __getitem__(self, index: object) -> NoReturn:
        self._no_value("indexing", "a traced value as one number; it has no elements")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        self._no_value("a call", "x * (...) where a product is meant")

    def __round__(self, digits: object = None) -> NoReturn:
        self._no_value("round()", "fg.floor(x + 0.5)")

    def __trunc__(self) -> NoReturn:
        self._no_value("trunc()", "fg.where(x < 0, -fg.floor(-x), fg.floor(x))")

    def __ceil__(self) -> NoReturn:
        self._no_value("ceil()", "-fg.floor(-x)")

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        self._no_value("a numpy function", "the functions of flashgen, such as fg.exp")

    def __lshift__(self, other: object) -> NoReturn:
        self._no_value("<<", "x * 2**n")

    def __rshift__(self, other: object) -> NoReturn:
        self._no_value(">>", "x // 2**n")

    __rlshift__ = __lshift__
    __rrshift__ = __rshift__

    def __matmul__(self, other: object) -> NoReturn:
        self._no_value("@", "* for the product of two numbers")

    __rmatmul__ = __matmul__

    def __contains__(self, item: object) -> NoReturn:
        self._no_value("in", "(x == a) | (x == b)")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._no_value(f".{name}", f"a function of flashgen{advice.for_attribute(name)}")

    def _no_value(self, use: str, way_out: str) -> NoReturn:
        refuse(
            f"a traced value has no value yet: {use} cannot be used on it",
            numbers=f"value {shown(self.expr)}",
            way_out=way_out,
        )


class Value(Traced):
    """What operators return; a sibling of Scalar, so that no reflected operator comes first."""

    __slots__ = ()


def as_expr(value: object) -> sympy.Basic:
    """The sympy expression of an operand: a traced value or a Python or numpy number or bool.

    Raises:
        SpecError: for any other type, and for numbers that float32 cannot hold.
    """
    if isinstance(value, Traced):
        return value.expr
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return sympy.true if value else sympy.false
    if isinstance(value, numbers.Integral):
        return sympy.Integer(int(value))
    if isinstance(value, numbers.Rational | Fraction):
        return sympy.Rational(value.numerator, value.denominator)
    if isinstance(value, numbers.Real):
        return _literal(float(value))
    refuse(
        f"a {type(value).__name__} cannot be used in a mod",
        numbers=f"value {str(value)[:60]}",
        way_out=advice.for_type(value),
    )


def _literal(value: float) -> sympy.Expr:
    if not math.isfinite(value) or abs(value) > LARGEST_LITERAL:
        refuse(
            "a number that float32 cannot hold",
            numbers=f"{value!r}; the largest finite float32 is {LARGEST_LITERAL:.8g}",
            way_out="mask_mod to remove scores, instead of adding -inf to them",
        )
    return sympy.Rational(repr(value))


def captures_of(*values: object) -> tuple[Capture, ...]:
    """The captures of all operands, in order, each once."""
    found: list[Capture] = []
    for value in values:
        if isinstance(value, Traced):
            for capture in value.captures:
                if not any(capture is other for other in found):
                    found.append(capture)
    return tuple(found)


def made(expr: sympy.Basic, *operands: object) -> Traced:
    """A traced value from a new expression, which is a finite real number or a condition."""
    if not is_condition(expr) and (expr.has(*_UNREAL) or expr.is_real is False):
        refuse(
            "this is not a finite real number",
            numbers=" and ".join(f"operand {shown(as_expr(operand))}" for operand in operands),
            way_out="no division by 0, and no log or root of a negative number",
        )
    return Value(expr, captures_of(*operands))


def combine(operator: str, left: object, right: object) -> Traced:
    """``left operator right`` with the meaning that torch gives it, elementwise."""
    a, b = as_expr(left), as_expr(right)
    if operator in _CONDITION_OPERATORS:
        if not (is_condition(a) and is_condition(b)):
            refuse(
                f"{operator} is for conditions, and one side is a number",
                numbers=_both(operator, a, b),
                way_out=f"brackets around comparisons, as in (q >= k) {operator} (q - k < 128): "
                f"{operator} binds tighter than < and ==",
            )
        return made(_CONDITION_OPERATORS[operator](a, b), left, right)
    if is_condition(a) and is_condition(b) and operator in ("==", "!="):
        same = sympy.Or(sympy.And(a, b), sympy.And(sympy.Not(a), sympy.Not(b)))
        return made(same if operator == "==" else sympy.Not(same), left, right)
    if is_condition(a) or is_condition(b):
        refuse(
            f"{operator} is for numbers, and one side is a condition",
            numbers=_both(operator, a, b),
            way_out="fg.where(condition, 1, 0) to make a number of a condition",
        )
    if operator in ("/", "//", "%") and b.is_zero:
        refuse(
            f"{operator} by 0",
            numbers=_both(operator, a, b),
            way_out="a divisor that is not 0",
        )
    if operator in _EXACT_OPERATORS:
        _check_integers(operator, a, b)
    return made(_NUMBER_OPERATORS[operator](a, b), left, right)


def _check_integers(operator: str, a: sympy.Expr, b: sympy.Expr) -> None:
    for side in (a, b):
        if is_int(side) and not fits(side):
            largest = max(map(abs, limits(side)))
            refuse(
                f"{operator} of integers that can leave 64 bits",
                numbers=f"{shown(side)} can reach 2^{largest.bit_length() - 1}, for positions up "
                "to 2^28 and int32 scalars up to 2^30",
                way_out="smaller factors, or a float32 Scalar in the product to make it a float",
            )


def _both(operator: str, a: sympy.Basic, b: sympy.Basic) -> str:
    left, right = (text if text.isalnum() else f"({text})" for text in (shown(a), shown(b)))
    return f"{left} {operator} {right}"


def _exclusive(a: sympy.Basic, b: sympy.Basic) -> sympy.Basic:
    return sympy.Or(sympy.And(a, sympy.Not(b)), sympy.And(sympy.Not(a), b))


def compare(kind: Callable[..., sympy.Basic], a: sympy.Expr, b: sympy.Expr) -> sympy.Basic:
    """``kind(a, b)``, in integers alone where both sides are rational combinations of integers."""
    scale = _clearing_scale(a, b)
    if scale is not None and scale > 1:
        whole = sympy.expand_mul(a * scale), sympy.expand_mul(b * scale)
        if all(map(fits, whole)):
            a, b = whole
    return kind(a, b)


def _clearing_scale(a: sympy.Expr, b: sympy.Expr) -> int | None:
    scale = 1
    for term in (*sympy.Add.make_args(a), *sympy.Add.make_args(b)):
        coefficient, rest = term.as_coeff_Mul()
        if not (coefficient.is_Rational and is_int(rest)):
            return None
        scale = int(sympy.ilcm(scale, coefficient.q))
    return scale if scale <= _LARGEST_CLEARING else None


# Beyond this a literal was not meant as a fraction.
_LARGEST_CLEARING = 10**6

_EXACT_OPERATORS = ("<", "<=", ">", ">=", "==", "!=", "//", "%")

_CONDITION_OPERATORS: dict[str, Callable[[sympy.Basic, sympy.Basic], sympy.Basic]] = {
    "&": sympy.And,
    "|": sympy.Or,
    "^": _exclusive,
}

_NUMBER_OPERATORS: dict[str, Callable[[sympy.Expr, sympy.Expr], sympy.Basic]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": FloorDiv,
    "%": FloorMod,
    "**": lambda a, b: a**b,
    "<": lambda a, b: compare(sympy.Lt, a, b),
    "<=": lambda a, b: compare(sympy.Le, a, b),
    ">": lambda a, b: compare(sympy.Gt, a, b),
    ">=": lambda a, b: compare(sympy.Ge, a, b),
    "==": lambda a, b: compare(sympy.Eq, a, b),
    "!=": lambda a, b: compare(sympy.Ne, a, b),
}
