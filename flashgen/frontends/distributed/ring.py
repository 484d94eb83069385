"""The method "ring": keys and values travel from rank to rank, and each rank merges its results.

In step s a rank computes with the chunks of the rank that is s places before it, while they travel
on to the next rank. A chunk travels only as far as the last rank that needs it, so that a window
ends the ring early. In the backward pass they travel again, and each rank sends the gradients of a
step to the owner of the keys while it computes the next step. Memory: a rank's own keys and values
and those of at most three others, whatever the number of ranks; in the backward pass the float32
gradients of two steps, made and arriving, too.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.frontends.distributed.context import Context
from flashgen.frontends.distributed.exchange import Transfer
from flashgen.frontends.distributed.passes import Step
from flashgen.shared.call import Operands


def steps(context: Context, operands: Operands) -> Iterator[Step]:
    """A step for each rank, with its chunks, which travel on while they are computed with."""
    world, rank = context.exchange.world, context.rank
    k, v = operands.k, operands.v
    chunks = context.own_chunks(k, v)
    for step in range(world):
        going = set(_travelling(context, (rank - step) % world, step + 1))
        coming = _travelling(context, (rank - step - 1) % world, step + 1)
        buffers = [context.room(number, k, v) for number in coming]
        to_send = [
            Transfer((rank + 1) % world, x.contiguous())
            for chunk in chunks
            if chunk.number in going
            for x in chunk.tensors
        ]
        to_receive = [Transfer((rank - 1) % world, x) for chunk in buffers for x in chunk.tensors]
        name = f"step {step + 1} of the ring"
        pending = context.exchange.start(to_send, to_receive, name)
        yield Step(name, chunks, [(rank + step) % world] if step else [])
        pending.wait()
        chunks = buffers


def _travelling(context: Context, owner: int, distance: int) -> list[int]:
    """The chunks of a rank that some rank at this distance or further along the ring needs."""
    world = context.exchange.world
    ranks = [(owner + d) % world for d in range(distance, world)]
    return [n for n in context.keys.numbers(owner) if context.needed[ranks, n].any()]
