"""float16 and bfloat16 arithmetic, alone and packed in pairs, and vectors of narrow elements.

numpy computes float16 in float32, which rounds sums, products and quotients correctly. bfloat16
is stored as uint16 bits and computed in the same way. Fused multiply-adds are computed in float64
with rounding to odd, so that they round once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashgen.emulator.isa.convert import bf16_to_f32, to_bf16
from flashgen.emulator.isa.floats import (
    maximum,
    minimum,
    odd_sum,
    or_nan,
    relu,
    saturate,
)

_FLOAT32: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": minimum,
    "max": maximum,
    "ex2": np.exp2,
    "tanh": np.tanh,
}


def widen(bits: Any, kind: str) -> Any:
    """uint16 bits of float16 or bfloat16 as float32."""
    return bf16_to_f32(bits) if kind == "bf16" else bits.view(np.float16).astype(np.float32)


def _flush16(bits: Any, kind: str) -> Any:
    small = np.uint16(0x0080 if kind == "bf16" else 0x0400)
    magnitude = bits & np.uint16(0x7FFF)
    return np.where(magnitude < small, bits & np.uint16(0x8000), bits)


def half_op(op: str, kind: str, flags: str, *operands: Any) -> Any:
    """An arithmetic instruction on uint16 bits.

    Args:
        op: add, sub, mul, fma, min, max, neg, abs, ex2, tanh.
        kind: f16 or bf16.
        flags: words among sat, ftz, relu, NaN.
    """
    if "ftz" in flags:
        operands = tuple(_flush16(o, kind) for o in operands)
    if op in ("neg", "abs"):
        sign = np.uint16(0x8000)
        return operands[0] ^ sign if op == "neg" else operands[0] & ~sign
    x = [widen(o, kind) for o in operands]
    if op == "fma":
        product = x[0].astype(np.float64) * x[1].astype(np.float64)
        value = odd_sum(product, x[2].astype(np.float64))
    else:
        value = _FLOAT32[op](*x)
        if "NaN" in flags:
            value = or_nan(value, *x)
    if "sat" in flags:
        value = saturate(value)
    if "relu" in flags:
        value = relu(value)
    bits = to_bf16(value) if kind == "bf16" else value.astype(np.float16).view(np.uint16)
    return _flush16(bits, kind) if "ftz" in flags else bits


def half_op2(op: str, kind: str, flags: str, *operands: Any) -> Any:
    """An arithmetic instruction on pairs: uint32 values with two halves each."""
    return on_parts(np.dtype("u2"), lambda *v: half_op(op, kind, flags, *v), *operands)


def on_parts(element: Any, function: Callable[..., Any], *operands: Any) -> Any:
    """Applies ``function`` to the parts of uint32 values, which have the dtype ``element``."""
    shape = np.broadcast_shapes(*(o.shape for o in operands))
    if not shape:
        wide = [np.asarray(o).reshape(1) for o in operands]
        return function(*(w.view(element) for w in wide)).view(np.uint32)[0]
    wide = [np.ascontiguousarray(np.broadcast_to(o, shape)) for o in operands]
    return np.ascontiguousarray(function(*(w.view(element) for w in wide))).view(np.uint32)


def half_compare(a: Any, b: Any, kind: str, compare: Callable[[Any, Any], Any], ftz: bool) -> Any:
    if ftz:
        a, b = _flush16(a, kind), _flush16(b, kind)
    return compare(widen(a, kind), widen(b, kind))


def parts_of(value: Any, part: Any) -> Any:
    """A value as its parts: a last axis is added, the low part first."""
    return np.ascontiguousarray(value).reshape((*np.shape(value), 1)).view(part)


def join_parts(dtype: Any, part: Any, *values: Any) -> Any:
    """The reverse of :func:`parts_of`, the low part first."""
    shape = np.broadcast_shapes(*(np.shape(v) for v in values))
    out = np.empty((*shape, len(values)), part)
    for place, value in enumerate(values):
        out[..., place] = value
    return out.view(dtype)[..., 0]
