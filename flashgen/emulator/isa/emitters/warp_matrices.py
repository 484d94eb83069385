"""Emitters of wmma, and of mma.sync with float64."""

from __future__ import annotations

from flashgen.emulator.isa.emitters.memory import FUNCTION, address, implied_space, space_of
from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.pending_products import tuple_of
from flashgen.emulator.isa.registry import emits, items_of
from flashgen.emulator.isa.semantics.warp_matrices import FragmentForm
from flashgen.emulator.ptx.syntax import Instruction, Operand

# Of each shape: M, N and K; and the element types of A and B.
_NARROW = ("f16", "bf16", "s8", "u8")
_SHAPES = {
    "m16n16k16": ((16, 16, 16), _NARROW),
    "m8n32k16": ((8, 32, 16), _NARROW),
    "m32n8k16": ((32, 8, 16), _NARROW),
    "m16n16k8": ((16, 16, 8), ("tf32",)),
    "m8n8k4": ((8, 8, 4), ("f64",)),
}
_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "f32": 4, "f64": 8, "s8": 1, "u8": 1, "s32": 4}
_SUMS = {"f16": ("f16", "f32"), "s8": ("s32",), "u8": ("s32",), "f64": ("f64",)}
_DOUBLE = {"m8n8k4": (1, 1), "m16n8k4": (2, 1), "m16n8k8": (2, 2), "m16n8k16": (2, 4)}


def _registers(size: tuple[int, int], kind: str, role: str) -> int:
    """Registers of a fragment; those of float16 operands have room for 16 elements."""
    if kind == "f16" and role != "c":
        return 8
    return max(1, size[0] * size[1] // 32 * _BYTES[kind] // (8 if kind == "f64" else 4))


def _dtype(kind: str) -> str:
    """The dtype in which registers of a fragment are read and written."""
    return {"f64": "f8", "f32": "f4", "tf32": "u4", "s32": "i4"}.get(kind, "u4")


def _items(g: Generator, operand: Operand, count: int) -> tuple[Operand, ...]:
    items = items_of(operand)
    if len(items) != count:
        raise g.unknown("a fragment of this size")
    return items


def _write(g: Generator, out: str, items: tuple[Operand, ...], kind: str) -> None:
    dtype = _dtype(kind)
    for place, item in enumerate(items):
        g.write(item, f"{out}[{place}].view({dtype})", dtype)


@emits("wmma")
def wmma(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    action = mods.take("load", "store", "mma")
    role = mods.take("a", "b", "c", "d") if action != "mma" else ""
    if not action or not mods.take("sync") or not mods.take("aligned"):
        raise g.unknown("forms without .sync.aligned")
    layouts = [word for word in mods.left if word in ("row", "col")]
    name = mods.take(*_SHAPES)
    if not name or len(layouts) != (2 if action == "mma" else 1):
        raise g.unknown("this shape")
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
    if kind not in (types if role in ("a", "b") else sums):
        raise g.unknown("this shape with this type")
    memory, fragment = ins.operands[:2] if role == "d" else ins.operands[1::-1]
    space = implied_space(g, space_of(g), memory)
    where = address(g, memory, space)
    if len(ins.operands) > 2:
        stride = f"{g.read(ins.operands[2], 'u4')}.astype(i8)"
    else:
        stride = str(size[0] if columns_first else size[1])
    space = FUNCTION[space]
    if role == "d":
        registers = _registers(size, kind, "c")
        items = _items(g, fragment, registers)
        values = tuple_of([g.let(g.read(item, _dtype(kind))) for item in items])
        g.require_defined()
        form = FragmentForm(space, *size, kind, registers, columns_first)
        name = g.object(form)
        g.emit(f"store_fragment(E, C, {name}, {where}, {stride}, {values}, {g.pc})")
        return
    registers = _registers(size, kind, role)
    items = _items(g, fragment, registers)
    g.require_defined()
    name = g.object(FragmentForm(space, *size, kind, registers, columns_first))
    out = g.let(f"load_fragment(E, C, {name}, {where}, {stride}, {g.pc})")
    _write(g, out, items, kind)


def _multiply(g: Generator, ins: Instruction, name: str) -> None:
    """wmma.mma; of the layouts of A and B nothing is left in the fragments."""
    mods = g.mods
    saturates = bool(mods.take("satfinite"))
    mods.take("rn")
    (m, n, k), types = _SHAPES[name]
    words, mods.left = mods.left, []
    if len(words) == 2:  # float16 operands are not named
        words = [words[0], "f16", "f16", words[1]]
    if len(words) != 4:
        raise g.unknown("these types")
    d, a, b, c = words
    sums = _SUMS.get(a, ("f32",))
    if a != b or a not in types or d not in sums or c not in sums:
        raise g.unknown("this shape with these types")
    if saturates and d != "s32":
        raise g.unknown("saturation of floats")
    kinds = (a, b, c, d)
    groups = []
    for operand, kind, size, role in (
        (ins.operands[1], a, (m, k), "a"),
        (ins.operands[2], b, (k, n), "b"),
        (ins.operands[3], c, (m, n), "c"),
    ):
        items = _items(g, operand, _registers(size, kind, role))
        groups.append(tuple_of([g.let(g.read(item, _dtype(kind))) for item in items]))
    to = _items(g, ins.operands[0], _registers((m, n), d, "c"))
    g.require_defined()
    shape = (m, n, k)
    out = g.let(f"wmma_multiply(E, C, {shape}, {kinds!r}, {saturates}, {', '.join(groups)})")
    _write(g, out, to, d)


def multiply_double(g: Generator, ins: Instruction, shape: str) -> None:
    """mma.sync with float64 operands and accumulators."""
    g.mods.left.clear()
    if shape not in _DOUBLE:
        raise g.unknown("this shape with these types")
    halves, depth = _DOUBLE[shape]
    counts = (halves * depth, depth, 2 * halves)
    groups = [
        tuple_of([g.let(g.read(item, "f8")) for item in _items(g, operand, count)])
        for operand, count in zip(ins.operands[1:], counts, strict=True)
    ]
    to = _items(g, ins.operands[0], 2 * halves)
    g.require_defined()
    out = g.let(f"mma_double(C, {halves}, {', '.join(groups)})")
    for place, item in enumerate(to):
        g.write(item, f"{out}[{place}]", "f8")
