"""The forward kernel: FlashAttention's Algorithm 1 in FlashAttention-2's loop order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from flashgen.analysis import Analysis
from flashgen.codegen.functions import SpecFunctions
from flashgen.codegen.kernel import KernelCode, kernel
from flashgen.codegen.maps import Maps
from flashgen.codegen.rows import rows_of
from flashgen.codegen.source import Source
from flashgen.codegen.walk import ScoreCode, WalkCode, walk_of
from flashgen.codegen.wgmma import products_of
from flashgen.language import LOWEST_SCORE
from flashgen.language.spec import AttentionSpec
from flashgen.planner import Plan
from flashgen.planner.models.panels_sm90 import panels_of

# Consumer warpgroups run in ping-pong up to this head dim. Beyond it a tile has so few keys that
# the barriers cost more than the alternation gains, as in FlashAttention-3's tile table.
PING_PONG_UP_TO = 128


def forward(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """The source of the forward kernel (FlashAttention, Algorithm 1, FlashAttention-2's loops).

    Raises:
        RenderError: the template uses a field that is missing.
    """
    functions = SpecFunctions(spec, analysis)
    walk = walk_of(functions)
    if plan.path == "sm_80":
        template, fields = _sm80(plan)
    else:
        template, fields = _sm90(plan, walk, packed=spec.packed)
    return kernel(
        template,
        spec,
        plan,
        KernelCode(functions, walk, ScoreCode.of(functions, head=rows_of(plan).head)),
        transposed=False,
        lowest=f"{LOWEST_SCORE}f".replace("+", ""),
        sink=spec.sink,
        range_bits=_range_bits(walk, plan),
        mask_loop=walk.mask_costly and plan.loops_over_masks,
        mask_outside=_mask_outside(walk),
        **fields,
    )


def _range_bits(walk: WalkCode, plan: Plan) -> str | None:
    """C++ of a bit mask of the columns outside a row's range; None where comparisons cost less.

    Comparing columns with a range takes one instruction per column and end of the range. A bit mask
    takes about eight instructions per row and eight per end, and the compiler then tests seven bits
    at a time (counted by benchmarks/instructions.py). A range that all rows share is compared once.
    """
    ends = 1 + walk.row_has_lo
    columns = plan.block_k // 4  # the columns of a row that one lane has
    if walk.row is None or not walk.uses_q or ends * columns <= 8 * (1 + ends):
        return None
    above = "bits_from(hi - first)"
    return f"{above} | ~bits_from(lo - first)" if walk.row_has_lo else above


def _mask_outside(walk: WalkCode) -> str:
    """C++ of the condition that a score is masked, in unrolled code.

    Without a branch around the mask, neighbouring scores share the values of their row or column.
    A costly mask stays behind a branch, because the values of all rows and columns would need too
    many registers.
    """
    if walk.mask_costly:
        return f"key >= p.seq_k || !{walk.mask}"
    return f"(key >= p.seq_k) | !{walk.mask}"


def _sm80(plan: Plan) -> tuple[str, dict[str, Any]]:
    """The template for mma.sync and its own fields: whether a head dim ends in half a step."""
    tails = {"qk_tail": plan.itemsize == 2 and plan.head_dim % 16 == 8}
    return "sm80/forward.cu.j2", tails | {"pv_tail": plan.head_dim_v % 16 == 8}


@dataclass(frozen=True)
class WarpRole:
    """The values of a work tile that the producer, or each consumer, of Hopper's kernel computes.

    Attributes:
        step: the number of the kernel's step that computes them.
        walk: the part of the walk that this role needs.
        maps: the tensor maps of its copies.
        copies: whether the role copies keys and values.
        finds_queries: whether the role needs the first query of the tile.
    """

    step: str
    walk: WalkCode
    maps: Maps
    copies: bool
    finds_queries: bool


def _roles(walk: WalkCode, *, packed: bool) -> dict[str, WarpRole]:
    """Both roles. The producer treats full tiles as others and finds the first tile in its loop."""
    seeks = dataclasses.replace(
        walk, full=None, next=None, uses_lo=walk.seeks_lo, uses_hi=walk.seeks_hi
    )
    finds_queries = packed or walk.seeks_lo or walk.seeks_hi
    return {
        "producer": WarpRole("2", seeks, Maps.of("kv"), True, finds_queries),
        "consumer": WarpRole("4", walk, Maps.of("qo"), False, True),
    }


def _sm90(plan: Plan, walk: WalkCode, *, packed: bool) -> tuple[str, dict[str, Any]]:
    """The template for TMA and wgmma, and its own fields: panels, registers, ping-pong."""
    shapes = (("multiply_rows", plan.block_k), ("multiply_columns", plan.head_dim_v))
    panel, panels = panels_of(plan.head_dim)
    panel_v, panels_v = panels_of(plan.head_dim_v)
    return "sm90/forward.cu.j2", {
        "panel": panel,
        "panels": panels,
        "panel_v": panel_v,
        "panels_v": panels_v,
        "products": products_of(plan, shapes),
        "producer_registers": plan.producer_registers,
        "consumer_registers": plan.registers,
        "ping_pong": max(plan.head_dim, plan.head_dim_v) <= PING_PONG_UP_TO,
        **_roles(walk, packed=packed),
    }
