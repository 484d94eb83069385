"""The forward and the backward pass of a rank whose keys come in steps.

A method is a function from the context and the operands to its steps, each with the chunks of keys
that the rank holds. The gradients of the keys of other ranks travel back while the next step is
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from flashgen.frontends.distributed.context import (
    Context,
    KeyChunk,
    add_learned,
    rows_of,
    zeros_for,
)
from flashgen.frontends.distributed.exchange import Pending, Transfer
from flashgen.shared.call import Operands, OutputGradients

Tensor = torch.Tensor


class Step(NamedTuple):
    """Keys that a rank holds at one time.

    Attributes:
        name: in words, for errors.
        chunks: the chunks of keys.
        peers: the other ranks that hold keys of this rank meanwhile.
    """

    name: str
    chunks: list[KeyChunk]
    peers: list[int]


Method = Callable[[Context, Operands], Iterator[Step]]


def forward(method: Method, context: Context, operands: Operands) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries."""
    merged = {number: context.no_parts() for number, _ in context.query_chunks}
    results: dict[int, tuple[Tensor, Tensor]] = {}
    for step in method(context, operands):
        for number, rows in context.query_chunks:
            row_operands = operands._replace(q=operands.q[:, :, rows])
            for run in _runs(context, number, step.chunks):
                keys = _concatenated(run)
                if len(run) == context.reach[number].sum():  # the call that one device would make
                    whole = context.calls.whole
                    results[number] = context.forward(whole, row_operands, number, keys)
                else:
                    part = context.forward(context.calls.partial, row_operands, number, keys)
                    merged[number].add(*part)
    for number, rows in context.query_chunks:
        if number not in results:
            q = operands.q[:, :, rows]
            results[number] = context.finished(merged[number], operands, number, q)
    out, lse = zip(*(results[number] for number, _ in context.query_chunks), strict=True)
    return torch.cat(out, 2), torch.cat(lse, 2)


def backward(
    method: Method, context: Context, operands: Operands, results: OutputGradients
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """dq, dk and dv of this rank's rows, and the learned gradients of this rank's queries."""
    learned: dict[str, Tensor] = {}
    dq = zeros_for(operands.q)
    returning = _Returning(context, operands)
    for step in method(context, operands):
        needed = [c for c in step.chunks if context.needed[context.rank, c.number]]
        gradients_by_chunk = {
            chunk.number: [zeros_for(x) for x in chunk.tensors] for chunk in needed
        }
        for number, rows in context.query_chunks:
            row_operands = operands._replace(q=operands.q[:, :, rows])
            part = OutputGradients(*rows_of(results, rows))
            for run in _runs(context, number, step.chunks):
                part_gradients = context.backward(row_operands, part, number, _concatenated(run))
                dq[:, :, rows] += part_gradients.dq
                add_learned(learned, part_gradients.learned)
                lengths = [chunk.k.shape[2] for chunk in run]
                pieces = (
                    torch.split(x, lengths, 2) for x in (part_gradients.dk, part_gradients.dv)
                )
                for chunk, gradients in zip(run, zip(*pieces, strict=True), strict=True):
                    _add(gradients_by_chunk[chunk.number], gradients)
        returning.start(step, gradients_by_chunk)
    returning.wait()
    dk, dv = (
        torch.cat([totals[index] for totals in returning.own_totals.values()], 2)
        for index in (0, 1)
    )
    return dq, dk, dv, learned


class _Returning:
    """The gradients of keys on their way to the ranks that have the keys.

    Attributes:
        own_totals: the totals of this rank's keys, by the number of the chunk.
    """

    def __init__(self, context: Context, operands: Operands) -> None:
        chunks = context.own_chunks(operands.k, operands.v)
        self.own_totals = {chunk.number: [zeros_for(x) for x in chunk.tensors] for chunk in chunks}
        self._context = context
        self._coming: list[tuple[int, int, list[Tensor]]] = []
        self._pending: Pending | None = None

    def start(self, step: Step, gradients_by_chunk: dict[int, list[Tensor]]) -> None:
        """Sends the gradients of a step to the owners of its keys, and waits for earlier ones."""
        self.wait()
        context, owners = self._context, self._context.keys.owners
        to_send = []
        for number, gradients in sorted(gradients_by_chunk.items()):
            if owners[number] == context.rank:
                _add(self.own_totals[number], gradients)
            else:
                to_send += [Transfer(owners[number], x) for x in gradients]
        self._coming = [
            (peer, number, [torch.empty_like(x) for x in totals])
            for peer in step.peers
            for number, totals in self.own_totals.items()
            if context.needed[peer, number]
        ]
        to_receive = [Transfer(peer, x) for peer, _, gradients in self._coming for x in gradients]
        self._pending = context.exchange.start(to_send, to_receive, f"gradients of {step.name}")

    def wait(self) -> None:
        """Waits for what is coming, and adds it."""
        if self._pending is not None:
            self._pending.wait()
        for _, number, gradients in self._coming:
            _add(self.own_totals[number], gradients)
        self._pending, self._coming = None, []


def _add(totals: list[Tensor], gradients: list[Tensor] | tuple[Tensor, ...]) -> None:
    for total, gradient in zip(totals, gradients, strict=True):
        total += gradient


def _runs(context: Context, queries: int, chunks: list[KeyChunk]) -> list[list[KeyChunk]]:
    """The chunks of keys that a chunk of queries reaches, adjacent ones together."""
    keys = context.keys.chunks
    reached = [chunk for chunk in chunks if context.reach[queries, chunk.number]]
    runs: list[list[KeyChunk]] = []
    for chunk in sorted(reached, key=lambda chunk: keys[chunk.number].start):
        if runs and keys[runs[-1][-1].number].stop == keys[chunk.number].start:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs


def _concatenated(run: list[KeyChunk]) -> KeyChunk:
    if len(run) == 1:
        return run[0]
    k, v = (torch.cat(parts, 2) for parts in zip(*(chunk.tensors for chunk in run), strict=True))
    return KeyChunk(run[0].number, k, v)
