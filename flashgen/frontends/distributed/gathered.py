"""The method "all_gather": each rank receives the keys that its queries reach, then computes.

Adjacent chunks of keys are computed by one call, as on one device. Memory: a rank's share and the
keys and values that it reaches, which are received again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.frontends.distributed.context import Context
from flashgen.frontends.distributed.exchange import Transfer
from flashgen.frontends.distributed.passes import Step
from flashgen.shared.call import Operands


def steps(context: Context, operands: Operands) -> Iterator[Step]:
    """One step, with all chunks of keys that this rank needs; its own are views."""
    rank, needed, owners = context.rank, context.needed, context.keys.owners
    own_chunks = context.own_chunks(operands.k, operands.v)
    peers = [peer for peer in range(context.exchange.world) if peer != rank]
    received = [
        context.room(number, operands.k, operands.v)
        for number in map(int, needed[rank].nonzero()[0])
        if owners[number] != rank
    ]
    to_send = [
        Transfer(peer, tensor.contiguous())
        for peer in peers
        for chunk in own_chunks
        if needed[peer, chunk.number]
        for tensor in chunk.tensors
    ]
    to_receive = [Transfer(owners[chunk.number], x) for chunk in received for x in chunk.tensors]
    name = "the exchange of keys and values"
    context.exchange.start(to_send, to_receive, name).wait()
    yield Step(name, [*own_chunks, *received], peers)
