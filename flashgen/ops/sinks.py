"""The sink of a call: what its kernels leave to be done with tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashgen.ops.backends import Bound
from flashgen.ops.packed import nobodys
from flashgen.ops.sums import Sums
from flashgen.spec import AttentionSpec

Tensor = torch.Tensor

SUMS = "sink_sums"
"""The delta kernel's pointer: to what each warp's rows give to the sink's gradient."""


def lse_without_keys(spec: AttentionSpec, captured: Mapping[str, Tensor], q: Tensor) -> Tensor:
    """LSE of a call with seq_k 0, float32 [batch, heads_q, seq_q]: the sink in every row."""
    from flashgen.tiled import sinks

    lse = sinks.lse_without_keys(captured[spec.sink.name], tuple(q.shape[:3]), torch.float32)
    return lse.masked_fill_(nobodys(captured, q.shape[2]), -torch.inf) if spec.packed else lse


def add_without_keys(
    spec: AttentionSpec, sums: Sums, captured: Mapping[str, Tensor], dlse: Tensor | None
) -> None:
    """Adds the gradient of the sink of a call with seq_k 0, where it is needed."""
    from flashgen.tiled import sinks

    if spec.sink is not None and spec.sink.grad and dlse is not None:
        name = spec.sink.name
        if spec.packed:
            dlse = dlse.masked_fill(nobodys(captured, dlse.shape[2]), 0)
        sums.add(name, sinks.gradient_without_keys(captured[name], dlse.float()))


def sums_for(kernel: Bound, q: Tensor) -> Tensor:
    """A buffer for what the warps of the delta kernel write, [batch, heads_q, row tiles, warps]."""
    tiles, heads, batch = kernel.grid
    return q.new_empty((batch, heads, tiles, kernel.build.plan.warps), dtype=torch.float32)


def add_sums(
    spec: AttentionSpec, sums: Sums, captured: Mapping[str, Tensor], of_warps: Tensor
) -> None:
    """Adds what the warps of the delta kernel wrote, in one order.

    Args:
        of_warps: of `sums_for`.
    """
    name = spec.sink.name
    of_heads, sink = of_warps.sum((0, 2, 3)), captured[name]
    sums.add(name, (of_heads if sink.numel() == len(of_heads) else of_heads.sum()).view(sink.shape))
