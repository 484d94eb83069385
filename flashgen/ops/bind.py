"""From a kernel and a problem to a launch: arguments by name, and the order of blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flashgen.errors import PlanError
from flashgen.ops.arguments import Arguments, numbers_of
from flashgen.ops.backends import Bound, Tensors
from flashgen.ops.checks import Problem
from flashgen.ops.maps import maps_of
from flashgen.pipeline import Build
from flashgen.plan import HeadsPerTile, Plan, choose_heads
from flashgen.plan.jobs import Blocks, blocks_of
from flashgen.plan.order import head_bits
from flashgen.sparse import LAYOUT
from flashgen.spec import AttentionSpec


def bind(
    build: Build,
    p: Problem,
    tensors: Tensors,
    captured: Mapping[str, torch.Tensor] | None = None,
    *,
    packed: bool = False,
    sms: int | None = None,
    blocks: int | None = None,
) -> Bound:
    """A kernel bound to one problem.

    Args:
        tensors: by the names that kernels have for them; their strides are looked at.
        captured: by the names that the spec has for them.
        sms, blocks: as in `blocks_of`, of a kernel that takes jobs.

    Raises:
        PlanError: as `blocks_of`; or blocks are given for a kernel that does not take jobs.
    """
    plan, params = build.plan, build.source.params
    takes_turns = any(param.name == "head_bits" for param in params)
    bits = head_bits(plan, p.heads_q, p.heads_kv, p.seq_q, p.seq_k) if takes_turns else 0
    numbers = {**numbers_of(p, tensors, captured), "head_bits": bits}
    sizes = (p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_k)
    grid = plan.grid(*sizes, packed=packed, head_bits=bits)
    chosen = None
    if plan.takes_jobs:
        chosen = blocks_of_call(plan, p, packed=packed, sms=sms, given=blocks)
        tiles, sections, _ = grid
        numbers |= {"tiles": tiles, "sections": sections, "jobs": chosen.jobs}
        grid = (chosen.count, 1, 1)
    elif blocks is not None:
        raise PlanError(
            "the blocks of this kernel do not take jobs",
            where="argument blocks",
            numbers=f"given {blocks!r} for {build.source.name} on path {plan.path}",
            way_out="no blocks: there is one for each tile; or arch='sm_90a', 16-bit operands",
        )
    maps = maps_of(plan, tensors, packed=packed)
    return Bound(build, Arguments(params, numbers, maps), grid, chosen)


def blocks_of_call(
    plan: Plan,
    p: Problem,
    *,
    packed: bool = False,
    sms: int | None = None,
    given: int | None = None,
) -> Blocks:
    """The number of blocks of a call of a kernel that takes jobs. Arguments as in `blocks_of`.

    Raises:
        PlanError: as `blocks_of`.
    """
    grid = plan.grid(p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_k, packed=packed)
    return blocks_of(plan, math.prod(grid), sms, given)


def heads_of_call(
    spec: AttentionSpec, plan: Plan, p: Problem, captured: Mapping[str, torch.Tensor]
) -> HeadsPerTile:
    """How many query heads share a tile of the forward kernel in calls of this problem.

    Args:
        plan: of a tile with the rows of one head.
        captured: by the names that the spec has for them, the layout's included.
    """
    layout = captured.get(LAYOUT)
    sizes = p.batch, p.heads_q, p.heads_kv, p.seq_q
    return choose_heads(spec, plan, *sizes, layout_heads=1 if layout is None else layout.shape[1])
