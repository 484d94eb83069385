"""Matrix products of mma.sync, and ldmatrix, stmatrix and movmatrix.

All fragment layouts of mma.sync m16n8kX have the same structure: four lanes (t) hold one 16-byte
chunk of consecutive k of one row, and eight groups of lanes (g) hold eight rows. A fragment
register, viewed in elements of 16 bytes, therefore has shape (n, 8). Copying such elements builds
whole operand matrices, and chains of instructions become one batched GEMM. Accumulators hold
columns 2t and 2t + 1; if the columns of the product are ordered as (tile, parity, t), they form
16-byte chunks as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashgen.shared.errors import EmulatorError
from ptx_emulator.checks.bounds import check_window
from ptx_emulator.isa.definedness import ALL
from ptx_emulator.isa.floats import fma64
from ptx_emulator.isa.generator import Generator, fragment_items, instruction
from ptx_emulator.isa.memory import shared_address
from ptx_emulator.isa.pending_products import Form, PendingProduct, tuple_of
from ptx_emulator.isa.tensor_core_sums import Kinds, SumModel, model_for, scratch, sum_products
from ptx_emulator.ptx.instructions import Width
from ptx_emulator.ptx.register_types import DTYPE
from ptx_emulator.ptx.syntax import Instruction, Operand, Reg, Sink
from ptx_emulator.state.cohort import Cohort, spread
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Execution, Wave

Tiles = tuple[int, int, int]
"""M tiles of 16 rows, n tiles of 8 columns, and chunks of 16 bytes along k."""
CHUNK = np.dtype("c16")
CACHE_BYTES = 1 << 18


def register_chunks(register: Any, n: int) -> Array:
    """A fragment register as 16-byte chunks (n, 8)."""
    if register.ndim != 2 or register.shape != (n, 32) or register.strides[1] != 4:
        register = np.ascontiguousarray(np.broadcast_to(register, (n, 32)))
    return register.view(CHUNK)  # type: ignore[no-any-return]


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


def multiply(
    model: SumModel | None, kinds: Kinds, x: Array, y: Array, start: Array | None, out: Array
) -> None:
    """x y + start of float32 by a model (`sum_products`); without one x y alone, rounded once.

    The product that is rounded once is summed in float64. Sums in float32 would depend on the
    summation order of the host's BLAS, which on some CPUs depends on the shapes: the bits of a
    result would depend on the other rows and columns.
    """
    with np.errstate(all="ignore"):
        if model is None:
            out[...] = np.matmul(x.astype(np.float64), y.astype(np.float64))
        else:
            out[...] = sum_products(model, kinds, x, y, start)


def accumulator_chunks(registers: Any, n: int, m_tiles: int, n_tiles: int) -> Array | None:
    """Accumulators of float32 as a matrix per warp (n, 16 m_tiles, 8 n_tiles); None for zeros.

    The columns of eight are ordered 0 2 4 6 1 3 5 7.

    Args:
        registers: ordered by (m tile, n tile, row half, parity of the column).
    """
    if all(register.ndim == 0 and register == 0 for register in registers):
        return None
    out = scratch("c", (n, m_tiles, 2, 8, n_tiles, 2), CHUNK)
    indices = np.ndindex(m_tiles, n_tiles, 2, 2)
    for register, (m, tile, half, parity) in zip(registers, indices, strict=True):
        out[:, m, half, :, tile, parity] = register_chunks(register, n)
    return out.reshape(n, 16 * m_tiles, 2 * n_tiles).view(np.float32)


def multiply_matrices(
    n: int, kinds: Kinds, tiles: Tiles, a: Any, b: Any, model: SumModel | None, c: Any
) -> Array:
    """Products of fragments of ``n`` warps, float32, as registers (m, n_tile, 4, n, 32).

    Args:
        a: registers ordered by (m tile, k chunk, row half).
        b: registers ordered by (n tile, k chunk).
        model: how C is added; None: it is not, and the products are rounded once.
        c: registers of float32 ordered by (m tile, n tile, register), read if there is a model.
    """
    m_tiles, n_tiles, depth = tiles
    left = scratch("a", (n, m_tiles, 2, 8, depth), CHUNK)
    for register, (m, k, half) in zip(a, np.ndindex(m_tiles, depth, 2), strict=True):
        left[:, m, half, :, k] = register_chunks(register, n)
    right = scratch("b", (n, n_tiles, 8, depth), CHUNK)
    for register, (tile, k) in zip(b, np.ndindex(n_tiles, depth), strict=True):
        right[:, tile, :, k] = register_chunks(register, n)
    start = accumulator_chunks(c, n, m_tiles, n_tiles) if model else None
    rows = left.reshape(n, 16 * m_tiles, depth).view(ELEMENTS[kinds[0]])
    columns = right.view(ELEMENTS[kinds[1]]).reshape(n, n_tiles, 4, 2, -1).transpose(0, 4, 1, 3, 2)
    product = scratch("d", (n, 16 * m_tiles, 8 * n_tiles), np.dtype("f4"))
    # A few warps at a time, so that their operands fit into the cache.
    step = max(1, CACHE_BYTES // (right[0].nbytes + left[0].nbytes))
    for low in range(0, n, step):
        now = slice(low, low + step)
        x = to_single(rows[now], kinds[0])
        # BLAS is twice as fast without a transposed B: transpose while the elements are narrow.
        narrow = np.ascontiguousarray(columns[now])
        y = to_single(narrow.reshape(len(x), -1, 8 * n_tiles), kinds[1])
        multiply(model, kinds, x, y, None if start is None else start[now], product[now])
    parts = product.view(CHUNK).reshape(n, m_tiles, 2, 8, n_tiles, 2)
    out = np.ascontiguousarray(parts.transpose(1, 4, 2, 5, 0, 3))
    return out.view(np.float32).reshape(m_tiles, n_tiles, 4, n, 32)


def add_single(product: Array, start: Any) -> list[Array]:
    """Accumulators of float32, a register per slice of ``product``; ``start`` None is zero."""
    out = list(product)
    for index, old in enumerate(start or ()):
        if old.ndim or old != 0:
            out[index] += old
    return out


def split_halves(registers: Any, n: int) -> list[Array]:
    """Accumulators of float16 in pairs as registers of float32, twice as many."""
    out = []
    for register in registers:
        pairs = np.ascontiguousarray(spread(register, n)).view(np.float16).reshape(n, 32, 2)
        out += [pairs[..., 0].astype(np.float32), pairs[..., 1].astype(np.float32)]
    return out


def join_halves(registers: list[Array]) -> list[Array]:
    """Registers of float32 rounded to float16, two to a register."""
    pairs = zip(registers[::2], registers[1::2], strict=True)
    return [np.stack(p, axis=-1).astype(np.float16).view(np.uint32)[..., 0] for p in pairs]


def mma_group(
    machine: Wave,
    cohort: Cohort,
    form: Form,
    tiles: Tiles,
    a: Any,
    b: Any,
    c: Any,
    half: bool = False,
    sparse: bool = False,
) -> list[Array]:
    """D = A B + C for a grid of tiles; ``c`` is ordered by (m, n, register).

    The accumulators are of float32; with ``half`` of float16, two to a register. ``sparse``: half
    of each four elements of A are left out.
    """
    kind_a, kind_b, k = form
    n, start = cohort.n, split_halves(c, cohort.n) if half else c
    model = model_for(machine, "mma", kind_a, k, half, sparse)
    product = multiply_matrices(n, (kind_a, kind_b), tiles, a, b, model, start).reshape(-1, n, 32)
    registers = list(product) if model else add_single(product, start)
    return join_halves(registers) if half else registers


def add_integers(product: Array, start: Any, saturates: bool) -> list[Array]:
    """Accumulators of int32, a register per slice of ``product``; no ``start`` is zero."""
    limits = np.iinfo(np.int32)
    totals = product.astype(np.int64)
    out = []
    for index, total in enumerate(totals):
        total = total + start[index] if len(start) else total
        total = np.clip(total, limits.min, limits.max) if saturates else total
        out.append(total.astype(np.int32))
    return out


# Bits of an element of a product of integers.
INTEGER_BITS = {"s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}


def bytes_of_integers(register: Any, kind: str, signs: bool) -> list[Any]:
    """A register of narrow integers as registers of 8-bit integers.

    That changes the order of the elements along k, in A and B alike. ``signs``: a bit becomes 1 or
    -1, and not 0 or 1.
    """
    bits = INTEGER_BITS[kind]
    if bits == 8:
        return [register]
    words = np.asarray(register)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)
    values = words.astype(np.uint8) & np.uint8((1 << bits) - 1)
    if kind == "s4":
        values = (values ^ np.uint8(8)) - np.uint8(8)
    elif signs:
        values = np.uint8(1) - np.uint8(2) * values
    wide = values.view(np.uint32)
    return [wide[..., index] for index in range(wide.shape[-1])]


def mma_integer(
    cohort: Cohort, kinds: Kinds, a: Any, b: Any, c: Any, saturates: bool, logic: str
) -> list[Array]:
    """One tile of integers: float32 holds the products of one step exactly.

    Args:
        a: registers ordered by (chunk of 16 bytes along k, row half).
        b: registers ordered by chunk.
        c: the accumulators of the rows that are wanted.
        logic: "and" or "xor" of single bits, whose number is the product.
    """
    differ = logic == "xor"
    parts = [bytes_of_integers(register, kinds[0], differ) for register in a]
    halves = zip(parts[::2], parts[1::2], strict=True)
    left = [one for pair in halves for both in zip(*pair, strict=True) for one in both]
    right = [one for register in b for one in bytes_of_integers(register, kinds[1], differ)]
    kind_a, kind_b = ("s8" if kind[0] == "s" or differ else "u8" for kind in kinds)
    tiles = (1, 1, len(right))
    product = multiply_matrices(cohort.n, (kind_a, kind_b), tiles, left, right, None, ())[0, 0]
    sums = product.astype(np.int64)
    if differ:  # bits that are equal count 1, others -1
        sums = (16 * len(right) - sums) >> 1
    return add_integers(sums[: len(c)], c, saturates)


def load_matrix(execution: Execution, address: Any, count: int, transposed: bool) -> Array:
    """ldmatrix: registers (n, count, 32) from rows of 16 bytes at the addresses of the lanes."""
    machine, n = execution.machine, execution.cohort.n
    offsets = _matrix_rows(execution, address, count)
    machine.counters.shared_read_bytes += n * count * 128
    if machine.shared_races:
        machine.shared_races.read(execution._replace(lanes=None), offsets, 16)
    data = machine.shared.view[16].take(offsets >> 4).view(np.uint32).reshape(n, count, 32)
    return _transposed(data) if transposed else data


def store_matrix(execution: Execution, address: Any, values: Any, transposed: bool) -> None:
    """stmatrix: registers of 8 x 8 matrices to rows of 16 bytes at the addresses of the lanes."""
    machine, n, count = execution.machine, execution.cohort.n, len(values)
    offsets = _matrix_rows(execution, address, count)
    machine.counters.shared_write_bytes += n * count * 128
    if machine.shared_races:
        machine.shared_races.write(execution._replace(lanes=None), offsets, 16)
    data = np.stack([spread(value, n) for value in values], axis=1)
    if transposed:
        data = _transposed(data)
    machine.shared.view[16][offsets >> 4] = data.reshape(n, -1).view(CHUNK)


def _matrix_rows(execution: Execution, address: Any, count: int) -> Array:
    """Where in the wave's shared memory the rows of ``count`` matrices lie, in bytes (n, rows)."""
    machine = execution.machine
    rows = execution.spread(address)[:, : 8 * count]
    if execution.lanes is not None:
        rows = np.where(execution.active[:, : 8 * count], rows, 0)
    both = int(np.bitwise_or.reduce(rows, axis=None))
    if not 0 <= both <= machine.shared_size - 16 or both & 15:
        padded = np.zeros((len(rows), 32), np.int64)
        padded[:, : rows.shape[1]] = rows
        check_window(execution._replace(lanes=None), padded, 16, machine.shared_size, "shared")
    if machine.recorder is not None:
        machine.recorder.matrices(rows, execution.pc)
    return rows + machine.shared_base(execution.cohort)


