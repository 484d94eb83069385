"""Blocks of C tokens that attend only to themselves.

    keep(q, k) = q // C == k // C              C given at run time

Source: Child et al., "Generating Long Sequences with Sparse Transformers", 2019 (the
block-local part of fixed attention, in both directions).
"""

import flashgen as fg

chunk = fg.Scalar("chunk", "int32", minimum=1)


def block_diagonal(b, h, q, k):
    return q // chunk == k // chunk


spec = fg.AttentionSpec(mask_mod=block_diagonal, head_dim=64, dtype="float16")
example_scalars = {"chunk": 80}
