"""A learned number for each pair of query and key: pair bias.

    s' = s + bias[b, h, q, k]                  dimensions of length 1 are broadcast

Source: Jumper et al., "Highly accurate protein structure prediction with AlphaFold", 2021,
supplementary algorithm 7.
"""

import flashgen as fg

bias = fg.Tensor("bias", ("batch", "heads", "seq_q", "seq_k"), "float32", grad=True)


def dense_bias(score, b, h, q, k):
    return score + bias[b, h, q, k]


spec = fg.AttentionSpec(score_mod=dense_bias, head_dim=64, dtype="float16")


def example_tensors(sizes, generator):
    import torch

    shape = (1, sizes.heads, sizes.seq_q, sizes.seq_k)
    return {"bias": torch.randn(shape, generator=generator) / 2}
