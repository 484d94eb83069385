"""The method "all_gather": each rank receives the keys that its queries reach, then computes.

Adjacent chunks of keys are computed by one call, as on one device. Memory: a rank's share and the
keys and values that it reaches, which are received again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashgen.frontends.distributed.context import (
    Chunk,
    Context,
    Gradients,
    add_learned,
    room_for,
    rows_of,
    zeros_for,
)
from flashgen.frontends.distributed.exchange import Transfer
from flashgen.shared.call import Operands, OutputGradients

Tensor = torch.Tensor


def forward(context: Context, operands: Operands) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries."""
    chunks = _gathered(context, operands, "keys and values for the forward pass")
    results = []
    for number, rows in context.mine:
        q = operands.q[:, :, rows]
        of_rows = operands._replace(q=q)
        runs = _runs(context, number, chunks)
        if len(runs) == 1:  # the call that one device would make
            keys = _joined(runs[0])
            results.append(context.forward(context.calls.whole, of_rows, number, keys))
            continue
        merged = context.no_parts()
        for run in runs:
            merged.add(*context.forward(context.calls.partial, of_rows, number, _joined(run)))
        results.append(context.finished(merged, operands, number, q))
    out, lse = zip(*results, strict=True)
    return torch.cat(out, 2), torch.cat(lse, 2)


def backward(
    context: Context, operands: Operands, results: OutputGradients
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """dq, dk and dv of this rank's rows, and the learned gradients of this rank's queries."""
    chunks = _gathered(context, operands, "keys and values for the backward pass")
    learned: dict[str, Tensor] = {}
    sums = {chunk.number: [zeros_for(x) for x in chunk.tensors]
            for chunk in chunks.values()}  # fmt: skip
    dqs = []
    for number, rows in context.mine:
        q = operands.q[:, :, rows]
        dq = zeros_for(q)
        of_rows = operands._replace(q=q)
        part = OutputGradients(*rows_of(results, rows))
        for run in _runs(context, number, chunks):
            made: Gradients = context.backward(of_rows, part, number, _joined(run))
            dq += made.dq
            add_learned(learned, made.learned)
            lengths = [chunk.k.shape[2] for chunk in run]
            pieces = zip(*(torch.split(x, lengths, 2) for x in (made.dk, made.dv)), strict=True)
            for chunk, gradients in zip(run, pieces, strict=True):
                for total, more in zip(sums[chunk.number], gradients, strict=True):
                    total += more
        dqs.append(dq)
    dk, dv = _returned(context, operands, sums)
    return torch.cat(dqs, 2), dk, dv, learned


def _gathered(context: Context, operands: Operands, step: str) -> dict[int, Chunk]:
    """The chunks of keys that this rank needs, by number; its own are views."""
    own = {chunk.number: chunk for chunk in context.own_chunks(operands.k, operands.v)}
    rank, needed, owners = context.rank, context.needed, context.keys.owners
    received = {
        number: context.room(number, operands.k, operands.v)
        for number in map(int, needed[rank].nonzero()[0])
        if owners[number] != rank
    }
    sent = [
        Transfer(peer, tensor.contiguous())
        for peer in range(context.exchange.world)
        for number, chunk in own.items()
        if peer != rank and needed[peer, number]
        for tensor in chunk.tensors
    ]
    taken = [
        Transfer(owners[n], tensor) for n, chunk in received.items() for tensor in chunk.tensors
    ]
    context.exchange.start(sent, taken, step).wait()
    return {**{n: chunk for n, chunk in own.items() if needed[rank, n]}, **received}


def _returned(
    context: Context, operands: Operands, sums: dict[int, list[Tensor]]
) -> tuple[Tensor, Tensor]:
    """dk and dv of this rank's rows: its own contributions and those of the other ranks."""
    rank, needed, owners = context.rank, context.needed, context.keys.owners
    sent = [
        Transfer(owners[number], total)
        for number, totals in sorted(sums.items())
        if owners[number] != rank
        for total in totals
    ]
    own = context.own_chunks(operands.k, operands.v)
    received: dict[tuple[int, int], list[Tensor]] = {
        (peer, chunk.number): [room_for(x) for x in chunk.tensors]
        for peer in range(context.exchange.world)
        for chunk in own
        if peer != rank and needed[peer, chunk.number]
    }
    taken = [Transfer(peer, x) for (peer, _), tensors in received.items() for x in tensors]
    context.exchange.start(sent, taken, "gradients of keys and values").wait()
    totals: list[list[Tensor]] = [[], []]
    for chunk in own:
        for place, x in enumerate(chunk.tensors):
            parts = [tensors[place] for (_, n), tensors in received.items() if n == chunk.number]
            mine = sums[chunk.number][place] if chunk.number in sums else None
            total = zeros_for(x) if mine is None else mine
            totals[place].append(torch.stack([total, *parts]).sum(0))
    return torch.cat(totals[0], 2), torch.cat(totals[1], 2)


def _runs(context: Context, queries: int, chunks: dict[int, Chunk]) -> list[list[Chunk]]:
    """The chunks of keys that a chunk of queries reaches, adjacent ones together."""
    keys = context.keys.chunks
    numbers = [n for n in chunks if context.reach[queries, n]]
    runs: list[list[Chunk]] = []
    for number in sorted(numbers, key=lambda n: keys[n].start):
        if runs and keys[runs[-1][-1].number].stop == keys[number].start:
            runs[-1].append(chunks[number])
        else:
            runs.append([chunks[number]])
    return runs


def _joined(run: Sequence[Chunk]) -> Chunk:
    if len(run) == 1:
        return run[0]
    k, v = (torch.cat(parts, 2) for parts in zip(*(chunk.tensors for chunk in run), strict=True))
    return Chunk(run[0].number, k, v)