def _transposed(matrices: Array) -> Array:
    """The transposes of 8 x 8 matrices of 16-bit elements, each held by a warp: (..., 32)."""
    tiles = matrices.view(np.uint16).reshape(*matrices.shape[:-1], 8, 8).swapaxes(-1, -2)
    return np.ascontiguousarray(tiles).view(np.uint32).reshape(matrices.shape)


def move_matrix(value: Any, n: int) -> Array:
    """movmatrix: the transpose of a matrix."""
    return _transposed(np.ascontiguousarray(spread(value, n)))


# ---- sparse matrices
#
# Of each four units of a row of A, two are stored: elements of 8 or 16 bits, pairs of 4 bits, or
# halves of 32 bits. Four bits of metadata hold their places, two bits each. Those of 16 units of 16
# bits are half a register, the lower for the first eight rows and the upper for the others; of 32
# units of 8 bits a register. The selector says which lanes of four hold them.


def selectors(depth: int, unit: int) -> int:
    """How many groups of lanes may hold the metadata of ``depth`` chunks of units."""
    return (4 if unit == 2 else 2) * 2 // depth


def places_of_units(words: Array, selector: int, depth: int, unit: int) -> Array:
    """The places 0 to 3 of the stored units (n, 16 rows, units) from metadata (n, 32)."""
    quads = words.reshape(-1, 8, 4)
    parts = depth // 2
    if unit == 2:
        chosen = quads[:, :, parts * selector : parts * (selector + 1)]
        rows = [chosen.astype(np.uint16), (chosen >> np.uint32(16)).astype(np.uint16)]
        bits = 16
    else:
        rows = [quads[:, :, 2 * selector + half :: 2][:, :, :parts] for half in range(2)]
        bits = 32
    both = np.concatenate(rows, axis=1)[..., None]
    return (both >> np.arange(0, bits, 2, dtype=both.dtype) & 3).reshape(len(quads), 16, -1)


