"""Sequences of unequal length in one batch, padded at the end.

    keep(b, k) = k < len[b]                    len given for each sequence

Source: Vaswani et al., "Attention Is All You Need", 2017; the mask of every padded batch.
"""

import flashgen as fg

length = fg.Tensor("length", ("batch",), "int32")


def padding(b, h, q, k):
    return k < length[b]


spec = fg.AttentionSpec(mask_mod=padding, head_dim=64, dtype="float16")


def example_tensors(sizes, generator):
    return {"length": [max(1, sizes.seq_k * (b + 2) // (b + 3)) for b in range(sizes.batch)]}
