"""Emitters of mma, ldmatrix, stmatrix and movmatrix.

mma.sync with float32 accumulators is deferred, see `pending_products`.
"""

from __future__ import annotations

from flashgen.emulator.isa.emitters.memory import address, space_of
from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.pending_products import PendingProduct, tuple_of
from flashgen.emulator.isa.registry import emits, items_of
from flashgen.emulator.isa.semantics import mma as tensor  # noqa: F401  (registers the run-time functions)
from flashgen.emulator.ptx.syntax import Instruction, Operand, Reg

# (shape, operand type) -> 16-byte chunks along k
_DEPTH = {
    ("m16n8k16", "f16"): 2,
    ("m16n8k8", "f16"): 1,
    ("m16n8k16", "bf16"): 2,
    ("m16n8k8", "bf16"): 1,
    ("m16n8k8", "tf32"): 2,
    ("m16n8k4", "tf32"): 1,
    ("m16n8k32", "s8"): 2,
    ("m16n8k32", "u8"): 2,
    ("m16n8k16", "s8"): 1,
    ("m16n8k16", "u8"): 1,
}


@emits("mma")
def multiply(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    if not mods.take("sync") or not mods.take("aligned"):
        raise g.unknown("mma without .sync.aligned")
    shape = next((m for m in mods.left if m.startswith("m") and "n" in m), "")
    mods.take(shape)
    if mods.take("row", "col") != "row" or not mods.take("col"):
        raise g.unknown("layouts other than .row.col")
    if g.guard:
        raise g.unknown("a guarded mma")
    types = list(mods.left)
    if len(types) != 4:
        raise g.unknown("sparse, block-scaled or saturating forms")
    mods.left.clear()
    d_type, a_type, b_type, c_type = types
    depth = _DEPTH.get((shape, a_type))
    if depth is None or _DEPTH.get((shape, b_type)) is None or d_type != c_type:
        raise g.unknown("this shape with these types")
    to, a_items, b_items, c_items = (items_of(o) for o in ins.operands)
    a = _operands(g, a_items, 2 * depth)
    b = _operands(g, b_items, depth)
    if a_type in ("s8", "u8"):
        c = [g.read(o, "i4") for o in c_items]
        g.require_defined()
        kinds = repr((a_type, b_type))
        out = g.let(
            f"mma_integer(C, {kinds}, {depth}, {tuple_of(a)}, {tuple_of(b)}, {tuple_of(c)})"
        )
        for place, item in enumerate(to):
            g.write(item, f"{out}[{place}]", "i4")
        return
    if a_type != b_type:
        raise g.unknown("mixed operand types")
    if d_type == "f16":
        if a_type != "f16":
            raise g.unknown("this accumulator")
        c = [g.read(o, "u4") for o in c_items]
        g.require_defined()
        args = f"{tuple_of(a)}, {tuple_of(b)}, {tuple_of(c)}"
        out = g.let(f"mma_half(C, {a_type!r}, {depth}, {args})")
        for place, item in enumerate(to):
            g.write(item, f"{out}[{place}]", "u4")
        return
    if d_type != "f32":
        raise g.unknown("this accumulator")
    _defer(g, a_type, depth, a, b, c_items, to)


def _operands(g: Generator, items: tuple[Operand, ...], count: int) -> list[str]:
    if len(items) != count:
        raise g.unknown("a fragment of this size")
    return [local_of(g, g.read(o, "u4")) for o in items]


def local_of(g: Generator, expression: str) -> str:
    return expression if expression.isidentifier() else g.let(expression)


def _defer(
    g: Generator,
    kind: str,
    depth: int,
    a: list[str],
    b: list[str],
    c_items: tuple[Operand, ...],
    to: tuple[Operand, ...],
) -> None:
    c = []
    for operand in c_items:
        pending = g.names.get(operand.index) if isinstance(operand, Reg) else None
        if pending in g.products.names and isinstance(operand, Reg):
            g.note_definedness(operand.index)
            c.append(str(pending))
        else:
            c.append(local_of(g, g.read(operand, "f4")))
    g.require_defined()
    # Reading c may have flushed the pending products; names read before that remain valid.
    order = [2 * k + half for k in range(depth) for half in range(2)]
    d = tuple(g.fresh() for _ in to)
    g.products.add(PendingProduct(kind, depth, tuple(a[i] for i in order), tuple(b), tuple(c), d))
    later = []
    for operand, name in zip(to, d, strict=True):
        if not isinstance(operand, Reg):
            raise g.unknown("a result that is not a register")
        if g.program.dtype[operand.index] == "f4":
            g.names[operand.index] = name
            if g.check and operand.index in g.program.tracked:
                g.set_definedness(operand.index, g.literal(1, "b1"))
        else:
            later.append((operand, name))
    if later:
        g.flush(-1)
        for operand, name in later:
            g.write(operand, name, "f4")


def _matrices(g: Generator) -> tuple[int, bool]:
    """The number of 8 x 8 matrices of ldmatrix or stmatrix, and whether they are transposed."""
    mods = g.mods
    if not mods.take("sync") or not mods.take("aligned") or not mods.take("m8n8"):
        raise g.unknown("forms other than .sync.aligned.m8n8")
    count = int((mods.take("x1", "x2", "x4") or "x0")[1])
    transposed = bool(mods.take("trans"))
    if space_of(g) != "shared" or not mods.take("b16") or g.guard:
        raise g.unknown("this state space or type, or a guard")
    return count, transposed


@emits("ldmatrix")
def load_matrix(g: Generator, ins: Instruction) -> None:
    count, transposed = _matrices(g)
    items = items_of(ins.operands[0])
    if len(items) != count:
        raise g.unknown("a result of this size")
    where = address(g, ins.operands[1], "shared")
    g.require_defined()
    value = g.let(f"load_matrix(E, C, {where}, {g.lanes()}, {count}, {transposed}, {g.pc})")
    for place, item in enumerate(items):
        g.write(item, f"{value}[:, {place}]", "u4")


@emits("stmatrix")
def store_matrix(g: Generator, ins: Instruction) -> None:
    count, transposed = _matrices(g)
    items = items_of(ins.operands[1])
    if len(items) != count:
        raise g.unknown("a source of this size")
    where = address(g, ins.operands[0], "shared")
    values = [local_of(g, g.read(item, "u4")) for item in items]
    g.require_defined()
    g.emit(f"store_matrix(E, C, {where}, {tuple_of(values)}, {g.lanes()}, {transposed}, {g.pc})")


@emits("movmatrix")
def move_matrix(g: Generator, ins: Instruction) -> None:
    for word in ("sync", "aligned", "m8n8", "trans", "b16"):
        if not g.mods.take(word):
            raise g.unknown()
    g.write(ins.operands[0], f"move_matrix({g.read(ins.operands[1], 'u4')}, C.n)", "u4")
