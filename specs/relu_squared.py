"""Squared ReLU in place of the softmax, divided by the number of keys.

    w = max(s, 0)^2 / N                        N the number of keys             O = sum(w v)

Source: Wortsman et al., "Replacing softmax with ReLU in Vision Transformers", 2023 (arXiv
2309.08586), which divides by the length; the square is that of So et al., "Primer", 2021.
"""

import flashgen as fg


def relu_squared(score, b, h, q, k):
    return fg.maximum(score, 0) ** 2 / fg.seq_k


spec = fg.AttentionSpec(weight_mod=relu_squared, normalize="none", head_dim=64, dtype="bfloat16")
