"""Sums of products as tensor cores make them, bit for bit.

An instruction adds its products in blocks of L, in ascending k, and C is one more term of a block::

    e_i = e(a_i) + e(b_i)               # products are not normalised; subnormal: the smallest e
    E   = max(e_i, e(c), floor)         # a term that is zero has no exponent
    t_i = trunc(x_i / 2^(E - F))        # x_i is an exact product, or c; truncated toward zero
    D   = round(sum(t_i) 2^(E - F))     # the sum of integers is exact; D is C of the next block

A `SumModel` holds L, F, the floor and the rounding of D. An infinite or NaN term makes D infinite
or, as Inf - Inf and 0 Inf do, the NaN 0x7FFFFFFF. Products beyond float32 are not infinite; D is
from 2^128 on. A sum of zeros is +0.

`_block` computes all sums of a block whose terms are normal float32 numbers if they are scaled by
2^(F - E); `_exact_block` computes the others, which are few, one by one.

Sources: F. A. Khattak and M. Mikaitis, "Accurate models of NVIDIA tensor cores" (arXiv 2512.07004),
and P. Xie and others, "MMA-Sim" (arXiv 2511.10909), which also has wgmma and the longer
instructions. They agree but for the smallest exponent of a block, which is that of the first.
"""

from __future__ import annotations

import math
import re
import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flashgen.shared.errors import called_by_users
from ptx_emulator.errors import UnknownInstruction
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Wave

Kinds = tuple[str, str]
"""The types of A and of B."""

# By code path, instruction and operand type: products of a block at most, and F.
_OLD = {"f16": (8, 24), "bf16": (8, 24), "tf32": (4, 24), "fp8": (16, 13)}
_NEW = {"f16": (16, 25), "bf16": (16, 25), "tf32": (8, 25), "fp8": (16, 25)}
_BLOCKS = {
    ("sm_80", "mma"): _OLD,
    ("sm_90", "mma"): _NEW,
    ("sm_90", "wgmma"): {**_NEW, "fp8": (32, 13)},
}
# The smallest exponent of a block, by the type of the accumulators.
_FLOORS = {"sm_80": {"f32": -132, "f16": -20}, "sm_90": {"f32": -133, "f16": -21}}


# Dense products without saturation; the types are those of D, A, B and C, of wgmma D, A and B, and
# of wmma with operands of float16 D and C.
_PRODUCTS = re.compile(
    r"(?:wgmma\.mma_async|w?mma(?:\.mma)?)\.sync\.aligned(?:\.row|\.col)*"
    r"\.m\d+n\d+k(?P<k>\d+)(?:\.row|\.col)*\.(?P<types>(?:f16|f32)(?:\.\w+){1,3})"
)


class SumModel(NamedTuple):
    """How one instruction adds; see `tensor_core_sums` for the meaning of the terms.

    Attributes:
        products: L, the products of a block.
        fraction: F, the bits that are kept below the largest exponent of a block.
        result: the form of D: "f32" and "e8m13" (float32 with 13 fraction bits) are rounded toward
            zero, "f16" to nearest even.
        floor: the smallest exponent of a block.
        apart: 0; or k of an instruction that multiplies 8-bit floats as f16: it adds its products
            alone, those of k mod 4 < 2 before the others, and then C, rounded to nearest.
    """

    products: int
    fraction: int
    result: str
    floor: int
    apart: int = 0


def model_of(arch: str, instruction: str, kind: str, k: int, half: bool) -> SumModel | None:
    """The model of an instruction on an architecture; None where how it adds is not known.

    Args:
        instruction: "mma" or "wgmma".
        kind: the operands' type, that of A.
        k: products of a sum in one instruction.
        half: accumulators of f16 instead of f32.
    """
    number = re.match(r"sm_(\d+)", arch)
    capability = int(number[1]) if number else 80
    path = "sm_90" if capability >= 90 else "sm_80"
    small = kind in ("e4m3", "e5m2")
    block_form = _BLOCKS.get((path, instruction), {}).get("fp8" if small else kind)
    # How the tensor cores of Blackwell add 8-bit floats is not published.
    if block_form is None or capability < 80 or (small and capability >= 100):
        return None
    most, fraction = block_form
    apart = k if small and (path, instruction) == ("sm_90", "mma") else 0
    result = "f16" if half else "e8m13" if fraction == 13 else "f32"
    return SumModel(min(k, most), fraction, result, _FLOORS[path]["f16" if half else "f32"], apart)


