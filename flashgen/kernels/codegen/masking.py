"""How a kernel masks the scores of a tile: by one range for each row, or score by score.

Rows are masked by a range where the positions that the mask keeps in a row are a range and no block
layout excludes scores. With a layout, a lane has the blocks of each of its rows as bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.kernels.codegen.functions import KEYS, SpecFunctions
from flashgen.kernels.codegen.shared_values import FunctionInParts
from flashgen.kernels.codegen.sparse import LayoutFunctions, blocks_are_bits
from flashgen.kernels.codegen.spec_function import SpecFunction
from flashgen.kernels.planner import Plan
from flashgen.spec.analysis.diagonals import (
    has_condition_of,
    is_costly_for_scores,
    is_of_distance,
)
from flashgen.spec.analysis.intervals import EVERYTHING, row_interval
from flashgen.spec.language.symbols import Q


@dataclass(frozen=True)
class MaskCode:
    """Template fields: C++ that masks the scores of a tile; None where the kernel omits it.

    Attributes:
        row: the call for the range that a row keeps; None where scores are masked one by one.
        row_outside: whether a column is outside the range.
        row_has_lo, row_has_hi: whether the range has this end.
        row_slides: whether the range of a row 8 further is 8 further.
        row_has_q: whether the range depends on the row.
        mask: the call of the mask of a score; None where rows are masked by a range.
        mask_alone: the same with the calls for the values that scores share.
        mask_parts: the mask's function, with the values that scores share.
        mask_costly: whether each score reads memory, or divides a position of one row or column.
        exchanges: whether lanes compute the shared values of some columns each, and exchange them.
        tests_rows: whether several rows have conditions of their own, beside those of their scores.
        by_distance: whether the mask depends on q - k alone, and divides it.
        blocks_by_row: whether a lane has the blocks of the layout in its rows as bits.
    """

    row: str | None
    row_outside: str
    row_has_lo: bool
    row_has_hi: bool
    row_slides: bool
    row_has_q: bool
    mask: str | None
    mask_alone: str | None
    mask_parts: FunctionInParts | None
    mask_costly: bool
    exchanges: bool
    tests_rows: bool
    by_distance: bool
    blocks_by_row: bool


def mask_code(
    functions: SpecFunctions, plan: Plan, layout: LayoutFunctions | None
) -> tuple[MaskCode, tuple[SpecFunction, ...]]:
    """The code that masks scores, and the mask's functions in the order in which they are emitted.

    Args:
        layout: the functions of the layout that excludes scores of a tile; it makes its own ones.
    """
    mask = functions.mask
    # Where rows of scores are not what the kernel owns, the mask is solved along the other axis.
    along = KEYS if plan.in_passes else functions.direction
    row = row_interval(mask.expr, along.walk) if plan.in_passes else mask.row
    row_range = None if layout else EVERYTHING if mask.always else row
    by_row = row_range is not None
    by_element = None if by_row or mask.always else functions.mask_mod()
    masked = by_element.function if by_element else None
    if row_range is not None:
        masked = functions.row(along, row_range)
    element, in_rows = masked, None
    if layout is not None and blocks_are_bits(functions.spec, mask.expr, plan):
        in_rows = layout.by_rows(by_element, masked, plan)
        element = in_rows.function
    elif layout is not None:
        element = layout.element(masked)
    assert element is not None, "without a layout there is a mask or a row of all keys"
    columns = "k" if plan.rows_are_queries else "q"
    exchanges = layout is None and by_element is not None and bool(by_element.values_of(columns))
    has_lo = row_range is not None and row_range.lo is not None
    code = MaskCode(
        row=element.call() if by_row else None,
        row_outside=("8 * n + e < lo || " if has_lo else "") + "8 * n + e >= hi",
        row_has_lo=has_lo,
        row_has_hi=row_range is not None and row_range.hi is not None,
        row_slides=plan.masks_pairs
        and row_range is not None
        and row_range.slides(along.walk.fixed),
        row_has_q=by_row and Q in element.uses,
        mask=None if by_row else element.call(),
        mask_alone=None if by_row else element.call(**_calls(by_element)),
        mask_parts=in_rows or by_element,
        mask_costly=(by_element is not None and is_costly_for_scores(mask.expr))
        or (layout is not None and in_rows is None),
        exchanges=exchanges,
        tests_rows=plan.row_groups > 1 and exchanges and has_condition_of(Q, mask.expr),
        by_distance=by_element is not None and layout is None and is_of_distance(mask.expr),
        blocks_by_row=in_rows is not None,
    )
    if by_element is not None:
        return code, by_element.functions
    return code, (masked,) if masked is not None else ()


def _calls(parts: FunctionInParts | None) -> dict[str, str]:
    """The calls for the values of a query and of a key, by the variables that hold the values."""
    values = (parts.query, parts.key) if parts else ()
    return {shared.name: shared.call for shared in values if shared is not None}
