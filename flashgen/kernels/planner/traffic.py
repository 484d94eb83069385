"""Bytes that kernels move, counted from their loops: exact, not estimated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.models.backward_sm80 import ROW_BYTES
from flashgen.shared.arch import WARP
from flashgen.shared.launch_facts import CONVERT_KERNELS

LSE_BYTES = 4  # float32
SUM_BYTES = 4  # float32: the atomic sums of dQ, and the sums of a sink's gradient
QUAD = 4  # lanes that hold a row of an accumulator: in "dq" each reads the row's LSE and delta

Visited = Sequence[Iterable[int]]
"""For each tile that a block owns, the numbers of the tiles that its main loop visits."""


class LaunchSizes(NamedTuple):
    """The sizes of the operands of one launch."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int


class StepKind(NamedTuple):
    """Steps of a main loop that take equally long.

    Attributes:
        rows: rows of the block's tile whose scores the step computes: all rows, or the rows of the
            warpgroups that reach the tile; 0 where none does.
        mask_ops: instructions of the mask for each of these scores; 0 where it is not evaluated.
    """

    rows: int
    mask_ops: float


Steps = Mapping[StepKind, int]
"""The number of steps of each kind."""


class Walk(NamedTuple):
    """The work of some heads of a launch.

    Attributes:
        sizes: their operands' sizes.
        visited: the tiles that each block visits; None for all tiles.
        steps: for each of these blocks, the kinds of its steps; None where every step computes the
            scores of all rows without a mask.
        before: the number of queries that the first tile lacks at its start.
        restarts: for each of these blocks, the splits of the keys that it walks after its first.
    """

    sizes: LaunchSizes
    visited: Visited | None = None
    steps: Sequence[Steps] | None = None
    before: int = 0
    restarts: Sequence[int] = ()


def computed_scores(plan: Plan, walk: Walk) -> int:
    """The score elements that are computed for some heads: `Traffic.scores` without the rows of
    warpgroups that skip tiles."""
    traffic = forward_traffic if plan.kernel == "forward" else backward_traffic
    visited = traffic(plan, *walk.sizes, walk.visited).scores
    if walk.steps is None or not visited:
        return visited
    steps = sum(map(Counter, walk.steps), Counter())
    rows = sum(kind.rows * count for kind, count in steps.items())
    return visited * rows // (plan.block_q * steps.total())


