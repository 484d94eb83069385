"""The number of keys of a split, chosen from a tile, the key heads and the slots of a GPU.

Each split costs bytes beside its keys: the queries are read again, and a part is written and read.
Long splits have few of them, and leave prefills few parts. Short ones divide the work evenly. Where
none with few bytes divides it evenly, the one with which the slots are busiest is chosen; where
values are columns of the keys, whose parts are large, or codes, the one that takes the least time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.shared.call import CheckedCall
from flashgen.shared.launch_facts import LaunchRules

LENGTHS = (32_768, 49_152, 65_536, 98_304, 131_072)
"""Numbers of keys of one sequence for which the SMs are kept busy."""

LEAST_BUSY = 0.875
"""The wanted share of the time in which an SM has work, for each of `LENGTHS`. Multiples of the 160
keys of a tile do not reach 0.9 for 8 key heads on 132 SMs."""

MOST_OVER_BOUND = 1.05
"""The bytes of a split over those of its keys and values, at most."""

MOST_OVER_BOUND_OF_CODES = 1.06
"""The same where a cache has codes: what a split has beside its keys weighs twice as much. Numbers
and scales of pages are counted with it."""

OF_PAGE = 12
"""Bytes of the number of a page of codes and of its scales."""

PAGE = 16
"""Keys of a page for which they are counted: those of many servers."""

GROUP = 4
"""Query heads for each key head, for which bytes are counted. The choice cannot depend on the call,
and 4 is the group of many models; fewer have fewer bytes beside the keys."""

GROUP_OF_ONE = 64
"""Those for which the time is compared where values are columns of the keys: 16 to 128 heads share
one key head in models with latent attention. Their parts have the bytes of hundreds of keys."""

HEADS_KV = 8
"""Key heads for which batch-invariant calls have their splits: those of many models. The number in
a call is less where ranks share the heads."""

HEADS_KV_OF_ONE = 1
"""The same where values are columns of the keys: ranks share the query heads of one key head."""

STEP = 16
"""A split is a multiple of the keys of one matrix product, and of those of a tile, so that no score
behind its border is computed. It has two tiles at least, so that one is loaded during another."""

_MOST_KEYS = 1 << 14


@dataclass(frozen=True)
class SplitBytes:
    """Bytes that the launches of a call move for a split, by the formulas of its traffic.

    Attributes:
        of_key: bytes of a row of K and a row of V.
        of_part: bytes of a split beside its keys: q of `GROUP` heads is read, their parts and LSE
            are written and read, and the warps of a block read the length of the sequence.
        heads: query heads of a key head for which times are compared.
        of_codes: whether keys and values are codes of a cache.
    """

    of_key: int
    of_part: int
    heads: int
    of_codes: bool = False

    @property
    def large_parts(self) -> bool:
        """Whether parts decide on the time: they have the bytes of hundreds of keys, or stand
        beside codes, whose tiles of one warp have so many slots that few lengths fill them."""
        return self.heads > GROUP or self.of_codes

    def over_bound(self, keys: int) -> float:
        """The bytes of a split over those of its keys and values."""
        return 1 + self.of_part / (keys * self.of_key) + self.of_pages

    @property
    def of_pages(self) -> float:
        """The bytes of the numbers and scales of pages over those of keys and values."""
        return OF_PAGE / (PAGE * self.of_key) if self.of_codes else 0

    @property
    def most(self) -> float:
        """The largest `over_bound` of a choice."""
        return MOST_OVER_BOUND_OF_CODES if self.of_codes else MOST_OVER_BOUND


@dataclass(frozen=True)
class SplitPlan:
    """The splits of a call with one sequence and one query.

    Attributes:
        size: the keys of a split, a multiple of `block_k` and of 16.
        few_rows: query rows of a key head that one work tile, or two, compute.
        block_k: keys of a tile.
        heads_kv: key heads, whose splits are work tiles each.
        slots: blocks that run at the same time.
        bytes: the bytes of a split.
    """

    size: int
    few_rows: int
    block_k: int
    heads_kv: int
    slots: int
    bytes: SplitBytes

    def size_of(self, call: CheckedCall, *, paged: bool) -> int:
        """The split_size of a call that gives none; 0: its keys are not split.

        With contiguous keys, a call has few query rows if those of all heads that share a key head
        fit in one tile, and are not more than the keys of a split: one thread block would have all
        keys of a key head. Two tiles are few where values are columns of the keys: 128 heads share
        these, and a tile has 64 rows. Keys of one split are not divided. With pages the keys of
        every call are split, because a row has the same bits in all of them. The batch decides in
        neither case.
        """
        few = call.query_rows <= min(self.few_rows, self.size) and call.seq_k > self.size
        return self.size if paged or few else 0

    @property
    def over_bound(self) -> float:
        """The bytes of a split over those of its keys and values."""
        return self.bytes.over_bound(self.size)

    @property
    def suffices(self) -> bool:
        """Whether the slots are kept busy."""
        return min(map(self.busy, LENGTHS)) >= LEAST_BUSY

    @property
    def least_busy(self) -> tuple[float, int]:
        """The least `busy` of all lengths from the first of `LENGTHS` on, and where it is.

        It is just past a number of whole rounds. Later ends of rounds lose less.
        """
        lengths = {LENGTHS[0]}
        first = math.ceil(LENGTHS[0] / self.size)
        for splits in range(first, first + 2 * self.slots):
            if self._rounds(splits + 1) > self._rounds(splits):
                lengths.add(splits * self.size + 1)
        return min((self.busy(keys), keys) for keys in lengths)

    def busy(self, keys: int) -> float:
        """The share of the time in which slots have work, where keys take equal times.

        The last split may have few keys.
        """
        rounds = self._rounds(math.ceil(keys / self.size))
        return self.heads_kv * keys / (rounds * self.slots * self.size)

    @property
    def time(self) -> float:
        """The mean time of a sequence of each of `LENGTHS`, over that of an even division.

        The time is that of a split's bytes, and of one more tile, which nothing overlaps.
        """
        of_parts = (self.over_bound - 1) * self.bytes.heads / GROUP
        of_split = 1 + of_parts + self.block_k / self.size
        return sum(of_split / self.busy(keys) for keys in LENGTHS) / len(LENGTHS)

    def _rounds(self, splits: int) -> int:
        return math.ceil(self.heads_kv * splits / self.slots)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        tiles = self.size // self.block_k
        wanted = f"{self.slots} slots busy for {LEAST_BUSY:.0%} of the time"
        if self.suffices:
            why = f"about the most that keeps {wanted}"
        else:
            chosen = "takes the least time" if self.bytes.large_parts else "comes nearest"
            why = f"none with few bytes keeps {wanted}, this one {chosen}"
        yield f"split_size = {self.size:,} keys, {tiles} tiles of {self.block_k}: {why}"
        for keys in LENGTHS:
            tiles = self.heads_kv * math.ceil(keys / self.size)
            yield (
                f"  {keys:>9,} keys   work_tiles = {self.heads_kv}*ceil({keys}/{self.size}) = "
                f"{tiles:,}   busy = {self.busy(keys):.1%}"
            )
        least, where = self.least_busy
        yield f"  between them busy is least at {where:,} keys: {least:.1%}"
        pages = f" + {OF_PAGE}/({PAGE}*{self.bytes.of_key})" if self.bytes.of_codes else ""
        yield (
            f"  bytes for {GROUP} heads over those of the keys = 1 + {self.bytes.of_part}/"
            f"({self.size}*{self.bytes.of_key}){pages} = {self.over_bound:.3f}, "
            f"at most {self.bytes.most}"
        )
        if self.bytes.large_parts and not self.suffices:
            yield (
                f"  time for {self.bytes.heads} heads, with one more tile of each split, over that "
                f"of an even division: mean of these lengths {self.time:.3f}"
            )


def choose_split(kernel: LaunchRules, heads_kv: int, sms: int, code_bytes: int = 0) -> SplitPlan:
    """The splits of a call that gives no split_size.

    Args:
        kernel: the plan or the facts of the forward kernel, with one query head in a tile.
        heads_kv: key heads.
        sms: SMs of the GPU.
        code_bytes: those of a code of the cache; 0 where it has elements.
    """
    of_split, slots = _bytes_of(kernel, code_bytes), sms * kernel.blocks_per_sm
    few_rows = kernel.block_q * (2 if kernel.one_tensor else 1)
    step = math.lcm(STEP, kernel.block_k)
    few_bytes = [
        SplitPlan(size, few_rows, kernel.block_k, heads_kv, slots, of_split)
        for size in range(2 * step, _MOST_KEYS, step)
        if of_split.over_bound(size) <= of_split.most
    ]
    busy = [each for each in few_bytes if each.suffices]
    if not busy:  # few key heads, or so many SMs that no split suffices
        if few_bytes[0].bytes.large_parts:
            return min(few_bytes, key=lambda each: each.time)
        return max(few_bytes, key=lambda each: sorted(map(each.busy, LENGTHS)))
    return busy[-1]


def usual_heads_kv(*, one_tensor: bool) -> int:
    """The key heads for which batch-invariant calls have their splits."""
    return HEADS_KV_OF_ONE if one_tensor else HEADS_KV


def _bytes_of(kernel: LaunchRules, code_bytes: int) -> SplitBytes:
    d_qk, d_v, e = kernel.head_dim, kernel.head_dim_v, kernel.itemsize
    part = 2 * 4 * d_v + 2 * 4  # O and LSE, float32, written and read
    lengths = 4 * (kernel.warps + kernel.is_persistent)  # one warp of the producer reads it too
    of_key = (code_bytes or e) * (d_qk + kernel.own_columns_of_v)
    of_part = GROUP * (e * d_qk + part) + lengths
    heads = GROUP_OF_ONE if kernel.one_tensor else GROUP
    return SplitBytes(of_key, of_part, heads, of_codes=code_bytes > 0)
