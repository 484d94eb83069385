"""The schedule of a launch: the heads of a tile, the order of thread blocks, and their number.

Heads per tile. The query heads of a group read the same K and V (grouped-query attention). A tile
with rows of several of them loads K and V once for all of these heads, and short query sequences
(decoding, speculative decoding) fill its rows, which would be mostly empty with the queries of one
head.

The order of thread blocks. Where a mask's bounds move with the tile, as for a causal mask, the
blocks of one head have different numbers of steps. The longest are launched first, so that none of
them starts when the other SMs have no work left. If the heads are launched one after another, this
order holds only within each head: for 16 heads of 4,096 queries in tiles of 128, 132 SMs need 1.26
times the time of an even distribution, by the model; with all heads interleaved, 1.03. But
interleaved heads need their K and V in L2 at the same time. Source: the scheduler of
FlashAttention-3 for causal masks, which launches the longest tiles first in groups of heads, a
power of two of them, whose K and V fit in L2.

Persistent blocks, which compute several work tiles. With one block per work tile, the hardware
starts the next block when one ends. A persistent block fetches its next work tile itself: this
saves the start of a block, and the producer loads the next keys while the consumers still compute.
All blocks fetch work tiles from one counter in global memory, in the order in which the hardware
would have started blocks, so that the load is balanced in the same way, whatever the lengths of the
work tiles. The counter must be 0 at each launch, which takes a launch of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flashgen.arch import facts
from flashgen.errors import PlanError
from flashgen.language import H
from flashgen.language.spec import AttentionSpec
from flashgen.planner.derivation import DerivationLine, line_of, printed_line
from flashgen.planner.formulas import Formula, FormulaSequence
from flashgen.planner.kernel_plan import Plan
from flashgen.planner.models.fitted_common import HEADS_PER_TILE_GAIN, L2_SHARE_OF_HEADS
from flashgen.planner.models.fitted_sm90 import BLOCK_START_CLOCKS, CLEAR_COUNTER_US
from flashgen.planner.quantities import Number
from flashgen.planner.search import obstacles_to_sharing
from flashgen.planner.tile_problem import PATHS

SLOTS = Formula("slots", "sms*blocks")
ROUNDS = Formula("rounds", "ceil(work_tiles/slots)")
SAVED = Formula("saved", f"{BLOCK_START_CLOCKS}*(rounds - 1)", "clk")
CLEARED = Formula("cleared", f"{CLEAR_COUNTER_US}*clock_mhz", "clk")
FORMULAS = (SLOTS, ROUNDS, SAVED, CLEARED)

# The kernel counts in int32, and every block fetches one number past the last work tile.
MAX_WORK_TILES = 2**30


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
    """The number of heads per tile with which the tiles of a forward launch have the fewest rows.

    Candidates are powers of two, so that few kernels are compiled; the smallest one within a factor
    of `HEADS_PER_TILE_GAIN` of the fewest rows is chosen. Heads that cannot share the plan's tile
    may share one of fewer warps, unless the tile was given.

    The lengths of packed sequences are known at the launch only: they count as equally long.

    Args:
        plan: the plan of the forward kernel with one head per tile.
        layout_heads: heads of a run-time block layout: 1 where it is the same for all heads.
    """
    group = heads_q // heads_kv
    if group == 1:
        return HeadsPerTile(1, "")
    of = f"of {group} that share K and V"
    if spec.packed:
        seq_q = -(-seq_q // max(batch, 1))
    obstacle = why_walks_differ(spec, layout_heads)
    if obstacle:
        return HeadsPerTile(1, f"{of}: {obstacle}")
    rows = {
        heads: _rows_to_share(plan, heads)
        for heads in (1 << power for power in range(group.bit_length()))
        if group % heads == 0
    }
    tiles = {
        heads: math.prod(
            replace(plan, heads_per_tile=heads, block_q=found).grid(
                batch, heads_q, heads_kv, seq_q, 1
            )
        )
        for heads, found in rows.items()
        if found
    }
    if len(tiles) == 1:
        why = f"no power of two that divides {group} can share a tile of {plan.block_q} rows"
        return HeadsPerTile(1, f"{of}: {why}")
    computed = {heads: tiles[heads] * rows[heads] for heads in tiles}
    fewest = min(computed.values())
    chosen = next(heads for heads in tiles if computed[heads] <= HEADS_PER_TILE_GAIN * fewest)
    if chosen == 1:
        return HeadsPerTile(1, "")
    made = "1 tile" if tiles[chosen] == 1 else f"{tiles[chosen]:,} tiles"
    if spec.packed:
        of += f", for {batch} sequences of about {seq_q} queries"
    saved = f"{made} instead of {tiles[1]:,}"
    if rows[chosen] != plan.block_q:
        saved = f"{made} of {rows[chosen]} rows instead of {tiles[1]:,} of {plan.block_q}"
    return HeadsPerTile(chosen, f"{of}: {saved}")


def _rows_to_share(plan: Plan, heads: int) -> int:
    """Rows of the largest tile up to the plan's that this number of heads can share; 0: none."""
    counts = PATHS[plan.path][plan.kernel, plan.itemsize].warp_counts
    if plan.policy == "given":
        counts = (plan.warps,)
    return max(
        (
            rows
            for rows in (plan.block_q * warps // plan.warps for warps in counts)
            if rows <= plan.block_q and not any(obstacles_to_sharing(plan.path, rows, heads))
        ),
        default=0,
    )


def why_walks_differ(spec: AttentionSpec, layout_heads: int = 1) -> str:
    """Why the heads of a group visit different key tiles; "" where they visit the same ones."""
    if H in spec.mask.free_symbols:
        return "the mask depends on the head"
    by_head = spec.block_sparse is not None and spec.block_sparse.by_head
    return "the block layout depends on the head" if by_head or layout_heads > 1 else ""


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


@dataclass(frozen=True)
class LaunchBlocks:
    """The number of blocks of a launch.

    Attributes:
        count: thread blocks of the launch.
        work_tiles: work tiles of the launch.
        reason: why this number of blocks was chosen.
        lines: the derivation of the choice; () where the caller gave the number.
    """

    count: int
    work_tiles: int
    reason: str = "as requested"
    lines: tuple[DerivationLine, ...] = ()

    @property
    def persistent(self) -> bool:
        """Whether blocks fetch work tiles from the counter, which must be 0 before the launch."""
        return self.count < self.work_tiles

    def __str__(self) -> str:
        what = "which fetch them from a counter" if self.persistent else "one each"
        lines = [f"tiles     {self.work_tiles:,} for {self.count:,} blocks, {what}: {self.reason}"]
        for line in self.lines:
            lines += printed_line(line)
        return "\n".join(lines)


def blocks_of(
    plan: Plan, work_tiles: int, sms: int | None = None, given: int | None = None
) -> LaunchBlocks:
    """The number of blocks of a launch of a persistent kernel (`Plan.is_persistent`).

    Args:
        work_tiles: the number of work tiles of the launch, the product of `Plan.grid`.
        sms: SMs of the GPU; None for those of the product that the architecture's facts name.
        given: the caller's number of blocks, at least 1. No more than the work tiles are launched.

    Raises:
        PlanError: there are more work tiles than the kernel can count, or ``given`` is not a
            number of blocks.
    """
    arch = facts(plan.arch)
    if work_tiles > MAX_WORK_TILES:
        raise PlanError(
            "the call has too many query tiles",
            where="the sizes of q",
            numbers=f"{work_tiles:,} tiles of {plan.block_q} rows; at most {MAX_WORK_TILES:,}",
            way_out="fewer batch entries or heads in one call",
        )
    if given is not None:
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise PlanError(
                "blocks is not a number of blocks",
                where="argument blocks",
                numbers=f"given {given!r}: it is 1 or more",
                way_out=f"blocks={arch.sms}, one block per SM, or none: the plan chooses it",
            )
        return LaunchBlocks(min(given, work_tiles), work_tiles)
    at: dict[str, Number] = {
        "sms": sms or arch.sms,
        "blocks": plan.blocks_per_sm,
        "work_tiles": work_tiles,
        "clock_mhz": arch.clock_hz / 1e6,
    }
    FormulaSequence(*FORMULAS)(at)
    count = min(int(at["slots"]), work_tiles) if at["saved"] > at["cleared"] else work_tiles
    reason = (
        f"starts saved {at['saved']:,.0f} clk, {'more' if count < work_tiles else 'no more'} than "
        f"{at['cleared']:,.0f} clk to clear a counter"
    )
    return LaunchBlocks(count, work_tiles, reason, tuple(line_of(each, at) for each in FORMULAS))
