"""Attention of transformers whose backward pass starts from O and LSE in float32.

Every backward pass that recomputes P from LSE has the error that this rounding makes; ordinary
attention, which keeps P itself, does not. In float64 `flashgen.reference.compare` takes it as
``kept``; in float32 it is an ordinary computation with this backward pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

Tensor = torch.Tensor

NAME = "kept"
LOWEST = -1e30


def _rounded(x: Tensor) -> Tensor:
    """``x`` in float32; by NumPy, since the tests turn casts to float32 into casts to float64."""
    numbers = x.numpy()
    return torch.from_numpy(numbers.astype("float32").astype(numbers.dtype))


class _FromRounded(torch.autograd.Function):
    """The output for scores [b, h, q, k], values, a sink [h] or None, and dropout or None."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, value: Tensor, sink: Tensor | None, dropped: Tensor | None
    ) -> Tensor:
        # A row without keys has LSE -inf, which cannot be subtracted.
        lse = scores.logsumexp(-1, keepdim=True).clamp_min(LOWEST)
        if sink is not None:
            lse = torch.logaddexp(lse, sink[:, None, None])
        p = (scores - lse).exp()
        out = (p if dropped is None else p * dropped) @ value
        ctx.save_for_backward(scores, value, _rounded(out), _rounded(lse), sink, dropped)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        scores, value, out, lse, sink, dropped = ctx.saved_tensors
        p = (scores - lse).exp()
        delta = (dout * out).sum(-1, keepdim=True)
        dp = dout @ value.transpose(-1, -2)
        dvalue = (p if dropped is None else p * dropped).transpose(-1, -2) @ dout
        dscores = p * ((dp if dropped is None else dp * dropped) - delta)
        dsink = None
        if sink is not None:
            dsink = -((sink[:, None, None] - lse).exp() * delta).sum((0, 2, 3))
        return dscores, dvalue, dsink, None


def from_rounded(scores: Tensor, value: Tensor) -> Tensor:
    """The output for scores [b, h, q, k], with the backward pass of this module."""
    out: Tensor = _FromRounded.apply(scores, value, None, None)
    return out


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask < 0, -math.inf)
    ones = scores.detach().new_ones(scores.shape)
    dropped = torch.nn.functional.dropout(ones, dropout, module.training) if dropout else None
    return _FromRounded.apply(scores, value, s_aux, dropped).transpose(1, 2).contiguous(), None


def register() -> None:
    """Makes it available as ``attn_implementation="kept"``."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, eager_mask)
