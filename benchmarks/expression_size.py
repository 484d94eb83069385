"""The time from a spec to its kernels against the number of operations of its mods.

    python -m benchmarks.expression_size [--kind KIND] [--cubin] [--arch ARCH] [SIZE ...]

One line for each kind of expression and size: CPU seconds to the sources of all kernels, forward
and backward, and with ``--cubin`` to their machine code, without the imports of a first call. Both
are proportional to the number of operations.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import flashgen as fg
from flashgen import pipeline

SIZES = (125, 250, 500, 1000)
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


def seconds_to_source(kind: str, size: int, arch: str) -> float:
    """CPU seconds to the sources of all kernels."""
    start = time.process_time()
    emitted = fg.emit(spec_of(kind, size), arch)
    assert emitted.backward
    return time.process_time() - start


def seconds_to_cubin(kind: str, size: int, arch: str) -> float:
    """CPU seconds to the machine code of all kernels, their sources included."""
    start = time.process_time()
    spec = spec_of(kind, size)
    pipeline.build(spec, arch)
    pipeline.build_backward(spec, arch)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=list(SIZES))
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--cubin", action="store_true")
    given = parser.parse_args()
    seconds_to_source("sines", 1, given.arch)  # imports, and templates
    for kind in given.kind or KINDS:
        for size in given.sizes:
            seconds = seconds_to_source(kind, size, given.arch)
            line = f"{kind:9} {size:6,} operations  .cu {seconds:6.2f} s"
            if given.cubin:
                line += f"  cubin {seconds_to_cubin(kind, size, given.arch):6.2f} s"
            print(line, flush=True)


if __name__ == "__main__":
    main()
