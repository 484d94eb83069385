"""Byte-addressed memories as one flat numpy array each, and the table of device allocations."""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Windows of the generic address space; everything else is global memory.
SHARED_WINDOW = 0x7E00_0000_0000
LOCAL_WINDOW = 0x7D00_0000_0000
PARAM_WINDOW = 0x7C00_0000_0000
WINDOW_BYTES = 0x0100_0000_0000
GUARD_BYTES = 2 << 20
# The type of 16 bytes is used for copies only, never for arithmetic.
ELEMENT: dict[int, np.dtype[Any]] = {
    size: np.dtype(f"{'c' if size == 16 else 'u'}{size}") for size in (1, 2, 4, 8, 16)
}
SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


def sparse_zeros(count: int, dtype: npt.DTypeLike) -> Array:
    """An array of zeros; pages that are never accessed use neither memory nor time.

    np.zeros clears arrays of up to 32 MB, and takes huge pages for those beyond 4 MB.
    """
    size = count * np.dtype(dtype).itemsize
    if size < 1 << 16 or sys.platform == "win32":
        return np.zeros(count, dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype, count)


class FlatMemory:
    """A memory of ``size`` bytes that can be viewed in elements of 1 to 16 bytes."""

    def __init__(self, size: int, *, sparse: bool = False) -> None:
        size = -(-max(size, 16) // 16) * 16
        raw = sparse_zeros(size + 64, np.uint8) if sparse else np.zeros(size + 64, np.uint8)
        skip = -raw.ctypes.data % 64
        self.bytes: Array = raw[skip : skip + size]
        self.view = {width: self.bytes.view(dtype) for width, dtype in ELEMENT.items()}


@dataclass(eq=False)
class Allocation:
    """Device memory behind one or more arguments.

    ``host`` holds the host bytes that are updated after the launch, if the kernel wrote any.
    """

    start: int
    size: int
    label: str
    host: Array | None
    writable: bool = True
    dirty: bool = False


class GlobalMemory:
    """All allocations in one array, with gaps so that an index past an end hits none of them."""

    def __init__(self, base: int, low_bytes: int) -> None:
        self.base = base
        self.next = base + low_bytes + GUARD_BYTES
        self.allocations: list[Allocation] = []
        self.preset: list[tuple[int, bytes]] = []
        self.touched: list[int] = []  # indices of the allocations of the latest access

    def allocate(self, size: int, modulo: int, label: str, host: Array | None) -> Allocation:
        """Reserves ``size`` bytes at an address that is ``modulo`` mod 256."""
        start = -(-self.next // 256) * 256 + modulo
        self.next = start + size + GUARD_BYTES
        allocation = Allocation(start, size, label, host)
        self.allocations.append(allocation)
        return allocation

    def fixed(self, start: int, size: int, label: str, data: bytes) -> None:
        """Adds a module variable at a fixed address."""
        self.allocations.append(Allocation(start, size, label, None))
        self.preset.append((start, data))

    def commit(self) -> None:
        """Creates the memory and copies the bytes of the host arrays into it."""
        if not self.allocations:
            self.allocate(0, 0, "an empty buffer", None)
        self.flat = FlatMemory(self.next - self.base, sparse=True)  # gaps are never accessed
        self.allocations.sort(key=lambda a: a.start)
        self.starts = np.array([a.start for a in self.allocations], np.int64)
        self.ends = np.array([a.start + a.size for a in self.allocations], np.int64)
        for start, data in self.preset:
            self.span(start, len(data))[:] = np.frombuffer(data, np.uint8)
        for a in self.allocations:
            if a.host is not None:
                self.span(a.start, a.size)[:] = a.host

    def span(self, start: int, size: int) -> Array:
        return self.flat.bytes[start - self.base : start - self.base + size]

    def copy_back(self) -> None:
        """Copies modified allocations back to the host arrays."""
        for a in self.allocations:
            if a.host is not None and a.dirty:
                a.host[:] = self.span(a.start, a.size)

    def find(self, address: int) -> int:
        """Index of the allocation at or before an address, -1 if there is none."""
        return int(np.searchsorted(self.starts, address, "right")) - 1

    def describe(self, address: int) -> str:
        """Describes an address relative to the nearest allocation."""
        index = self.find(address)
        candidates = [self.allocations[i] for i in (index, index + 1) if 0 <= i < len(self.starts)]

        def distance(a: Allocation) -> int:
            return min(abs(address - a.start), abs(address - a.start - a.size))

        a = min(candidates, key=distance)
        if distance(a) > GUARD_BYTES:
            return f"address {address:#x}, near none of the buffers"
        if address < a.start:
            return f"{a.start - address:,} bytes before the start of {a.label} ({a.size:,} bytes)"
        return f"offset {address - a.start:,} of {a.label} ({a.size:,} bytes)"
