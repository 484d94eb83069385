"""What the methods of one distributed call share, decided before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from flashgen.call import CallOptions, Operands, OutputGradients
from flashgen.distributed.exchange import Exchange
from flashgen.distributed.partial_results import Merged, sink_gradient
from flashgen.distributed.reach import needed_by
from flashgen.distributed.sharding import Sharding
from flashgen.language.spec import AttentionSpec
from flashgen.ops.operator import Operator
from flashgen.runtime.memory_layout import empty_rows

Tensor = torch.Tensor


class Chunk(NamedTuple):
    """The keys and values of a chunk of positions: [batch, heads_kv, rows, x]."""

    number: int
    k: Tensor
    v: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.k, self.v


@dataclass(frozen=True)
class Context:
    """One call.

    Attributes:
        spec: of the call.
        operator: of the spec.
        partial: of the spec without its sink and with float32 results, for parts of a row's keys.
        sinkless: of the spec without its sink, for the backward passes of such parts.
        options: the numbers of the call; its offsets are those of the whole.
        queries, keys: who holds which positions.
        reach: for each chunk of queries and of keys, whether they are computed; bool.
        names: the captured tensors in the order in which calls give them.
        summed: the learned tensors whose gradients are summed over the ranks.
    """

    exchange: Exchange
    spec: AttentionSpec
    operator: Operator
    partial: Operator
    sinkless: Operator
    options: CallOptions
    queries: Sharding
    keys: Sharding
    reach: np.ndarray[Any, np.dtype[Any]]
    names: tuple[str, ...]
    summed: frozenset[str] = frozenset()

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @cached_property
    def mine(self) -> list[tuple[int, slice]]:
        """This rank's chunks of queries: number, and where they lie among its rows."""
        queries, rank = self.queries, self.rank
        return list(zip(queries.numbers(rank), queries.slices(rank), strict=True))

    @cached_property
    def needed(self) -> np.ndarray[Any, np.dtype[Any]]:
        """For each rank and each chunk of keys, whether the rank computes with the chunk; bool."""
        return needed_by(self.queries, self.reach)

    def own_chunks(self, k: Tensor, v: Tensor) -> list[Chunk]:
        """This rank's chunks of keys and values."""
        numbers, slices = self.keys.numbers(self.rank), self.keys.slices(self.rank)
        return [
            Chunk(number, k[:, :, rows], v[:, :, rows])
            for number, rows in zip(numbers, slices, strict=True)
        ]

    def room(self, number: int, k: Tensor, v: Tensor) -> Chunk:
        """Memory for a chunk of another rank."""
        rows = len(self.keys.chunks[number])
        new_k, new_v = (x.new_empty(x.shape[0], x.shape[1], rows, x.shape[3]) for x in (k, v))
        return Chunk(number, new_k, new_v)

    # Calls on parts.

    def forward(
        self, operator: Operator, operands: Operands, number: int, keys: Chunk
    ) -> tuple[Tensor, Tensor]:
        """out and lse of a chunk of queries over the keys of ``keys``.

        Args:
            operands: those of the call, with the rows of the chunk as q.
            keys: its number is that of the first of its chunks.
        """
        given = operands._replace(k=keys.k, v=keys.v, captured=self._captured(operator, operands))
        return operator.compute(given, self._at(number, keys.number))

    def backward(
        self, operands: Operands, results: OutputGradients, number: int, keys: Chunk
    ) -> Gradients:
        """The gradients that a part makes, from the merged results of its rows."""
        operator = self.sinkless
        given = operands._replace(k=keys.k, v=keys.v, captured=self._captured(operator, operands))
        dq, dk, dv, *learned = operator.compute_backward(
            given, results, self._at(number, keys.number)
        )
        names = [operator.tensors[place] for place in operator.learned]
        return Gradients(dq.float(), dk.float(), dv.float(), dict(zip(names, learned, strict=True)))

    def _captured(self, operator: Operator, operands: Operands) -> tuple[Tensor, ...]:
        by_name = dict(zip(self.names, operands.captured, strict=True))
        return tuple(by_name[name] for name in operator.tensors)

    def _at(self, queries: int, keys: int) -> CallOptions:
        options = self.options
        return options._replace(
            q_offset=options.q_offset + self.queries.chunks[queries].start,
            k_offset=options.k_offset + self.keys.chunks[keys].start,
        )

    # Results.

    def sink(self, operands: Operands) -> Tensor | None:
        sink = self.spec.sink
        return None if sink is None else operands.captured[self.names.index(sink.name)]

    def no_parts(self) -> Merged:
        """The merged results of some queries before the first part."""
        return Merged(self.options.backend, self.options.arch)

    def finished(self, merged: Merged, operands: Operands, q: Tensor) -> tuple[Tensor, Tensor]:
        """out, of q's dtype, and lse of a chunk whose parts have been merged."""
        if merged.out is None or merged.lse is None:
            rows = q.shape[:3]
            merged.out = empty_rows(q, self.operator.signature.head_dim_v, torch.float32).zero_()
            merged.lse = q.new_full(rows, -torch.inf, dtype=torch.float32)
        return merged.result(q.dtype, self.sink(operands))

    def learned_gradients(
        self, learned: Mapping[str, Tensor], operands: Operands, results: OutputGradients
    ) -> dict[str, Tensor]:
        """The gradients of learned tensors, those of `summed` over all ranks."""
        sink = self.sink(operands)
        totals = {name: total.float().contiguous() for name, total in learned.items()}
        learns = [self.operator.tensors[place] for place in self.operator.learned]
        if sink is not None and self.spec.sink is not None and self.spec.sink.name in learns:
            name, more = self.spec.sink.name, sink_gradient(sink, results)
            totals[name] = totals[name] + more if name in totals else more
        for name in learns:  # every rank takes part in every sum
            if name not in totals:
                place = self.names.index(name)
                totals[name] = torch.zeros_like(operands.captured[place], dtype=torch.float32)
        summed = [totals[name] for name in learns if name in self.summed]
        self.exchange.sum(summed, "sums of learned gradients")
        return {name: totals[name] for name in learns}


class Gradients(NamedTuple):
    """The gradients of one part, dq, dk and dv in float32, learned tensors by name."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    learned: dict[str, Tensor]


def add_learned(total: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Adds gradients of learned tensors in float32."""
    for name, gradient in more.items():
        total[name] = total[name] + gradient.float() if name in total else gradient.float()


def rows_of(tensors: Sequence[Tensor | None], rows: slice) -> list[Any]:
    """The rows of [batch, heads, rows, ...] tensors; None stays None."""
    return [None if x is None else x[:, :, rows] for x in tensors]


def zeros_for(tensor: Tensor) -> Tensor:
    """Zeros of a tensor's shape, for sums: float32 and contiguous, as transfers need."""
    return room_for(tensor).zero_()


def room_for(tensor: Tensor) -> Tensor:
    """Memory for sums of a tensor's shape that are received: float32 and contiguous."""
    contiguous = torch.contiguous_format
    return torch.empty_like(tensor, dtype=torch.float32, memory_format=contiguous)
