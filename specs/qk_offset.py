"""A learned number for each query, and another for each key.

    s' = s + a[q] - c[k]

Source: Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", 2019,
section 3.3, terms (c) and (d) without the content.
"""

import flashgen as fg

a = fg.Tensor("a", ("seq_q",), "float32", grad=True)
c = fg.Tensor("c", ("seq_k",), "float32", grad=True)


def qk_offset(score, b, h, q, k):
    return score + a[q] - c[k]


spec = fg.AttentionSpec(score_mod=qk_offset, head_dim=64, dtype="float16")
