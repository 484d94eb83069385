"""Attention of some queries over some keys, and how such results are merged.

A row's results over two sets of keys, O_a with LSE_a and O_b with LSE_b, give those over both:
LSE = ln(exp(LSE_a) + exp(LSE_b)) and O = exp(LSE_a - LSE) O_a + exp(LSE_b - LSE) O_b. The merge is
computed in float32. The backward pass of each part starts from the merged O and LSE, because
P = exp(s - LSE) holds for the keys of every part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashgen.call import OutputGradients

Tensor = torch.Tensor


@dataclass
class Merged:
    """The merged results of some queries; float32, and None before the first part.

    Attributes:
        out: [batch, heads, rows, head_dim_v].
        lse: [batch, heads, rows].
    """

    out: Tensor | None = None
    lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Adds the results over further keys. Rows without keys have LSE -inf and out 0."""
        if self.out is None or self.lse is None:
            self.out, self.lse = out.float(), lse
            return
        total = torch.logaddexp(self.lse, lse)
        self.out = self.out * _weight(self.lse, total) + out.float() * _weight(lse, total)
        self.lse = total

    def add_sink(self, sink: Tensor) -> None:
        """Adds the logits of the sink, [heads] or one for all, to the normaliser."""
        assert self.out is not None
        assert self.lse is not None
        total = torch.logaddexp(self.lse, sink.detach().float().reshape(1, -1, 1))
        self.out = self.out * _weight(self.lse, total)
        self.lse = total


def _weight(part: Tensor, total: Tensor) -> Tensor:
    """exp(part - total) as a factor on rows; 0 where the part is -inf."""
    return torch.where(part == -math.inf, 0.0, (part - total).exp())[..., None]


def sink_gradient(sink: Tensor, results: OutputGradients) -> Tensor:
    """The gradient of the sink from a rank's rows: float32, of the shape of the sink."""
    out, lse, dout, dlse = results
    delta = (dout.float() * out.float()).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    logits = sink.detach().float().reshape(1, -1, 1)
    weight = torch.where(logits == -math.inf, 0.0, (logits - lse).exp())
    of_heads = -(weight * delta).sum((0, 2))
    return (of_heads if sink.numel() == len(of_heads) else of_heads.sum()).reshape(sink.shape)
