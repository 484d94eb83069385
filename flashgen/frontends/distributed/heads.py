"""The method "all_to_all": each rank receives all positions of some heads, and computes them whole.

Queries, keys and values are exchanged once before attention and the results once after it. The
number of key heads limits the number of ranks.

Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme
Long Sequence Transformer Models", 2023.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.calls.runtime.arguments.options import settled
from flashgen.frontends.distributed.exchange import Exchange, Transfer
from flashgen.frontends.distributed.sharding import Sharding

Tensor = torch.Tensor


class Exchanged(torch.autograd.Function):
    """[batch, heads, own rows, x] as [batch, own heads, all positions in order, x], or back."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, sharding: Sharding, to_heads: bool, x: Tensor
    ) -> Tensor:
        ctx.arguments = exchange, sharding, to_heads
        return (_to_heads if to_heads else _to_rows)(exchange, sharding, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        exchange, sharding, to_heads = ctx.arguments
        back = _to_rows if to_heads else _to_heads
        return None, None, None, back(exchange, sharding, gradient)


class Replicated(torch.autograd.Function):
    """A tensor that every rank has; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, deterministic: bool | None, x: Tensor) -> Tensor:
        ctx.arguments = exchange, deterministic
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        exchange, deterministic = ctx.arguments
        total = gradient.float().contiguous()
        exchange.sum([total], "sums of learned gradients", in_order=settled(deterministic))
        return None, None, total.to(gradient.dtype)


def _to_heads(exchange: Exchange, sharding: Sharding, x: Tensor) -> Tensor:
    world, rank = exchange.world, exchange.rank
    blocks = [block.contiguous() for block in x.chunk(world, dim=1)]
    batch, heads, dim = x.shape[0], blocks[0].shape[1], x.shape[3]
    received = [
        blocks[rank] if peer == rank else x.new_empty(batch, heads, sharding.rows(peer), dim)
        for peer in range(world)
    ]
    _swap(exchange, blocks, received, "exchange of positions for heads")
    whole = x.new_empty(batch, heads, sharding.length, dim)
    for peer, rows in enumerate(received):
        for chunk, place in zip(sharding.of_rank[peer], sharding.slices(peer), strict=True):
            whole[:, :, chunk.start : chunk.stop] = rows[:, :, place]
    return whole


def _to_rows(exchange: Exchange, sharding: Sharding, x: Tensor) -> Tensor:
    world, rank = exchange.world, exchange.rank
    sent = [
        torch.cat([x[:, :, chunk.start : chunk.stop] for chunk in sharding.of_rank[peer]], 2)
        for peer in range(world)
    ]
    own = sent[rank]
    received = [own if peer == rank else torch.empty_like(own) for peer in range(world)]
    _swap(exchange, sent, received, "exchange of heads for positions")
    return torch.cat(received, 1)


def _swap(exchange: Exchange, sent: list[Tensor], received: list[Tensor], step: str) -> None:
    peers = [peer for peer in range(exchange.world) if peer != exchange.rank]
    exchange.start(
        [Transfer(peer, sent[peer]) for peer in peers],
        [Transfer(peer, received[peer]) for peer in peers],
        step,
    ).wait()
