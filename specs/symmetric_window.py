"""A window of W keys on either side, for bidirectional models.

    keep(q, k) = |q - k| <= W                  W given at run time

Source: Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer", 2020, section 3.1.
"""

import flashgen as fg

window = fg.Scalar("window", "int32", minimum=0)


def symmetric_window(b, h, q, k):
    return fg.abs(q - k) <= window


spec = fg.AttentionSpec(mask_mod=symmetric_window, head_dim=64, dtype="float16")
example_scalars = {"window": 70}
