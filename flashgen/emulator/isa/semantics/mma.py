"""Matrix products of mma.sync, and ldmatrix, stmatrix and movmatrix.

All fragment layouts of mma.sync m16n8kX have the same structure: four lanes (t) hold one 16-byte
chunk of consecutive k of one row, and eight groups of lanes (g) hold eight rows. A fragment
register, viewed in elements of 16 bytes, therefore has shape (n, 8). Copying such elements builds
whole operand matrices, and chains of instructions become one batched GEMM. Accumulators hold
columns 2t and 2t + 1; if the columns of the product are ordered as (tile, parity, t), they form
16-byte chunks as well.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.checks.bounds import check_window
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.state.cohort import Cohort, spread
from flashgen.emulator.state.wave import Wave

Array = npt.NDArray[Any]
CHUNK = np.dtype("c16")
CACHE_BYTES = 1 << 18


def register_chunks(register: Any, n: int) -> Array:
    """A fragment register as 16-byte chunks (n, 8)."""
    if register.ndim != 2 or register.shape != (n, 32) or register.strides[1] != 4:
        register = np.ascontiguousarray(np.broadcast_to(register, (n, 32)))
    return register.view(CHUNK)  # type: ignore[no-any-return]


# Buffers by role that are reused by all calls of a thread, because mapping new pages is slow.
_SCRATCH = threading.local()


def scratch(role: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised array that is valid until the next call with the same role."""
    size = math.prod(shape) * dtype.itemsize
    buffers = vars(_SCRATCH)
    if role not in buffers or len(buffers[role]) < size:
        buffers[role] = np.empty(size, np.uint8)
    found: Array = buffers[role][:size].view(dtype).reshape(shape)
    return found


def half_to_single(bits: Array) -> Array:
    """float16 bits to float32 by shifts, four times faster than numpy's conversion."""
    magnitude = bits << np.uint16(1)
    if magnitude.size and int(magnitude.max()) >= 0xF800:
        return bits.view(np.float16).astype(np.float32)
    wide = bits.view(np.int16).astype(np.int32)
    wide <<= 13
    wide &= np.int32(-0x70000001)
    value: Array = wide.view(np.float32)
    value *= np.float32(2.0**112)
    return value


# Elements of operands as they lie in memory: floats as bits.
ELEMENTS = {**DTYPE, "f16": "u2", "tf32": "u4", "e4m3": "u1", "e5m2": "u1"}


def _small_floats() -> dict[str, Array]:
    """The 256 values of each 8-bit float. e4m3 has no infinities; e5m2 is the top of float16."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10.0), fraction * 2.0**-9)
    size[(bits & 127) == 127] = np.nan
    e4m3 = np.where(bits < 128, size, -size).astype(np.float32)
    e5m2 = (bits << 8).astype(np.uint16).view(np.float16).astype(np.float32)
    return {"e4m3": e4m3, "e5m2": e5m2}


SMALL_FLOATS = _small_floats()


def to_single(elements: Array, kind: str) -> Array:
    """Operand elements (see ELEMENTS) as float32."""
    if kind == "f16":
        return half_to_single(elements)
    if kind == "bf16":
        wide = elements.astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    if kind == "tf32":
        # The hardware uses the upper 19 bits.
        return (elements & np.uint32(0xFFFFE000)).view(np.float32)
    if kind in SMALL_FLOATS:
        return SMALL_FLOATS[kind].take(elements)
    return elements.astype(np.float32)


def multiply_rounding_once(x: Array, y: Array, out: Array) -> None:
    """x y of float32, summed in float64 and rounded once.

    Sums in float32 would depend on the summation order of the host's BLAS, which on some CPUs
    depends on the shapes: the bits of a result would depend on the other rows and columns.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = np.matmul(x.astype(np.float64), y.astype(np.float64))


