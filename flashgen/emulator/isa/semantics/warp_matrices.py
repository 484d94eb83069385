"""wmma, and mma.sync of float64: matrices of whole warps whose layout in registers is simple.

PTX leaves the layout of wmma fragments open: a kernel may only load them, multiply them, store them
and apply the same operation to all their elements. Here a matrix of R rows and C columns is
distributed in row-major order: with P = R C / 32 elements per lane, element e lies in lane e / P
and is the lane's element e mod P. Operands of float16 have registers for 16 elements, of which the
first P are used; the others repeat them.

Of mma.sync with float64, lane 4 g + t holds row g (and g + 8) of A and C and column g of B; t
counts along k, four to a register, and pairs of columns of C (PTX ISA, "Matrix Fragments for
mma.m8n8k4" to "mma.m16n8k16" with floating point type .f64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.isa.semantics import memory
from flashgen.emulator.isa.semantics.floats import fma64
from flashgen.emulator.isa.semantics.mma import ELEMENTS, multiply, to_single
from flashgen.emulator.state.cohort import Cohort, spread
from flashgen.emulator.state.wave import Wave

Array = npt.NDArray[Any]
LANES = np.arange(32)


@dataclass(frozen=True)
class FragmentForm:
    """The form of a wmma.load or wmma.store.

    Attributes:
        space: "global", "shared" or "generic".
        rows, columns: of the matrix.
        kind: its element type.
        registers: of the fragment.
        columns_first: the matrix lies in memory by columns.
    """

    space: str
    rows: int
    columns: int
    kind: str
    registers: int
    columns_first: bool

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return int(np.dtype(ELEMENTS[self.kind]).itemsize)

    def places(self, address: Any, stride: Any) -> list[Any]:
        """Addresses of the elements of a lane, one (1, 32) or (n, 32) per element."""
        each = self.rows * self.columns // 32
        found = []
        for number in range(each):
            row, column = np.divmod(LANES * each + number, self.columns)
            offset = column * stride + row if self.columns_first else row * stride + column
            found.append(address + (offset * self.width).reshape(-1, 32))
        return found


def load_fragment(
    machine: Wave, cohort: Cohort, form: FragmentForm, address: Any, stride: Any, pc: int
) -> list[Array]:
    """wmma.load: the registers (n, 32) of a fragment, uint32; uint64 for float64.

    The address and the stride, in elements, are the same in all lanes.
    """
    load = getattr(memory, f"load_{form.space}")
    parts = [load(machine, cohort, at, None, form.width, pc) for at in form.places(address, stride)]
    values = np.stack([spread(part, cohort.n) for part in parts], axis=-1)
    return to_registers(values, form.registers)


def to_registers(values: Array, registers: int) -> list[Array]:
    """Elements (n, 32, P) as registers (n, 32); the elements repeat where there is room."""
    wide = 8 if values.dtype.itemsize == 8 else 4
    room = registers * wide // values.dtype.itemsize
    filled = np.tile(values, room // values.shape[2])
    words = np.ascontiguousarray(filled).view(f"u{wide}")
    return [np.ascontiguousarray(words[..., place]) for place in range(registers)]


def from_registers(registers: Any, n: int, count: int, dtype: str) -> Array:
    """The first ``count`` elements of each lane, (n, 32, count)."""
    words = np.stack([spread(register, n) for register in registers], axis=-1)
    return np.ascontiguousarray(words).view(dtype)[..., :count]


def store_fragment(
    machine: Wave,
    cohort: Cohort,
    form: FragmentForm,
    address: Any,
    stride: Any,
    registers: Any,
    pc: int,
) -> None:
    """wmma.store: the registers of an accumulator to memory; see `load_fragment`."""
    places = form.places(address, stride)
    values = from_registers(registers, cohort.n, len(places), f"u{form.width}")
    store = getattr(memory, f"store_{form.space}")
    for number, at in enumerate(places):
        store(machine, cohort, at, values[..., number], None, form.width, pc)


def wmma_multiply(
    machine: Wave,
    cohort: Cohort,
    shape: tuple[int, int, int],
    kinds: tuple[str, str, str, str],
    saturates: bool,
    a: Any,
    b: Any,
    c: Any,
) -> list[Array]:
    """wmma.mma: the registers of D = A B + C.

    Args:
        shape: M, N and K.
        kinds: the element types of A, B, C and D.
        saturates: integer sums stop at the limits of int32.
    """
    rows, columns, depth = shape
    kind_a, kind_b, kind_c, kind_d = kinds
    n = cohort.n
    x = from_registers(a, n, rows * depth // 32, ELEMENTS[kind_a]).reshape(n, rows, depth)
    y = from_registers(b, n, depth * columns // 32, ELEMENTS[kind_b]).reshape(n, depth, columns)
    each = rows * columns // 32
    start = from_registers(c, n, each, ELEMENTS[kind_c]).reshape(n, rows, columns)
    if kind_a == "f64":
        total = start
        for k in range(depth):
            total = fma64(x[:, :, k, None], y[:, None, k], total)
        return to_registers(total.reshape(n, 32, each), len(c))
    product = np.empty((n, rows, columns), np.float32)
    half, integers = kind_d == "f16", kind_d == "s32"
    sums = None if integers else machine.sums
    model = sums.of("mma", kind_a, depth, half=half) if sums else None
    added = None if model is None else to_single(start, kind_c).reshape(start.shape)
    multiply(model, (kind_a, kind_b), to_single(x, kind_a), to_single(y, kind_b), added, product)
    if integers:
        # float32 holds the products of one step exactly.
        exact = product.astype(np.int64) + start
        limits = np.iinfo(np.int32)
        exact = np.clip(exact, limits.min, limits.max) if saturates else exact
        result: Array = exact.astype(np.int32)
    else:
        result = product if model else product + to_single(start, kind_c).reshape(start.shape)
        if half:
            result = result.astype(np.float16)
    return to_registers(result.reshape(n, 32, each), each * result.dtype.itemsize // 4)


def mma_double(cohort: Cohort, halves: int, a: Any, b: Any, c: Any) -> list[Array]:
    """mma.sync of float64 with 8 ``halves`` rows: one fused multiply-add after the other along k.

    Args:
        a: registers ordered by (four steps of k, half of the rows).
        b: registers ordered by four steps of k.
        c: registers ordered by (half of the rows, column of a pair).
    """
    n = cohort.n
    left = [spread(v, n).reshape(n, 8, 4) for v in a]
    right = [spread(v, n).reshape(n, 8, 4) for v in b]
    out = []
    for half in range(halves):
        pair = [spread(v, n).reshape(n, 8, 4) for v in c[2 * half : 2 * half + 2]]
        total = np.stack(pair, axis=-1).reshape(n, 8, 8)
        for step, y in enumerate(right):
            x = left[step * halves + half]
            for t in range(4):
                total = fma64(x[:, :, t, None], y[:, None, :, t], total)
        parts = total.reshape(n, 32, 2)
        out += [np.ascontiguousarray(parts[..., place]) for place in range(2)]
    return out
