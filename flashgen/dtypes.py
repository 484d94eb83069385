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

POSITION_LIMIT = 2**28
"""Largest magnitude of a position and of a sequence length. Every call is checked against it."""

COUNT_LIMIT = 2**20
"""Largest batch size and largest number of heads. Every call is checked against it."""

SCALAR_LIMIT = 2**30
"""Largest magnitude of an int32 scalar. Every call is checked against it."""

OPERAND_DTYPES = ("float16", "bfloat16", "float32")
"""Dtypes of q, k, v and the output."""

FLOAT_DTYPES = ("float32", "float16", "bfloat16")
ELEMENT_RANGES = {
    "int32": (-(2**31), INT32_MAX),
    "int64": (-(2**60), 2**60),
    "int16": (-(2**15), 2**15 - 1),
    "int8": (-(2**7), 2**7 - 1),
    "uint8": (0, 2**8 - 1),
    "bool": (0, 1),
}
"""Minimum and maximum element of an integer captured tensor; the bounds of kernel arithmetic."""

TENSOR_DTYPES = (*FLOAT_DTYPES, *ELEMENT_RANGES)
"""Dtypes of captured tensors."""


def bytes_of_sums(itemsize: int) -> int:
    """Bytes of one float sum for the gradient of a learned tensor; ``itemsize`` is that of q, k, v.

    Float32 problems have sums in float64: sums of thousands of terms in float32 have larger errors
    than the error rule allows for float32 results.
    """
    return 2 * itemsize


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


def _to_int32(value: object) -> int | None:
    if is_bool(value) or not hasattr(value, "__index__"):
        return None
    number = operator.index(value)
    return number if abs(number) <= SCALAR_LIMIT else None


def _to_float32(value: object) -> float | None:
    if is_bool(value) or not hasattr(value, "__float__"):
        return None
    number = float(value)
    return number if abs(number) <= FLOAT32_MAX else None


def _to_bool(value: object) -> bool | None:
    return bool(value) if is_bool(value) else None


def _parsed(text: str, kind: Callable[[str], Number]) -> Number | None:
    try:
        return kind(text)
    except ValueError:
        return None


def _parse_bool(text: str) -> bool | None:
    return {"true": True, "1": True, "false": False, "0": False}.get(text.lower())


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
        convert=_to_bool,
        parse=_parse_bool,
        stored=bool,
    ),
}
"""The scalar dtypes by their names in ``fg.Scalar``."""


def dtype_name(dtype: object) -> str:
    """The name of a dtype that is given by its name, or as torch's or numpy's object."""
    if isinstance(dtype, str):
        return dtype
    return str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
