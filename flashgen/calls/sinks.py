"""The sink of a call without keys, and its gradient from those of the heads of a call."""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor


def lse_without_keys(
    sink: Tensor, rows: tuple[int, ...], dtype: torch.dtype, first_head: int = 0
) -> Tensor:
    """LSE of a call without keys, [batch, heads, seq_q]: the sink's logit in each row."""
    logits = of_heads(sink.detach().flatten(), first_head, rows[1])
    return logits.to(dtype).reshape(1, -1, 1).expand(rows).contiguous()


def gradient_without_keys(sink: Tensor, dlse: Tensor, first_head: int = 0) -> Tensor:
    """The sink's gradient in a call without keys, where LSE is the sink; dtype of ``dlse``."""
    return gradient_of(sink, dlse.sum((0, 2)), first_head).masked_fill(sink == -math.inf, 0)


def of_heads(logits: Tensor, first_head: int, heads: int) -> Tensor:
    """Those of the whole's logits [heads or 1] that belong to the heads of a call."""
    return logits if len(logits) == 1 else logits[first_head : first_head + heads]


def gradient_of(sink: Tensor, by_head: Tensor, first_head: int) -> Tensor:
    """The gradient of a sink from those of a call's heads [heads]; 0 for the other heads."""
    if sink.numel() == 1:
        return by_head.sum().view(sink.shape)
    total = by_head.new_zeros(sink.numel())
    total[first_head : first_head + len(by_head)] = by_head
    return total.view(sink.shape)
