"""Padding given as a mask of 0 and 1 for each token, as tokenizers give it.

    keep(b, k) = mask[b, k]

Tiles that hold only padding are skipped, wherever they are.

Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019; the attention
mask of every library of transformers.
"""

import flashgen as fg

mask = fg.Tensor("mask", ("batch", "seq_k"), "bool")


def padding_mask(b, h, q, k):
    return mask[b, k]


spec = fg.AttentionSpec(mask_mod=padding_mask, head_dim=64, dtype="float16")


def example_tensors(sizes, generator):
    lengths = [max(1, sizes.seq_k * (b + 2) // (b + 3)) for b in range(sizes.batch)]
    return {"mask": [[k < length for k in range(sizes.seq_k)] for length in lengths]}
