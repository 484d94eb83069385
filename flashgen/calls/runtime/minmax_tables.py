"""Min/max tables of captured tensors, by which kernels skip tiles.

The kernels that make the tables run before the kernels that read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from flashgen.calls.runtime.backends import Target
from flashgen.calls.runtime.bound_kernel import BoundKernel, KernelRun
from flashgen.calls.runtime.kernel_arguments import (
    KernelArguments,
    numbers_of_captured,
    pointers_of,
)
from flashgen.shared.call import LaunchOptions
from flashgen.shared.dtypes import ELEMENTS, dtype_name
from flashgen.shared.launch_facts import SPAN

if TYPE_CHECKING:
    from flashgen.calls.runtime.programs import CallProgram

Tensor = torch.Tensor

_PREFIX = "m_"


class MinMaxTables:
    """The kernels that make the tables which other kernels of one call read."""

    def __init__(
        self,
        program: CallProgram,
        arch: str,
        captured: Mapping[str, Tensor],
        readers: Iterable[BoundKernel],
    ) -> None:
        """
        Args:
            captured: the captured tensors by name, of the shapes and strides of all later calls.
            readers: the kernels that read the tables.
        """
        read = {name for bound in readers for name in bound.arguments.pointers}
        wanted = {name for name in read if name.startswith(_PREFIX)}
        self._kernels: list[tuple[str, BoundKernel, Tensor]] = []
        if not wanted:
            return
        numbers = numbers_of_captured(captured)
        for build in program.minmax_tables(arch):
            params = build.facts.params
            table = next(p.name for p in params if p.name.startswith(_PREFIX))
            if table in wanted:
                name, _, axis = table.removeprefix(_PREFIX).rpartition("_")
                shape = _shape(captured[name], int(axis))
                bound = BoundKernel(build, KernelArguments(params, numbers), (shape[2], 1, 1))
                model = captured[name].new_empty((), dtype=_dtype(captured[name])).expand(shape)
                self._kernels.append((table, bound, model))

    def run(
        self, target: Target, captured: Mapping[str, Tensor], launch: LaunchOptions
    ) -> tuple[dict[str, Tensor | None], list[KernelRun]]:
        """Runs the kernels. Returns the tables by the names of kernels' pointers, and the runs."""
        tables: dict[str, Tensor | None] = {}
        pointers, runs = pointers_of(captured), []
        for name, bound, model in self._kernels:
            table = torch.empty_like(model, memory_format=torch.contiguous_format)
            tables[name] = table
            runs.append(
                bound.timed(target, {**pointers, name: table}, launch)._replace(table=table)
            )
        return tables, runs


def _shape(tensor: Tensor, axis: int) -> tuple[int, int, int, int]:
    """Levels, 2 for minimum and maximum, lines along the axis, entries of level 0."""
    size = tensor.shape[axis]
    entries = -(-size // SPAN)
    return entries.bit_length(), 2, tensor.numel() // size, entries


def _dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of the table of a tensor of integers or bools."""
    dtype: torch.dtype = getattr(torch, ELEMENTS[dtype_name(tensor.dtype)].value_dtype)
    return dtype
