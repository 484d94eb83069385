"""The tensor maps that a part of a kernel uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_AXES = {"q": "q", "o": "q", "do": "q", "k": "k", "v": "k"}


@dataclass(frozen=True)
class Maps:
    """The names of the tensor maps, and the axes of their rows: "q", "k"."""

    names: tuple[str, ...]
    axes: tuple[str, ...]

    @staticmethod
    def of(names: Sequence[str]) -> Maps:
        return Maps(tuple(names), tuple(sorted({_AXES[name] for name in names}, reverse=True)))
