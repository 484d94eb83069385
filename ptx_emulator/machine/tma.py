"""Tensor maps, and the bytes of global and shared memory that a tensor copy accesses."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from flashgen.shared.errors import called_by_users
from flashgen.shared.tensormap import TensorMapSpec
from ptx_emulator.errors import LaunchArguments
from ptx_emulator.state.memory import Array

CHUNK_BYTES, WIDEST_BYTES = 16, 128  # bytes moved at once, and checked at once by the shadows
# What TMA fills with; CUDA names "a special NaN constant", and these are the NaN of arithmetic.
NAN_BITS: dict[str, np.unsignedinteger[Any]] = {
    "float16": np.uint16(0x7FFF),
    "bfloat16": np.uint16(0x7FFF),
    "float32": np.uint32(0x7FFFFFFF),
    "float64": np.uint64(0x7FF8000000000000),
}
_PERIOD = 1024  # period of the swizzles in bytes
_SWIZZLE_BITS = {0: 0, 32: 1, 64: 3, 128: 7}


@called_by_users()
class TensorMap:
    """A kernel argument of type CUtensorMap: a numpy array and the parameters of its boxes.

    Args:
        array: the tensor, its innermost dimension contiguous; or any array that holds it, with
            ``dims`` and ``strides``. It must begin at a multiple of 16 bytes.
        box: sizes of the box in elements, innermost first.
        swizzle: span of the pattern in shared memory, in bytes: 0 (none), 32, 64 or 128.
        dims: sizes of the tensor, innermost first; those of the array by default.
        strides: bytes between neighbours of dimensions 1 and up; those of the array by default.
        dtype: that of the array by default; "bfloat16" for uint16 bit patterns.
        before: bytes from the first element of the map to the array. Where it is not 0, and where
            the addresses of the map exceed 64 bits and wrap around, each copied box is checked
            instead of the whole map. Loads by a map that begins before its array are refused,
            because TMA may access the first element of a map for elements outside the tensor.
        fill_nan: elements outside the tensor are NaN, and not zero.

    Raises:
        LaunchError: cuTensorMapEncodeTiled would reject the map.
        LaunchArguments: the tensor extends beyond the array.
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
        before: int = 0,
        fill_nan: bool = False,
    ) -> None:
        if (dims is None or strides is None) and array.strides[-1] != array.itemsize:
            what = "the innermost dimension of a tensor map's array is not contiguous"
            where = "ptx_emulator.TensorMap"
            numbers = f"shape {array.shape}, strides {array.strides} B"
            way_out = "permute its axes, or pass a copy"
            raise LaunchArguments(what, where=where, numbers=numbers, way_out=way_out)
        self.array = array
        dims = tuple(array.shape[::-1] if dims is None else dims)
        strides = tuple(array.strides[-2::-1] if strides is None else strides)
        self.spec = TensorMapSpec(dtype or array.dtype.name, dims, strides, tuple(box), swizzle)
        self.before, self.fill_nan = before, fill_nan
        if fill_nan and self.spec.dtype not in NAN_BITS:
            what = "a tensor map of integers cannot fill with NaN"
            where, way_out = "ptx_emulator.TensorMap", "fill with zeros, or give a dtype of floats"
            raise LaunchArguments(what, where=where, numbers=self.spec.dtype, way_out=way_out)
        start = array.ctypes.data
        self.spec.check_address(start - before)
        self.bytes = np.lib.array_utils.byte_bounds(array)[1] - start
        whole = not before and not self.spec.wraps_around
        if whole and self.spec.span_bytes > self.bytes:
            raise LaunchArguments(
                "a tensor map extends beyond its array",
                where="ptx_emulator.TensorMap",
                numbers=f"dims {self.spec.dims} with strides {self.spec.strides} B span "
                f"{self.spec.span_bytes:,} bytes; the array has {self.bytes:,}",
                way_out="give the dims and strides of the array",
            )


class Boxes(NamedTuple):
    """The bytes of a tensor that copies access, as offsets from its first byte.

    Attributes:
        unit: size in bytes of the units that lie entirely inside or outside the tensor, 1 to 16.
        offsets: offsets of the units, (copies, units), in the order of shared memory before the
            swizzle.
        inside: whether each unit lies in the tensor, (copies, units); None if all do.
        wide_unit, wide_offsets: the same in larger units of up to 128 bytes, unless boxes are cut.
        bytes: bytes inside the tensor, summed over the copies.
        sectors: 32-byte sectors that the rows of the boxes access.
        outside: the 16 bytes that stand for the elements outside the tensor.
    """

    unit: int
    offsets: Array
    inside: Array | None
    wide_unit: int
    wide_offsets: Array
    bytes: int
    sectors: int
    outside: Array = np.zeros(CHUNK_BYTES, np.uint8)


