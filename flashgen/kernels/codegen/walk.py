"""How a kernel walks tiles, from the mask's analysis, and how it applies the score.

Each choice depends on what the analysis can prove:

- ``tile_reach``: the tiles at which the loop starts and ends. Without bounds it walks every tile.
- ``next_live_tile``: the next tile to load, by ``tile_may``, where the bounds are not exact; with a
  block layout ``next_listed_tile``, or ``next_common_tile`` by both.
- ``tile_full`` or ``tile_must``: the tiles that skip the mask; a range where it has a closed form.
- ``row_keys`` (``key_queries``) or ``mask_mod``: how a mixed tile is masked; by one range per row
  where the kept positions of a row are a range and there is no block layout. With a layout, a lane
  has the blocks of each of its rows as bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from flashgen.kernels.codegen.functions import (
    GATHERED_KEYS,
    GATHERED_QUERIES,
    KEYS,
    SpecFunctions,
)
from flashgen.kernels.codegen.shared_values import FunctionInParts
from flashgen.kernels.codegen.sparse import LayoutFunctions, blocks_are_bits
from flashgen.kernels.codegen.spec_function import SpecFunction
from flashgen.kernels.planner import Plan
from flashgen.spec.analysis.diagonals import (
    has_condition_of,
    is_costly_for_scores,
    is_of_distance,
)
from flashgen.spec.analysis.folding import FoldedScore
from flashgen.spec.analysis.intervals import EVERYTHING, row_interval
from flashgen.spec.analysis.tangents import TangentAnalysis
from flashgen.spec.language.symbols import DISTANCE, PRODUCT, H, Q

NEXT_LIVE = "The mask's bounds are not exact: each tile is classified before it is loaded."
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
    row_has_hi: bool
    row_slides: bool  # the range of a row 8 further is 8 further
    row_has_q: bool
    mask: str | None
    mask_alone: str | None  # the mask with the calls for the values that scores share
    mask_parts: FunctionInParts | None  # the mask's function, with the values that scores share
    mask_costly: bool  # each score reads memory, or divides a position of one row or column
    exchanges: bool  # lanes compute the shared values of some columns each, and exchange them
    tests_rows: bool  # several rows have conditions of their own, beside their scores' conditions
    by_distance: bool  # the mask depends on q - k alone, and divides it
    blocks_by_row: bool  # a lane has the blocks of the layout in its rows as bits
    by_head: bool  # reach, full or may depend on the head
    uneven: bool  # by the bounds of the walk, owned tiles have different numbers of tiles to walk
    last_tile_first: bool  # later owned tiles have more tiles to walk
    reaches_further: bool  # the walks of later owned tiles end later
    keeps: bool = False  # a search keeps its results for 32 tiles
    found_full: str | None = None  # what its warp tests together of a tile that it found: own_full
    part: str | None = None  # which of the blocks that some rows and columns touch are live
    in_layout: str | None = None  # whether the layout keeps a score, where rows of a part differ


def walk_of(functions: SpecFunctions, plan: Plan, **renamed: str) -> WalkCode:
    """The walk of a kernel. ``renamed``: the kernel's names of the functions' h and tile."""
    mask = functions.mask
    bounded = mask.reach.lo is not None or mask.reach.hi is not None
    reach = functions.tile_reach() if bounded else None
    may = None if mask.reach_exact else functions.tile_may()
    full, must = None, None
    if not mask.always:
        if mask.full is not None and mask.full_exact:
            full = functions.tile_full()
        elif mask.must != sympy.false:
            must = functions.tile_must()
    layout = LayoutFunctions.create(functions, plan)
    in_parts = layout if plan.gathers else None
    by_score = None if in_parts else layout
    # Where rows of scores are not what the kernel owns, the mask is solved along the other axis.
    along = KEYS if plan.in_passes else functions.direction
    row = row_interval(mask.expr, along.walk) if plan.in_passes else mask.row
    row_range = None if by_score else EVERYTHING if mask.always else row
    by_row = row_range is not None
    by_element = None if by_row or mask.always else functions.mask_mod()
    slides = plan.masks_pairs and row_range is not None and row_range.slides(along.walk.fixed)
    masked = by_element.function if by_element else None
    if row_range is not None:
        masked = functions.row(along, row_range)
    keeps = may is not None and plan.producer_registers > 0  # which hold what was found
    live = None
    if may:
        live = functions.next_live_tile(may, must, keeps=keeps)
    visit = layout.next_tile(live) if layout else live
    costly = by_element is not None and is_costly_for_scores(mask.expr)
    columns = "k" if plan.rows_are_queries else "q"
    exchanged = by_score is None and by_element is not None and bool(by_element.values_of(columns))
    in_rows = None
    if by_score is not None and blocks_are_bits(functions.spec, mask.expr, plan):
        in_rows = by_score.by_rows(by_element, masked, plan)
    element = in_rows.function if in_rows else masked
    if by_score is not None and in_rows is None:
        element = by_score.element(masked)
    part = in_parts.part() if in_parts else None
    in_layout = in_parts.element(None) if in_parts else None
    full_by_mask = f"known.is_full({renamed.get('tile', 'tile')})" if keeps else None
    full_by_mask = (full_by_mask or must.call(**renamed)) if must else None
    full_by_layout = None
    if by_score and (mask.always or full or must):
        full_by_layout = by_score.full().call(**renamed)
    found_full = None
    if plan.records and (full_by_mask or full_by_layout):
        found_full = " && ".join(filter(None, (full_by_mask, full_by_layout)))
        full_by_mask, full_by_layout = "own_full", None
    by_mask = _full_tile(functions, full, full_by_mask)
    assert element is not None, "without a layout there is a mask or a row of all keys"
    emitted: tuple[SpecFunction, ...] = by_element.functions[:-1] if by_element else ()
    if may or must:
        emitted += functions.tile_values
    emitted += tuple(f for f in (masked, reach, full, may, must, live) if f is not None)
    if layout is not None:
        emitted += layout.functions
    tile_functions = [f for f in (reach, full, may, must) if f is not None]
    has_lo = row_range is not None and row_range.lo is not None
    return WalkCode(
        functions=emitted,
        counts=functions.direction.counts,
        reach=reach.call(**renamed) if reach else None,
        full=full.call(**renamed) if full else None,
        next=visit.call(**renamed) if visit else None,
        next_why=NEXT_LISTED if layout else NEXT_LIVE,
        full_tile=f"{by_mask}\n        && {full_by_layout}" if full_by_layout else by_mask,
        row=element.call() if by_row else None,
        row_outside=("8 * n + e < lo || " if has_lo else "") + "8 * n + e >= hi",
        row_has_lo=has_lo,
        row_has_hi=row_range is not None and row_range.hi is not None,
        row_slides=slides,
        row_has_q=by_row and Q in element.uses,
        mask=None if by_row else element.call(),
        mask_alone=None if by_row else element.call(**_calls(by_element)),
        mask_parts=in_rows or by_element,
        mask_costly=costly or (by_score is not None and in_rows is None),
        tests_rows=plan.row_groups > 1 and exchanged and has_condition_of(Q, mask.expr),
        exchanges=exchanged,
        by_distance=by_element is not None and by_score is None and is_of_distance(mask.expr),
        blocks_by_row=in_rows is not None,
        by_head=any(H in function.uses for function in tile_functions),
        uneven=mask.growth != 0,
        last_tile_first=mask.growth > 0,
        reaches_further=mask.reaches_further,
        keeps=keeps,
        found_full=found_full,
        part=part.call(**renamed, **_part_ends(functions)) if part else None,
        in_layout=in_layout.call() if in_layout else None,
    )


def _part_ends(functions: SpecFunctions) -> dict[str, str]:
    """The ends of a part of a tile: rows and columns of scores in the accumulators."""
    rows, columns = ("k", "q") if functions.direction.owns_keys else ("q", "k")
    return {
        f"{axis}_{end}": f"{name}_{end}"
        for axis, name in ((rows, "rows"), (columns, "columns"))
        for end in ("lo", "hi")
    }


def _calls(parts: FunctionInParts | None) -> dict[str, str]:
    """The calls for the values of a query and of a key, by the variables that hold the values."""
    values = (parts.query, parts.key) if parts else ()
    return {shared.name: shared.call for shared in values if shared is not None}


def _full_tile(functions: SpecFunctions, full: SpecFunction | None, must: str | None) -> str:
    """C++ of the condition that every element of a tile exists and is kept by the mask."""
    if not functions.mask.always and full is None and must is None:
        return "false"  # no tile can be proven full
    if not functions.direction.owns_keys:
        # Queries past the end need no mask: their rows are not stored. Keys in full exist.
        keys = "BOX_K" if functions.direction is GATHERED_KEYS else "BLOCK_K"
        conditions = [] if full else [f"k_start + {keys} <= p.seq_k"]
        inside = f"full.lo <= k_start && k_start + {keys} <= full.hi"
    else:
        conditions = ["whole"]
        queries = "BOX_Q" if functions.direction is GATHERED_QUERIES else "BLOCK_Q"
        inside = f"full.lo <= q_start && q_start + {queries} <= full.hi"
    if full is not None:
        conditions.append(inside)
    if must is not None:
        conditions.append(must)
    return " && ".join(conditions)


@dataclass(frozen=True)
class ScoreCode:
    """The score function's part of the main loop.

    Attributes:
        call: C++ of the call; None for the identity.
        unit: C++ of the factor from the results of the call to the exponents of e.
        folded: whether the call takes the element of Q K^T, which is not multiplied by the scale.
        distance: whether the call takes k - q as a float.
        shift: C++ of the term that the forward pass adds to LSE, such as " + 3.0f".
        parts: the function, with the values that its calls share.
    """

    functions: tuple[SpecFunction, ...]
    call: str | None
    uses_q: bool
    parts: FunctionInParts | None = None
    unit: str = "p.scale"
    folded: bool = False
    shift: str = ""
    distance: bool = False

    @staticmethod
    def create(
        functions: SpecFunctions,
        folded: FoldedScore | None,
        *,
        slope: bool = False,
        element: str = "s[g][n][e]",
        head: str = "h",
        scaled: bool = False,
    ) -> ScoreCode:
        """The score's C++ for ``element`` of Q K^T at ``head``; ``slope`` adds the derivative.

        ``folded``: the score function with its factors folded; None where they are not.
        ``scaled``: whether the element has been multiplied by the scale already, for a score
        function whose factors are not folded.
        """
        if functions.score.identity and functions.spec.is_softmax:
            return ScoreCode((), None, uses_q=False)
        unit, shift = _unit_and_shift(functions, folded) if folded else ("1.0f", "")
        if folded and folded.value == PRODUCT and not slope:
            return ScoreCode((), None, uses_q=False, unit=unit, shift=shift)
        # A row of a served call has the same bits in every kernel of its spec.
        functions.printer.rounds_products = served = functions.spec.is_served
        functions.printer.score_is_product = not scaled and not served
        parts = functions.score_mod_and_slope(folded) if slope else functions.score_mod(folded)
        product = f"__fmul_rn({element}, p.scale)" if served else f"{element} * p.scale"
        score_argument = element if scaled else product
        call = parts.function.call(score=score_argument, product=element, h=head)
        uses_q = any(Q in function.uses for function in parts.functions)
        return ScoreCode(
            parts.functions,
            call,
            uses_q,
            parts.called_with(h=head),
            unit,
            folded=folded is not None,
            shift=shift,
            distance=DISTANCE in parts.function.uses,
        )

    @staticmethod
    def with_tangent(functions: SpecFunctions, tangents: TangentAnalysis) -> ScoreCode:
        """The score's C++ with its tangent, of variables with the names of the parameters."""
        functions.printer.score_is_product = True
        parts = functions.score_mod_and_tangent(tangents)
        call = parts.function.call(h="h")
        uses_q = any(Q in function.uses for function in parts.functions)
        return ScoreCode(parts.functions, call, uses_q, parts.called_with(h="h"), "1.0f")


# With a scale outside these bounds all scores are equal, or one of them is above all others.
_SCALE = "fmaxf(p.scale, 0x1p-96f)"
_SCALE_SQUARED = "bounded(p.scale * p.scale)"


def _unit_and_shift(functions: SpecFunctions, folded: FoldedScore) -> tuple[str, str]:
    """C++ of the unit of a folded score function, and of the term that is added to LSE."""
    scale = ("", _SCALE if folded.divides else "p.scale", _SCALE_SQUARED)[folded.degree]
    factor = functions.printer.float(folded.factor) if folded.factor != 1 or not scale else ""
    shift = f" + {functions.printer.float(folded.shift)}" if folded.shift != 0 else ""
    return " * ".join(filter(None, (factor, scale))), shift
