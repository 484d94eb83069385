"""A learned number for each distance.

    s' = s + table[q - k + N - 1]              N the number of keys

Source: Shaw, Uszkoreit and Vaswani, "Self-Attention with Relative Position Representations", 2018;
as a bias in Raffel et al., 2020, section 2.1.
"""

import flashgen as fg

table = fg.Tensor("table", ("distances",), "float32", grad=True)


def relative_bias(score, b, h, q, k):
    return score + table[q - k + fg.seq_k - 1]


spec = fg.AttentionSpec(score_mod=relative_bias, head_dim=64, dtype="float16")


def example_tensors(sizes, generator):
    import torch

    return {"table": torch.randn(sizes.seq_q + sizes.seq_k, generator=generator) / 2}
