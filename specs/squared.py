"""The square of each score.

    s' = s * s                                 ds'/ds = 2 s

Source: a test of the definition: the derivative depends on the score.
"""

import flashgen as fg


def squared(score, b, h, q, k):
    return score * score


spec = fg.AttentionSpec(score_mod=squared, head_dim=64, dtype="float16")
