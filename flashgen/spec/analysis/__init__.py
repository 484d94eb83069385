"""Analysis of a spec: which tiles its mask reaches and fills, and the score's derivative.

``analyse(spec)`` returns frozen values of sympy expressions, which do not depend on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.spec.analysis.intervals import WalkedAxis
from flashgen.spec.analysis.mask import MaskAnalysis, analyse_mask
from flashgen.spec.analysis.score import ScoreAnalysis, analyse_score
from flashgen.spec.language.spec import AttentionSpec


@dataclass(frozen=True)
class Analysis:
    """The analysis of a spec's mask and score."""

    mask: MaskAnalysis
    score: ScoreAnalysis


def analyse(spec: AttentionSpec, walk: WalkedAxis | None = None) -> Analysis:
    """The analysis of ``spec`` for the later stages; ``walk`` as in `analyse_mask`."""
    learned = {tensor.symbol for tensor in spec.tensors if tensor.grad}
    return Analysis(analyse_mask(spec.mask, walk), analyse_score(spec.score, learned))
