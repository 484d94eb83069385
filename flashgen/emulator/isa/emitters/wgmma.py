"""Emitters of wgmma and setmaxnreg, which whole warpgroups execute."""

from __future__ import annotations

import re
from typing import Any

from flashgen.emulator.isa.emitters.mma import local_of
from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.pending_products import tuple_of
from flashgen.emulator.isa.registry import emits, items_of
from flashgen.emulator.isa.semantics.wgmma import KEPT_GROUPS, WgmmaForm
from flashgen.emulator.ptx.instructions import as_immediate
from flashgen.emulator.ptx.syntax import Imm, Instruction, Operand, Reg, Vec

# Element type -> k of one instruction, and types of the accumulators
_DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}
_SUMS = {kind: ("f32",) if kind in ("bf16", "tf32") else ("f32", "f16") for kind in _DEPTH}
_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


@emits("wgmma")
def warpgroup_multiply(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    action = mods.take("fence", "mma_async", "commit_group", "wait_group")
    if not action or not mods.take("sync") or not mods.take("aligned"):
        raise g.unknown("forms without .sync.aligned")
    if g.guard:
        raise g.unknown("a guard: whole warpgroups execute it")
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
    registers = _object(g, tuple(completed))
    names = [g.fresh() for _ in completed]
    to = f"{', '.join(names)}, = " if names else ""
    g.emit(f"{to}E.wgmma.wait(C, {left}, {registers}, ({', '.join(current)}{',' * bool(names)}))")
    g.names.update(zip(completed, names, strict=True))
    g.in_flight.clear()


def _object(g: Generator, value: Any) -> str:
    """The name of a constant object in the segment's namespace."""
    name = f"O{len(g.namespace)}"
    g.namespace[name] = value
    return name


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
            g.defined = [f"all_defined({tuple_of(sorted(set(g.defined)))}) | ~{some}"]
        g.require_defined()
        for register in form.registers:
            if g.check and register in g.program.tracked:
                g.set_definedness(register, g.literal(1, "b1"))
        g.in_flight.add(form.registers)
    g.emit(f"E.wgmma.issue(C, {_object(g, form)}, {left}, {right}, {some}, {accumulators}, {g.pc})")


def _parsed(g: Generator, ins: Instruction) -> tuple[WgmmaForm, Operand, Operand, Operand]:
    """The form of an mma_async, its operands A and B, and the operand scale-d."""
    mods = g.mods
    shape = _SHAPE.fullmatch(mods.left[0]) if mods.left else None
    if shape is None or len(mods.left) != 4:
        raise g.unknown("sparse or saturating forms")
    _, d_type, a_type, b_type = mods.left
    mods.left.clear()
    columns, depth = (int(number) for number in shape.groups())
    mixed = a_type != b_type and {a_type, b_type} != {"e4m3", "e5m2"}
    if a_type not in _DEPTH or mixed or d_type not in _SUMS[a_type]:
        raise g.unknown("these types")
    if depth != _DEPTH[a_type] or columns % 8 or not 8 <= columns <= 256:
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
    if count is None or count % 8 or not 24 <= count <= 256 or g.guard:
        raise g.unknown("a count that is not a multiple of 8 from 24 to 256, or a guard")
    g.finish(g.pc + 1)
    g.emit(f"E.registers.change(C, {count}, {action == 'inc'}, {g.pc})")
    g.ended = True
