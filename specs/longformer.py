"""A window, and global tokens that attend to all tokens and to which all tokens attend.

    keep(q, k) = |q - k| <= W or k < G or q < G             W and G given at run time

Source: Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer", 2020, section 3.1.
"""

import flashgen as fg

window = fg.Scalar("window", "int32", minimum=0)
first = fg.Scalar("global_tokens", "int32", minimum=0)


def longformer(b, h, q, k):
    return (fg.abs(q - k) <= window) | (k < first) | (q < first)


spec = fg.AttentionSpec(mask_mod=longformer, head_dim=64, dtype="float16")
example_scalars = {"window": 40, "global_tokens": 5}
