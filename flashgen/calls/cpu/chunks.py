"""Batch entries at the same positions, and chunks of pairs, which are computed together.

A chunk consists of (batch, head) pairs, which share each torch call. Its operands are matrices
[pairs of a batch entry and a kv head, rows, columns]. The query heads of one group alternate row by
row: row q * group + g is position q of query head h_kv * group + g. Thus a tile of consecutive
positions is a slice, K and V are never repeated, and products over rows sum over the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from flashgen.shared.signature import OFFSETS
from flashgen.spec.language.spec import BOUNDARIES, AttentionSpec

Tensor = torch.Tensor

OWNED_ROWS, WALKED_ROWS = 256, 512
"""The rows of the axis that a tile owns, and of the axis that it walks in one step, for matrix
products that run at full speed. A tile owns as many tiles of the plan as fit."""

ELEMENTS = OWNED_ROWS * WALKED_ROWS
"""The largest number of scores in a tile of a chunk; the workspace of a thread is a few such
tensors. 512 KiB in float32, which fits in a core's cache."""

ELEMENTS_OF_DEVICES = 64 * ELEMENTS
"""`ELEMENTS` on other devices, where an operation on few elements takes as long as its launch."""

FEW_AT_ONCE = 1 << 16
"""Scores of a call that are computed without tiles: fewer operations matter more than memory."""


