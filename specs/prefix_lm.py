"""A prefix of P keys that all queries attend to, and causal attention after it.

    keep(q, k) = k < P or q >= k               P given at run time

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", 2020, section 3.2.1 (causal masking with prefix).
"""

import flashgen as fg

prefix = fg.Scalar("prefix", "int32")


def prefix_lm(b, h, q, k):
    return (k < prefix) | (q >= k)


spec = fg.AttentionSpec(mask_mod=prefix_lm, head_dim=64, dtype="float16")
example_scalars = {"prefix": 100}
