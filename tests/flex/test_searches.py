"""Scores that remove themselves, buckets, bits and functions, as PyTorch's users write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from tests.support.judged import normal

EDGES = torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0, 16.0])
TABLE = normal((7, 2), torch.float32, 9)


def operands() -> list[torch.Tensor]:
    return [normal((1, 2, 40, 64), torch.float32, seed).requires_grad_() for seed in range(3)]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Any) -> torch.Tensor:
    """Attention with all scores at once, differentiated by torch."""
    h, rows, keys = torch.meshgrid(*map(torch.arange, (2, 40, 40)), indexing="ij")
    scores = score_mod(q @ k.transpose(2, 3) / 8, 0, h, rows, keys)
    return torch.softmax(scores, -1) @ v


def compare(score_mod: Any) -> None:
    ours, theirs = operands(), operands()
    out = fg.flex_attention(*ours, score_mod=score_mod)
    exact = dense(*theirs, score_mod)
    assert (out - exact).abs().max() < 1e-5
    dout = normal(out.shape, torch.float32, 5)
    out.backward(dout)
    exact.backward(dout)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad - other.grad).abs().max() < 2e-5


@pytest.mark.parametrize("right", [False, True])
def test_buckets_of_captured_boundaries(right: bool) -> None:
    compare(
        lambda score, b, h, q, k: (
            score + TABLE[torch.bucketize((q - k).abs().float(), EDGES, right=right), h]
        )
    )
    side = "right" if right else "left"
    compare(lambda score, b, h, q, k: score + torch.searchsorted(EDGES, score, right=right))
    compare(lambda score, b, h, q, k: score * torch.searchsorted(EDGES, q - k, side=side))


def test_a_score_may_remove_itself() -> None:
    compare(lambda score, b, h, q, k: torch.where(score > -0.5, score, -float("inf")))


def test_integer_bits_are_those_of_torch() -> None:
    compare(lambda score, b, h, q, k: score + ((q & 5 | k ^ 3) << 1 >> (h + 1)) * 0.1 + (~k & q))


def test_functions_are_those_of_torch() -> None:
    compare(
        lambda score, b, h, q, k: (
            torch.erf(score)
            + torch.special.erfc(score)
            + torch.log1p(score.abs())
            + torch.expm1(score / 4)
            + torch.atan2(score, q - k + 0.5)
            + torch.rsqrt(score * score + 1)
            + torch.exp2(score / 2)
            + torch.where(torch.isfinite(score), score.clamp(-1, 1), 0)
        )
    )
