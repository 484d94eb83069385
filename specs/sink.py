"""Causal attention with a sink: a learned logit of each head that joins the softmax's denominator.

    P(q, k) = exp(s) / (exp(t[h]) + sum of exp(s) over the kept keys)

A head without a relevant key gives its weight to the sink, and its output is near 0.

Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025 (a learned bias in the denominator of
the softmax of each head); Miller, "Attention Is Off By One", 2023 (t = 0).
"""

import flashgen as fg

sink = fg.Tensor("sink", ("heads",), "float32", grad=True)


def causal(b, h, q, k):
    return q >= k


spec = fg.AttentionSpec(mask_mod=causal, head_dim=64, dtype="float16", sink=sink)


def example_tensors(sizes, generator):
    return {"sink": [1.5 - h % 4 for h in range(sizes.heads)]}
