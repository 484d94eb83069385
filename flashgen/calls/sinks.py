"""The logits of a sink at the rows of a call; its gradient from gradients of rows or heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from flashgen.shared.signature import BOUNDARIES, OFFSETS, PAGE_NAMES, CallSignature

Tensor = torch.Tensor
Dims = Sequence[str | int]


class Rows(NamedTuple):
    """The b, h and q that mods see at rows: integer tensors that broadcast to one shape.

    Attributes:
        axis: the axis of the queries of a head.
    """

    b: Tensor
    h: Tensor
    q: Tensor
    axis: int = 2

    def indices(self, dims: Dims, sink: Tensor) -> tuple[Tensor, ...]:
        """The indices of the element of the sink for each row, or of the nearest one inside."""
        by_name = {"batch": self.b, "heads": self.h, "seq_q": self.q}
        first_index = torch.zeros_like(self.h[:1, :1, :1])
        sizes = zip(dims, sink.shape, strict=True)
        return tuple(by_name.get(str(dim), first_index).clamp(0, size - 1) for dim, size in sizes)


def rows_at(q: Tensor, first_head: int, positions: Tensor, ends: Tensor | None) -> Rows:
    """Rows [batch, heads, rows] of q, which need not be all of them.

    Args:
        first_head: the number of the first head of q.
        positions: int64 [rows], their positions; of packed sequences, counted over all rows.
        ends: the boundaries of packed sequences; None without.
    """
    rows = positions.view(1, 1, -1)
    h = torch.arange(q.shape[1], device=q.device).view(1, -1, 1) + first_head
    if ends is None:
        return Rows(torch.arange(q.shape[0], device=q.device).view(-1, 1, 1), h, rows)
    ends = ends.long()
    b = torch.searchsorted(ends[1:].contiguous(), rows, right=True).clamp(max=len(ends) - 2)
    return Rows(b, h, rows - ends[b])


def rows_of_call(
    signature: CallSignature,
    captured: Mapping[str, Tensor],
    q: Tensor,
    first_head: int,
    q_offset: int,
) -> Rows:
    """The rows of q, [batch, heads, seq_q]. Offsets may be data, for which no device waits."""
    positions = torch.arange(q.shape[2], device=q.device)
    ends = captured[BOUNDARIES[0]] if signature.packed else None
    rows = rows_at(q, first_head, positions, ends)
    offset: Tensor | int = q_offset
    if OFFSETS[0] in captured:
        offset = captured[OFFSETS[0]].long().view(-1)
    elif signature.paged:  # the queries come last
        lengths = q.shape[2] if ends is None else ends.diff()
        offset = captured[PAGE_NAMES[1]].long() - lengths
    if isinstance(offset, Tensor):
        offset = offset[rows.b.clamp(max=len(offset) - 1)]
    return rows._replace(q=rows.q + offset)


def logits_of(sink: Tensor, dims: Dims, rows: Rows, dtype: torch.dtype = torch.float32) -> Tensor:
    """The logits of rows, which broadcast to their shape."""
    return sink.detach()[rows.indices(dims, sink)].to(dtype)


def weights_of(sink: Tensor, dims: Dims, rows: Rows, lse: Tensor) -> Tensor:
    """The sink's share of rows with this LSE; differentiable by the sink."""
    logits = sink[rows.indices(dims, sink)].float()
    # Of a row with LSE -inf the sink is -inf, or the row belongs to no sequence.
    outside = lse == -math.inf
    return torch.exp(logits.masked_fill(outside, -math.inf) - lse.masked_fill(outside, 0))


def gradient_of_rows(sink: Tensor, dims: Dims, rows: Rows, row_gradients: Tensor) -> Tensor:
    """The gradient of a sink from the gradients of rows, in their dtype, in a fixed order."""
    indices = rows.indices(dims, sink)
    if all(index.shape[rows.axis] == 1 for index in indices):
        row_gradients = row_gradients.sum(rows.axis, keepdim=True)
    if not indices:
        return row_gradients.sum()
    element_indices = tuple(index.expand(row_gradients.shape) for index in indices)
    return row_gradients.new_zeros(sink.shape).index_put_(
        element_indices, row_gradients, accumulate=True
    )


def gradient_without_keys(sink: Tensor, dims: Dims, rows: Rows, dlse: Tensor) -> Tensor:
    """The sink's gradient in a call without keys, where LSE is the sink; dtype of ``dlse``."""
    removed = logits_of(sink, dims, rows) == -math.inf
    return gradient_of_rows(sink, dims, rows, dlse.masked_fill(removed, 0))


def head_logits(logits: Tensor, first_head: int, heads: int) -> Tensor:
    """The logits of the heads of a call, from the logits [heads or 1] of the whole."""
    return logits if len(logits) == 1 else logits[first_head : first_head + heads]


def gradient_of(sink: Tensor, by_head: Tensor, first_head: int) -> Tensor:
    """The gradient of a sink from the gradients of a call's heads; 0 for the other heads."""
    if sink.numel() == 1:
        return by_head.sum().view(sink.shape)
    total = by_head.new_zeros(sink.numel())
    total[first_head : first_head + len(by_head)] = by_head
    return total.view(sink.shape)
