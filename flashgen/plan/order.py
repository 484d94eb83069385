"""In which order blocks of different lengths are launched.

Where a mask's bounds move with the tile, as under a causal mask, blocks of one head have different
lengths. The longest go first, so that none of them is left for the end, when other SMs have nothing
to do. Head by head, that holds within a head alone: for 16 heads of 4,096 queries in tiles of 128,
132 SMs need 1.28 times the time of an even share, by the model; where all heads begin with their
longest tiles, 1.03. But heads that take turns need their K and V in L2 at the same time.

Source: the scheduler of FlashAttention-3 for causal masks, longest tiles first in sections of
heads, a power of two of them, whose K and V fit in L2.
"""

from __future__ import annotations

from flashgen.arch import facts
from flashgen.plan.value import Plan

# Of L2; the rest is for what passes through: queries, results, and what is not evicted yet.
L2_SHARE = 2 / 3


def head_bits(plan: Plan, heads_q: int, heads_kv: int, seq_q: int, seq_k: int) -> int:
    """Logarithm to base 2 of the heads that take turns, tile by tile.

    As many of a batch entry as share L2: a power of two that divides its heads, those of queries
    or, where blocks own keys, those of K and V. So the low bits of a block's number say which head.
    Heads that share a tile count as one.

    Args:
        seq_q, seq_k: of all packed sequences together, where they are packed.
    """
    group, heads = heads_q // heads_kv, heads_q
    row_bytes = (plan.head_dim + plan.head_dim_v) * plan.itemsize
    if plan.owns_keys:  # Q and dO, which all key tiles of these heads read
        heads = heads_kv
        bytes_of_head: float = group * seq_q * row_bytes
    else:
        heads //= plan.heads_per_tile
        bytes_of_head = plan.heads_per_tile * seq_k * row_bytes / group
    room = L2_SHARE * facts(plan.arch).l2_bytes
    bits = 0
    while heads % (2 << bits) == 0 and (2 << bits) * bytes_of_head <= room:
        bits += 1
    return bits
