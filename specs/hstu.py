"""Pointwise attention of HSTU: SiLU in place of the softmax, with a learned number per distance.

    keep(q, k) = q >= k
    w = silu(s + table[q - k]) / length        silu(x) = x / (1 + exp(-x))      O = sum(w v)

Source: Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for
Generative Recommendations", 2024 (arXiv 2402.17152), equation 2; the length is the greatest of a
sequence, as in the authors' code.
"""

import flashgen as fg

length = fg.Scalar("length")
table = fg.Tensor("table", ("distances",), "float32", grad=True)


def causal(b, h, q, k):
    return q >= k


def silu(score, b, h, q, k):
    biased = score + table[q - k]
    return biased * fg.sigmoid(biased) / length


spec = fg.AttentionSpec(causal, weight_mod=silu, normalize="none", head_dim=64, dtype="bfloat16")

example_scalars = {"length": 256}


def example_tensors(sizes, generator):
    import torch

    return {"table": torch.randn(max(sizes.seq_q, sizes.seq_k), generator=generator) / 2}