def boxes(spec: TensorMapSpec, base: int, coordinates: Array) -> Boxes:
    """The boxes at ``coordinates`` (copies, dimensions) of a tensor at address ``base``."""
    start = coordinates @ np.array((spec.element_bytes, *spec.strides))
    if (coordinates < 0).any() or (coordinates + spec.box > spec.dims).any():
        return _cut_boxes(spec, base, coordinates, start)
    count = len(coordinates)
    unit = lowest_bit(coordinates[:, 0] * spec.element_bytes, CHUNK_BYTES)
    run = lowest_bit(np.append(start, spec.inner_bytes) | base, WIDEST_BYTES)
    for step, side in zip(spec.strides, spec.box[1:], strict=True):
        run = lowest_bit(step, run) if side > 1 else run
    first = base + start[:, None] + _units(spec, spec.inner_bytes)
    sectors = ((first + spec.inner_bytes - 1) >> 5) - (first >> 5) + 1
    return Boxes(
        unit=unit,
        offsets=start[:, None] + _units(spec, unit),
        inside=None,
        wide_unit=run,
        wide_offsets=start[:, None] + _units(spec, run),
        bytes=count * spec.box_bytes,
        sectors=int(sectors.sum()),
    )


def _cut_boxes(spec: TensorMapSpec, base: int, coordinates: Array, start: Array) -> Boxes:
    """`boxes` where some of them extend beyond the tensor."""
    count = len(coordinates)
    size = spec.element_bytes
    index = _rows(spec.box)
    valid = np.ones((count, index.shape[1]), bool)
    for outer, limit in enumerate(spec.dims[1:]):
        along = coordinates[:, outer + 1, None] + index[outer]
        valid &= (along >= 0) & (along < limit)
    low = np.clip(-coordinates[:, 0] * size, 0, spec.inner_bytes)
    high = np.clip((spec.dims[0] - coordinates[:, 0]) * size, 0, spec.inner_bytes)
    width = np.maximum(high - low, 0)
    first = base + (start + low)[:, None] + _units(spec, spec.inner_bytes)
    touched = ((first + width[:, None] - 1) >> 5) - (first >> 5) + 1
    # The widest unit that is not cut by a border of the tensor or by an odd coordinate.
    unit = lowest_bit(np.concatenate([coordinates[:, 0] * size, low, high]), CHUNK_BYTES)
    offsets = start[:, None] + _units(spec, unit)
    steps = np.arange(spec.inner_bytes // unit) * unit
    across = (steps >= low[:, None]) & (steps < high[:, None])
    return Boxes(
        unit=unit,
        offsets=offsets,
        inside=(valid[:, :, None] & across[:, None]).reshape(count, -1),
        wide_unit=unit,
        wide_offsets=offsets,
        bytes=int((valid.sum(axis=1) * width).sum()),
        sectors=int(touched[valid & (width > 0)[:, None]].sum()),
    )


def lowest_bit(values: Array | int, limit: int) -> int:
    """The largest power of two, at most ``limit``, that divides all values."""
    bits = int(np.bitwise_or.reduce(np.asarray(values), axis=None)) | limit
    return bits & -bits


@functools.lru_cache(maxsize=256)
def _rows(box: tuple[int, ...]) -> Array:
    """Indices of the rows of a box along dimensions 1 and up, in the order of shared memory."""
    sides = box[:0:-1]
    return np.indices(sides).reshape(len(sides), math.prod(sides))[::-1]


@functools.lru_cache(maxsize=256)
def _units(spec: TensorMapSpec, unit: int) -> Array:
    """Offsets of the units of a box from its first byte."""
    rows = np.array(spec.strides, np.int64) @ _rows(spec.box)
    offsets: Array = rows[:, None] + np.arange(spec.inner_bytes // unit) * unit
    return offsets.reshape(-1)


def shared_offsets(spec: TensorMapSpec, shared: Array, unit: int) -> Array:
    """Offsets in a block's shared memory of the units of boxes at ``shared`` (copies,)."""
    low = shared & (_PERIOD - 1)
    if (low == low[0]).all():
        return shared[:, None] + _turned(spec.box_bytes, unit, spec.swizzle, int(low[0]))
    return swizzled(shared[:, None] + np.arange(spec.box_bytes // unit) * unit, spec.swizzle)


@functools.lru_cache(maxsize=256)
def _turned(size: int, unit: int, span: int, low: int) -> Array:
    return swizzled(low + np.arange(size // unit) * unit, span) - low


def swizzled(address: Array, span: int) -> Array:
    """Addresses in a block's shared memory after the permutation of 16-byte chunks."""
    bits = _SWIZZLE_BITS[span]
    return address ^ ((address >> 7 & bits) << 4) if bits else address


def overlapping(spec: TensorMapSpec) -> bool:
    """Whether a box may contain the same element twice, because strides are small."""
    # What a box has outside the tensor is not copied.
    counts = [min(n, size) for n, size in zip(spec.box, spec.dims, strict=True)]
    sides = [(step, n) for step, n in zip(spec.strides, counts[1:], strict=True) if n > 1]
    end = counts[0] * spec.element_bytes
    for step, side in sorted(sides):
        if step < end:
            return True
        end += step * (side - 1)
    return False
