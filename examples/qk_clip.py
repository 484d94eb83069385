"""Trains an attention layer with QK-clip, which keeps the scores of every head below a threshold.

After each step of the optimiser, the weights of a head's queries and keys are multiplied by the
square root of ``threshold / largest``, where the largest score of the head was above the threshold.
The largest scores are a result of the call that the loss needs anyway: no score is stored.

    python examples/qk_clip.py [--steps 30] [--threshold 4]

Source: MuonClip of Kimi Team, "Kimi K2: Open Agentic Intelligence", 2025, section 2.1.
"""

from __future__ import annotations

import argparse

import torch

import flashgen as fg

Tensor = torch.Tensor


class Attention(torch.nn.Module):
    """Causal attention that returns its output and the largest score of each head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (torch.nn.Linear(width, width, bias=False) for _ in range(3))
        spec = fg.AttentionSpec(lambda b, h, q, k: q >= k, head_dim=width // heads, dtype="float32")
        self.attend = fg.attention(spec)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (
            project(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        out, aux = self.attend(q, k, v, return_aux=fg.AuxRequest(max_scores=True))
        return out.transpose(1, 2).flatten(2), aux.max_scores.amax((0, 2))

    @torch.no_grad()
    def clip(self, largest: Tensor, threshold: float) -> None:
        """Multiplies the scores of each head by ``threshold / largest``, where that is below 1."""
        factor = (threshold / largest.clamp(min=threshold)).sqrt()
        for weight in (self.q.weight, self.k.weight):
            weight.view(self.heads, -1, weight.shape[1]).mul_(factor[:, None, None])


def train(steps: int, threshold: float | None, width: int = 64, heads: int = 4) -> list[float]:
    """The largest score of each step: the layer learns to copy the last row with its own first
    number, which only sharp weights can do."""
    torch.manual_seed(0)
    layer = Attention(width, heads)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    largest_scores = []
    for _ in range(steps):
        x = torch.randn(8, 48, width)
        marks = torch.nn.functional.one_hot(torch.randint(8, (8, 48)), 8) * 3.0
        x[..., :8] = marks
        same = (marks[:, :, None] == marks[:, None]).all(-1).tril(-1)
        last = (same * torch.arange(48)).amax(2)  # row 0 where there is none
        out, largest = layer(x)
        loss = (out - x.take_along_dim(last[..., None], 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if threshold is not None:
            layer.clip(largest, threshold)
        largest_scores.append(float(largest.max()))
    return largest_scores


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threshold", type=float, default=4.0)
    options = parser.parse_args()
    for name, threshold in (("without", None), ("with", options.threshold)):
        largest = train(options.steps, threshold)
        print(
            f"{name:8} QK-clip: largest score {largest[0]:.1f} at first, {largest[-1]:.1f} at last"
        )


if __name__ == "__main__":
    main()
