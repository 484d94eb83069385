"""How the kernel walks the key tiles, from the mask's analysis; and how it applies the score.

The choices, each by what the analysis could prove:

- ``tile_reach``: where the loop starts and ends. Without bounds it walks every tile.
- ``tile_may``: asked for each tile before it is loaded, when the bounds are not exact.
- ``tile_full`` or ``tile_must``: which tiles skip the mask; the range where it is exact.
- ``row_keys`` or ``mask_mod``: how a mixed tile is masked; one range per row where the mask is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from flashgen import expr as fx
from flashgen.render.functions import SpecFunction, SpecFunctions

IN_BOUNDS = "k_start + BLOCK_K <= p.seq_k"


@dataclass(frozen=True)
class Walk:
    """Fields of the template: C++ of the kernel; None means that the step is not taken."""

    functions: tuple[SpecFunction, ...]
    reach: str | None
    full: str | None
    may: str | None
    full_tile: str
    row: str | None
    row_outside: str
    row_has_lo: bool
    mask: str | None
    uses_q: bool
    uses_k: bool
    uses_q_lo: bool
    uses_q_hi: bool
    last_tile_first: bool


def walk_of(make: SpecFunctions) -> Walk:
    mask = make.mask
    bounded = mask.reach.lo is not None or mask.reach.hi is not None
    reach = make.tile_reach() if bounded else None
    may = None if mask.reach_exact else make.tile_may()
    full, must = None, None
    if not mask.always:
        if mask.full is not None and mask.full_exact:
            full = make.tile_full()
        else:
            must = make.tile_must()
    by_row = mask.always or mask.row is not None
    element = make.row_keys() if by_row else make.mask_mod()
    functions = tuple(f for f in (element, reach, full, may, must) if f is not None)
    tile_uses = set().union(*(f.uses for f in (reach, full, may, must) if f is not None))
    has_lo = by_row and mask.row is not None and mask.row.lo is not None
    outside = "8 * n + e >= hi"
    if has_lo:
        outside = f"8 * n + e < lo || {outside}"
    return Walk(
        functions=functions,
        reach=reach.call() if reach else None,
        full=full.call() if full else None,
        may=may.call() if may else None,
        full_tile=_full_tile(full, must),
        row=element.call() if by_row else None,
        row_outside=outside,
        row_has_lo=has_lo,
        mask=None if by_row else element.call(),
        uses_q=fx.Q in element.uses,
        uses_k=fx.K in element.uses,
        uses_q_lo=fx.Q_LO in tile_uses,
        uses_q_hi=fx.Q_HI in tile_uses,
        last_tile_first=_grows_with_q(mask.reach.hi) and not _grows_with_q(mask.reach.lo),
    )


def _full_tile(full: SpecFunction | None, must: SpecFunction | None) -> str:
    if full is not None:
        return "full.lo <= k_start && k_start + BLOCK_K <= full.hi"
    if must is not None:
        return f"{IN_BOUNDS} && {must.call()}"
    return IN_BOUNDS


def _grows_with_q(end: sympy.Expr | None) -> bool:
    return end is not None and bool(end.free_symbols & {fx.Q_LO, fx.Q_HI})


@dataclass(frozen=True)
class ScoreCode:
    """The score function's part of the main loop; ``call`` is None for the identity."""

    functions: tuple[SpecFunction, ...]
    call: str | None
    uses_q: bool
    uses_k: bool

    @staticmethod
    def of(make: SpecFunctions) -> ScoreCode:
        if make.score.identity:
            return ScoreCode((), None, False, False)
        function = make.score_mod()
        call = function.call(score="s[g][n][e] * p.scale")
        return ScoreCode((function,), call, fx.Q in function.uses, fx.K in function.uses)
