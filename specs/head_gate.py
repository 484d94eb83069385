"""A learned gate that scales down the scores of each head.

    s' = s * sigmoid(g[h])

Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention
Kernels", 2024 (learned tensors in score_mod).
"""

import flashgen as fg

gate = fg.Tensor("gate", ("heads",), "float32", grad=True)


def head_gate(score, b, h, q, k):
    return score * fg.sigmoid(gate[h])


spec = fg.AttentionSpec(score_mod=head_gate, head_dim=64, dtype="float16")
