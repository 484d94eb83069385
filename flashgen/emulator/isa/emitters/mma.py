"""Emitters of mma, ldmatrix, stmatrix and movmatrix, and of wgmma and setmaxnreg.

mma.sync with float32 accumulators is deferred, see `pending_products`.
"""

from __future__ import annotations

import re

from flashgen.emulator.isa.emitters.memory import address, space_of
from flashgen.emulator.isa.emitters.warp_matrices import multiply_double
from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.pending_products import PendingProduct, tuple_of
from flashgen.emulator.isa.registry import emits, items_of
from flashgen.emulator.isa.semantics.wgmma import KEPT_GROUPS, WgmmaForm
from flashgen.emulator.ptx.instructions import as_immediate
from flashgen.emulator.ptx.syntax import Imm, Instruction, Operand, Reg, Sink, Vec

_SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1}
# (shape, operand type) -> 16-byte chunks along k
_DEPTH = {
    (f"m16n8k{16 * depth // size}", kind): depth for kind, size in _SIZE.items() for depth in (1, 2)
}
# Element type -> k of one wgmma, and types of the accumulators
_WGMMA_DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}
_SUMS = {kind: ("f32",) if kind in ("bf16", "tf32") else ("f32", "f16") for kind in _WGMMA_DEPTH}
_WGMMA_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


