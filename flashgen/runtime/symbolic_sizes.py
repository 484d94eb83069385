"""Facts about sizes, which are symbols where torch.compile and torch.export trace a call."""

from __future__ import annotations

import torch


def known(fact: bool | torch.SymBool) -> bool:
    """True when the fact is known to hold, for symbols too; a backed symbol gets a guard."""
    if isinstance(fact, bool):
        return fact
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # a slow import

    return guard_or_false(fact)


def is_constant(fact: bool | torch.SymBool) -> bool:
    """True when the fact holds for all values of its symbols; this adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(fact)
