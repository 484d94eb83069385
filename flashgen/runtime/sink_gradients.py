"""The parts of the sink's gradient and of LSE that no kernel computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashgen.runtime.bound_kernel import BoundKernel
from flashgen.runtime.learned_gradients import LearnedGradients
from flashgen.runtime.packed_sequences import rows_outside
from flashgen.signature import CallSignature, TensorArgument

Tensor = torch.Tensor

SUMS = "sink_sums"
"""The delta kernel's pointer to the contributions of each warp's rows to the sink's gradient."""


def lse_without_keys(signature: CallSignature, captured: Mapping[str, Tensor], q: Tensor) -> Tensor:
    """LSE of a call with seq_k 0, float32 [batch, heads_q, seq_q]: the sink's logit in each row."""
    from flashgen.cpu import sinks

    name = _sink(signature).name
    lse = sinks.lse_without_keys(captured[name], tuple(q.shape[:3]), torch.float32)
    if signature.packed:
        lse.masked_fill_(rows_outside(captured, q.shape[2]), -torch.inf)
    return lse


def add_without_keys(
    signature: CallSignature,
    gradients: LearnedGradients,
    captured: Mapping[str, Tensor],
    dlse: Tensor | None,
) -> None:
    """Adds the sink's gradient of a call with seq_k 0, where that gradient is needed."""
    from flashgen.cpu import sinks

    if signature.sink is not None and signature.sink.grad and dlse is not None:
        name = signature.sink.name
        if signature.packed:
            dlse = dlse.masked_fill(rows_outside(captured, dlse.shape[2]), 0)
        gradients.add(name, sinks.gradient_without_keys(captured[name], dlse.float()))


def sums_for(kernel: BoundKernel, q: Tensor) -> Tensor:
    """A buffer for the sums of the delta kernel's warps, [batch, heads_q, row tiles, warps]."""
    tiles, heads, batch = kernel.grid
    return q.new_empty((batch, heads, tiles, kernel.build.plan.warps), dtype=torch.float32)


def add_sums(
    signature: CallSignature,
    gradients: LearnedGradients,
    captured: Mapping[str, Tensor],
    warp_sums: Tensor,
) -> None:
    """Adds the sums of the delta kernel's warps, in a fixed order.

    Args:
        warp_sums: the buffer of `sums_for`.
    """
    name = _sink(signature).name
    head_sums, sink = warp_sums.sum((0, 2, 3)), captured[name]
    total = head_sums if sink.numel() == len(head_sums) else head_sums.sum()
    gradients.add(name, total.view(sink.shape))


def _sink(signature: CallSignature) -> TensorArgument:
    assert signature.sink is not None, "called for specs with a sink only"
    return signature.sink
