"""The call of which a picture shows the mask: its mask, sizes, captured values and tile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch

from flashgen.calls.cpu.chunks import SequenceRows, sequences
from flashgen.calls.cpu.problem import array
from flashgen.kernels.planner import Plan
from flashgen.kernels.visits.visited_tiles import (
    KnownCall,
    live_blocks,
    query_axis,
    rows_by_bounds,
)
from flashgen.shared.call import CheckedCall
from flashgen.shared.signature import LAYOUT, LAYOUT_LISTS
from flashgen.spec.analysis.mask import MaskAnalysis
from flashgen.spec.analysis.tile_walk import Array, TileAxis, exact, numbers_of
from flashgen.spec.language.block_layout import TENSORS as LAYOUT_TENSORS
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import B, H

Pair = tuple[int, int]
"""A batch entry and a query head; with packed sequences, a sequence and a query head."""


@dataclass(frozen=True)
class KernelTile:
    """The tile of a kernel, and how the kernel walks it.

    Attributes:
        block_q, block_k: query rows of one head and keys of a tile.
        owns_keys: whether a thread block owns keys and visits query tiles, not the reverse.
        kernel: the kernel's name, as in `flashgen.kernels.planner.Plan`.
        origin: where the sizes come from, in words.
        group_rows: the rows of a warpgroup, where each may compute only the tiles that its own rows
            reach (`Plan.skipping_rows`).
    """

    block_q: int
    block_k: int
    owns_keys: bool
    kernel: str
    origin: str
    group_rows: int = 0

    @staticmethod
    def from_plan(plan: Plan, kernel: str, origin: str) -> KernelTile:
        """The tile of a plan."""
        rows = plan.skipping_rows(bounded=True)
        return KernelTile(*plan.units, plan.owns_keys, kernel, origin, rows)


@dataclass(frozen=True)
class HeadGroup:
    """Batch entries and heads whose tiles are the same, and the axes of these tiles.

    Attributes:
        first: the pair whose tiles are computed.
        pairs: all pairs with the same tiles.
        entries: the number of batch entries, or of packed sequences, which mods see.
        queries, keys: the axes.
    """

    first: Pair
    pairs: tuple[Pair, ...]
    entries: int
    queries: TileAxis
    keys: TileAxis


@dataclass(frozen=True, eq=False)
class MaskCall:
    """A mask with the sizes and the values of a call, checked.

    Attributes:
        spec: the spec, without score, sink, dropout and pages, on which no mask depends.
        mask: the analysis of its mask, for the axis that the kernel walks.
        problem: the checked sizes and scalars.
        tensors: the captured tensors of the mask and of a block layout, and offsets that are
            tensors, on the CPU.
        tile: the kernel's tile.
    """

    spec: AttentionSpec
    mask: MaskAnalysis
    problem: CheckedCall
    tensors: Mapping[str, torch.Tensor]
    tile: KernelTile

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """The tensors that masks read, as NumPy arrays, by name."""
        lists = LAYOUT_LISTS if self.spec.block_sparse is not None else ()
        read = {name: t for name, t in self.tensors.items() if name not in lists}
        return {name: array(tensor) for name, tensor in read.items()}

    @cached_property
    def _used(self) -> frozenset[sympy.Symbol]:
        mask = self.mask
        intervals = [interval for interval in (mask.reach, mask.full) if interval is not None]
        ends = [
            end for interval in intervals for end in (interval.lo, interval.hi) if end is not None
        ]
        parts = (mask.expr, mask.may, mask.must, *ends)
        return frozenset().union(*(part.free_symbols for part in parts))

    def axes_of(self, rows: SequenceRows) -> tuple[TileAxis, TileAxis]:
        """The axes of queries and keys of a sequence."""
        queries = len(range(*rows.queries.indices(self.problem.seq_q)))
        keys = len(range(*rows.keys.indices(self.problem.seq_k)))
        tile, (q_offset, k_offset) = self.tile, rows.offsets
        group_rows = rows_by_bounds(tile.group_rows, self.mask, self.spec)
        query_tiles = query_axis(self.mask, queries, tile.block_q, q_offset, group_rows)
        return query_tiles, TileAxis(keys, tile.block_k, k_offset)

    def head_groups(self, batch: int | None, head: int | None) -> Iterator[HeadGroup]:
        """The pairs of the call, or those of one batch entry or head, in groups of equal tiles."""
        p, sparse = self.problem, self.spec.block_sparse
        lines = (1, 1)
        if sparse is not None:
            layout = self.tensors.get(LAYOUT)
            by_head = (p.batch, p.heads) if sparse.by_head else (1, 1)
            lines = by_head if layout is None else (layout.shape[0], layout.shape[1])
        by_entry = B in self._used or lines[0] > 1
        by_head_of_call = H in self._used or lines[1] > 1
        heads = range(p.heads_q) if head is None else range(head, head + 1)
        entries = range(p.batch) if batch is None else range(batch, batch + 1)
        entries = entries if heads else range(0)
        for rows in sequences(self.spec, p.batch, self.tensors, (p.q_offset, p.k_offset)):
            present = [
                b for b in entries if rows.index_and_count is None or rows.index_and_count[0] == b
            ]
            count = p.batch if rows.index_and_count is None else rows.index_and_count[1]
            queries, keys = self.axes_of(rows)
            for entry_group in [[b] for b in present] if by_entry else [present] if present else []:
                for h in [[h] for h in heads] if by_head_of_call else [list(heads)]:
                    pairs = tuple((b, head_number) for b in entry_group for head_number in h)
                    yield HeadGroup(pairs[0], pairs, count, queries, keys)

    def values(self, group: HeadGroup) -> dict[sympy.Symbol, Any]:
        """The values of the sizes, scalars, tensors, b and h of a group, by symbol."""
        sizes = group.entries, self.problem.heads_q, group.queries.length, group.keys.length
        numbers: dict[Any, Any] = {**numbers_of(self.spec, sizes, dict(self.problem.scalars))}
        numbers |= {
            t.symbol: self.arrays[t.name] for t in self.spec.tensors if t.name in self.arrays
        }
        b, h = group.first
        return {symbol: exact(value) for symbol, value in (numbers | {B: b, H: h}).items()}

    def live_blocks(self, group: HeadGroup) -> Array | None:
        """Bool [batch or 1, heads or 1, rows, columns] of the block layout; None without one."""
        queries, keys = group.queries, group.keys
        part: dict[str, Any] = {"seq_q": queries.length, "seq_k": keys.length}
        part |= {"q_offset": queries.offset, "k_offset": keys.offset}
        group_problem = replace(self.problem, batch=group.entries, **part)
        return live_blocks(KnownCall(self.spec, group_problem, self.arrays))

    def with_layout(self, group: HeadGroup) -> dict[sympy.Symbol, Any]:
        """`values` with the live blocks, for the evaluation of ``spec.keep``."""
        live = self.live_blocks(group)
        extra = {} if live is None else {LAYOUT_TENSORS[0].symbol: live}
        return {**self.values(group), **extra}
