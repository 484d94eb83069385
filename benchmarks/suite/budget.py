"""Time: the whole run has a limit, each part a share of what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Clock = Callable[[], float]


@dataclass(frozen=True)
class Budget:
    """Until when something may run; seconds since the epoch, so that processes can share it."""

    deadline: float
    clock: Clock = time.time

    @property
    def left(self) -> float:
        """Seconds; never negative."""
        return max(0.0, self.deadline - self.clock())

    @property
    def out(self) -> bool:
        return self.left <= 0

    def at_most(self, seconds: float) -> Budget:
        return Budget(min(self.deadline, self.clock() + seconds), self.clock)


@dataclass(frozen=True)
class Share:
    """What a part may take.

    Attributes:
        weight: of the time that is left, relative to the parts that are still to come.
        least: seconds without which it is not worth starting.
    """

    name: str
    weight: float
    least: float


def allowed(share: Share, later: Sequence[Share], left: float) -> float:
    """Seconds for a part, when ``later`` are still to come; 0 when it has to be skipped.

    What an earlier part did not use goes to those behind it. The least of each later part is not
    held back: an early part is more important.
    """
    weights = share.weight + sum(other.weight for other in later)
    mine = max(share.least, left * share.weight / weights)
    mine = min(mine, left)
    return mine if mine >= share.least else 0.0
