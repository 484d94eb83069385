"""What flashgen understands of a spec: reach and fullness of tiles, derivative, shared code.

``analyse(spec)`` gives frozen values of sympy expressions; nothing here knows of hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sympy

from ..expr import K_HI, K_LO, Q_HI, Q_LO, Extreme, TensorSymbol
from ..expr.limits import limits
from ..spec import AttentionSpec
from .evaluate import evaluate
from .extremes import SPAN
from .intervals import FAR, Interval, Walk, full, reach, row_interval
from .score import Block, ScoreAnalysis, analyse_score, derivative, kind_of_sum, share
from .tiles import may, must


@dataclass(frozen=True)
class MaskAnalysis:
    """What is known of a mask, as conditions and bounds that the kernel evaluates.

    Attributes:
        expr: the mask.
        always: it is true everywhere.
        reach: of Q_LO, Q_HI: contains every k that has a true element with some q of the tile.
        reach_exact: every k in reach has one, so no tile inside it is empty.
        full: of Q_LO, Q_HI: every k in it is true for every q of the tile; None: no closed form.
        full_exact: every such k is in it, so no tile that leaves it is full.
        may: of all corners: false means that the tile is empty.
        must: of all corners: true means that the tile is full.
        row: of Q: the mask is true for exactly the k in it; None when no interval says it.
    """

    expr: sympy.Basic
    always: bool
    reach: Interval
    reach_exact: bool
    full: Interval | None
    full_exact: bool
    may: sympy.Basic
    must: sympy.Basic
    row: Interval | None

    @property
    def growth(self) -> int:
        """1 where later tiles reach more than earlier ones, -1 where less, 0 where both ends move.

        0 also where no bound depends on the tile: as far as the bounds say, all are alike.
        """
        corners = {Q_LO, Q_HI, K_LO, K_HI}
        lo, hi = (
            end is not None and bool(end.free_symbols & corners)
            for end in (self.reach.lo, self.reach.hi)
        )
        return hi - lo

    @property
    def summarised(self) -> tuple[tuple[TensorSymbol, int], ...]:
        """The tensors, each with an axis, of whose ranges the extremes are asked for."""
        ends = (
            end for i in (self.reach, self.full) if i for end in (i.lo, i.hi) if end is not None
        )
        asked = {
            (extreme.tensor, extreme.axis)
            for expr in (self.may, self.must, *ends)
            for extreme in expr.atoms(Extreme)
        }
        return tuple(sorted(asked, key=lambda each: (each[0].name, each[1])))


@dataclass(frozen=True)
class Analysis:
    """The mask's and the score's analysis."""

    mask: MaskAnalysis
    score: ScoreAnalysis


def analyse(spec: AttentionSpec, walk: Walk | None = None) -> Analysis:
    """All that the later stages need to know of ``spec``; ``walk`` as in `analyse_mask`."""
    learned = {tensor.symbol for tensor in spec.tensors if tensor.grad}
    return Analysis(analyse_mask(spec.mask, walk), analyse_score(spec.score, learned))


def analyse_mask(mask: sympy.Basic, walk: Walk | None = None) -> MaskAnalysis:
    """The analysis of one mask; ``Walk(Q)`` bounds the queries that a tile of keys reaches."""
    walk = walk or Walk()
    reached, reach_exact = reach(mask, walk)
    filled, full_exact = full(mask, walk)
    return MaskAnalysis(
        expr=mask,
        always=mask == sympy.true,
        reach=reached,
        reach_exact=reach_exact,
        full=filled,
        full_exact=full_exact,
        may=may(mask),
        must=must(mask),
        row=row_interval(mask, walk),
    )


Kind = Literal["empty", "full", "mixed"]


def classify(
    mask: MaskAnalysis,
    env: Mapping[sympy.Symbol, Any],
    q_range: tuple[int, int],
    k_range: tuple[int, int],
) -> Kind:
    """The class of one tile.

    Args:
        env: values of b, h, the sizes, scalars and tensors (numpy arrays) that the mask uses.
        q_range, k_range: first and last global position, both inclusive.
    """
    corners = {Q_LO: q_range[0], Q_HI: q_range[1], K_LO: k_range[0], K_HI: k_range[1]}
    values = {**env, **corners}
    if not evaluate(mask.may, values):
        return "empty"
    return "full" if evaluate(mask.must, values) else "mixed"


__all__ = [
    "FAR",
    "SPAN",
    "Analysis",
    "Block",
    "Interval",
    "Kind",
    "MaskAnalysis",
    "ScoreAnalysis",
    "Walk",
    "analyse",
    "analyse_mask",
    "analyse_score",
    "classify",
    "derivative",
    "evaluate",
    "full",
    "kind_of_sum",
    "limits",
    "may",
    "must",
    "reach",
    "row_interval",
    "share",
]
