"""Whether another library has the private names that flashgen needs of it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any


def missing_names(names: Iterable[str]) -> list[str]:
    """Those of some dotted names, each from its package on, that cannot be found."""
    return [name for name in names if not _has(name)]


def _has(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False
