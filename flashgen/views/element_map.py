"""A part of a mask, score by score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.views.drawing import Drawing, Grid, LegendEntry, percent
from flashgen.views.shown import Shown

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False, repr=False)
class ElementMap(Shown):
    """The scores of a few tiles: which of them the mask and the block layout keep.

    Attributes:
        title: the name of the spec and the place of the tiles.
        elements: bool [queries, keys], true where the score is kept.
        queries, keys: the first and the last global position, both inclusive.
    """

    title: str
    elements: Array
    queries: tuple[int, int]
    keys: tuple[int, int]

    def drawing(self) -> Drawing:
        """What the picture shows."""
        cells = self.elements.astype(np.uint8)
        kept, total = int(cells.sum()), cells.size
        shares = [f"{n:,} ({percent(n, total)})" for n in (total - kept, kept)]
        return Drawing(
            title=self.title,
            lines=(f"{cells.shape[0]:,} queries x {cells.shape[1]:,} keys, score by score",),
            grids=(Grid("", cells, self.queries, self.keys),),
            legend=(
                LegendEntry(0, "skip", "·", "masked", shares[0]),
                LegendEntry(1, "full", "█", "kept", shares[1]),
            ),
            cell="score",
            partly=("full", "▒"),
        )
