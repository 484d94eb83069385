"""Matrix descriptors of wgmma: where in shared memory each 16-byte piece of an operand lies.

A descriptor has 64 bits: 0-13 the start address, 16-29 the leading and 32-45 the stride byte
offset (all divided by 16), 49-51 the base offset, 62-63 the swizzle (0 none, 1 of 128 bytes, 2 of
64, 3 of 32). Everything else must be 0. An operand is made of pieces of 16 bytes; eight of them
form a core matrix. ``span`` is the width of the swizzle, 16 where there is none:

    K-major, none       piece c of row r:     (r / 8) SBO + (r % 8) 16 + c LBO
    K-major, swizzled   piece c of row r:     (r / 8) SBO + (r % 8) span + 16 c
    MN-major, none      piece p of depth k:   (k / 8) LBO + (k % 8) 16 + p SBO
    MN-major, swizzled  piece p of depth k:   (k / 8) SBO + (k % 8) span
                                              + 16 (p mod span/16) + (p / (span/16)) LBO

Swizzling replaces address bits 4-6 by their exclusive or with bits 7-9 (as many of them as the span
has), of the address in the shared window, as TMA does when it writes there. Source: PTX ISA,
"Asynchronous Warpgroup Level Matrix Shared Memory Layout" and "Matrix-Descriptor Format".
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

PIECE_BYTES = 16
PATTERN_BYTES = 1024  # the longest swizzle repeats after so many
STEP_PIECES = 2  # along k: one instruction reads 32 bytes of each row
_SPAN = np.array([16, 128, 64, 32])
_UNUSED = np.uint64(0x3FF1_C000_C000_C000)


class Layout(NamedTuple):
    """What a descriptor says besides the start: offsets in bytes, span of the swizzle."""

    leading: int
    stride: int
    span: int

    def __str__(self) -> str:
        swizzle = f"swizzle of {self.span} bytes" if self.span > PIECE_BYTES else "no swizzle"
        return f"leading offset {self.leading}, stride offset {self.stride}, {swizzle}"


class Pieces(NamedTuple):
    """Places of the pieces of an operand relative to an address that is a multiple of 1024.

    Attributes:
        places: in units of 16 bytes; K-major (rows, pieces along k), MN-major (k, pieces of 8).
        low, high: the first byte and the one behind the last.
    """

    places: Array
    low: int
    high: int


def starts(words: Array) -> Array:
    """Start addresses in bytes of descriptors, int64."""
    return ((words & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)


def layouts(words: Array) -> list[Layout]:
    """The layouts of descriptors."""
    leading = ((words >> np.uint64(16)) & np.uint64(0x3FFF)).astype(np.int64) * PIECE_BYTES
    stride = ((words >> np.uint64(32)) & np.uint64(0x3FFF)).astype(np.int64) * PIECE_BYTES
    span = _SPAN[(words >> np.uint64(62)).astype(np.int64)]
    return [Layout(*map(int, row)) for row in zip(leading, stride, span, strict=True)]


def problem(word: int) -> str:
    """What is wrong with a descriptor, '' if nothing is."""
    if word & int(_UNUSED):
        return "bits that must be 0 are set: a field overflows, or an address was not divided by 16"
    if word >> 49 & 7:
        return "a base offset, which the emulator does not know: align the operand to its swizzle"
    span = int(_SPAN[word >> 62])
    start = (word & 0x3FFF) << 4
    if span > PIECE_BYTES and start & (8 * span - 1) >= span:
        return f"the start {start} is in the middle of the swizzle's pattern of {8 * span} bytes"
    return ""


@functools.lru_cache(maxsize=4096)
def pieces(
    steps: tuple[int, ...], layout: Layout, rows: int, mn_major: bool, deal: bool = False
) -> Pieces:
    """Where an operand lies that some instructions read one after the other along k.

    Args:
        steps: start of each instruction's part, relative to a multiple of 1024.
        layout: of all of them.
        rows: of A (64) or columns of B.
        mn_major: the operand is transposed: its pieces run along rows, of 16-bit elements.
        deal: K-major only: order each eight rows as 0 2 4 6 1 3 5 7.
    """
    start = np.array(steps, np.int64)
    leading, stride, span = layout
    if mn_major:
        k = np.arange(16)[:, None]
        piece = np.arange(rows // 8)
        per_span = span // PIECE_BYTES
        if span == PIECE_BYTES:
            step = k // 8 * leading + k % 8 * PIECE_BYTES + piece * stride
        else:
            step = k // 8 * stride + k % 8 * span + piece % per_span * PIECE_BYTES
            step = step + piece // per_span * leading
        place = (start[:, None, None] + step).reshape(-1, rows // 8)
    else:
        r = np.arange(rows)[:, None]
        if deal:
            r = r.reshape(-1, 4, 2).transpose(0, 2, 1).reshape(-1, 1)
        along = np.arange(STEP_PIECES) * (leading if span == PIECE_BYTES else PIECE_BYTES)
        row = r // 8 * stride + r % 8 * span
        place = (row[:, :, None] + start[None, :, None] + along).reshape(rows, -1)
    place ^= ((place >> 7) & (span // PIECE_BYTES - 1)) << 4
    return Pieces(place >> 4, int(place.min()), int(place.max()) + PIECE_BYTES)
