"""Tensors that a mod captures: ``bias[h, q - k + fg.seq_k - 1]``.

An element is an expression like any other: `Element` of the tensor's symbol and its indices. An
index outside the tensor means its nearest element, so that a masked position may compute any index
and no read ever leaves the tensor; it is also what broadcasts a dimension of length 1.
"""

from __future__ import annotations

import numbers
from typing import NoReturn

import sympy

from .element import FLOATS, Element, TensorSymbol
from .names import check_name
from .shown import shown
from .symbols import is_condition
from .traced import Traced, Value, as_expr, captures_of, refuse

INTEGERS = ("int32", "int64", "int16", "int8", "uint8", "bool")
DTYPES = (*FLOATS, *INTEGERS)

SIZES = ("batch", "heads", "heads_kv", "seq_q", "seq_k")
"""Names of dimensions whose length the call knows."""

MOST_DIMS = 8


class Tensor(Traced):
    """A tensor that is given when the operator is called; ``t[i, j]`` is a traced value.

    Args:
        name: the argument's name, as for `Scalar`.
        dims: the length of each dimension: a number; "batch", "heads", "heads_kv", "seq_q" or
            "seq_k", which the call knows; or a name of its own, any length that is the same
            wherever the name is used. A named dimension of length 1 stands for any length. The
            positions q and k are global, so "seq_q" is at least q_offset + seq_q long.
        dtype: "float32", "float16", "bfloat16", "int32", "int64", "int16", "int8", "uint8" or
            "bool". Elements of int64 tensors lie within 2^60 of 0.
        grad: whether it is learned: the backward pass then gives its gradient. Floats only.

    Without dimensions it is a number itself: ``score * t``.

    Raises:
        SpecError: for a name, dims, dtype or grad that cannot be used.
    """

    __slots__ = ("dims", "dtype", "grad", "name", "symbol")

    def __init__(
        self,
        name: str,
        dims: tuple[str | int, ...],
        dtype: str = "float32",
        grad: bool = False,
    ) -> None:
        check_name("Tensor", name)
        _check(name, dims, dtype, grad)
        self.name = name
        self.dims = tuple(dims)
        self.dtype = dtype
        self.grad = grad
        self.symbol = TensorSymbol(name, dtype)
        self.captures = (self,)

    @property
    def expr(self) -> sympy.Basic:
        if self.dims:
            refuse(
                f"the Tensor {self.name!r} is used as one number",
                numbers=f"it has {len(self.dims)} dimensions: ({', '.join(map(str, self.dims))})",
                way_out=f"an index for each, as in {self.name}"
                f"[{', '.join(['h', 'q', 'k', 'b'][: len(self.dims)]) or '...'}]",
            )
        return self._element(())

    def _element(self, indices: tuple[sympy.Expr, ...]) -> sympy.Basic:
        element = Element(self.symbol, *indices)
        return sympy.Ne(element, 0) if self.dtype == "bool" else element

    def __getitem__(self, index: object) -> Traced:  # type: ignore[override]
        given = index if isinstance(index, tuple) else (index,)
        if len(given) != len(self.dims):
            refuse(
                f"the Tensor {self.name!r} takes one index for each dimension",
                numbers=f"{len(given)} given, dims ({', '.join(map(str, self.dims))})",
                way_out="all indices in one bracket, as in bias[h, q - k]",
            )
        indices = tuple(self._index(i, dim) for i, dim in zip(given, self.dims, strict=True))
        return Value(self._element(indices), captures_of(self, *given))

    def _index(self, index: object, dim: str | int) -> sympy.Expr:
        expr = as_expr(index)
        if is_condition(expr) or not expr.is_integer:
            refuse(
                f"an index of the Tensor {self.name!r} is not an integer",
                numbers=f"index {shown(expr)} of dimension {dim}",
                way_out="fg.where(condition, 1, 0) for a condition, fg.floor(x) for a float",
            )
        if isinstance(index, numbers.Integral) and int(index) < 0:
            if isinstance(dim, str):
                refuse(
                    f"an index of the Tensor {self.name!r} is counted from an end that is "
                    "not known yet",
                    numbers=f"index {int(index)} of dimension {dim}",
                    way_out="fg.seq_k - 1 and the like, or a dimension with a number for length",
                )
            expr += dim
        if isinstance(dim, int) and expr.is_Integer and not 0 <= expr < dim:
            refuse(
                f"an index of the Tensor {self.name!r} is outside its dimension",
                numbers=f"index {shown(as_expr(index))} of length {dim}",
                way_out=f"an index from 0 to {dim - 1}",
            )
        return expr

    def __iter__(self) -> NoReturn:
        refuse(
            f"the Tensor {self.name!r} cannot be iterated over",
            numbers=f"dims ({', '.join(map(str, self.dims))})",
            way_out=f"{self.name}[i] for each i of a range",
        )

    def __repr__(self) -> str:
        learned = ", grad=True" if self.grad else ""
        return f"Tensor({self.name!r}, {self.dims!r}, {self.dtype!r}{learned})"

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.key)

    def __reduce__(self) -> tuple[object, ...]:
        return Tensor, self.key

    @property
    def key(self) -> tuple[str, tuple[str | int, ...], str, bool]:
        """What makes two tensors the same one; ``==`` cannot say, it is elementwise."""
        return self.name, self.dims, self.dtype, self.grad


def _check(name: str, dims: object, dtype: object, grad: object) -> None:
    if not isinstance(dims, tuple | list) or len(dims) > MOST_DIMS:
        refuse(
            f"the dims of the Tensor {name!r} are a tuple of at most {MOST_DIMS}",
            numbers=f"dims {dims!r}",
            way_out='fg.Tensor("bias", ("heads", "seq_k")); () for a tensor of one number',
        )
    for dim in dims:
        number = isinstance(dim, int) and not isinstance(dim, bool) and 0 < dim < 2**31
        if not number and not (isinstance(dim, str) and dim.isidentifier()):
            refuse(
                f"a dimension of the Tensor {name!r} is neither a length nor a name",
                numbers=f"dims {tuple(dims)!r}",
                way_out=f"a positive number, one of {', '.join(SIZES)}, or a name of its own",
            )
    if dtype not in DTYPES:
        refuse(
            "a Tensor of a dtype that kernels do not read",
            numbers=f"dtype {dtype!r}; available: {', '.join(DTYPES)}",
            way_out='dtype="float32" for biases, "int32" for positions, "bool" for masks',
        )
    if not isinstance(grad, bool) or (grad and dtype not in FLOATS):
        refuse(
            "grad says whether a Tensor of floats is learned",
            numbers=f"grad {grad!r}, dtype {dtype!r}",
            way_out=f"grad=True and one of {', '.join(FLOATS)}",
        )
