"""Divisions by 0 that the scalars and sizes of a call cause, found before any launch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from flashgen.call import CheckedCall
from flashgen.runtime.check_basics import refuse
from flashgen.signature import CallSignature


def check_divisors(signature: CallSignature, call: CheckedCall) -> None:
    """Raises InputError where the mask or the score of the call would divide integers by 0."""
    if not signature.zero_divisions:
        return
    values = {**call.named_sizes, **call.scalars}
    for division in signature.zero_divisions:
        if 0 not in (call.seq_q, call.seq_k) and _value(division.reached, values):
            given = ", ".join(f"{name}={values[name]}" for name in division.names)
            refuse(
                f"spec {signature.name} divides by 0 in this call",
                f"argument {division.names[0]}",
                f"{division.text} with {given}",
                "other values, or a divisor of fg.maximum(..., 1) in the spec",
            )


def _value(expr: object, values: Mapping[str, Any]) -> Any:
    if isinstance(expr, str):
        return values[expr]
    if not isinstance(expr, tuple):
        return expr
    name, *args = expr
    return _FUNCTIONS[name](*(_value(arg, values) for arg in args))


def _choice(*cases: tuple[Any, bool]) -> Any:
    return next(value for value, chosen in cases if chosen)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": lambda *args: sum(args),
    "Mul": lambda *args: math.prod(args),
    "Pow": operator.pow,
    "Abs": abs,
    "sign": lambda x: (x > 0) - (x < 0),
    "FloorDiv": lambda a, b: a // b if b else 0,
    "FloorMod": lambda a, b: a % b if b else 0,
    "Minimum": min,
    "Maximum": max,
    "Piecewise": _choice,
    "ExprCondPair": lambda value, chosen: (value, chosen),
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "And": lambda *args: all(args),
    "Or": lambda *args: any(args),
    "Not": operator.not_,
}
