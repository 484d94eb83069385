"""A learned number for each position, added for the query and for the key.

    s' = s + t[q] + t[k]                       one tensor, used twice

Source: a variant of additive position biases; reading one learned tensor at two places is what
other compilers of attention do not differentiate.
"""

import flashgen as fg

t = fg.Tensor("t", ("positions",), "float32", grad=True)


def symmetric_bias(score, b, h, q, k):
    return score + t[q] + t[k]


spec = fg.AttentionSpec(score_mod=symmetric_bias, head_dim=64, dtype="float16")


def example_tensors(sizes, generator):
    import torch

    return {"t": torch.randn(max(sizes.seq_q, sizes.seq_k), generator=generator) / 2}
