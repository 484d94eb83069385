"""Tensors of which each rank has a part: those that are gathered, and those that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashgen.frontends.distributed.exchange import Exchange, Transfer
from flashgen.frontends.distributed.sharding import Sharding
from flashgen.shared.errors import InputError

Tensor = torch.Tensor


def check_local(operands: Mapping[str, Any]) -> None:
    """Refuses DTensors, whose placements say less than ``shard`` does and could contradict it.

    Raises:
        InputError: an operand is a DTensor.
    """
    x: Any
    for name, x in operands.items():
        if hasattr(x, "placements") and hasattr(x, "to_local"):  # without the import of DTensor
            raise InputError(
                "a distributed call takes the part of a tensor that this rank has",
                where=f"argument {name} of flashgen.distributed.attention",
                numbers=f"a DTensor of {tuple(x.shape)}, placements {x.placements} of the mesh "
                f"{x.device_mesh.mesh_dim_names}",
                way_out=f"{name}.to_local()",
            )


def gathered_tensor(
    exchange: Exchange, name: str, tensor: Any, dim: int, shardings: tuple[Sharding, ...]
) -> Tensor:
    """A captured tensor of all positions, from the parts of the ranks; its gradient is divided.

    Args:
        dim: the dimension along which the tensor is divided.
        shardings: of keys and of queries: the first one with as many rows is taken.

    Raises:
        InputError: the tensor does not have the rank's positions along the dimension.
    """
    lengths = [sharding.rows(exchange.rank) for sharding in shardings]
    if isinstance(tensor, Tensor) and -tensor.dim() <= dim < tensor.dim():
        first = tensor.movedim(dim, 0)
        for sharding, rows in zip(shardings, lengths, strict=True):
            if rows == len(first):
                flat = first.reshape(1, 1, rows, -1)
                made: Tensor = _Gather.apply(exchange, sharding, flat)  # type: ignore[no-untyped-call]
                return made.reshape(sharding.length, *first.shape[1:]).movedim(0, dim)
    given = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    raise InputError(
        "a sharded tensor has an element for each of the rank's positions",
        where="argument sharded of flashgen.distributed.attention",
        numbers=f"{name}: {given}, dimension {dim}; the rank has {lengths[0]} positions",
        way_out="the part of the tensor that belongs to the rank's chunks, or the whole tensor "
        "without an entry in sharded",
    )


class _Gather(torch.autograd.Function):
    """[1, 1, own rows, x] -> [1, 1, all positions in order, x]; the gradient is already summed."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, sharding: Sharding, x: Tensor) -> Tensor:
        ctx.sharding, ctx.rank = sharding, exchange.rank
        x = x.contiguous()
        peers = [peer for peer in range(exchange.world) if peer != exchange.rank]
        parts = {peer: x.new_empty(1, 1, sharding.rows(peer), x.shape[3]) for peer in peers}
        sent = [Transfer(peer, x) for peer in peers]
        taken = [Transfer(peer, part) for peer, part in parts.items()]
        exchange.start(sent, taken, "gathering sharded tensors").wait()
        parts[exchange.rank] = x
        gathered = x.new_empty(1, 1, sharding.length, x.shape[3])
        for peer, part in parts.items():
            for chunk, rows in zip(sharding.of_rank[peer], sharding.slices(peer), strict=True):
                gathered[:, :, chunk.start : chunk.stop] = part[:, :, rows]
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        chunks = ctx.sharding.of_rank[ctx.rank]
        return None, None, torch.cat([gradient[:, :, c.start : c.stop] for c in chunks], 2)
