"""Reading elements of captured tensors, and adding to them.

An element is found by one number, so that a tile of them is one `take`, a quarter of the time of an
index for each dimension. A tensor's strides may be anything: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def inside(axis: int, tensor: Tensor, index: Tensor) -> Tensor:
    """The nearest index within a dimension; without dimensions itself where only one is."""
    size = tensor.shape[axis]
    if size == 1:
        return torch.zeros((), dtype=torch.int64)
    if index.is_floating_point():
        index = index.nan_to_num(0.0)
    return index.clamp(0, size - 1).to(torch.int64)


def read(dtype: torch.dtype, tensor: Tensor, *places: Tensor) -> Tensor:
    """The elements at ``places``, which are `inside`, in ``dtype``."""
    if not places:
        return tensor.to(dtype)
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in lengths)
    memory = tensor.as_strided((reach + 1,), (1,))
    return torch.take(memory, _sum_of(places, tensor.stride())).to(dtype)


def counted(tensor: Tensor, *places: Tensor) -> Tensor:
    """Which elements these are, counted through all dimensions, the last one fastest."""
    steps, step = [], 1
    for size in reversed(tensor.shape):
        steps.append(step)
        step *= size
    return _sum_of(places, steps[::-1])


def add_at(total: Tensor, places: Tensor, tile: Tensor, factor: float) -> None:
    """Adds ``factor`` times ``tile`` to the elements ``places`` of ``total``.

    Args:
        total: all elements of a tensor, counted through.
        places: of a shape that broadcasts to that of ``tile``: what has one place is summed first.

    In one order, on one thread: `index_put_` of float32 would add on several threads at once.
    """
    summed = tile.sum_to_size(places.shape)
    total.index_add_(0, places.reshape(-1), summed.reshape(-1), alpha=factor)


def _sum_of(places: Sequence[Tensor], strides: Sequence[int]) -> Tensor:
    steps = sorted(zip(places, strides, strict=True), key=lambda step: step[0].numel())
    total = torch.zeros((), dtype=torch.int64)
    for place, stride in steps:  # the small ones first, so that few sums are of a tile's size
        total = total + (place if stride == 1 else place * stride)
    return total