def walks_of_head(
    plan: Plan, sizes: LaunchSizes, visited: Visited | None
) -> Sequence[Sequence[int]]:
    """For each tile that a block owns, the tiles that it visits, or the boxes that it gathers to
    tiles: all of them without ``visited``.

    Where blocks own keys, ``visited`` may have the tiles of each query head of a group, one head
    after the other.

    Raises:
        ValueError: ``visited`` is for another number of tiles.
    """
    owned, walked = -(-sizes.seq_q // plan.walked_queries), -(-sizes.seq_k // plan.walked_keys)
    side, group = "query", 1
    if plan.owns_keys:
        owned, walked = walked, owned
        side, group = "key", sizes.heads_q // sizes.heads_kv
    walks = [range(walked)] * owned if visited is None else [list(tiles) for tiles in visited]
    if len(walks) not in (owned, owned * group):
        raise ValueError(f"visited has {len(walks)} {side} tiles, there are {owned}")
    return walks


def rows_in(tiles: Iterable[int], size: int, length: int, before: int = 0) -> int:
    """Rows of these tiles that exist; ``before``: rows that the first tile lacks at its start."""
    starts = (tile * size - before for tile in tiles)
    return sum(max(0, min(start + size, length) - max(start, 0)) for start in starts)


def neighbours_of_heads(plan: Plan, heads_q: int) -> int:
    """Heads of other tiles whose Q the forward tiles of a batch entry read: where rows of a tile
    have no head, TMA fills them with rows of the next heads, as far as these exist."""
    spare = plan.head_places - plan.heads_per_tile
    if not spare or not plan.code_path.copies_by_tma:
        return 0
    ends = range(plan.heads_per_tile, heads_q + 1, plan.heads_per_tile)
    return sum(min(spare, heads_q - end) for end in ends)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one launch, per tensor, as the lanes' loads and stores request them.

    Attributes:
        q, k, v, o, do: bytes of the operands. The forward kernel writes o, all others read it. In
            the forward kernel every query tile that reaches a key tile reads its K and V once, for
            all heads of the tile.
        lse: written by the forward kernel. Read by "tangent", and by "delta": LSE and, where the
            caller passes it, dLSE.
        rows_read, rows_written: (LSE, delta) per query, which "delta" writes for the other kernels.
        q_tangent, k_tangent, v_tangent, o_tangent, lse_tangent: bytes of "tangent", which writes
            the last two.
        dq, dk, dv: written.
        dk_sums, dv_sums: float32 sums of dK and dV of each part of a group, written by "fused".
        sink: the sink's logit, read by every lane of the computing warps of the forward kernel, and
            by "delta" for each query where it computes its gradient.
        dsink: written by "delta": sums over the rows of a warp.
        sums_zeroed, sums_read: sums that "delta" fills with zeros, and sums that a kernel converts.
        added: added to dQ's sums, atomically, by "fused".
        compulsory: each byte that the forward kernel accesses at all, once.
        scores: elements of S in the visited tiles, whole partial tiles included; `computed_scores`
            are fewer where warpgroups skip tiles.
    """

    q: int = 0
    k: int = 0
    v: int = 0
    o: int = 0
    do: int = 0
    lse: int = 0
    rows_read: int = 0
    rows_written: int = 0
    q_tangent: int = 0
    k_tangent: int = 0
    v_tangent: int = 0
    o_tangent: int = 0
    lse_tangent: int = 0
    dq: int = 0
    dk: int = 0
    dv: int = 0
    dk_sums: int = 0
    dv_sums: int = 0
    sink: int = 0
    dsink: int = 0
    sums_zeroed: int = 0
    sums_read: int = 0
    added: int = 0
    compulsory: int = 0
    scores: int = 0

    @property
    def issued(self) -> int:
        """Bytes of all loads and stores, without atomic additions."""
        total: int = sum(vars(self).values())
        return total - self.added - self.compulsory - self.scores

    @property
    def written(self) -> int:
        """Bytes that a backward kernel, or "tangent", writes, without atomic additions."""
        gradients = self.dq + self.dk + self.dv + self.dk_sums + self.dv_sums
        gradients += self.o_tangent + self.lse_tangent
        return self.rows_written + gradients + self.dsink + self.sums_zeroed

    @property
    def read(self) -> int:
        """Bytes that a backward kernel, or "tangent", reads, without atomic additions."""
        return self.issued - self.written

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{name: mine + getattr(other, name) for name, mine in vars(self).items()})


def forward_traffic(
    plan: Plan,
    batch: int,
    heads_q: int,
    heads_kv: int,
    seq_q: int,
    seq_k: int,
    visited: Visited | None = None,
    before: int = 0,
) -> Traffic:
    """Bytes that the forward kernel moves to and from global memory.

    Rows past the end of a sequence are zeros that are not read.

    Args:
        visited: the key tiles that the kernel visits for each query tile, the same for every batch
            entry and head; None for all of them. For a mask that depends on b or h, compute the
            traffic head by head (batch 1, heads 1) and add.
        before: the queries that the first tile lacks, as in `Walk`.

    Raises:
        ValueError: this is a backward kernel, ``visited`` is for another number of tiles, or a tile
            would have heads that do not share K and V.
    """
    if plan.kernel != "forward":
        raise ValueError(f"{plan.kernel} is a backward kernel: use backward_traffic")
    heads = plan.heads_per_tile
    if heads_q % (heads * heads_kv):
        raise ValueError(f"{heads_q} heads, {heads_kv} of K and V, do not fill tiles of {heads}")
    walks = walks_of_head(plan, LaunchSizes(batch, heads_q, heads_kv, seq_q, seq_k), visited)
    # A block that reaches no key loads nothing, and writes zeros.
    reaching = (index for index, tiles in enumerate(walks) if plan.steps_of(len(tiles)))
    q_rows = rows_in(reaching, plan.queries_per_tile, seq_q, before)
    k_rows = rows_in(chain(*walks), plan.walked_keys, seq_k)
    pairs = batch * heads_q
    steps = sum(plan.steps_of(len(tiles)) for tiles in walks)
    shared = pairs // heads  # walks over the keys: the heads of a tile share one
    blocks, copies = len(walks), shared
    if plan.cluster > 1 and plan.paired_heads(heads_q, heads_kv) == 1:
        # Neighbouring tiles have one walk. The last one may lack the other.
        k_rows = rows_in(chain(*walks[::2]), plan.walked_keys, seq_k)
        steps += len(walks) % 2 * plan.steps_of(len(walks[-1]))
        blocks += len(walks) % 2
    elif plan.cluster > 1:
        copies //= 2
    qk_row = plan.head_dim * plan.itemsize
    o_row = plan.head_dim_v * plan.out_itemsize
    again = plan.columns_read_again * plan.itemsize
    own_v_row = plan.own_columns_of_v * plan.itemsize
    kv_touched = rows_in(set(chain(*walks)), plan.walked_keys, seq_k)
    q, o, lse = pairs * q_rows * qk_row, pairs * seq_q * o_row, pairs * seq_q * plan.lse_bytes
    neighbours = batch * neighbours_of_heads(plan, heads_q) * q_rows * qk_row
    logits = heads_q * plan.sink_bytes
    lanes = WARP * plan.warps * plan.heads_per_lane  # each reads the logits of its rows' heads
    return Traffic(
        q=q + neighbours,
        k=copies * k_rows * (qk_row + again),
        v=copies * k_rows * own_v_row,
        o=o,
        lse=lse,
        compulsory=q + o + lse + logits + batch * heads_kv * kv_touched * (qk_row + own_v_row),
        scores=shared * steps * plan.block_q * plan.block_k,
        sink=batch * logits // heads * blocks * lanes,
    )


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
) -> Traffic:
    """Bytes that a backward kernel, or "tangent", moves to and from global memory.

    Rows past the end of a sequence are zeros that are not read.

    Args:
        visited: the key tiles that the kernel visits for each query tile, or, where
            `Plan.owns_keys`, the query tiles for each key tile: the same for every head, or for
            each query head of a group one after the other; None for all tiles.
        dlse: the caller passes a gradient of LSE.

    Raises:
        ValueError: this is the forward kernel, or ``visited`` is for another number of tiles.
    """
    if plan.kernel == "forward":
        raise ValueError("this is the forward kernel: use forward_traffic")
    sizes = LaunchSizes(batch, heads_q, heads_kv, seq_q, seq_k)
    if plan.kernel in CONVERT_KERNELS:
        return _conversion_traffic(plan, sizes)
    if plan.kernel == "delta":
        return _delta_traffic(plan, sizes, dlse=dlse)
    loop = _MainLoop.create(plan, sizes, visited)
    if plan.kernel == "tangent":
        return _tangent_traffic(plan, sizes, loop)
    return (_key_kernel_traffic if plan.owns_keys else _query_kernel_traffic)(plan, sizes, loop)


def _row_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes of a row of Q or K, and of V or O."""
    return plan.head_dim * plan.itemsize, plan.head_dim_v * plan.itemsize


def _parts(plan: Plan, sizes: LaunchSizes) -> int:
    """The parts of a group of query heads."""
    return plan.parts_of_group(*sizes)[0]


def _bytes_of_dq_sums(plan: Plan, sizes: LaunchSizes) -> int:
    return plan.elements_of_sums(sizes.batch, sizes.heads_q, sizes.seq_q) * SUM_BYTES


def _conversion_traffic(plan: Plan, sizes: LaunchSizes) -> Traffic:
    """Bytes of a kernel that writes a gradient from its float32 sums."""
    qk_row, v_row = _row_bytes(plan)
    if plan.kernel == "convert_dq":
        queries = sizes.batch * sizes.heads_q * sizes.seq_q
        return Traffic(dq=queries * qk_row, sums_read=_bytes_of_dq_sums(plan, sizes))
    gradient = CONVERT_KERNELS[plan.kernel]
    keys = sizes.batch * sizes.heads_kv * sizes.seq_k
    written = {gradient: keys * (qk_row if gradient == "dk" else v_row)}
    heads = sizes.heads_kv * _parts(plan, sizes)
    sums = plan.elements_of_sums(sizes.batch, heads, sizes.seq_k) * SUM_BYTES
    return Traffic(sums_read=sums, **written)


def _delta_traffic(plan: Plan, sizes: LaunchSizes, *, dlse: bool) -> Traffic:
    """Bytes of the kernel "delta"."""
    zeroed = _bytes_of_dq_sums(plan, sizes)
    if not plan.has_rows:
        return Traffic(sums_zeroed=zeroed)
    pairs, (_, v_row) = sizes.batch * sizes.heads_q, _row_bytes(plan)
    queries = pairs * sizes.seq_q
    sums = pairs * -(-sizes.seq_q // plan.block_q) * plan.warps if plan.sink_bytes else 0
    return Traffic(
        o=queries * v_row,
        do=queries * v_row,
        lse=queries * LSE_BYTES * (2 if dlse else 1),
        rows_written=queries * ROW_BYTES,
        sink=queries * plan.sink_bytes,
        dsink=sums * SUM_BYTES,
        sums_zeroed=zeroed,
    )


class _MainLoop(NamedTuple):
    """Tiles and rows that the main loops of all blocks of a launch walk.

    Attributes:
        tiles: tiles of a head that blocks own.
        own_rows: existing rows of these tiles, without tiles that reach no other tile.
        walked_rows: rows of the tiles that all blocks walk.
        walked_tiles: the number of tiles that all blocks walk.
        scores: the elements of S that are computed.
    """

    tiles: int
    own_rows: int
    walked_rows: int
    walked_tiles: int
    scores: int

    @staticmethod
    def create(plan: Plan, sizes: LaunchSizes, visited: Visited | None) -> _MainLoop:
        owned, walked = (plan.walked_queries, sizes.seq_q), (plan.walked_keys, sizes.seq_k)
        if plan.owns_keys:
            owned, walked = walked, owned
        walks = walks_of_head(plan, sizes, visited)
        tiles = -(-owned[1] // owned[0])
        reaching = (index for index in range(tiles) if any(map(len, walks[index::tiles])))
        times = sizes.batch * sizes.heads_q * tiles // len(walks)  # repetitions of these walks
        steps = sum(plan.steps_of(len(walk)) for walk in walks)
        return _MainLoop(
            tiles,
            rows_in(reaching, *owned),
            times * rows_in(chain(*walks), *walked),
            times * sum(map(len, walks)),
            times * steps * plan.block_q * plan.block_k,
        )


def _tangent_traffic(plan: Plan, sizes: LaunchSizes, loop: _MainLoop) -> Traffic:
    """Bytes of the kernel "tangent"."""
    pairs, (qk_row, v_row) = sizes.batch * sizes.heads_q, _row_bytes(plan)
    q_bytes, queries = pairs * loop.own_rows * qk_row, pairs * sizes.seq_q
    keys, values = loop.walked_rows * qk_row, loop.walked_rows * v_row
    moves = {name: name in plan.moving for name in "qkv"}
    # Tiles that reach no key read it too, and a sink once more. Not counted is the lane that
    # reads the sum of a row's weights before it writes the tangent of this sum.
    reads = QUAD * plan.column_warps * (2 if plan.sink_bytes else 1)
    return Traffic(
        q=q_bytes,
        q_tangent=q_bytes * moves["q"],
        k=keys,
        k_tangent=keys * moves["k"],
        v=values * plan.scores_move,
        v_tangent=values * moves["v"],
        # Rows past the last one read its O.
        o=pairs * loop.tiles * plan.walked_queries * v_row * (plan.has_rows and plan.scores_move),
        lse=queries * LSE_BYTES * reads * plan.has_rows,
        o_tangent=queries * v_row,
        lse_tangent=queries * LSE_BYTES,
        sink=pairs * plan.sink_bytes * loop.tiles * WARP * plan.warps,
        scores=loop.scores,
    )


def _query_kernel_traffic(plan: Plan, sizes: LaunchSizes, loop: _MainLoop) -> Traffic:
    """Bytes of a kernel whose blocks own queries: "dq", or one for gradients of learned tensors."""
    pairs, (qk_row, v_row) = sizes.batch * sizes.heads_q, _row_bytes(plan)
    row_bytes = ROW_BYTES * plan.has_rows
    return Traffic(
        q=pairs * loop.own_rows * qk_row,
        do=pairs * loop.own_rows * v_row,
        # Tiles that reach no key read them too.
        rows_read=pairs * sizes.seq_q * row_bytes * QUAD * plan.column_warps,
        k=loop.walked_rows * qk_row,
        v=loop.walked_rows * v_row,
        dq=pairs * sizes.seq_q * qk_row if plan.kernel == "dq" else 0,
        scores=loop.scores,
    )


def _key_kernel_traffic(plan: Plan, sizes: LaunchSizes, loop: _MainLoop) -> Traffic:
    """Bytes of a kernel whose blocks own keys: "dkdv" or "fused"."""
    blocks, (qk_row, v_row) = sizes.batch * sizes.heads_kv, _row_bytes(plan)
    written = {"dk": blocks * sizes.seq_k * qk_row, "dv": blocks * sizes.seq_k * v_row}
    if plan.in_parts:
        blocks *= _parts(plan, sizes)
        sums = blocks * loop.tiles * plan.block_k * SUM_BYTES
        written = {"dk_sums": sums * plan.head_dim, "dv_sums": sums * plan.head_dim_v}
    sums_of_tile = plan.walked_queries * plan.sums_tile[1] * SUM_BYTES if plan.sums_tile else 0
    rows_read = plan.walks * loop.walked_rows
    return Traffic(
        k=blocks * loop.own_rows * qk_row,
        v=blocks * loop.own_rows * v_row,
        q=rows_read * qk_row,
        do=rows_read * v_row,
        rows_read=rows_read * ROW_BYTES * plan.has_rows,
        **written,
        added=loop.walked_tiles * sums_of_tile,
        scores=loop.scores,
    )
