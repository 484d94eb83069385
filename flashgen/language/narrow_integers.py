"""Integers of 8 and 16 bits, whose arithmetic wraps around as torch's does.

All other integers are exact in 64 bits. An operation of narrow integers, or of one and a number,
has the dtype that torch gives it; its result is the exact one modulo 2^8 or 2^16.
"""

from __future__ import annotations

import sympy

from flashgen.dtypes import ELEMENT_RANGES
from flashgen.language.integer_limits import limits
from flashgen.language.symbols import is_condition, is_int
from flashgen.language.sympy_functions import FloorMod

NARROW = ("uint8", "int8", "int16")


def promoted(dtypes: set[str]) -> str:
    """The dtype of an operation on integers of these dtypes; "" stands for 64 bits.

    Of the narrow dtypes, only int16 holds all numbers of two others.
    """
    if not dtypes <= set(NARROW) or not dtypes:
        return ""
    return next(iter(dtypes)) if len(dtypes) == 1 else "int16"


def wrapped(expr: sympy.Basic, dtype: str) -> sympy.Basic:
    """The integer as the dtype holds it; anything else, and every integer of "", as it is."""
    if not dtype or is_condition(expr) or not is_int(expr):
        return expr
    low, high = ELEMENT_RANGES[dtype]
    least, greatest = limits(expr)
    if low <= least and greatest <= high:
        return expr
    return FloorMod(expr - low, high - low + 1) + low
