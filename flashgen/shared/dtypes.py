"""Dtypes of operands, captured tensors and scalars, and the ranges of integers in kernels.

The tracer, the planner, the code generator, the operator, the command line and the reference read
these rules from this module.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

Number = int | float | bool

INT32_MAX = 2**31 - 1
FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
FLOAT32_LEAST = 2.0**-126  # of full precision; smaller numbers are subnormal

HEAD_DIM_STEP = 8
"""A head dim is a multiple of this number, so that every row consists of 16-byte vectors."""

HEAD_DIM_MAX = 576

SCALE_LIMIT = 2.0**127
"""The factor on q.k is below it, so that its product with log2(e) is finite."""

POSITION_LIMIT = 2**28
"""Largest magnitude of a position and of a sequence length. Every call is checked against it."""

COUNT_LIMIT = 2**20
"""Largest batch size and largest number of heads. Every call is checked against it."""

SCALAR_LIMIT = 2**30
"""Largest magnitude of an int32 scalar. Every call is checked against it."""


@dataclass(frozen=True)
class ElementDtype:
    """How kernels hold the elements of one dtype.

    Attributes:
        itemsize: bytes per element in memory.
        stored: C++ type of an element in memory. 16-bit floats are integers: types need headers.
        value: C++ type of the value of an element.
        conversion: C++ of this value, with {} in place of the element.
        range: the least and the greatest integer, the bounds of kernel arithmetic; None for floats.
    """

    itemsize: int
    stored: str
    value: str
    conversion: str = "{}"
    range: tuple[int, int] | None = None

    @property
    def value_dtype(self) -> str:
        """The name of the dtype of this value, as min/max tables hold it."""
        return {"float": "float32", "int": "int32", "long long": "int64"}[self.value]


@dataclass(frozen=True)
class SumType:
    """The float sums to which kernels add the gradients of learned tensors.

    Attributes:
        dtype: the name of their dtype.
        itemsize: bytes per sum.
        stored: their C++ type.
    """

    dtype: str
    itemsize: int
    stored: str


@dataclass(frozen=True)
class OperandDtype:
    """The properties of kernels whose q, k and v have this dtype.

    Attributes:
        short: its name in the names of kernels.
        mma: the type of the factors of matrix products, in PTX.
        bits, constraint: an element in PTX, and its letter in inline assembly.
        nan: 32 bits that hold NaN in each of their elements.
        parts: numbers of the type ``mma`` into which an element is split.
        products: matrix products in place of one, for the parts.
        approximates: whether mods may use the hardware's approximations of functions.
        sums: the sums for learned tensors, in float64 for float32 problems: sums of thousands of
            terms in float32 have larger errors than the error rule allows for their results.
    """

    short: str
    mma: str
    bits: str
    constraint: str
    nan: str
    parts: int
    products: int
    approximates: bool
    sums: SumType


_SINGLE, _DOUBLE = SumType("float32", 4, "float"), SumType("float64", 8, "double")

OPERANDS = {
    "float16": OperandDtype("fp16", "f16", "b16", "h", "0x7fff7fff", 1, 1, True, _SINGLE),
    "bfloat16": OperandDtype("bf16", "bf16", "b16", "h", "0x7fff7fff", 1, 1, True, _SINGLE),
    "float32": OperandDtype("fp32", "bf16", "f32", "f", "0x7fc00000", 3, 6, False, _DOUBLE),
}
"""Dtypes of q, k, v and the output, by their names."""

OPERAND_DTYPES = tuple(OPERANDS)

ELEMENTS = {
    "float32": ElementDtype(4, "float", "float"),
    "float16": ElementDtype(2, "unsigned short", "float", "half_to_float({})"),
    "bfloat16": ElementDtype(2, "unsigned short", "float", "__uint_as_float(unsigned({}) << 16)"),
    "int32": ElementDtype(4, "int", "int", range=(-(2**31), INT32_MAX)),
    "int64": ElementDtype(8, "long long", "long long", range=(-(2**60), 2**60)),
    "int16": ElementDtype(2, "short", "int", range=(-(2**15), 2**15 - 1)),
    "int8": ElementDtype(1, "signed char", "int", range=(-(2**7), 2**7 - 1)),
    "uint8": ElementDtype(1, "unsigned char", "int", range=(0, 2**8 - 1)),
    "bool": ElementDtype(1, "unsigned char", "int", range=(0, 1)),
}
"""Dtypes of captured tensors, which include the dtypes of operands, by their names."""

TENSOR_DTYPES = tuple(ELEMENTS)
FLOAT_DTYPES = tuple(name for name, dtype in ELEMENTS.items() if dtype.range is None)
ELEMENT_RANGES = {name: dtype.range for name, dtype in ELEMENTS.items() if dtype.range is not None}
ITEMSIZE = {name: dtype.itemsize for name, dtype in ELEMENTS.items()}


@dataclass(frozen=True)
class CacheDtype:
    """A dtype of a paged cache: codes of keys and values with fewer bits than q has.

    An element is the float32 product of the code's number and a scale, rounded to the dtype of q.

    Attributes:
        itemsize: bytes per code.
        short: its name in the names of kernels.
        most: the largest finite number of a code, to which larger ones are saturated.
        is_float: whether there are codes for NaN.
        fraction_bits: the bits of a float's fraction.
        least_exponent: the exponent of the smallest float that has all of them.
    """

    itemsize: int
    short: str
    most: float
    is_float: bool
    fraction_bits: int = 0
    least_exponent: int = 0


CACHE_DTYPES = {
    "float8_e4m3fn": CacheDtype(1, "e4m3", 448.0, True, 3, -6),
    "float8_e5m2": CacheDtype(1, "e5m2", 57344.0, True, 2, -14),
    "int8": CacheDtype(1, "int8", 127.0, False),
}
"""Dtypes of caches besides that of q, by their names."""


@dataclass(frozen=True)
class ScalarDtype:
    """The rules of one dtype of run-time scalars.

    Attributes:
        c_type: the type of the kernel's parameter in CUDA C++.
        schema: type of the argument in the schema of the torch operator.
        accepted: the accepted values, in words.
        example: a value as Python source.
        convert: the Python number for a given value, or None where the dtype cannot hold it.
        parse: the Python number for text of the command line, or None.
        stored: the number that a kernel receives for a converted value.
    """

    c_type: str
    schema: str
    accepted: str
    example: str
    convert: Callable[[object], Number | None]
    parse: Callable[[str], Number | None]
    stored: Callable[[Number], Number]


def is_bool(value: object) -> bool:
    """True for Python's and NumPy's bools."""
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


def real_number(value: object) -> float | None:
    """A number of any kind as a float; None for a bool, an array, NumPy's complex numbers and
    texts, which `float` would take in part, and what no float holds."""
    numpy_kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if is_bool(value) or numpy_kind in "cSU" or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def number_of_digits(text: str, most: int = 18) -> int | None:
    """The whole number of a text of ASCII digits, ``most`` or fewer; None for other texts."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= most else None


