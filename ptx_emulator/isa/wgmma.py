"""wgmma and setmaxnreg. Operands of wgmma are gathered from shared memory or registers.

Four warps hold the 64 rows of A and of the accumulators, 16 rows each, in the fragment layout of
mma.sync (see `mma`). Successive instructions along k that add to the same accumulators are computed
as one matrix product, and so are the warpgroups of a block that multiply by the same B. If each
eight columns are ordered as 0 2 4 6 1 3 5 7, the four accumulators of one row in four lanes form a
16-byte chunk; this order is free where B is gathered by columns.

`mma.multiply` adds the products: as tensor cores do (`tensor_core_sums`), or rounded once.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from ptx_emulator.isa import descriptors, mma
from ptx_emulator.isa.definedness import ALL
from ptx_emulator.isa.generator import Generator, instruction, items_of
from ptx_emulator.isa.pending_products import tuple_of
from ptx_emulator.isa.tensor_core_sums import SumModel, scratch
from ptx_emulator.ptx.instructions import Width, accumulates, as_immediate
from ptx_emulator.ptx.syntax import Imm, Instruction, Operand, Reg, Vec
from ptx_emulator.state.memory import Array

ROWS = 64
KEPT_GROUPS = 64  # most committed groups per warpgroup that may be in flight


class WgmmaForm(NamedTuple):
    """The form of a wgmma.mma_async: shape, types and registers.

    Attributes:
        columns: N.
        sums: the type of the accumulators: f32, f16 or s32.
        saturates: sums of integers are clamped.
        kinds: element types of A and of B.
        transposed: whether A and B are MN-major.
        sign: -1 if exactly one operand is negated.
        registers: the accumulators.
        fragments: registers of A; empty if A lies in shared memory.
        selector: of the lanes with the metadata of a sparse A; None if it is dense.
    """

    columns: int
    sums: str
    saturates: bool
    kinds: tuple[str, str]
    transposed: tuple[bool, bool]
    sign: int
    registers: tuple[int, ...]
    fragments: tuple[int, ...]
    selector: int | None = None

    @property
    def is_sparse(self) -> bool:
        return self.selector is not None

    @property
    def unit(self) -> int:
        """Bytes of the units of which a sparse A leaves out half: see `mma.places_of_units`."""
        return min(np.dtype(mma.ELEMENTS[self.kinds[0]]).itemsize, 2)

    @property
    def depth(self) -> int:
        """k of the instruction: 32 bytes, 64 with what a sparse A leaves out."""
        return (64 if self.is_sparse else 32) // np.dtype(mma.ELEMENTS[self.kinds[0]]).itemsize

    @property
    def fuses_as(self) -> tuple[Any, ...]:
        """Equal for instructions that can be computed as one product along k."""
        form = (self.kinds, self.transposed, self.sign, bool(self.fragments), self.sums)
        return (*form, self.is_sparse)


class SharedOperand(NamedTuple):
    """An operand in shared memory, for one or more warpgroups.

    Attributes:
        start: start addresses in the shared window (warpgroups,).
        layout: the descriptor fields that all these warpgroups share.
    """

    start: Array
    layout: descriptors.DescriptorLayout

    def part(self, keep: Array | slice) -> SharedOperand:
        """The operand of the warpgroups that ``keep`` selects."""
        return SharedOperand(self.start[keep], self.layout)


def gather(
    view: Array,
    arena: Array,
    parts: list[SharedOperand],
    rows: int,
    mn_major: bool,
    even_first: bool,
    role: str,
) -> Array:
    """The chunks of an operand of successive instructions: (g, rows, k) or (g, k, rows).

    Args:
        view: shared memory of the wave in 16-byte chunks.
        arena: offset in ``view`` of the block of each warpgroup, in bytes (g,).
        parts: the operand of each instruction.
        rows, mn_major, even_first: see `descriptors.operand_chunks`.
        role: name of the result buffer, see `scratch`.
    """
    layout = parts[0].layout
    start = np.stack([part.start for part in parts], axis=1)
    base = start[:, 0] & -descriptors.PATTERN_BYTES
    relative = start - base[:, None]
    first = (arena + base) // descriptors.CHUNK_BYTES
    form = (layout, rows, mn_major, even_first)
    if (relative == relative[0]).all():
        chunks = descriptors.operand_chunks(tuple(relative[0].tolist()), *form)
        index = first[:, None, None] + chunks.positions
    else:
        positions = [
            descriptors.operand_chunks(tuple(r), *form).positions for r in relative.tolist()
        ]
        index = first[:, None, None] + np.stack(positions)
    out = scratch(role, index.shape, mma.CHUNK)
    np.take(view, index, out=out, mode="clip")
    return out


def reach(operand: SharedOperand, rows: int, mn_major: bool) -> tuple[Array, Array, Array]:
    """First byte and end (g,) of an operand of one instruction, and its chunks.

    The chunks are numbered from the start of the shared window, (g, chunks).
    """
    base = operand.start & -descriptors.PATTERN_BYTES
    relative, which = np.unique(operand.start - base, return_inverse=True)
    chunks = [
        descriptors.operand_chunks((int(r),), operand.layout, rows, mn_major) for r in relative
    ]
    low, high = (np.array([getattr(p, end) for p in chunks])[which] for end in ("low", "high"))
    positions = np.stack([p.positions.reshape(-1) for p in chunks])[which]
    return base + low, base + high, base[:, None] // descriptors.CHUNK_BYTES + positions


def fragments(steps: list[tuple[Any, ...]], warps: int) -> Array:
    """A from four registers per instruction, as chunks (g, 64, k)."""
    left = scratch("wgmma a", (warps, 2, 8, len(steps), 2), mma.CHUNK)
    for number, registers in enumerate(steps):
        for index, register in enumerate(registers):
            left[:, index % 2, :, number, index // 2] = mma.register_chunks(register, warps)
    return left.reshape(warps // 4, ROWS, -1)


def stored_units(view: Array, arena: Array, form: WgmmaForm, a: list[Any], warps: int) -> Array:
    """What is stored of a sparse A, (g, 64, units); see `warpgroup_product` for the arguments."""
    if form.fragments:
        left = fragments(a, warps)
    else:
        left = gather(view, arena, a, ROWS, form.transposed[0], False, "wgmma a")
    rows = left.view(mma.ELEMENTS[form.kinds[0]])
    rows = np.ascontiguousarray(rows.swapaxes(1, 2) if form.transposed[0] else rows)
    return rows.view(f"u{form.unit}")


def warpgroup_product(
    view: Array,
    arena: Array,
    form: WgmmaForm,
    a: list[Any],
    b: list[SharedOperand],
    warps: int,
    model: SumModel | None,
    c: list[Any],
    places: Array | None,
) -> Array:
    """One product of successive instructions, as registers (N / 2, warps, 32) of float32.

    Args:
        view, arena: see `gather`.
        form: of the instructions, which agree in N and in `WgmmaForm.fuses_as`.
        a: per instruction a SharedOperand, or four registers that broadcast to (warps, 32).
        b: one operand per instruction.
        warps: four times the warpgroups.
        model: how the accumulators are added; None: they are not, and the product is rounded once.
        c: the accumulators as registers of float32, read if there is a model.
        places: where the stored units of a sparse A belong, (g, 64, units).
    """
    groups, n = warps // 4, form.columns
    kind_a, kind_b = form.kinds
    mn_a, mn_b = form.transposed
    if places is not None:
        left = mma.spread_units(stored_units(view, arena, form, a, warps), places)
        mn_a = False
    elif form.fragments:
        left = fragments(a, warps)
    else:
        left = gather(view, arena, a, ROWS, mn_a, False, "wgmma a")
    sharers = _sharers(arena, b)
    alone = [part.part(slice(None, None, sharers)) for part in b]
    right = gather(view, arena[::sharers], alone, n, mn_b, not mn_b, "wgmma b")
    product = scratch("wgmma d", (groups // sharers, ROWS * sharers, n), np.dtype("f4"))
    start = mma.accumulator_chunks(c, warps, 1, n // 8) if model else None
    if start is not None:
        if mn_b:
            even_first = start.reshape(-1, n // 8, 2, 4)
            start = np.ascontiguousarray(even_first.swapaxes(2, 3))
        start = start.reshape(product.shape)
    rows = left.view(mma.ELEMENTS[kind_a])
    columns = right.view(mma.ELEMENTS[kind_b])
    step = max(1, mma.CACHE_BYTES // (right[0].nbytes + left[0].nbytes * sharers))
    for low in range(0, len(product), step):
        now = slice(low, low + step)
        x = mma.to_single(rows[low * sharers : (low + step) * sharers], kind_a)
        if form.sign < 0:
            x = -x
        if mn_a:
            x = x.swapaxes(1, 2)
        x = x.reshape(-1, ROWS * sharers, x.shape[2])
        y = columns[now]
        if not mn_b:
            # BLAS is faster without a transposed B: transpose while the elements are narrow.
            y = np.ascontiguousarray(y.swapaxes(1, 2))
        y = mma.to_single(y.reshape(len(y), -1, n), kind_b)
        mma.multiply(model, form.kinds, x, y, None if start is None else start[now], product[now])
    if mn_b:
        single = product.reshape(groups, 4, 2, 8, n // 8, 4, 2)
        out = np.ascontiguousarray(single.transpose(4, 2, 6, 0, 1, 3, 5))
    else:
        ordered = product.view(mma.CHUNK).reshape(groups, 4, 2, 8, n // 8, 2)
        out = np.ascontiguousarray(ordered.transpose(4, 2, 5, 0, 1, 3)).view(np.float32)
    return out.reshape(n // 2, warps, 32)


def _sharers(arena: Array, b: list[SharedOperand]) -> int:
    """Length of the equal runs of consecutive warpgroups with the same B; 1 if they differ."""
    if len(arena) < 2:
        return 1
    same = arena[1:] == arena[:-1]
    for part in b:
        same = same & (part.start[1:] == part.start[:-1])
    firsts = np.flatnonzero(np.concatenate([[True], ~same]))
    lengths = np.diff(firsts, append=len(arena))
    return int(lengths[0]) if (lengths == lengths[0]).all() else 1


# ---- emitters

# Element type -> k of one instruction
_DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, **dict.fromkeys(("e4m3", "e5m2", "s8", "u8"), 32)}
_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


@instruction(
    "wgmma",
    unit=lambda ins: "tensor" if accumulates(ins) else "barrier",
    result=accumulates,
    width=Width.WARPGROUP,
    asynchronous=True,
)
def emit_warpgroup_multiply(g: Generator, ins: Instruction) -> None:
    action = g.one_of("fence", "mma_async", "commit_group", "wait_group")
    g.need("sync", "aligned")
    if action == "fence":
        g.emit("E.wgmma.order.fence(C)")
    elif action == "commit_group":
        g.emit("E.wgmma.commit(C)")
    elif action == "wait_group":
        _wait(g, ins)
    else:
        _multiply(g, ins)


def _wait(g: Generator, ins: Instruction) -> None:
    left = g.immediate(ins.operands[0], "a number of groups")
    g.refuse_if(not 0 <= left < KEPT_GROUPS, "this number of groups")
    live = g.program.live[g.pc + 1]
    completed = [r for r in g.hazards.completed.get(g.pc, ()) if live >> r & 1]
    current = ", ".join(f"{r}: {g.current(r)}" for r in completed)
    names = [g.fresh() for _ in completed]
    to = f"{', '.join(names)}, = " if names else ""
    g.emit(f"{to}E.wgmma.wait(C, {left}, {{{current}}})")
    g.names.update(zip(completed, names, strict=True))
    g.in_flight.clear()


def _multiply(g: Generator, ins: Instruction) -> None:
    form, a, b, adds = _parsed(g, ins)
    if g.pc in g.hazards.unfenced or g.pc in g.hazards.first:
        registers = g.hazards.unfenced.get(g.pc, ())
        first = g.pc in g.hazards.first
        g.emit(f"E.wgmma.order.require_fence({g.checked_execution()}, {registers}, {first})")
    if form.fragments:
        left = tuple_of([mma.local_of(g, g.read(item, "u4")) for item in items_of(a)])
    else:
        left = g.read(a, "u8")
    right = g.read(b, "u8")
    metadata = "None" if form.selector is None else g.read(ins.operands[3], "u4")
    some = g.literal(int(bool(adds.value)), "b1") if isinstance(adds, Imm) else g.read(adds, "b1")
    g.require_defined()
    accumulators = "None"
    if form.registers not in g.in_flight:
        items = items_of(ins.operands[0])
        dtype = {"f32": "f4", "f16": "u4", "s32": "i4"}[form.sums]
        values = [mma.local_of(g, g.read(item, dtype)) for item in items]
        accumulators = tuple_of(values)
        if g.defined:
            # Accumulators that are not added to need not have been written.
            g.defined = [f"({' & '.join(sorted(set(g.defined)))}) | as_marks(~{some})"]
        g.require_defined()
        for register in form.registers:
            if g.check and register in g.program.tracked:
                g.set_definedness(register, g.literal(ALL, "u8"))
        g.in_flight.add(form.registers)
    operands = f"{left}, {right}, {some}, {accumulators}, {metadata}"
    g.emit(f"E.wgmma.issue({g.checked_execution()}, {g.object(form)}, {operands})")


def _parsed(g: Generator, ins: Instruction) -> tuple[WgmmaForm, Operand, Operand, Operand]:
    """The form of an mma_async, its operands A and B, and the operand scale-d."""
    mods = g.mods
    saturates, sparse = bool(mods.take("satfinite")), bool(mods.take("sp"))
    shape = _SHAPE.fullmatch(mods.left[0]) if mods.left else None
    if shape is None or len(mods.left) != 4:
        raise g.unknown("products of single bits")
    _, d_type, a_type, b_type = mods.left
    mods.left.clear()
    columns, depth = (int(number) for number in shape.groups())
    integers = d_type == "s32" and {a_type, b_type} <= {"s8", "u8"}
    supported = integers or d_type in mma.SUMS.get(a_type, ())
    g.refuse_if(not supported or not (integers or mma.go_together(a_type, b_type)), "these types")
    g.refuse_if(saturates and not integers, "saturation of floats")
    wide = 16 if integers and columns > 32 else 8
    if depth != _DEPTH[a_type] << sparse or columns % wide or not 8 <= columns <= 256:
        raise g.unknown("this shape with these types")
    selector = None
    if sparse:
        g.refuse_if(len(ins.operands) < 6, "this number of operands")
        selector = g.immediate(ins.operands[4], "a selector")
        g.refuse_if(not 0 <= selector < (2 if _DEPTH[a_type] < 32 else 1), "this selector")
    to, a, b, *rest = ins.operands
    adds, *rest = rest[2 * sparse :]
    # Products of integers have neither scales nor transposition flags.
    signs = [1, 1] if integers and not rest else [as_immediate(o) or 0 for o in rest[:2]]
    g.refuse_if(len(signs) < 2 or not set(signs) <= {1, -1}, "a scale other than 1 and -1")
    g.refuse_if(integers and rest, "operands that products of integers do not have")
    flags = [as_immediate(operand) for operand in rest[2:]]
    # Each 16-bit operand in shared memory has a transposition flag.
    movable = ([1] if isinstance(a, Vec) else [0, 1]) if _DEPTH[a_type] == 16 else []
    g.refuse_if(len(flags) != len(movable) or not set(flags) <= {0, 1}, "these transposition flags")
    turned = dict(zip(movable, flags, strict=True))
    registers = [o.index for o in items_of(to) if isinstance(o, Reg)]
    fragments = [o.index for o in items_of(a) if isinstance(o, Reg)] if isinstance(a, Vec) else []
    count = columns // (4 if d_type == "f16" else 2)
    g.refuse_if(len(set(registers)) != count, "this number of accumulators")
    if isinstance(a, Vec) and len(fragments) != 4:
        raise g.unknown("a fragment of this size")
    transposed, sign = (turned.get(0) == 1, turned.get(1) == 1), signs[0] * signs[1]
    fields = (columns, d_type, saturates, (a_type, b_type), transposed, sign)
    return WgmmaForm(*fields, tuple(registers), tuple(fragments), selector), a, b, adds


@instruction(
    "setmaxnreg",
    unit="control",
    result=False,
    width=Width.WARPGROUP,
    starts_segment=True,
    ends_segment=True,
)
def emit_set_registers(g: Generator, ins: Instruction) -> None:
    action = g.one_of("inc", "dec")
    g.need("sync", "aligned", "u32")
    count = g.immediate(ins.operands[0], "a number of registers")
    g.refuse_if(count % 8 or not 24 <= count <= 256, "no multiple of 8 from 24 to 256")
    g.finish(g.pc + 1)
    g.emit(f"E.registers.change(C, {count}, {action == 'inc'}, {g.pc})")
    g.ended = True
