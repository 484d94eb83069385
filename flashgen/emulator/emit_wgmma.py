"""Emitters of wgmma and setmaxnreg, which whole warpgroups execute."""

from __future__ import annotations

import re
from typing import Any

from flashgen.emulator import warpgroup  # noqa: F401  (registers the run-time functions)
from flashgen.emulator.codegen import Generator
from flashgen.emulator.effects import as_immediate
from flashgen.emulator.emit_tensor import local_of, tuple_of
from flashgen.emulator.products import Form
from flashgen.emulator.ptx import Imm, Instruction, Operand, Reg, Vec
from flashgen.emulator.registry import emits, items_of, runtime
from flashgen.emulator.wgmma import KEPT_GROUPS

# Element type -> depth of one instruction, and types of the sums
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
        raise g.unknown("a guard on what a whole warpgroup must execute")
    if action == "fence":
        g.say("E.wgmma.order.fence(C)")
    elif action == "commit_group":
        g.say("E.wgmma.commit(C)")
    elif action == "wait_group":
        _wait(g, ins)
    else:
        _multiply(g, ins)


def _wait(g: Generator, ins: Instruction) -> None:
    left = as_immediate(ins.operands[0])
    if left is None or not 0 <= left < KEPT_GROUPS:
        raise g.unknown("this number of groups")
    live = g.program.live[g.pc + 1]
    landing = [r for r in g.program.hazards.landing.get(g.pc, ()) if live >> r & 1]
    current = [g.current(r) for r in landing]
    registers = _object(g, tuple(landing))
    names = [g.fresh() for _ in landing]
    to = f"{', '.join(names)}, = " if names else ""
    g.say(f"{to}E.wgmma.wait(C, {left}, {registers}, ({', '.join(current)}{',' * bool(names)}))")
    g.names.update(zip(landing, names, strict=True))
    g.in_flight.clear()


def _object(g: Generator, value: Any) -> str:
    """The name of a constant object in the segment's namespace."""
    name = f"O{len(g.namespace)}"
    g.namespace[name] = value
    return name


def _multiply(g: Generator, ins: Instruction) -> None:
    form, a, b, adds = _parsed(g, ins)
    if g.pc in g.program.hazards.unfenced or g.pc in g.program.hazards.first:
        registers = g.program.hazards.unfenced.get(g.pc, ())
        first = g.pc in g.program.hazards.first
        g.say(f"E.wgmma.order.demand_fence(C, {registers}, {first}, {g.pc})")
    if form.fragments:
        left = tuple_of([local_of(g, g.read(item, "u4")) for item in items_of(a)])
    else:
        left = g.read(a, "u8")
    right = g.read(b, "u8")
    some = g.literal(int(bool(adds.value)), "b1") if isinstance(adds, Imm) else g.read(adds, "b1")
    g.demand()
    sums = "None"
    if form.registers not in g.in_flight:
        items = items_of(ins.operands[0])
        values = [local_of(g, g.read(item, "u4" if form.half else "f4")) for item in items]
        sums = tuple_of(values)
        if g.defined:
            # Sums that nobody adds to need not have been written.
            g.defined = [f"all_defined({tuple_of(sorted(set(g.defined)))}) | ~{some}"]
        g.demand()
        for register in form.registers:
            if g.check and register in g.program.tracked:
                g.set_definedness(register, g.literal(1, "b1"))
        g.in_flight.add(form.registers)
    g.say(f"E.wgmma.issue(C, {_object(g, form)}, {left}, {right}, {some}, {sums}, {g.pc})")


def _parsed(g: Generator, ins: Instruction) -> tuple[Form, Operand, Operand, Operand]:
    """What an mma_async says, its operands A and B and whether it adds."""
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
    # 16-bit operands in shared memory have a flag each.
    movable = ([1] if isinstance(a, Vec) else [0, 1]) if depth == 16 else []
    if len(flags) != len(movable) or not set(flags) <= {0, 1}:
        raise g.unknown("other transpositions than its operands have")
    transposed = [False, False]
    for which, flag in zip(movable, flags, strict=True):
        transposed[which] = flag == 1
    registers = [o.index for o in items_of(to) if isinstance(o, Reg)]
    fragments = [o.index for o in items_of(a) if isinstance(o, Reg)] if isinstance(a, Vec) else []
    half = d_type == "f16"
    if len(set(registers)) != columns // (4 if half else 2):
        raise g.unknown("another number of sums")
    if isinstance(a, Vec) and len(fragments) != 4:
        raise g.unknown("a fragment of another size")
    form = Form(
        columns,
        half,
        kinds=(a_type, b_type),
        transposed=(transposed[0], transposed[1]),
        sign=signs[0] * signs[1],
        registers=tuple(registers),
        fragments=tuple(fragments),
    )
    return form, a, b, adds


@runtime
def all_defined(values: Any) -> Any:
    """Where all of some registers have been written."""
    whole = values[0]
    for value in values[1:]:
        whole = whole & value
    return whole


@emits("setmaxnreg")
def set_registers(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    action = mods.take("inc", "dec")
    if not action or not mods.take("sync") or not mods.take("aligned") or not mods.take("u32"):
        raise g.unknown("forms other than .inc or .dec .sync.aligned.u32")
    count = as_immediate(ins.operands[0])
    if count is None or count % 8 or not 24 <= count <= 256 or g.guard:
        raise g.unknown("other counts than the multiples of 8 from 24 to 256, or a guard")
    g.finish(g.pc + 1)
    g.say(f"E.registers.change(C, {count}, {action == 'inc'}, {g.pc})")
    g.ended = True
