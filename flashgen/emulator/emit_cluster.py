"""Emitters of what concerns clusters, for a cluster of one block."""

from __future__ import annotations

import numpy as np

from flashgen.emulator.codegen import Generator
from flashgen.emulator.dtypes import DTYPE
from flashgen.emulator.ptx import Instruction
from flashgen.emulator.registry import emits, runtime
from flashgen.errors import EmulatorError


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
        g.say(f"if E.wait_for_warp(C, None, {g.pc}): return True")
    g.say(f"E.cluster.{action}(C, {g.pc})")
    g.ended = True


@emits("mapa")
def map_address(g: Generator, ins: Instruction) -> None:
    """The same address in the block of another rank: there is only rank 0."""
    g.mods.take("shared::cluster")
    kind = g.mods.type()
    to, source, rank = ins.operands
    value, number = g.read(source, DTYPE[kind]), g.read(rank, "u4")
    g.demand()
    g.say(f"demand_rank(E, C, {number}, {g.lanes()}, {g.pc})")
    g.write(to, value, DTYPE[kind])


@emits("getctarank")
def rank_of_address(g: Generator, ins: Instruction) -> None:
    g.mods.take("shared::cluster")
    g.mods.type()
    g.write(ins.operands[0], g.literal(0, "u4"), "u4")


@runtime
def demand_rank(E: object, C: object, rank: object, lanes: object, pc: int) -> None:
    from flashgen.emulator.access import active, first_bad

    bad = np.asarray(rank) != 0
    if not (bad & active(C, lanes)).any():  # type: ignore[arg-type]
        return
    row, lane = first_bad(C, lanes, bad)  # type: ignore[arg-type]
    E.fail(  # type: ignore[attr-defined]
        EmulatorError,
        "an address in another block of the cluster",
        C,
        pc,
        row=row,
        lane=lane,
        numbers="the cluster has one block, of rank 0",
        way_out="the emulator knows clusters of one block only",
    )
