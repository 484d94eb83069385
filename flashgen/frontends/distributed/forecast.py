"""What each rank of a distributed call holds, sends and computes, predicted without a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashgen.frontends.distributed.balance import check_sizes, live_tiles, mask_inputs
from flashgen.frontends.distributed.exchange import refuse
from flashgen.frontends.distributed.reach import needed_by, reached
from flashgen.frontends.distributed.sharding import Sharding, check_method, sharding_of
from flashgen.kernels.planner import plan
from flashgen.shared.arch import facts
from flashgen.shared.errors import called_by_users
from flashgen.spec.analysis.tile_walk import Array
from flashgen.spec.language.spec import AttentionSpec

MOST_TILES = 2048
"""Tiles of queries, and of keys, that are classified at most; longer sequences have larger ones."""


@dataclass(frozen=True)
class RankForecast:
    """One rank of a call.

    Attributes:
        share: its part of all live scores.
        memory: bytes of q, k, v, the output, and of keys and values of other ranks.
        sent: bytes of keys and values, or of all_to_all's exchanges, that it sends.
        transfer, compute: seconds.
    """

    share: float
    memory: int
    sent: int
    transfer: float
    compute: float

    def seconds(self, overlaps: bool) -> float:
        return max(self.transfer, self.compute) if overlaps else self.transfer + self.compute


@called_by_users()
@dataclass(frozen=True)
class Forecast:
    """A forward call on all ranks; `str` gives the assumptions and a table.

    Attributes:
        overlaps: whether transfers run beside kernels, as in a ring.
        alone: seconds of the same call on one device of unlimited memory.
        seq: positions of the whole.
        owners: for each tile of queries the rank that computes it.
        live: bool [tiles, tiles], whether the mask may keep an element.
    """

    ranks: tuple[RankForecast, ...]
    overlaps: bool
    alone: float
    assumptions: tuple[str, ...]
    seq: int
    owners: Array = field(repr=False)
    live: Array = field(repr=False)

    @property
    def seconds(self) -> float:
        return max(rank.seconds(self.overlaps) for rank in self.ranks)

    @property
    def largest_over_mean(self) -> float:
        return max(rank.share for rank in self.ranks) * len(self.ranks)

    def __str__(self) -> str:
        lines = [*self.assumptions, "", "rank    share     memory       sent   transfer    compute"]
        rank_numbers = range(len(self.ranks))
        if len(self.ranks) > 16:  # the first ones, and those that take longest and shortest
            order = sorted(rank_numbers, key=lambda n: self.ranks[n].seconds(self.overlaps))
            rank_numbers = sorted({*range(6), *order[:1], *order[-2:]})  # type: ignore[assignment]
        for number in rank_numbers:
            forecast = self.ranks[number]
            lines.append(
                f"{number:4}  {forecast.share:7.3%}  {forecast.memory / 1e9:6.2f} GB  "
                f"{forecast.sent / 1e9:6.2f} GB  {forecast.transfer * 1e3:6.2f} ms  "
                f"{forecast.compute * 1e3:6.2f} ms"
            )
        lines += [
            "",
            f"largest share {self.largest_over_mean:.3f} of the mean; forward "
            f"{self.seconds * 1e3:.2f} ms, {self.alone / self.seconds:.1f} times as fast as one "
            "device",
        ]
        return "\n".join(lines)

    def draw(self, file: Path) -> None:
        """Draws which rank computes which tile; the suffix sets the format."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        tile_owners = np.where(self.live, self.owners[:, None].astype(float), np.nan)
        step = max(1, len(tile_owners) // 512)
        figure, axes = pyplot.subplots(figsize=(6.5, 5.5), layout="constrained")
        colours = pyplot.get_cmap("viridis", len(self.ranks))
        image = axes.imshow(
            tile_owners[::step, ::step],
            cmap=colours,
            vmin=-0.5,
            vmax=len(self.ranks) - 0.5,
            extent=(0, self.seq, self.seq, 0),
        )
        axes.set_title("the rank that computes each tile; white tiles are empty")
        axes.set_xlabel("position of the key")
        axes.set_ylabel("position of the query")
        figure.colorbar(image, label="rank")
        figure.savefig(file, dpi=130)
        pyplot.close(figure)


@called_by_users()
def forecast(
    spec: AttentionSpec,
    world: int,
    sizes: tuple[int, int, int, int],
    *,
    arch: str = "sm_90a",
    method: str = "ring",
    shard: Any = "head_tail",
    captures: Mapping[str, Any] | None = None,
    link: float | None = None,
) -> Forecast:
    """Predicts the forward pass of a distributed call.

    Args:
        sizes: batch, heads_q, heads_kv and positions of the whole.
        arch: the architecture of the GPUs; the plan's predicted cost and the rates are its.
        method, shard: as for `flashgen.distributed.attention`.
        captures: the scalars and captured tensors that the mask reads.
        link: bytes per second that a GPU can send; if None, that of the architecture.

    Raises:
        InputError: the sequence cannot be divided, or an argument is invalid.
    """
    where = "flashgen.distributed.forecast"
    check_method(method, where)
    if not isinstance(sizes, Sequence) or len(sizes) != 4:
        what, way_out = "sizes are not those of a call", "batch, heads_q, heads_kv, positions"
        refuse(what, "sizes", f"given {sizes!r:.200}", f"sizes=({way_out})", where)
    batch, heads_q, heads_kv, seq = sizes
    counts = {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv}
    check_sizes(where, spec, seq=seq, world=world, **counts)
    if link is not None and not (isinstance(link, int | float) and 0 < link < math.inf):
        what = "link is not a number of bytes per second"
        refuse(what, "link", f"given {link!r:.200}", "link=450e9, or None", where)
    sharding = sharding_of(shard, world, seq // world, where)
    if sharding.length != seq:
        what, numbers = "the chunks are not those of the sequence", f"{sharding.length} positions"
        refuse(what, "shard", f"{numbers}; seq {seq}", "chunks of all positions", where)
    planned, gpu = plan(spec, arch), facts(arch)
    tile = tile_of(seq)
    scalars, tensors = mask_inputs(spec, seq, (batch, heads_q), captures or {})
    live = live_tiles(spec, seq, (batch, heads_q), tile, scalars, tensors)
    owners = _owners(sharding, seq, tile)
    rows = live.sum(axis=1).astype(float)
    shares = np.array([rows[owners == rank].sum() for rank in range(world)]) / max(rows.sum(), 1)
    if method == "all_to_all":
        shares = np.full(world, 1 / world)
    clocks = planned.cost * rows.sum() * tile * tile * batch * heads_q
    alone = clocks / (gpu.sms * gpu.clock_hz)
    rate = link or gpu.link_bytes_per_s
    item = planned.itemsize
    key_row = batch * heads_kv * (planned.head_dim + planned.head_dim_v) * item
    query_row = batch * heads_q * ((planned.head_dim + planned.head_dim_v) * item + 4)
    whole_sizes = (batch, heads_q, seq, seq)
    reach = reached(spec, sharding.chunks, sharding.chunks, whole_sizes, scalars, tensors)
    if method == "all_to_all":
        sent = np.full(world, seq / world * (world - 1) / world * (1 + query_row / key_row))
        received = np.zeros(world)
    else:
        sent, received = _traffic(method, sharding, needed_by(sharding, reach), world)
    own_rows = seq // world
    ranks = tuple(
        RankForecast(
            float(shares[rank]),
            int(own_rows * (key_row + query_row) + received[rank] * key_row),
            int(sent[rank] * key_row),
            float(sent[rank] * key_row / rate),
            float(alone * shares[rank]),
        )
        for rank in range(world)
    )
    assumptions = (
        f"{spec.name}, {batch} x {heads_q}/{heads_kv} heads x {seq:,} positions on {world} ranks, "
        f"{method}, {shard if isinstance(shard, str) else 'given chunks'}",
        f"predicted: {planned.cost:.4f} clocks per score and SM, {gpu.sms} SMs at "
        f"{gpu.clock_hz / 1e6:,.0f} MHz ({gpu.product}), without waves and launches; live tiles of "
        f"{tile:,} x {tile:,}",
        f"link: {rate / 1e9:,.0f} GB/s sent by each GPU, without latency or contention; transfers "
        + ("run beside kernels" if method == "ring" else "come before and after the kernels"),
    )
    return Forecast(ranks, method == "ring", alone, assumptions, seq, owners, live)


def tile_of(seq: int) -> int:
    """Positions of a tile with which a mask is classified."""
    return max(128, -(-seq // MOST_TILES))


def _owners(sharding: Sharding, seq: int, tile: int) -> Array:
    """The rank of the first position of each tile of queries."""
    starts = np.array([chunk.start for chunk in sharding.chunks])
    order = np.argsort(starts)
    chunk_indices = np.searchsorted(starts[order], np.arange(0, seq, tile), side="right") - 1
    return np.asarray(sharding.owners)[order][chunk_indices]


def _traffic(method: str, sharding: Sharding, needed: Array, world: int) -> tuple[Array, Array]:
    """Rows of keys that each rank sends, and that it holds of other ranks at once."""
    lengths = np.array([len(chunk) for chunk in sharding.chunks], dtype=float)
    owners = np.asarray(sharding.owners)
    ranks = np.arange(world)
    others = needed & (owners[None] != ranks[:, None])
    if method == "all_gather":
        sent = np.array([(others[:, owners == r] * lengths[owners == r]).sum() for r in ranks])
        return sent, others @ lengths
    # A chunk travels to the last rank that needs it, and each rank on its way sends it on.
    distance = (ranks[:, None] - owners[None]) % world
    last = np.where(needed, distance, 0).max(axis=0)
    sent = ((distance < last[None]) * lengths[None]).sum(axis=1)
    share = lengths.sum() / world
    return sent, np.minimum(3 * share, others @ lengths)
