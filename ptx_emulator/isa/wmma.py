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

from typing import Any, NamedTuple

import numpy as np

from ptx_emulator.isa import memory
from ptx_emulator.isa.floats import fma64
from ptx_emulator.isa.generator import Generator, fragment_items, instruction
from ptx_emulator.isa.memory import FUNCTION, address, implied_space, space_of
from ptx_emulator.isa.mma import ELEMENTS, fragment, multiply, to_single
from ptx_emulator.isa.tensor_core_sums import model_for
from ptx_emulator.ptx.instructions import Width
from ptx_emulator.ptx.syntax import TYPE_BYTES, Instruction, Operand
from ptx_emulator.state.cohort import LANES, spread
from ptx_emulator.state.memory import Array
from ptx_emulator.state.wave import Execution

Shape = tuple[int, int, int]
"""M, N and K."""


class FragmentForm(NamedTuple):
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

    def addresses(self, address: Any, stride: Any) -> list[Any]:
        """Addresses of the elements of a lane, one (1, 32) or (n, 32) per element."""
        elements = self.rows * self.columns // 32
        addresses = []
        for number in range(elements):
            row, column = np.divmod(LANES * elements + number, self.columns)
            offset = column * stride + row if self.columns_first else row * stride + column
            addresses.append(address + (offset * self.width).reshape(-1, 32))
        return addresses


def load_fragment(
    execution: Execution, form: FragmentForm, address: Any, stride: Any
) -> list[Array]:
    """wmma.load: the registers (n, 32) of a fragment, uint32; uint64 for float64.

    The address and the stride, in elements, are the same in all lanes.
    """
    load = getattr(memory, f"load_{form.space}")
    parts = [
        execution.spread(load(execution, element_address, form.width))
        for element_address in form.addresses(address, stride)
    ]
    return to_registers(np.stack(parts, axis=-1), form.registers)


