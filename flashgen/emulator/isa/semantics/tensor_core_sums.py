"""Sums of products as tensor cores make them, bit for bit.

An instruction adds its products in blocks of L, in ascending k, and C is one more term of a block::

    e_i = e(a_i) + e(b_i)               # products are not normalised; subnormal: the smallest e
    E   = max(e_i, e(c), floor)         # a term that is zero has no exponent
    t_i = trunc(x_i / 2^(E - F))        # x_i is an exact product, or c; truncated toward zero
    D   = round(sum(t_i) 2^(E - F))     # the sum of integers is exact; D is C of the next block

`sum_models` holds L, F, the floor and the rounding of D. An infinite or NaN term makes D infinite
or, as Inf - Inf and 0 Inf do, the NaN 0x7FFFFFFF. Products beyond float32 are not infinite; D is
from 2^128 on. A sum of zeros is +0.

`_block` computes all sums of a block whose terms are normal float32 numbers if they are scaled by
2^(F - E); `_exact_block` computes the others, which are few, one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.isa.semantics.scratch import scratch
from flashgen.emulator.isa.semantics.sum_models import SumModel

Array = npt.NDArray[Any]
NAN = np.uint32(0x7FFFFFFF).view(np.float32)
F4, F8, I4 = np.dtype("f4"), np.dtype("f8"), np.dtype("i4")
# Exponent of the smallest normal number of an operand type.
_SMALLEST = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14}
_FRACTION_BITS = {"f32": 23, "e8m13": 13}
# `_block` is right for exponents from LOW to HIGH: 2^(F - E) and its inverse are normal float32.
LOW, HIGH = -100, 120
_PIECE = 8  # largest number of products whose largest exponent one sum of powers gives


def sum_products(
    model: SumModel, kinds: tuple[str, str], x: Array, y: Array, start: Array | None
) -> Array:
    """x y + start, added as the instructions of ``model`` do.

    Args:
        kinds: the types of A and of B.
        x: A (batch, rows, k) as float32.
        y: B (batch, k, columns) as float32.
        start: C (batch, rows, columns), float32; None is zero. With a model of float16 results it
            holds float16 values.

    Returns:
        D (batch, rows, columns) as float32, valid until the next call.
    """
    if not model.apart:
        return _add_blocks(model, kinds, x, y, start)
    total = np.zeros((*x.shape[:2], y.shape[2]), F4) if start is None else start
    for first in range(0, x.shape[2], model.apart):
        order = sorted(range(first, first + model.apart), key=lambda k: k % 4 // 2)
        total = total + _add_blocks(model, kinds, x[:, :, order], y[:, order], None)
        if model.result == "f16":
            total = total.astype(np.float16).astype(F4)
        total[np.isnan(total)] = NAN
    return total


def _add_blocks(
    model: SumModel, kinds: tuple[str, str], x: Array, y: Array, start: Array | None
) -> Array:
    smallest = [_SMALLEST[kind] for kind in kinds]
    wide = min(smallest) < -14
    powers_x, powers_y = _powers(x, smallest[0], wide, 1), _powers(y, smallest[1], wide, 0)
    total = start
    for first in range(0, x.shape[2], model.products):
        now = slice(first, first + model.products)
        a, b = x[:, :, now], y[:, now]
        exponents = _largest_exponents(powers_x[:, :, now], powers_y[:, now])
        total = _block(model, smallest, a, b, exponents, total)
    assert total is not None
    return total


# ---- exponents
#
# The largest e(a_i) + e(b_i) of every row and column is the exponent of a matrix product of
# 16^e(a_i) and 16^e(b_i): the sum of at most 8 powers is less than 16 times the largest of them,
# in whatever order it is rounded. A zero has the power zero, an infinity or NaN is infinite.


def _powers(values: Array, smallest: int, wide: bool, bias: int) -> Array:
    """2^bias 16^e of each value, in float64 where float32 has not the range."""
    bits = values.view(I4)
    field = bits >> 23 & 255
    power = np.maximum(field - 127, smallest) * 4
    power += (1023 if wide else 127) + bias
    result: Array = (power.astype(np.int64) << 52).view(F8) if wide else (power << 23).view(F4)
    result[field == 255] = np.inf
    result[values == 0] = 0
    return result


def _largest_exponents(powers_x: Array, powers_y: Array) -> Array:
    """The largest exponent of the products that are not zero, int32 (batch, rows, columns).

    It is less than those of all products if there is none, and greater if a term is not finite.
    """
    shape = (*powers_x.shape[:2], powers_y.shape[2])
    depth = powers_x.shape[2]
    total = np.matmul(
        powers_x[:, :, :_PIECE], powers_y[:, :_PIECE], out=scratch("power", shape, powers_x.dtype)
    )
    for first in range(_PIECE, depth, _PIECE):
        now = slice(first, first + _PIECE)
        np.maximum(total, np.matmul(powers_x[:, :, now], powers_y[:, now]), out=total)
    if total.dtype == F8:
        return (total.view(np.uint64) >> np.uint64(54)).astype(np.int32) - np.int32(256)
    field = total.view(np.uint32)
    field >>= np.uint32(25)
    exponents = field.view(np.int32)
    exponents -= np.int32(32)
    return exponents


# ---- blocks


def _block(
    model: SumModel, smallest: list[int], a: Array, b: Array, of_products: Array, c: Array | None
) -> Array:
    """The sums of one block, float32 (batch, rows, columns), in place of ``c``."""
    shape = of_products.shape
    exponents = of_products
    if c is not None:
        exponents = scratch("exponent", shape, I4)
        np.right_shift(c.view(I4), 23, out=exponents)
        exponents &= np.int32(255)
        exponents -= np.int32(127)
        np.maximum(exponents, of_products, out=exponents)
    odd = _others(model, sum(smallest), of_products, exponents, c)
    exponents = np.maximum(exponents, max(model.floor, LOW), out=scratch("exponent", shape, I4))
    scale = _power_of_two(model.fraction - exponents)
    terms = scratch("terms", (a.shape[2], *shape), F4)
    np.multiply(a.transpose(2, 0, 1)[..., None], b.transpose(1, 0, 2)[:, :, None], out=terms)
    terms *= scale
    # The conversion to integers truncates. 16 terms below 4 2^25 fit into 32 bits.
    integers = scratch("integers", terms.shape, I4)
    np.copyto(integers, terms, casting="unsafe")
    products = np.add.reduce(integers, axis=0, dtype=np.int32, out=scratch("sum", shape, I4))
    total = scratch("total", shape, F8)
    np.copyto(total, products)
    if c is not None:
        scale *= c
        total += np.trunc(scale, out=scale)
    result = _rounded(model, total, exponents)
    if odd is not None:
        where, row, column = odd
        start = np.zeros(len(row), F4) if c is None else c[odd]
        given = a[where, row], b.swapaxes(1, 2)[where, column], start
        result[odd] = _exact_block(model, smallest, *given)
    return result


def _others(
    model: SumModel, smallest: int, of_products: Array, exponents: Array, c: Array | None
) -> tuple[Array, ...] | None:
    """The places of the sums that `_block` cannot compute; None if there are none."""
    finite = 254 if smallest < -28 else 30
    high = of_products.max() > finite or exponents.max() > HIGH
    low = model.floor < LOW and exponents.min() < LOW
    if not high and not low:
        return None
    odd = (of_products > finite) | (exponents > HIGH)
    if low:
        zero = of_products < smallest
        odd |= (exponents < LOW) & ~(zero if c is None else zero & (c == 0))
    return odd.nonzero() if odd.any() else None


def _power_of_two(exponents: Array) -> Array:
    """2^exponents as float32."""
    bits: Array = exponents + np.int32(127)
    bits <<= 23
    return bits.view(F4)


def _rounded(model: SumModel, total: Array, exponents: Array) -> Array:
    """total 2^(E - F) as float32, rounded to the form of the result; overwrites ``total``."""
    scale = _power_of_two(exponents - np.int32(model.fraction))
    if model.result == "f16":
        total *= scale
        return total.astype(np.float16).astype(F4)
    bits = total.view(np.int64)
    bits &= np.int64(-1 << (52 - _FRACTION_BITS[model.result]))
    result = total.astype(F4)
    result *= scale
    return result


def _exact_block(model: SumModel, smallest: list[int], a: Array, b: Array, c: Array) -> Array:
    """The sums of a block for any values: ``a`` and ``b`` (count, L), ``c`` (count,)."""
    a, b, c = a.astype(F8), b.astype(F8), c.astype(F8)
    terms = np.concatenate([a * b, c[:, None]], axis=1)
    exponent = np.concatenate(
        [_exponent(a, smallest[0]) + _exponent(b, smallest[1]), _exponent(c, -126)[:, None]], axis=1
    )
    exponent[terms == 0] = model.floor
    largest = np.maximum(exponent.max(axis=1), model.floor)
    lowest = largest - model.fraction
    integers = np.trunc(np.ldexp(terms, -lowest[:, None]))
    value = np.ldexp(integers.sum(axis=1) + 0.0, lowest)  # a sum of zeros is +0
    if model.result == "f16":
        result: Array = value.astype(np.float16).astype(F4)
    else:
        last = _exponent(value, -126) - _FRACTION_BITS[model.result]
        value = np.ldexp(np.trunc(np.ldexp(value, -last)), last)
        value[np.abs(value) >= 2.0**128] *= np.inf
        result = value.astype(F4)
    # Products of finite operands are finite in float64, and so is their sum.
    special = terms.sum(axis=1)
    wrong = ~np.isfinite(special)
    result[wrong] = special[wrong].astype(F4)
    result[np.isnan(special)] = NAN
    return result


def _exponent(values: Array, smallest: int) -> Array:
    """e of value = significand 2^e with a significand in [1, 2), less if e is the smallest."""
    exponents: Array = np.maximum(np.frexp(values)[1] - 1, smallest)
    return exponents
