"""Symmetric power attention: an even power of the score, divided by the sum of the row's powers.

    keep(q, k) = q >= k
    w = s^2                                    O = sum(w v) / sum(w)

Source: Buckman, Gelada and Zhang, "Symmetric Power Transformers", 2024, and Gelada et al., "Scaling
Context Requires Rethinking Attention", 2025 (arXiv 2507.04239), without its gate.
"""

import flashgen as fg


def causal(b, h, q, k):
    return q >= k


def even_power(score, b, h, q, k):
    return score**2


spec = fg.AttentionSpec(
    causal, weight_mod=even_power, normalize="sum", head_dim=64, dtype="bfloat16"
)
