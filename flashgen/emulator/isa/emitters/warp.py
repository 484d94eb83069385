"""Emitters of warp-wide exchanges; a cohort with inactive lanes waits before each of them."""

from __future__ import annotations

from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits, split_pair
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.ptx.syntax import Instruction, Operand, Reg, Sink


def raw_dtype(g: Generator, operand: Operand, size: int) -> str:
    """The dtype with which ``size`` bytes can be assigned to ``operand`` without a view."""
    if isinstance(operand, Reg) and g.program.dtype[operand.index][1:] == str(size):
        return g.program.dtype[operand.index]
    return f"u{size}"


@emits("shfl")
def shuffle(g: Generator, ins: Instruction) -> None:
    if not g.mods.take("sync"):
        raise g.unknown("shfl without .sync")
    mode = g.mods.take("up", "down", "bfly", "idx")
    g.mods.type()
    to, inside = split_pair(ins.operands[0])
    dtype = raw_dtype(g, to, 4)
    value = g.read(ins.operands[1], dtype)
    of_value, g.defined = g.defined, []
    lane, clamp = (g.read(o, "u4") for o in ins.operands[2:4])
    way = f"C, {mode!r}"
    both = g.let(f"shuffle({way}, {value}, {lane}, {clamp})")
    of_lane = g.defined
    if of_value:  # the value of a lane is as defined as that of the lane it comes from
        source = f"shuffle({way}, {' & '.join(sorted(set(of_value)))}, {lane}, {clamp})"
        g.defined = [*of_lane, g.let(f"{source}[0]")]
    if g.check and (g.masked or g.pc in g.program.strays):
        source = f"source_lanes({mode!r}, {lane}, {clamp})[0]"
        rest = f"{g.membermask()}, {g.lanes()}, {g.pc}, {g.pc not in g.program.strays}"
        g.defined.append(g.let(f"E.members.taking_part(C, {source}, {rest})"))
    g.write(to, f"{both}[0]", dtype)
    g.defined = of_lane
    if not isinstance(inside, Sink):
        g.write(inside, f"{both}[1]", "b1")


@emits("vote")
def vote(g: Generator, ins: Instruction) -> None:
    if not g.mods.take("sync"):
        raise g.unknown("vote without .sync")
    mode = g.mods.take("ballot", "all", "any", "uni")
    g.mods.take("pred", "b32")
    predicate = g.read(ins.operands[1], "b1")
    mask = g.read(ins.operands[2], "u4")
    value = f"vote(C, {mode!r}, {predicate}, {mask})"
    g.write(ins.operands[0], value, "u4" if mode == "ballot" else "b1")


@emits("activemask")
def active_mask(g: Generator, ins: Instruction) -> None:
    g.mods.type()
    g.write(ins.operands[0], "active_mask(C)", "u4")


@emits("match")
def match(g: Generator, ins: Instruction) -> None:
    g.mods.take("sync")
    every = g.mods.take("all", "any") == "all"
    dtype = DTYPE[g.mods.type()]
    to, same = split_pair(ins.operands[0])
    value, mask = g.read(ins.operands[1], dtype), g.read(ins.operands[2], "u4")
    both = g.let(f"match(C, {every}, {value}, {mask})")
    g.write(to, f"{both}[0]", "u4")
    g.write(same, f"{both}[1]", "b1")


_REDUCED = {
    **dict.fromkeys(("add", "min", "max"), ("u32", "s32")),
    **dict.fromkeys(("and", "or", "xor"), ("b32",)),
}


@emits("redux")
def reduce(g: Generator, ins: Instruction) -> None:
    g.mods.take("sync")
    operation = g.mods.take("add", "min", "max", "and", "or", "xor")
    kind = g.mods.type()
    value, mask = g.read(ins.operands[1], DTYPE[kind]), g.read(ins.operands[2], "u4")
    if kind == "f32" and operation in ("min", "max"):
        value = f"np.abs({value})" if g.mods.take("abs") else value
        propagates = bool(g.mods.take("NaN"))
        text = f"reduce_floats(C, {operation!r}, {value}, {mask}, {propagates})"
    elif kind in _REDUCED.get(operation, ()):
        text = f"reduce_lanes(C, {operation!r}, {value}, {mask})"
    else:
        raise g.unknown("this reduction of this type")
    g.write(ins.operands[0], text, DTYPE[kind])


@emits("elect")
def elect(g: Generator, ins: Instruction) -> None:
    g.mods.take("sync")
    lane, chosen = split_pair(ins.operands[0])
    both = g.let(f"elect(C, {g.read(ins.operands[1], 'u4')})")
    g.write(lane, f"{both}[0]", "u4")
    g.write(chosen, f"{both}[1]", "b1")
