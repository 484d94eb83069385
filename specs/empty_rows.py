"""Only the first half of the queries keep keys; the output of the others is 0.

    keep(q) = q < Nq // 2

A row without a key has O = 0, LSE = -inf and no gradient.

Source: a test of the definition; such rows occur wherever masks are combined.
"""

import flashgen as fg


def empty_rows(b, h, q, k):
    return q < fg.seq_q // 2


spec = fg.AttentionSpec(mask_mod=empty_rows, head_dim=64, dtype="float16")
