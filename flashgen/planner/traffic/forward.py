"""Bytes that the forward kernel moves, counted from its loops: exact, not estimated."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flashgen.arch import WARP
from flashgen.planner.kernel_plan import Plan
from flashgen.planner.launch_sizes import Visited

LSE_BYTES = 4  # float32


@dataclass(frozen=True)
class ForwardTraffic:
    """Bytes of one launch, per tensor: as issued to global memory, and the least possible.

    Attributes:
        q, k, v: read by the thread blocks. Every query tile that reaches a key tile reads its K and
            V once, for all heads of the tile.
        o, lse: written.
        sink: the sink's logit, read by every lane of the computing warps.
        compulsory: each byte that is accessed at all, once.
        scores: elements of S that are computed, whole partial tiles included.
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
        """Bytes of all loads and stores."""
        return self.q + self.k + self.v + self.o + self.lse + self.sink

    def __add__(self, other: ForwardTraffic) -> ForwardTraffic:
        return ForwardTraffic(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(self))
        )


def forward_traffic(
    plan: Plan,
    batch: int,
    heads_q: int,
    heads_kv: int,
    seq_q: int,
    seq_k: int,
    visited: Visited | None = None,
) -> ForwardTraffic:
    """Bytes that the forward kernel moves to and from global memory.

    Rows past the end of a sequence are zeros that are not read.

    Args:
        visited: the key tiles that the kernel visits for each query tile, the same for every batch
            entry and head; None for all of them. For a mask that depends on b or h, compute the
            traffic head by head (batch 1, heads 1) and add.

    Raises:
        ValueError: this is a backward kernel, ``visited`` is for another number of tiles, or a tile
            would have heads that do not share K and V.
    """
    if plan.kernel != "forward":
        raise ValueError(f"{plan.kernel} is a backward kernel: use backward_traffic")
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
    shared = pairs // heads  # walks over the keys: the heads of a tile share one
    qk_row, v_row = plan.head_dim * plan.itemsize, plan.head_dim_v * plan.itemsize
    kv_touched = sum(rows_of_tile(k_tile, plan.block_k, seq_k) for k_tile in touched)
    q, o, lse = pairs * q_rows * qk_row, pairs * seq_q * v_row, pairs * seq_q * LSE_BYTES
    logits = heads_q * plan.sink_bytes
    lanes = WARP * plan.warps  # each reads the logit of its row's head
    return ForwardTraffic(
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
