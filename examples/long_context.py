"""A character transformer trained on a sequence that lies on several ranks.

    torchrun --nproc-per-node 4 examples/long_context.py    # 4 processes, or 4 GPUs
    torchrun --nproc-per-node 2 examples/long_context.py --steps 20

Each rank holds two chunks of every sequence (head and tail) and the keys and values of its own
positions alone; flashgen.distributed.attention computes causal attention over the whole, by a
ring. Rank 0 first trains the same model by itself on whole sequences. The two losses may differ by
at most 1e-4 at every step, else the exit status is 1. Both curves and their difference are plotted.

On GPUs the group is NCCL's, on the CPU gloo's, and all is float32.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from loss_plot import check, plot
from train_char_model import CharTransformer, Sizes, Tensor, Text

import flashgen as fg

LARGEST_DIFFERENCE = 1e-4
LEARNING_RATE = 2e-3

TEXT = Path(__file__).resolve().parent / "coriolanus.txt"


def causal(b, h, q, k):
    return q >= k


OP = fg.attention(fg.AttentionSpec(causal, head_dim=32, dtype="float32"))


def alone(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    return OP(q, k, v)


def across_ranks(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    return fg.distributed.attention(OP, q, k, v, method="ring", shard="head_tail")


def own_positions(length: int, rank: int, world: int) -> Tensor:
    """The positions of a rank: chunks r and 2W - 1 - r of 2W."""
    chunks = torch.arange(length).chunk(2 * world)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])


def train(
    text: Text, sizes: Sizes, steps: int, device: str, positions: Tensor | None
) -> list[float]:
    """Trains from the same weights on the same sequences. Returns the loss of each step.

    Args:
        positions: this rank's positions; None to train on whole sequences, by this rank alone.
    """
    torch.manual_seed(0)
    attention: Callable[..., Tensor] = alone if positions is None else across_ranks
    model = CharTransformer(len(text.characters), sizes, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))
    losses = []
    for pieces, following in text.batches(sizes, steps, seed=0):
        if positions is not None:
            pieces, following = pieces[:, positions], following[:, positions]
        rank_positions = None if positions is None else positions.to(device)
        loss = model.loss(pieces.to(device), following.to(device), rank_positions)
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach().clone()
        if positions is not None:  # the mean over all positions, and its gradients
            for tensor in (shown, *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(tensor)
                tensor /= dist.get_world_size()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(shown))
    return losses


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="number of steps of each training")
    parser.add_argument("--context", type=int, default=512, help="characters of a sequence")
    parser.add_argument("--plot", type=Path, default=Path("build/long_context.png"))
    options = parser.parse_args(arguments)
    if "WORLD_SIZE" not in os.environ:
        print("start it on several ranks: torchrun --nproc-per-node 4 examples/long_context.py")
        return 2
    check(parser, options.plot)
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    if options.steps < 1 or options.context % (2 * world):
        parser.error(f"--steps is at least 1, --context a multiple of {2 * world}")

    text = Text(TEXT.read_text(encoding="utf-8"))
    sizes = Sizes(context=options.context, batch=4)
    one = train(text, sizes, options.steps, device, None) if rank == 0 else []
    dist.barrier()
    positions = own_positions(options.context, rank, world)
    many = train(text, sizes, options.steps, device, positions)
    status = 0
    if rank == 0:
        apart = [abs(a - b) for a, b in zip(one, many, strict=True)]
        agree = max(apart) <= LARGEST_DIFFERENCE
        status = 0 if agree else 1
        title = "A character transformer with its sequence on several ranks"
        losses = {"one process, whole sequences": one, f"{world} ranks, ring": many}
        plot(options.plot, title, losses, apart, LARGEST_DIFFERENCE, "difference of losses")
        print(
            f"{world} ranks, {options.context} characters, {len(positions)} on each rank\n"
            f"one process  loss {one[0]:.4f} -> {one[-1]:.4f}\n"
            f"{world} ranks      loss {many[0]:.4f} -> {many[-1]:.4f}\n"
            f"plot {options.plot}\nlargest difference {max(apart):.1e}, allowed "
            f"{LARGEST_DIFFERENCE:.0e}: {'pass' if agree else 'FAIL'}",
            flush=True,
        )
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
