"""Causal attention to the last L keys and to every L-th key before them.

    keep(q, k) = q >= k and (q - k < L or (q - k) % L == 0)          L given at run time

Source: Child et al., "Generating Long Sequences with Sparse Transformers", 2019, section 4.2.
"""

import flashgen as fg

stride = fg.Scalar("stride", "int32", minimum=1)


def strided(b, h, q, k):
    distance = q - k
    return (q >= k) & ((distance < stride) | (distance % stride == 0))


spec = fg.AttentionSpec(mask_mod=strided, head_dim=64, dtype="float16")
example_scalars = {"stride": 48}
