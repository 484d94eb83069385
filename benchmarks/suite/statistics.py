"""Quantiles of a sample of times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: the 20th, 50th and 80th percentile of `samples` samples."""

    p20: float
    p50: float
    p80: float
    samples: int


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of an ascending sample lies; linear between neighbours.

    Raises:
        ValueError: the sample is empty.
    """
    if not ordered:
        raise ValueError("an empty sample has no quantiles")
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def timing_of(milliseconds: Sequence[float]) -> Timing:
    ordered = sorted(milliseconds)
    return Timing(*(quantile(ordered, share) for share in (0.2, 0.5, 0.8)), len(ordered))
