"""A window on both sides, with a separate width for each head.

    keep(h, q, k) = |q - k| <= w[h]            w given for each head

Source: Sukhbaatar et al., "Adaptive Attention Span in Transformers", 2019, with integer
spans.
"""

import flashgen as fg

width = fg.Tensor("width", ("heads",), "int32")


def per_head_window(b, h, q, k):
    return fg.abs(q - k) <= width[h]


spec = fg.AttentionSpec(mask_mod=per_head_window, head_dim=64, dtype="float16")


def example_tensors(sizes, generator):
    return {"width": [12 * 3**h % 300 for h in range(sizes.heads)]}
