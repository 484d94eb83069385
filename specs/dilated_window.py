"""Every d-th key of a window of W on either side.

    keep(q, k) = |q - k| <= W and |q - k| % d == 0          W and d given at run time

Source: Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer", 2020, section 3.1.
"""

import flashgen as fg

window = fg.Scalar("window", "int32", minimum=0)
dilation = fg.Scalar("dilation", "int32", minimum=1)


def dilated_window(b, h, q, k):
    distance = fg.abs(q - k)
    return (distance <= window) & (distance % dilation == 0)


spec = fg.AttentionSpec(mask_mod=dilated_window, head_dim=64, dtype="float16")
example_scalars = {"window": 96, "dilation": 3}