def to_registers(values: Array, registers: int) -> list[Array]:
    """Elements (n, 32, P) as registers (n, 32); the elements repeat where there is room."""
    wide = 8 if values.dtype.itemsize == 8 else 4
    room = registers * wide // values.dtype.itemsize
    filled = np.tile(values, room // values.shape[2])
    words = np.ascontiguousarray(filled).view(f"u{wide}")
    return [np.ascontiguousarray(words[..., index]) for index in range(registers)]


def from_registers(registers: Any, n: int, count: int, dtype: str) -> Array:
    """The first ``count`` elements of each lane, (n, 32, count)."""
    words = np.stack([spread(register, n) for register in registers], axis=-1)
    return np.ascontiguousarray(words).view(dtype)[..., :count]


def store_fragment(
    execution: Execution, form: FragmentForm, address: Any, stride: Any, registers: Any
) -> None:
    """wmma.store: the registers of an accumulator to memory; see `load_fragment`."""
    addresses = form.addresses(address, stride)
    values = from_registers(registers, execution.cohort.n, len(addresses), f"u{form.width}")
    store = getattr(memory, f"store_{form.space}")
    for number, element_address in enumerate(addresses):
        store(execution, element_address, values[..., number], form.width)


def wmma_multiply(
    execution: Execution,
    shape: Shape,
    kinds: tuple[str, ...],
    saturates: bool,
    a: Any,
    b: Any,
    c: Any,
) -> list[Array]:
    """wmma.mma: the registers of D = A B + C.

    Args:
        kinds: the element types of A, B, C and D.
        saturates: integer sums stop at the limits of int32.
    """
    rows, columns, depth = shape
    kind_a, kind_b, kind_c, kind_d = kinds
    n = execution.cohort.n
    x = from_registers(a, n, rows * depth // 32, ELEMENTS[kind_a]).reshape(n, rows, depth)
    y = from_registers(b, n, depth * columns // 32, ELEMENTS[kind_b]).reshape(n, depth, columns)
    elements = rows * columns // 32
    start = from_registers(c, n, elements, ELEMENTS[kind_c]).reshape(n, rows, columns)
    if kind_a == "f64":
        total = start
        for k in range(depth):
            total = fma64(x[:, :, k, None], y[:, None, k], total)
        return to_registers(total.reshape(n, 32, elements), len(c))
    product = np.empty((n, rows, columns), np.float32)
    half, integers = kind_d == "f16", kind_d == "s32"
    model = None if integers else model_for(execution.machine, "mma", kind_a, depth, half=half)
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
    return to_registers(result.reshape(n, 32, elements), elements * result.dtype.itemsize // 4)


# Of each shape: M, N and K; and the element types of A and B.
_NARROW = ("f16", "bf16", "s8", "u8")
_SHAPES = {
    "m16n16k16": ((16, 16, 16), _NARROW),
    "m8n32k16": ((8, 32, 16), _NARROW),
    "m32n8k16": ((32, 8, 16), _NARROW),
    "m16n16k8": ((16, 16, 8), ("tf32",)),
    "m8n8k4": ((8, 8, 4), ("f64",)),
}
_SUMS = {"f16": ("f16", "f32"), "s8": ("s32",), "u8": ("s32",), "f64": ("f64",)}


def _registers(size: tuple[int, int], kind: str, role: str) -> int:
    """Registers of a fragment; float16 operands have registers for 16 elements."""
    if kind == "f16" and role != "c":
        return 8
    return max(1, size[0] * size[1] // 32 * TYPE_BYTES[kind] // (8 if kind == "f64" else 4))


def _dtype(kind: str) -> str:
    """The dtype in which registers of a fragment are read and written."""
    return {"f64": "f8", "f32": "f4", "tf32": "u4", "s32": "i4"}.get(kind, "u4")


def _write(g: Generator, out: str, items: tuple[Operand, ...], kind: str) -> None:
    dtype = _dtype(kind)
    g.write_items(items, out + f"[{{}}].view({dtype})", dtype)


def _element_bytes(ins: Instruction) -> tuple[int, int]:
    size = 16 if "mma" in ins.mods else TYPE_BYTES.get("".join(ins.mods[-1:]), 16)
    return size, size


@instruction(
    "wmma",
    unit=lambda ins: "tensor" if "mma" in ins.mods else "memory",
    result=lambda ins: "store" not in ins.mods,
    width=Width.WHOLE_WARP,
    accesses=_element_bytes,
)
def emit_wmma(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    action = g.one_of("load", "store", "mma")
    role = mods.take("a", "b", "c", "d") if action != "mma" else ""
    g.need("sync", "aligned")
    layouts = [word for word in mods.left if word in ("row", "col")]
    name = mods.take(*_SHAPES)
    g.refuse_if(not name or len(layouts) != (2 if action == "mma" else 1), "this shape")
    for word in layouts:
        mods.take(word)
    if action == "mma":
        _multiply(g, ins, name)
    else:
        _move(g, ins, name, role, layouts[0] == "col")


def _move(g: Generator, ins: Instruction, name: str, role: str, columns_first: bool) -> None:
    """wmma.load and wmma.store."""
    (m, n, k), types = _SHAPES[name]
    size = {"a": (m, k), "b": (k, n)}.get(role, (m, n))
    kind = g.mods.left.pop()
    sums = {word for source in types for word in _SUMS.get(source, ("f32",))}
    g.refuse_if(kind not in (types if role in ("a", "b") else sums), "this shape with this type")
    memory, matrix = ins.operands[:2] if role == "d" else ins.operands[1::-1]
    space = implied_space(g, space_of(g), memory)
    address_text = address(g, memory, space)
    if len(ins.operands) > 2:
        stride = f"{g.read(ins.operands[2], 'u4')}.astype(i8)"
    else:
        stride = str(size[0] if columns_first else size[1])
    registers = _registers(size, kind, "c" if role == "d" else role)
    form = FragmentForm(FUNCTION[space], *size, kind, registers, columns_first)
    arguments = f"{g.object(form)}, {address_text}, {stride}"
    if role == "d":
        values = fragment(g, matrix, registers, _dtype(kind))
        g.emit(f"store_fragment({g.checked_execution()}, {arguments}, {values})")
    else:
        items = fragment_items(g, matrix, registers)
        _write(g, g.let(f"load_fragment({g.checked_execution()}, {arguments})"), items, kind)


def _multiply(g: Generator, ins: Instruction, name: str) -> None:
    """wmma.mma; fragments have one layout, whatever the layouts of A and B in memory were."""
    mods = g.mods
    saturates = bool(mods.take("satfinite"))
    mods.take("rn")
    (m, n, k), types = _SHAPES[name]
    words, mods.left = mods.left, []
    if len(words) == 2:  # float16 operands are not named
        words = [words[0], "f16", "f16", words[1]]
    g.refuse_if(len(words) != 4, "these types")
    d, a, b, c = words
    sums = _SUMS.get(a, ("f32",))
    if a != b or a not in types or d not in sums or c not in sums:
        raise g.unknown("this shape with these types")
    g.refuse_if(saturates and d != "s32", "saturation of floats")
    kinds = (a, b, c, d)
    groups = []
    sizes = zip((a, b, c), ((m, k), (k, n), (m, n)), "abc", strict=True)
    for operand, (kind, size, role) in zip(ins.operands[1:], sizes, strict=True):
        groups.append(fragment(g, operand, _registers(size, kind, role), _dtype(kind)))
    to = fragment_items(g, ins.operands[0], _registers((m, n), d, "c"))
    arguments = f"{(m, n, k)}, {kinds!r}, {saturates}, {', '.join(groups)}"
    _write(g, g.let(f"wmma_multiply({g.checked_execution()}, {arguments})"), to, d)
