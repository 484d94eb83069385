"""The lists of a call whose queries choose their keys, as the page tables of sequences.

All of it is made on the device of the lists, without waiting for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from flashgen.shared.signature import LISTED, OFFSETS, OWNED, PAGE_NAMES

Tensor = torch.Tensor

MOST_OF_LIST = 1024
"""Groups in a list of a block of keys: longer ones are cut, so that no thread block has to walk the
groups of a block that all of them chose. The gradients of the parts are added."""

FEWEST_ROWS = 16
"""Keys of a block that are the rows of a sequence, at least. The keys of smaller blocks are rows of
the groups that list them: a small block would fill few of the 64 rows or more of a tile."""

MOST_ROWS = 1 << 19
"""Rows of keys at once, each with its key, value and gradients in memory."""


class Pages(NamedTuple):
    """Rows of a tensor [batch, heads, length, columns] as the pages of a cache, without a copy.

    Attributes:
        cache: [pages, 1, rows of a page, columns]; pages overlap.
        entry, head, step: how many pages the next batch entry, head and block of rows are further.
    """

    cache: Tensor
    entry: int
    head: int
    step: int

    @staticmethod
    def from_rows(x: Tensor, rows: int) -> Pages:
        batch, heads, length, columns = x.shape
        moves = [
            stride if size > 1 else 0
            for size, stride in zip(
                (batch, heads, length // rows),
                (x.stride(0), x.stride(1), rows * x.stride(2)),
                strict=True,
            )
        ]
        unit = math.gcd(*moves) or columns
        entry, head, step = (move // unit for move in moves)
        last = (batch - 1) * entry + (heads - 1) * head + (length // rows - 1) * step
        size, stride = (last + 1, 1, rows, columns), (unit, unit, x.stride(2), 1)
        return Pages(x.as_strided(size, stride, x.storage_offset()), entry, head, step)


class ListSizes(NamedTuple):
    """The sizes of a call with lists.

    Attributes:
        batch, heads: batch entries and key heads.
        group: query heads of a key head.
        groups: groups of queries; of block_q each.
        blocks: blocks of keys in a batch entry; of block_k each.
    """

    batch: int
    heads: int
    group: int
    groups: int
    blocks: int
    block_q: int
    block_k: int
    seq_q: int
    seq_k: int

    @property
    def ragged(self) -> tuple[bool, bool]:
        return self.seq_q % self.block_q > 0, self.seq_k % self.block_k > 0

    @property
    def rows(self) -> int:
        """The rows of a group of queries."""
        return self.group * self.block_q

    def by_groups(self, x: Tensor) -> Tensor:
        """Rows [batch, heads_q, seq_q, ...] as [sequences, 1, rows, ...]: groups of queries."""
        lacking = self.groups * self.block_q - self.seq_q
        if lacking:
            x = torch.cat([x, x.new_zeros(*x.shape[:2], lacking, *x.shape[3:])], 2)
        columns = x.shape[3:]
        x = x.reshape(self.batch, self.heads, self.group, self.groups, self.block_q, *columns)
        x = x.permute(0, 1, 3, 4, 2, *range(5, x.dim()))
        return x.reshape(-1, 1, self.rows, *columns)

    def from_groups(self, x: Tensor) -> Tensor:
        """The inverse of `by_groups`: [batch, heads_q, seq_q, ...], a view."""
        columns = x.shape[3:]
        x = x.view(self.batch, self.heads, self.groups, self.block_q, self.group, *columns)
        x = x.permute(0, 1, 4, 2, 3, *range(5, x.dim()))
        return x.reshape(self.batch, -1, self.groups * self.block_q, *columns)[:, :, : self.seq_q]

    def by_blocks(self, x: Tensor) -> Tensor:
        """Keys [batch, heads, seq_k, columns], with rows of zeros up to the end of a block."""
        lacking = self.blocks * self.block_k - self.seq_k
        return torch.nn.functional.pad(x, (0, 0, 0, lacking)) if lacking else x

    def in_blocks(self, x: Tensor) -> Tensor:
        """Keys [batch, heads, seq_k, columns] as [blocks of all key heads, block_k, columns]."""
        return self.by_blocks(x).reshape(-1, self.block_k, x.shape[3])

    def from_blocks(self, x: Tensor) -> Tensor:
        """The inverse of `in_blocks`."""
        return x.view(self.batch, self.heads, -1, x.shape[2])[:, :, : self.seq_k]

    def owners(self, lines: Tensor, numbers: Tensor) -> Tensor:
        """Int32 [sequences, 4]: batch entries, first query heads, own blocks and key heads.

        Args:
            lines: key heads, counted over all batch entries.
        """
        heads = lines % self.heads * self.group
        return torch.stack([lines // self.heads, heads, numbers, lines], -1).to(torch.int32)


def lists_of(
    sizes: ListSizes, counts: Tensor, blocks: Tensor, keys: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Blocks and lengths of the lists of each key head, without entries that are no block.

    Args:
        keys: the keys of each batch entry, where these differ. A block that lacks some of its keys
            is then the last one of its list, as the last page of any sequence is.
    """
    shape = sizes.batch, sizes.heads, sizes.groups
    slot = torch.arange(blocks.shape[-1], device=blocks.device)
    none = (slot >= counts[..., None]) | (blocks == -1)
    rank = 2 * none.to(torch.uint8)
    if keys is not None:
        lacking = blocks == keys.view(-1, 1, 1, 1) // sizes.block_k
        rank = torch.where(none, rank, lacking)
        blocks = blocks.expand_as(rank)  # those that batch entries share
    listed = blocks.gather(-1, rank.argsort(dim=-1, stable=True)).long()
    lengths = none.logical_not().sum(-1)
    listed = listed.expand(*shape, -1).reshape(sizes.batch * sizes.heads, sizes.groups, -1)
    return listed, lengths.expand(shape).reshape(sizes.batch * sizes.heads, sizes.groups)


