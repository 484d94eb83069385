"""An assignment of chunks to ranks that gives each rank the same work, for any mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flashgen.frontends.distributed.reach import reached
from flashgen.shared.dtypes import Number
from flashgen.shared.errors import InputError
from flashgen.spec.language.spec import AttentionSpec

MOST_CHUNKS = 16
"""Chunks per rank at most: more chunks make more transfers and more calls."""

ENOUGH = 1.01
"""A largest share over the mean with which no finer division is tried."""


@dataclass(frozen=True)
class Assignment:
    """The chunks of each rank, and how even their work is.

    Attributes:
        chunks: for each rank its ranges of positions; `shard` of `flashgen.distributed.attention`.
        shares: the part of all live tiles that each rank computes; their sum is 1.
        tile: positions of queries and of keys per counted tile.
    """

    chunks: tuple[tuple[range, ...], ...]
    shares: tuple[float, ...]
    tile: int

    @property
    def largest_over_mean(self) -> float:
        """The factor by which the most loaded rank takes longer than an even share."""
        return max(self.shares) * len(self.shares)

    def __str__(self) -> str:
        lines = [
            f"{len(self.chunks)} ranks, {len(self.chunks[0])} chunks each, largest share "
            f"{self.largest_over_mean:.3f} of the mean, in tiles of {self.tile} x {self.tile}"
        ]
        for rank, (chunks, share) in enumerate(zip(self.chunks, self.shares, strict=True)):
            spans = ", ".join(f"{chunk.start:,}-{chunk.stop:,}" for chunk in chunks)
            lines.append(f"rank {rank}: {share:7.2%}  {spans}")
        return "\n".join(lines)


def balance(
    spec: AttentionSpec,
    seq: int,
    world: int,
    *,
    batch: int = 1,
    heads: int = 1,
    tile: int = 128,
    **captures: Any,
) -> Assignment:
    """The assignment of chunks with the smallest largest share of live tiles.

    Chunks of equal length are dealt to ranks, as many to each, so that memory is even too: the
    chunk with most tiles first, to the rank with the fewest so far (Graham 1969). The number of
    chunks per rank is doubled until the shares are even.

    Args:
        seq: positions of queries and of keys, a multiple of 2 * world.
        world: the number of ranks.
        batch: of the call, where the mask depends on it.
        heads: of the call, where the mask depends on them.
        tile: positions per counted tile.
        captures: the scalars and the captured tensors that the mask reads, by name.

    Raises:
        InputError: the sequence cannot be divided.
    """
    if world < 1 or seq < 1 or seq % world:
        unit = 2 * max(world, 1)
        raise InputError(
            "the sequence is divided into chunks of equal length",
            where="flashgen.distributed.balance",
            numbers=f"seq {seq}, world {world}",
            way_out=f"a sequence padded to {-(-max(seq, 1) // unit) * unit}",
        )
    live = live_tiles(spec, seq, (batch, heads), tile, *split_captures(captures))
    lengths = [min(tile, seq - start) for start in range(0, seq, tile)]
    rows = np.repeat(live.sum(axis=1).astype(float), lengths)  # for each position of a query
    best: Assignment | None = None
    each = 1
    while each <= MOST_CHUNKS and seq % (world * each) == 0:
        found = _dealt(rows, seq, world, each, tile)
        if best is None or found.largest_over_mean < best.largest_over_mean - 1e-9:
            best = found
        if best.largest_over_mean <= ENOUGH:
            break
        each *= 2
    assert best is not None, "one chunk per rank is always possible"
    return best


def split_captures(
    captures: Mapping[str, Any],
) -> tuple[dict[str, Number], dict[str, torch.Tensor]]:
    """The scalars and the captured tensors among what a call captures."""
    tensors = {name: x for name, x in captures.items() if isinstance(x, torch.Tensor)}
    return {name: x for name, x in captures.items() if name not in tensors}, tensors


def live_tiles(
    spec: AttentionSpec,
    seq: int,
    others: tuple[int, int],
    tile: int,
    scalars: Mapping[str, Number],
    tensors: Mapping[str, torch.Tensor],
) -> np.ndarray[Any, np.dtype[Any]]:
    """For each tile of queries and of keys, whether the mask may keep an element; bool.

    Args:
        others: batch and heads.
    """
    tiles = tuple(range(start, min(start + tile, seq)) for start in range(0, seq, tile))
    sizes = (*others, seq, seq)
    some = (tiles[n : n + 64] for n in range(0, len(tiles), 64))  # bounds the memory
    return np.concatenate([reached(spec, each, tiles, sizes, scalars, tensors) for each in some])


def _dealt(
    rows: np.ndarray[Any, np.dtype[Any]], seq: int, world: int, each: int, tile: int
) -> Assignment:
    size = seq // (world * each)
    work = rows.reshape(world * each, size).sum(axis=1)
    loads, chosen = [0.0] * world, [[] for _ in range(world)]  # type: list[float], list[list[int]]
    for number in np.argsort(-work, kind="stable").tolist():
        open_ranks = [rank for rank in range(world) if len(chosen[rank]) < each]
        rank = min(open_ranks, key=lambda rank: loads[rank])
        loads[rank] += float(work[number])
        chosen[rank].append(number)
    total = sum(loads) or 1.0
    return Assignment(
        tuple(tuple(range(n * size, (n + 1) * size) for n in sorted(each)) for each in chosen),
        tuple(load / total for load in loads),
        tile,
    )
