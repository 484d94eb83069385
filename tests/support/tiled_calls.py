"""Calls of the tiled algorithms with the defaults that the operator would fill in."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashgen import cpu
from flashgen.call import OutputGradients
from flashgen.language.spec import AttentionSpec

Tensor = torch.Tensor


def arguments(spec: AttentionSpec, q: Tensor, **given: Any) -> cpu.TileArguments:
    scale = spec.scale or 1 / math.sqrt(q.shape[3])
    return cpu.TileArguments(**{"scale": scale, **given})


def forward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, **given: Any
) -> tuple[Tensor, Tensor]:
    return cpu.forward(spec, q, k, v, arguments(spec, q, **given))


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
    out, lse = cpu.forward(spec, q, k, v, options)
    outputs = OutputGradients(out, lse, dout, dlse)
    return out, lse, *cpu.backward(spec, q, k, v, outputs, options)
