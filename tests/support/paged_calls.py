"""Calls with a paged cache, and the contiguous calls that compute the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

import flashgen as fg
from flashgen.calls.ops import ForwardRun, run_forward
from tests.support.judged import judge_forward

Tensor = torch.Tensor

FIRST_CLAIMED = 3
"""Pages of a cache that belong to other requests. Their keys and values are NaN."""


@dataclass(frozen=True)
class Sequences:
    """The queries, keys and values of several sequences.

    Attributes:
        q: of each sequence, [heads_q, queries, head_dim].
        k, v: of each sequence, [heads_kv, keys, head dim].
    """

    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    @staticmethod
    def of(
        queries: tuple[int, ...],
        keys: tuple[int, ...],
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (64, 64),
        dtype: str = "float16",
    ) -> Sequences:
        generator = torch.Generator().manual_seed(sum(keys))

        def made(heads: int, lengths: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
            normal = (torch.randn(heads, n, dim, generator=generator) for n in lengths)
            return tuple(each.to(getattr(torch, dtype)) for each in normal)

        (heads_q, heads_kv), (d, d_v) = heads, dims
        return Sequences(
            made(heads_q, queries, d), made(heads_kv, keys, d), made(heads_kv, keys, d_v)
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(k.shape[1] for k in self.k)

    def row(self, p: int) -> Sequences:
        """The query at position p of the first sequence alone, over the keys up to it."""
        first = self.k[0].shape[1] - self.q[0].shape[1]
        q = self.q[0][:, p - first : p - first + 1]
        return Sequences((q,), (self.k[0][:, : p + 1],), (self.v[0][:, : p + 1],))

    def __add__(self, others: Sequences) -> Sequences:
        return Sequences(self.q + others.q, self.k + others.k, self.v + others.v)


@dataclass(frozen=True)
class Paged:
    """A call of a spec with paged=True.

    Attributes:
        numbers: scalars and captured tensors of the spec.
        how: the backend, the architecture, split_size.
    """

    spec: fg.AttentionSpec
    of: Sequences
    page_size: int = 16
    packed: bool = False
    numbers: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)

    def operands(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """q, the caches, and the tables. Every slot that no sequence uses is NaN.

        Args:
            seed: of the permutation of pages.
        """
        page, lengths = self.page_size, self.of.lengths
        pages = [-(-n // page) for n in lengths]
        numbers = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(seed))
        table = torch.full((len(lengths), max(pages) + 1), -1, dtype=torch.int32)
        caches = []
        for rows in (self.of.k, self.of.v):
            heads, _, dim = rows[0].shape
            shape = (sum(pages) + FIRST_CLAIMED, heads, page, dim)
            cache, drawn = torch.full(shape, math.nan, dtype=rows[0].dtype), iter(numbers.tolist())
            for b, of_sequence in enumerate(rows):
                for entry, part in enumerate(of_sequence.split(page, 1) if pages[b] else ()):
                    table[b, entry] = FIRST_CLAIMED + next(drawn)
                    cache[table[b, entry], :, : part.shape[1]] = part
            caches.append(cache)
        tables = {"page_table": table, "cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
        if not self.packed:
            return torch.stack(self.of.q), *caches, tables
        rows = torch.tensor([0, *(q.shape[1] for q in self.of.q)], dtype=torch.int32)
        return (
            torch.cat(self.of.q, 1)[None],
            *caches,
            {**tables, "cu_seqlens_q": rows.cumsum(0, dtype=torch.int32)},
        )

    def run(self, seed: int = 0, **how: Any) -> ForwardRun:
        q, k, v, tables = self.operands(seed)
        given = {"backend": "emulator", **self.how, **how}
        tensors = {**self.numbers.get("tensors", {}), **tables}
        return run_forward(self.spec, q, k, v, **{**self.numbers, "tensors": tensors}, **given)

    def parts(self, run: ForwardRun) -> list[tuple[Tensor, Tensor]]:
        """Out [1, heads, queries, head_dim] and LSE of each sequence."""
        if not self.packed:
            return [(run.out[b : b + 1], run.lse[b : b + 1]) for b in range(len(self.of.q))]
        rows = [q.shape[1] for q in self.of.q]
        return list(zip(run.out.split(rows, 2), run.lse.split(rows, 2), strict=True))

    def judge(self, run: ForwardRun) -> None:
        """Holds each sequence against the oracle for its own keys, contiguous and alone.

        For specs whose mods do not read the number of the sequence.
        """
        spec = self.spec.replace(paged=False)
        of = zip(self.parts(run), self.of.q, self.of.k, self.of.v, strict=True)
        for found, q, k, v in of:
            if q.shape[1] and k.shape[1]:
                first = k.shape[1] - q.shape[1]
                judge_forward(
                    found, spec, q[None], k[None], v[None], q_offset=first, **self.numbers
                )
            else:
                assert not found[0].any()

    def judged(self, **how: Any) -> ForwardRun:
        run = self.run(**how)
        self.judge(run)
        return run
