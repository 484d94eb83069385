"""Boxes of tensors: which bytes of global and of shared memory a tensor copy touches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.errors import LaunchArguments
from flashgen.tensormap import TensorMapSpec

Array = npt.NDArray[Any]
_SWIZZLE_BITS = {0: 0, 32: 1, 64: 3, 128: 7}


class TensorMap:
    """A kernel argument of type CUtensorMap: a numpy array and how boxes of it are copied.

    Args:
        array: the tensor, its innermost dimension contiguous; or any array that holds it, with
            ``dims`` and ``strides``. It must begin at a multiple of 16 bytes.
        box: sizes of the box in elements, innermost first.
        swizzle: span of the pattern in shared memory, in bytes: 0 (none), 32, 64 or 128.
        dims: sizes of the tensor, innermost first; those of the array by default.
        strides: bytes between neighbours of dimensions 1 and up; those of the array by default.
        dtype: the array's by default; "bfloat16" for uint16 bit patterns of that.

    Raises:
        LaunchError: cuTensorMapEncodeTiled would refuse it.
        LaunchArguments: the tensor reaches beyond the array.
    """

    def __init__(
        self,
        array: Array,
        box: tuple[int, ...],
        swizzle: int = 0,
        *,
        dims: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
        dtype: str | None = None,
    ) -> None:
        if (dims is None or strides is None) and array.strides[-1] != array.itemsize:
            raise LaunchArguments(
                "the innermost dimension of a tensor map's array is not contiguous",
                where="flashgen.emulator.TensorMap",
                numbers=f"shape {array.shape}, strides {array.strides} B",
                way_out="permute its axes, or pass a copy",
            )
        self.array = array
        self.spec = TensorMapSpec(
            dtype or array.dtype.name,
            tuple(array.shape[::-1]) if dims is None else tuple(dims),
            tuple(array.strides[-2::-1]) if strides is None else tuple(strides),
            tuple(box),
            swizzle,
        )
        start = array.ctypes.data
        self.spec.check_address(start)
        end = np.lib.array_utils.byte_bounds(array)[1]
        if start + self.spec.span_bytes > end:
            raise LaunchArguments(
                "a tensor map reaches beyond its array",
                where="flashgen.emulator.TensorMap",
                numbers=f"dims {self.spec.dims} with strides {self.spec.strides} B span "
                f"{self.spec.span_bytes:,} bytes; the array has {end - start:,}",
                way_out="give the dims and strides of the array",
            )


@dataclass(frozen=True)
class Boxes:
    """What some copies touch, in units of ``unit`` bytes.

    Attributes:
        offsets: of the units from the tensor's first byte, (copies, units), in the order in which
            they lie in shared memory before the swizzle.
        inside: which units lie in the tensor, (copies, units); None when all do.
        bytes: that lie in the tensor, of all copies together.
        sectors: of 32 bytes that the rows of the boxes touch.
    """

    unit: int
    offsets: Array
    inside: Array | None
    bytes: int
    sectors: int


def boxes(spec: TensorMapSpec, base: int, coordinates: Array) -> Boxes:
    """The boxes at ``coordinates`` (copies, dimensions) of a tensor at address ``base``."""
    size = spec.element_bytes
    count = len(coordinates)
    sides = spec.box[:0:-1]
    rows = math.prod(sides)
    # Index of each row of the box along dimensions 1 and up, in the order of shared memory.
    index = np.indices(sides).reshape(len(sides), rows)[::-1]
    start = coordinates[:, 0] * size
    row = np.zeros((count, rows), np.int64)
    valid = np.ones((count, rows), bool)
    for place, (step, limit) in enumerate(zip(spec.strides, spec.dims[1:], strict=True)):
        along = coordinates[:, place + 1, None] + index[place]
        row += along * step
        valid &= (along >= 0) & (along < limit)
    low = np.clip(-start, 0, spec.inner_bytes)
    high = np.clip(spec.dims[0] * size - start, 0, spec.inner_bytes)
    width = np.maximum(high - low, 0)
    first = base + row + (start + low)[:, None]
    touched = ((first + width[:, None] - 1) >> 5) - (first >> 5) + 1
    sectors = touched[valid & (width > 0)[:, None]].sum()
    # The widest unit that neither a border of the tensor nor an odd coordinate cuts through.
    cuts = int(np.bitwise_or.reduce(np.concatenate([start, low, high]))) | 16
    unit = cuts & -cuts
    steps = np.arange(spec.inner_bytes // unit) * unit
    offsets = (row + start[:, None])[:, :, None] + steps
    inside = None
    if not valid.all() or low.any() or (high < spec.inner_bytes).any():
        across = (steps >= low[:, None]) & (steps < high[:, None])
        inside = (valid[:, :, None] & across[:, None]).reshape(count, -1)
    taken = int((valid.sum(axis=1) * width).sum())
    return Boxes(unit, offsets.reshape(count, -1), inside, taken, int(sectors))


def swizzled(address: Array, span: int) -> Array:
    """Addresses in a block's shared memory after the permutation of 16-byte chunks."""
    bits = _SWIZZLE_BITS[span]
    return address ^ ((address >> 7 & bits) << 4) if bits else address


def overlapping(spec: TensorMapSpec) -> bool:
    """Whether a box may hold the same element twice, because strides are small."""
    sides = [
        (step, side) for step, side in zip(spec.strides, spec.box[1:], strict=True) if side > 1
    ]
    end = spec.inner_bytes
    for step, side in sorted(sides):
        if step < end:
            return True
        end += step * (side - 1)
    return False