class SequenceRows(NamedTuple):
    """A range of rows of the operands.

    Attributes:
        index_and_count: for a packed sequence or a single batch entry, its index and their number;
            None for all batch entries.
        offsets: the global positions of the first query and the first key.
        entries: range of batch entries in the operands.
        queries, keys: ranges of rows in q and in k.
    """

    index_and_count: tuple[int, int] | None
    offsets: tuple[int, int]
    entries: slice = slice(None)
    queries: slice = slice(None)
    keys: slice = slice(None)

    def query_rows(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Views of the rows of tensors [batch, heads_q, seq_q, ...]."""
        if self.index_and_count is None:
            return tensors
        return tuple(tensor[self.entries, :, self.queries] for tensor in tensors)

    def key_rows(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Views of the rows of tensors [batch, heads_kv, seq_k, ...]."""
        if self.index_and_count is None:
            return tensors
        return tuple(tensor[self.entries, :, self.keys] for tensor in tensors)


def sequences(
    spec: AttentionSpec, batch: int, tensors: Mapping[str, Tensor], numbers: tuple[int, int]
) -> Iterator[SequenceRows]:
    """All sequences, in order; rows beyond the last boundary belong to no sequence.

    Args:
        batch: the batch entries of the operands.
        numbers: q_offset and k_offset, where they are not among ``tensors``.
    """
    if spec.packed:
        ends_q, ends_k = (tensors[boundary.name].tolist() for boundary in BOUNDARIES)
        count = len(ends_q) - 1
        offsets = _offsets(count, tensors, numbers)
        for i in range(count):
            rows = (slice(ends[i], ends[i + 1]) for ends in (ends_q, ends_k))
            yield SequenceRows((i, count), offsets[i], slice(None), *rows)
        return
    offsets = _offsets(batch, tensors, numbers) if spec.offsets else [numbers]
    if len(set(offsets)) == 1:
        yield SequenceRows(None, offsets[0])
        return
    for i, entry_offsets in enumerate(offsets):
        yield SequenceRows((i, batch), entry_offsets, slice(i, i + 1))


def _offsets(
    count: int, tensors: Mapping[str, Tensor], numbers: tuple[int, int]
) -> list[tuple[int, int]]:
    """q_offset and k_offset of each batch entry or packed sequence."""
    q_offsets, k_offsets = (
        tensors[name].expand(count).tolist() if name in tensors else [number] * count
        for name, number in zip(OFFSETS, numbers, strict=True)
    )
    return list(zip(q_offsets, k_offsets, strict=True))


@dataclass(frozen=True)
class CallSizes:
    """The sizes of one call, all above 0.

    Attributes:
        first: the batch index of the first entry in mods: 0, or the number of a packed sequence or
            of a single batch entry.
        on_cpu: whether the operands are on the CPU.
    """

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int
    first: int = 0
    on_cpu: bool = True

    @property
    def most(self) -> int:
        """The largest number of scores in a tile of a chunk."""
        return ELEMENTS if self.on_cpu else ELEMENTS_OF_DEVICES

    @property
    def group(self) -> int:
        """The number of query heads per kv head."""
        return self.heads_q // self.heads_kv

    @property
    def scores(self) -> int:
        """The number of scores, masked ones included."""
        return self.batch * self.heads_q * self.seq_q * self.seq_k


@dataclass(frozen=True)
class Chunk:
    """Some batch entries and some of their kv heads.

    Attributes:
        batch, heads: half-open ranges of batch entries and of kv heads.
    """

    sizes: CallSizes
    batch: range
    heads: range

    @property
    def pairs(self) -> int:
        """The number of pairs of a batch entry and a kv head."""
        return len(self.batch) * len(self.heads)

    def walked(self, owned: int) -> int:
        """The number of positions that a tile which owns ``owned`` positions walks at once."""
        return self.sizes.most // (self.pairs * self.sizes.group * owned)

    @cached_property
    def is_whole(self) -> bool:
        """Whether the chunk has all batch entries and heads."""
        return self.pairs == self.sizes.batch * self.sizes.heads_kv

    def query_matrices(self, tensor: Tensor) -> Tensor:
        """[batch, heads_q, seq_q, x] as this chunk's [pairs, seq_q * group, x].

        Contiguous, as batched products need for speed; a view where possible.
        """
        if self.is_whole and self.sizes.group == 1 and tensor.is_contiguous():
            return tensor.flatten(0, 1)
        part = self._grouped(tensor).permute(0, 1, 3, 2, 4)
        return part.reshape(self.pairs, -1, tensor.shape[3]).contiguous()

    def key_matrices(self, tensor: Tensor) -> Tensor:
        """[batch, heads_kv, seq_k, x] as this chunk's [pairs, seq_k, x], contiguous; a view where
        possible."""
        if self.is_whole and tensor.is_contiguous():
            return tensor.flatten(0, 1)
        return self._kv(tensor).reshape(self.pairs, -1, tensor.shape[3]).contiguous()

    def result_for(self, whole: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        """[pairs, rows, x] of ``dtype`` for a part of ``whole``; a view of it where possible."""
        kv = self.sizes.heads_kv == whole.shape[1]
        if kv and whole.dtype == dtype and whole.is_contiguous():
            return self.key_matrices(whole)
        return torch.empty(self.pairs, rows, whole.shape[3], dtype=dtype)

    def to_queries(self, whole: Tensor, part: Tensor) -> None:
        """Writes [pairs, seq_q * group, x] where `query_matrices` of ``whole`` would read it."""
        if self.is_whole and whole.data_ptr() == part.data_ptr():
            return
        grouped = self._grouped(whole)
        if grouped.data_ptr() == part.data_ptr():
            return
        batch, heads, group, rows, columns = grouped.shape
        grouped.copy_(part.view(batch, heads, rows, group, columns).permute(0, 1, 3, 2, 4))

    def to_keys(self, whole: Tensor, part: Tensor) -> None:
        """Writes [pairs, seq_k, x] where `key_matrices` of ``whole`` would read it."""
        rows = self._kv(whole)
        if rows.data_ptr() != part.data_ptr():
            rows.copy_(part.view(rows.shape))

    @cached_property
    def batch_and_head(self) -> tuple[Tensor, Tensor]:
        """b and h (of query heads) as mods see them, int64 [pairs, group], on the CPU."""
        group, first = self.sizes.group, self.sizes.first
        b = torch.arange(first + self.batch.start, first + self.batch.stop)
        h = torch.arange(self.heads.start * group, self.heads.stop * group)
        shape = len(b), len(self.heads), group
        return (
            b[:, None, None].expand(shape).reshape(self.pairs, group),
            h.view(1, -1, group).expand(shape).reshape(self.pairs, group),
        )

    def _grouped(self, tensor: Tensor) -> Tensor:
        """[batch entries, kv heads, group, seq_q, x], a view."""
        group = self.sizes.group
        heads = slice(self.heads.start * group, self.heads.stop * group)
        part = tensor[self.batch.start : self.batch.stop, heads]
        return part.view(len(self.batch), len(self.heads), group, *part.shape[2:])

    def _kv(self, tensor: Tensor) -> Tensor:
        return tensor[self.batch.start : self.batch.stop, self.heads.start : self.heads.stop]


def chunks(sizes: CallSizes, tile: int) -> list[Chunk]:
    """All pairs, in chunks whose tiles of ``tile`` elements have at most ``sizes.most``.

    There is a chunk for each thread where the call has enough scores and pairs.
    """
    pairs = max(1, sizes.most // max(1, tile * sizes.group))
    if sizes.scores > FEW_AT_ONCE:
        pairs = min(pairs, -(-sizes.batch * sizes.heads_kv // torch.get_num_threads()))
    heads = min(pairs, sizes.heads_kv)
    entries = min(pairs // heads, sizes.batch) if heads == sizes.heads_kv else 1
    return [
        Chunk(
            sizes,
            range(b, min(b + entries, sizes.batch)),
            range(h, min(h + heads, sizes.heads_kv)),
        )
        for b in range(0, sizes.batch, entries)
        for h in range(0, sizes.heads_kv, heads)
    ]


class Workspace:
    """Named matrices that all tiles share, so that they need the memory of one tile.

    Attributes:
        wide: the workspace of float64 matrices.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.wide = self if dtype == torch.float64 else Workspace(torch.float64)
        self._memory: dict[str, Tensor] = {}
        self._views: dict[tuple[str, int, int, int], Tensor] = {}

    def matrix(self, name: str, pairs: int, rows: int, columns: int) -> Tensor:
        """[pairs, rows, columns], contiguous, uninitialised."""
        key = name, pairs, rows, columns
        view = self._views.get(key)
        if view is None:
            size = pairs * rows * columns
            memory = self._memory.get(name)
            if memory is None or memory.numel() < size:
                memory = torch.empty(size, dtype=self.dtype)
                self._memory[name] = memory
                self._views = {k: v for k, v in self._views.items() if k[0] != name}
            view = memory[:size].view(pairs, rows, columns)
            self._views[key] = view
        return view
