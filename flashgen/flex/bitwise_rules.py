"""ATen's operations on the bits of integers, by floor divisions and remainders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

import flashgen.language as fg
from flashgen.flex.traced_array import Entry, finite, number
from flashgen.language import Traced
from flashgen.language.traced import Value

Rule = Callable[..., Entry]

ZERO = Value(sympy.S.Zero)
MOST_BITS = 62


def logical_and(a: Traced, b: Traced) -> Traced:
    return a & b


def logical_or(a: Traced, b: Traced) -> Traced:
    return a | b


def logical_xor(a: Traced, b: Traced) -> Traced:
    return a ^ b


def _bitwise(name: str, bools: Callable[..., Traced]) -> Rule:
    def rule(tracer: Any, dtype: torch.dtype, /, a: Entry, b: Entry) -> Entry:
        x, y = finite(tracer, name, a), finite(tracer, name, b)
        if dtype == torch.bool:
            return Entry(bools(x, y))
        x, y = number(x), number(y)
        if x.expr.is_Integer:
            x, y = y, x
        if not (y.expr.is_Integer and 0 <= int(y.expr) < 2**MOST_BITS):
            tracer.refuse(
                f"torch.{name} of two integers that are not constants",
                numbers=f"operands {fg.python_text(x.expr)} and {fg.python_text(y.expr)}",
                way_out="a non-negative constant for one of the two",
            )
        common = _bits(x, int(y.expr))
        if name == "bitwise_and":
            return Entry(common)
        return Entry(x + y - common * (1 if name == "bitwise_or" else 2))

    return rule


def _bits(x: Traced, mask: int) -> Traced:
    """``x & mask``, as a sum over the runs of ones in the mask."""
    total, low = ZERO, 0
    while mask >> low:
        if not mask >> low & 1:
            low += 1
            continue
        length = 1
        while mask >> (low + length) & 1:
            length += 1
        total = total + x // 2**low % 2**length * 2**low
        low += length
    return total


def _shift(name: str, left: bool) -> Rule:
    def rule(tracer: Any, dtype: torch.dtype, /, a: Entry, b: Entry) -> Entry:
        x, y = number(finite(tracer, name, a)), number(finite(tracer, name, b))
        if not (y.expr.is_Integer and 0 <= int(y.expr) <= MOST_BITS):
            tracer.refuse(
                f"torch.{name} by a number that is not a constant",
                numbers=f"by {fg.python_text(y.expr)}",
                way_out="a constant, or a product or a quotient",
            )
        power = 2 ** int(y.expr)
        return Entry(x * power if left else x // power)

    return rule


def _not(tracer: Any, dtype: torch.dtype, /, x: Entry) -> Entry:
    value = finite(tracer, "bitwise_not", x)
    return Entry(~value if value.is_condition else -value - 1)


RULES: dict[str, Rule] = {
    "bitwise_and": _bitwise("bitwise_and", logical_and),
    "bitwise_or": _bitwise("bitwise_or", logical_or),
    "bitwise_xor": _bitwise("bitwise_xor", logical_xor),
    "__and__": _bitwise("bitwise_and", logical_and),
    "__or__": _bitwise("bitwise_or", logical_or),
    "__xor__": _bitwise("bitwise_xor", logical_xor),
    "bitwise_not": _not,
    "bitwise_left_shift": _shift("bitwise_left_shift", True),
    "bitwise_right_shift": _shift("bitwise_right_shift", False),
    "__lshift__": _shift("bitwise_left_shift", True),
    "__rshift__": _shift("bitwise_right_shift", False),
}
"""The rule of each operation, by its name."""
