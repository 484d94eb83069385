"""Chains of wgmma in flight: instructions that add to the same accumulators, and their result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.isa.mma import add_single, join_halves, split_halves
from flashgen.emulator.isa.sum_models import SumModels
from flashgen.emulator.isa.wgmma import SharedOperand, WgmmaForm, warpgroup_product

Array = npt.NDArray[Any]


@dataclass(eq=False)
class IssuedWgmma:
    """One instruction of a chain, for one or more warpgroups.

    Attributes:
        a: a SharedOperand, or four registers.
        adds: whether each warpgroup adds to the accumulators (g,); None if all do.
        group: number of its committed group, per warpgroup (g,).
        pc: the instruction.
    """

    form: WgmmaForm
    a: Any
    b: SharedOperand
    adds: Array | None
    group: Array
    pc: int

    def part(self, keep: Array) -> IssuedWgmma:
        """The instruction for the warpgroups that ``keep`` (g,) selects."""
        a = self.a.part(keep) if isinstance(self.a, SharedOperand) else _rows_of(self.a, keep)
        adds = None if self.adds is None else self.adds[keep]
        return replace(self, a=a, b=self.b.part(keep), adds=adds, group=self.group[keep])

    def joins(self, other: IssuedWgmma) -> bool:
        """Whether ``other``, the next along k, can be computed together with this one."""
        if other.adds is not None or self.form.fuses_as != other.form.fuses_as:
            return False
        if self.b.layout != other.b.layout:
            return False
        return bool(self.form.fragments) or bool(self.a.layout == other.a.layout)


@dataclass(eq=False)
class WgmmaChain:
    """Instructions in flight that use the same accumulators, oldest first.

    Attributes:
        registers: the accumulators.
        groups: warpgroups of the wave, sorted (g,).
        start: the accumulators before the first instruction, per register; None for zeros.
    """

    registers: tuple[int, ...]
    groups: Array
    start: list[Any] | None
    steps: list[IssuedWgmma]

    def part(self, keep: Array) -> WgmmaChain:
        """The chain of the warpgroups that ``keep`` (g,) selects."""
        start = None if self.start is None else _rows_of(self.start, keep)
        steps = [step.part(keep) for step in self.steps]
        return WgmmaChain(self.registers, self.groups[keep], start, steps)

    def append(self, step: IssuedWgmma) -> None:
        """Appends an instruction; earlier ones are dropped if it overwrites the accumulators."""
        if step.adds is not None and not step.adds.any():
            self.start, self.steps = None, []
            step = replace(step, adds=None)
        self.steps.append(step)

    def execute(self, count: int, view: Array, arena: Array, sums: SumModels | None) -> list[Any]:
        """The accumulators after the first ``count`` instructions, each (warps, 32).

        Args:
            view: shared memory of the wave in 16-byte chunks.
            arena: offset in ``view`` of the block of each warpgroup, in bytes (g,).
            sums: how tensor cores add; None: sums are rounded once.
        """
        warps = 4 * len(self.groups)
        accumulators = self.start
        at = 0
        while at < count:
            first = self.steps[at]
            end = at + 1
            # Accumulators of float16 are rounded after every instruction.
            while end < count and not first.form.half and first.joins(self.steps[end]):
                end += 1
            run = self.steps[at:end]
            a, b = [step.a for step in run], [step.b for step in run]
            if first.adds is not None and accumulators is not None:
                keep = np.repeat(first.adds, 4)[:, None]
                accumulators = [
                    np.where(keep, value, value.dtype.type(0)) for value in accumulators
                ]
            form, start = first.form, list(accumulators or ())
            if form.half:
                start = split_halves(start, warps)
            model = sums.of("wgmma", form.kinds[0], form.depth, form.half) if sums else None
            product = warpgroup_product(view, arena, form, a, b, warps, model, start)
            accumulators = list(product) if model else add_single(product, start)
            if form.half:
                accumulators = join_halves(accumulators)
            at = end
        return list(accumulators or ())


def _rows_of(values: Any, keep: Array) -> list[Any]:
    """Register values of the warps of the warpgroups that ``keep`` selects."""
    rows = np.repeat(keep, 4)
    return [v[rows] if v.ndim and v.shape[0] == len(rows) else v for v in values]