@called_by_users()
def has_sums_of(gpu: str, target: str, instruction: str) -> bool:
    """Whether an instruction adds on a GPU as in the emulator, bit for bit.

    Args:
        gpu: the architecture of the GPU.
        target: the ``.target`` of the module, whose tensor cores the emulator models.
        instruction: an opcode with its modifiers, such as
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32".
    """
    form = _PRODUCTS.fullmatch(instruction)
    if form is None:
        return False
    into, *kinds = form["types"].split(".")
    unit = "wgmma" if instruction.startswith("wgmma") else "mma"
    if unit == "mma" and kinds.pop() != into:
        return False
    arguments = (unit, kinds[0] if kinds else "f16", int(form["k"]), into == "f16")
    model = model_of(gpu, *arguments)
    return model is not None and model == model_of(target, *arguments)


def model_for(
    machine: Wave, instruction: str, kind: str, k: int, half: bool, sparse: bool = False
) -> SumModel | None:
    """`model_of` the architecture of a kernel's module; None in launches whose sums are rounded.

    The products of ``sparse`` matrices, half of which are left out, are taken to be added in blocks
    of as many as are made.

    Raises:
        UnknownInstruction: how the architecture adds is not known.
    """
    if machine.config.sums == "rounded":
        return None
    program = machine.program
    model = model_of(program.module.target, instruction, kind, k // (1 + sparse), half)
    if model is None:
        raise UnknownInstruction(
            "how the tensor cores of this architecture add is not known to the emulator",
            where=f"kernel {program.name}",
            numbers=f".target {program.module.target}, {instruction} of {kind}",
            way_out='sums="rounded" adds in float64; known are sm_80 and later, without 8-bit '
            "floats from sm_100 on",
        )
    return model._replace(products=2 * model.products, apart=2 * model.apart) if sparse else model


_SCRATCH = threading.local()


def scratch(role: str, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """An uninitialised array that is valid until the next call with the same role."""
    size = math.prod(shape) * dtype.itemsize
    buffers = vars(_SCRATCH)
    if role not in buffers or len(buffers[role]) < size:
        buffers[role] = np.empty(size, np.uint8)
    array: npt.NDArray[Any] = buffers[role][:size].view(dtype).reshape(shape)
    return array


NAN = np.uint32(0x7FFFFFFF).view(np.float32)
F4, F8, I4 = np.dtype("f4"), np.dtype("f8"), np.dtype("i4")
# Exponent of the smallest normal number of an operand type.
_SMALLEST = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14}
_FRACTION_BITS = {"f32": 23, "e8m13": 13}
# `_block` is right for exponents from LOW to HIGH: 2^(F - E) and its inverse are normal float32.
LOW, HIGH = -100, 120
_AT_ONCE = 1 << 15  # sums that are computed together: their terms fit into a cache
_TERMS = 4  # products of a sum that are made together
_EXPONENT = 0x7F800000  # the bits of the exponent in float32


def sum_products(model: SumModel, kinds: Kinds, x: Array, y: Array, start: Array | None) -> Array:
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


def _add_blocks(model: SumModel, kinds: Kinds, x: Array, y: Array, start: Array | None) -> Array:
    smallest = [_SMALLEST[kind] for kind in kinds]
    (batch, rows, depth), columns = x.shape, y.shape[2]
    left, right = _powers(x, smallest[0], 2), _powers(y, smallest[1], 1)
    out = scratch("out", (batch, rows, columns), F4)
    row_parts = _parts(rows, _AT_ONCE // columns)
    for which in _parts(batch, _AT_ONCE // (columns * (row_parts[0].stop - row_parts[0].start))):
        for some in row_parts:
            part = (which, some)
            finite, top = left.finite and right.finite, left.top[part] + right.top[which]
            block = _Block(model, smallest, finite, top)
            total = None if start is None else start[part]
            for first in range(0, depth, model.products):
                now = slice(first, first + model.products)
                x_powers, y_powers = left.values[part][..., now], right.values[which, now]
                total = block.add(x[part][..., now], y[which, now], x_powers, y_powers, total)
            out[part] = total
    return out


def _parts(size: int, most: int) -> list[slice]:
    """Equal parts of a range, of about ``most`` at most."""
    step = -(-size // -(-size // max(most, 1)))
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]


# ---- exponents
#
# The largest e(a_i) + e(b_i) of every row and column is the exponent of a matrix product of
# 16^e(a_i) and 16^e(b_i): the sum of at most 8 powers is less than 16 times the largest of them,
# in whatever order it is rounded. The powers are relative to the largest of a row of A and a column
# of B. float32 has the range for the 46 exponents below both; the powers of others may vanish.

_SEEN = 46
_HIGHEST = 64  # what powers are relative to at most: the sum of two is an exponent of float32
_PIECE = 8


class _Powers(NamedTuple):
    """16^(e - top) 2^60 of the values of an operand; 0 for a zero, inf for an infinity or a NaN.

    Attributes:
        top: the largest exponents (batch, rows, 1) or (batch, 1, columns).
        finite: whether all powers are.
    """

    values: Array
    top: Array
    finite: bool


def _powers(values: Array, smallest: int, axis: int) -> _Powers:
    """The powers of an operand whose sums go along ``axis``."""
    power: Array = (values.view(I4) & np.int32(_EXPONENT)).view(F4)  # 2^e, or inf
    np.maximum(power, np.float32(2.0**smallest), out=power)
    power *= values != 0
    largest = power.max(axis=axis, keepdims=True)
    finite = bool(largest.max() <= 2.0**_HIGHEST)
    if not finite:
        small = power <= 2.0**_HIGHEST
        largest = power.max(axis=axis, keepdims=True, where=small, initial=0)
    top = np.maximum(np.frexp(largest)[1] - 1, LOW)
    power *= np.ldexp(np.float32(1), 15 - top)
    power *= power
    power *= power
    return _Powers(power, top, finite)


# ---- blocks


def _field(exponent: int) -> int:
    """An exponent as the bits of 2^exponent in float32."""
    return (exponent + 127) << 23


class _Block:
    """The sums of one block after the other, for matrices of one shape (batch, rows, columns)."""

    def __init__(self, model: SumModel, smallest: list[int], finite: bool, top: Array) -> None:
        """For powers that are finite or not, relative to ``top`` (batch, rows, columns)."""
        self.model = model
        self.smallest = smallest
        self.finite = finite
        shape = batch, rows, columns = top.shape
        self.base = (top + (127 - 30 - 32)) << 23
        # Exponents from here on are right.
        self.right = (np.maximum(top - _SEEN, LOW) + 127) << 23
        self.right[self.right <= _field(model.floor)] = _field(model.floor)
        self.power = scratch("power", shape, F4)
        self.exponent = scratch("exponent", shape, I4)
        self.scale = scratch("scale", shape, F4)
        self.factors = np.zeros((batch, _TERMS, rows, _TERMS), F4)
        self.terms = scratch("terms", (batch, _TERMS, rows, columns), F4)
        self.integers = scratch("integers", self.terms.shape, I4)
        self.part = scratch("part", shape, I4)
        self.sum = scratch("sum", shape, I4)
        self.total = scratch("total", shape, F8)
        self.result = scratch("result", shape, F4)
        # Whether the sum of all terms, C among them, fits into 32 bits.
        self.fits = (4 * model.products + 2) << model.fraction <= 1 << 31

    def add(self, a: Array, b: Array, powers_a: Array, powers_b: Array, c: Array | None) -> Array:
        """A B + C of one block, float32, valid until the next call.

        Args:
            a, b: (batch, rows, L) and (batch, L, columns), with their powers.
            c: (batch, rows, columns), or None.
        """
        model = self.model
        exponent = self._exponents(powers_a, powers_b, c)
        odd = self._others(a, b, c)
        fraction = np.uint32(_field(model.fraction) + _field(0))
        np.subtract(fraction, exponent.view(np.uint32), out=self.scale.view(np.uint32))
        self._add_terms(a, b)
        if c is not None:
            self.scale *= c
        if c is not None and self.fits:
            np.copyto(self.part, self.scale, casting="unsafe")
            self.sum += self.part
        np.copyto(self.total, self.sum)
        if c is not None and not self.fits:
            self.total += np.trunc(self.scale, out=self.scale)
        exponent -= np.int32(model.fraction << 23)
        start = None if c is None or odd is None else c[odd]
        self._round(exponent.view(F4))
        if odd is not None:
            self._replace(odd, a, b, start)
        return self.result

    def _add_terms(self, a: Array, b: Array) -> None:
        """Sets the sum of the truncated products, scaled by 2^(F - E).

        The products, each by itself, are those of a matrix with the factors of A on a diagonal: a
        matrix product is faster than an outer product.
        """
        batch, columns = len(a), b.shape[2]
        diagonal = np.einsum("bkrk->bkr", self.factors)
        factors = self.factors.reshape(batch, -1, _TERMS)
        products = self.terms.reshape(batch, -1, columns)
        for first in range(0, self.model.products, _TERMS):
            now = slice(first, first + _TERMS)
            diagonal[...] = a[..., now].swapaxes(1, 2)
            np.matmul(factors, b[:, now], out=products)
            self.terms *= self.scale[:, None]
            # The conversion to integers truncates.
            np.copyto(self.integers, self.terms, casting="unsafe")
            out = self.part if first else self.sum
            np.add.reduce(self.integers, axis=1, dtype=np.int32, out=out)
            if first:
                self.sum += self.part

    def _exponents(self, powers_a: Array, powers_b: Array, c: Array | None) -> Array:
        """The largest exponent of each sum, as `_field` has it."""
        power, exponent = self.power, self.exponent
        np.matmul(powers_a[..., :_PIECE], powers_b[:, :_PIECE], out=power)
        for first in range(_PIECE, self.model.products, _PIECE):
            now = slice(first, first + _PIECE)
            np.maximum(power, np.matmul(powers_a[..., now], powers_b[:, now]), out=power)
        # The exponent 4 E + r of a power plus 128 is a multiple of 4 and r.
        bits = np.add(power.view(np.uint32), np.uint32(1 << 23), out=exponent.view(np.uint32))
        bits >>= np.uint32(2)
        bits &= np.uint32(_field(0))
        exponent += self.base
        if c is not None:
            exponent_of_c = np.bitwise_and(c.view(I4), np.int32(_EXPONENT), out=self.part)
            np.maximum(exponent, exponent_of_c, out=exponent)
        return exponent

    def _others(self, a: Array, b: Array, c: Array | None) -> tuple[Array, ...] | None:
        """The indices of the sums that `_exact_block` has to make; None if there are none.

        Raises the exponents to the smallest that are right here.
        """
        exponent = self.exponent
        if self.model.floor > LOW:
            np.maximum(exponent, _field(self.model.floor), out=exponent)
        low = np.subtract(exponent, self.right, out=self.part).min() < 0
        if self.finite and not low and exponent.max() <= _field(HIGH):
            return None
        odd = exponent > _field(HIGH)
        if not self.finite:
            odd |= ~np.isfinite(self.power)
        if low:
            some = np.matmul((a != 0).astype(F4), (b != 0).astype(F4)) != 0
            odd |= (exponent < self.right) & (some if c is None else some | (c != 0))
        np.maximum(exponent, _field(LOW), out=exponent)
        return odd.nonzero() if odd.any() else None

    def _round(self, scale: Array) -> None:
        """Multiplies the totals by ``scale``, a power of two, and rounds them as the result is."""
        if self.model.result == "f16":
            self.total *= scale
            self.result[...] = self.total.astype(np.float16)
            return
        bits = self.total.view(np.int64)
        bits &= np.int64(-1 << (52 - _FRACTION_BITS[self.model.result]))
        np.copyto(self.result, self.total, casting="same_kind")
        self.result *= scale

    def _replace(self, odd: tuple[Array, ...], a: Array, b: Array, start: Array | None) -> None:
        batch, row, column = odd
        c = np.zeros(len(row), F4) if start is None else start
        terms = a[batch, row], b.swapaxes(1, 2)[batch, column], c
        self.result[odd] = _exact_block(self.model, self.smallest, *terms)


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
