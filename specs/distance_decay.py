"""Scores that decay with the square of the distance.

    s' = s / (1 + 1e-4 (q - k)^2)

Source: the Cauchy kernel as a factor of the score; a variant that no library ships.
"""

import flashgen as fg


def distance_decay(score, b, h, q, k):
    return score / (1 + 1e-4 * (q - k) ** 2)


spec = fg.AttentionSpec(score_mod=distance_decay, head_dim=64, dtype="float16")
