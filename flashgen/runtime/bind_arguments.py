"""Binds a kernel to a call: its arguments by name, its grid and the order of its blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flashgen.call import CheckedCall
from flashgen.errors import PlanError
from flashgen.runtime.bound_kernel import BoundKernel, Tensors
from flashgen.runtime.compiler import head_bits, heads_per_tile, persistent_blocks
from flashgen.runtime.kernel_arguments import KernelArguments, numbers_of
from flashgen.runtime.tensor_maps import maps_of
from flashgen.signature import LAYOUT

if TYPE_CHECKING:
    from flashgen.language.spec import AttentionSpec
    from flashgen.pipeline import Build
    from flashgen.planner import HeadsPerTile, Plan
    from flashgen.planner.schedule import LaunchBlocks


def bind(
    build: Build,
    call: CheckedCall,
    tensors: Tensors,
    captured: Mapping[str, torch.Tensor] | None = None,
    *,
    packed: bool = False,
    sms: int | None = None,
    blocks: int | None = None,
) -> BoundKernel:
    """The kernel bound to a call.

    Args:
        tensors: the tensors by the names that kernels use; only sizes and strides are read.
        captured: the captured tensors by name.
        packed: whether the call has packed sequences.
        sms: multiprocessors of the GPU; None for the number in the plan's architecture.
        blocks: the blocks of a persistent kernel, instead of the plan's number.

    Raises:
        PlanError: the number of blocks is impossible, or the kernel is not persistent.
    """
    plan, params = build.plan, build.source.params
    grouped = any(param.name == "head_bits" for param in params)
    bits = head_bits(plan, call) if grouped else 0
    numbers = {**numbers_of(call, tensors, captured), "head_bits": bits}
    sizes = (call.batch, call.heads_q, call.heads_kv, call.seq_q, call.seq_k)
    grid = plan.grid(*sizes, packed=packed, head_bits=bits)
    chosen = None
    if plan.is_persistent:
        chosen = blocks_of_call(plan, call, packed=packed, sms=sms, given=blocks)
        tiles, groups, _ = grid
        numbers |= {
            "tiles_per_group": tiles,
            "head_groups": groups,
            "work_tiles": chosen.work_tiles,
        }
        grid = (chosen.count, 1, 1)
    elif blocks is not None:
        raise PlanError(
            "this kernel has one block per work tile",
            where="argument blocks",
            numbers=f"given {blocks!r} for {build.source.name} on path {plan.path}",
            way_out="no blocks (one per tile); or arch='sm_90a' and 16-bit operands",
        )
    maps = maps_of(plan, tensors, packed=packed)
    return BoundKernel(build, KernelArguments(params, numbers, maps), grid, chosen)


def blocks_of_call(
    plan: Plan,
    call: CheckedCall,
    *,
    packed: bool = False,
    sms: int | None = None,
    given: int | None = None,
) -> LaunchBlocks:
    """The number of blocks of a persistent kernel, with the reason.

    Args:
        sms, given: the arguments sms and blocks of `bind`.

    Raises:
        PlanError: the given number is impossible.
    """
    sizes = (call.batch, call.heads_q, call.heads_kv, call.seq_q, call.seq_k)
    return persistent_blocks(plan, math.prod(plan.grid(*sizes, packed=packed)), sms, given)


def heads_of_call(
    spec: AttentionSpec, plan: Plan, call: CheckedCall, captured: Mapping[str, torch.Tensor]
) -> HeadsPerTile:
    """The number of query heads that share a tile of the forward kernel in such a call.

    Args:
        plan: a plan with the rows of one head in each tile.
        captured: the captured tensors by name, including those of a block layout.
    """
    return heads_per_tile(spec, plan, call, layout_heads(captured))


def layout_heads(captured: Mapping[str, torch.Tensor]) -> int:
    """The number of heads with a block layout of their own; 1 where they share one or have none."""
    layout = captured.get(LAYOUT)
    return 1 if layout is None else layout.shape[1]
