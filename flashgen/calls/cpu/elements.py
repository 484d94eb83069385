"""Reads elements of captured tensors, and adds to their gradients.

An element is addressed by one flat index, so that a tile of elements is read by one `take`, in a
quarter of the time of one index per dimension. Tensors may have any strides and are not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

Tensor = torch.Tensor


def inside(axis: int, tensor: Tensor, index: Tensor) -> Tensor:
    """The nearest index inside a dimension; a zero without dimensions where its length is 1."""
    size = tensor.shape[axis]
    if size == 1:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    if index.is_floating_point():
        index = index.nan_to_num(0.0)
    return index.clamp(0, size - 1).to(torch.int64)


def read(dtype: torch.dtype, tensor: Tensor, *indices: Tensor) -> Tensor:
    """The elements at indices inside the tensor, one for each dimension, in ``dtype``."""
    if not indices:
        return tensor.to(dtype)
    strides = tensor.stride()
    if not tensor.is_contiguous():
        reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
        tensor = tensor.as_strided((reach + 1,), (1,))
    return torch.take(tensor, _element_offsets(indices, strides).to(tensor.device)).to(dtype)


def flat_index(tensor: Tensor, *indices: Tensor) -> Tensor:
    """Flat indices of elements of a contiguous tensor of this shape."""
    steps, step = [], 1
    for size in reversed(tensor.shape):
        steps.append(step)
        step *= size
    return _element_offsets(indices, steps[::-1])


def add_at(total: Tensor, indices: Tensor, tile: Tensor, factor: float) -> None:
    """Adds ``factor`` times ``tile`` to the elements ``indices`` of ``total``.

    Args:
        total: a flattened tensor.
        indices: flat indices, of a shape that broadcasts to that of ``tile``; elements of the tile
            with the same index are summed first.

    The order of summation is fixed: `index_put_` of float32 would add on several threads at once.
    """
    summed, indices = tile.sum_to_size(indices.shape), indices.to(total.device)
    total.index_add_(0, indices.reshape(-1), summed.reshape(-1), alpha=factor)


def _element_offsets(indices: Sequence[Tensor], strides: Sequence[int]) -> Tensor:
    steps = [x if n == 1 else x * n for x, n in zip(indices, strides, strict=True)]
    steps.sort(key=Tensor.numel)  # so that few sums have the size of a tile
    return reduce(torch.add, steps) if steps else torch.zeros((), dtype=torch.int64)
