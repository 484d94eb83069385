"""Scores bounded smoothly to (-c, c).

    s' = c * tanh(s / c)                       c = 50

Its derivative, 1 - tanh(s / c)^2, reuses the tanh.

Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024, section 2.
"""

import flashgen as fg

CAP = 50.0


def softcap(score, b, h, q, k):
    return CAP * fg.tanh(score / CAP)


spec = fg.AttentionSpec(score_mod=softcap, head_dim=64, dtype="float16")
