"""Whether a part of the batch or of the heads can be computed like a call of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flashgen as fg
from flashgen.spec.language.signature import in_whole, signature_of

BIAS = fg.Tensor("bias", ("heads", "seq_k"), "float32")
IDS = fg.Tensor("ids", ("batch", "seq_k"), "int32")
TABLE = fg.Tensor("table", ("heads", "kinds"), "float32")
BOTH = ("batch", "heads")

SCORES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "unused": (lambda s, b, h, q, k: s, BOTH),
    "the index of its dimension": (lambda s, b, h, q, k: s + BIAS[h, k], BOTH),
    "inside of another index": (lambda s, b, h, q, k: s + TABLE[h, IDS[b, k]], BOTH),
    "a number": (lambda s, b, h, q, k: s + h, ("batch",)),
    "the number of all": (lambda s, b, h, q, k: s / fg.heads, ("batch",)),
    "another index": (lambda s, b, h, q, k: s + BIAS[0, k], ("batch",)),
    "the index of another dimension": (lambda s, b, h, q, k: s + TABLE[h, h], ("batch",)),
    "an index and a number": (lambda s, b, h, q, k: s * b + IDS[b, k], ("heads",)),
    "an entry": (lambda s, b, h, q, k: s + IDS[1, k], ("heads",)),
}


@pytest.mark.parametrize("use", SCORES)
def test_what_the_score_does_with_an_index_decides_what_is_divisible(use: str) -> None:
    score, divisible = SCORES[use]
    assert signature_of(fg.AttentionSpec(score_mod=score, head_dim=16)).divisible == divisible


@pytest.mark.parametrize(
    ("index", "group"),
    [(lambda h: h // 2, 2), (lambda h: h, 1), (lambda h: 0, None), (lambda h: h // -2, None)],
)
def test_key_heads_are_read_by_the_number_of_query_heads_for_each(
    index: Callable[[Any], Any], group: int | None
) -> None:
    table = fg.Tensor("table", ("heads_kv", "seq_k"), "float32")
    spec = fg.AttentionSpec(lambda b, h, q, k: table[index(h), k] > 0, head_dim=16)
    found = signature_of(spec)
    assert ("heads" in found.divisible, found.group) == (group is not None, group or 0)


def test_masks_parts_of_large_expressions_and_layouts_count_too() -> None:
    def long(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for i in range(100):
            score = fg.tanh(score + i) + (BIAS[h, k] if i else h)
        return score

    spec = fg.AttentionSpec(score_mod=long, head_dim=16)
    assert signature_of(spec).divisible == ("batch",)
    spec = fg.AttentionSpec(lambda b, h, q, k: k <= q + b, head_dim=16)
    assert signature_of(spec).divisible == ("heads",)
    assert signature_of(in_whole(fg.AttentionSpec(head_dim=16))).divisible == BOTH
    layout = fg.BlockSparse(lambda b, h, i, j: i >= j, block_q=64, block_k=64)
    assert signature_of(fg.AttentionSpec(head_dim=16, block_sparse=layout)).divisible == ()
