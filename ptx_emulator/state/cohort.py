"""Cohorts: sets of warps that execute the same instruction together, and what they wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ptx_emulator.state.memory import Array


@dataclass(slots=True, eq=False)
class Cohort:
    """Warps that execute together.

    Attributes:
        rows: sorted numbers of the warps in the wave, (n,).
        pc: number of the next instruction.
        registers: a value of shape (), (n, 1), (1, 32) or (n, 32) per register; None when dead.
        mask: active lanes (n, 32), or None when every lane is active. Values of inactive lanes are
            arbitrary; only side effects use the mask.
        waits: why the cohort cannot run, or None.
        polls: its last test of an mbarrier or a flag failed, so that other cohorts run first.
        failed: its last test of an mbarrier failed, however long ago.
        age: the step at which it last ran.
        shared_base: see `Wave.shared_base`; None until it is first read.
        groups: numbers of its warpgroups in the wave, if it consists of whole warpgroups.
    """

    rows: Array
    pc: int
    registers: list[Any]
    mask: Array | None
    waits: Any = None
    polls: bool = False
    failed: bool = False
    age: int = 0
    shared_base: Array | None = None
    groups: Array | None = None
    n: int = field(init=False)

    def __post_init__(self) -> None:
        self.n = len(self.rows)

    def part(self, keep: Array, live: Sequence[int], pc: int) -> Cohort:
        """The rows where ``keep`` (n,) is true, with the live registers only."""
        n, kept = self.n, np.flatnonzero(keep)
        registers: list[Any] = [None] * len(self.registers)
        for index in live:
            value = self.registers[index]
            if value is not None and value.ndim and value.shape[0] == n and n > 1:
                value = value.take(kept, axis=0)  # a fifth of the time of an index
            registers[index] = value
        mask = self.mask
        if mask is not None:
            mask = mask[keep]
            if mask.all():
                mask = None
        return Cohort(self.rows[keep], pc, registers, mask)

    def full_mask(self) -> Array:
        return np.ones((self.n, 32), bool) if self.mask is None else self.mask

    def with_mask(self, mask: Array, pc: int) -> Cohort:
        """The same rows with other active lanes; the register values are shared."""
        return Cohort(self.rows, pc, list(self.registers), None if mask.all() else mask)


class SingleThreads(Cohort):
    """Single threads of a cohort, one per row; ``lane`` holds the lane of each thread (n,)."""

    __slots__ = ("lane",)

    def __init__(self, cohort: Cohort, cohort_rows: Array, lanes: Array) -> None:
        super().__init__(cohort.rows[cohort_rows], cohort.pc, [], None)
        self.lane = lanes

    def select(self, which: Array) -> SingleThreads:
        """The threads that a mask or an array of indices selects."""
        indices = np.arange(self.n)[which]
        return SingleThreads(self, indices, self.lane[indices])


# ---- why a cohort cannot run: one class per kind of wait, stored in ``Cohort.waits``


@dataclass(eq=False)
class WaitsForWarp:
    """The cohort stands at a warp-wide instruction ``pc`` that other lanes have not reached.

    ``needed`` holds the lanes that must reach it (n, 32).
    """

    whole: ClassVar[str] = "warp"
    pc: int
    needed: Array

    def partners(self, rows: Array) -> Array:
        """The warps that have to arrive before ``rows`` can continue."""
        return rows


class WaitsForWarpgroup(WaitsForWarp):
    """The cohort stands at an instruction that other warps of its warpgroups have not reached.

    ``needed`` holds the warps of these warpgroups.
    """

    whole = "warpgroup"

    def partners(self, rows: Array) -> Array:
        return self.needed


@dataclass(eq=False)
class WaitsAtBarrier:
    """Rows that have arrived at a named barrier of their block.

    Attributes:
        ids: barrier of each row (n,).
        result: (register, operation, dtype) of bar.red, else None.
    """

    pc: int
    ids: Array
    result: tuple[int, str, str] | None


@dataclass(eq=False)
class WaitsForPhase:
    """Rows that wait for mbarriers; ``barriers`` and ``lanes`` are (n, 1) or (n, 32)."""

    pc: int
    barriers: Array
    lanes: Array


@dataclass(eq=False)
class WaitsForCluster:
    """Rows that wait for the phase of the cluster barrier in which they arrived."""

    pc: int


@dataclass(eq=False)
class WaitsForLaunch:
    """Rows that wait for the end of the launch before this one."""

    pc: int


@dataclass(eq=False)
class WaitsForRegisters:
    """Warpgroups whose setmaxnreg.inc requests more registers than their block has left."""

    pc: int
    count: int


# ---- splitting and merging


def splice(
    cohort: Cohort, part: Cohort, keep: Array, outputs: Sequence[int], lanes: Array | None
) -> None:
    """Copies the registers ``outputs`` of ``part`` back to the rows ``keep`` of ``cohort``.

    With ``lanes`` (rows of ``part``, 32) only these lanes are copied.
    """
    for index in outputs:
        new, old = part.registers[index], cohort.registers[index]
        if old is None:
            old = np.zeros((), new.dtype)[()]
        if lanes is not None:
            before = old[keep] if old.ndim and old.shape[0] == cohort.n and cohort.n > 1 else old
            new = np.where(lanes, new, before)
        if old.ndim == 0 and new.ndim == 0 and old.tobytes() == new.tobytes():
            continue
        width = max(v.shape[1] if v.ndim else 1 for v in (old, new))
        both = np.empty((cohort.n, width), new.dtype)
        both[...] = old
        both[keep] = new
        cohort.registers[index] = both


def merge(cohorts: list[Cohort], live: Sequence[int]) -> Cohort:
    """Merges cohorts that are at the same instruction into one."""
    rows = np.concatenate([cohort.rows for cohort in cohorts])
    if len(np.unique(rows)) == len(rows):
        return _concatenate(cohorts, live)
    result = cohorts[0]
    for other in cohorts[1:]:
        result = _merge_pair(result, other, live)
    return result


def _merge_pair(a: Cohort, b: Cohort, live: Sequence[int]) -> Cohort:
    if a.rows is b.rows or np.array_equal(a.rows, b.rows):
        return _merge_lanes(a, b, live)
    common = np.isin(a.rows, b.rows)
    if not common.any():
        return _concatenate([a, b], live)
    shared = np.isin(b.rows, a.rows)
    parts = [_merge_lanes(a.part(common, live, a.pc), b.part(shared, live, b.pc), live)]
    if not common.all():
        parts.append(a.part(~common, live, a.pc))
    if not shared.all():
        parts.append(b.part(~shared, live, b.pc))
    return _concatenate(parts, live) if len(parts) > 1 else parts[0]


def _merge_lanes(a: Cohort, b: Cohort, live: Sequence[int]) -> Cohort:
    mask = a.full_mask()
    registers: list[Any] = [None] * len(a.registers)
    for index in live:
        x, y = a.registers[index], b.registers[index]
        registers[index] = x if x is y else np.where(mask, x, y)
    both = mask | b.full_mask()
    return Cohort(a.rows, a.pc, registers, None if both.all() else both)


def _concatenate(parts: list[Cohort], live: Sequence[int]) -> Cohort:
    rows = np.concatenate([p.rows for p in parts])
    order = np.argsort(rows, kind="stable")
    registers: list[Any] = [None] * len(parts[0].registers)
    for index in live:
        registers[index] = _join([p.registers[index] for p in parts], parts, order)
    mask = None
    if any(p.mask is not None for p in parts):
        mask = np.concatenate([p.full_mask() for p in parts])[order]
    return Cohort(rows[order], parts[0].pc, registers, mask)


def _join(values: list[Any], parts: list[Cohort], order: Array) -> Any:
    """The values that a register has in some cohorts, side by side, as rows in ``order``."""
    first = values[0]
    if all(v is first for v in values):  # nearly all registers that no cohort wrote meanwhile
        if not first.ndim or first.shape[0] == 1:
            return first
    elif all(v.ndim == 0 for v in values) and len({v.tobytes() for v in values}) == 1:
        return first
    width = max(v.shape[1] if v.ndim else 1 for v in values)
    joined = np.empty((len(order), width), first.dtype)
    end = 0
    for value, part in zip(values, parts, strict=True):
        joined[end : end + part.n] = value
        end += part.n
    return joined.take(order, axis=0)


# ---- values of lanes

LANES = np.arange(32)


def spread(value: Any, n: int) -> Array:
    """A value of any shape as (n, 32); callers do not write to it."""
    array: Array = np.asarray(value)
    if array.shape == (n, 32):
        return array
    # A copy of a few warps takes a third of the time of `numpy.broadcast_to`.
    full = np.empty((n, 32), array.dtype)
    full[...] = array
    return full


def active(cohort: Cohort, lanes: Any) -> Array:
    return spread(True if lanes is None else lanes, cohort.n)


def rows_of(cohort: Cohort, lanes: Any) -> Array:
    """The warps with an active lane."""
    return cohort.rows if lanes is None else cohort.rows[active(cohort, lanes).any(axis=1)]
