"""What the methods of one distributed call share, decided before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from flashgen.calls.ops.operator import Operator
from flashgen.calls.ops.registration import operator_of
from flashgen.calls.runtime.arguments.positions import rows_outside
from flashgen.calls.runtime.memory_layout import empty_rows
from flashgen.calls.sinks import Rows, logits_of, rows_at
from flashgen.frontends.distributed.checks import Request
from flashgen.frontends.distributed.exchange import Exchange
from flashgen.frontends.distributed.part_calls import PartCalls
from flashgen.frontends.distributed.partial_results import Merged, sink_gradient
from flashgen.frontends.distributed.reach import needed_by, reached
from flashgen.frontends.distributed.sharding import Sharding
from flashgen.shared.call import CallOptions, Operands, OutputGradients
from flashgen.shared.signature import BOUNDARIES
from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor


class KeyChunk(NamedTuple):
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
        calls: the calls on parts.
        first_head: the number of the first query head of this group.
        queries, keys: the positions that each rank has; they begin at the offsets of the call.
        reach: for each chunk of queries and of keys, whether they are computed; bool.
        names: the captured tensors in the order in which calls give them.
        summed: the learned tensors whose gradients are summed over the ranks.
    """

    exchange: Exchange
    spec: AttentionSpec
    calls: PartCalls
    first_head: int
    queries: Sharding
    keys: Sharding
    reach: np.ndarray[Any, np.dtype[Any]]
    names: tuple[str, ...]
    summed: frozenset[str]

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @cached_property
    def query_chunks(self) -> list[tuple[int, slice]]:
        """This rank's chunks of queries: the number and the rows of each."""
        queries, rank = self.queries, self.rank
        return list(zip(queries.numbers(rank), queries.slices(rank), strict=True))

    @cached_property
    def needed(self) -> np.ndarray[Any, np.dtype[Any]]:
        """For each rank and each chunk of keys, whether the rank computes with the chunk; bool."""
        return needed_by(self.queries, self.reach)

    def own_chunks(self, k: Tensor, v: Tensor) -> list[KeyChunk]:
        """This rank's chunks of keys and values."""
        numbers, slices = self.keys.numbers(self.rank), self.keys.slices(self.rank)
        return [
            KeyChunk(number, k[:, :, rows], v[:, :, rows])
            for number, rows in zip(numbers, slices, strict=True)
        ]

    def room(self, number: int, k: Tensor, v: Tensor) -> KeyChunk:
        """Memory for a chunk of another rank."""
        rows = len(self.keys.chunks[number])
        new_k, new_v = (x.new_empty(x.shape[0], x.shape[1], rows, x.shape[3]) for x in (k, v))
        return KeyChunk(number, new_k, new_v)

    # Calls on parts.

    def forward(
        self, operator: Operator, operands: Operands, number: int, keys: KeyChunk
    ) -> tuple[Tensor, Tensor]:
        """out and lse of a chunk of queries over the keys of ``keys``.

        Args:
            operands: the operands of the call, with the rows of the chunk as q.
            keys: its number is that of the first of its chunks.
        """
        out, lse = operator.compute(*self._arguments(operator, operands, number, keys))
        return out, lse

    def backward(
        self, operands: Operands, results: OutputGradients, number: int, keys: KeyChunk
    ) -> Gradients:
        """The gradients that a part makes, from the merged results of its rows."""
        operator = self.calls.sinkless
        part_operands, options = self._arguments(operator, operands, number, keys)
        dq, dk, dv, *learned = operator.compute_backward(part_operands, results, options)
        names = [operator.tensors[index] for index in operator.learned]
        return Gradients(dq.float(), dk.float(), dv.float(), dict(zip(names, learned, strict=True)))

    def _arguments(
        self, operator: Operator, operands: Operands, number: int, keys: KeyChunk
    ) -> tuple[Operands, CallOptions]:
        start = self.keys.chunks[keys.number].start
        rows = self.queries.chunks[number], range(start, start + keys.k.shape[2])
        captured = self.calls.captured(operator, operands, *rows)
        part_operands = operands._replace(k=keys.k, v=keys.v, captured=captured)
        return part_operands, self.calls.options_at(*rows)

    # Results.

    def no_parts(self) -> Merged:
        """The merged results of some queries before the first part."""
        normalize = self.calls.whole.signature.normalize
        return Merged(self.calls.options.backend, self.calls.options.arch, normalize=normalize)

    def finished(
        self, merged: Merged, operands: Operands, number: int, q: Tensor
    ) -> tuple[Tensor, Tensor]:
        """out, of q's dtype, and lse of a chunk of queries whose parts have been merged."""
        if merged.out is None or merged.lse is None:
            rows = q.shape[:3]
            merged.out = empty_rows(q, self.calls.whole.signature.head_dim_v, torch.float32).zero_()
            lse_of_nothing = self.calls.whole.signature.lse_of_nothing
            merged.lse = q.new_full(rows, lse_of_nothing, dtype=torch.float32)
        captured = dict(zip(self.names, operands.captured, strict=True))
        sink = None
        if self.spec.sink is not None:
            sink_rows = self._rows(q, captured, [self.queries.chunks[number]])
            sink = logits_of(captured[self.spec.sink.name], self.spec.sink.dims, sink_rows)
        out, lse = merged.result(q.dtype, sink)
        if sink is not None and self.spec.packed:
            # Rows outside all sequences have no sink either.
            ends = captured[BOUNDARIES[0]]
            local = {BOUNDARIES[0]: ends - self.queries.chunks[number].start}
            lse = lse.masked_fill(rows_outside(local, q.shape[2]), -torch.inf)
        return out, lse

    def _rows(self, q: Tensor, captured: Mapping[str, Tensor], chunks: Sequence[range]) -> Rows:
        """The rows of this rank in some chunks, as mods see them."""
        positions = torch.cat([torch.arange(x.start, x.stop, device=q.device) for x in chunks])
        ends = captured[BOUNDARIES[0]] if self.spec.packed else None
        return rows_at(q, self.first_head, positions, ends)

    def learned_gradients(
        self, learned: Mapping[str, Tensor], operands: Operands, results: OutputGradients
    ) -> dict[str, Tensor]:
        """The gradients of learned tensors, those of `summed` over all ranks."""
        operator, sink = self.calls.whole, self.spec.sink
        names = [operator.tensors[index] for index in operator.learned]
        captured = dict(zip(self.names, operands.captured, strict=True))
        # Every rank takes part in every sum.
        totals = {n: torch.zeros_like(captured[n], dtype=torch.float32) for n in names}
        totals |= {name: total.float().contiguous() for name, total in learned.items()}
        if sink is not None and sink.name in totals:
            query_chunks = self.queries.chunks_by_rank[self.rank]
            rows = self._rows(results.out, captured, query_chunks)
            sink_total = sink_gradient(captured[sink.name], sink.dims, rows, results)
            totals[sink.name] = totals[sink.name] + sink_total
        summed = [totals[name] for name in names if name in self.summed]
        in_order = bool(self.calls.options.deterministic)
        self.exchange.sum(summed, "sums of learned gradients", in_order=in_order)
        return totals


