"""Causal attention within blocks that are chosen at run time, for each batch entry and head.

    keep(b, h, q, k) = q >= k and layout[b, h, q // 48, k // 48]       layout given with each call

The layout is a bool tensor, compressed once for the forward and the backward pass.

Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness",
2022, section 3.3 (Algorithm 5).
"""

import flashgen as fg


def causal(b, h, q, k):
    return q >= k


spec = fg.AttentionSpec(
    mask_mod=causal,
    block_sparse=fg.BlockSparse(block_q=48, block_k=48),
    head_dim=64,
    dtype="float16",
)


def example_tensors(sizes, generator):
    # The diagonal, and of the others each third one by head.
    rows, columns = -(-sizes.seq_q // 48), -(-sizes.seq_k // 48)
    return {
        "layout": [
            [
                [[i == j or (i + j + h + b) % 3 == 0 for j in range(columns)] for i in range(rows)]
                for h in range(sizes.heads)
            ]
            for b in range(sizes.batch)
        ]
    }
