"""What a tensor map says: how a box of a tensor in global memory is copied to shared memory.

One description serves both back ends: `flashgen.launch.tensormap.encode` lets the driver turn it
into the 128 bytes of a CUtensorMap, and `flashgen.emulator.TensorMap` joins it with a numpy array.
Dimensions, strides and box sizes are given innermost first, as cuTensorMapEncodeTiled has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NoReturn

from flashgen.errors import LaunchError

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
MAP_BYTES, MAP_ALIGN = 128, 64  # of a CUtensorMap
SWIZZLES = (0, 32, 64, 128)
MOST_DIMENSIONS = 5
MOST_OF_BOX = 256


@dataclass(frozen=True)
class TensorMapSpec:
    """A tiled tensor map; checked by the rules of cuTensorMapEncodeTiled (CUDA driver API 13).

    Elements outside the tensor read as zero and are not written. Interleaved layouts, element
    strides other than 1 and im2col are not offered.

    Attributes:
        dtype: of the elements, one of `ELEMENT_BYTES`.
        dims: sizes of the tensor, innermost first; 1 to 5 of them.
        strides: bytes between neighbours of dimensions 1 and up, one fewer than ``dims``; the
            innermost dimension is contiguous.
        box: sizes of the box that one copy moves, in elements.
        swizzle: span in bytes of the pattern that permutes 16-byte chunks in shared memory: 32, 64
            or 128; 0 for none.
        before: bytes from the map's first element to the tensor's, for a map that has places
            before the tensor, which nobody asks for: see `stretches`.

    Raises:
        LaunchError: the driver would refuse it.
    """

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    before: int = 0

    def __post_init__(self) -> None:
        rank = len(self.dims)
        if self.dtype not in ELEMENT_BYTES:
            self._refuse("an element type that it does not have", ", ".join(ELEMENT_BYTES))
        if not 1 <= rank <= MOST_DIMENSIONS or len(self.box) != rank:
            self._refuse("numbers of dimensions that do not fit", "1 to 5, as many in the box")
        if len(self.strides) != rank - 1:
            self._refuse("a wrong number of strides", "one fewer than dimensions, in bytes")
        if not all(1 <= size <= 1 << 32 for size in self.dims):
            self._refuse("a dimension it cannot have", "each is 1 to 2^32")
        if not all(0 <= step < 1 << 40 and step % 16 == 0 for step in self.strides):
            self._refuse("a stride it cannot have", "multiples of 16 bytes, below 2^40")
        if not all(1 <= size <= MOST_OF_BOX for size in self.box):
            self._refuse("a box it cannot have", f"each side is 1 to {MOST_OF_BOX} elements")
        if self.inner_bytes % 16:
            self._refuse(
                "a box whose inner side is no multiple of 16 bytes", f"it has {self.inner_bytes}"
            )
        if self.swizzle not in SWIZZLES:
            self._refuse("a swizzle that it does not have", "0 (none), 32, 64 or 128 bytes")
        if self.swizzle and self.inner_bytes > self.swizzle:
            self._refuse(
                "a box that is wider than the span of its swizzle",
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
        """Bytes that one copy puts into shared memory, and that its mbarrier must expect."""
        return math.prod(self.box) * self.element_bytes

    @property
    def span_bytes(self) -> int:
        """From the map's first byte to the end of its last."""
        steps = (self.element_bytes, *self.strides)
        last = sum((size - 1) * step for size, step in zip(self.dims, steps, strict=True))
        return last + self.element_bytes

    def stretches(self) -> TensorMapSpec:
        """The same tensor, 4-d with one batch entry, for boxes that end where a stretch does.

        A stretch is some rows (dimension 1) that lie behind each other. The new map has the rows
        twice: the element (c, n, h, e) is that of row n + e - N of the tensor's N. So where a
        stretch of L rows ends in front of row e, its row r is n = N - L + r, and the first row
        behind it is n = N, which is outside the map: it reads as zeros and is not written.

        Neither the driver nor TMA asks for strides that keep elements apart, or for memory behind
        what no box has inside the map; Triton's ragged descriptors (triton/tools/ragged_tma.py)
        rest on the same, with addresses that wrap around where here they begin earlier.

        Raises:
            LaunchError: there are several batch entries, or the driver would refuse it.
        """
        if len(self.dims) != 4 or self.dims[3] != 1:
            self._refuse("stretches of several batch entries", "4 dimensions, the last of size 1")
        columns, rows, heads, _ = self.dims
        per_row, per_head, _ = self.strides
        return replace(
            self,
            dims=(columns, rows, heads, rows + 1),
            strides=(per_row, per_head, per_row),
            before=rows * per_row,
        )

    def first(self, address: int) -> int:
        """The address of the map, for a tensor that begins at one.

        Raises:
            LaunchError: it is not aligned, or there are fewer addresses before it than `before`.
        """
        if address % 16:
            self._refuse("a tensor that is not aligned to 16 bytes", f"it begins at {address:#x}")
        if address < self.before:
            self._refuse(
                "places before address 0", f"{self.before:,} B before a tensor at {address:#x}"
            )
        return address - self.before

    def _refuse(self, what: str, numbers: str) -> NoReturn:
        raise LaunchError(
            f"a tensor map cannot have {what}",
            where=f"TensorMapSpec, {self.dtype}, dims {self.dims}, strides {self.strides} B, "
            f"box {self.box}, swizzle {self.swizzle}"
            + (f", {self.before:,} B before it" if self.before else ""),
            numbers=numbers,
            way_out="choose sizes and strides that TMA accepts, or copy without it",
        )
