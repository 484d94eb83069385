"""Several documents in one sequence: a token attends to the tokens of its own document.

    keep(b, q, k) = id[b, q] == id[b, k]       id given for each token

Tiles without a common document are skipped by the smallest and largest id of their rows and
columns (min/max tables), for ids in any order.

Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention
Kernels", 2024 (document masking).
"""

import flashgen as fg

ids = fg.Tensor("ids", ("batch", "tokens"), "int32")


def document(b, h, q, k):
    return ids[b, q] == ids[b, k]


spec = fg.AttentionSpec(mask_mod=document, head_dim=64, dtype="float16")


def example_tensors(sizes, generator):
    tokens = max(sizes.seq_q, sizes.seq_k)
    lengths = [40 + 30 * b for b in range(sizes.batch)]
    return {"ids": [[token // length for token in range(tokens)] for length in lengths]}
