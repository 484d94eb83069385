"""Analysis of a spec: which tiles its mask reaches and fills, and the score's derivative.

``analyse(spec)`` returns frozen values of sympy expressions, which do not depend on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.intervals import Interval, WalkedAxis, full, reach, row_interval
from flashgen.spec.analysis.invariants import Level, LeveledCode, leveled
from flashgen.spec.analysis.mask import MaskAnalysis, analyse_mask, classify
from flashgen.spec.analysis.score import ScoreAnalysis, analyse_score, derivative, kind_of_sum
from flashgen.spec.analysis.sharing import CodeBlock, is_costly, share, share_evaluated
from flashgen.spec.analysis.tile_classes import may, must
from flashgen.spec.analysis.windows import Window, WindowAxis, window_of
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


__all__ = [
    "Analysis",
    "CodeBlock",
    "Interval",
    "Level",
    "LeveledCode",
    "MaskAnalysis",
    "ScoreAnalysis",
    "WalkedAxis",
    "Window",
    "WindowAxis",
    "analyse",
    "analyse_mask",
    "analyse_score",
    "classify",
    "derivative",
    "evaluate",
    "full",
    "is_costly",
    "kind_of_sum",
    "leveled",
    "may",
    "must",
    "reach",
    "row_interval",
    "share",
    "share_evaluated",
    "window_of",
]
