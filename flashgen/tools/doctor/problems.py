"""The problems of `flashgen doctor`: small, the same on every machine, each with its own risk.

They are ordered by importance. Those of the trial, by which a code path is trusted, have one query
head for each key head, so that their kernels are those of `flashgen.build` and can be compiled
ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flashgen.shared.call import Inputs
from flashgen.shared.signature import BOUNDARIES as BOUNDARY_NAMES
from flashgen.spec.language.block_layout import BlockSparse
from flashgen.spec.language.mod_functions import tanh
from flashgen.spec.language.scalar import seq_k
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.tensor import Tensor as Capture

Tensor = torch.Tensor
RNG = (0x0123456789ABCDEF, 42)
"""Seed and offset of dropout."""

DROPOUT = 0.17


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 50.0 * tanh(score / 50.0)


_IDS = Capture("ids", ("batch", "tokens"), "int32")
_TABLE = Capture("table", ("distances",), "float32", grad=True)


def document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return _IDS[b, q] == _IDS[b, k]


def relative(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + _TABLE[q - k + seq_k - 1]


def diagonals(i: Any, j: Any) -> Any:
    return abs(i - j) != 1


@dataclass(frozen=True)
class Problem:
    """One call, forward and backward, on standard normal operands.

    Attributes:
        name: the variant that it tries, with its dtype and head dim.
        spec: makes the spec.
        sizes: batch, heads_q, heads_kv, seq_q, seq_k.
        tensors: makes the captured tensors; its argument is a seeded generator.
        dropout_p: the probability of dropping an element of P.
        trial: whether it belongs to the few problems by which a code path is trusted.
        poisoned: whether NaN is in rows of packed sequences on which no result depends: those
            behind the last sequence, keys of a sequence without queries, and the reverse.
    """

    name: str
    spec: Callable[[], AttentionSpec]
    sizes: tuple[int, int, int, int, int]
    tensors: Callable[[torch.Generator], dict[str, Tensor]] = field(default=lambda generator: {})
    dropout_p: float = 0.0
    trial: bool = False
    poisoned: bool = False

    def inputs(self, device: torch.device | str = "cpu", *, poison: bool = True) -> Inputs:
        """The operands, gradients and options of the call, made on the CPU and moved.

        Args:
            poison: whether rows that no result depends on hold NaN, where the problem is poisoned.
        """
        spec = self.spec()
        batch, heads_q, heads_kv, rows_q, rows_k = self.sizes
        dim, dim_v = spec.head_dim, spec.head_dim_v or spec.head_dim
        generator = torch.Generator().manual_seed(sum(map(ord, self.name)))
        dtype: torch.dtype = getattr(torch, spec.dtype)

        def normal(heads: int, seq: int, columns: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.randn(batch, heads, seq, columns, generator=generator).to(kind)

        q, k = normal(heads_q, rows_q, dim), normal(heads_kv, rows_k, dim)
        v = k[..., :dim_v] if spec.shared_kv else normal(heads_kv, rows_k, dim_v)
        dout = normal(heads_q, rows_q, dim_v)
        dlse = normal(heads_q, rows_q, 1, torch.float32)[..., 0]
        tensors = self.tensors(generator)
        if self.poisoned and poison:
            queries, keys = (tensors[name].tolist() for name in BOUNDARY_NAMES)
            for rows in (q, dout):
                _poison(rows, queries, keys)
            for rows in (k, v):
                _poison(rows, keys, queries)
        options: dict[str, Any] = {
            "scalars": {},
            "tensors": {name: tensor.to(device) for name, tensor in tensors.items()},
        }
        if self.dropout_p:
            options |= {"dropout_p": self.dropout_p, "rng": torch.tensor(RNG, device=device)}
        q, k, v, dout, dlse = (tensor.to(device) for tensor in (q, k, v, dout, dlse))
        return Inputs((q, k, v), (dout, dlse), options)


def _poison(rows: Tensor, ends: list[int], other_ends: list[int]) -> None:
    """Puts NaN into the rows of sequences without partners, and into rows behind the last sequence.

    Args:
        rows: [batch, heads, rows, columns].
        ends, other_ends: the boundaries of these rows, and of the rows on the other side of the
            scores.
    """
    rows[:, :, ends[-1] :] = torch.nan
    for first, last, begin, end in zip(ends, ends[1:], other_ends, other_ends[1:], strict=False):
        if begin == end:
            rows[:, :, first:last] = torch.nan


def _boundaries(generator: torch.Generator) -> dict[str, Tensor]:
    """Packed sequences, some without queries or without keys; rows follow the last one."""
    queries = [0, 1, 1, 70, 70, 90, 210]
    keys = [0, 3, 40, 43, 60, 60, 230]
    boundaries = (torch.tensor(ends, dtype=torch.int32) for ends in (queries, keys))
    return dict(zip(BOUNDARY_NAMES, boundaries, strict=True))


PROBLEMS = (
    Problem(
        "boxes larger than the tensor, bfloat16, d 64",
        lambda: AttentionSpec(head_dim=64, dtype="bfloat16", name="boxes"),
        (2, 2, 2, 5, 3),
        trial=True,
    ),
    Problem(
        "one key, float16, d 40",
        lambda: AttentionSpec(head_dim=40, dtype="float16", name="one_key"),
        (1, 3, 3, 70, 1),
        trial=True,
    ),
    Problem(
        "causal, bfloat16, d 128",
        lambda: AttentionSpec(causal, head_dim=128, dtype="bfloat16", name="causal"),
        (1, 2, 2, 257, 257),
        trial=True,
    ),
    Problem(
        "packed, poisoned neighbours, bfloat16, d 64",
        lambda: AttentionSpec(causal, head_dim=64, dtype="bfloat16", packed=True, name="packed"),
        (1, 2, 2, 220, 240),
        _boundaries,
        trial=True,
        poisoned=True,
    ),
    Problem(
        "dropout, float16, d 64",
        lambda: AttentionSpec(
            causal, softcap, head_dim=64, dtype="float16", dropout=True, name="dropout"
        ),
        (1, 2, 2, 113, 203),
        dropout_p=DROPOUT,
        trial=True,
    ),
    Problem(
        "grouped heads, float16, d 64",
        lambda: AttentionSpec(causal, head_dim=64, dtype="float16", name="grouped"),
        (1, 4, 2, 113, 203),
    ),
    Problem(
        "learned table, float16, d 64",
        lambda: AttentionSpec(score_mod=relative, head_dim=64, dtype="float16", name="learned"),
        (1, 2, 1, 130, 150),
        lambda generator: {"table": torch.randn(300, generator=generator) / 2},
    ),
    Problem(
        "block layout, bfloat16, d 64",
        lambda: AttentionSpec(
            block_sparse=BlockSparse(diagonals, block_q=48, block_k=48),
            head_dim=64,
            dtype="bfloat16",
            name="layout",
        ),
        (1, 2, 1, 200, 220),
    ),
    Problem(
        "documents, float16, d 64",
        lambda: AttentionSpec(document, head_dim=64, dtype="float16", name="documents"),
        (1, 2, 1, 180, 180),
        lambda generator: {"ids": torch.arange(180, dtype=torch.int32)[None] // 50},
    ),
    Problem(
        "different head dims, float16, d 96 and 72",
        lambda: AttentionSpec(head_dim=96, head_dim_v=72, dtype="float16", name="two_dims"),
        (1, 2, 1, 100, 130),
    ),
    Problem(
        "causal, bfloat16, d 256",
        lambda: AttentionSpec(causal, head_dim=256, dtype="bfloat16", name="causal"),
        (1, 1, 1, 130, 150),
    ),
    Problem(
        "causal, float32, d 64",
        lambda: AttentionSpec(causal, head_dim=64, dtype="float32", name="causal"),
        (1, 1, 1, 113, 130),
    ),
    Problem(
        "dropout, float32, d 40",
        lambda: AttentionSpec(causal, head_dim=40, dtype="float32", dropout=True, name="dropout"),
        (1, 1, 1, 40, 70),
        dropout_p=DROPOUT,
    ),
)
"""All problems, the most important ones first."""


def named(name: str) -> Problem:
    """
    Raises:
        KeyError: there is no such problem.
    """
    return {problem.name: problem for problem in PROBLEMS}[name]
