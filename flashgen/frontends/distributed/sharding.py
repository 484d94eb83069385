"""Which rank holds which positions of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch

from flashgen.frontends.distributed.exchange import WHERE, refuse

Tensor = torch.Tensor

METHODS = ("all_gather", "ring", "all_to_all")
"""How the ranks of a call exchange what they need; see `flashgen.distributed.attention`."""

WAYS = ("contiguous", "head_tail")


@dataclass(frozen=True)
class Sharding:
    """A sequence in chunks, each held by one rank.

    Attributes:
        chunks_by_rank: the chunks of each rank, as global positions, in the order of its rows.
    """

    chunks_by_rank: tuple[tuple[range, ...], ...]

    @cached_property
    def chunks(self) -> tuple[range, ...]:
        """All chunks, in the order of the ranks."""
        return tuple(chunk for chunks in self.chunks_by_rank for chunk in chunks)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank of each of `chunks`."""
        return tuple(rank for rank, chunks in enumerate(self.chunks_by_rank) for _ in chunks)

    @cached_property
    def length(self) -> int:
        return sum(map(len, self.chunks))

    @cached_property
    def in_order(self) -> bool:
        """Whether the rows of all ranks, one behind the other, are the positions in order."""
        starts = [chunk.start for chunk in self.chunks]
        return starts == sorted(starts)

    def shifted(self, offset: int) -> Sharding:
        """The same chunks at the positions from ``offset`` on."""
        return Sharding(
            tuple(
                tuple(range(c.start + offset, c.stop + offset) for c in chunks)
                for chunks in self.chunks_by_rank
            )
        )

    def numbers(self, rank: int) -> list[int]:
        """The numbers of a rank's chunks among `chunks`."""
        return [number for number, owner in enumerate(self.owners) if owner == rank]

    def rows(self, rank: int) -> int:
        """The number of positions that a rank holds."""
        return sum(map(len, self.chunks_by_rank[rank]))

    def slices(self, rank: int) -> list[slice]:
        """The rows of the rank that hold each of its chunks."""
        slices, start = [], 0
        for chunk in self.chunks_by_rank[rank]:
            slices.append(slice(start, start + len(chunk)))
            start += len(chunk)
        return slices

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """The rows that a rank holds of [batch, heads, all positions in order, x]."""
        return torch.cat([whole[:, :, c.start : c.stop] for c in self.chunks_by_rank[rank]], 2)


def check_method(method: object, function: str = WHERE) -> None:
    """Raises InputError for an argument ``method`` of a function that is none of `METHODS`."""
    if not isinstance(method, str) or method not in METHODS:
        numbers = f"{method!r}; available: {', '.join(METHODS)}"
        refuse("no such method", "method", numbers, f'method="{METHODS[0]}"', function)


def sharding_of(shard: Any, world: int, rows: int, function: str = WHERE) -> Sharding:
    """The sharding that ``shard`` describes.

    Args:
        shard: "contiguous", "head_tail", or for each rank a list of ranges or of pairs
            (start, stop).
        rows: the number of positions that each rank holds; a list of chunks says it itself.
        function: the one that was called, for errors.

    Raises:
        InputError: chunks overlap or leave positions out, or the rows cannot be divided.
    """
    if isinstance(shard, str):
        if shard not in WAYS:
            _refuse(function, "no such sharding", f"{shard!r}; available: {', '.join(WAYS)}")
        if shard == "contiguous":
            return Sharding(tuple((range(r * rows, (r + 1) * rows),) for r in range(world)))
        if rows % 2:
            _refuse(
                function,
                "head_tail gives each rank two chunks of equal length",
                f"{rows} rows a rank",
                f'{rows + 1} rows a rank, the last ones padding; or shard="contiguous"',
            )
        size, last = rows // 2, 2 * world - 1
        pairs = ((rank, last - rank) for rank in range(world))
        return Sharding(
            tuple(tuple(range(n * size, (n + 1) * size) for n in pair) for pair in pairs)
        )
    return _listed(shard, world, function)


def _listed(shard: Sequence[Any], world: int, function: str) -> Sharding:
    try:
        listed = tuple(
            tuple(part if isinstance(part, range) else range(*part) for part in chunks)
            or (range(0),)  # a rank without positions takes part in every transfer
            for chunks in shard
        )
    except (TypeError, ValueError):
        what = "a list of chunks has a list of ranges for each rank"
        _refuse(function, what, f"given {shard!r:.200}")
    if len(listed) != world:
        what = "a list of chunks has one entry for each rank"
        _refuse(function, what, f"{len(listed)} for {world} ranks")
    all_chunks = (chunk for chunks in listed for chunk in chunks)
    ordered = sorted(all_chunks, key=lambda chunk: (chunk.start, len(chunk)))
    end = 0
    for chunk in ordered:
        if chunk.step != 1 or chunk.start != end:
            what = "chunks cover the positions from 0 on, each once"
            _refuse(function, what, f"{chunk} after {end}")
        end = chunk.stop
    return Sharding(listed)


def _refuse(function: str, what: str, numbers: str, way_out: str = "") -> NoReturn:
    forms = (
        '"contiguous", "head_tail", or [[range(0, 64), range(192, 256)], ...] with the chunks of '
    )
    refuse(what, "shard", numbers, way_out or f"{forms}each rank", function)
