"""Emitters of the barriers of a block and of a cluster, and of addresses in a cluster."""

from __future__ import annotations

from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits
from flashgen.emulator.isa.semantics import control  # noqa: F401  (registers the run-time functions)
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.ptx.syntax import Imm, Instruction, Operand, Reg


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
        g.require_defined()  # bar.warp.sync: the cohort has already waited for its lanes
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
    g.require_defined()
    if g.masked:
        g.finish(g.pc, g.pc + 1)  # a cohort that waits for its warp executes this instruction again
        g.emit(f"if E.wait_for_warp(C, None, {g.pc}): return True")
    else:
        g.finish(g.pc + 1)
    g.emit(
        f"E.barriers.arrive(C, {number}, {count}, {action != 'arrive'}, {g.pc}, {vote}, {result})"
    )
    g.ended = True


def cluster_barrier(g: Generator) -> None:
    """barrier.cluster.arrive and .wait."""
    mods = g.mods
    action = mods.take("arrive", "wait")
    mods.take("release", "relaxed", "acquire")
    mods.take("aligned")
    if not action or g.guard:
        raise g.unknown("a guarded barrier" if g.guard else "")
    g.finish(g.pc + 1)
    if g.masked:
        g.emit(f"if E.wait_for_warp(C, None, {g.pc}): return True")
    g.emit(f"E.cluster.{action}(C, {g.pc})")
    g.ended = True


@emits("mapa")
def map_address(g: Generator, ins: Instruction) -> None:
    """mapa: the address in another block of the cluster, which has rank 0 only."""
    g.mods.take("shared::cluster")
    kind = g.mods.type()
    to, source, rank = ins.operands
    value, number = g.read(source, DTYPE[kind]), g.read(rank, "u4")
    g.require_defined()
    g.emit(f"require_rank(E, C, {number}, {g.lanes()}, {g.pc})")
    g.write(to, value, DTYPE[kind])


@emits("getctarank")
def rank_of_address(g: Generator, ins: Instruction) -> None:
    g.mods.take("shared::cluster")
    g.mods.type()
    g.write(ins.operands[0], g.literal(0, "u4"), "u4")
