"""Attention of some queries over some keys, and how such results are merged.

The results over a part of the keys are float32, and are merged in float32 before they are rounded
(`calls.runtime.merge`). The backward pass of each part starts from the merged O and LSE, because
P = exp(s - LSE) holds for the keys of every part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.calls.runtime.merge import merge, sink_as_result
from flashgen.calls.sinks import Dims, Rows, gradient_of_rows, logits_of
from flashgen.shared.call import OutputGradients

Tensor = torch.Tensor


@dataclass
class Merged:
    """The merged results of some queries, float32; None before the first part.

    Attributes:
        backend, arch: of the call.
        out: [batch, heads, rows, head_dim_v].
        lse: [batch, heads, rows].
        normalize: the divisor of the spec, a name. But for the softmax's, results are plain sums,
            and lse is the sum of the weights.
    """

    backend: str | None
    arch: str | None
    out: Tensor | None = None
    lse: Tensor | None = None
    normalize: str = "softmax"

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Adds the results over further keys, float32."""
        if self.out is None or self.lse is None:
            self.out, self.lse = out, lse
        elif self.normalize != "softmax":
            self.out, self.lse = self.out + out, self.lse + lse
        else:
            earlier = self.out, self.lse
            self.out, self.lse = self._merged(out, lse, merged=earlier)

    def result(self, dtype: torch.dtype, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """out, rounded to ``dtype``, and lse.

        Args:
            sink: logits of rows that join the normaliser, broadcast to those of lse.
        """
        assert self.out is not None
        assert self.lse is not None
        if self.normalize == "sum":
            divisor = self.lse.masked_fill(self.lse == 0, math.inf)
            return (self.out / divisor[..., None]).to(dtype), self.lse
        if sink is None:
            return self.out.to(dtype), self.lse
        sink_result = sink_as_result(self.out, sink)
        return self._merged(self.out, self.lse, merged=sink_result, out_dtype=dtype)

    def _merged(self, out: Tensor, lse: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return merge(out[None], lse[None], backend=self.backend, arch=self.arch, **options)


def sink_gradient(sink: Tensor, dims: Dims, rows: Rows, results: OutputGradients) -> Tensor:
    """The gradient of the sink from a rank's rows and heads: float32, of the shape of the sink."""
    out, lse, dout, dlse = results
    delta = (dout.float() * out.float()).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    logits = logits_of(sink, dims, rows)
    # Neither a sink of -inf nor rows outside all packed sequences have a weight.
    none = (logits == -math.inf) | (lse == -math.inf)
    weight = torch.where(none, 0.0, (logits - lse).exp())
    return gradient_of_rows(sink, dims, rows, -weight * delta)
