"""Packed sequences of different lengths, without padding; causal within each.

    keep(q, k) = q + (Nk - Nq) >= k

q and k are positions within a sequence; Nq and Nk are the numbers of its queries and of its
keys, which may be more, as with a cache. Sequence i has the queries from cu_seqlens_q[i] up to
cu_seqlens_q[i + 1], and keys likewise.

Source: Dao et al., "FlashAttention", 2022, whose implementation takes the same cu_seqlens.
"""

import flashgen as fg


def causal(b, h, q, k):
    return q + (fg.seq_k - fg.seq_q) >= k


spec = fg.AttentionSpec(mask_mod=causal, head_dim=64, dtype="float16", packed=True)
