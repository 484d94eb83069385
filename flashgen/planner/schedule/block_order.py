"""The order of thread blocks with different numbers of steps.

Where a mask's bounds move with the tile, as for a causal mask, the blocks of one head have
different numbers of steps. The longest are launched first, so that none of them starts when the
other SMs have no work left. If the heads are launched one after another, this order holds only
within each head: for 16 heads of 4,096 queries in tiles of 128, 132 SMs need 1.28 times the time of
an even distribution, by the model; with all heads interleaved, 1.03. But interleaved heads need
their K and V in L2 at the same time.

Source: the scheduler of FlashAttention-3 for causal masks, which launches the longest tiles first
in groups of heads, a power of two of them, whose K and V fit in L2.
"""

from __future__ import annotations

from flashgen.arch import facts
from flashgen.planner.kernel_plan import Plan
from flashgen.planner.models.fitted_common import L2_SHARE_OF_HEADS


def head_bits(plan: Plan, heads_q: int, heads_kv: int, seq_q: int, seq_k: int) -> int:
    """Logarithm to base 2 of the number of heads that are interleaved tile by tile.

    The largest power of two that divides the heads of a batch entry (query heads, or key heads
    where blocks own keys) and whose operands fit in a share of L2. The low bits of a block's number
    are then its head. Heads that share a tile count as one.

    Args:
        seq_q, seq_k: with packed sequences, the sums of their lengths.
    """
    group, heads = heads_q // heads_kv, heads_q
    row_bytes = (plan.head_dim + plan.head_dim_v) * plan.itemsize
    if plan.owns_keys:  # all key tiles of a head read its Q and dO
        heads = heads_kv
        bytes_of_head: float = group * seq_q * row_bytes
    else:
        heads //= plan.heads_per_tile
        bytes_of_head = plan.heads_per_tile * seq_k * row_bytes / group
    room = L2_SHARE_OF_HEADS * facts(plan.arch).l2_bytes
    bits = 0
    while heads % (2 << bits) == 0 and (2 << bits) * bytes_of_head <= room:
        bits += 1
    return bits
