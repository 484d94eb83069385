"""The programs of a spec: its mask, its score function and their derivatives on torch tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import sympy
import torch

from flashgen.calls.cpu.mods import compiled
from flashgen.calls.cpu.program import Program
from flashgen.spec.analysis import Analysis, analyse
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.language.spec import AttentionSpec


@dataclass(frozen=True)
class LearnedRead:
    """An element of a learned tensor that the score function reads.

    Attributes:
        tensor: index of the learned tensor.
        factor: ds'/d(element) where it is a number, else None.
    """

    tensor: int
    factor: float | None


@dataclass(frozen=True)
class SpecPrograms:
    """The programs of a spec.

    Attributes:
        mask, score: programs with one result; None for a mask (with the block layout) that is
            always true, and for a score function that is the identity.
        derivatives: computes s', ds'/ds where ``has_slope``, ds'/d(element) of each of ``uses``
            where it is not a number, and the indices of all of them; None without derivatives.
        has_slope: whether ds'/ds differs from 1.
        uses: elements of learned tensors that s' depends on.
    """

    analysis: Analysis
    mask: Program | None
    score: Program | None
    derivatives: Program | None
    has_slope: bool
    uses: tuple[LearnedRead, ...]

    @property
    def ignores_score(self) -> bool:
        return self.analysis.score.ignores_score

    @cached_property
    def decisive(self) -> frozenset[sympy.Symbol]:
        """The symbols on which the class of a tile depends, including its corners."""
        mask = self.analysis.mask
        return frozenset(mask.may.free_symbols | mask.must.free_symbols)


@lru_cache(maxsize=256)
def programs_of(spec: AttentionSpec, real: torch.dtype) -> SpecPrograms:
    """The programs of a spec, with real numbers computed in ``real``."""
    analysis = analyse(spec)
    same, slope = analysis.score.identity, analysis.score.derivative
    learned = [tensor.symbol for tensor in spec.tensors if tensor.grad]
    read = [pair for pair in analysis.score.learned if pair[1] != 0]
    results, uses = [spec.score], []
    if slope != 1:
        results.append(slope)
    for element, element_slope in read:
        number = element_slope.is_number and element_slope.is_finite
        factor = float(evaluate(element_slope, {})) if number else None
        uses.append(LearnedRead(learned.index(element.tensor), factor))
        if not number:
            results.append(element_slope)
    elements = tuple(element for element, _ in read)
    return SpecPrograms(
        analysis=analysis,
        mask=None if spec.keep == sympy.true else compiled((spec.keep,), real),
        score=None if same else compiled((spec.score,), real),
        derivatives=compiled(tuple(results), real, elements) if slope != 1 or uses else None,
        has_slope=slope != 1,
        uses=tuple(uses),
    )
