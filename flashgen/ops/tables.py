"""Tables of captured tensors' extremes, by which kernels skip tiles; made before other kernels."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from flashgen.analysis import SPAN
from flashgen.ops.arguments import Arguments
from flashgen.ops.backends import Bound
from flashgen.ops.captures import numbers_of_captured, pointers_of
from flashgen.pipeline import Build
from flashgen.spec import AttentionSpec

Tensor = torch.Tensor

_PREFIX = "m_"

Counted = tuple[Build, Any, float]
"""A kernel that ran, the emulator's counters or None, and the seconds that it took."""


class Tables:
    """The kernels that make the tables which some other kernels of one call read."""

    __slots__ = ("_kernels",)

    def __init__(
        self,
        spec: AttentionSpec,
        arch: str,
        captured: Mapping[str, Tensor],
        readers: Iterable[Bound],
    ) -> None:
        """
        Args:
            captured: by name; later calls have tensors of the same shapes and strides.
            readers: the kernels that are to run after.
        """
        read = {name for bound in readers for name in bound.arguments.pointers}
        wanted = {name for name in read if name.startswith(_PREFIX)}
        self._kernels: list[tuple[str, Bound, Tensor]] = []
        if not wanted:
            return
        from flashgen.pipeline import build_summaries

        numbers = numbers_of_captured(captured)
        for build in build_summaries(spec, arch):
            table = next(p.name for p in build.source.params if p.name.startswith(_PREFIX))
            if table in wanted:
                name, _, axis = table.removeprefix(_PREFIX).rpartition("_")
                shape = _shape(captured[name], int(axis))
                bound = Bound(build, Arguments(build.source.params, numbers), (shape[2], 1, 1))
                model = captured[name].new_empty((), dtype=_dtype(captured[name])).expand(shape)
                self._kernels.append((table, bound, model))

    def made(
        self, backend: str, captured: Mapping[str, Tensor], index: int, **options: Any
    ) -> tuple[dict[str, Tensor | None], list[Counted]]:
        """Runs the kernels; the tables by the names of kernels' pointers, and what was counted."""
        tables: dict[str, Tensor | None] = {}
        given, counted = pointers_of(captured), []
        for name, bound, model in self._kernels:
            start = time.perf_counter()
            tables[name] = torch.empty_like(model, memory_format=torch.contiguous_format)
            counters = bound.run(backend, {**given, name: tables[name]}, index, **options)
            counted.append((bound.build, counters, time.perf_counter() - start))
        return tables, counted


def _shape(tensor: Tensor, axis: int) -> tuple[int, int, int, int]:
    """Levels, least and greatest, lines along the axis, entries of level 0."""
    size = tensor.shape[axis]
    entries = -(-size // SPAN)
    return entries.bit_length(), 2, tensor.numel() // size, entries


def _dtype(tensor: Tensor) -> torch.dtype:
    """Of the extremes of a tensor of integers or bools."""
    return torch.int64 if tensor.dtype == torch.int64 else torch.int32
