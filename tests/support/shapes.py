"""The shapes with which every variant is tested, and small subsets that still cover every value.

The slow tier has every spec with every head dim, and all pairs of the other factors over specs.
`covering` picks few cases in which every value of every factor occurs, in different combinations,
so that a run of minutes has every length, head count, memory layout, dtype and head dim.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

LENGTHS = (
    (1, 1), (1, 239), (3, 799), (17, 5), (64, 128), (113, 203),
    (127, 512), (128, 217), (255, 256), (257, 257), (512, 256), (1023, 1024),
)  # fmt: skip
"""(seq_q, seq_k)."""

BATCHES = (1, 3)
HEADS = ((4, 4), (4, 2), (6, 1))
"""(heads_q, heads_kv)."""

DTYPES = ("float16", "bfloat16", "float32")
HEAD_DIMS = (8, 40, 64, 96, 128, 256)
LAYOUTS = ("contiguous", "sequence_major", "gaps")
"""Storage [B, H, N, D]; [B, N, H, D] seen as [B, H, N, D]; every row with elements after it."""


@dataclass(frozen=True)
class Case:
    """One problem: sizes, dtype and how the operands lie in memory."""

    seq_q: int
    seq_k: int
    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    dtype: str = "float16"
    head_dim: int = 64
    head_dim_v: int | None = None
    layout: str = "contiguous"

    @property
    def id(self) -> str:
        dims = f"d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v else "")
        heads = f"{self.heads_q}h{self.heads_kv}"
        return f"{self.seq_q}x{self.seq_k}-b{self.batch}-{heads}-{self.dtype}-{dims}-{self.layout}"

    @property
    def scores(self) -> int:
        """Elements of S, to which the emulator's time is proportional."""
        return self.batch * self.heads_q * self.seq_q * self.seq_k

    def tensors(self, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of standard normal numbers."""
        generator = torch.Generator().manual_seed(seed)
        dim_v = self.head_dim_v or self.head_dim
        return (
            self._normal(generator, self.heads_q, self.seq_q, self.head_dim),
            self._normal(generator, self.heads_kv, self.seq_k, self.head_dim),
            self._normal(generator, self.heads_kv, self.seq_k, dim_v),
        )

    def _normal(self, generator: torch.Generator, heads: int, seq: int, dim: int) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        shape = (self.batch, heads, seq, dim)
        values = torch.randn(shape, generator=generator).to(dtype)
        if self.layout == "contiguous":
            return values
        if self.layout == "sequence_major":
            return values.transpose(1, 2).contiguous().transpose(1, 2)
        # NaN in the gaps: a kernel that reads past a row shows it.
        padded = torch.full((self.batch, heads + 1, seq + 3, dim + 8), math.nan, dtype=dtype)
        view = padded[:, :heads, :seq, :dim]
        view.copy_(values)
        return view


def in_turn(number: int, turn: int, head_dim: int) -> tuple[Case, float]:
    """A problem for 16-bit kernels, and a probability of dropout.

    Every factor changes with the turn, and the lengths with the number too.
    """
    small = [lengths for lengths in LENGTHS if lengths[0] * lengths[1] < 70_000]
    case = Case(
        *small[(5 * turn + number) % len(small)],
        1 + 2 * (turn % 4 == 0),
        *HEADS[turn % len(HEADS)],
        DTYPES[turn % 2],
        head_dim,
        None,
        LAYOUTS[turn // 2 % len(LAYOUTS)],
    )
    return case, (0.0, 0.17)[turn // 3 % 2]


def quarter_of_cases(turn: int, head_dim: int, most_scores: int) -> Iterator[tuple[int, Case]]:
    """Cases of every fourth length, in which all factors take turns, with their turns.

    Args:
        turn: the next values have the other quarters of the lengths.
        most_scores: batch and heads are 1 where a case would have more scores.
    """
    for number, lengths in tuple(enumerate(LENGTHS))[turn % 4 :: 4]:
        at = turn + number
        batch, heads = 3 if at % 4 == 0 else 1, HEADS[at % len(HEADS)]
        layout = LAYOUTS[(turn + number // 2) % len(LAYOUTS)]
        if batch * heads[0] * math.prod(lengths) > most_scores:
            batch, heads = 1, (1, 1)
        dtype = DTYPES[turn % len(DTYPES)]
        yield at, Case(*lengths, batch, *heads, dtype, head_dim, None, layout)


def covering(seed: int, *, most_scores: int | None) -> list[Case]:
    """Cases in which every pair of lengths, dtype, head dim, batch, heads and layout occurs.

    Args:
        seed: another seed pairs the values differently, so that specs together cover more pairs.
        most_scores: batch and heads are reduced to 1 where a case would have more scores than
            this; the lengths are never left out.
    """
    count = max(map(len, (LENGTHS, HEAD_DIMS, DTYPES, HEADS, LAYOUTS)))
    chance = random.Random(seed)

    def dealt(values: Sequence[Any]) -> list[Any]:
        """``count`` values, each about equally often, in an order that depends on the seed."""
        deck = [values[index % len(values)] for index in range(count)]
        chance.shuffle(deck)
        return deck

    def reduced(case: Case) -> Case:
        if most_scores is None or case.scores <= most_scores:
            return case
        return replace(case, batch=1, heads_q=1, heads_kv=1)

    while True:
        decks = map(dealt, (BATCHES, HEADS, DTYPES, HEAD_DIMS, LAYOUTS))
        cases = [
            reduced(
                Case(*LENGTHS[turn % len(LENGTHS)], batch, *heads, dtype, head_dim, None, layout)
            )
            for turn, (batch, heads, dtype, head_dim, layout) in enumerate(zip(*decks, strict=True))
        ]
        # A number of heads may be lost, where only large cases had it: distribute them again.
        if {(case.heads_q, case.heads_kv) for case in cases} >= set(HEADS):
            return cases
