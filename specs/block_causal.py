"""Causal between chunks of C positions, full within a chunk.

    keep(q, k) = q fdiv C >= k fdiv C          C = 100, which no tile divides

Source: the chunk masks of streaming speech encoders, as in Zhang et al., "Unified Streaming and
Non-streaming Two-pass End-to-end Model for Speech Recognition", 2020, section 3.
"""

import flashgen as fg

CHUNK = 100


def block_causal(b, h, q, k):
    return q // CHUNK >= k // CHUNK


spec = fg.AttentionSpec(mask_mod=block_causal, head_dim=64, dtype="float16")
