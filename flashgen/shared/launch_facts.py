"""The facts of a kernel and its plan that launches need, as plain values, without derivations.

A plan is a `LaunchRules`, and so is the `LaunchFacts` that it makes for its compiled kernel. An
export stores the latter, so that its kernels are launched without the planner.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flashgen.shared.errors import PlanError
from flashgen.shared.paths import PATHS, CodePath
from flashgen.shared.signature import GradientTerm

KEY_KERNELS = ("dkdv", "fused")
"""The backward kernels with scores whose thread blocks own keys."""

CONVERT_KERNELS = {"convert_dq": "dq", "convert_dk": "dk", "convert_dv": "dv"}
"""The kernels that convert float32 sums, and the gradients that they write."""

PAGED_KERNELS = ("forward", "dq")
"""The kernels that read keys and values from the pages of a cache."""

APPEND_KERNELS = ("append_kv", "append_codes")
"""The kernels that write new keys and values to a paged cache."""

STREAMING_KERNELS = (
    *("delta", *CONVERT_KERNELS, "minmax_table", "merge", "add_rows"),
    *APPEND_KERNELS,
)
"""The kernels without score elements, which are bound by memory."""

MAX_WORK_TILES = 2**30
"""Work tiles of a launch: the kernel counts in int32, and every block fetches one number past the
last work tile."""

SPAN = 16
"""Elements per span of a min/max table; ranges are rounded outward to spans."""

Box = tuple[int, int, int]

Sizes = tuple[int, int, int, int, int]
"""The sizes of a call: batch, query heads, key heads, queries and keys."""


def column_ranges(dim: int, columns: int) -> tuple[slice, ...]:
    """The columns of V of each launch, where a launch computes ``columns`` of ``dim`` columns."""
    return tuple(slice(first, min(first + columns, dim)) for first in range(0, dim, columns))


@dataclass(frozen=True)
class HeadsPerTile:
    """The choice for a call.

    Attributes:
        heads: query heads per tile.
        reason: the tiles that it saves, or why it is 1; "" where there was no alternative.
        few_rows: rows of the smallest tile in which the rows of a served call fit; 0: the tile of
            all calls.
        unpaired: whether the blocks of a short call form no clusters, which other calls have.
    """

    heads: int
    reason: str
    few_rows: int = 0
    unpaired: bool = False


@dataclass(frozen=True)
class LaunchBlocks:
    """The number of blocks of a launch.

    Attributes:
        count: thread blocks of the launch.
        work_tiles: work tiles of the launch.
        reason: why this number of blocks was chosen.
    """

    count: int
    work_tiles: int
    reason: str = "as requested"

    @property
    def persistent(self) -> bool:
        """Whether blocks fetch work tiles from the counter, which must be 0 before the launch."""
        return self.count < self.work_tiles

    def __str__(self) -> str:
        shares = "which fetch them from a counter" if self.persistent else "one each"
        return f"tiles     {self.work_tiles:,} for {self.count:,} blocks, {shares}: {self.reason}"


class LaunchMachine(NamedTuple):
    """The facts of a GPU on which launches of persistent or interleaved kernels depend.

    Attributes:
        sms: the multiprocessors of the product that the architecture's facts name.
        l2_room: bytes of L2 that the operands of interleaved heads may take.
        start_clocks: clocks that a persistent block saves with each work tile after its first.
        clear_clocks: clocks to clear the work-tile counter.
    """

    sms: int
    l2_room: float
    start_clocks: float
    clear_clocks: float


class DecodingTile(NamedTuple):
    """The tile of calls with few query rows, by which the number of keys of a split is chosen.

    Attributes:
        rows: its query rows.
        clocks: clocks of a block for each of its keys, beside 0, 1, ... others on its SM, up to as
            many as fit.
        restarted: steps for each further split of a block that has several.
        key_bytes: bytes of a row of K and a row of V in memory.
        cost: clocks of an SM for each score in the tile of many rows, which has the same keys.
        least_cost: the same in the cheapest tile of many rows.
    """

    rows: int
    clocks: tuple[float, ...]
    restarted: float
    key_bytes: int
    cost: float
    least_cost: float


@dataclass(frozen=True, kw_only=True)
class LaunchRules(ABC):
    """The facts and rules of the launches of a kernel: the grid and the sizes of buffers.

    Attributes: as in `flashgen.kernels.planner.Plan`.
    """

    kernel: str = "forward"
    arch: str
    path: str
    dtype: str
    itemsize: int
    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    warps: int
    blocks_per_sm: int
    heads_per_tile: int = 1
    access_bytes: int = 16
    smem_bytes: int = 0
    sums_tile: tuple[int, int] | None = None
    integer_bits: int = 32
    one_tensor: bool = False
    cluster: int = 1
    decoding: DecodingTile | None = None

    @property
    @abstractmethod
    def machine(self) -> LaunchMachine:
        """The facts of the GPU on which launches depend."""

    @property
    def code_path(self) -> CodePath:
        """The code path whose name is `path`."""
        return PATHS[self.path]

    @property
    def head_places(self) -> int:
        """Heads for which a forward tile has rows, those without a head included."""
        return head_places(self.block_q, self.heads_per_tile)

    @property
    def queries_per_tile(self) -> int:
        """Query rows of each head in a tile."""
        return self.block_q // self.head_places

    @property
    def owns_keys(self) -> bool:
        """Whether a thread block owns block_k keys rather than block_q queries."""
        return self.kernel in (*KEY_KERNELS, "convert_dk", "convert_dv")

    @property
    def is_persistent(self) -> bool:
        """Whether the kernel is persistent: a block computes one work tile after another."""
        return self.kernel in self.code_path.persistent

    @property
    def streams(self) -> bool:
        """Whether the kernel computes no score elements and is bound by memory."""
        return self.kernel in STREAMING_KERNELS

    @property
    def overlaps(self) -> bool:
        """Whether the kernel is launched while the one before it in its call still runs, and waits
        for it itself: see `CodePath.dependents`."""
        return any(second == self.kernel for _, second in self.code_path.dependents)

    @property
    def merges_splits(self) -> bool:
        """Whether a "merge" is one of the results over split keys, whose blocks have 32 columns of
        a row each."""
        return self.kernel == "merge" and self.block_q == 1

    @property
    def launches(self) -> int:
        """Launches per backward pass: exact sums first need the greatest contribution."""
        return 2 if self.kernel == "captured_exact" else 1

    def grid(
        self,
        batch: int,
        heads_q: int,
        heads_kv: int,
        seq_q: int,
        seq_k: int,
        *,
        packed: bool = False,
        head_bits: int = 0,
        splits: int = 1,
        parts: int = 1,
    ) -> tuple[int, int, int]:
        """Thread blocks of a launch, or work tiles of a persistent kernel, in three dimensions.

        Args:
            packed: the batch entries are sequences of one packed tensor; seq_q and seq_k are the
                sums of their lengths.
            head_bits: logarithm to base 2 of the number of interleaved heads, from `head_bits`; 0:
                head by head.
            splits: splits of the keys, which count as batch entries.
            parts: parts of each group of query heads, which count as key heads where blocks
                compute scores.

        Returns:
            (tiles, heads, batch entries): query tiles and groups of `heads_per_tile` query heads,
            or, where `owns_keys`, key tiles and key heads. With interleaved heads: (tiles times the
            interleaved heads, heads divided by their number, batch entries). With packed sequences:
            (the largest possible number of tiles of all sequences, heads, splits).
        """
        length, block, heads = seq_q, self.queries_per_tile, heads_q // self.heads_per_tile
        if self.owns_keys:
            length, block, heads = seq_k, self.block_k, heads_kv
            heads *= 1 if self.streams else parts
        if self.merges_splits:
            length *= -(-self.head_dim_v // (32 * self.warps))  # a column for each thread
        tiles = -(-length // block)
        if self.cluster > 1:
            paired = self.paired_heads(heads_q, heads_kv)
            tiles, heads = 2 * (tiles if paired > 1 else -(-tiles // 2)), heads // paired
        if packed and self.kernel != "delta":
            return (length // block + batch) << head_bits, heads >> head_bits, splits
        entries = 1 if packed else batch * splits
        return tiles << head_bits, heads >> head_bits, entries

    def paired_heads(self, heads_q: int, heads_kv: int) -> int:
        """Tiles of neighbouring heads that the blocks of a cluster have: 2 where the heads of a
        group have an even number of them, else 1: they have neighbouring tiles of queries."""
        tiles_of_group = heads_q // max(1, heads_kv) // self.heads_per_tile
        return 2 if self.cluster > 1 and tiles_of_group % 2 == 0 else 1

    def elements_of_sums(self, batch: int, heads: int, length: int, *, packed: bool = False) -> int:
        """Elements of the float32 sums of a gradient: whole tiles of rows; 0 without sums.

        Args:
            heads, length: of the gradient of queries, query heads and queries; of keys, key heads
                times the parts of their groups, and keys.
            packed: as in `grid`. The sums of sequence b begin with the tile of its first row in the
                tensor plus b.
        """
        if self.sums_tile is None:
            return 0
        rows, columns = self.sums_tile
        tiles = length // rows + batch if packed else batch * -(-length // rows)
        return tiles * heads * rows * columns

    @property
    def row_bytes(self) -> int:
        """Bytes that the blocks which share a head access of each row that they all walk: Q and dO,
        and the sums of dQ to which they add, where they own keys; else K and V."""
        sums = 4 * self.sums_tile[1] if self.owns_keys and self.sums_tile else 0
        return (self.head_dim + self.own_columns_of_v) * self.itemsize + sums

    @property
    def own_columns_of_v(self) -> int:
        """Columns of values that are not columns of the keys, and are read besides these."""
        return 0 if self.one_tensor else self.head_dim_v

    def part_heads(self, batch: int, heads_q: int, heads_kv: int, seq_q: int, seq_k: int) -> int:
        """Query heads of each part of a group, where blocks own keys and may divide the group.

        Blocks of later keys have fewer causal tiles in each head, so that blocks that walk a whole
        group drift apart by heads: Q, dO and the sums of dQ of all heads between them must stay in
        L2. A group is halved until these tensors, of the heads that run at the same time, fit in a
        share of L2. The last part may have fewer heads.
        """
        heads = heads_q // heads_kv
        slots, tiles = self.machine.sms * self.blocks_per_sm, max(1, -(-seq_k // self.block_k))
        at_once = max(1.0, slots / tiles)
        bytes_of_head = seq_q * self.row_bytes
        while heads > 1:
            if min(heads * at_once, batch * heads_q) * bytes_of_head <= self.machine.l2_room:
                break
            heads = -(-heads // 2)
        return heads

    def head_bits(
        self, heads_q: int, heads_kv: int, seq_q: int, seq_k: int, part_heads: int | None = None
    ) -> int:
        """Logarithm to base 2 of the number of heads that are interleaved tile by tile.

        A power of two that divides the heads of a batch entry (query heads, or key heads where
        blocks own keys, or parts of their groups): the largest one whose operands and sums fit in a
        share of L2, but at least so many that their tiles occupy two thirds of the SMs. With fewer,
        the short tiles of one head end beside the long tiles of the next: causal gradients of 8 key
        heads in 64 tiles each took 1.21 times as long on an H200, head by head. The low bits of a
        block's number are then its head. Heads that share a tile count as one.

        Args:
            seq_q, seq_k: with packed sequences, the sums of their lengths.
            part_heads: query heads of a part; None where blocks walk whole groups.
        """
        group, heads = heads_q // heads_kv, heads_q
        tiles, row_bytes = -(-seq_q // self.queries_per_tile), self.row_bytes
        if self.owns_keys:  # all key tiles of a head read its Q and dO
            part_heads = part_heads or group
            heads, tiles = heads_kv * -(-group // part_heads), -(-seq_k // self.block_k)
            bytes_of_head: float = part_heads * seq_q * row_bytes
        else:
            heads //= self.heads_per_tile * self.paired_heads(heads_q, heads_kv)
            bytes_of_head = self.heads_per_tile * seq_k * row_bytes / group
        bits, room = 0, self.machine.l2_room
        slots = self.machine.sms * self.blocks_per_sm
        while heads % (2 << bits) == 0 and (
            (2 << bits) * bytes_of_head <= room or 3 * (tiles << bits) < 2 * slots
        ):
            bits += 1
        return bits

    def blocks_of(
        self, work_tiles: int, sms: int | None = None, requested: int | None = None
    ) -> LaunchBlocks:
        """The number of blocks of a launch of a persistent kernel (`is_persistent`).

        Args:
            work_tiles: the number of work tiles of the launch, the product of `grid`.
            sms: SMs of the GPU; None for the product that the architecture's facts name.
            requested: the caller's number of blocks, at least 1. No more than the work tiles are
                launched.

        Raises:
            PlanError: there are more work tiles than the kernel can count, or ``requested`` is not
                a number of blocks.
        """
        machine = self.machine
        if work_tiles > MAX_WORK_TILES:
            raise PlanError(
                "the call has too many query tiles",
                where="the sizes of q",
                numbers=f"{work_tiles:,} tiles of {self.block_q} rows; at most {MAX_WORK_TILES:,}",
                way_out="fewer batch entries or heads in one call",
            )
        if requested is not None and self.cluster > 1:
            raise PlanError(
                "the blocks of a cluster have one work tile each",
                where="argument blocks",
                numbers=f"given {requested!r}; {work_tiles:,} work tiles "
                f"in clusters of {self.cluster}",
                way_out="no blocks; or a tile with cluster=1",
            )
        if requested is not None:
            if not isinstance(requested, int) or isinstance(requested, bool) or requested < 1:
                raise PlanError(
                    "blocks is not a number of blocks",
                    where="argument blocks",
                    numbers=f"given {requested!r}: it is 1 or more",
                    way_out=f"blocks={machine.sms}, one block per SM, or none: the plan chooses it",
                )
            return LaunchBlocks(min(requested, work_tiles), work_tiles)
        if self.cluster > 1:
            return LaunchBlocks(work_tiles, work_tiles, "blocks of a cluster have one each")
        slots = (sms or machine.sms) * self.blocks_per_sm
        saved = machine.start_clocks * (math.ceil(work_tiles / slots) - 1)
        count = min(slots, work_tiles) if saved > machine.clear_clocks else work_tiles
        reason = (
            f"starts saved {saved:,.0f} clk, {'more' if count < work_tiles else 'no more'} than "
            f"{machine.clear_clocks:,.0f} clk to clear a counter"
        )
        return LaunchBlocks(count, work_tiles, reason)


class ParamFacts(NamedTuple):
    """A field of a kernel's parameter struct.

    Attributes:
        name: its name among the arguments of a launch.
        ctype: "pointer", "int64", "int32", "float32" or "tensormap".
    """

    name: str
    ctype: str


@dataclass(frozen=True, kw_only=True)
class LaunchFacts(LaunchRules):
    """The plain values of one kernel.

    Attributes:
        name: the name of the ``extern "C"`` kernel.
        params: the fields of its parameter struct, in order.
        threads: threads of a thread block.
        of_gpu: the facts of the GPU on which launches depend.
        boxes: the boxes that TMA copies of each operand, by its name: columns, rows and heads.
        terms: for exact sums of learned tensors, the elements to whose gradients it adds.
        other attributes: as in the kernel's plan.
    """

    name: str
    params: tuple[ParamFacts, ...]
    threads: int
    of_gpu: LaunchMachine
    boxes: tuple[tuple[str, Box], ...] = ()
    terms: tuple[GradientTerm, ...] = ()

    @property
    def machine(self) -> LaunchMachine:
        return self.of_gpu


def head_places(rows: int, heads: int) -> int:
    """The number of equal parts into which heads that share a tile divide its rows.

    One for each head, where that divides the rows; else a power of two, and the rows of the last
    parts belong to no head.
    """
    return heads if rows % heads == 0 else 1 << (heads - 1).bit_length()


def mean_length(rows: int, batch: int) -> int:
    """The rows of each packed sequence, which count as equally long where a launch is planned."""
    return -(-rows // max(batch, 1))


def fits_rows(rows: int, heads: int, seq_q: int) -> bool:
    """Whether a tile of so many rows has all queries of the heads that share it."""
    return heads <= rows and seq_q <= rows // head_places(rows, heads)


def heads_of_fewest_rows(rows: Mapping[int, int], tiles: Mapping[int, int], gain: float) -> int:
    """The least number of heads per tile within a factor of the fewest computed rows.

    Args:
        rows, tiles: by number of heads, ascending: the rows of its tile, and the tiles of a launch.
        gain: the factor.
    """
    computed = {heads: tiles[heads] * rows[heads] for heads in tiles}
    fewest = min(computed.values())
    return next(heads for heads in tiles if computed[heads] <= gain * fewest)
