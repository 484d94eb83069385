"""Matrix descriptors of wgmma: where in shared memory each 16-byte chunk of an operand lies.

A descriptor has 64 bits: 0-13 the start address, 16-29 the leading and 32-45 the stride byte
offset (all divided by 16), 49-51 the base offset, 62-63 the swizzle (0 none, 1 of 128 bytes, 2 of
64, 3 of 32). All other bits must be 0. An operand consists of 16-byte chunks; eight of them form a
core matrix. ``span`` is the width of the swizzle, 16 without swizzle:

    K-major, none       chunk c of row r:     (r / 8) SBO + (r % 8) 16 + c LBO
    K-major, swizzled   chunk c of row r:     (r / 8) SBO + (r % 8) span + 16 c
    MN-major, none      chunk p of depth k:   (k / 8) LBO + (k % 8) 16 + p SBO
    MN-major, swizzled  chunk p of depth k:   (k / 8) SBO + (k % 8) span
                                              + 16 (p mod span/16) + (p / (span/16)) LBO

Swizzling replaces bits 4-6 of the address in the shared window by their exclusive or with bits 7-9
(one, two or three bits for a span of 32, 64 or 128 bytes), as in tensor copies by TMA.

The swizzle is a function of the address, so an operand may start at any row of a pattern whose own
start is aligned, with base offset 0: the base offset is for patterns that are not aligned. CUTLASS
describes the operand in the same way, as Swizzle<3,4,3> of the address of each row
(cute/atom/mma_traits_sm90_gmma.hpp; NVIDIA/cutlass issue 1688). With a span of 32 or 64 bytes such
a start is refused: it is most often that of a tile with a swizzle of 128 bytes.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout" and "Matrix-Descriptor
Format".
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ptx_emulator.state.memory import Array

CHUNK_BYTES = 16
PATTERN_BYTES = 1024  # period of the longest swizzle
STEP_CHUNKS = 2  # along k: one instruction reads 32 bytes of each row; of B, 64 where A is sparse
_SPAN = np.array([16, 128, 64, 32])
_UNUSED = np.uint64(0x3FF1_C000_C000_C000)


class DescriptorLayout(NamedTuple):
    """The fields of a descriptor except the start: offsets and span of the swizzle, in bytes.

    Attributes:
        chunks: along k, of one instruction.
    """

    leading: int
    stride: int
    span: int
    chunks: int = STEP_CHUNKS

    def __str__(self) -> str:
        swizzle = f"swizzle of {self.span} bytes" if self.span > CHUNK_BYTES else "no swizzle"
        return f"leading offset {self.leading}, stride offset {self.stride}, {swizzle}"


class OperandChunks(NamedTuple):
    """Positions of the chunks of an operand relative to an address that is a multiple of 1024.

    Attributes:
        positions: in units of 16 bytes; K-major (rows, chunks along k), MN-major (k, chunks of 8
            rows).
        low, high: offset of the first byte, and of the end.
    """

    positions: Array
    low: int
    high: int


def starts(words: Array) -> Array:
    """Start addresses in bytes of descriptors, int64."""
    return ((words & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64)


def layouts(words: Array) -> list[DescriptorLayout]:
    """The layouts of descriptors."""
    leading = ((words >> np.uint64(16)) & np.uint64(0x3FFF)).astype(np.int64) * CHUNK_BYTES
    stride = ((words >> np.uint64(32)) & np.uint64(0x3FFF)).astype(np.int64) * CHUNK_BYTES
    span = _SPAN[(words >> np.uint64(62)).astype(np.int64)]
    return [DescriptorLayout(*map(int, row)) for row in zip(leading, stride, span, strict=True)]


def problem(word: int) -> str:
    """A description of the error in a descriptor, '' if it is valid."""
    if word & int(_UNUSED):
        return "bits that must be 0 are set: a field overflows, or an address was not divided by 16"
    if word >> 49 & 7:
        return "base offsets are not supported by the emulator: align the operand to its swizzle"
    span = int(_SPAN[word >> 62])
    start = (word & 0x3FFF) << 4
    if CHUNK_BYTES < span < 128 and start & (8 * span - 1) >= span:
        return f"the start {start} is in the middle of the swizzle's pattern of {8 * span} bytes"
    return ""


@functools.lru_cache(maxsize=4096)
def operand_chunks(
    steps: tuple[int, ...],
    layout: DescriptorLayout,
    rows: int,
    mn_major: bool,
    even_first: bool = False,
) -> OperandChunks:
    """Positions of the chunks of an operand that successive instructions along k read.

    Args:
        steps: start address of the operand of each instruction, relative to a multiple of 1024.
        layout: the descriptor fields that all instructions share.
        rows: rows of A (64), or columns of B.
        mn_major: the operand is transposed: its chunks run along rows, with 16-bit elements.
        even_first: K-major only: order each eight rows as 0 2 4 6 1 3 5 7.
    """
    start = np.array(steps, np.int64)
    leading, stride, span, chunks = layout
    if mn_major:
        k = np.arange(8 * chunks)[:, None]
        chunk = np.arange(rows // 8)
        per_span = span // CHUNK_BYTES
        if span == CHUNK_BYTES:
            step = k // 8 * leading + k % 8 * CHUNK_BYTES + chunk * stride
        else:
            step = k // 8 * stride + k % 8 * span + chunk % per_span * CHUNK_BYTES
            step = step + chunk // per_span * leading
        offsets = (start[:, None, None] + step).reshape(-1, rows // 8)
    else:
        r = np.arange(rows)[:, None]
        if even_first:
            r = r.reshape(-1, 4, 2).transpose(0, 2, 1).reshape(-1, 1)
        along = np.arange(chunks) * (leading if span == CHUNK_BYTES else CHUNK_BYTES)
        row = r // 8 * stride + r % 8 * span
        offsets = (row[:, :, None] + start[None, :, None] + along).reshape(rows, -1)
    offsets ^= ((offsets >> 7) & (span // CHUNK_BYTES - 1)) << 4
    return OperandChunks(offsets >> 4, int(offsets.min()), int(offsets.max()) + CHUNK_BYTES)
