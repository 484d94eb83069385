"""How many query heads share a tile: few queries of one head would leave most of its rows empty.

The query heads of a group read the same K and V. With several of them in a tile, K and V are loaded
once for all of these, and short sequences of queries (decoding, speculative steps) fill its rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flashgen.expr import H
from flashgen.plan.search import unshared
from flashgen.plan.value import Plan
from flashgen.spec import AttentionSpec

# A kernel is compiled for each number of heads: one that saves less than a tenth is not worth it.
WORTH = 1.1


@dataclass(frozen=True)
class HeadsPerTile:
    """What was chosen for a call.

    Attributes:
        heads: query heads per tile.
        reason: what they save, or why there is only one; "" where nothing else was in question.
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
    """The number of heads with which a forward launch has the fewest tiles.

    Powers of two are tried, so that few kernels are compiled; of those that are as good up to
    `WORTH` the smallest is taken.

    Args:
        plan: of a tile with the rows of one head.
        layout_heads: heads of a block-sparse layout: 1 where it is the same for all of them.
    """
    group = heads_q // heads_kv
    if group == 1 or plan.path != "sm_90a":
        return HeadsPerTile(1, "")
    of = f"of {group} that share K and V"
    obstacle = one_walk_each(spec, layout_heads)
    if obstacle:
        return HeadsPerTile(1, f"{of}: {obstacle}")
    tiles = {
        heads: math.prod(
            replace(plan, heads_per_tile=heads).grid(batch, heads_q, heads_kv, seq_q, 1)
        )
        for heads in (1 << power for power in range(group.bit_length()))
        if group % heads == 0 and next(unshared(plan.block_q, heads), None) is None
    }
    if len(tiles) == 1:
        why = f"no power of two that divides {group} can share a tile of {plan.block_q} rows"
        return HeadsPerTile(1, f"{of}: {why}")
    chosen = next(heads for heads in tiles if tiles[heads] <= WORTH * min(tiles.values()))
    if chosen == 1:
        return HeadsPerTile(1, "")
    made = "1 tile" if tiles[chosen] == 1 else f"{tiles[chosen]:,} tiles"
    return HeadsPerTile(chosen, f"{of}: {made} instead of {tiles[1]:,}")


def one_walk_each(spec: AttentionSpec, layout_heads: int = 1) -> str:
    """Why each head of a group has tiles that it walks alone; "" where they can go together."""
    if spec.packed:
        return "tiles of packed sequences begin with each sequence, and have one head"
    if H in spec.mask.free_symbols:
        return "the mask depends on the head"
    by_head = spec.block_sparse is not None and spec.block_sparse.by_head
    return "the layout depends on the head" if by_head or layout_heads > 1 else ""
