"""Causal attention to the nearest blocks, to the first one, and to every fourth before them.

    keep(q, k) = q >= k and live(q // 32, k // 32)
    live(i, j) = i - j < 2 or j < 1 or j % 4 == 3

The block layout excludes whole blocks, the mask excludes elements of those on the diagonal.

Source: Child et al., "Generating Long Sequences with Sparse Transformers", 2019, section 4 (fixed
attention by blocks); the first blocks as in Xiao et al., "Efficient Streaming Language Models with
Attention Sinks", 2023.
"""

import flashgen as fg


def causal(b, h, q, k):
    return q >= k


def local_global(i, j):
    return i - j < 2 or j < 1 or j % 4 == 3


spec = fg.AttentionSpec(
    mask_mod=causal,
    block_sparse=fg.BlockSparse(local_global, block_q=32, block_k=32),
    head_dim=64,
    dtype="float16",
)
