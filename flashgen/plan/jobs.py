"""How many blocks are launched, where a block can do one job after another.

With a block for each job the hardware starts the next block when one ends. A block that takes the
next job itself saves that start, and brings its keys while it still computes. It takes jobs by a
counter in global memory, one for all blocks, in the order in which the hardware would have started
blocks; so the work is as well spread, whatever the lengths of jobs. The counter has to be 0 at each
launch, which takes a launch of its own.

Source: FlashAttention-3's dynamic persistent scheduler for causal masks.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.arch import facts
from flashgen.errors import PlanError
from flashgen.plan.derive import printed
from flashgen.plan.formulas import Formula, Number, Steps
from flashgen.plan.value import Line, Plan, broken

# A start: the launch of a block, its barriers, and its first keys, behind which nothing is hidden.
# To clear the counter: a small kernel between two others. Both are assumed, not measured.
START_CLOCKS = 600
CLEAR_US = 2

SLOTS = Formula("slots", "sms*blocks")
ROUNDS = Formula("rounds", "ceil(jobs/slots)")
SAVED = Formula("saved", f"{START_CLOCKS}*(rounds - 1)", "clk")
CLEARED = Formula("cleared", f"{CLEAR_US}*clock_mhz", "clk")
STEPS = (SLOTS, ROUNDS, SAVED, CLEARED)

# The kernel counts in int32, and every block takes one number past the last.
MOST_JOBS = 2**30


@dataclass(frozen=True)
class Blocks:
    """What was chosen for a launch.

    Attributes:
        count: blocks of the launch.
        jobs: of all of them.
        lines: how it was decided, with the numbers; () where the caller decided.
    """

    count: int
    jobs: int
    lines: tuple[Line, ...] = ()

    @property
    def persistent(self) -> bool:
        """Blocks take jobs, by a counter that is 0 when the launch begins."""
        return self.count < self.jobs

    @property
    def reason(self) -> str:
        """Why so many."""
        if not self.lines:
            return "as asked for"
        values = {line.name: line.value for line in self.lines}
        less = "more" if self.persistent else "no more"
        return (
            f"starts saved {values['saved']:,.0f} clk, {less} than "
            f"{values['cleared']:,.0f} clk to clear a counter"
        )

    def __str__(self) -> str:
        what = "which take them one after another" if self.persistent else "one each"
        lines = [f"jobs      {self.jobs:,} for {self.count:,} blocks, {what}: {self.reason}"]
        for line in self.lines:
            lines += broken(line)
        return "\n".join(lines)


def blocks_of(plan: Plan, jobs: int, sms: int | None = None, given: int | None = None) -> Blocks:
    """The number of blocks of a launch of a kernel that takes jobs (`Plan.takes_jobs`).

    Args:
        jobs: of the launch, what `Plan.grid` counts.
        sms: of the GPU; None for those of the product that the architecture's facts name.
        given: blocks that the caller asks for instead, at least 1; as many as jobs if there are
            fewer of these.

    Raises:
        PlanError: there are more jobs than the kernel can count, or given is no number of blocks.
    """
    arch = facts(plan.arch)
    if jobs > MOST_JOBS:
        raise PlanError(
            "the call has too many query tiles",
            where="the sizes of q",
            numbers=f"{jobs:,} tiles of {plan.block_q} rows; at most {MOST_JOBS:,}",
            way_out="fewer batch entries or heads in one call",
        )
    if given is not None:
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise PlanError(
                "blocks is not a number of blocks",
                where="argument blocks",
                numbers=f"given {given!r}: it is 1 or more",
                way_out=f"blocks={arch.sms}, a block for each SM, or nothing: the plan chooses",
            )
        return Blocks(min(given, jobs), jobs)
    at: dict[str, Number] = {
        "sms": sms or arch.sms,
        "blocks": plan.blocks_per_sm,
        "jobs": jobs,
        "clock_mhz": arch.clock_hz / 1e6,
    }
    values = Steps(*STEPS)(at)
    pays = values["saved"] > values["cleared"]
    lines = tuple(printed(formula, values) for formula in STEPS)
    return Blocks(int(values["slots"]) if pays else jobs, jobs, lines)
