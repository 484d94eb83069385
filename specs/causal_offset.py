"""Causal attention with the last query aligned to the last key, plus a run-time shift.

    keep(q, k) = q + (Nk - Nq) + shift >= k

With shift 0 this is the bottom-right alignment: Nq new tokens at the end of Nk known ones.

Source: Dao, "FlashAttention-2", 2023, whose implementation aligns causal masks this way since 2.1.
"""

import flashgen as fg

shift = fg.Scalar("shift", "int32")


def causal_offset(b, h, q, k):
    return q + (fg.seq_k - fg.seq_q) + shift >= k


spec = fg.AttentionSpec(mask_mod=causal_offset, head_dim=64, dtype="float16")
example_scalars = {"shift": 16}
