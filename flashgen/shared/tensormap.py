"""Descriptions of tensor maps: how TMA copies boxes of a tensor between global and shared memory.

Both back ends use the same description: `flashgen.calls.launch.encode` encodes it as the 128
bytes of a CUtensorMap with the driver, and `ptx_emulator.TensorMap` combines it with a numpy
array. Dimensions, strides and box sizes are given innermost first, as in cuTensorMapEncodeTiled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NoReturn

from flashgen.shared.errors import LaunchError

ELEMENT_BYTES = {
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
}
MAP_BYTES, MAP_ALIGN = 128, 128  # size and alignment of a CUtensorMap in CUDA 13; 12 aligns to 64
RAGGED_ROWS = 1 << 30
"""The end of the row coordinate of a map with ragged rows: see `TensorMapSpec.ragged`."""
_WRAPPING_STRIDE = 1 << 35  # bytes; RAGGED_ROWS of them are a multiple of 2^64
_RAGGED_SIZE = 0x7FFF0000  # of the last two dimensions: more than any of their coordinates
SWIZZLES = (0, 32, 64, 128)
MAX_DIMENSIONS = 5
MAX_BOX_SIDE = 256


@dataclass(frozen=True)
class TensorMapSpec:
    """A tiled tensor map, validated by the rules of cuTensorMapEncodeTiled (CUDA driver API 13).

    Elements outside the tensor are read as zero and are not written. Interleaved layouts, element
    strides other than 1 and im2col are not supported.

    Attributes:
        dtype: element type, one of `ELEMENT_BYTES`.
        dims: 1 to 5 sizes of the tensor, innermost first.
        strides: strides of dimensions 1 and up in bytes, one fewer than ``dims``; the innermost
            dimension is contiguous.
        box: sizes in elements of the box that one copy moves.
        swizzle: span in bytes of the permutation of 16-byte vectors in shared memory: 32, 64 or
            128; 0 for no permutation.

    Raises:
        LaunchError: the driver would reject the map.
    """

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        rank = len(self.dims)
        if self.dtype not in ELEMENT_BYTES:
            self._refuse("this element type", ", ".join(ELEMENT_BYTES))
        if not 1 <= rank <= MAX_DIMENSIONS or len(self.box) != rank:
            self._refuse("this number of dimensions", "1 to 5, and as many in the box")
        if len(self.strides) != rank - 1:
            self._refuse("this number of strides", "one fewer than dimensions, in bytes")
        if not all(1 <= size <= 1 << 32 for size in self.dims):
            self._refuse("a dimension of this size", "each is 1 to 2^32")
        if not all(0 <= step < 1 << 40 and step % 16 == 0 for step in self.strides):
            self._refuse("a stride of this size", "strides are multiples of 16 bytes, below 2^40")
        if not all(1 <= size <= MAX_BOX_SIDE for size in self.box):
            self._refuse("a box of this size", f"each side is 1 to {MAX_BOX_SIDE} elements")
        if self.inner_bytes % 16:
            self._refuse(
                "a box whose inner side is not a multiple of 16 bytes", f"it has {self.inner_bytes}"
            )
        if self.swizzle not in SWIZZLES:
            self._refuse("this swizzle", "0 (none), 32, 64 or 128 bytes")
        if self.swizzle and self.inner_bytes > self.swizzle:
            self._refuse(
                "a box wider than the span of its swizzle",
                f"its inner side has {self.inner_bytes} bytes, the span {self.swizzle}",
            )

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def inner_bytes(self) -> int:
        """Bytes of one row of the box."""
        return self.box[0] * self.element_bytes

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy writes to shared memory, and that its mbarrier must expect."""
        return math.prod(self.box) * self.element_bytes

    @property
    def span_bytes(self) -> int:
        """Bytes from the first byte of the map to the end of its last element."""
        steps = (self.element_bytes, *self.strides)
        last = sum((size - 1) * step for size, step in zip(self.dims, steps, strict=True))
        return last + self.element_bytes

    def ragged(self) -> TensorMapSpec:
        """A map of the same 4-d tensor whose boxes end at the end of a packed sequence.

        Packed sequences are ranges of consecutive rows (dimension 1) of a tensor with one batch
        entry. In a sequence of L rows that ends before row e of the tensor, row r has the
        coordinates (column, R - L + r, head, e, R), where R is `RAGGED_ROWS`. In the first row
        after the sequence the second coordinate is R, which is outside the map: that row is read as
        zeros and is not written.

        The strides of the last two dimensions make the address that of row e - L + r: e rows, and
        R times 2^35 bytes less a row, which is R rows less than a multiple of 2^64. Addresses of 64
        bits wrap around, so that the map begins at the tensor. Triton's ragged descriptors
        (triton/tools/ragged_tma.py, `create_ragged_descriptor`) have these dimensions and strides.

        Raises:
            LaunchError: there are several batch entries, or more than R rows, or the driver would
                reject the map.
        """
        if len(self.dims) != 4 or self.dims[3] != 1:
            self._refuse(
                "packed sequences in several batch entries", "4 dimensions, the last of size 1"
            )
        columns, rows, heads, _ = self.dims
        if rows > RAGGED_ROWS:
            self._refuse("as many rows of packed sequences", f"at most {RAGGED_ROWS:,}")
        per_row, per_head, _ = self.strides
        return replace(
            self,
            dims=(columns, RAGGED_ROWS, heads, _RAGGED_SIZE, _RAGGED_SIZE),
            strides=(per_row, per_head, per_row, _WRAPPING_STRIDE - per_row),
            box=(*self.box, 1),
        )

    @property
    def wraps_around(self) -> bool:
        """Whether addresses exceed 64 bits, so that the tensor need not contain the whole map."""
        return self.span_bytes > 1 << 64

    def check_address(self, address: int) -> None:
        """Checks the address of the tensor's first element.

        Raises:
            LaunchError: it is not aligned to 16 bytes.
        """
        if address % 16:
            self._refuse("a tensor that is not aligned to 16 bytes", f"it starts at {address:#x}")

    def _refuse(self, what: str, numbers: str) -> NoReturn:
        raise LaunchError(
            f"a tensor map cannot have {what}",
            where=f"TensorMapSpec, {self.dtype}, dims {self.dims}, strides {self.strides} B, "
            f"box {self.box}, swizzle {self.swizzle}",
            numbers=numbers,
            way_out="choose sizes and strides that TMA supports, or copy without a tensor map",
        )
