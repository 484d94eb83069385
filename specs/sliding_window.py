"""Causal attention to the last W keys, the query's own included.

    keep(q, k) = q >= k and q - k < W          W >= 1, given at run time

Source: Jiang et al., "Mistral 7B", 2023, section 2 (sliding window attention).
"""

import flashgen as fg

window = fg.Scalar("window", "int32", minimum=1)


def sliding_window(b, h, q, k):
    return (q >= k) & (q - k < window)


spec = fg.AttentionSpec(mask_mod=sliding_window, head_dim=64, dtype="float16")
example_scalars = {"window": 64}
