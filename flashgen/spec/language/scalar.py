"""Run-time scalars that a mod captures."""

from __future__ import annotations

from functools import partial

import sympy

from flashgen.shared.dtypes import SCALAR_DTYPES, SCALAR_LIMIT
from flashgen.shared.signature import CHOICE, FIRST_ROW, SPLIT, WHOLE
from flashgen.spec.language.capture_names import check_name
from flashgen.spec.language.symbols import BATCH, HEADS, SEQ_K, SEQ_Q
from flashgen.spec.language.traced import Capture, Traced
from flashgen.spec.language.user_source import in_specs, refuse


@in_specs
class Scalar(Capture):
    """A run-time number, given with each call; inside a mod it is a traced value.

    Args:
        name: the argument's name in calls: an identifier that is no keyword of Python and has no
            meaning in flashgen.
        dtype: "int32", "float32" or "bool".
        minimum: a lower bound that the analysis of the mask may use; checked at every call. Not
            available for "bool".

    Raises:
        SpecError: the name, dtype or minimum cannot be used.
    """

    __slots__ = ("minimum",)
    is_size = False
    """True for the sizes of the call: fg.batch, fg.heads, fg.seq_q, fg.seq_k."""

    def __init__(self, name: str, dtype: str = "int32", *, minimum: float | None = None) -> None:
        check_name("Scalar", name)
        _check(dtype, minimum)
        self.name = name
        self.dtype = dtype
        self.minimum = minimum
        super().__init__(_symbol(name, dtype, minimum), (self,))

    def __repr__(self) -> str:
        bound = "" if self.minimum is None else f", minimum={self.minimum}"
        return f"Scalar({self.name!r}, {self.dtype!r}{bound})"

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> str | tuple[object, ...]:
        if self.name in (*WHOLE, SPLIT, FIRST_ROW, *CHOICE):
            return Scalar.reserved, (self.name,)
        return partial(Scalar, minimum=self.minimum), (self.name, self.dtype)

    @property
    def key(self) -> tuple[str, str, float | None]:
        return self.name, self.dtype, self.minimum

    @staticmethod
    def reserved(name: str) -> Scalar:
        """One of `shared.signature.WHOLE`, `SPLIT`, `FIRST_ROW` or `CHOICE`: names that no capture
        of a mod has."""
        scalar = Scalar("number", "int32", minimum=_LEAST.get(name, 0))
        scalar.name = name
        Traced.__init__(scalar, _symbol(name, "int32", scalar.minimum), (scalar,))
        return scalar


_LEAST = {"whole_heads": 1, SPLIT: 16, FIRST_ROW: None}
_LEAST |= dict(zip(CHOICE, (None, 1, 1, 0, 0, 1, 1), strict=True))


class Size(Scalar):
    """A size of the call, which follows from the shapes of the operands."""

    __slots__ = ()
    is_size = True

    def __init__(self, symbol: sympy.Symbol, minimum: int) -> None:
        self.name = symbol.name
        self.dtype = "int32"
        self.minimum = minimum
        Traced.__init__(self, symbol, (self,))

    def __reduce__(self) -> str:
        return self.name  # of the global variable


def _symbol(name: str, dtype: str, minimum: float | None) -> sympy.Symbol:
    if dtype == "bool":
        return sympy.Symbol(name)
    sign: dict[str, bool] = {}
    if minimum is not None and minimum > 0:
        sign = {"positive": True}
    elif minimum is not None and minimum == 0:
        sign = {"nonnegative": True}
    return sympy.Symbol(name, **({"integer": True} if dtype == "int32" else {"real": True}), **sign)


def _check(dtype: str, minimum: float | None) -> None:
    if not isinstance(dtype, str) or dtype not in SCALAR_DTYPES:
        refuse(
            "kernels do not take a Scalar of this dtype",
            numbers=f"dtype {dtype!r}; available: {', '.join(SCALAR_DTYPES)}",
            way_out='dtype="int32" for positions, "float32" for factors, "bool" for switches',
        )
    if minimum is None:
        return
    number = isinstance(minimum, int | float) and not isinstance(minimum, bool)
    allowed = dtype != "bool" and number and -SCALAR_LIMIT <= minimum <= SCALAR_LIMIT
    if not allowed or (dtype == "int32" and minimum % 1 != 0):
        refuse(
            "the minimum of a Scalar is a number within the limit, a whole one of an int32",
            numbers=f"minimum {minimum!r}, dtype {dtype!r}, limit +-{SCALAR_LIMIT:,}",
            way_out="no minimum: a bool is True or False"
            if dtype == "bool"
            else "minimum=1 for a width that cannot be empty, or no minimum",
        )


batch = Size(BATCH, 1)
heads = Size(HEADS, 1)
seq_q = Size(SEQ_Q, 0)
seq_k = Size(SEQ_K, 0)
