"""The analysis of a mask: bounds and conditions that classify tiles."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from flashgen.spec.analysis.intervals import Interval, WalkedAxis, full, reach, row_interval
from flashgen.spec.analysis.tile_classes import may, must
from flashgen.spec.language.lets import atoms_of
from flashgen.spec.language.symbols import K_HI, K_LO, Q_HI, Q_LO
from flashgen.spec.language.tensor_elements import Extreme, TensorSymbol


@dataclass(frozen=True)
class MaskAnalysis:
    """Conditions and bounds of a mask's tiles, which kernels evaluate.

    Attributes:
        expr: the mask.
        always: whether the mask is true everywhere.
        reach: an interval in terms of Q_LO and Q_HI that contains every k whose mask is true for
            some q of the tile.
        reach_exact: whether every k in ``reach`` is such a k, so that no tile inside is empty.
        full: an interval in terms of Q_LO and Q_HI whose k are true for every q of the tile; None
            if there is no closed form.
        full_exact: whether ``full`` contains all such k, so that no tile beyond it is full.
        may: a condition on the four corners; if it is false, the tile is empty.
        must: a condition on the four corners; if it is true, the tile is full.
        row: an interval in terms of Q that is exactly the k whose mask is true; None if the mask of
            a row is not an interval.
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
        """1 if later tiles reach more positions, -1 if they reach fewer, 0 if both ends move.

        It is also 0 if no bound depends on the tile.
        """
        corners = {Q_LO, Q_HI, K_LO, K_HI}
        lo, hi = (
            end is not None and bool(end.free_symbols & corners)
            for end in (self.reach.lo, self.reach.hi)
        )
        return hi - lo

    @property
    def reaches_further(self) -> bool:
        """Whether the reach of a later tile ends later: a bound rises with the last position of the
        tile alone, and falls with the first one."""
        ends = self.reach.hi.free_symbols if self.reach.hi is not None else set()
        return bool(ends & {Q_HI, K_HI}) and not ends & {Q_LO, K_LO}

    @property
    def bounded(self) -> bool:
        """Whether the mask has bounds, and these alone decide which tiles are visited."""
        return self.reach_exact and (self.reach.lo is not None or self.reach.hi is not None)

    @property
    def minmax_tables(self) -> tuple[tuple[TensorSymbol, int], ...]:
        """The min/max tables that the conditions and bounds read: a tensor and an axis each."""
        ends = (
            end for i in (self.reach, self.full) if i for end in (i.lo, i.hi) if end is not None
        )
        read = {
            (extreme.tensor, extreme.axis)
            for expr in (self.may, self.must, *ends)
            for extreme in atoms_of(expr, Extreme)
        }
        return tuple(sorted(read, key=lambda table: (table[0].name, table[1])))


def analyse_mask(mask: sympy.Basic, walk: WalkedAxis | None = None) -> MaskAnalysis:
    """The analysis of one mask, for a walk along ``walk``: keys by default."""
    walk = walk or WalkedAxis()
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
