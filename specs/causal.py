"""Causal attention: a query attends to itself and to all keys before it.

    keep(q, k) = q >= k

Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.3 (the decoder's mask).
"""

import flashgen as fg


def causal(b, h, q, k):
    return q >= k


spec = fg.AttentionSpec(mask_mod=causal, head_dim=64, dtype="float16")
