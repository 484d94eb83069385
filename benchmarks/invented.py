"""Block layouts and masks with divisions that are in no paper and not in specs/.

They show whether what helps the specs is general. Each is written once, by operators that ints,
tensors of torch and flashgen's expressions have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flashgen as fg
from benchmarks.variants import Form, Mods

HEAD_DIM = 64


def comb(i: Any, j: Any) -> Any:
    """64 x 16: the block's own keys, and every ninth column, from a start that moves by rows."""
    return (j // 4 == i) | ((j + 5 * i) % 9 == 0)


def thinning(i: Any, j: Any) -> Any:
    """48 x 48, causal: all near blocks, fewer and fewer of those that are farther away."""
    far = i - j
    return (far >= 0) & ((far < 3) | ((far < 24) & (far % 4 == 0)) | (far % 24 == 0))


def crossing(i: Any, j: Any) -> Any:
    """16 x 128: both diagonals, and the first column."""
    row = i // 8
    return (row == j) | ((row + j) % 64 == 63) | (j < 1)


LAYOUTS: dict[str, tuple[Callable[[Any, Any], Any], int, int]] = {
    "comb": (comb, 64, 16),
    "thinning": (thinning, 48, 48),
    "crossing": (crossing, 16, 128),
}
"""A layout, and the queries and keys of its blocks."""


def rows_and_last(given: Mapping[str, Any]) -> Callable[..., Any]:
    """A page of positions sees itself and the last position of each earlier page."""
    page = given["page"]
    return lambda b, h, q, k: (q // page == k // page) | ((q >= k) & (k % page == page - 1))


def sum_of_both(given: Mapping[str, Any]) -> Callable[..., Any]:
    """Anti-diagonals: a function of q + k, not of q - k."""
    period, width = given["period"], given["width"]
    return lambda b, h, q, k: (q >= k) & ((q + k) % period < width)


def interleaved(given: Mapping[str, Any]) -> Callable[..., Any]:
    """Streams that are interleaved position by position, each causal, in groups of some rounds."""
    streams, rounds = given["streams"], given["rounds"]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        q_round, k_round = q // streams, k // streams
        same = q % streams == k % streams
        return (same & (q_round >= k_round)) | (q_round // rounds == k_round // rounds)

    return mask


DIVIDED: dict[str, tuple[Callable[[Mapping[str, Any]], Callable[..., Any]], dict[str, int]]] = {
    "rows_and_last": (rows_and_last, {"page": 200}),
    "sum_of_both": (sum_of_both, {"period": 96, "width": 24}),
    "interleaved": (interleaved, {"streams": 6, "rounds": 20}),
}
"""A mask, and the run-time numbers by which it divides."""


def specs() -> dict[str, fg.AttentionSpec]:
    """All of them as specs."""
    found = {}
    for name, (layout, block_q, block_k) in LAYOUTS.items():
        sparse = fg.BlockSparse(layout, block_q=block_q, block_k=block_k)
        found[name] = fg.AttentionSpec(block_sparse=sparse, head_dim=HEAD_DIM, name=name)
    for name, (mask, numbers) in DIVIDED.items():
        given = {each: fg.Scalar(each, "int32", minimum=1) for each in numbers}
        found[name] = fg.AttentionSpec(mask(given), head_dim=HEAD_DIM, name=name)
    return found


def _form_of_layout(name: str) -> Form:
    layout, block_q, block_k = LAYOUTS[name]

    def mods(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
        return Mods(mask=lambda b, h, q, k: layout(q // block_q, k // block_k))

    return Form(mods)


def _form_of_mask(name: str) -> Form:
    mask, numbers = DIVIDED[name]

    def mods(seq_q: int, seq_k: int, heads: int, given: Mapping[str, Any]) -> Mods:
        return Mods(mask=mask(given))

    return Form(mods, lambda seq_k: dict(numbers))


FORMS = {name: _form_of_layout(name) for name in LAYOUTS} | {
    name: _form_of_mask(name) for name in DIVIDED
}
"""All of them as FlexAttention takes them."""