def _to_int32(value: object) -> int | None:
    if is_bool(value) or not hasattr(value, "__index__"):
        return None
    try:
        number = operator.index(value)
    except TypeError:  # an array
        return None
    return number if abs(number) <= SCALAR_LIMIT else None


def _to_float32(value: object) -> float | None:
    number = real_number(value)
    return None if number is None or not abs(number) <= FLOAT32_MAX else number


def _parsed(text: str, kind: Callable[[str], Number]) -> Number | None:
    try:
        return kind(text)
    except ValueError:
        return None


def _rounded(value: Number) -> float:
    """The float32 nearest to a number, as a Python float."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


SCALAR_DTYPES = {
    "int32": ScalarDtype(
        c_type="int",
        schema="SymInt",
        accepted=f"a whole number within +-{SCALAR_LIMIT:,}",
        example="64",
        convert=_to_int32,
        parse=partial(_parsed, kind=int),
        stored=int,
    ),
    "float32": ScalarDtype(
        c_type="float",
        schema="float",
        accepted=f"a finite number within float32's +-{FLOAT32_MAX:.3g}",
        example="0.5",
        convert=_to_float32,
        parse=partial(_parsed, kind=float),
        stored=_rounded,
    ),
    "bool": ScalarDtype(
        c_type="int",
        schema="bool",
        accepted="True or False",
        example="true",
        convert=lambda value: bool(value) if is_bool(value) else None,
        parse=lambda text: {"true": True, "1": True, "false": False, "0": False}.get(text.lower()),
        stored=bool,
    ),
}
"""The scalar dtypes by their names in ``fg.Scalar``."""


def dtype_name(dtype: object) -> str:
    """The name of a dtype that is given by its name, or as torch's or numpy's object."""
    if isinstance(dtype, str):
        return dtype
    return str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
