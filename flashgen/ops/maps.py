"""What TMA is told of operands: a tensor map for each, made for one plan and one problem."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashgen.arch import facts
from flashgen.ops.backends import ALIGNED
from flashgen.plan import Plan
from flashgen.plan.model_backward_sm90 import panels_of_kernel
from flashgen.plan.model_sm90 import GROUP_ROWS
from flashgen.tensormap import TensorMapSpec

Tensor = torch.Tensor


def maps_of(
    plan: Plan, tensors: Mapping[str, Tensor | None], *, packed: bool = False
) -> dict[str, TensorMapSpec]:
    """By tensor; none on a path that has no TMA.

    Args:
        tensors: q, k, v, and o or do, 4-d with a contiguous last axis and strides of multiples of
            16 B.
        packed: boxes shall not reach from one of the packed sequences into the next, whose NaN
            would get into the products as 0 * NaN: `TensorMapSpec.stretches`.
    """
    if plan.path != "sm_90a":
        return {}
    sizes = (plan.head_dim, plan.head_dim_v, plan.column_warps)
    (panel, _), (panel_v, _) = panels_of_kernel(plan.kernel, *sizes)
    # The rows of a warpgroup are queries of one head, or all that the tile has of some heads.
    queries = min(GROUP_ROWS, plan.queries_per_tile) if plan.kernel == "forward" else plan.block_q
    heads = GROUP_ROWS // queries if plan.heads_per_tile > 1 else 1
    boxes = {
        "q": (panel, queries, heads),
        "k": (panel, plan.block_k, 1),
        "v": (panel_v, plan.block_k, 1),
        "o" if plan.kernel == "forward" else "do": (panel_v, queries, heads),
    }
    found = {}
    for name, (columns, rows, of_heads) in boxes.items():
        tensor = tensors[name]
        assert tensor is not None, "operands are there"
        size, width = tensor.shape, tensor.element_size()
        steps = (
            tensor.stride(axis) * width if size[axis] > 1 else columns * width for axis in (2, 1, 0)
        )
        made = TensorMapSpec(
            plan.dtype,
            (size[3], size[2], size[1], size[0]),
            tuple(steps),
            (columns, rows, of_heads, 1),
            columns * width,
        )
        found[name] = made.stretches() if packed else made
    return found


def path_for(arch: str, **tensors: Tensor) -> tuple[str, str]:
    """The architecture whose kernels can read these aligned operands, and why it is that one.

    A tensor that is expanded has strides of 0, which the rules of tensor maps do not promise: then
    it is the path that all architectures have.
    """
    if facts(arch).path == "sm_90a":
        for name, tensor in tensors.items():
            for axis, label in enumerate(("batch", "head", "row")):
                if tensor.shape[axis] > 1 and tensor.stride(axis) == 0:
                    why = f"the {label} stride of {name} is 0, over which TMA does not step"
                    return arch.removesuffix("a"), why
    return arch, ALIGNED
