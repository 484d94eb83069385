"""The rows that are computed together: the rows of a call, or of one packed sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from flashgen.language.spec import BOUNDARIES, AttentionSpec

Tensor = torch.Tensor


@dataclass(frozen=True)
class SequenceRows:
    """A range of rows of the operands.

    Attributes:
        place: the number of the sequence and the number of sequences; None without packing.
        queries, keys: ranges of rows in q and in k.
    """

    place: tuple[int, int] | None
    queries: slice
    keys: slice

    def of_queries(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Views of the rows of tensors [batch, heads_q, seq_q, ...]."""
        return tuple(tensor[:, :, self.queries] for tensor in tensors)

    def of_keys(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Views of the rows of tensors [batch, heads_kv, seq_k, ...]."""
        return tuple(tensor[:, :, self.keys] for tensor in tensors)


def sequences(
    spec: AttentionSpec, q: Tensor, k: Tensor, tensors: Mapping[str, Tensor]
) -> Iterator[SequenceRows]:
    """All sequences, in order; rows beyond the last boundary belong to no sequence."""
    if not spec.packed:
        yield SequenceRows(None, slice(0, q.shape[2]), slice(0, k.shape[2]))
        return
    ends_q, ends_k = (tensors[boundary.name].tolist() for boundary in BOUNDARIES)
    count = len(ends_q) - 1
    for i in range(count):
        yield SequenceRows(
            (i, count), slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        )