def spread_units(stored: Array, places: Array) -> Array:
    """Rows (..., 2 units) with zeros in place of what rows of stored units leave out."""
    dense = np.zeros((*stored.shape[:-1], 2 * stored.shape[-1]), stored.dtype)
    index = 4 * (np.arange(stored.shape[-1]) // 2) + places
    np.put_along_axis(dense, index, stored, axis=-1)
    return dense


def check_places(
    execution: Execution, places: Array, ordered: bool, stored: Callable[[], Array]
) -> None:
    """Checks that each two places (n, 16, units) differ and, where ``ordered``, ascend.

    Zeros may have one place: CUTLASS's compressor leaves the metadata of four zeros at 0.

    Args:
        stored: computes the stored units.
    """
    first, second = places[..., ::2], places[..., 1::2]
    wrong = first > second if ordered else np.zeros_like(first, bool)
    equal = first == second
    if equal.any():
        units = stored().reshape(*first.shape, 2)
        wrong |= equal & (units != 0).any(axis=-1)
    for row in np.flatnonzero(wrong.any(axis=(1, 2)) & execution.active.any(axis=1))[:1]:
        what = "the metadata of a sparse matrix names places that are not two of four in order"
        pair = np.argwhere(wrong[row])[0]
        numbers = f"row {pair[0]} of A, pair {pair[1]}: places {first[row][tuple(pair)]} and "
        numbers += f"{second[row][tuple(pair)]}"
        way_out = "store the lower place first, in the lower two bits"
        execution.machine.fail(EmulatorError, what, execution.site(int(row)), numbers, way_out)


def sparse_fragments(
    execution: Execution, stored: Any, metadata: Any, selector: int, unit: int, ordered: bool
) -> list[Array]:
    """The registers of A, by (chunk along k, row half), from those of a sparse A."""
    n, depth = execution.cohort.n, len(stored)
    places = places_of_units(spread(metadata, n), selector, depth, unit)
    words = np.stack([spread(v, n).reshape(n, 8, 4) for v in stored], axis=1)
    rows = words.reshape(n, depth // 2, 2, 8, 4).transpose(0, 2, 3, 1, 4).reshape(n, 16, -1)
    units = np.ascontiguousarray(rows).view(f"u{unit}")
    check_places(execution, places, ordered, lambda: units)
    dense = spread_units(units, places).view(np.uint32)
    parts = dense.reshape(n, 2, 8, depth, 4)
    return [
        np.ascontiguousarray(parts[:, half, :, chunk]).reshape(n, 32)
        for chunk in range(depth)
        for half in range(2)
    ]


_SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
# (shape, operand type) -> 16-byte chunks along k
_DEPTH = {
    (f"m16n8k{16 * depth // size}", kind): depth for kind, size in _SIZE.items() for depth in (1, 2)
}
# The same of sparse products, whose A has half as many
_SPARSE_DEPTH = {
    (f"m16n8k{16 * depth // size}", kind): depth
    for kind, size in _SIZE.items()
    for depth in ((2, 4) if size > 1 else (4,))
}
# Types of the accumulators, by the type of A
SUMS = {
    **dict.fromkeys(("f16", "e4m3", "e5m2"), ("f32", "f16")),
    **dict.fromkeys(("bf16", "tf32"), ("f32",)),
}
_DOUBLE = {"m8n8k4": (1, 1), "m16n8k4": (2, 1), "m16n8k8": (2, 2), "m16n8k16": (2, 4)}


@instruction("mma", unit="tensor", width=Width.WHOLE_WARP)
def emit_multiply(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    g.need("sync", "aligned")
    sparse = mods.take("sp", "sp::ordered_metadata")
    shape = next((m for m in mods.left if m.startswith("m") and "n" in m), "")
    mods.take(shape)
    g.need("row", "col")
    saturates = bool(mods.take("satfinite"))
    if "s32" in mods.left:
        emit_integers(g, ins, shape, saturates, sparse)
        return
    types = list(mods.left)
    if types == 4 * ["f64"]:
        emit_double(g, ins, shape)
        return
    g.refuse_if(len(types) != 4, "block-scaled forms")
    mods.left.clear()
    d_type, a_type, b_type, c_type = types
    depth = (_SPARSE_DEPTH if sparse else _DEPTH).get((shape, a_type))
    if depth is None or _SIZE[a_type] != _SIZE.get(b_type) or d_type != c_type:
        raise g.unknown("this shape with these types")
    a = _left_operand(g, ins, depth, _SIZE[a_type], sparse)
    b = _operands(g, ins.operands[2], depth)
    g.refuse_if(saturates, "saturation of floats")
    g.refuse_if(not go_together(a_type, b_type), "mixed operand types")
    form = (a_type, b_type, 16 * depth // _SIZE[a_type])
    g.refuse_if(d_type not in SUMS[a_type], "this accumulator")
    count = 2 if d_type == "f16" else 4
    to, start = (fragment_items(g, ins.operands[index], count) for index in (0, 3))
    if d_type == "f32" and not sparse:
        _defer(g, form, depth, a, b, to, start)
        return
    dtype = "u4" if d_type == "f16" else "f4"
    c = [g.read(o, dtype) for o in start]
    g.require_defined()
    args = f"{tuple_of(a)}, {tuple_of(b)}, {tuple_of(c)}, {d_type == 'f16'}, {bool(sparse)}"
    out = g.let(f"mma_group(E, C, {form}, {(1, 1, depth)}, {args})")
    g.write_items(to, out + "[{}]", dtype)


def _left_operand(
    g: Generator, ins: Instruction, depth: int, size: int, sparse: str, halves: int = 2
) -> list[str]:
    """The registers of A; those of a sparse matrix with the zeros that it leaves out."""
    if not sparse:
        return _operands(g, ins.operands[1], halves * depth)
    g.refuse_if(len(ins.operands) != 6, "this number of operands")
    stored, metadata = _operands(g, ins.operands[1], depth), g.read(ins.operands[4], "u4")
    unit, selector = min(size, 2), g.immediate(ins.operands[5], "a selector")
    g.refuse_if(not 0 <= selector < selectors(depth, unit), "this selector")
    arguments = f"{tuple_of(stored)}, {metadata}, {selector}, {unit}, {'ordered' in sparse}"
    dense = g.let(f"sparse_fragments({g.execution()}, {arguments})")
    return [f"{dense}[{index}]" for index in range(2 * depth)]


def emit_integers(g: Generator, ins: Instruction, shape: str, saturates: bool, sparse: str) -> None:
    """mma.sync with integers of 8, 4 or 1 bits."""
    mods = g.mods
    logic = mods.take("xor", "and")
    if logic:
        g.need("popc")
    types, mods.left = mods.left, []
    kinds = tuple(types[1:3])
    bits = {INTEGER_BITS.get(kind) for kind in kinds}
    single = kinds == ("b1", "b1")
    if types[:1] + types[3:] != ["s32", "s32"] or len(bits) != 1 or bool(logic) != single:
        raise g.unknown("these types")
    # Halves of 16 rows, and chunks of 16 bytes along k
    width = 128 // (bits.pop() or 0)
    sizes = ((2, 2), (2, 4)) if sparse else ((2, 1), (2, 2), (1, 1))
    shapes = {f"m{8 * h}n8k{d * width}": (h, d) for h, d in sizes}
    g.refuse_if(shape not in shapes or (bool(sparse) and single), "this shape with these types")
    g.refuse_if(saturates and single, "saturation of this product")
    halves, depth = shapes[shape]
    a = _left_operand(g, ins, depth, 1, sparse, halves)
    b = _operands(g, ins.operands[2], depth)
    a += [g.literal(0, "u4")] * (2 - halves)
    to, start = (fragment_items(g, ins.operands[index], 2 * halves) for index in (0, 3))
    c = [g.read(o, "i4") for o in start]
    g.require_defined()
    args = f"{kinds}, {tuple_of(a)}, {tuple_of(b)}, {tuple_of(c)}"
    g.write_items(to, g.let(f"mma_integer(C, {args}, {saturates}, {logic!r})") + "[{}]", "i4")


def go_together(a_type: str, b_type: str) -> bool:
    """Whether A and B may have these types: only 8-bit floats mix."""
    return a_type == b_type or {a_type, b_type} == {"e4m3", "e5m2"}


def _operands(g: Generator, operand: Operand, count: int) -> list[str]:
    return [local_of(g, g.read(o, "u4")) for o in fragment_items(g, operand, count)]


def fragment(g: Generator, operand: Operand, count: int, dtype: str) -> str:
    """The registers of a fragment, as a tuple."""
    return tuple_of([local_of(g, g.read(o, dtype)) for o in fragment_items(g, operand, count)])


def local_of(g: Generator, expression: str) -> str:
    return expression if expression.isidentifier() else g.let(expression)


def _defer(
    g: Generator,
    form: Form,
    depth: int,
    a: list[str],
    b: list[str],
    to: tuple[Operand, ...],
    start: tuple[Operand, ...],
) -> None:
    c = []
    for operand in start:
        pending = g.names.get(operand.index) if isinstance(operand, Reg) else None
        if pending in g.products.names and isinstance(operand, Reg):
            g.note_definedness(operand.index)
            c.append(str(pending))
        else:
            c.append(local_of(g, g.read(operand, "f4")))
    g.require_defined()
    # Reading c may have flushed the pending products; names read before that remain valid.
    d = tuple(g.fresh() for _ in to)
    g.products.add(PendingProduct(form, depth, tuple(a), tuple(b), tuple(c), d))
    later = []
    for operand, name in zip(to, d, strict=True):
        if isinstance(operand, Sink):
            continue
        if not isinstance(operand, Reg):
            raise g.unknown("a result that is not a register")
        if g.program.dtype[operand.index] == "f4":
            g.names[operand.index] = name
            if g.check and operand.index in g.program.tracked:
                g.set_definedness(operand.index, g.literal(ALL, "u8"))
        else:
            later.append((operand, name))
    if later:
        g.flush(-1)
        for operand, name in later:
            g.write(operand, name, "f4")


def _matrices(g: Generator) -> tuple[int, bool]:
    """The number of 8 x 8 matrices of ldmatrix or stmatrix, and whether they are transposed."""
    g.need("sync", "aligned", "m8n8", "b16")
    count = int(g.one_of("x1", "x2", "x4")[1])
    return count, bool(g.mods.take("trans"))


@instruction("ldmatrix", unit="memory", width=Width.WHOLE_WARP, accesses=lambda ins: (16, 16))
def emit_load_matrix(g: Generator, ins: Instruction) -> None:
    count, transposed = _matrices(g)
    items = fragment_items(g, ins.operands[0], count)
    address_text = shared_address(g, ins.operands[1])
    value = g.let(f"load_matrix({g.checked_execution()}, {address_text}, {count}, {transposed})")
    g.write_items(items, value + "[:, {}]", "u4")


@instruction(
    "stmatrix", unit="memory", result=False, width=Width.WHOLE_WARP, accesses=lambda ins: (16, 16)
)
def emit_store_matrix(g: Generator, ins: Instruction) -> None:
    count, transposed = _matrices(g)
    items = fragment_items(g, ins.operands[1], count)
    address_text = shared_address(g, ins.operands[0])
    values = [local_of(g, g.read(item, "u4")) for item in items]
    arguments = f"{address_text}, {tuple_of(values)}, {transposed}"
    g.emit(f"store_matrix({g.checked_execution()}, {arguments})")


@instruction("movmatrix", unit="exchange", width=Width.WHOLE_WARP)
def emit_move_matrix(g: Generator, ins: Instruction) -> None:
    g.need("sync", "aligned", "m8n8", "trans", "b16")
    g.write(ins.operands[0], f"move_matrix({g.read(ins.operands[1], 'u4')}, C.n)", "u4")


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
        out += [np.ascontiguousarray(parts[..., index]) for index in range(2)]
    return out


def emit_double(g: Generator, ins: Instruction, shape: str) -> None:
    """mma.sync with float64 operands and accumulators."""
    g.mods.left.clear()
    g.refuse_if(shape not in _DOUBLE, "this shape with these types")
    halves, depth = _DOUBLE[shape]
    counts = zip(ins.operands[1:], (halves * depth, depth, 2 * halves), strict=True)
    groups = [fragment(g, operand, count, "f8") for operand, count in counts]
    to = fragment_items(g, ins.operands[0], 2 * halves)
    g.require_defined()
    g.write_items(to, g.let(f"mma_double(C, {halves}, {', '.join(groups)})") + "[{}]", "f8")
