"""An assignment of chunks to ranks that gives each rank the same work, for any mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from flashgen.calls.runtime.arguments.options import scalar_value
from flashgen.calls.runtime.arguments.positions import check_boundaries
from flashgen.calls.runtime.arguments.refusals import whole_number
from flashgen.calls.runtime.arguments.tensors import check_captured, check_positions
from flashgen.calls.runtime.arguments.tensors import check_sizes as check_tensor_sizes
from flashgen.calls.runtime.block_layouts import check_layout, with_layout
from flashgen.frontends.distributed.exchange import refuse
from flashgen.frontends.distributed.reach import reached
from flashgen.shared.dtypes import Number
from flashgen.shared.errors import called_by_users
from flashgen.shared.signature import BOUNDARIES, LAYOUT
from flashgen.spec.language.signature import signature_of
from flashgen.spec.language.spec import AttentionSpec

MOST_CHUNKS = 16
"""Chunks per rank at most: more chunks make more transfers and more calls."""

ENOUGH = 1.01
"""A largest share over the mean with which no finer division is tried."""


@called_by_users()
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


@called_by_users()
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
        InputError: the sequence cannot be divided, or an argument is invalid.
    """
    where = "flashgen.distributed.balance"
    check_sizes(where, spec, seq=seq, world=world, batch=batch, heads=heads, tile=tile)
    live = live_tiles(
        spec, seq, (batch, heads), tile, *mask_inputs(spec, seq, (batch, heads), captures)
    )
    lengths = [min(tile, seq - start) for start in range(0, seq, tile)]
    rows = np.repeat(live.sum(axis=1).astype(float), lengths)  # for each position of a query
    best: Assignment | None = None
    chunks_per_rank = 1
    while chunks_per_rank <= MOST_CHUNKS and seq % (world * chunks_per_rank) == 0:
        assignment = _dealt(rows, seq, world, chunks_per_rank, tile)
        if best is None or assignment.largest_over_mean < best.largest_over_mean - 1e-9:
            best = assignment
        if best.largest_over_mean <= ENOUGH:
            break
        chunks_per_rank *= 2
    assert best is not None, "one chunk per rank is always possible"
    return best


def check_sizes(where: str, spec: Any, *, seq: Any, world: Any, **sizes: Any) -> None:
    """Refuses what is no spec, sizes that are not 1 or more, and sequences that are not divided."""
    if not isinstance(spec, AttentionSpec):
        spec_text, way_out = f"given {spec!r:.200}", "fg.AttentionSpec(mask_mod, head_dim=64)"
        refuse("no spec is given", "spec", spec_text, way_out, where)
    for name, value in {"seq": seq, "world": world, **sizes}.items():
        if (whole_number(value) or 0) < 1:
            what = f"{name} is not a whole number of 1 or more"
            refuse(what, name, f"given {value!r:.200}", f"{name}=1, or a larger int", where)
    if seq % world:
        padded = -(-seq // (2 * world)) * 2 * world
        what = "the sequence is divided into chunks of equal length"
        refuse(what, "seq", f"seq {seq}, world {world}", f"a sequence padded to {padded}", where)


def mask_inputs(
    spec: AttentionSpec, seq: int, others: tuple[int, int], captures: Mapping[str, Any]
) -> tuple[dict[str, Number], dict[str, torch.Tensor]]:
    """The scalars, and the captured tensors on which the live tiles depend, by name.

    Args:
        others: batch and heads.

    Raises:
        InputError: a value is missing or invalid.
    """
    signature = signature_of(spec)
    captures = with_layout(signature, captures)
    read = {t.name for t in spec.tensors if t.symbol in spec.mask.free_symbols}
    read |= {*BOUNDARIES, LAYOUT}
    used = tuple(t for t in signature.tensors if t.name in read or t.name in captures)
    for name in [x.name for x in signature.scalars] + [x.name for x in used]:
        if name not in captures:
            numbers = f"given: {', '.join(captures) or 'none'}"
            what = f"{name!r} of spec {spec.name} is missing"
            refuse(what, name, numbers, f"{name}=...", "flashgen.distributed.balance")
    part = replace(signature, tensors=used)
    tensors = {t.name: captures[t.name] for t in used}
    values = tuple(tensors.values())
    device = getattr(values[0], "device", torch.device("cpu")) if values else torch.device("cpu")
    check_captured(part, values, device)
    if spec.packed:
        check_boundaries(part, tensors, seq, seq)
    else:
        check_tensor_sizes(part, values, dict(zip(("batch", "heads"), others, strict=True)))
        check_positions(part, values, (seq, seq), (seq, seq))
    check_layout(part, values, (seq, seq), (seq, seq))
    return {s.name: scalar_value(s, captures[s.name]) for s in signature.scalars}, tensors


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
    sequences = len(tensors[BOUNDARIES[0]]) if spec.packed else 1
    step = max(1, min(64, 2**27 // (len(tiles) * sequences)))  # bounds the memory
    tile_groups = (tiles[n : n + step] for n in range(0, len(tiles), step))
    return np.concatenate(
        [reached(spec, query_tiles, tiles, sizes, scalars, tensors) for query_tiles in tile_groups]
    )


def _dealt(
    rows: np.ndarray[Any, np.dtype[Any]], seq: int, world: int, chunks_per_rank: int, tile: int
) -> Assignment:
    size = seq // (world * chunks_per_rank)
    work = rows.reshape(world * chunks_per_rank, size).sum(axis=1)
    loads, chosen = [0.0] * world, [[] for _ in range(world)]  # type: list[float], list[list[int]]
    for number in np.argsort(-work, kind="stable").tolist():
        open_ranks = [rank for rank in range(world) if len(chosen[rank]) < chunks_per_rank]
        rank = min(open_ranks, key=lambda rank: loads[rank])
        loads[rank] += float(work[number])
        chosen[rank].append(number)
    total = sum(loads) or 1.0
    return Assignment(
        tuple(
            tuple(range(n * size, (n + 1) * size) for n in sorted(numbers)) for numbers in chosen
        ),
        tuple(load / total for load in loads),
        tile,
    )
