"""Emitters of branches, exits, barriers, traps and calls."""

from __future__ import annotations

import numpy as np

from flashgen.emulator.codegen import Generator
from flashgen.emulator.emit_cluster import cluster_barrier
from flashgen.emulator.errors import Trapped
from flashgen.emulator.ptx import Imm, Instruction, LabelRef, Operand, Reg, Sym
from flashgen.emulator.registry import emits, runtime


def guard_of(g: Generator, ins: Instruction) -> str:
    """The guard as an expression, '' when there is none."""
    if ins.guard is None:
        return ""
    value = g.read(ins.guard, "b1")
    g.demand()
    # Read before the registers are stored back: the guard may die here.
    return g.let(f"~{value}" if ins.guard_negated else value)


@emits("bra")
def branch(g: Generator, ins: Instruction) -> None:
    g.mods.take("uni")
    target = ins.operands[0]
    assert isinstance(target, LabelRef)
    guard = guard_of(g, ins)
    if guard:
        g.finish(target.target, g.pc + 1)
        g.say(f"E.branch(C, {guard}, {target.target}, {g.pc + 1})")
    else:
        g.finish(target.target)
        g.say(f"C.pc = {target.target}")
    g.ended = True


@emits("brx")
def branch_indexed(g: Generator, ins: Instruction) -> None:
    g.mods.take("idx")
    g.mods.take("uni")
    table = ins.operands[1]
    if ins.guard is not None or not isinstance(table, Sym):
        raise g.unknown("a guarded or computed table")
    targets = g.program.branch_targets[table.name]
    index = g.let(f"{g.read(ins.operands[0], 'u4')}.astype(i8)")
    g.demand()
    g.finish(*targets)
    g.say(f"E.branch_table(C, {index}, {targets!r}, {g.pc})")
    g.ended = True


@emits("exit", "ret")
def leave(g: Generator, ins: Instruction) -> None:
    g.mods.take("uni")
    guard = guard_of(g, ins)
    g.finish(g.pc + 1)
    g.say(f"E.exit(C, {guard or None}, {g.pc + 1})")
    g.ended = True


@emits("trap", "brkpt")
def trap(g: Generator, ins: Instruction) -> None:
    g.say(f"raise_trap(E, C, {g.lanes()}, {g.pc}, 'the kernel executed {ins.op}')")


@emits("call")
def call(g: Generator, ins: Instruction) -> None:
    name = next((o.name for o in ins.operands if isinstance(o, Sym)), "through a pointer")
    if name == "__assertfail":
        g.mods.left.clear()
        g.say(f"raise_trap(E, C, {g.lanes()}, {g.pc}, 'a device-side assert failed')")
        return
    if name == "vprintf":
        raise g.unknown("printf is not emulated")
    raise g.unknown(f"a call of the external function {name}")


@emits("nanosleep")
def sleep(g: Generator, ins: Instruction) -> None:
    g.mods.type()


@emits("griddepcontrol")
def dependent_launch(g: Generator, ins: Instruction) -> None:
    """A launch waits for nobody and nobody waits for it: each runs alone, to its end."""
    if not g.mods.take("wait", "launch_dependents"):
        raise g.unknown()


@emits("pmevent")
def no_effect(g: Generator, ins: Instruction) -> None:
    g.mods.left.clear()


def uniform(g: Generator, operand: Operand) -> str:
    """A value that is the same in all lanes of a warp, as int64."""
    if isinstance(operand, Imm):
        return str(operand.value)
    return f"uniform_value({g.read(operand, 'u4')}, C)"


@emits("bar", "barrier")
def barrier(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    if mods.take("warp"):
        mods.take("sync")
        g.demand()
        g.say("E.sync_warp(C)")
        return
    if mods.take("cluster"):
        cluster_barrier(g)
        return
    mods.take("cta")
    mods.take("aligned")
    action = mods.take("sync", "arrive", "red")
    if not action or g.guard:
        raise g.unknown("a guarded barrier" if g.guard else "")
    vote, result, operands = "None", "None", list(ins.operands)
    if action == "red":
        operation = mods.take("popc", "and", "or")
        kind = mods.take("u32", "pred")
        to = operands.pop(0)
        if not isinstance(to, Reg):
            raise g.unknown()
        vote = g.let(g.read(operands.pop(), "b1"))
        dtype = g.program.dtype[to.index]
        if kind == "u32" and dtype not in ("u4", "i4"):
            raise g.unknown("the dtype of the result")
        result = f"({to.index}, {operation!r}, {dtype!r})"
    number = g.let(uniform(g, operands[0]))
    count = g.let(uniform(g, operands[1])) if len(operands) > 1 else "0"
    g.demand()
    if g.masked:
        g.finish(g.pc, g.pc + 1)  # lanes that wait for their warp come back and read the operands
        g.say(f"if E.wait_for_warp(C, None, {g.pc}): return True")
    else:
        g.finish(g.pc + 1)
    g.say(
        f"E.barriers.arrive(C, {number}, {count}, {action != 'arrive'}, {g.pc}, {vote}, {result})"
    )
    g.ended = True


@runtime
def uniform_value(value: object, C: object) -> object:
    """Takes lane 0 of each row where a register is per lane."""
    array = value.astype("i8")  # type: ignore[attr-defined]
    return array[:, :1] if array.ndim and array.shape[1] == 32 else array


@runtime
def raise_trap(E: object, C: object, lanes: object, pc: int, what: str) -> None:
    from flashgen.emulator.access import active

    chosen = active(C, lanes)  # type: ignore[arg-type]
    if not chosen.any():
        return
    row, lane = (int(i) for i in np.argwhere(chosen)[0])
    E.fail(  # type: ignore[attr-defined]
        Trapped,
        what,
        C,
        pc,
        row=row,
        lane=lane,
        numbers="the program stops here on a GPU too",
        way_out="find out why the kernel takes this branch",
    )