def multiply_matrices(
    cohort: Cohort, kind_a: str, kind_b: str, tiles: tuple[int, int, int], a: Any, b: Any
) -> Array:
    """Products of fragments, float32, as registers (m, n_tile, 4, rows, 32).

    Args:
        tiles: m tiles of 16 rows, n tiles of 8 columns, k chunks of 16 bytes.
        a: registers ordered by (m tile, k chunk, row half).
        b: registers ordered by (n tile, k chunk).
    """
    n = cohort.n
    m_tiles, n_tiles, depth = tiles
    left = scratch("a", (n, m_tiles, 2, 8, depth), CHUNK)
    for register, (m, k, half) in zip(a, np.ndindex(m_tiles, depth, 2), strict=True):
        left[:, m, half, :, k] = register_chunks(register, n)
    right = scratch("b", (n, n_tiles, 8, depth), CHUNK)
    for register, (tile, k) in zip(b, np.ndindex(n_tiles, depth), strict=True):
        right[:, tile, :, k] = register_chunks(register, n)
    rows = left.reshape(n, 16 * m_tiles, depth).view(ELEMENTS[kind_a])
    columns = right.view(ELEMENTS[kind_b]).reshape(n, n_tiles, 4, 2, -1).transpose(0, 4, 1, 3, 2)
    product = scratch("d", (n, 16 * m_tiles, 8 * n_tiles), np.dtype("f4"))
    # A few warps at a time, so that their operands fit into the cache.
    step = max(1, CACHE_BYTES // (right[0].nbytes + left[0].nbytes))
    for low in range(0, n, step):
        now = slice(low, low + step)
        x = to_single(rows[now], kind_a)
        # BLAS is twice as fast without a transposed B: transpose while the elements are narrow.
        narrow = np.ascontiguousarray(columns[now])
        y = to_single(narrow.reshape(len(x), -1, 8 * n_tiles), kind_b)
        multiply_rounding_once(x, y, product[now])
    parts = product.view(CHUNK).reshape(n, m_tiles, 2, 8, n_tiles, 2)
    out = np.ascontiguousarray(parts.transpose(1, 4, 2, 5, 0, 3))
    return out.view(np.float32).reshape(m_tiles, n_tiles, 4, n, 32)


def add_single(product: Array, start: Any) -> list[Array]:
    """Accumulators of float32, a register per slice of ``product``; ``start`` None is zero."""
    out = list(product)
    for place, old in enumerate(start or ()):
        if old.ndim or old != 0:
            out[place] += old
    return out


def add_half(product: Array, start: Any) -> list[Array]:
    """Accumulators of float16 in pairs, half as many registers; ``start`` None is zero."""
    pairs = product.reshape(-1, 2, 2, *product.shape[1:])  # columns of 8, row half, parity
    out = []
    for number in range(2 * len(pairs)):
        pair = np.stack(list(pairs[number // 2, number % 2]), axis=-1)
        if start is not None:
            old = np.ascontiguousarray(np.broadcast_to(start[number], pair.shape[:2]))
            pair += old.view(np.float16).reshape(pair.shape).astype(np.float32)
        out.append(pair.astype(np.float16).view(np.uint32)[..., 0])
    return out


def mma_group(
    cohort: Cohort, kind: str, tiles: tuple[int, int, int], a: Any, b: Any, c: Any
) -> list[Array]:
    """D = A B + C in float32 for a grid of tiles; ``c`` is ordered by (m, n, register)."""
    product = multiply_matrices(cohort, kind, kind, tiles, a, b)
    return add_single(product.reshape(-1, cohort.n, 32), c)


def mma_half(
    cohort: Cohort, kinds: tuple[str, str], depth: int, a: Any, b: Any, c: Any
) -> list[Array]:
    """One tile with a float16 accumulator: two registers of two halves each."""
    return add_half(multiply_matrices(cohort, *kinds, (1, 1, depth), a, b)[0, 0], c)


def mma_integer(cohort: Cohort, kinds: tuple[str, str], depth: int, a: Any, b: Any, c: Any) -> Any:
    """One tile of 8-bit integers: float32 holds the products of one step exactly."""
    product = multiply_matrices(cohort, *kinds, (1, 1, depth), a, b)[0, 0]
    return [product[i].astype(np.int32) + c[i] for i in range(4)]


def load_matrix(
    machine: Wave, cohort: Cohort, address: Any, lanes: Any, count: int, transposed: bool, pc: int
) -> Array:
    """ldmatrix: registers (n, count, 32) from rows of 16 bytes at the addresses of the lanes."""
    where = _matrix_rows(machine, cohort, address, lanes, count, pc)
    machine.counters.shared_read_bytes += cohort.n * count * 128
    if machine.shared_races:
        machine.shared_races.read(cohort, where, 16, pc, None)
    data = machine.shared.view[16].take(where >> 4).view(np.uint32).reshape(cohort.n, count, 32)
    return _transposed(data) if transposed else data


def store_matrix(
    machine: Wave, cohort: Cohort, address: Any, values: Any, lanes: Any, transposed: bool, pc: int
) -> None:
    """stmatrix: registers of 8 x 8 matrices to rows of 16 bytes at the addresses of the lanes."""
    n, count = cohort.n, len(values)
    where = _matrix_rows(machine, cohort, address, lanes, count, pc)
    machine.counters.shared_write_bytes += n * count * 128
    if machine.shared_races:
        machine.shared_races.write(cohort, where, 16, pc, None)
    data = np.stack([spread(value, n) for value in values], axis=1)
    if transposed:
        data = _transposed(data)
    machine.shared.view[16][where >> 4] = data.reshape(n, -1).view(CHUNK)


def _matrix_rows(
    machine: Wave, cohort: Cohort, address: Any, lanes: Any, count: int, pc: int
) -> Array:
    """Where in the wave's shared memory the rows of ``count`` matrices lie, in bytes (n, rows)."""
    n = cohort.n
    rows = spread(address, n)[:, : 8 * count]
    if lanes is not None:
        rows = np.where(spread(lanes, n)[:, : 8 * count], rows, 0)
    both = int(np.bitwise_or.reduce(rows, axis=None))
    if not 0 <= both <= machine.shared_size - 16 or both & 15:
        padded = np.zeros((n, 32), np.int64)
        padded[:, : rows.shape[1]] = rows
        check_window(machine, cohort, padded, None, 16, pc, machine.shared_size, "shared")
    if machine.recorder is not None:
        machine.recorder.matrices(rows, pc)
    return rows + machine.shared_base(cohort)


def _transposed(matrices: Array) -> Array:
    """The transposes of 8 x 8 matrices of 16-bit elements, each held by a warp: (..., 32)."""
    tiles = matrices.view(np.uint16).reshape(*matrices.shape[:-1], 8, 8).swapaxes(-1, -2)
    return np.ascontiguousarray(tiles).view(np.uint32).reshape(matrices.shape)


def move_matrix(value: Any, n: int) -> Array:
    """movmatrix: the transpose of a matrix."""
    return _transposed(np.ascontiguousarray(spread(value, n)))
