"""Tensors of which each rank has a part: those that are gathered, and those that are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashgen.calls.runtime.arguments.refusals import is_dtensor, shown
from flashgen.frontends.distributed.exchange import Exchange, refuse
from flashgen.frontends.distributed.first_derivatives import FirstDerivative, first_only
from flashgen.frontends.distributed.sharding import Sharding

Tensor = torch.Tensor


def check_local(operands: Mapping[str, Any]) -> None:
    """Refuses DTensors, whose placements say less than ``shard`` does and could contradict it."""
    for name, x in operands.items():
        if is_dtensor(x):
            what = "a distributed call takes the part of a tensor that this rank has"
            refuse(what, name, shown(x), f"{name}.to_local()")


def check_sharded(
    rank: int, captures: Mapping[str, Any], sharded: Any, shardings: tuple[Sharding, ...]
) -> dict[str, tuple[int, Sharding]]:
    """The dimension along which each of the ``sharded`` tensors is divided, and the sharding.

    Args:
        shardings: of keys and of queries: the first one with as many rows is taken.

    Raises:
        InputError: a tensor does not have the rank's positions along the dimension.
    """
    if not isinstance(sharded, Mapping | None):
        what, way_out = "sharded names dimensions of captured tensors", 'sharded={"ids": 1}'
        refuse(what, "sharded", f"given {sharded!r:.200}", way_out)
    divisions = {}
    for name, dim in (sharded or {}).items():
        x: Any = captures.get(name)
        whole = type(dim) is int and isinstance(x, Tensor) and -x.dim() <= dim < x.dim()
        fits = [s for s in shardings if whole and s.rows(rank) == x.shape[dim]]
        if not fits:
            description = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            refuse(
                "a sharded tensor has an element for each of the rank's positions",
                "sharded",
                f"{name}: {description}, dimension {dim!r:.200}; the rank has "
                f"{shardings[0].rows(rank)} positions",
                "the part of the tensor that belongs to the rank's chunks, or the whole tensor "
                "without an entry in sharded",
            )
        divisions[name] = dim, fits[0]
    return divisions


def zeros_of_length(x: Tensor, dim: int, length: int) -> Tensor:
    """Zeros of another length along a dimension, which need no memory for it; for checks."""
    shape = x.movedim(dim, 0).shape[1:]
    zeros = x.new_zeros(shape).expand(length, *shape).movedim(0, dim)
    return zeros.requires_grad_() if x.requires_grad else zeros  # not inside of torch.func.jvp


def rows_in_order(
    exchange: Exchange, sharding: Sharding, sent: Sequence[Tensor], step: str
) -> Tensor:
    """[batch, heads, all positions in order, x] from all ranks' rows.

    Args:
        sent: the tensor of this rank's rows for each rank, contiguous.
    """
    own_rows, ranks = sent[exchange.rank], range(exchange.world)
    shapes = [(*own_rows.shape[:2], sharding.rows(rank), own_rows.shape[3]) for rank in ranks]
    parts = [own_rows if r == exchange.rank else own_rows.new_empty(shapes[r]) for r in ranks]
    exchange.swap(sent, parts, step).wait()
    whole = own_rows.new_empty(*own_rows.shape[:2], sharding.length, own_rows.shape[3])
    for rank in ranks:
        for chunk, rows in zip(sharding.chunks_by_rank[rank], sharding.slices(rank), strict=True):
            whole[:, :, chunk.start : chunk.stop] = parts[rank][:, :, rows]
    return whole


def gathered(exchange: Exchange, x: Tensor, dim: int, sharding: Sharding) -> Tensor:
    """A captured tensor of all positions, from the parts of the ranks; its gradient is divided."""
    first = x.movedim(dim, 0)
    flat = first.reshape(1, 1, len(first), math.prod(first.shape[1:]))
    rows: Tensor = _Gather.apply(exchange, sharding, flat)  # type: ignore[no-untyped-call]
    return rows.reshape(sharding.length, *first.shape[1:]).movedim(0, dim)


class _Gather(FirstDerivative):
    """[1, 1, own rows, x] -> [1, 1, all positions in order, x]; the gradient is already summed."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, sharding: Sharding, x: Tensor) -> Tensor:
        ctx.sharding, ctx.rank = sharding, exchange.rank
        sent = [x.contiguous()] * exchange.world
        return rows_in_order(exchange, sharding, sent, "gathering sharded tensors")

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, ctx.sharding.part(gradient, ctx.rank)
