"""Attention with linear biases: a penalty that grows with distance, steeper for the first heads.

    s' = s + m(h) * (k - q)                    m(h) = 2^(-8 (h + 1) / H)

Source: Press, Smith and Lewis, "Train Short, Test Long: Attention with Linear Biases Enables
Input Length Extrapolation", 2022, section 3; the slopes are theirs for H a power of two.
"""

import flashgen as fg


def alibi(score, b, h, q, k):
    slope = 2 ** (-8 * (h + 1) / fg.heads)
    return score + slope * (k - q)


spec = fg.AttentionSpec(score_mod=alibi, head_dim=64, dtype="float16")
