"""Sets of points in the plane, and a small transformer over them, for the examples of derivatives.

A set is a sequence of points on one circle, whose centre and radius are random. Every point sees
the others by attention, which the caller gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

import flashgen as fg

Tensor = torch.Tensor
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v [batch, heads, points, head_dim] -> out of the same shape, scale 1 / sqrt(head_dim)."""

POINTS, HEADS, HEAD_DIM, LAYERS = 48, 2, 16, 2
WIDTH = HEADS * HEAD_DIM

# Scores of a large model are capped, as in Gemma 2; here so that the score has second derivatives.
CAP = 10.0


def capped(score, b, h, q, k):
    return CAP * fg.tanh(score / CAP)


flashgen_attention = fg.attention(
    fg.AttentionSpec(score_mod=capped, head_dim=HEAD_DIM, dtype="float32", name="capped_points")
)


def float64_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same attention by PyTorch operations, with the whole matrix of scores in float64."""
    scores = q.double() @ k.double().mT / math.sqrt(HEAD_DIM)
    shares = torch.softmax(CAP * torch.tanh(scores / CAP), dim=-1)
    return (shares @ v.double()).to(q.dtype)


def circles(count: int, generator: torch.Generator, device: str) -> Tensor:
    """``count`` sets of points, [count, POINTS, 2]."""
    angles = 2 * math.pi * torch.rand(count, POINTS, generator=generator)
    radius = 0.5 + torch.rand(count, 1, generator=generator)
    centre = torch.randn(count, 1, 2, generator=generator) / 2
    points = torch.stack([angles.cos(), angles.sin()], dim=-1) * radius[..., None]
    return (centre + points).to(device)


class PointTransformer(nn.Module):
    """Layers of attention and an MLP over the points of a set, with numbers for all of them.

    Args:
        numbers: the count of numbers, such as times, that belong to each set.
        outputs: the length of the result for each point.
    """

    def __init__(self, attention: Attention, numbers: int, outputs: int) -> None:
        super().__init__()
        self.attention = attention
        self.first = nn.Linear(2 + numbers, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.last = nn.Linear(WIDTH, outputs)

    def forward(self, points: Tensor, *numbers: Tensor) -> Tensor:
        """points [batch, POINTS, 2], each of numbers [batch] -> [batch, POINTS, outputs]."""
        beside = [x[:, None, None].expand(*points.shape[:2], 1) for x in numbers]
        x = self.first(torch.cat([points, *beside], dim=-1))
        for qkv, out, mlp in zip(self.qkv, self.out, self.mlp, strict=True):
            parts = qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
            x = x + out(self.attention(*parts).transpose(1, 2).flatten(2))
            x = x + mlp(x)
        return self.last(x)


def compare(losses: Callable[[Attention], Sequence[float]], bound: float, every: int = 10) -> int:
    """Prints the losses of two trainings, with flashgen and in float64. Returns the exit status.

    Args:
        losses: the losses of a training with an attention.
        bound: the largest relative difference that is allowed at any step.
    """
    own_losses, reference_losses = losses(flashgen_attention), losses(float64_attention)
    worst = 0.0
    print("step     flashgen      float64  relative difference")
    for step, (own_loss, reference_loss) in enumerate(
        zip(own_losses, reference_losses, strict=True)
    ):
        difference = abs(own_loss - reference_loss) / max(abs(reference_loss), 1e-12)
        worst = max(worst, difference)
        if step % every == 0 or step == len(own_losses) - 1:
            print(f"{step:4}  {own_loss:11.6f}  {reference_loss:11.6f}  {difference:.1e}")
    passed = worst <= bound
    verdict = "pass" if passed else "FAIL"
    print(f"largest relative difference {worst:.1e}, allowed {bound:.0e}: {verdict}")
    return 0 if passed else 1
