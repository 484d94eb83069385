"""A learned temperature, one number for all heads.

    s' = s * t

Source: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision",
2021 (a learned temperature of a softmax), here inside attention.
"""

import flashgen as fg

t = fg.Tensor("t", (), "float32", grad=True)


def temperature(score, b, h, q, k):
    return score * t


spec = fg.AttentionSpec(score_mod=temperature, head_dim=64, dtype="float16")


def example_tensors(sizes, generator):
    return {"t": 1.3}