def context_of(exchange: Exchange, request: Request, q: Tensor, summed: frozenset[str]) -> Context:
    spec, whole, options = request.op.spec, request.whole, request.options
    operator = operator_of(spec)
    scalars = {name: request.captures[name] for name in operator.scalars}
    tensors = {name: request.captures[name] for name in operator.tensors}
    queries = request.queries.shifted(options.q_offset)
    keys = request.keys.shifted(options.k_offset)
    options = options._replace(q_offset=0, k_offset=0, scalars=tuple(scalars.values()))
    heads = range(whole.first_head, whole.first_head + whole.heads_q)
    sizes = q.shape[0], whole.heads, whole.seq_q, whole.seq_k
    return Context(
        exchange,
        spec,
        PartCalls.from_call(spec, whole, options, operator.tensors),
        whole.first_head,
        queries,
        keys,
        reached(spec, queries.chunks, keys.chunks, sizes, scalars, tensors, heads),
        operator.tensors,
        summed,
    )


class Gradients(NamedTuple):
    """The gradients of one part, dq, dk and dv in float32, learned tensors by name."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    learned: dict[str, Tensor]


def add_learned(total: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Adds gradients of learned tensors in float32."""
    for name, gradient in gradients.items():
        total[name] = total[name] + gradient.float() if name in total else gradient.float()


def rows_of(tensors: Sequence[Tensor | None], rows: slice) -> list[Any]:
    """The rows of [batch, heads, rows, ...] tensors; None stays None."""
    return [None if x is None else x[:, :, rows] for x in tensors]


def zeros_for(tensor: Tensor) -> Tensor:
    """Zeros of a tensor's shape, for sums: float32 and contiguous, as transfers need."""
    contiguous = torch.contiguous_format
    return torch.zeros_like(tensor, dtype=torch.float32, memory_format=contiguous)
