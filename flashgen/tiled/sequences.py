"""What is computed together: a whole call, or each of its packed sequences by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from flashgen.spec import BOUNDARIES, AttentionSpec

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sequence:
    """Rows of the operands.

    Attributes:
        place: number of the sequence and how many there are; None where nothing is packed.
        queries, keys: rows in q and in k.
    """

    place: tuple[int, int] | None
    queries: slice
    keys: slice

    def of_queries(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The rows of tensors [batch, heads_q, seq_q, ...], views."""
        return tuple(tensor[:, :, self.queries] for tensor in tensors)

    def of_keys(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The rows of tensors [batch, heads_kv, seq_k, ...], views."""
        return tuple(tensor[:, :, self.keys] for tensor in tensors)


def sequences(
    spec: AttentionSpec, q: Tensor, k: Tensor, tensors: Mapping[str, Tensor]
) -> Iterator[Sequence]:
    """All of them, in order; rows beyond the last boundary are in none."""
    if not spec.packed:
        yield Sequence(None, slice(0, q.shape[2]), slice(0, k.shape[2]))
        return
    ends_q, ends_k = (tensors[boundary.name].tolist() for boundary in BOUNDARIES)
    count = len(ends_q) - 1
    for i in range(count):
        yield Sequence((i, count), slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1]))
