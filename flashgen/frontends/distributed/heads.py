"""The method "all_to_all": each rank receives all positions of some heads, and computes them whole.

Queries, keys and values are exchanged once before attention and the results once after it. The
number of key heads limits the number of ranks.

Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme
Long Sequence Transformer Models", 2023.
"""

from __future__ import annotations

from typing import Any

import torch

from flashgen.frontends.distributed.exchange import Exchange
from flashgen.frontends.distributed.first_derivatives import FirstDerivative, first_only
from flashgen.frontends.distributed.sharded_tensors import rows_in_order
from flashgen.frontends.distributed.sharding import Sharding

Tensor = torch.Tensor


class Exchanged(FirstDerivative):
    """[batch, heads, own rows, x] as [batch, own heads, all positions in order, x], or back."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, sharding: Sharding, to_heads: bool, x: Tensor
    ) -> Tensor:
        ctx.arguments = exchange, sharding, to_heads
        return (_to_heads if to_heads else _to_rows)(exchange, sharding, x)

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor) -> Any:
        exchange, sharding, to_heads = ctx.arguments
        back = _to_rows if to_heads else _to_heads
        return None, None, None, back(exchange, sharding, gradient)


class Replicated(FirstDerivative):
    """A tensor that every rank has; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, deterministic: bool, x: Tensor) -> Tensor:
        ctx.arguments = exchange, deterministic
        return x.view_as(x)

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor) -> Any:
        exchange, deterministic = ctx.arguments
        total = gradient.float().contiguous()
        exchange.sum([total], "sums of learned gradients", in_order=deterministic)
        return None, None, total.to(gradient.dtype)


def _to_heads(exchange: Exchange, sharding: Sharding, x: Tensor) -> Tensor:
    blocks = [block.contiguous() for block in x.chunk(exchange.world, dim=1)]
    return rows_in_order(exchange, sharding, blocks, "exchange of positions for heads")


def _to_rows(exchange: Exchange, sharding: Sharding, x: Tensor) -> Tensor:
    sent = [sharding.part(x, rank) for rank in range(exchange.world)]
    own_part = sent[exchange.rank]
    received = [
        own_part if rank == exchange.rank else torch.empty_like(own_part)
        for rank in range(exchange.world)
    ]
    exchange.swap(sent, received, "exchange of heads for positions").wait()
    return torch.cat(received, 1)
