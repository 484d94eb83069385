"""The sizes of a launch, and the tiles that its blocks visit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class LaunchSizes(NamedTuple):
    """The sizes of the operands of one launch."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int


Visited = Sequence[Iterable[int]]
"""For each tile that a block owns, the numbers of the tiles that its main loop visits."""
