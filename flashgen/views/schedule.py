"""The predicted work tiles of a launch, over SMs and in time."""

from __future__ import annotations

from itertools import chain

from flashgen.arch import facts
from flashgen.planner.derivation import printed_line
from flashgen.planner.duration import Duration, placed
from flashgen.views.values import Schedule, WorkTile

MOST_TILES = 2000
"""Work tiles that a page shows: those of the first SMs where there are more."""


def schedule_of(duration: Duration, shape: str = "") -> Schedule:
    """The schedule on which a predicted duration rests: each free slot runs the next block.

    Args:
        shape: the shape of the launch, where it is not the one that was executed.
    """
    plan = duration.plan
    arch = facts(plan.arch)
    blocks = list(placed(duration.parts, arch.sms * plan.blocks_per_sm))
    begun = {line.name: line.value for line in duration.lines}.get("begun", 0)
    shown, sms = blocks, arch.sms
    while len(shown) > MOST_TILES and sms > 1:
        sms = max(1, min(sms - 1, sms * MOST_TILES // len(shown)))
        shown = [block for block in blocks if block[0] % arch.sms < sms]
    return Schedule(
        product=arch.product,
        shape=shape,
        sms=arch.sms,
        blocks_per_sm=plan.blocks_per_sm,
        work_tiles=tuple(
            WorkTile(slot, start, end, tile, head, end - start - begun)
            for slot, start, end, tile, head in shown[:MOST_TILES]
        ),
        total=len(blocks),
        makespan=max((block[2] for block in blocks), default=0.0),
        seconds=duration.seconds,
        quantisation=duration.quantisation,
        bound=duration.bound,
        lines=tuple(chain.from_iterable(map(printed_line, duration.lines))),
    )
