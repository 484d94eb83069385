"""float16 and bfloat16 arithmetic, alone and packed in pairs.

numpy computes float16 in float32, which rounds sums, products and quotients correctly. bfloat16
is stored as uint16 bits and computed in the same way. Fused multiply-adds are computed in float64
with rounding to odd, so that they round once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.isa.registry import runtime
from flashgen.emulator.isa.semantics.floats import maximum, minimum, odd_sum

Array = npt.NDArray[Any]
_SIXTEEN = np.uint32(16)


@runtime
def bf16_to_f32(bits: Any) -> Any:
    return (bits.astype(np.uint32) << _SIXTEEN).view(np.float32)


@runtime
def f32_to_bf16(x: Any) -> Any:
    """float32 to bfloat16 bits, to nearest even; a NaN becomes 0x7fff, as on the hardware."""
    bits = x.view(np.uint32)
    odd = (bits >> _SIXTEEN) & np.uint32(1)
    rounded = ((bits + (odd + np.uint32(0x7FFF))) >> _SIXTEEN).astype(np.uint16)
    bad = np.isnan(x)
    return np.where(bad, np.uint16(0x7FFF), rounded) if bad.any() else rounded


def f64_to_bf16(x: Any) -> Any:
    """float64 to bfloat16 bits, rounding once."""
    near = x.astype(np.float32)
    # Round to odd in float32 first: with 24 bits the rounding to 8 bits is correct.
    bits = np.asarray(near).view(np.uint32)
    back = near.astype(np.float64)
    inexact = (back != x) & ((bits & np.uint32(1)) == 0) & np.isfinite(near)
    towards = np.where(x > back, np.float32(np.inf), np.float32(-np.inf))
    return f32_to_bf16(np.where(inexact, np.nextafter(near, towards), near))


def widen(bits: Any, kind: str) -> Any:
    """uint16 bits of float16 or bfloat16 as float32."""
    if kind.startswith("bf"):
        return bf16_to_f32(bits)
    return bits.view(np.float16).astype(np.float32)


def narrow(x: Any, kind: str) -> Any:
    """float32 or float64 to the uint16 bits of float16 or bfloat16."""
    if kind.startswith("bf"):
        return f32_to_bf16(x) if x.dtype == np.float32 else f64_to_bf16(x)
    return x.astype(np.float16).view(np.uint16)


def _flush16(bits: Any, kind: str) -> Any:
    small = np.uint16(0x0080 if kind.startswith("bf") else 0x0400)
    magnitude = bits & np.uint16(0x7FFF)
    return np.where(magnitude < small, bits & np.uint16(0x8000), bits)


@runtime
def half_op(op: str, kind: str, flags: str, *operands: Any) -> Any:
    """An arithmetic instruction on uint16 bits.

    Args:
        op: add, sub, mul, fma, min, max, neg, abs, ex2, tanh.
        kind: f16 or bf16.
        flags: words among sat, ftz, relu, NaN.
    """
    if op in ("neg", "abs"):
        bits = operands[0]
        if "ftz" in flags:
            bits = _flush16(bits, kind)
        sign = np.uint16(0x8000)
        return bits ^ sign if op == "neg" else bits & ~sign
    if "ftz" in flags:
        operands = tuple(_flush16(o, kind) for o in operands)
    x = [widen(o, kind) for o in operands]
    if op == "fma":
        product = x[0].astype(np.float64) * x[1].astype(np.float64)
        value = odd_sum(product, x[2].astype(np.float64))
    else:
        value = _FLOAT32[op](*x)
        if "NaN" in flags:
            value = np.where(np.isnan(x[0]) | np.isnan(x[1]), np.float32(np.nan), value)
    if "sat" in flags:
        value = np.where(value > 0, np.minimum(value, value.dtype.type(1)), value.dtype.type(0))
    if "relu" in flags:
        value = np.where(np.isnan(value), value, np.maximum(value, value.dtype.type(0)))
    bits = narrow(value, kind)
    return _flush16(bits, kind) if "ftz" in flags else bits


_FLOAT32: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": minimum,
    "max": maximum,
    "ex2": np.exp2,
    "tanh": np.tanh,
}


@runtime
def half_op2(op: str, kind: str, flags: str, *operands: Any) -> Any:
    """An arithmetic instruction on pairs: uint32 values with two halves each."""
    return on_halves(np.dtype("u2"), lambda *v: half_op(op, kind, flags, *v), *operands)


@runtime
def on_halves(element: Any, function: Callable[..., Any], *operands: Any) -> Any:
    """Applies ``function`` to the 16-bit halves of uint32 values."""
    shape = np.broadcast_shapes(*(o.shape for o in operands))
    if not shape:
        wide = [np.asarray(o).reshape(1) for o in operands]
        return function(*(w.view(element) for w in wide)).view(np.uint32)[0]
    wide = [np.ascontiguousarray(np.broadcast_to(o, shape)) for o in operands]
    return np.ascontiguousarray(function(*(w.view(element) for w in wide))).view(np.uint32)


@runtime
def half_compare(a: Any, b: Any, kind: str, compare: Callable[[Any, Any], Any]) -> Any:
    return compare(widen(a, kind), widen(b, kind))


@runtime
def interleave(n: int, dtype: Any, *values: Any) -> Any:
    """Elements of a vector store side by side: one wide unsigned value per lane."""
    count = len(values)
    out = np.empty((n, 32, count), dtype)
    for place, value in enumerate(values):
        out[..., place] = value
    size = count * dtype.itemsize
    return out.view("c16" if size == 16 else f"u{size}")[..., 0]


@runtime
def parts_of(value: Any, part: Any) -> Any:
    """A value as its parts: a last axis is added, the low part first."""
    array = np.ascontiguousarray(value)
    shape = np.shape(value)
    return array.reshape((*shape, 1)).view(part)


@runtime
def join_parts(dtype: Any, part: Any, *values: Any) -> Any:
    """The reverse of :func:`parts_of`, the low part first."""
    shape = np.broadcast_shapes(*(np.shape(v) for v in values))
    out = np.empty((*shape, len(values)), part)
    for place, value in enumerate(values):
        out[..., place] = value
    return out.view(dtype)[..., 0]
