"""Backward calls whose groups of query heads are divided, however small they are."""

from __future__ import annotations

import pytest

from flashgen.kernels import pipeline
from flashgen.shared.launch_facts import LaunchRules


def divide_groups(patch: pytest.MonkeyPatch, heads: int) -> None:
    """From here on a part has this many query heads, where a mask gives blocks different walks."""
    patch.setattr(LaunchRules, "part_heads", lambda _, *sizes: min(heads, sizes[1] // sizes[2]))
    patch.setattr(pipeline, "parts_pay", lambda *_, **__: True)
