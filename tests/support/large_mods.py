"""Mods of any number of operations, of seven kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashgen as fg

BUCKETS = 64

table = fg.Tensor("table", (BUCKETS,), "float32", grad=True)


def sines(size: int) -> dict[str, Any]:
    """A deep chain of functions."""

    def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
        for _ in range(size):
            score = fg.sin(score)
        return score

    return {"score_mod": score_mod}


def squares(size: int) -> dict[str, Any]:
    """A polynomial in the form of repeated squares; one step has three operations."""

    def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
        score = score / 4  # large scores would overflow
        for _ in range(size // 3):
            score = (score * score + score) / 4
        return score

    return {"score_mod": score_mod}


def ladder(size: int) -> dict[str, Any]:
    """A deep choice, in which each alternative is computed from the one before."""

    def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
        x = score
        for i in range(size // 3):
            x = fg.where((q - k) % (i + 2) == 0, x * 0.75, x + 0.0625)
        return x

    return {"score_mod": score_mod}


def shared(size: int) -> dict[str, Any]:
    """A sum of products of one subexpression with itself and others."""

    def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
        a, total = fg.tanh(score / 8 + fg.sigmoid(score)), score
        for i in range(size // 4):
            total = total + a * fg.tanh(a * (i + 1) / 4) / size
        return total

    return {"score_mod": score_mod}


def reads(size: int) -> dict[str, Any]:
    """A wide sum of elements of a learned table."""

    def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
        for i in range(size // 5):
            score = score + table[(q * (i + 1) - k) % BUCKETS] / size
        return score

    return {"score_mod": score_mod}


def integers(size: int) -> dict[str, Any]:
    """A chain of integer arithmetic with minima and maxima, in the mask and in the score."""

    def mixed(q, k):  # type: ignore[no-untyped-def]
        x = q - k
        for i in range(size // 6):
            x = fg.minimum(fg.maximum(x * 3 + i, -q), k + i) % (64 + i)
        return x

    def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
        return score + mixed(q, k) / 64

    def mask_mod(b, h, q, k):  # type: ignore[no-untyped-def]
        return (mixed(q, k) % 3 != 0) | (q == k)

    return {"score_mod": score_mod, "mask_mod": mask_mod}


def terms(size: int) -> dict[str, Any]:
    """A wide disjunction, beside a causal mask."""

    def mask_mod(b, h, q, k):  # type: ignore[no-untyped-def]
        kept = q == k
        for i in range(size // 4):
            kept = kept | ((q - k) % (i + 7) == i // 3)
        return kept & (q >= k)

    return {"mask_mod": mask_mod}


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    made.__name__: made for made in (sines, squares, ladder, shared, reads, integers, terms)
}


def spec_of(kind: str, size: int, **options: Any) -> fg.AttentionSpec:
    """The spec of about ``size`` operations."""
    given = {"head_dim": 64, "dtype": "float16", "name": kind, **options}
    return fg.AttentionSpec(**KINDS[kind](size), **given)
