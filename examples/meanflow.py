"""A MeanFlow model: forward mode through attention, inside of the loss.

    python examples/meanflow.py                   # 60 steps, twice; half a minute
    python examples/meanflow.py --steps 400 --device cuda

MeanFlow (Geng et al., "Mean Flows for One-step Generative Modeling", arXiv 2505.13447) learns the
mean velocity u(z, r, t) of a flow from noise to data between the times r and t, with which a sample
takes one step. Its target needs the derivative of u along the path, dz/dt = v, dr/dt = 0,
dt/dt = 1, which torch.func.jvp gives in the same call as u itself:

    u, du = jvp(u, (z, r, t), (v, 0, 1))          loss = |u - stop_gradient(v - (t - r) du)|^2

Both trainings start from the same weights and see the same numbers, one with a flashgen operator
in float32 and one with attention in float64. Their losses may differ by at most 1 part in 10,000
at every step, else the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys

import torch
from point_sets import Attention, PointTransformer, Tensor, circles, compare
from torch.func import jvp

BOUND = 1e-4
BATCH, LEARNING_RATE = 16, 2e-3


def loss_of(model: PointTransformer, data: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """
    Args:
        times: [2, batch], in any order.
    """
    r, t = times.amin(0), times.amax(0)
    z = torch.lerp(data, noise, t[:, None, None])
    v = noise - data
    u, du = jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = v - (t - r)[:, None, None] * du
    return (u - target.detach()).square().mean()


def losses(attention: Attention, steps: int, device: str) -> list[float]:
    """The losses of a training."""
    torch.manual_seed(0)
    model = PointTransformer(attention, numbers=2, outputs=2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    generator = torch.Generator().manual_seed(1)
    values = []
    for _ in range(steps):
        data = circles(BATCH, generator, device)
        noise = torch.randn(data.shape, generator=generator).to(device)
        times = torch.rand(2, BATCH, generator=generator).to(device)
        loss = loss_of(model, data, noise, times)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    return compare(lambda attention: losses(attention, options.steps, options.device), BOUND)


if __name__ == "__main__":
    sys.exit(main())
