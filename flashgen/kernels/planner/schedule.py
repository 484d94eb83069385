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
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashgen.kernels.planner.derivation import DerivationLine, line_of, printed_line
from flashgen.kernels.planner.formulas import Formula, FormulaSequence
from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.models.fitted_common import HEADS_PER_TILE_GAIN
from flashgen.kernels.planner.models.fitted_sm90 import BLOCK_START_CLOCKS, CLEAR_COUNTER_US
from flashgen.kernels.planner.models.kernel_model import MMA_ROWS
from flashgen.kernels.planner.quantities import Number
from flashgen.kernels.planner.search import obstacles_to_sharing
from flashgen.shared.arch import facts
from flashgen.shared.launch_facts import (
    HeadsPerTile,
    LaunchBlocks,
    fits_rows,
    heads_of_fewest_rows,
    mean_length,
)
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import H

SLOTS = Formula("slots", "sms*blocks")
ROUNDS = Formula("rounds", "ceil(work_tiles/slots)")
FORMULAS = (
    SLOTS,
    ROUNDS,
    Formula("saved", f"{BLOCK_START_CLOCKS}*(rounds - 1)", "clk"),
    Formula("cleared", f"{CLEAR_COUNTER_US}*clock_mhz", "clk"),
)


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

    Candidates are the powers of two that divide the group and the group itself, so that few kernels
    are compiled, or its largest divisor that can share a tile; the smallest one within a factor of
    `HEADS_PER_TILE_GAIN` of the fewest rows is chosen. Heads that cannot share the plan's tile may
    share one of fewer warps, unless the tile was given.

    The lengths of packed sequences are known at the launch only: they count as equally long.

    Args:
        plan: the plan of the forward kernel with one head per tile.
        layout_heads: heads of a run-time block layout: 1 where it is the same for all heads.
    """
    group = heads_q // max(heads_kv, 1)
    if group <= 1:  # 0: a call without heads
        return HeadsPerTile(1, "")
    group_text = f"of {group} that share K and V"
    if spec.packed:
        seq_q = mean_length(seq_q, batch)
    obstacle = why_walks_differ(spec, layout_heads)
    if obstacle:
        return HeadsPerTile(1, f"{group_text}: {obstacle}")
    rows = {
        heads: block_q
        for heads in range(1, group + 1)
        if group % heads == 0 and (block_q := _rows_to_share(plan, heads, dropout=spec.dropout))
    }
    most = max(rows)
    rows = {
        heads: block_q
        for heads, block_q in rows.items()
        if heads & -heads == heads or heads == most
    }
    tiles = {
        heads: math.prod(
            replace(plan, heads_per_tile=heads, block_q=block_q).grid(
                batch, heads_q, heads_kv, seq_q, 1
            )
        )
        for heads, block_q in rows.items()
    }
    if len(tiles) == 1:
        why = f"no number of heads that divides {group} can share a tile of {plan.block_q} rows"
        return HeadsPerTile(1, f"{group_text}: {why}")
    chosen = heads_of_fewest_rows(rows, tiles, HEADS_PER_TILE_GAIN)
    if chosen == 1:
        return HeadsPerTile(1, "")
    tile_count = "1 tile" if tiles[chosen] == 1 else f"{tiles[chosen]:,} tiles"
    if spec.packed:
        group_text += f", for {batch} sequences of about {seq_q} queries"
    saved = f"{tile_count} instead of {tiles[1]:,}"
    if rows[chosen] != plan.block_q:
        saved = f"{tile_count} of {rows[chosen]} rows instead of {tiles[1]:,} of {plan.block_q}"
    return HeadsPerTile(chosen, f"{group_text}: {saved}")


def is_unpaired(plan: Plan, heads: int, seq_q: int, group: int = 1) -> bool:
    """Whether so few tiles of queries take longer in pairs, because the last pair is filled up.

    Args:
        heads: query heads of a tile.
        group: query heads of a key head; two of them are a pair.
    """
    if plan.cluster == 1 or group // heads % 2 == 0:
        return False
    tiles = -(-seq_q // replace(plan, heads_per_tile=heads).queries_per_tile)
    alone = plan.model.costs({**plan.quantities, "cluster": 1})["cost"]
    return bool((tiles + tiles % 2) * plan.cost > tiles * alone)


def few_rows_of(spec: AttentionSpec, plan: Plan, heads: int, seq_q: int) -> int:
    """Rows of the smallest tile that holds the queries of so many heads of a served call; 0 where
    the call has the tile of all calls.

    Args:
        heads: query heads of a tile.
    """
    return next((n for n in counts_of_few_rows(spec, plan) if fits_rows(n, heads, seq_q)), 0)


def counts_of_few_rows(spec: AttentionSpec, plan: Plan) -> Iterator[int]:
    """The numbers of rows, ascending, with which served calls have a smaller tile than ``plan``."""
    rows = MMA_ROWS * plan.model.warps_of_few_rows
    while spec.is_served and 0 < rows < plan.block_q:
        yield rows
        rows *= 2


def _rows_to_share(plan: Plan, heads: int, *, dropout: bool) -> int:
    """Rows of the largest tile up to the plan's that this number of heads can share; 0: none."""
    counts = {plan.warps} if plan.policy == "given" else {plan.warps, *plan.model.warp_counts}
    return max(
        (
            rows
            for rows in (plan.block_q * warps // plan.warps for warps in counts)
            if rows <= plan.block_q
            and not any(obstacles_to_sharing(plan.code_path, rows, heads, dropout=dropout))
        ),
        default=0,
    )


def why_walks_differ(spec: AttentionSpec, layout_heads: int = 1) -> str:
    """Why the heads of a group visit different key tiles; "" where they visit the same ones."""
    if H in spec.mask.free_symbols:
        return "the mask depends on the head"
    by_head = spec.block_sparse is not None and spec.block_sparse.by_head
    return "the block layout depends on the head" if by_head or layout_heads > 1 else ""


@dataclass(frozen=True)
class DerivedBlocks(LaunchBlocks):
    """The number of blocks of a launch, with the derivation of the choice.

    Attributes:
        lines: the derivation; () where the caller gave the number.
    """

    lines: tuple[DerivationLine, ...] = ()

    def __str__(self) -> str:
        lines = [super().__str__()]
        for line in self.lines:
            lines += printed_line(line)
        return "\n".join(lines)


def blocks_of(
    plan: Plan, work_tiles: int, sms: int | None = None, requested: int | None = None
) -> DerivedBlocks:
    """The number of blocks of a launch of a persistent kernel, with its derivation.

    The arguments and errors are those of `flashgen.shared.launch_facts.LaunchRules.blocks_of`.
    """
    launch = plan.blocks_of(work_tiles, sms, requested)
    if requested is not None:
        return DerivedBlocks(launch.count, work_tiles, launch.reason)
    arch = facts(plan.arch)
    quantities: dict[str, Number] = {
        "sms": sms or arch.sms,
        "blocks": plan.blocks_per_sm,
        "work_tiles": work_tiles,
        "clock_mhz": arch.clock_hz / 1e6,
    }
    FormulaSequence(*FORMULAS)(quantities)
    lines = tuple(line_of(formula, quantities) for formula in FORMULAS)
    return DerivedBlocks(launch.count, work_tiles, launch.reason, lines)