class KeyRows(NamedTuple):
    """Sequences that have rows of keys, for the gradients of keys and values.

    A sequence has a block of keys and a list of the groups that chose it, or a part of a long list;
    or it has the keys in the list of a group.

    Attributes:
        owners: int32 [sequences, 4], as `ListSizes.owners`.
        listed: int32 [sequences, most], the groups of its list, or the blocks.
        key_blocks: int64 [sequences, blocks of rows], the block of keys of each block of rows,
            counted over all key heads; the number of all blocks for rows of no block.
        pages: int32 [sequences, most], the groups, counted over all key heads, and int32
            [sequences], the number of groups; () where a sequence has the list of a group.
    """

    sizes: ListSizes
    owners: Tensor
    listed: Tensor
    key_blocks: Tensor
    pages: tuple[Tensor, ...] = ()

    @property
    def has_group_lists(self) -> bool:
        """Whether a sequence has the keys in the list of a group."""
        return not self.pages

    @property
    def ragged(self) -> tuple[bool, bool]:
        """As `ListSizes.ragged`; a list may have entries beyond all keys."""
        ragged_queries, ragged_keys = self.sizes.ragged
        return ragged_queries, ragged_keys or self.has_group_lists

    @staticmethod
    def by_group(sizes: ListSizes, blocks: Tensor, lengths: Tensor) -> KeyRows:
        """The keys that each group lists; each key is there as often as it is listed.

        Args:
            blocks, lengths: the lists, as `lists_of` gives them.
        """
        lines, groups, _ = blocks.shape
        device = blocks.device
        group = torch.arange(lines * groups, device=device)
        listed = _in_lists(sizes, blocks, lengths).flatten(0, 1)
        listed_blocks = torch.where(listed, blocks.flatten(0, 1), sizes.blocks)
        line = (group // groups)[:, None]
        key_blocks = torch.where(listed, line * sizes.blocks + listed_blocks, lines * sizes.blocks)
        owners = sizes.owners(group // groups, group % groups)
        return KeyRows(sizes, owners, listed_blocks.to(torch.int32), key_blocks)

    @staticmethod
    def by_block(sizes: ListSizes, blocks: Tensor, lengths: Tensor) -> KeyRows:
        """The blocks of keys, with the groups that chose each in ascending order.

        Args:
            blocks, lengths: the lists, as `lists_of` gives them.
        """
        lines, groups, most = blocks.shape
        device, total = blocks.device, lines * sizes.blocks
        line = torch.arange(lines, device=device)[:, None, None]
        listed = _in_lists(sizes, blocks, lengths)
        chosen = torch.where(listed, line * sizes.blocks + blocks, total).flatten()
        chosen, order = chosen.sort(stable=True)
        group = order // most  # counted over all key heads
        starts = torch.searchsorted(chosen, torch.arange(total + 1, device=device))
        counts = starts.diff()
        # Twice the mean length, so that most lists are whole and the table stays small.
        width = min(1 << (2 * len(chosen) // total).bit_length(), MOST_OF_LIST, groups)
        cuts = torch.nn.functional.pad((-(-counts // width)).clamp_min(1).cumsum(0), (1, 0))
        sequences = total + len(chosen) // width  # the most that there can be
        rank = torch.arange(len(chosen), device=device) - starts[chosen]
        sequence = (cuts[chosen] + rank // width).where(chosen < total, sequences)
        table = group.new_zeros((sequences + 1, width))
        table[sequence, (rank % width).where(chosen < total, 0)] = group
        pages = table[:-1]
        number = torch.arange(sequences, device=device)
        key_blocks = (torch.searchsorted(cuts, number, right=True) - 1).clamp(0, total - 1)
        groups_left = counts[key_blocks] - (number - cuts[key_blocks]) * width
        return KeyRows(
            sizes,
            sizes.owners(key_blocks // sizes.blocks, key_blocks % sizes.blocks),
            (pages % groups).to(torch.int32),
            key_blocks[:, None],
            (pages.to(torch.int32), groups_left.clamp(0, width).to(torch.int32)),
        )

    def parts(self) -> Iterator[tuple[slice, KeyRows]]:
        """The sequences in parts whose rows fit in memory, each with the range of its sequences."""
        sequences_at_once = max(MOST_ROWS // (self.key_blocks.shape[1] * self.sizes.block_k), 1)
        for first in range(0, len(self.owners), sequences_at_once):
            sequences = slice(first, first + sequences_at_once)
            owners, listed, key_blocks = (x[sequences] for x in self[1:4])
            pages = tuple(x[sequences] for x in self.pages)
            yield sequences, KeyRows(self.sizes, owners, listed, key_blocks, pages)

    def tensors(self) -> dict[str, Tensor]:
        """The captured tensors of the calls, by name."""
        tensors = {OWNED: self.owners, LISTED: self.listed}
        if self.pages:
            pages, lengths = self.pages
            tensors |= {PAGE_NAMES[0]: pages, PAGE_NAMES[1]: lengths * self.sizes.rows}
            tensors[OFFSETS[0]] = lengths.new_zeros(1)
        return tensors

    def rows_of(self, x: Tensor) -> Tensor:
        """The rows [sequences, 1, rows, columns] of x [blocks, block_k, columns]."""
        blocks: Tensor = x[self.key_blocks.clamp(max=len(x) - 1)]
        return blocks.flatten(1, 2)[:, None]


def _in_lists(sizes: ListSizes, blocks: Tensor, lengths: Tensor) -> Tensor:
    """Which entries of the lists of groups are blocks of the keys."""
    listed = torch.arange(blocks.shape[-1], device=blocks.device) < lengths[..., None]
    return listed & (blocks >= 0) & (blocks < sizes.blocks)
