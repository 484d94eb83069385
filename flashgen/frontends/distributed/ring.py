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
from typing import NamedTuple

import torch

from flashgen.frontends.distributed.context import (
    Chunk,
    Context,
    add_learned,
    room_for,
    rows_of,
    zeros_for,
)
from flashgen.frontends.distributed.exchange import Pending, Transfer
from flashgen.shared.call import Operands, OutputGradients

Tensor = torch.Tensor


def forward(context: Context, operands: Operands) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries."""
    merged = {number: context.no_parts() for number, _ in context.mine}
    for _, chunks in _steps(context, operands):
        for number, rows in context.mine:
            of_rows = operands._replace(q=operands.q[:, :, rows])
            for keys in chunks:
                if context.reach[number, keys.number]:
                    part = context.forward(context.calls.partial, of_rows, number, keys)
                    merged[number].add(*part)
    results = [
        context.finished(merged[number], operands, number, operands.q[:, :, rows])
        for number, rows in context.mine
    ]
    out, lse = zip(*results, strict=True)
    return torch.cat(out, 2), torch.cat(lse, 2)


def backward(
    context: Context, operands: Operands, results: OutputGradients
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """dq, dk and dv of this rank's rows, and the learned gradients of this rank's queries."""
    learned: dict[str, Tensor] = {}
    dq = torch.zeros_like(operands.q, dtype=torch.float32)
    own = {
        chunk.number: [zeros_for(x) for x in chunk.tensors]
        for chunk in context.own_chunks(operands.k, operands.v)
    }
    returning: _Returning | None = None
    for step, chunks in _steps(context, operands):
        made = {
            chunk.number: [zeros_for(x) for x in chunk.tensors]
            for chunk in chunks
            if context.needed[context.rank, chunk.number]
        }
        for number, rows in context.mine:
            of_rows = operands._replace(q=operands.q[:, :, rows])
            part = OutputGradients(*rows_of(results, rows))
            for keys in chunks:
                if context.reach[number, keys.number]:
                    found = context.backward(of_rows, part, number, keys)
                    dq[:, :, rows] += found.dq
                    add_learned(learned, found.learned)
                    for total, more in zip(made[keys.number], (found.dk, found.dv), strict=True):
                        total += more
        # They travel while the next step is computed.
        if returning is not None:
            returning.add_to(own)
        returning = _return(context, step, made, own)
    assert returning is not None, "a ring has a step"
    returning.add_to(own)
    dk, dv = (torch.cat([totals[place] for totals in own.values()], 2) for place in (0, 1))
    return dq, dk, dv, learned


def _steps(context: Context, operands: Operands) -> Iterator[tuple[int, list[Chunk]]]:
    """The steps, with the chunks that this rank holds in each while they travel on."""
    world, rank = context.exchange.world, context.rank
    k, v = operands.k, operands.v
    held = context.own_chunks(k, v)
    for step in range(world):
        going = set(_travelling(context, (rank - step) % world, step + 1))
        coming = _travelling(context, (rank - step - 1) % world, step + 1)
        rooms = [context.room(number, k, v) for number in coming]
        sent = [
            Transfer((rank + 1) % world, x.contiguous())
            for chunk in held
            if chunk.number in going
            for x in chunk.tensors
        ]
        taken = [Transfer((rank - 1) % world, x) for chunk in rooms for x in chunk.tensors]
        pending = context.exchange.start(sent, taken, f"step {step + 1} of the ring")
        yield step, held
        pending.wait()
        held = rooms


def _travelling(context: Context, owner: int, distance: int) -> list[int]:
    """The chunks of a rank that some rank at this distance or further along the ring needs."""
    world = context.exchange.world
    ranks = [(owner + d) % world for d in range(distance, world)]
    if not ranks:
        return []
    numbers = context.keys.numbers(owner)
    return [n for n in numbers if context.needed[ranks, n].any()]


class _Returning(NamedTuple):
    """Gradients of own keys that travel here, by the number of the chunk."""

    pending: Pending | None
    gradients: dict[int, list[Tensor]]

    def add_to(self, own: dict[int, list[Tensor]]) -> None:
        """Waits for the gradients, and adds them."""
        if self.pending is not None:
            self.pending.wait()
        for number, gradients in self.gradients.items():
            for total, more in zip(own[number], gradients, strict=True):
                total += more


def _return(
    context: Context, step: int, made: dict[int, list[Tensor]], own: dict[int, list[Tensor]]
) -> _Returning:
    """Sends the gradients of a step to the owner of its keys; those of own keys come back."""
    if step == 0:
        return _Returning(None, made)
    world, rank = context.exchange.world, context.rank
    owner, peer = (rank - step) % world, (rank + step) % world
    coming = {
        number: [room_for(x) for x in totals]
        for number, totals in own.items()
        if context.needed[peer, number]
    }
    sent = [Transfer(owner, x) for gradients in made.values() for x in gradients]
    taken = [Transfer(peer, x) for gradients in coming.values() for x in gradients]
    pending = context.exchange.start(sent, taken, f"gradients of step {step} of the ring")
    return _Returning(pending, coming)
