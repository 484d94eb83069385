"""Bytes that a backward kernel moves, counted from its loops: exact, not estimated."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flashgen.planner.kernel_plan import Plan
from flashgen.planner.launch_sizes import Visited
from flashgen.planner.models.backward_sm80 import ROW_BYTES
from flashgen.planner.traffic.forward import LSE_BYTES, rows_of_tile

SUM_BYTES = 4  # float32: the atomic sums of dQ, and the sums of a sink's gradient
QUAD = 4  # lanes that hold a row of an accumulator: in "dq" each reads the row's LSE and delta


@dataclass(frozen=True)
class BackwardTraffic:
    """Bytes of one launch, per tensor, as the lanes' loads and stores request them.

    Attributes:
        q, k, v, o, do: read.
        lse: read by "delta": LSE and, where the caller passes it, dLSE.
        rows_read, rows_written: (LSE, delta) per query, which "delta" writes for the other kernels.
        dq, dk, dv: written.
        dsink: written by "delta": sums over the rows of a warp.
        sink: the sink's logit, read by "delta" for each query where it computes its gradient.
        added: added to dQ's sums, atomically, by "fused".
        scores: elements of S that are computed, whole partial tiles included.
    """

    q: int = 0
    k: int = 0
    v: int = 0
    o: int = 0
    do: int = 0
    lse: int = 0
    rows_read: int = 0
    rows_written: int = 0
    dq: int = 0
    dk: int = 0
    dv: int = 0
    sink: int = 0
    dsink: int = 0
    added: int = 0
    scores: int = 0

    @property
    def read(self) -> int:
        operands = self.q + self.k + self.v + self.o + self.do
        return operands + self.lse + self.rows_read + self.sink

    @property
    def written(self) -> int:
        return self.rows_written + self.dq + self.dk + self.dv + self.dsink

    def __add__(self, other: BackwardTraffic) -> BackwardTraffic:
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return BackwardTraffic(*(mine + theirs for mine, theirs in pairs))


def backward_traffic(
    plan: Plan,
    batch: int,
    heads_q: int,
    heads_kv: int,
    seq_q: int,
    seq_k: int,
    visited: Visited | None = None,
    *,
    dlse: bool = False,
) -> BackwardTraffic:
    """Bytes that a backward kernel moves to and from global memory.

    Rows past the end of a sequence are zeros that are not read.

    Args:
        visited: the key tiles that the kernel visits for each query tile, or, where
            `Plan.owns_keys`, the query tiles for each key tile: the same for every head, or those
            of each query head of a group one after the other; None for all tiles.
        dlse: the caller passes a gradient of LSE.

    Raises:
        ValueError: this is the forward kernel, or ``visited`` is for another number of tiles.
    """
    if plan.kernel == "forward":
        raise ValueError("this is the forward kernel: use forward_traffic")
    e, pairs = plan.itemsize, batch * heads_q
    qk_row, v_row = plan.head_dim * e, plan.head_dim_v * e
    if plan.kernel == "delta":
        queries = pairs * seq_q
        sums = pairs * -(-seq_q // plan.block_q) * plan.warps if plan.sink_bytes else 0
        return BackwardTraffic(
            o=queries * v_row,
            do=queries * v_row,
            lse=queries * LSE_BYTES * (2 if dlse else 1),
            rows_written=queries * ROW_BYTES,
            sink=queries * plan.sink_bytes,
            dsink=sums * SUM_BYTES,
        )

    owned, walked = plan.block_q, plan.block_k
    owned_seq, walked_seq = seq_q, seq_k
    if plan.owns_keys:
        owned, walked, owned_seq, walked_seq = walked, owned, walked_seq, owned_seq
    count, steps = -(-owned_seq // owned), -(-walked_seq // walked)
    group = heads_q // heads_kv if plan.owns_keys else 1
    walk = [range(steps)] * count if visited is None else [list(tiles) for tiles in visited]
    if len(walk) not in (count, count * group):
        side = "key" if plan.owns_keys else "query"
        raise ValueError(f"visited has {len(walk)} {side} tiles, there are {count}")
    walks = pairs * count // len(walk)  # repetitions of these walks
    own_rows = sum(
        rows_of_tile(n, owned, owned_seq) for n in range(count) if any(map(len, walk[n::count]))
    )
    walked_rows = sum(rows_of_tile(n, walked, walked_seq) for tiles in walk for n in tiles)
    visits = sum(len(tiles) for tiles in walk)
    scores = walks * visits * plan.block_q * plan.block_k
    if plan.kernel == "dq" or plan.of_captured:
        return BackwardTraffic(
            q=pairs * own_rows * qk_row,
            do=pairs * own_rows * v_row,
            # Tiles that reach no key read them too.
            rows_read=pairs * seq_q * ROW_BYTES * QUAD * plan.column_warps,
            k=pairs * walked_rows * qk_row,
            v=pairs * walked_rows * v_row,
            dq=pairs * seq_q * qk_row if plan.kernel == "dq" else 0,
            scores=scores,
        )
    blocks = batch * heads_kv
    return BackwardTraffic(
        k=blocks * own_rows * qk_row,
        v=blocks * own_rows * v_row,
        q=walks * walked_rows * qk_row,
        do=walks * walked_rows * v_row,
        rows_read=walks * walked_rows * ROW_BYTES,
        dk=blocks * seq_k * qk_row,
        dv=blocks * seq_k * v_row,
        added=walks * visits * plan.block_q * _columns_of_sums(plan) * SUM_BYTES
        if plan.kernel == "fused"
        else 0,
        scores=scores,
    )


def _columns_of_sums(plan: Plan) -> int:
    """Columns of dQ that are added: wgmma computes dQ^T in strips of 16 of its rows."""
    return 16 * -(-plan.head_dim // 16) if plan.path == "sm_90a" else plan.head_dim
