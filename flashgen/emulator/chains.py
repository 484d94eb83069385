"""Chains of wgmma in flight: instructions that add to the same sums, and what they amount to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.products import Form, Operand, add_half, add_single, multiply

Array = npt.NDArray[Any]


@dataclass(eq=False)
class Step:
    """One instruction of a chain, for some warpgroups.

    Attributes:
        a: an Operand, or four registers.
        adds: None when all add to the sums; else which do (g,).
        group: number of its group (g,).
        pc: the instruction.
    """

    form: Form
    a: Any
    b: Operand
    adds: Array | None
    group: Array
    pc: int

    def part(self, keep: Array) -> Step:
        """The same for the warpgroups that ``keep`` (g,) marks."""
        a = self.a.part(keep) if isinstance(self.a, Operand) else _rows_of(self.a, keep)
        adds = None if self.adds is None else self.adds[keep]
        return replace(self, a=a, b=self.b.part(keep), adds=adds, group=self.group[keep])

    def joins(self, other: Step) -> bool:
        """Whether ``other``, next along k, can be executed with this one as one product."""
        if other.adds is not None or self.form.fuses_as != other.form.fuses_as:
            return False
        if self.b.layout != other.b.layout:
            return False
        return bool(self.form.fragments) or bool(self.a.layout == other.a.layout)


@dataclass(eq=False)
class Chain:
    """Instructions in flight that use the same sums, oldest first.

    Attributes:
        registers: of the sums.
        groups: warpgroups of the wave, sorted (g,).
        start: the sums before the first, one value per register; None for zeros.
    """

    registers: tuple[int, ...]
    groups: Array
    start: list[Any] | None
    steps: list[Step]

    def part(self, keep: Array) -> Chain:
        """The same of the warpgroups that ``keep`` (g,) marks."""
        start = None if self.start is None else _rows_of(self.start, keep)
        steps = [step.part(keep) for step in self.steps]
        return Chain(self.registers, self.groups[keep], start, steps)

    def append(self, step: Step) -> None:
        """Adds a step; sums that none of it adds to are forgotten."""
        if step.adds is not None and not step.adds.any():
            self.start, self.steps = None, []
            step = replace(step, adds=None)
        self.steps.append(step)

    def execute(self, count: int, view: Array, arena: Array) -> list[Any]:
        """The sums after the first ``count`` steps, each (warps, 32).

        Args:
            view: shared memory of the wave in pieces of 16 bytes.
            arena: where the block of each warpgroup begins in it, in bytes (g,).
        """
        sums = self.start
        at = 0
        while at < count:
            first = self.steps[at]
            end = at + 1
            # Sums of float16 are rounded after every instruction.
            while end < count and not first.form.half and first.joins(self.steps[end]):
                end += 1
            run = self.steps[at:end]
            a, b = [step.a for step in run], [step.b for step in run]
            product = multiply(view, arena, first.form, a, b, 4 * len(self.groups))
            if first.adds is not None and sums is not None:
                keep = np.repeat(first.adds, 4)[:, None]
                sums = [np.where(keep, value, value.dtype.type(0)) for value in sums]
            sums = (add_half if first.form.half else add_single)(product, sums)
            at = end
        return list(sums or ())


def _rows_of(values: Any, keep: Array) -> list[Any]:
    """Register values of the warps of the warpgroups that ``keep`` marks."""
    rows = np.repeat(keep, 4)
    return [v[rows] if v.ndim and v.shape[0] == len(rows) else v for v in values]
