"""The number of thread blocks of a persistent kernel, whose blocks compute several work tiles.

With one block per work tile, the hardware starts the next block when one ends. A persistent block
fetches its next work tile itself: this saves the start of a block, and the producer loads the next
keys while the consumers still compute. All blocks fetch work tiles from one counter in global
memory, in the order in which the hardware would have started blocks, so that the load is balanced
in the same way, whatever the lengths of the work tiles. The counter must be 0 at each launch, which
takes a launch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.arch import facts
from flashgen.errors import PlanError
from flashgen.planner.derivation import DerivationLine, line_of, printed_line
from flashgen.planner.formulas import Formula, FormulaSequence
from flashgen.planner.kernel_plan import Plan
from flashgen.planner.models.fitted_sm90 import BLOCK_START_CLOCKS, CLEAR_COUNTER_US
from flashgen.planner.quantities import Number

SLOTS = Formula("slots", "sms*blocks")
ROUNDS = Formula("rounds", "ceil(work_tiles/slots)")
SAVED = Formula("saved", f"{BLOCK_START_CLOCKS}*(rounds - 1)", "clk")
CLEARED = Formula("cleared", f"{CLEAR_COUNTER_US}*clock_mhz", "clk")
FORMULAS = (SLOTS, ROUNDS, SAVED, CLEARED)

# The kernel counts in int32, and every block fetches one number past the last work tile.
MAX_WORK_TILES = 2**30


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
