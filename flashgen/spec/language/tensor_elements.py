"""Elements of captured tensors, and bounds on ranges of them, as sympy expressions."""

from __future__ import annotations

from typing import Any

import sympy

from flashgen.shared.dtypes import ELEMENT_RANGES, FLOAT_DTYPES
from flashgen.spec.language.sympy_functions import RealFunction


class TensorSymbol(sympy.Symbol):  # type: ignore[misc]
    """A whole captured tensor; it is integer or real like its elements.

    Attributes:
        dtype: the dtype of the elements.
    """

    __slots__ = ("dtype",)

    def __new__(cls, name: str, dtype: str) -> TensorSymbol:
        kind = {"real": True} if dtype in FLOAT_DTYPES else {"integer": True}
        symbol: TensorSymbol = sympy.Symbol.__xnew__(cls, name, **kind)
        symbol.dtype = dtype
        return symbol

    def _hashable_content(self) -> tuple[Any, ...]:
        return (*super()._hashable_content(), self.dtype)

    def __getnewargs_ex__(self) -> tuple[tuple[str, str], dict[str, Any]]:
        return (self.name, self.dtype), {}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return TensorSymbol, (self.name, self.dtype)


class TensorRead(RealFunction):
    """A value that is read from a captured tensor.

    Its derivative is 0 with respect to every symbol, because indices are integers.
    """

    reads_tensor = True

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
        return ELEMENT_RANGES[self.tensor.dtype]

    def _eval_is_integer(self) -> Any:
        return self.args[0].is_integer

    def _eval_is_finite(self) -> bool:
        return True

    def _eval_is_nonnegative(self) -> Any:
        return True if self.args[0].is_integer and self.limits[0] >= 0 else None

    def _eval_derivative(self, symbol: sympy.Symbol) -> sympy.Expr:
        return sympy.S.Zero


class Element(TensorRead):
    """``Element(tensor, i, j, ...)``: one element; an index outside is clamped to the tensor.

    The element of a bool tensor is 0 or 1.
    """

    @property
    def indices(self) -> tuple[sympy.Expr, ...]:
        return tuple(self.args[1:])


class Extreme(TensorRead):
    """``Extreme(tensor, axis, lo, hi, *others)``: a bound on a range of elements along an axis.

    Both ends are inclusive; ``others`` are the indices on the other axes, in order. The bound may
    include elements slightly beyond the ends. Only results of the analysis contain it.
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
    """A lower bound of the elements: their minimum, or less."""


class Greatest(Extreme):
    """An upper bound of the elements: their maximum, or more."""
