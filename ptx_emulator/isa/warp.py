"""Exchanges between the lanes of a warp: shfl, vote, match, redux, elect."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator.isa.generator import Generator, formula, instruction, split_pair
from ptx_emulator.ptx.instructions import Width
from ptx_emulator.ptx.register_types import DTYPE
from ptx_emulator.ptx.syntax import Instruction, Operand, Reg, Sink
from ptx_emulator.state.cohort import LANES, Cohort, active, spread
from ptx_emulator.state.memory import Array

REDUCTIONS: dict[str, Any] = {
    **{"add": np.add, "min": np.minimum, "max": np.maximum},
    **{"or": np.bitwise_or, "xor": np.bitwise_xor, "and": np.bitwise_and},
}


def shuffle(cohort: Cohort, mode: str, value: Any, lane: Any, clamp: Any) -> tuple[Any, Any]:
    """shfl: the value of another lane, and whether that lane is in the segment.

    ``clamp`` holds the segment mask in bits 8 to 12 and the highest (or lowest) lane in 0 to 4.
    """
    source, in_segment = source_lanes(mode, lane, clamp)
    inside = in_segment.reshape(-1, 32)
    if value.ndim == 0 or value.shape[1] == 1:
        return value, inside
    if source.ndim == 2:
        n = cohort.n
        return np.take_along_axis(spread(value, n), spread(source, n), axis=1), inside
    # The same source lanes in all warps.
    if (source == source[0]).all():
        first = int(source[0])
        return value[:, first : first + 1], inside
    if mode == "bfly" and inside.all():
        return _butterfly(value, int(lane) & 31), np.True_
    return value.take(source, axis=1), inside


def _butterfly(value: Array, mask: int) -> Array:
    if mask and not mask & (mask - 1):
        # Swap neighbouring runs of lanes.
        rows = value.shape[0]
        return value.reshape(rows, 16 // mask, 2, mask)[:, :, ::-1].reshape(rows, 32)
    return value.take(LANES ^ mask, axis=1)


def source_lanes(mode: str, lane: Any, clamp: Any) -> tuple[Array, Array]:
    """The lane that each lane reads, and whether it is in the segment: (32,) or (rows, 32)."""
    b = lane.astype(np.int64) & 31
    c = clamp.astype(np.int64) & 31
    segment = (clamp.astype(np.int64) >> 8) & 31
    lowest = LANES & segment
    limit = lowest | (c & ~segment)
    sources = {"up": LANES - b, "down": LANES + b, "bfly": LANES ^ b}
    source = sources.get(mode, lowest | (b & ~segment))
    inside = source >= limit if mode == "up" else source <= limit
    source, inside = np.broadcast_arrays(source, inside)
    return np.where(inside, source, LANES), inside


def _bits(lanes: Array) -> Array:
    """Flags of 32 lanes along the last axis as one word."""
    words = np.packbits(lanes, axis=-1, bitorder="little")
    return np.ascontiguousarray(words).view(np.uint32)[..., 0]


def _members(cohort: Cohort, mask: Any) -> Array:
    """The active lanes of member masks: (n, 1, 32) for one mask per warp, else (n, 32, 32)."""
    bits = (np.asarray(mask)[..., None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    members: Array = active(cohort, cohort.mask)[:, None, :] & bits.astype(bool)
    return members


def vote(cohort: Cohort, mode: str, predicate: Any, mask: Any) -> Any:
    """vote: ballot gives uint32, all / any / uni a predicate, over the active lanes of the mask."""
    members = _members(cohort, mask)
    agree = members & spread(predicate, cohort.n)[:, None, :]
    if mode == "ballot":
        return _bits(agree)
    every, some = (agree == members).all(axis=2), agree.any(axis=2)
    return every if mode == "all" else some if mode == "any" else every | ~some


def active_mask(cohort: Cohort) -> Any:
    return np.uint32(0xFFFFFFFF) if cohort.mask is None else _bits(cohort.mask[:, None, :])


def match(cohort: Cohort, every: bool, value: Any, mask: Any) -> tuple[Any, Any]:
    """match.any: lanes with an equal value; match.all: the mask if all are equal, else 0."""
    values = spread(value, cohort.n)
    members = _members(cohort, mask)
    equal = values[:, :, None] == values[:, None, :]
    if not every:
        return _bits(equal & members), np.True_
    same = (equal | ~members).all(axis=2)
    return np.where(same, _bits(members), np.uint32(0)), same


def reduce_lanes(cohort: Cohort, operation: str, value: Any, mask: Any) -> Any:
    """redux: a reduction over the member lanes."""
    limits = np.iinfo(value.dtype)
    neutral = {"and": -1, "min": limits.max, "max": limits.min}.get(operation, 0)
    fill = np.array(neutral).astype(value.dtype)
    chosen = np.where(_members(cohort, mask), spread(value, cohort.n)[:, None, :], fill)
    return REDUCTIONS[operation].reduce(chosen, axis=2, dtype=value.dtype)


def reduce_floats(cohort: Cohort, operation: str, value: Any, mask: Any, propagates: bool) -> Any:
    """redux of float32: a NaN only if all members are NaN, or with .NaN if any is."""
    members, values = _members(cohort, mask), spread(value, cohort.n)[:, None, :]
    chosen = np.where(members, values, np.float32(np.nan))
    result = (np.fmin if operation == "min" else np.fmax).reduce(chosen, axis=2)
    some = propagates & (members & np.isnan(values)).any(axis=2)
    return np.where(some, np.float32(np.nan), result)


def elect(cohort: Cohort, mask: Any) -> tuple[Any, Any]:
    """elect.sync: the lowest active member lane, and whether this lane is it."""
    first = np.argmax(_members(cohort, mask), axis=2)
    return first.astype(np.uint32), first == LANES


def raw_dtype(g: Generator, operand: Operand, size: int) -> str:
    """The dtype with which ``size`` bytes can be assigned to ``operand`` without a view."""
    if isinstance(operand, Reg) and g.program.dtype[operand.index][1:] == str(size):
        return g.program.dtype[operand.index]
    return f"u{size}"


@instruction("shfl", unit="exchange", width=Width.WARP)
def emit_shuffle(g: Generator, ins: Instruction) -> None:
    g.need("sync")
    mode = g.one_of("up", "down", "bfly", "idx")
    g.mods.type()
    to, inside = split_pair(ins.operands[0])
    dtype = raw_dtype(g, to, 4)
    value = g.read(ins.operands[1], dtype)
    value_defined, g.defined = g.defined, []
    lane, clamp = (g.read(o, "u4") for o in ins.operands[2:4])
    way = f"C, {mode!r}"
    both = g.let(f"shuffle({way}, {value}, {lane}, {clamp})")
    lane_defined = g.defined
    if value_defined:  # the value of a lane is as defined as that of the lane it comes from
        source = f"shuffle({way}, {' & '.join(sorted(set(value_defined)))}, {lane}, {clamp})"
        g.defined = [*lane_defined, g.let(f"{source}[0]")]
    if g.check and (g.masked or g.pc in g.program.strays):
        source = f"source_lanes({mode!r}, {lane}, {clamp})[0]"
        rest = f"{g.membermask()}, {g.pc not in g.program.strays}"
        taking = f"E.members.taking_part({g.execution()}, {source}, {rest})"
        g.defined.append(g.let(f"as_marks({taking})"))
    g.write(to, f"{both}[0]", dtype)
    g.defined = lane_defined
    if not isinstance(inside, Sink):
        g.write(inside, f"{both}[1]", "b1")


@instruction("vote", unit="exchange", width=Width.WARP)
def emit_vote(g: Generator, ins: Instruction) -> None:
    g.need("sync")
    mode = g.one_of("ballot", "all", "any", "uni")
    g.mods.take("pred", "b32")
    predicate = g.read(ins.operands[1], "b1")
    mask = g.read(ins.operands[2], "u4")
    value = f"vote(C, {mode!r}, {predicate}, {mask})"
    g.write(ins.operands[0], value, "u4" if mode == "ballot" else "b1")


formula("activemask", "exchange", "u4", "active_mask(C)")


formula(
    *("match", "exchange", "u4|b1", "match(C, {all/any}, {a:T}, {b:u4})", "sync"), width=Width.WARP
)
formula("elect", "exchange", "u4|b1", "elect(C, {a:u4})", "sync", width=Width.WARP)
_REDUCED = {
    **dict.fromkeys(("add", "min", "max"), ("u32", "s32")),
    **dict.fromkeys(("and", "or", "xor"), ("b32",)),
}


@instruction("redux", unit="exchange", width=Width.WARP)
def emit_reduce(g: Generator, ins: Instruction) -> None:
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