@emits("mma")
def multiply(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    if not mods.take("sync") or not mods.take("aligned"):
        raise g.unknown("mma without .sync.aligned")
    shape = next((m for m in mods.left if m.startswith("m") and "n" in m), "")
    mods.take(shape)
    if mods.take("row", "col") != "row" or not mods.take("col"):
        raise g.unknown("layouts other than .row.col")
    types = list(mods.left)
    if types == 4 * ["f64"]:
        multiply_double(g, ins, shape)
        return
    if len(types) != 4:
        raise g.unknown("sparse, block-scaled or saturating forms")
    mods.left.clear()
    d_type, a_type, b_type, c_type = types
    depth = _DEPTH.get((shape, a_type))
    if depth is None or depth != _DEPTH.get((shape, b_type)) or d_type != c_type:
        raise g.unknown("this shape with these types")
    to, a_items, b_items, c_items = (items_of(o) for o in ins.operands)
    a = _operands(g, a_items, 2 * depth)
    b = _operands(g, b_items, depth)
    integers = a_type in ("s8", "u8")
    if not integers and not _go_together(a_type, b_type):
        raise g.unknown("mixed operand types")
    form = (a_type, b_type, 16 * depth // _SIZE[a_type])
    if not integers and d_type == "f32":
        _defer(g, form, depth, a, b, c_items, to)
        return
    if not integers and d_type not in _SUMS[a_type]:
        raise g.unknown("this accumulator")
    dtype = "i4" if integers else "u4"
    c = [g.read(o, dtype) for o in c_items]
    g.require_defined()
    args = f"{depth}, {tuple_of(a)}, {tuple_of(b)}, {tuple_of(c)}"
    function = f"mma_integer(C, {form[:2]}" if integers else f"mma_half(E, C, {form}"
    out = g.let(f"{function}, {args})")
    for place, item in enumerate(to):
        g.write(item, f"{out}[{place}]", dtype)


def _go_together(a_type: str, b_type: str) -> bool:
    """Whether A and B may have these types: only 8-bit floats mix."""
    return a_type == b_type or {a_type, b_type} == {"e4m3", "e5m2"}


def _operands(g: Generator, items: tuple[Operand, ...], count: int) -> list[str]:
    if len(items) != count:
        raise g.unknown("a fragment of this size")
    return [local_of(g, g.read(o, "u4")) for o in items]


def local_of(g: Generator, expression: str) -> str:
    return expression if expression.isidentifier() else g.let(expression)


def _defer(
    g: Generator,
    form: tuple[str, str, int],
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
    if space_of(g) != "shared" or not mods.take("b16"):
        raise g.unknown("this state space or type")
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


# ---- instructions of whole warpgroups


@emits("wgmma")
def warpgroup_multiply(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    action = mods.take("fence", "mma_async", "commit_group", "wait_group")
    if not action or not mods.take("sync") or not mods.take("aligned"):
        raise g.unknown("forms without .sync.aligned")
    if action == "fence":
        g.emit("E.wgmma.order.fence(C)")
    elif action == "commit_group":
        g.emit("E.wgmma.commit(C)")
    elif action == "wait_group":
        _wait(g, ins)
    else:
        _multiply(g, ins)


def _wait(g: Generator, ins: Instruction) -> None:
    left = as_immediate(ins.operands[0])
    if left is None or not 0 <= left < KEPT_GROUPS:
        raise g.unknown("this number of groups")
    live = g.program.live[g.pc + 1]
    completed = [r for r in g.hazards.completed.get(g.pc, ()) if live >> r & 1]
    current = [g.current(r) for r in completed]
    registers = g.object(tuple(completed))
    names = [g.fresh() for _ in completed]
    to = f"{', '.join(names)}, = " if names else ""
    g.emit(f"{to}E.wgmma.wait(C, {left}, {registers}, ({', '.join(current)}{',' * bool(names)}))")
    g.names.update(zip(completed, names, strict=True))
    g.in_flight.clear()


def _multiply(g: Generator, ins: Instruction) -> None:
    form, a, b, adds = _parsed(g, ins)
    if g.pc in g.hazards.unfenced or g.pc in g.hazards.first:
        registers = g.hazards.unfenced.get(g.pc, ())
        first = g.pc in g.hazards.first
        g.emit(f"E.wgmma.order.require_fence(C, {registers}, {first}, {g.pc})")
    if form.fragments:
        left = tuple_of([local_of(g, g.read(item, "u4")) for item in items_of(a)])
    else:
        left = g.read(a, "u8")
    right = g.read(b, "u8")
    some = g.literal(int(bool(adds.value)), "b1") if isinstance(adds, Imm) else g.read(adds, "b1")
    g.require_defined()
    accumulators = "None"
    if form.registers not in g.in_flight:
        items = items_of(ins.operands[0])
        values = [local_of(g, g.read(item, "u4" if form.half else "f4")) for item in items]
        accumulators = tuple_of(values)
        if g.defined:
            # Accumulators that are not added to need not have been written.
            g.defined = [f"({' & '.join(sorted(set(g.defined)))}) | ~{some}"]
        g.require_defined()
        for register in form.registers:
            if g.check and register in g.program.tracked:
                g.set_definedness(register, g.literal(1, "b1"))
        g.in_flight.add(form.registers)
    g.emit(f"E.wgmma.issue(C, {g.object(form)}, {left}, {right}, {some}, {accumulators}, {g.pc})")


def _parsed(g: Generator, ins: Instruction) -> tuple[WgmmaForm, Operand, Operand, Operand]:
    """The form of an mma_async, its operands A and B, and the operand scale-d."""
    mods = g.mods
    shape = _WGMMA_SHAPE.fullmatch(mods.left[0]) if mods.left else None
    if shape is None or len(mods.left) != 4:
        raise g.unknown("sparse or saturating forms")
    _, d_type, a_type, b_type = mods.left
    mods.left.clear()
    columns, depth = (int(number) for number in shape.groups())
    mixed = not _go_together(a_type, b_type)
    if a_type not in _WGMMA_DEPTH or mixed or d_type not in _SUMS[a_type]:
        raise g.unknown("these types")
    if depth != _WGMMA_DEPTH[a_type] or columns % 8 or not 8 <= columns <= 256:
        raise g.unknown("this shape with these types")
    to, a, b, adds, *rest = ins.operands
    signs = [as_immediate(operand) or 0 for operand in rest[:2]]
    if len(signs) < 2 or not set(signs) <= {1, -1}:
        raise g.unknown("a scale other than 1 and -1")
    flags = [as_immediate(operand) for operand in rest[2:]]
    # Each 16-bit operand in shared memory has a transposition flag.
    movable = ([1] if isinstance(a, Vec) else [0, 1]) if depth == 16 else []
    if len(flags) != len(movable) or not set(flags) <= {0, 1}:
        raise g.unknown("these transposition flags")
    transposed = [False, False]
    for which, flag in zip(movable, flags, strict=True):
        transposed[which] = flag == 1
    registers = [o.index for o in items_of(to) if isinstance(o, Reg)]
    fragments = [o.index for o in items_of(a) if isinstance(o, Reg)] if isinstance(a, Vec) else []
    half = d_type == "f16"
    if len(set(registers)) != columns // (4 if half else 2):
        raise g.unknown("this number of accumulators")
    if isinstance(a, Vec) and len(fragments) != 4:
        raise g.unknown("a fragment of this size")
    form = WgmmaForm(
        columns,
        half,
        kinds=(a_type, b_type),
        transposed=(transposed[0], transposed[1]),
        sign=signs[0] * signs[1],
        registers=tuple(registers),
        fragments=tuple(fragments),
    )
    return form, a, b, adds


@emits("setmaxnreg")
def set_registers(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    action = mods.take("inc", "dec")
    if not action or not mods.take("sync") or not mods.take("aligned") or not mods.take("u32"):
        raise g.unknown("forms other than .inc or .dec .sync.aligned.u32")
    count = as_immediate(ins.operands[0])
    if count is None or count % 8 or not 24 <= count <= 256:
        raise g.unknown("a count that is not a multiple of 8 from 24 to 256")
    g.finish(g.pc + 1)
    g.emit(f"E.registers.change(C, {count}, {action == 'inc'}, {g.pc})")
    g.ended = True
