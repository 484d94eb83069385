"""Tensor maps of the operands of a kernel that loads them with TMA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flashgen.runtime.compiler import tensor_map_boxes
from flashgen.tensormap import TensorMapSpec

if TYPE_CHECKING:
    from flashgen.planner import Plan

Tensor = torch.Tensor


def maps_of(
    plan: Plan, tensors: Mapping[str, Tensor | None], *, packed: bool = False
) -> dict[str, TensorMapSpec]:
    """The tensor maps by the names of their tensors; empty on a path without TMA.

    Args:
        tensors: q, k, v, and o or do, with 4 dimensions, a contiguous last axis and strides of
            multiples of 16 B.
        packed: whether boxes must end where a packed sequence ends. Rows of the next sequence could
            hold NaN, which would enter the products as 0 * NaN. See `TensorMapSpec.stretches`.
    """
    if plan.path != "sm_90a":
        return {}
    found = {}
    for name, (columns, rows, heads) in tensor_map_boxes(plan).items():
        tensor = tensors[name]
        assert tensor is not None, "operands of a kernel are never null"
        size, width = tensor.shape, tensor.element_size()
        steps = (
            tensor.stride(axis) * width if size[axis] > 1 else columns * width for axis in (2, 1, 0)
        )
        made = TensorMapSpec(
            plan.dtype,
            (size[3], size[2], size[1], size[0]),
            tuple(steps),
            (columns, rows, heads, 1),
            columns * width,
        )
        found[name] = made.stretches() if packed else made
    return found
