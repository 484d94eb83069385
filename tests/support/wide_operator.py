"""An operator on float64 tensors, which only the tiled algorithms compute: for gradcheck."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashgen.calls import cpu
from flashgen.calls.ops.autograd import attend_plain
from flashgen.calls.ops.operator import Operator
from flashgen.shared.call import (
    DEFAULT_OPTIONS,
    CallOptions,
    Operands,
    OutputGradients,
    ResultTangents,
    Tangents,
)
from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor


class WideOperator(Operator):
    """The passes of a spec in float64, with tiles that leave odd ends; it is not registered."""

    def __init__(self, spec: AttentionSpec, **given: Any) -> None:
        super().__init__(spec, spec.name or "")
        self.given = given

    def _arguments(self, operands: Operands) -> cpu.TileArguments:
        tensors = dict(zip(self.tensors, operands.captured, strict=True))
        scale = self.spec.scale or 1 / math.sqrt(operands.q.shape[3])
        tiles = {"block_q": 4, "block_k": 6}
        return cpu.TileArguments(scale, **self.given, tensors=tensors, **tiles)

    def compute(self, operands: Operands, options: CallOptions) -> tuple[Tensor, Tensor]:
        return cpu.forward(self.spec, *operands[:3], self._arguments(operands))

    def compute_backward(
        self,
        operands: Operands,
        gradients: OutputGradients,
        options: CallOptions,
        needed: tuple[bool, ...] = (),
    ) -> tuple[Tensor, ...]:
        found = cpu.backward(self.spec, *operands[:3], gradients, self._arguments(operands))
        wanted = zip(found[3:], needed, strict=True)
        return (*found[:3], *(x if need else x.new_empty(0) for x, need in wanted))

    def compute_tangent(
        self,
        operands: Operands,
        results: tuple[Tensor, Tensor],
        moving: Tangents,
        options: CallOptions,
    ) -> tuple[Tensor, Tensor]:
        return cpu.tangent(self.spec, *operands[:3], results, moving, self._arguments(operands))

    def compute_backward_tangent(
        self,
        operands: Operands,
        gradients: OutputGradients,
        moving: Tangents,
        of_gradients: ResultTangents,
        options: CallOptions,
    ) -> tuple[Tensor, ...]:
        results = of_gradients.out, of_gradients.lse
        if results[0] is None or results[1] is None:
            results = self.compute_tangent(operands, gradients[:2], moving, options)
        ways = of_gradients._replace(out=results[0], lse=results[1])
        arguments = self._arguments(operands)
        given = gradients, moving, ways, arguments
        return *results, *cpu.backward_tangent(self.spec, *operands[:3], *given)  # type: ignore[return-value]


def wide_attention(spec: AttentionSpec, tensors: dict[str, Tensor], **given: Any) -> Any:
    """out and a finite lse as a function of q, k, v and the learned tensors."""
    operator = WideOperator(spec, **given)
    learned = [operator.tensors[index] for index in operator.learned]

    def call(q: Tensor, k: Tensor, v: Tensor, *of_learned: Tensor) -> tuple[Tensor, ...]:
        values = tensors | dict(zip(learned, of_learned, strict=True))
        captured = [values[name] for name in operator.tensors]
        out, lse = attend_plain(operator, DEFAULT_OPTIONS, q, k, v, None, *captured)
        return (out, torch.where(lse.isfinite(), lse, 0)) if spec.is_softmax else (out,)

    return call
