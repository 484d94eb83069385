"""Calls of the tiled algorithms with the defaults that the operator would fill in."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashgen import tiled
from flashgen.spec import AttentionSpec

Tensor = torch.Tensor


def arguments(spec: AttentionSpec, q: Tensor, **given: Any) -> dict[str, Any]:
    scale = spec.scale or 1 / math.sqrt(q.shape[3])
    return {"scale": scale, "q_offset": 0, "k_offset": 0, "scalars": {}, **given}


def forward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, **given: Any
) -> tuple[Tensor, Tensor]:
    return tiled.forward(spec, q, k, v, **arguments(spec, q, **given))


def both(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv and the gradients of learnable tensors."""
    options = arguments(spec, q, **given)
    out, lse = tiled.forward(spec, q, k, v, **options)
    return out, lse, *tiled.backward(spec, q, k, v, out, lse, dout, dlse, **options)
