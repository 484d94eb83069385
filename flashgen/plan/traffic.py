"""Bytes that the forward kernel moves, counted from its loops: exact, not estimated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from flashgen.arch import WARP

if TYPE_CHECKING:
    from flashgen.plan.value import Plan

# For each query tile, the key tiles that the kernel loads.
Visited = Sequence[Iterable[int]]

LSE_BYTES = 4  # float32


@dataclass(frozen=True)
class Traffic:
    """Bytes of one launch, per tensor: as issued to global memory, and the least possible.

    Attributes:
        q, k, v: read by the blocks. K and V are read once by every query tile that reaches them,
            for all of its heads.
        o, lse: written.
        sink: its logit, read by every lane of a block that computes.
        compulsory: each byte that is touched at all, once.
        scores: elements of S that are computed; those of a partial tile too.
    """

    q: int
    k: int
    v: int
    o: int
    lse: int
    compulsory: int
    scores: int
    sink: int = 0

    @property
    def issued(self) -> int:
        return self.q + self.k + self.v + self.o + self.lse + self.sink

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def traffic(
    plan: Plan,
    batch: int,
    heads_q: int,
    heads_kv: int,
    seq_q: int,
    seq_k: int,
    visited: Visited | None,
) -> Traffic:
    """See `Plan.traffic`. Rows past the end of a sequence are filled in, not read."""
    heads, queries = plan.heads_per_tile, plan.queries_per_tile
    if heads_q % (heads * heads_kv):
        raise ValueError(f"{heads_q} heads, {heads_kv} of K and V, do not fill tiles of {heads}")
    q_tiles = -(-seq_q // queries)
    k_tiles = -(-seq_k // plan.block_k)
    walk = [range(k_tiles)] * q_tiles if visited is None else [list(tiles) for tiles in visited]
    if len(walk) != q_tiles:
        raise ValueError(f"visited has {len(walk)} query tiles, seq_q {seq_q} makes {q_tiles}")

    q_rows = k_rows = steps = 0
    touched: set[int] = set()
    for q_tile, tiles in enumerate(walk):
        # A block that reaches no key loads nothing, and writes zeros.
        q_rows += rows_of_tile(q_tile, queries, seq_q) if tiles else 0
        for k_tile in tiles:
            k_rows += rows_of_tile(k_tile, plan.block_k, seq_k)
            steps += 1
        touched.update(tiles)

    pairs = batch * heads_q
    shared = pairs // heads  # walks over the keys, of all heads of a tile together
    qk_row, v_row = plan.head_dim * plan.itemsize, plan.head_dim_v * plan.itemsize
    kv_touched = sum(rows_of_tile(k_tile, plan.block_k, seq_k) for k_tile in touched)
    q, o, lse = pairs * q_rows * qk_row, pairs * seq_q * v_row, pairs * seq_q * LSE_BYTES
    logits = heads_q * plan.sink_bytes
    lanes = WARP * plan.warps  # of a block that read the logit of their row's head
    return Traffic(
        q=q,
        k=shared * k_rows * qk_row,
        v=shared * k_rows * v_row,
        o=o,
        lse=lse,
        compulsory=q + o + lse + logits + batch * heads_kv * kv_touched * (qk_row + v_row),
        scores=shared * steps * plan.block_q * plan.block_k,
        sink=batch * logits // heads * q_tiles * lanes,
    )


def rows_of_tile(tile: int, size: int, length: int) -> int:
    """Rows of a tile that exist."""
    return max(0, min(size, length - tile * size))
