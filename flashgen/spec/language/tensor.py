"""Tensors that a mod captures: ``bias[h, q - k + fg.seq_k - 1]``.

An element is a sympy expression, `Element` of the tensor's symbol and its indices. An index outside
the tensor is clamped to it, so that masked positions may compute any index and no read leaves the
tensor. Clamping also broadcasts named dimensions of length 1.
"""

from __future__ import annotations

import difflib
import numbers
from typing import NoReturn

import sympy

from flashgen.shared.dtypes import FLOAT_DTYPES, INT32_MAX, TENSOR_DTYPES, dtype_name
from flashgen.shared.random_numbers import RANDOM_STATE
from flashgen.shared.signature import (
    FIRST_QUERIES,
    LENGTHS,
    LISTED,
    OFFSETS,
    OWNED,
    ROW_SINK,
    ROWS,
)
from flashgen.spec.language.capture_names import check_name
from flashgen.spec.language.integer_limits import NARROW
from flashgen.spec.language.lets import lets_of, replaced
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.symbols import B, H, Q, is_condition, is_int
from flashgen.spec.language.sympy_functions import Floor
from flashgen.spec.language.tensor_elements import Element, TensorSymbol
from flashgen.spec.language.traced import Capture, Traced, Value, as_expr, captures_of
from flashgen.spec.language.user_source import in_specs, refuse

SIZES = ("batch", "heads", "heads_kv", "seq_q", "seq_k")
"""Names of dimensions whose lengths follow from the operands."""

MOST_DIMS = 8


