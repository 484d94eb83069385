"""Sigmoid attention: each weight lies between 0 and 1, whatever the others are.

    keep(q, k) = q >= k
    w = sigmoid(s - log N)                     N the number of keys             O = sum(w v)

Source: Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", 2024
(arXiv 2409.04431).
"""

import flashgen as fg


def causal(b, h, q, k):
    return q >= k


def sigmoid(score, b, h, q, k):
    return fg.sigmoid(score - fg.log(fg.seq_k))


spec = fg.AttentionSpec(causal, weight_mod=sigmoid, normalize="none", head_dim=64, dtype="bfloat16")
