"""From a kernel and a problem to a launch: arguments by name, and the order of blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashgen.ops.arguments import Arguments, numbers_of
from flashgen.ops.backends import Bound, Tensors
from flashgen.ops.checks import Problem
from flashgen.ops.maps import maps_of
from flashgen.pipeline import Build
from flashgen.plan.order import head_bits


def bind(
    build: Build,
    p: Problem,
    tensors: Tensors,
    captured: Mapping[str, torch.Tensor] | None = None,
    *,
    packed: bool = False,
) -> Bound:
    """A kernel bound to one problem.

    Args:
        tensors: by the names that kernels have for them; their strides are looked at.
        captured: by the names that the spec has for them.
    """
    plan, params = build.plan, build.source.params
    takes_turns = any(param.name == "head_bits" for param in params)
    bits = head_bits(plan, p.heads_q, p.heads_kv, p.seq_q, p.seq_k) if takes_turns else 0
    numbers = {**numbers_of(p, tensors, captured), "head_bits": bits}
    sizes = (p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_k)
    grid = plan.grid(*sizes, packed=packed, head_bits=bits)
    maps = maps_of(plan, tensors, packed=packed)
    return Bound(build, Arguments(params, numbers, maps), grid)