@in_specs
class Tensor(Capture):
    """A captured tensor, given with each call; inside a mod, ``t[i, j]`` is a traced value.

    An index is any integer expression, which is not negative: indices do not count from the end.
    Where the mask keeps the score and the element is used, an index outside the tensor is an
    InputError on CPU tensors; on a GPU it reads the nearest element. With dims () the tensor is a
    number: ``score * t``.

    Args:
        name: the argument's name in calls, an identifier as for `Scalar`.
        dims: the length of each dimension, at most 8: a number; "batch", "heads", "heads_kv",
            "seq_q" or "seq_k", which follow from the call; or any other name that is not easily
            taken for one of these, for a length that is the same wherever it is used. A named
            dimension of length 1 is broadcast. As positions are global, "seq_q" is at least
            q_offset plus the number of query rows.
        dtype: "float32", "float16", "bfloat16", "int32", "int64", "int16", "int8", "uint8" or
            "bool". Elements of int64 tensors are between -2^60 and 2^60.
        grad: whether it is a learned tensor, whose gradient the backward pass computes; for
            floating-point dtypes only.

    Raises:
        SpecError: the name, dims, dtype or grad cannot be used.
    """

    __slots__ = ("dims", "grad", "symbol")

    def __init__(
        self,
        name: str,
        dims: tuple[str | int, ...],
        dtype: str = "float32",
        grad: bool = False,
    ) -> None:
        check_name("Tensor", name)
        dtype = dtype_name(dtype)
        _check(name, dims, dtype, grad)
        self.name = name
        self.dims = tuple(dims)
        self.dtype = dtype
        self.grad = grad
        self.narrow = dtype if dtype in NARROW else ""
        self.symbol = TensorSymbol(name, dtype)
        self.captures = (self,)

    @property
    def expr(self) -> sympy.Basic:
        if self.dims:
            refuse(
                f"the Tensor {self.name!r} is used as one number",
                numbers=f"it has {len(self.dims)} dimensions: ({', '.join(map(str, self.dims))})",
                way_out=f"an index for each, as in {self._read()}",
            )
        return self._element(())

    def _read(self) -> str:
        """An example of how a mod reads an element."""
        indices = {"batch": "b", "heads": "h", "seq_q": "q", "seq_k": "k"}
        return f"{self.name}[{', '.join(indices.get(str(dim), '0') for dim in self.dims)}]"

    def __len__(self) -> NoReturn:
        if self.dims:
            self._length("len()")
        super().__len__()

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("shape", "size") and self.dims:
            self._length(f".{name}")
        super().__getattr__(name)

    def _length(self, use: str) -> NoReturn:
        """Refuses operations that need the lengths of dimensions, which calls give."""
        lengths = (
            str(dim)
            if isinstance(dim, int)
            else f"fg.{dim}"
            if dim in ("batch", "heads", "seq_q", "seq_k")
            else f"an fg.Scalar for that of {dim}"
            for dim in self.dims
        )
        refuse(
            f"the Tensor {self.name!r} has no lengths yet: {use} cannot be used on it",
            numbers=f"dims ({', '.join(map(str, self.dims))})",
            way_out=f"the length of each dimension: {', '.join(lengths)}",
        )

    def _element(self, indices: tuple[sympy.Expr, ...]) -> sympy.Basic:
        element = Element(self.symbol, *indices)
        return sympy.Ne(element, 0) if self.dtype == "bool" else element

    def __getitem__(self, index: object) -> Traced:  # type: ignore[override]
        subscripts = index if isinstance(index, tuple) else (index,)
        if len(subscripts) != len(self.dims):
            refuse(
                f"the Tensor {self.name!r} takes one index for each dimension",
                numbers=f"{len(subscripts)} given, dims ({', '.join(map(str, self.dims))})",
                way_out="all indices in one bracket, as in bias[h, q - k]",
            )
        indices = tuple(self._index(i, dim) for i, dim in zip(subscripts, self.dims, strict=True))
        return Value(self._element(indices), captures_of(self, *subscripts), self.narrow)

    def _index(self, index: object, dim: str | int) -> sympy.Expr:
        if index is None or index is ... or isinstance(index, slice):
            refuse(
                f"an index of the Tensor {self.name!r} is not a number",
                numbers=f"given {'a slice' if isinstance(index, slice) else index} for dimension "
                f"{dim}; a mod computes one score, and reads one element at a time",
                way_out=f"an integer for each dimension, as in {self._read()}",
            )
        expr = as_expr(index)
        if is_condition(expr) or not _has_integer_values(expr):
            refuse(
                f"an index of the Tensor {self.name!r} is not an integer",
                numbers=f"index {python_text(expr)} of dimension {dim}",
                way_out="fg.where(condition, 1, 0) for a condition, fg.floor(x) for a float",
            )
        if isinstance(index, numbers.Integral) and int(index) < 0:
            if isinstance(dim, str):
                refuse(
                    f"a negative index of the Tensor {self.name!r} needs the length of the "
                    "dimension, which is not known yet",
                    numbers=f"index {int(index)} of dimension {dim}",
                    way_out="fg.seq_k - 1 and the like, or a dimension with a number for length",
                )
            expr += dim
        if isinstance(dim, int) and expr.is_Integer and not 0 <= expr < dim:
            refuse(
                f"an index of the Tensor {self.name!r} is outside its dimension",
                numbers=f"index {python_text(as_expr(index))} of length {dim}",
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

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[object, ...]:
        if self.name in _OF_CALLS:
            return Tensor.reserved, (self.name, self.dims, self.dtype)
        return Tensor, self.key

    @property
    def key(self) -> tuple[str, tuple[str | int, ...], str, bool]:
        return self.name, self.dims, self.dtype, self.grad

    @staticmethod
    def reserved(name: str, dims: tuple[str | int, ...], dtype: str) -> Tensor:
        """A tensor made of another argument of calls, whose name no capture of a mod has.

        Its name is one of the names in `shared.signature`, or the name of the call's rng.
        """
        tensor = Tensor("reserved", dims, dtype)
        tensor.name, tensor.symbol = name, TensorSymbol(name, dtype)
        return tensor


_OF_CALLS = (*OFFSETS, *ROWS, RANDOM_STATE, OWNED, LISTED, LENGTHS, FIRST_QUERIES, ROW_SINK)


def random_state() -> Tensor:
    """The tensor of a call's rng, which `fg.rand` reads."""
    return Tensor.reserved(RANDOM_STATE, (4,), "int32")


def _has_integer_values(expr: sympy.Expr) -> bool:
    """Whether a number has no fraction, computed in integers or in floats."""
    whole: dict[sympy.Basic, sympy.Basic] = {}
    for let in lets_of(expr):
        if not is_condition(let) and not is_int(let) and replaced(let.value, whole).is_integer:
            whole[let] = _WHOLE
    return bool(replaced(expr, whole).is_integer)


_WHOLE = Floor(sympy.Dummy(real=True))


def _check(name: str, dims: object, dtype: object, grad: object) -> None:
    if not isinstance(dims, tuple | list) or len(dims) > MOST_DIMS:
        refuse(
            f"the dims of the Tensor {name!r} are a tuple of at most {MOST_DIMS}",
            numbers=f"dims {dims!r}",
            way_out='fg.Tensor("bias", ("heads", "seq_k")); () for a tensor of one number',
        )
    for dim in dims:
        number = isinstance(dim, int) and not isinstance(dim, bool) and 0 < dim <= INT32_MAX
        if not number and not (isinstance(dim, str) and dim.isidentifier()):
            refuse(
                f"a dimension of the Tensor {name!r} is neither a length nor a name",
                numbers=f"dims {tuple(dims)!r}",
                way_out=f"a positive number, one of {', '.join(SIZES)}, or a name of its own",
            )
        closest = None if number or dim in SIZES else _nearest_size(str(dim))
        if closest is not None:
            refuse(
                f"{dim!r} in the Tensor {name!r} is not a size of calls; did you mean {closest!r}?",
                numbers=f"dims {tuple(dims)!r}; sizes: {', '.join(SIZES)}",
                way_out=f'"{closest}"; or "own_length" or the like for a length of its own',
            )
    if not isinstance(dtype, str) or dtype not in TENSOR_DTYPES:
        refuse(
            "kernels do not read a Tensor of this dtype",
            numbers=f"dtype {dtype!r}; available: {', '.join(TENSOR_DTYPES)}",
            way_out='dtype="float32" for biases, "int32" for positions, "bool" for masks',
        )
    if not isinstance(grad, bool) or (grad and dtype not in FLOAT_DTYPES):
        refuse(
            "grad is True only for a Tensor of floats that is learned",
            numbers=f"grad {grad!r}, dtype {dtype!r}",
            way_out=f"grad=True and one of {', '.join(FLOAT_DTYPES)}",
        )


def _nearest_size(dim: str) -> str | None:
    """The name in `SIZES` that a similar name probably means, with its words in any order."""
    words = dim.lower().split("_")
    spellings = ("_".join(words), "_".join(reversed(words)))
    close_sizes = [
        (difflib.SequenceMatcher(None, size, text).ratio(), size)
        for text in spellings
        for size in difflib.get_close_matches(text, SIZES, 1, 0.75)
    ]
    return max(close_sizes)[1] if close_sizes else None


ROW_DIMS = {"batch": B, "heads": H, "seq_q": Q}
"""The dims that a divisor or a sink may have, and the positions at which it is read."""


def divisor_of(option: object) -> Traced | None:
    """The element that divides a row's output, for a spec's option ``normalize``; None for a name.

    Raises:
        SpecError: the option is neither a name nor a Tensor of floats with some of `ROW_DIMS`.
    """
    if isinstance(option, str) and option in NORMALIZERS:
        return None
    if not isinstance(option, Tensor):
        refuse(
            "normalize is the name of a divisor, or a Tensor with one for each row",
            numbers=f"normalize {option!r}; names: {', '.join(NORMALIZERS)}",
            way_out='normalize="none", or normalize=fg.Tensor("divisor", ("heads", "seq_q"))',
        )
    if not _is_of_rows(option) or option.dtype not in FLOAT_DTYPES:
        refuse(
            f"the divisor {option.name!r} is not a Tensor of floats with one for each row",
            numbers=f"dims {option.dims!r}, dtype {option.dtype!r}; dims among {tuple(ROW_DIMS)}",
            way_out=f'fg.Tensor({option.name!r}, ("batch", "heads", "seq_q"), "float32")',
        )
    return Value(element_of_row(option), option.captures)


def _is_of_rows(tensor: Tensor) -> bool:
    """Whether the dims are among `ROW_DIMS`, in their order."""
    return tensor.dims == tuple(dim for dim in ROW_DIMS if dim in tensor.dims)


def element_of_row(tensor: Tensor) -> sympy.Expr:
    """The element at a row, of a tensor with some of `ROW_DIMS` or with one element."""
    return Element(tensor.symbol, *(ROW_DIMS.get(str(dim), sympy.S.Zero) for dim in tensor.dims))


NORMALIZERS = ("softmax", "none", "sum")


def sink_of(option: object) -> Tensor | None:
    """The sink tensor of a spec's option ``sink``; None for no sink.

    Raises:
        SpecError: the option is not a Tensor of floats that has some of `ROW_DIMS` or one element.
    """
    if option is None or option is False:
        return None
    if option is True:
        return Tensor("sink", ("heads",), "float32", grad=True)
    if not isinstance(option, Tensor):
        refuse(
            "a sink is a Tensor with a logit for each head or row",
            numbers=f"sink given as a {type(option).__name__}",
            way_out='sink=True, or sink=fg.Tensor("sink", ("heads",), "float32", grad=True)',
        )
    if option.dtype not in FLOAT_DTYPES:
        refuse(
            f"the sink {option.name!r} does not have the dtype of a logit",
            numbers=f"dtype {option.dtype!r}; available: {', '.join(FLOAT_DTYPES)}",
            way_out=f"fg.Tensor({option.name!r}, {option.dims!r}, 'float32', grad=True)",
        )
    if option.dims != (1,) and not _is_of_rows(option):
        refuse(
            f"the sink {option.name!r} has other dims than those of rows",
            numbers=f"dims {option.dims!r}; dims among {tuple(ROW_DIMS)}, or (1,)",
            way_out=f'fg.Tensor({option.name!r}, ("heads",), {option.dtype!r}, grad={option.grad})',
        )
    return option
