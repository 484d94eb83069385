"""Retention: the score itself is the weight, and decays with the distance at a rate of its head.

    keep(q, k) = q >= k
    w = s * 2^(-rate[h] (q - k))               rate[h] = -log2(1 - 2^(-5 - h))  O = sum(w v)

Source: Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models", 2023
(arXiv 2307.08621), the parallel form, equation 5; the group norm that follows is a layer's.
"""

import flashgen as fg

rate = fg.Tensor("rate", ("heads",), "float32")


def causal(b, h, q, k):
    return q >= k


def decayed(score, b, h, q, k):
    return score * fg.exp2(rate[h] * (k - q))


spec = fg.AttentionSpec(causal, weight_mod=decayed, normalize="none", head_dim=64, dtype="bfloat16")


def example_tensors(sizes, generator):
    import torch

    return {"rate": -torch.log2(1 - 2.0 ** (-5 - torch.arange(sizes.heads)))}
