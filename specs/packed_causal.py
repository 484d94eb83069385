"""Several documents in one sequence, each with causal attention: packed pre-training.

    keep(b, q, k) = q >= k and id[b, q] == id[b, k]         id given for each token

Source: Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021.
"""

import flashgen as fg

ids = fg.Tensor("ids", ("batch", "tokens"), "int32")


def packed_causal(b, h, q, k):
    return (q >= k) & (ids[b, q] == ids[b, k])


spec = fg.AttentionSpec(mask_mod=packed_causal, head_dim=64, dtype="float16")


def example_tensors(sizes, generator):
    tokens = max(sizes.seq_q, sizes.seq_k)
    lengths = [50 + 30 * b for b in range(sizes.batch)]
    return {"ids": [[token // length for token in range(tokens)] for length in lengths]}
