"""Blocks whose coordinates differ in at most one bit: 1 + log2(n) blocks in each row of n = 2^m.

    live(i, j) = popcount(i xor j) <= 1        blocks of 64 x 64

Any two blocks are connected through log2(n) layers of such attention, as in a fast Fourier
transform.

Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness",
2022, section 3.3 (Algorithm 5); the pattern is that of Chen et al., "Pixelated Butterfly", 2021.
"""

import flashgen as fg


def butterfly(i, j):
    return bin(i ^ j).count("1") <= 1


spec = fg.AttentionSpec(
    block_sparse=fg.BlockSparse(butterfly, block_q=64, block_k=64), head_dim=64, dtype="float16"
)
