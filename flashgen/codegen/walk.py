"""How a kernel walks tiles, from the mask's analysis, and how it applies the score.

Each choice depends on what the analysis can prove:

- ``tile_reach``: the tiles at which the loop starts and ends. Without bounds it walks every tile.
- ``next_live_tile``: the next tile to load, by ``tile_may``, where the bounds are not exact; with a
  block layout ``next_listed_tile``, or ``next_common_tile`` by both.
- ``tile_full`` or ``tile_must``: the tiles that skip the mask; a range where it has a closed form.
- ``row_keys`` (``key_queries``) or ``mask_mod``: how a mixed tile is masked; by one range per row
  where the kept positions of a row are a range and there is no block layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from flashgen import language as fx
from flashgen.codegen.functions import KEYS, SpecFunction, SpecFunctions
from flashgen.codegen.sparse import LayoutFunctions

NEXT_LIVE = (
    "The bounds are not exact for this mask, so each tile is classified before it is loaded."
)
NEXT_LISTED = "Within these bounds, only tiles that the block layout lists are loaded."


@dataclass(frozen=True)
class WalkCode:
    """Template fields: C++ of the steps of a walk; None where the kernel omits the step."""

    functions: tuple[SpecFunction, ...]
    counts: str
    reach: str | None
    full: str | None
    next: str | None
    next_why: str
    full_tile: str
    row: str | None
    row_outside: str
    row_has_lo: bool
    mask: str | None
    mask_costly: bool  # the mask reads memory, or divides a position of one row or column
    uses_h: bool
    uses_q: bool
    uses_k: bool
    uses_lo: bool  # the first position of the tile that the block owns
    uses_hi: bool
    seeks_lo: bool  # the functions that find the walked tiles use that position
    seeks_hi: bool
    by_head: bool  # reach, full or may depend on the head
    uneven: bool  # by the bounds of the walk, owned tiles have different numbers of tiles to walk
    last_tile_first: bool  # later owned tiles have more tiles to walk


def walk_of(make: SpecFunctions, **renamed: str) -> WalkCode:
    """The walk of a kernel. ``renamed``: the kernel's names of the functions' h and tile."""
    mask, along = make.mask, make.direction
    bounded = mask.reach.lo is not None or mask.reach.hi is not None
    reach = make.tile_reach() if bounded else None
    may = None if mask.reach_exact else make.tile_may()
    full, must = None, None
    if not mask.always:
        if mask.full is not None and mask.full_exact:
            full = make.tile_full()
        elif mask.must != sympy.false:
            must = make.tile_must()
    layout = LayoutFunctions.of(make)
    by_row = layout is None and (mask.always or mask.row is not None)
    masked = None if mask.always and layout else make.row() if by_row else make.mask_mod()
    live = make.next_live_tile(may) if may else None
    visit = layout.next_tile(live) if layout else live
    element = layout.element(masked) if layout else masked
    assert element is not None, "without a layout there is a mask or a row of all keys"
    functions = tuple(f for f in (masked, reach, full, may, live, must) if f is not None)
    if layout is not None:
        functions += layout.functions
    tile_uses = set().union(*(f.uses for f in (reach, full, may, must) if f is not None))
    all_uses = tile_uses | (layout.uses if layout else set())
    seeks = set().union(*(f.uses for f in (reach, may) if f is not None))
    seeks |= layout.uses if layout else set()
    has_lo = by_row and mask.row is not None and mask.row.lo is not None
    outside = "8 * n + e >= hi"
    if has_lo:
        outside = f"8 * n + e < lo || {outside}"
    return WalkCode(
        functions=functions,
        counts=along.counts,
        reach=reach.call(**renamed) if reach else None,
        full=full.call(**renamed) if full else None,
        next=visit.call(**renamed) if visit else None,
        next_why=NEXT_LISTED if layout else NEXT_LIVE,
        full_tile=_full_tile(make, full, must, layout, renamed),
        row=element.call() if by_row else None,
        row_outside=outside,
        row_has_lo=has_lo,
        mask=None if by_row else element.call(),
        mask_costly=not by_row and (layout is not None or _is_costly(mask.expr)),
        uses_h=fx.H in element.uses,
        uses_q=fx.Q in element.uses,
        uses_k=fx.K in element.uses,
        uses_lo=along.owned_lo in all_uses,
        uses_hi=along.owned_hi in all_uses,
        seeks_lo=along.owned_lo in seeks,
        seeks_hi=along.owned_hi in seeks,
        by_head=fx.H in tile_uses,
        uneven=mask.growth != 0,
        last_tile_first=mask.growth > 0,
    )


def _is_costly(mask: sympy.Basic) -> bool:
    """Whether unrolled code would keep elements or quotients of every row and column."""
    quotients = mask.atoms(fx.FloorDiv, fx.FloorMod)
    return mask.has(fx.Element) or any(not {fx.Q, fx.K} <= e.free_symbols for e in quotients)


def _full_tile(
    make: SpecFunctions,
    full: SpecFunction | None,
    must: SpecFunction | None,
    layout: LayoutFunctions | None,
    renamed: dict[str, str],
) -> str:
    by_mask = _full_by_mask(make, full, must, renamed)
    if layout is None or by_mask == "false":
        return by_mask
    return f"{by_mask}\n        && {layout.full.call(**renamed)}"


def _full_by_mask(
    make: SpecFunctions,
    full: SpecFunction | None,
    must: SpecFunction | None,
    renamed: dict[str, str],
) -> str:
    if not make.mask.always and full is None and must is None:
        return "false"  # no tile can be proven full
    if make.direction is KEYS:
        # Queries past the end need no mask: their rows are not stored.
        keys = "k_start + BLOCK_K <= p.seq_k"
        if full is not None:
            return "full.lo <= k_start && k_start + BLOCK_K <= full.hi"
        return keys if must is None else f"{keys} && {must.call(**renamed)}"
    if full is not None:
        return "whole && full.lo <= q_start && q_start + BLOCK_Q <= full.hi"
    return "whole" if must is None else f"whole && {must.call(**renamed)}"


def owned_by_block(walk: WalkCode, parameter: str, *, persistent: bool) -> dict[str, str]:
    """C++ of a block's tile and head, from its number, in `planner.schedule`.

    Args:
        parameter: the name of the kernel's parameter.
        persistent: whether a block processes several work tiles, which then have the numbers.
    """
    number, numbers, head_group = "blockIdx.x", "gridDim.x", "blockIdx.y"
    bits = f"{parameter}.head_bits"
    if persistent:
        number, numbers, bits = "number", f"{parameter}.tiles_per_group", "bits"
        head_group = f"batch_head % {parameter}.head_groups"
    fields = {"block_number": number, "block_tile": number, "block_head": head_group}
    if walk.uneven:
        in_order = f"({numbers} - 1 - {number})" if walk.last_tile_first else number
        fields["block_tile"] = f"({in_order} >> {bits})"
        fields["block_head"] = f"{head_group} << {bits} | ({number} & ((1 << {bits}) - 1))"
    return fields


@dataclass(frozen=True)
class ScoreCode:
    """The score function's part of the main loop; ``call`` is None for the identity."""

    functions: tuple[SpecFunction, ...]
    call: str | None
    uses_h: bool
    uses_q: bool
    uses_k: bool

    @staticmethod
    def of(
        make: SpecFunctions,
        *,
        slope: bool = False,
        element: str = "s[g][n][e]",
        head: str = "h",
    ) -> ScoreCode:
        """The score's C++ for ``element`` of Q K^T at ``head``; ``slope`` adds the derivative."""
        if make.score.identity:
            return ScoreCode((), None, False, False, False)
        function = make.score_mod_and_slope() if slope else make.score_mod()
        call = function.call(score=f"{element} * p.scale", h=head)
        uses = (symbol in function.uses for symbol in (fx.H, fx.Q, fx.K))
        return ScoreCode((function,), call, *uses)
