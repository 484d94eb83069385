"""Indexing inside a mod, where an index may be a traced value and may count from the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from flashgen.flex.traced_array import Index
from flashgen.language import where


def from_start(tracer: Any, index: Index, size: Callable[[], Index]) -> Index:
    """A non-negative index; a negative one counts from the end, as in torch."""
    if isinstance(index, int):
        return index if index >= 0 else size() + index
    if index.expr.is_Integer:
        return from_start(tracer, int(index.expr), size)
    if tracer.never_negative(index.expr):
        return index
    if index.expr.has(sympy.Piecewise):  # a choice would contain each branch twice
        return index % size()
    return where(index < 0, index + size(), index)


def getitem(tracer: Any, tensor: Any, index: object) -> Any:
    """``tensor[index]``; a traced index without dimensions is gathered, not evaluated."""
    given = index if isinstance(index, tuple) else (index,)
    given = tuple(tracer.traced(item) if isinstance(item, torch.Tensor) else item for item in given)
    tensors = [item for item in given if isinstance(item, torch.Tensor)]
    if not tensors:
        return tensor.__getitem__(given)
    for item in tensors:
        if item.dtype in (torch.bool, torch.uint8):
            tracer.refuse(
                "a tensor is indexed by a mask",
                numbers=f"index of {item.dtype}, shape {tuple(item.shape)}",
                way_out="torch.where, or integer positions",
            )
    if any(isinstance(item, list | range) for item in given):
        tracer.refuse(
            "a tensor is indexed by a list beside a tensor",
            numbers=f"index {given}",
            way_out="torch.tensor(list)",
        )
    basic = tuple(slice(None) if isinstance(item, torch.Tensor) else item for item in given)
    view = tensor.__getitem__(basic)
    dims = sum(item is not None and item is not Ellipsis for item in given)
    gather: list[Any] = []
    for item in given:
        if item is Ellipsis:
            gather += [None] * (tensor.dim() - dims)
        elif isinstance(item, torch.Tensor):
            gather.append(item)
        elif item is None or isinstance(item, slice):
            gather.append(None)
    return torch.ops.aten.index.Tensor(view, gather)
