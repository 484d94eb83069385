"""Selects the blocks of keys that queries attend to, by their mass in a first call.

One layer attends to all keys and returns the mass of each block of 64 keys in each query. The
blocks of most mass, for each head and 64 queries, are the block layout of the layers after it,
whose kernels visit these blocks alone.

    python examples/select_blocks.py [--keys 1024] [--blocks 4]

Source: block selection as in Yuan et al., "Native Sparse Attention", 2025, and Lu et al., "MoBA:
Mixture of Block Attention for Long-Context LLMs", 2025, with the mass itself in place of an
estimate.
"""

from __future__ import annotations

import argparse

import torch

import flashgen as fg

Tensor = torch.Tensor

BLOCK = 64


def causal(b: object, h: object, q: fg.Scalar, k: fg.Scalar) -> object:
    return q >= k


full = fg.attention(fg.AttentionSpec(causal, head_dim=64, dtype="float32", name="full_layer"))
sparse = fg.attention(
    fg.AttentionSpec(
        causal,
        head_dim=64,
        dtype="float32",
        block_sparse=fg.BlockSparse(block_q=BLOCK, block_k=BLOCK),
        name="sparse_layer",
    )
)


def select(block_mass: Tensor, count: int) -> Tensor:
    """The blocks of most mass: bool [batch, heads, row blocks, column blocks].

    Args:
        block_mass: float32 [batch, heads, queries, column blocks].
        count: blocks of each row of blocks, if its queries reach as many.
    """
    missing = -block_mass.shape[2] % BLOCK
    rows = torch.nn.functional.pad(block_mass, (0, 0, 0, missing)).unflatten(2, (-1, BLOCK)).sum(3)
    best = rows.topk(min(count, rows.shape[3]), dim=3).indices
    live = torch.zeros_like(rows, dtype=torch.bool).scatter(3, best, True)
    return live & (rows > 0)


def problem(keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries that look for keys of a few topics, each of which lies in neighbouring blocks."""
    torch.manual_seed(0)
    topics = torch.randn(8, 64)
    key_topics = topics[torch.arange(keys) * 8 // keys]
    k = (key_topics + 0.3 * torch.randn(2, 4, keys, 64)) * 1.2
    q = topics[torch.randint(8, (keys // BLOCK + 1,))].repeat_interleave(BLOCK, 0)[:keys]
    return (q + 0.3 * torch.randn(2, 4, keys, 64)) * 1.2, k, torch.randn(2, 4, keys, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keys", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=4)
    options = parser.parse_args()
    q, k, v = problem(options.keys)
    expected, aux = full(q, k, v, return_aux=fg.AuxRequest(block_mass=BLOCK))
    live = select(aux.block_mass, options.blocks)
    mass = (aux.block_mass * live.repeat_interleave(BLOCK, 2)[:, :, : q.shape[2]]).sum(3)
    out = sparse(q, k, v, layout=fg.Layout.of(live))
    error = (out - expected).abs().max()
    print(f"blocks: {int(live.sum())} of {live.numel()}")
    print(f"mass of the selected blocks: {mass.mean():.3f} on average, {mass.min():.3f} at least")
    print(f"largest difference of the output: {error:.3f}")


if __name__ == "__main__":
    main()
