"""Elements of captured tensors as parts of expressions."""

from __future__ import annotations

from typing import Any

import sympy

FLOATS = ("float32", "float16", "bfloat16")

_LIMITS = {
    "int64": (-(2**60), 2**60),
    "int32": (-(2**31), 2**31 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int8": (-(2**7), 2**7 - 1),
    "uint8": (0, 2**8 - 1),
    "bool": (0, 1),
}


class TensorSymbol(sympy.Symbol):  # type: ignore[misc]
    """A whole captured tensor; integer or real as its elements are.

    Attributes:
        dtype: of the elements.
    """

    __slots__ = ("dtype",)

    def __new__(cls, name: str, dtype: str) -> TensorSymbol:
        kind = {"real": True} if dtype in FLOATS else {"integer": True}
        symbol: TensorSymbol = sympy.Symbol.__xnew__(cls, name, **kind)
        symbol.dtype = dtype
        return symbol

    def _hashable_content(self) -> tuple[Any, ...]:
        return (*super()._hashable_content(), self.dtype)

    def __getnewargs_ex__(self) -> tuple[tuple[str, str], dict[str, Any]]:
        return (self.name, self.dtype), {}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return TensorSymbol, (self.name, self.dtype)


class Reading(sympy.Function):  # type: ignore[misc]
    """What is read of a captured tensor: one of its elements.

    It is constant with respect to everything: an index is an integer, and has no derivative.
    """

    integer_closed = True

    @classmethod
    def eval(cls, *args: Any) -> None:
        return None

    @property
    def tensor(self) -> TensorSymbol:
        symbol: TensorSymbol = self.args[0]
        return symbol

    @property
    def limits(self) -> tuple[int, int]:
        """Least and greatest value of an integer element."""
        return _LIMITS[self.tensor.dtype]

    def _eval_is_integer(self) -> Any:
        return self.args[0].is_integer

    def _eval_is_real(self) -> bool:
        return True

    def _eval_is_finite(self) -> bool:
        return True

    def _eval_is_nonnegative(self) -> Any:
        return True if self.args[0].is_integer and self.limits[0] >= 0 else None

    def _eval_derivative(self, symbol: sympy.Symbol) -> sympy.Expr:
        return sympy.S.Zero


class Element(Reading):
    """``Element(tensor, i, j, ...)``: one element; an index outside means the nearest inside.

    The element of a bool tensor is 0 or 1.
    """

    @property
    def indices(self) -> tuple[sympy.Expr, ...]:
        return tuple(self.args[1:])


class Extreme(Reading):
    """``Extreme(tensor, axis, lo, hi, *others)``: of all elements with indices lo to hi on an axis.

    Both ends are inclusive. ``others`` are the indices on the other axes, in order. It may take in
    elements somewhat beyond the ends: a bound, not a value. Results of the analysis only.
    """

    @property
    def axis(self) -> int:
        return int(self.args[1])

    @property
    def ends(self) -> tuple[sympy.Expr, sympy.Expr]:
        return self.args[2], self.args[3]

    @property
    def others(self) -> tuple[sympy.Expr, ...]:
        return tuple(self.args[4:])


class Least(Extreme):
    """The least of them, or less."""


class Greatest(Extreme):
    """The greatest of them, or more."""


def elements_of(*exprs: sympy.Basic) -> tuple[Element, ...]:
    """Every element that expressions read, also as an index of another, in one fixed order."""
    found: set[Element] = set()
    for expr in exprs:
        found |= expr.atoms(Element)
    return tuple(sorted(found, key=sympy.default_sort_key))
