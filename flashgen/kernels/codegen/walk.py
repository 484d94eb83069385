"""How a kernel walks tiles, from the mask's analysis, and how it applies the score.

Each choice depends on what the analysis can prove:

- ``tile_reach``: the tiles at which the loop starts and ends. Without bounds it walks every tile.
- ``next_live_tile``: the next tile to load, by ``tile_may``, where the bounds are not exact; with a
  block layout ``next_listed_tile``, or ``next_common_tile`` by both.
- ``tile_full`` or ``tile_must``: the tiles that skip the mask; a range where it has a closed form.
- ``row_keys`` (``key_queries``) or ``mask_mod``: how a mixed tile is masked, in `masking`.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from flashgen.kernels.codegen.functions import (
    GATHERED_KEYS,
    GATHERED_QUERIES,
    SpecFunctions,
)
from flashgen.kernels.codegen.masking import MaskCode, mask_code
from flashgen.kernels.codegen.shared_values import FunctionInParts
from flashgen.kernels.codegen.sparse import LayoutFunctions
from flashgen.kernels.codegen.spec_function import SpecFunction
from flashgen.kernels.planner import Plan
from flashgen.spec.analysis.folding import FoldedScore
from flashgen.spec.analysis.tangents import TangentAnalysis
from flashgen.spec.language.symbols import DISTANCE, PRODUCT, H, Q

NEXT_LIVE = "The mask's bounds are not exact: each tile is classified before it is loaded."
NEXT_LISTED = "Within these bounds, only tiles that the block layout lists are loaded."


@dataclass(frozen=True, kw_only=True)
class WalkCode(MaskCode):
    """Template fields: C++ of the steps of a walk; None where the kernel omits the step."""

    functions: tuple[SpecFunction, ...]
    counts: str
    reach: str | None
    full: str | None
    next: str | None
    next_why: str
    full_tile: str
    by_head: bool  # reach, full or may depend on the head
    uneven: bool  # by the bounds of the walk, owned tiles have different numbers of tiles to walk
    last_tile_first: bool  # later owned tiles have more tiles to walk
    reaches_further: bool  # the walks of later owned tiles end later
    keeps: bool  # a search keeps its results for 32 tiles
    found_full: str | None  # what its warp tests together of a tile that it found: own_full
    part: str | None  # which of the blocks that some rows and columns touch are live
    in_layout: str | None  # whether the layout keeps a score, where rows of a part differ


@dataclass(frozen=True)
class _TileTests:
    """The functions that classify tiles by the mask; None where the kernel needs no such function.

    Attributes:
        live: the search for a tile for which ``may`` is true.
        keeps: whether the search keeps its results for 32 tiles, in registers of the producer.
    """

    reach: SpecFunction | None
    full: SpecFunction | None
    may: SpecFunction | None
    must: SpecFunction | None
    live: SpecFunction | None
    keeps: bool

    @staticmethod
    def create(functions: SpecFunctions, plan: Plan) -> _TileTests:
        mask = functions.mask
        bounded = mask.reach.lo is not None or mask.reach.hi is not None
        reach = functions.tile_reach() if bounded else None
        may = None if mask.reach_exact else functions.tile_may()
        full, must, live = None, None, None
        if mask.full is not None and mask.full_exact and not mask.always:
            full = functions.tile_full()
        elif mask.must != sympy.false and not mask.always:
            must = functions.tile_must()
        keeps = may is not None and plan.producer_registers > 0
        if may is not None:
            live = functions.next_live_tile(may, must, keeps=keeps)
        return _TileTests(reach, full, may, must, live, keeps)

    @property
    def functions(self) -> tuple[SpecFunction, ...]:
        """The functions of single tiles."""
        tests = (self.reach, self.full, self.may, self.must)
        return tuple(function for function in tests if function is not None)

    def call_of_must(self, **renamed: str) -> str | None:
        """C++ of ``must`` for a tile, or of its result that the search has kept."""
        if self.must is None:
            return None
        return (
            f"known.is_full({renamed.get('tile', 'tile')})"
            if self.keeps
            else self.must.call(**renamed)
        )


def walk_of(functions: SpecFunctions, plan: Plan, **renamed: str) -> WalkCode:
    """The walk of a kernel. ``renamed``: the kernel's names of the functions' h and tile."""
    mask, tests = functions.mask, _TileTests.create(functions, plan)
    layout = LayoutFunctions.create(functions, plan)
    visit = layout.next_tile(tests.live) if layout else tests.live
    # Of a gathered tile, the layout is tested part by part, else score by score.
    in_parts, by_score = (layout, None) if plan.gathers else (None, layout)
    masking, mask_functions = mask_code(functions, plan, by_score)
    part = in_parts.part() if in_parts else None
    in_layout = in_parts.element(None) if in_parts else None
    full_by_mask, full_by_layout = tests.call_of_must(**renamed), None
    if by_score and (mask.always or tests.full or tests.must):
        full_by_layout = by_score.full().call(**renamed)
    found_full = None
    if plan.records and (full_by_mask or full_by_layout):
        found_full = " && ".join(filter(None, (full_by_mask, full_by_layout)))
        full_by_mask, full_by_layout = "own_full", None
    by_mask = _full_tile(functions, tests.full, full_by_mask)
    shared_values = functions.tile_values if tests.may or tests.must else ()
    return WalkCode(
        **vars(masking),
        functions=(
            *mask_functions[:-1],
            *shared_values,
            *mask_functions[-1:],
            *tests.functions,
            *((tests.live,) if tests.live else ()),
            *(layout.functions if layout else ()),
        ),
        counts=functions.direction.counts,
        reach=tests.reach.call(**renamed) if tests.reach else None,
        full=tests.full.call(**renamed) if tests.full else None,
        next=visit.call(**renamed) if visit else None,
        next_why=NEXT_LISTED if layout else NEXT_LIVE,
        full_tile=f"{by_mask}\n        && {full_by_layout}" if full_by_layout else by_mask,
        by_head=any(H in function.uses for function in tests.functions),
        uneven=mask.growth != 0,
        last_tile_first=mask.growth > 0,
        reaches_further=mask.reaches_further,
        keeps=tests.keeps,
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
