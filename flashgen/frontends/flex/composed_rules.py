"""Operations of ATen as simpler ones, where torch has no decomposition that consists of rules.

A rule takes the operands as traced tensors, and applies operations of torch to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The products of matrices, of which a kernel computes the elements that a mod reads."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def _variance(x: Tensor, dims: list[int], correction: float) -> Tensor:
    count = math.prod(x.shape[d] for d in dims)
    mean = x.sum(dims, keepdim=True) / count
    squares: Tensor = (x - mean).square()
    return squares.sum(dims) / max(count - correction, 0)


def _place(name: str) -> Callable[..., Tensor]:
    """The place of the first element that is the extremum, or NaN."""

    def rule(x: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is None or not x.shape:
            shape = [1] * x.dim() if keepdim else []
            return rule(x.reshape(-1), 0).reshape(shape)
        shape = [1] * x.dim()
        shape[dim] = length = x.shape[dim]
        places = x.tracer.constant(torch.arange(length, device=x.device).reshape(shape))
        found = (x == getattr(x, name)(dim, keepdim=True)) | (x != x)
        return torch.where(found, places, length).amin(dim, keepdim)

    return rule


def _extremum(name: str) -> Callable[..., Any]:
    def rule(x: Tensor, *axis: Any, **named: Any) -> Any:
        values = getattr(x, f"a{name}")(*axis, **named)
        return (values, getattr(x, f"arg{name}")(*axis, **named)) if axis or named else values

    return rule


RULES: dict[str, Callable[..., Any]] = {
    "aten::dot": lambda a, b: (a * b).sum(),
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::take": lambda x, index: torch.ops.aten.index.Tensor(x.reshape(-1), [index]),
    "aten::argmax": _place("amax"),
    "aten::argmin": _place("amin"),
    "aten::max": _extremum("max"),
    "aten::min": _extremum("min"),
    "prims::var": _variance,
}
"""The rule of each operation by its whole name; torch has checked the operands."""
