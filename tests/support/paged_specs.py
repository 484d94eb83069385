"""Specs with paged=True, and the sequences of calls that decode, verify a tree and mix both."""

from __future__ import annotations

from typing import Any

import torch

import flashgen as fg
from tests.support.examples import spec_path
from tests.support.judged import normal
from tests.support.paged_calls import Paged, Sequences


def before(b, h, q, k):  # type: ignore[no-untyped-def]
    return k <= q


def near(b, h, q, k):  # type: ignore[no-untyped-def]
    return (k <= q) & (q - k < 50)


def near_the_end(b, h, q, k):  # type: ignore[no-untyped-def]
    return (k <= q) & (k >= fg.seq_k - 70)


TREE = fg.Tensor("tree", (8, 8), "bool")


def in_tree(b, h, q, k):  # type: ignore[no-untyped-def]
    """The last 8 positions are a tree, whose nodes see their ancestors and all positions before."""
    first = fg.seq_k - 8
    return (k < first) | TREE[q - first, k - first]


BIAS = fg.Tensor("bias", ("heads", "positions"), "float32")
CAUSAL = fg.AttentionSpec(before, paged=True, name="causal_paged")
SERVED = {
    "causal": CAUSAL,
    "window": fg.AttentionSpec(near, paged=True, name="window_paged"),
    "of_the_end": fg.AttentionSpec(near_the_end, paged=True, name="near_the_end"),
    "sink": fg.AttentionSpec(before, sink=True, paged=True, name="sink_paged"),
    "softcap": fg.load(spec_path("softcap")).replace(mask_mod=before, paged=True),
    "alibi": fg.load(spec_path("alibi")).replace(mask_mod=before, paged=True),
    "bias": fg.AttentionSpec(
        before, lambda s, b, h, q, k: s + BIAS[h, k], paged=True, name="bias_paged"
    ),
    "tree": fg.AttentionSpec(in_tree, paged=True, name="tree_paged"),
}
NODES = torch.tensor([[0], [0], [1], [1], [2], [4], [4], [6]])  # the parent of each node of a tree
ANCESTORS = torch.eye(8, dtype=torch.bool)
for node, parent in enumerate(NODES.flatten().tolist()):
    ANCESTORS[node] |= ANCESTORS[parent]
VALUES = {
    "sink": torch.linspace(-1, 2, 4),
    "bias": normal((4, 512), torch.float32, 1),
    "tree": ANCESTORS,
}
DECODING = Sequences.of((1, 1, 1, 1), (37, 300, 1, 129))
VERIFYING = Sequences.of((8, 8, 8), (150, 8, 217))
MIXED = Sequences.of((70, 1, 0, 3), (130, 217, 40, 5))


def paged(name: str, of: Sequences, arch: str, page_size: int = 16, **how: Any) -> Paged:
    spec = SERVED[name]
    names = {tensor.name for tensor in spec.tensors} & VALUES.keys()
    numbers = {"tensors": {each: VALUES[each] for each in names}} if names else {}
    return Paged(spec, of, page_size, numbers=numbers, how={"arch": arch, **how})
