"""The mask that most tests need."""

from __future__ import annotations

from typing import Any


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q
