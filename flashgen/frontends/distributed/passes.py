"""The forward and the backward pass of a rank whose keys come in steps.

A method is a function from the context and the operands to its steps, each with the chunks of keys
that the rank holds. The gradients of the keys of other ranks travel back while the next step is
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from flashgen.frontends.distributed.context import Chunk, Context, add_learned, rows_of, zeros_for
from flashgen.frontends.distributed.exchange import Pending, Transfer
from flashgen.shared.call import Operands, OutputGradients

Tensor = torch.Tensor


class Step(NamedTuple):
    """Keys that a rank holds at one time.

    Attributes:
        name: in words, for errors.
        held: the chunks.
        peers: the other ranks that hold keys of this rank meanwhile.
    """

    name: str
    held: list[Chunk]
    peers: list[int]


Method = Callable[[Context, Operands], Iterator[Step]]


def forward(method: Method, context: Context, operands: Operands) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries."""
    merged = {number: context.no_parts() for number, _ in context.mine}
    results: dict[int, tuple[Tensor, Tensor]] = {}
    for step in method(context, operands):
        for number, rows in context.mine:
            of_rows = operands._replace(q=operands.q[:, :, rows])
            for run in _runs(context, number, step.held):
                keys = _joined(run)
                if len(run) == context.reach[number].sum():  # the call that one device would make
                    whole = context.calls.whole
                    results[number] = context.forward(whole, of_rows, number, keys)
                else:
                    part = context.forward(context.calls.partial, of_rows, number, keys)
                    merged[number].add(*part)
    for number, rows in context.mine:
        if number not in results:
            q = operands.q[:, :, rows]
            results[number] = context.finished(merged[number], operands, number, q)
    out, lse = zip(*(results[number] for number, _ in context.mine), strict=True)
    return torch.cat(out, 2), torch.cat(lse, 2)


def backward(
    method: Method, context: Context, operands: Operands, results: OutputGradients
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """dq, dk and dv of this rank's rows, and the learned gradients of this rank's queries."""
    learned: dict[str, Tensor] = {}
    dq = zeros_for(operands.q)
    returning = _Returning(context, operands)
    for step in method(context, operands):
        needed = [c for c in step.held if context.needed[context.rank, c.number]]
        made = {chunk.number: [zeros_for(x) for x in chunk.tensors] for chunk in needed}
        for number, rows in context.mine:
            of_rows = operands._replace(q=operands.q[:, :, rows])
            part = OutputGradients(*rows_of(results, rows))
            for run in _runs(context, number, step.held):
                found = context.backward(of_rows, part, number, _joined(run))
                dq[:, :, rows] += found.dq
                add_learned(learned, found.learned)
                lengths = [chunk.k.shape[2] for chunk in run]
                pieces = (torch.split(x, lengths, 2) for x in (found.dk, found.dv))
                for chunk, gradients in zip(run, zip(*pieces, strict=True), strict=True):
                    _add(made[chunk.number], gradients)
        returning.start(step, made)
    returning.wait()
    dk, dv = (
        torch.cat([totals[place] for totals in returning.own.values()], 2) for place in (0, 1)
    )
    return dq, dk, dv, learned


class _Returning:
    """The gradients of keys on their way to the ranks that have the keys.

    Attributes:
        own: the totals of this rank's keys, by the number of the chunk.
    """

    def __init__(self, context: Context, operands: Operands) -> None:
        chunks = context.own_chunks(operands.k, operands.v)
        self.own = {chunk.number: [zeros_for(x) for x in chunk.tensors] for chunk in chunks}
        self._context = context
        self._coming: list[tuple[int, int, list[Tensor]]] = []
        self._pending: Pending | None = None

    def start(self, step: Step, made: dict[int, list[Tensor]]) -> None:
        """Sends what a step has made to the owners of its keys, after what was sent before."""
        self.wait()
        context, owners = self._context, self._context.keys.owners
        sent = []
        for number, gradients in sorted(made.items()):
            if owners[number] == context.rank:
                _add(self.own[number], gradients)
            else:
                sent += [Transfer(owners[number], x) for x in gradients]
        self._coming = [
            (peer, number, [torch.empty_like(x) for x in totals])
            for peer in step.peers
            for number, totals in self.own.items()
            if context.needed[peer, number]
        ]
        taken = [Transfer(peer, x) for peer, _, gradients in self._coming for x in gradients]
        self._pending = context.exchange.start(sent, taken, f"gradients of {step.name}")

    def wait(self) -> None:
        """Waits for what is coming, and adds it."""
        if self._pending is not None:
            self._pending.wait()
        for _, number, gradients in self._coming:
            _add(self.own[number], gradients)
        self._pending, self._coming = None, []


def _add(totals: list[Tensor], more: list[Tensor] | tuple[Tensor, ...]) -> None:
    for total, gradient in zip(totals, more, strict=True):
        total += gradient


def _runs(context: Context, queries: int, held: list[Chunk]) -> list[list[Chunk]]:
    """The chunks of keys that a chunk of queries reaches, adjacent ones together."""
    keys = context.keys.chunks
    reached = [chunk for chunk in held if context.reach[queries, chunk.number]]
    runs: list[list[Chunk]] = []
    for chunk in sorted(reached, key=lambda chunk: keys[chunk.number].start):
        if runs and keys[runs[-1][-1].number].stop == keys[chunk.number].start:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs


def _joined(run: list[Chunk]) -> Chunk:
    if len(run) == 1:
        return run[0]
    k, v = (torch.cat(parts, 2) for parts in zip(*(chunk.tensors for chunk in run), strict=True))
    return Chunk(run[0].number, k, v)
