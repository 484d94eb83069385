"""Calls on parts of a distributed call: their operators, positions, sizes and boundaries."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from flashgen.calls.ops.operator import Operator
from flashgen.calls.ops.registration import operator_of
from flashgen.shared.call import CallOptions, CheckedCall, Operands
from flashgen.shared.signature import BOUNDARIES, OFFSETS
from flashgen.spec.language.signature import at_offsets, in_whole, partial
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import SEQ_K, SEQ_Q

Tensor = torch.Tensor


@dataclass(frozen=True)
class PartCalls:
    """The operators and the arguments of calls on parts.

    Attributes:
        whole: for parts that have all keys of their rows.
        partial: without the spec's sink and with float32 results, for parts of a row's keys.
        sinkless: without the sink, for the backward passes of all parts.
        options: the numbers of the call and the scalars of these operators.
        names: the captured tensors in the order in which the distributed call has them.
        packed: whether sequences are packed. Positions in them are tensors: a chunk may begin
            inside of a sequence, and has the beginnings of others.
    """

    whole: Operator
    partial: Operator
    sinkless: Operator
    options: CallOptions
    names: tuple[str, ...]
    packed: bool

    @staticmethod
    def from_call(
        spec: AttentionSpec, whole: CheckedCall, options: CallOptions, names: tuple[str, ...]
    ) -> PartCalls:
        """
        Args:
            whole: one call on the whole.
            options: with the scalars of the spec.
        """
        lengths = set() if spec.packed else {SEQ_Q, SEQ_K}
        reads_lengths = not lengths.isdisjoint(spec.mask.free_symbols | spec.score.free_symbols)
        inside = reads_lengths or whole.heads_q != whole.heads
        if inside:
            sizes = whole.first_head, whole.heads, whole.seq_q, whole.seq_k
            options = options._replace(scalars=(*options.scalars, *sizes))
        return PartCalls(*_operators(spec, inside), options, names, spec.packed)

    def options_at(self, queries: range, keys: range) -> CallOptions:
        """The options of the call on these rows of the whole."""
        if self.packed:
            return self.options
        return self.options._replace(q_offset=queries.start, k_offset=keys.start)

    def captured(
        self, operator: Operator, operands: Operands, queries: range, keys: range
    ) -> tuple[Tensor, ...]:
        """The captured tensors of the call of an operator on these rows of the whole."""
        by_name = dict(zip(self.names, operands.captured, strict=True))
        if self.packed:
            for boundary, offset, rows in zip(BOUNDARIES, OFFSETS, (queries, keys), strict=True):
                ends = by_name[boundary]
                by_name[boundary] = (ends - rows.start).clamp_(0, len(rows))
                by_name[offset] = (rows.start - ends[:-1]).clamp_(min=0)
        return tuple(by_name[name] for name in operator.tensors)


@functools.lru_cache(maxsize=1024)
def _operators(spec: AttentionSpec, inside: bool) -> tuple[Operator, Operator, Operator]:
    """The attributes whole, partial and sinkless of `PartCalls`.

    They are made once, because a spec without its sink is traced anew.

    Args:
        inside: whether the calls are inside a whole.
    """

    def variant(spec: AttentionSpec) -> AttentionSpec:
        placed_spec = in_whole(spec) if inside else spec
        dtypes = tuple((name, "int32") for name in OFFSETS)
        return at_offsets(placed_spec, dtypes) if spec.packed else placed_spec

    sinkless = variant(spec if spec.sink is None else spec.replace(sink=None))
    return operator_of(variant(spec)), operator_of(partial(sinkless)), operator_of(sinkless)
