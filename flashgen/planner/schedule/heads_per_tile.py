"""The number of query heads that share a tile of the forward kernel.

The query heads of a group read the same K and V (grouped-query attention). A tile with rows of
several of them loads K and V once for all of these heads, and short query sequences (decoding,
speculative decoding) fill its rows, which would be mostly empty with the queries of one head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flashgen.language import H
from flashgen.language.spec import AttentionSpec
from flashgen.planner.kernel_plan import Plan
from flashgen.planner.models.fitted_common import HEADS_PER_TILE_GAIN
from flashgen.planner.search import obstacles_to_sharing


@dataclass(frozen=True)
class HeadsPerTile:
    """The choice for a call.

    Attributes:
        heads: query heads per tile.
        reason: the tiles that it saves, or why it is 1; "" where there was no alternative.
    """

    heads: int
    reason: str


def choose_heads(
    spec: AttentionSpec,
    plan: Plan,
    batch: int,
    heads_q: int,
    heads_kv: int,
    seq_q: int,
    *,
    layout_heads: int = 1,
) -> HeadsPerTile:
    """The number of heads per tile with which a forward launch has the fewest tiles.

    Candidates are powers of two, so that few kernels are compiled; the smallest one within a factor
    of `HEADS_PER_TILE_GAIN` of the fewest tiles is chosen.

    Args:
        plan: the plan of the forward kernel with one head per tile.
        layout_heads: heads of a run-time block layout: 1 where it is the same for all heads.
    """
    group = heads_q // heads_kv
    if group == 1 or plan.path != "sm_90a":
        return HeadsPerTile(1, "")
    of = f"of {group} that share K and V"
    obstacle = why_walks_differ(spec, layout_heads)
    if obstacle:
        return HeadsPerTile(1, f"{of}: {obstacle}")
    tiles = {
        heads: math.prod(
            replace(plan, heads_per_tile=heads).grid(batch, heads_q, heads_kv, seq_q, 1)
        )
        for heads in (1 << power for power in range(group.bit_length()))
        if group % heads == 0 and not any(obstacles_to_sharing(plan.block_q, heads))
    }
    if len(tiles) == 1:
        why = f"no power of two that divides {group} can share a tile of {plan.block_q} rows"
        return HeadsPerTile(1, f"{of}: {why}")
    chosen = next(
        heads for heads in tiles if tiles[heads] <= HEADS_PER_TILE_GAIN * min(tiles.values())
    )
    if chosen == 1:
        return HeadsPerTile(1, "")
    made = "1 tile" if tiles[chosen] == 1 else f"{tiles[chosen]:,} tiles"
    return HeadsPerTile(chosen, f"{of}: {made} instead of {tiles[1]:,}")


def why_walks_differ(spec: AttentionSpec, layout_heads: int = 1) -> str:
    """Why the heads of a group visit different key tiles; "" where they visit the same ones."""
    if spec.packed:
        return "each packed sequence starts a new tile, which has one head"
    if H in spec.mask.free_symbols:
        return "the mask depends on the head"
    by_head = spec.block_sparse is not None and spec.block_sparse.by_head
    return "the block layout depends on the head" if by_head or layout_heads > 1 else ""
