"""Calls of the tiled algorithms with the defaults that the operator would fill in."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from flashgen.calls import cpu
from flashgen.shared.call import OutputGradients
from flashgen.spec.language.spec import AttentionSpec
from tests.support.shapes import Case

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


class Tiled(torch.autograd.Function):
    """The two passes as one differentiable function of q, k, v and the learnable tensors.

    Only O, LSE and the seed are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        spec: AttentionSpec,
        options: cpu.TileArguments,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *learned: Tensor,
    ) -> tuple[Tensor, Tensor]:
        names = [tensor.name for tensor in spec.tensors if tensor.grad]
        tensors = {**options.tensors, **dict(zip(names, learned, strict=True))}
        ctx.spec, ctx.options = spec, replace(options, tensors=tensors)
        out, lse = cpu.forward(spec, q, k, v, ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        outputs = OutputGradients(out, lse, dout, dlse)
        gradients = cpu.backward(ctx.spec, q, k, v, outputs, ctx.options)
        return None, None, *gradients


def gradients_are_derivatives(
    spec: AttentionSpec, case: Case, tensors: dict[str, Tensor], *, fast: bool, **options: Any
) -> bool:
    """gradcheck of everything that has a gradient, with tiles of 4 x 6 that leave odd ends."""
    names = [tensor.name for tensor in spec.tensors if tensor.grad]
    operands = [x.double() for x in case.tensors(3)]
    given = arguments(spec, operands[0], tensors=tensors, block_q=4, block_k=6, **options)
    leaves = [x.requires_grad_() for x in (*operands, *(tensors[name] for name in names))]

    def finite(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = Tiled.apply(spec, given, *inputs)
        return out, torch.where(lse.isfinite(), lse, 0)

    return torch.autograd.gradcheck(finite, leaves, fast_mode=fast)
